//! Sums of received contributions and the own one: those of a step, tile by tile, and those that
//! a chain of steps forms.

use super::super::state::{Chain, Scratch};
use super::{Into, Note, Sources, Target, Work};
use crate::codec::feedback::Role;
use crate::schedule::Own;

impl Work<'_, '_> {
    /// Any of the steps that form a sum.
    pub(super) fn recv_reduce(
        &mut self,
        sources: &Sources<'_>,
        mut target: Target<'_>,
        chain: &mut Chain,
    ) {
        let (step, bytes) = (self.step, self.chunk.given);
        let completes = !chain.complete && (!step.more || !step.send_to.is_empty());
        let divides = completes && self.averaged && step.op.is_final();
        if sources.len == 0 && !chain.started && self.gives.is_none() && !step.more {
            let exact = matches!(step.own, Own::Exact { .. });
            if exact && !self.premultiplied && !divides {
                // The source of an exact broadcast or allgather: nothing to compute.
                self.send(target);
                if step.writes() {
                    self.copy();
                }
                return;
            }
        }
        if self.two_exact_terms(sources, divides, chain) {
            self.pair(sources.payloads[0], target);
            return;
        }
        for (at, n) in self.tiles() {
            self.sum(sources, at, n, chain.started);
            if divides {
                self.arithmetic
                    .own
                    .finish(&mut self.scratch.acc, n, self.nranks);
            }
            let Some(end) = &mut target else {
                if step.writes() {
                    self.store(at, n);
                }
                continue;
            };
            let wire = &mut end.slot()[..bytes];
            match self.gives {
                None => {
                    let raw = self.raw(at, n);
                    self.arithmetic
                        .own
                        .store(&self.scratch.acc, &mut wire[raw.clone()]);
                    if step.writes() {
                        let to = (self.chunk.output.unwrap_or(0) + at) * self.size();
                        self.buffers.write_output(to, &wire[raw]);
                    }
                }
                Some(codec) => {
                    let note = match (sources.len == 0 && !chain.started, completes) {
                        (true, _) => self.note_input(),
                        (false, true) => Note::Sum,
                        // An earlier step of the chain sent, and noted, the same.
                        (false, false) => Note::Nothing,
                    };
                    self.encode(codec, at, n, wire, note);
                    if step.writes() {
                        codec.decode(self.span(at), wire, self.scratch.acc.f32_mut(n));
                        self.store(at, n);
                    }
                }
            }
        }
        chain.started = true;
        chain.complete |= completes;
    }

    /// Whether the sum is of one received and the own contribution, as they lie in memory.
    fn two_exact_terms(&self, sources: &Sources<'_>, divides: bool, chain: &Chain) -> bool {
        let alone = !self.step.more && !chain.started;
        let own = self.step.own.after().is_some();
        let raw = self.takes.is_none() && self.gives.is_none();
        alone && own && sources.len == 1 && raw && !self.premultiplied && !divides
    }

    /// The commonest sum in one pass over memory instead of three.
    fn pair(&mut self, payload: &[u8], target: Target<'_>) {
        let (size, bytes) = (self.size(), self.chunk.taken);
        let reducer = &self.arithmetic.received;
        let from = self.chunk.input.unwrap_or(0) * size;
        let to = self.chunk.output.unwrap_or(0) * size;
        let payload = &payload[..bytes];
        let Some(end) = target else {
            self.buffers
                .lend(from, to, bytes, |input, output| match input {
                    Some(input) => reducer.pair(input, payload, output),
                    None => reducer.assign(output, payload),
                });
            return;
        };
        for (at, n) in self.tiles() {
            let raw = self.raw(at, n);
            let wire = &mut end.slot()[raw.clone()];
            self.buffers
                .lend_input(from + raw.start, raw.len(), |input| {
                    reducer.pair(input, &payload[raw.clone()], wire);
                });
            if self.step.writes() {
                self.buffers.write_output(to + raw.start, wire);
            }
        }
    }

    /// Forms the sum of a tile: the terms one by one, in the schedule's order.
    fn sum(&mut self, sources: &Sources<'_>, at: usize, n: usize, mut started: bool) {
        let own_at = self.step.own.after();
        for term in 0..=sources.len {
            if own_at == Some(term) {
                self.add_own(at, n, started, sources.len);
                started = true;
            }
            let Some(&payload) = sources.payloads[..sources.len].get(term) else {
                continue;
            };
            let (span, raw) = (self.span(at), self.raw(at, n));
            let acc = &mut self.scratch.acc;
            match (self.takes, started) {
                (None, true) => self.arithmetic.own.combine(&payload[raw], acc),
                (None, false) => self.arithmetic.received.load(&payload[raw], acc),
                (Some(codec), true) => codec.decode_reduce(span, payload, acc.f32_mut(n)),
                (Some(codec), false) => codec.decode(span, payload, acc.f32_mut(n)),
            }
            started = true;
        }
    }

    fn add_own(&mut self, at: usize, n: usize, started: bool, received: usize) {
        let into = if started { Into::Own } else { Into::Sum };
        self.load(at, n, into);
        let coded = matches!(self.step.own, Own::Coded { .. });
        if let (true, Some(codec)) = (coded, self.takes) {
            // The Send of this chunk took note of it already, and drew the same numbers.
            let span = self.span(at).drawing(self.randoms[0]);
            let Scratch { acc, own, wire, .. } = &mut *self.scratch;
            let wire = &mut wire[..self.chunk.taken];
            if let Some(residuals) = &self.residuals {
                // The Send kept what it dropped; here are the same values again.
                let values = if started { &mut *own } else { &mut *acc };
                residuals.add(Role::Worker, self.chunk.number, at, values.f32_mut(n));
            }
            if started {
                codec.encode(span, own.f32(n), None, wire, None);
                codec.decode_reduce(span, wire, acc.f32_mut(n));
            } else {
                codec.encode(span, acc.f32(n), None, wire, None);
                codec.decode(span, wire, acc.f32_mut(n));
            }
            return;
        }
        if coded && self.premultiplied {
            // Peers see the product rounded to the element type.
            let bytes_of_elements = n * self.size();
            let Scratch {
                acc, own, bytes, ..
            } = &mut *self.scratch;
            let tile = if started { own } else { acc };
            let bytes = &mut bytes[..bytes_of_elements];
            self.arithmetic.own.store(tile, bytes);
            self.arithmetic.received.load(bytes, tile);
        }
        if received > 0 || self.step.more {
            self.observe(n, into);
        }
        if started {
            let size = self.plan.dtype.accumulator().size();
            let Scratch { acc, own, .. } = &mut *self.scratch;
            self.arithmetic
                .accumulators
                .combine(own.bytes(n * size), acc);
        }
    }
}
