//! The nine data movements of a schedule. Each works tile by tile: a tile of accumulators stays in the
//! first-level cache while contributions are added, encoded and stored. So each byte of a chunk is read and
//! written once, however many contributions a sum has.

mod sum;
mod tile;

use super::output_writes::OutputWrites;
use super::state::{Arithmetic, Chain, Chunk, InputStats, Scratch};
use crate::codec::feedback::Residuals;
use crate::codec::{Codec, RoundingRandom, TensorScales};
use crate::cpu::{Isa, Tile};
use crate::mem::UserBuffers;
use crate::plan::Plan;
use crate::schedule::{MAX_FAN, Op, Step};
use crate::transport::{Header, Links, RecvEnd, SendEnd};
use crate::types::ReduceOp;
use sum::SumPath;
use tile::Operand;

/// A step of a call, with all values that its operations on tiles need.
pub(super) struct StepWork<'r, 'b> {
    pub plan: &'r Plan,
    pub step: &'r Step,
    /// Index of the step in its schedule.
    pub index: usize,
    pub op: ReduceOp,
    pub arithmetic: &'r Arithmetic,
    /// Codec of the messages that the step receives; `None` if they are raw.
    pub takes: Option<&'r dyn Codec>,
    /// Codec of the messages that the step sends; `None` if they are raw.
    pub gives: Option<&'r dyn Codec>,
    pub buffers: &'r mut UserBuffers<'b>,
    pub writes: &'r mut OutputWrites,
    pub stats: &'r mut InputStats,
    pub scratch: &'r mut Scratch,
    /// Scales of the step's codec that are kept from call to call; `None` if the codec keeps none.
    pub scales: Option<&'r mut TensorScales>,
    /// Residuals of error feedback; `None` for a call without error feedback.
    pub residuals: Option<&'r mut Residuals>,
    pub chunk: &'r Chunk,
    /// Random numbers: first for encodes of this rank's contribution, then for encodes of sums.
    pub randoms: [RoundingRandom; 2],
    /// Number of elements of a tile.
    pub tile: usize,
    pub nranks: usize,
    pub isa: Isa,
}

/// How a step of a call without a codec runs when the call repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepPath {
    /// Sends `bytes` of the input from byte `from` to each receiver.
    SendInput { from: usize, bytes: usize },
    /// Adds the message, which has `bytes`, and the input from byte `from`, and stores the sum in the output at `to`.
    AddPair {
        from: usize,
        to: usize,
        bytes: usize,
    },
    /// Stores the message, which has `bytes`, in the output at byte `to`.
    StoreMessage { to: usize, bytes: usize },
    /// Any other step, by [`StepWork`].
    General,
}

impl StepPath {
    /// Returns the path of a step that works on `chunk`. `chained` is true if the step before it is continued by it.
    pub(super) fn of(
        plan: &Plan,
        step: &Step,
        chunk: &Chunk,
        (op, arithmetic, chained): (ReduceOp, &Arithmetic, bool),
    ) -> StepPath {
        let size = plan.dtype.size();
        let from = chunk.input.unwrap_or(0) * size;
        let to = chunk.output.unwrap_or(0) * size;
        let chained = chained || step.more;
        let divides = op == ReduceOp::Avg && step.op.is_final();
        match step.op {
            Op::Send if !arithmetic.own.scales() => StepPath::SendInput {
                from,
                bytes: chunk.given,
            },
            Op::Recv if !chained => StepPath::StoreMessage {
                to,
                bytes: chunk.taken,
            },
            Op::RecvReduceCopy
                if SumPath::of(
                    step,
                    arithmetic,
                    step.recv_from.len(),
                    (chained, divides),
                    (false, false),
                ) == SumPath::AddPair =>
            {
                StepPath::AddPair {
                    from,
                    to,
                    bytes: chunk.taken,
                }
            }
            _ => StepPath::General,
        }
    }
}

/// Memory in which the step's message is formed, if the step sends.
type Target<'l> = Option<&'l mut [u8]>;

impl StepWork<'_, '_> {
    /// Executes the step on `channel`. Its messages have arrived. With `header`, its slots are free, and the
    /// step fills and publishes them. Without `header`, the step stores its result in the output and sends
    /// nothing. Returns the number of payload bytes that it sent.
    pub(super) fn execute(
        mut self,
        links: &mut Links,
        channel: usize,
        chain: &mut Chain,
        header: Option<Header>,
    ) -> u64 {
        let (step, base) = (self.step, channel * links.nranks);
        self.writes.begin_step();
        let full_chunk = self.plan.geometry.chunk();
        let chained = chain.enter(step, self.scratch, full_chunk);
        if chained || self.scales.is_some() {
            self.tile = self.chunk.elements.max(1);
        }
        let sources = Sources::new(&links.recvs, base, step);
        let sends = &mut links.sends;
        let given = self.chunk.given;
        match header {
            // The whole message exists already, so no slot of one receiver is read to fill those of others.
            Some(mut header) if self.sends_input(&sources, chain) => {
                let from = self.chunk.input.unwrap_or(0) * self.size();
                let payload = self.buffers.input(from, given);
                put(sends, base, step, (&mut header, payload), links.checks_data);
                if step.writes() {
                    self.copy();
                }
            }
            Some(mut header) if step.op == Op::RecvCopySend => {
                let payload = &sources.payloads[0][..given];
                put(sends, base, step, (&mut header, payload), links.checks_data);
                if step.writes() {
                    self.recv(&sources);
                }
            }
            Some(mut header) => {
                let first = step.send_to.first();
                let target = first.and_then(|&to| sends[base + to as usize].as_deref_mut());
                let stage = &mut self.scratch.stage;
                let stages = target.as_ref().is_some_and(|end| end.prefers_put(given));
                if stages && given <= stage.capacity() {
                    let mut stage = std::mem::replace(stage, Tile::new(0));
                    self.apply(&sources, Some(stage.bytes_mut(given)), chain);
                    let payload = stage.bytes(given);
                    put(sends, base, step, (&mut header, payload), links.checks_data);
                    self.scratch.stage = stage;
                } else {
                    let target = target.map(|end| &mut end.slot()[..given]);
                    self.apply(&sources, target, chain);
                    publish(sends, base, step, header, links.checks_data);
                }
            }
            None => self.apply(&sources, None, chain),
        }
        self.writes.end_step();
        chain.leave(step, chained, self.scratch);
        // Every step of a forwarding chain sends the one received message, so only the last step
        // frees its slot.
        if !(step.more && step.op == Op::RecvCopySend) {
            for &from in step.recv_from.iter() {
                if let Some(end) = &mut links.recvs[base + from as usize] {
                    end.release();
                }
            }
        }
        header.map_or(0, |header| {
            u64::from(header.bytes) * step.send_to.len() as u64
        })
    }

    /// Applies the step's operation to its chunk.
    fn apply(&mut self, sources: &Sources<'_>, target: Target<'_>, chain: &mut Chain) {
        match self.step.op {
            Op::Send => self.send(target),
            Op::Recv => self.recv(sources),
            Op::Copy => self.copy(),
            Op::Reduce => self.reduce_into_output(),
            // Without sends; see `execute`.
            Op::RecvCopySend => self.recv(sources),
            Op::RecvReduceCopy
            | Op::RecvReduceSend
            | Op::RecvReduceCopySend
            | Op::RecvReduceFinishSend => {
                self.recv_reduce(sources, target, chain);
            }
        }
    }

    /// Returns whether the step's message is the input's chunk as it is.
    fn sends_input(&self, sources: &Sources<'_>, chain: &Chain) -> bool {
        let is_input = match self.step.op {
            Op::Send => true,
            op => op.sums() && self.sum_path(sources, chain) == SumPath::CopyInput,
        };
        // In a hierarchical call, a raw send inside a host still collects the input's statistics if there is
        // a codec between hosts, and vice versa.
        let observes = self.notes_input() && self.stats.wanted;
        is_input && self.gives.is_none() && !self.premultiplied() && !observes
    }

    /// Sends the input's chunk.
    fn send(&mut self, target: Target<'_>) {
        let Some(wire) = target else { return };
        for (at, n) in self.tiles() {
            self.load(at, n, Operand::Sum);
            match self.gives {
                None => {
                    self.arithmetic
                        .own
                        .store(&self.scratch.acc, &mut wire[self.raw(at, n)]);
                    self.observe(n, Operand::Sum);
                }
                Some(codec) => self.encode(codec, at, n, wire, self.note_input()),
            }
        }
    }

    /// Stores the received message in the output.
    fn recv(&mut self, sources: &Sources<'_>) {
        let Some(payload) = sources.iter().next() else {
            return;
        };
        match self.takes {
            None => {
                let to = self.chunk.output.unwrap_or(0) * self.size();
                let payload = &payload[..self.chunk.taken];
                self.writes.write(self.buffers, to, payload);
            }
            Some(codec) => {
                for (at, n) in self.tiles() {
                    codec.decode(self.span(at), payload, self.scratch.acc.f32_mut(n));
                    self.store(at, n);
                }
            }
        }
    }

    /// Copies the input's chunk to the output.
    fn copy(&mut self) {
        if self.notes_input() && self.stats.wanted {
            for (at, n) in self.tiles() {
                self.load(at, n, Operand::Sum);
                self.observe(n, Operand::Sum);
            }
        }
        let size = self.size();
        let from = self.chunk.input.unwrap_or(0) * size;
        let to = self.chunk.output.unwrap_or(0) * size;
        let bytes = self.chunk.elements * size;
        self.writes.copy(self.buffers, from, to, bytes);
    }

    /// Adds the input's chunk to the output.
    fn reduce_into_output(&mut self) {
        let size = self.size();
        for (at, n) in self.tiles() {
            self.load(at, n, Operand::Sum);
            let from = (self.chunk.output.unwrap_or(0) + at) * size;
            self.buffers
                .read_output(from, &mut self.scratch.bytes[..n * size]);
            self.arithmetic
                .own
                .combine(&self.scratch.bytes[..n * size], &mut self.scratch.acc);
            self.store(at, n);
        }
    }
}

/// Sends a payload to all receivers of a step, whose slots are free. With `checks_data` the header gets its CRC-32C.
fn put(
    sends: &mut [Option<Box<dyn SendEnd>>],
    base: usize,
    step: &Step,
    (header, payload): (&mut Header, &[u8]),
    checks_data: bool,
) {
    if checks_data {
        header.crc = crc32c::crc32c(payload);
    }
    for &to in step.send_to.iter() {
        if let Some(end) = &mut sends[base + to as usize] {
            end.put(header, payload);
        }
    }
}

/// Sends the first receiver's message, which was formed in its slot, to the other receivers, and publishes it. With `checks_data`
/// the header gets the CRC-32C of the payload.
fn publish(
    sends: &mut [Option<Box<dyn SendEnd>>],
    base: usize,
    step: &Step,
    mut header: Header,
    checks_data: bool,
) {
    let bytes = header.bytes as usize;
    let Some((&first, others)) = step.send_to.split_first() else {
        return;
    };
    let first = base + first as usize;
    if let (true, Some(end)) = (checks_data, &sends[first]) {
        header.crc = crc32c::crc32c(&end.written()[..bytes]);
    }
    for &other in others {
        if let Ok([Some(from), Some(to)]) = sends.get_disjoint_mut([first, base + other as usize]) {
            to.put(&header, &from.written()[..bytes]);
        }
    }
    if let Some(end) = &mut sends[first] {
        end.publish(header);
    }
}

/// Payloads of a step's messages, in the order in which they are added.
struct Sources<'l> {
    payloads: [&'l [u8]; MAX_FAN],
    len: usize,
}

impl<'l> Sources<'l> {
    fn new(recvs: &'l [Option<Box<dyn RecvEnd>>], base: usize, step: &Step) -> Sources<'l> {
        let mut sources = Sources {
            payloads: [&[]; MAX_FAN],
            len: 0,
        };
        for &from in step.recv_from.iter() {
            if let Some(end) = &recvs[base + from as usize] {
                sources.payloads[sources.len] = end.payload();
                sources.len += 1;
            }
        }
        sources
    }

    fn iter(&self) -> impl Iterator<Item = &'l [u8]> {
        self.payloads[..self.len].iter().copied()
    }
}
