//! Steps that form a sum: received contributions and this rank's own.
//!
//! A sum is complete in the first step of its chain that sends, or in the only step. The step then works on
//! each tile of the chunk:
//!
//! | sources | own | complete | codec | work |
//! | --- | --- | --- | --- | --- |
//! | 0 | exact | yes | raw | [`SumPath::CopyInput`]: the input's bytes, no arithmetic |
//! | 1 | yes | yes | raw | [`SumPath::AddPair`]: message + input in one pass over memory |
//! | any | any | yes | raw | sum, divide an average, store in slot and output |
//! | any | any | yes | codec | sum, divide, encode into the slot, decode the slot into the output |
//! | any | any | no | any | add to the open sum; the chain's next step continues it |
//! | 0 | absent | earlier | any | store or encode the finished sum once more, for further peers |
//!
//! "Raw" means no codec on the side that the row uses. A factor (pre-multiplied sum) or a division excludes
//! the first two rows. The output gets the decoded slot, so that all ranks end with identical bits.

use super::super::state::{Arithmetic, Chain, Scratch};
use super::tile::{Operand, StatsNote};
use super::{Sources, StepWork, Target};
use crate::codec::Codec;
use crate::codec::feedback::{self, Role};
use crate::schedule::{Own, Step};
use crate::types::ReduceOp;

/// How a step forms its sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SumPath {
    /// Copies the input, which is the only term. The rank that sends a raw broadcast, or its block of a raw
    /// allgather, does this.
    CopyInput,
    /// Adds one message and the input, both raw. This is the most frequent sum.
    AddPair,
    /// Any other sum, formed tile by tile.
    Tiles,
}

impl SumPath {
    /// Returns the path of a step that receives `received` messages. `chained` is true if other steps add to its sum,
    /// and `divides` if it divides an average. `takes` and `gives` tell whether it receives and sends encoded messages.
    pub(super) fn of(
        step: &Step,
        arithmetic: &Arithmetic,
        received: usize,
        (chained, divides): (bool, bool),
        (takes, gives): (bool, bool),
    ) -> SumPath {
        let own = &arithmetic.own;
        if chained || gives || own.scales() || own.limits() || divides {
            return SumPath::Tiles;
        }
        let has_own = step.own.after().is_some();
        match received {
            0 if matches!(step.own, Own::Exact { .. }) => SumPath::CopyInput,
            1 if has_own && !takes => SumPath::AddPair,
            _ => SumPath::Tiles,
        }
    }
}

impl StepWork<'_, '_> {
    /// Returns whether this step completes its sum.
    fn completes(&self, chain: &Chain) -> bool {
        !chain.complete && (!self.step.more || !self.step.send_to.is_empty())
    }

    /// Returns whether this step divides its sum, which is an average's.
    fn divides(&self, chain: &Chain) -> bool {
        self.completes(chain) && self.op == ReduceOp::Avg && self.step.op.is_final()
    }

    /// Returns how this step forms its sum.
    pub(super) fn sum_path(&self, sources: &Sources<'_>, chain: &Chain) -> SumPath {
        SumPath::of(
            self.step,
            self.arithmetic,
            sources.len,
            (self.step.more || chain.started, self.divides(chain)),
            (self.takes.is_some(), self.gives.is_some()),
        )
    }

    /// Forms the step's sum, sends it to the step's peers, and stores it if the step writes the output.
    pub(super) fn recv_reduce(
        &mut self,
        sources: &Sources<'_>,
        mut target: Target<'_>,
        chain: &mut Chain,
    ) {
        let step = self.step;
        let completes = self.completes(chain);
        let divides = self.divides(chain);
        match self.sum_path(sources, chain) {
            SumPath::CopyInput => {
                self.send(target);
                if step.writes() {
                    self.copy();
                }
                return;
            }
            SumPath::AddPair => return self.add_pair(sources.payloads[0], target),
            SumPath::Tiles => {}
        }
        let note = match (sources.len == 0 && !chain.started, completes) {
            (true, _) => self.note_input(),
            (false, true) => StatsNote::Sum,
            // An earlier step of the chain has sent this sum, and has added its statistics.
            (false, false) => StatsNote::Nothing,
        };
        for (at, n) in self.tiles() {
            self.sum(sources, at, n, chain.started);
            if divides {
                let own = &self.arithmetic.own;
                own.finish(&mut self.scratch.acc, n, self.nranks);
            }
            match (&mut target, self.gives) {
                (None, _) if step.writes() => self.store(at, n),
                (None, _) => {}
                (Some(wire), None) => {
                    // The division has limited a final sum; here a partial sum is limited.
                    self.arithmetic.own.limit(&mut self.scratch.acc, n);
                    self.emit_raw(at, n, wire);
                }
                (Some(wire), Some(codec)) => {
                    self.emit_coded(codec, at, n, wire, note);
                }
            }
        }
        chain.started = true;
        chain.complete |= completes;
    }

    /// Adds one raw message and the input in one pass over memory instead of three.
    fn add_pair(&mut self, payload: &[u8], target: Target<'_>) {
        let (size, bytes) = (self.size(), self.chunk.taken);
        let reducer = &self.arithmetic.received;
        let from = self.chunk.input.unwrap_or(0) * size;
        let to = self.chunk.output.unwrap_or(0) * size;
        let payload = &payload[..bytes];
        let Some(wire) = target else {
            return self
                .writes
                .add(self.buffers, (from, to), (payload, reducer));
        };
        for (at, n) in self.tiles() {
            let raw = self.raw(at, n);
            let wire = &mut wire[raw.clone()];
            self.buffers
                .lend_input(from + raw.start, raw.len(), |input| {
                    reducer.pair(input, &payload[raw.clone()], wire);
                });
            if self.step.writes() {
                self.writes.write(self.buffers, to + raw.start, wire);
            }
        }
    }

    /// Stores the sum, rounded to the element type, in a slot. Also stores it in the output if the
    /// step writes the output.
    fn emit_raw(&mut self, at: usize, n: usize, wire: &mut [u8]) {
        let raw = self.raw(at, n);
        let own = &self.arithmetic.own;
        own.store(&self.scratch.acc, &mut wire[raw.clone()]);
        if self.step.writes() {
            let to = (self.chunk.output.unwrap_or(0) + at) * self.size();
            self.writes.write(self.buffers, to, &wire[raw]);
        }
    }

    /// Encodes the sum into a slot, and decodes the slot into the output if the step writes the
    /// output.
    fn emit_coded(
        &mut self,
        codec: &dyn Codec,
        at: usize,
        n: usize,
        wire: &mut [u8],
        note: StatsNote,
    ) {
        self.encode(codec, at, n, wire, note);
        if self.step.writes() {
            codec.decode(self.span(at), wire, self.scratch.acc.f32_mut(n));
            self.store(at, n);
        }
    }

    /// Adds the terms of a tile one by one, in the schedule's order.
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

    /// Adds this rank's contribution: either as it is, or as its peers decode it.
    fn add_own(&mut self, at: usize, n: usize, started: bool, received: usize) {
        let operand = if started { Operand::Own } else { Operand::Sum };
        self.load(at, n, operand);
        let coded = matches!(self.step.own, Own::Coded { .. });
        if let (true, Some(codec)) = (coded, self.takes) {
            return self.add_own_coded(codec, at, n, started);
        }
        if coded && self.premultiplied() {
            // Peers receive the product of input and factor rounded to the element type, so it is
            // rounded here too.
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
            self.observe(n, operand);
        }
        if started {
            let size = self.plan.dtype.accumulator().size();
            let Scratch { acc, own, .. } = &mut *self.scratch;
            self.arithmetic
                .accumulators
                .combine(own.bytes(n * size), acc);
        }
    }

    /// Adds this rank's loaded contribution, as decoded from its encoding, so that the sum has the values
    /// that peers receive. The send step of this chunk has already encoded equal values with equal random
    /// numbers, and has added them to the statistics.
    fn add_own_coded(&mut self, codec: &dyn Codec, at: usize, n: usize, started: bool) {
        let span = self.span(at).drawing(self.randoms[0]);
        let Scratch { acc, own, wire, .. } = &mut *self.scratch;
        let wire = &mut wire[..self.chunk.taken];
        if let Some(residuals) = &self.residuals {
            // The send step updates the residuals, so this encode leaves them unchanged.
            let values = if started { &mut *own } else { &mut *acc };
            residuals.add(Role::Worker, self.chunk.number, at, values.f32_mut(n));
        }
        let values = if started { &*own } else { &*acc };
        codec.encode(span, values.f32(n), None, wire, None);
        if self.residuals.is_some() {
            feedback::damp(codec, span, n, wire);
        }
        if started {
            codec.decode_reduce(span, wire, acc.f32_mut(n));
        } else {
            codec.decode(span, wire, acc.f32_mut(n));
        }
    }
}
