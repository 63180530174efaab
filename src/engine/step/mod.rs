//! The eight data movements, tile by tile: a tile of accumulators stays in the first-level cache
//! while contributions are added, encoded and stored, so that each byte of a chunk is touched
//! once on each side, whatever the number of contributions.

mod sum;

use super::host::HostEngine;
use super::state::{self, Arithmetic, Chain, Chunk, Scratch, Stats, TILE};
use crate::codec::feedback::{Residuals, Role};
use crate::codec::{self, Codec, EncodeStats, Random, Span, TensorScales};
use crate::cpu::{Isa, Tile};
use crate::mem::UserBuffers;
use crate::plan::{Plan, Request};
use crate::reduce;
use crate::schedule::{MAX_FAN, Op, Own, Step};
use crate::transport::{Header, RecvEnd, SendEnd};
use crate::types::{ReduceOp, SIGNATURE_WORDS, ScaleRule};

/// One call's side of a step.
pub(super) struct Job<'r, 'b> {
    pub plan: &'r Plan,
    pub request: &'r Request,
    pub arithmetic: &'r Arithmetic,
    pub buffers: &'r mut UserBuffers<'b>,
    pub stats: &'r mut Stats,
    pub chain: &'r mut Chain,
    pub scales: Option<&'r mut TensorScales>,
    pub residuals: Option<&'r mut Residuals>,
    pub signature: [u64; SIGNATURE_WORDS],
    pub channel: usize,
    /// Index of the step in its schedule.
    pub step: usize,
    pub chunk: &'r Chunk,
    /// Whether the step only brings about what is to be sent, in the output, and sends nothing.
    pub sends_later: bool,
}

/// Everything that the tiles of a step are worked on with.
struct Work<'r, 'b> {
    plan: &'r Plan,
    arithmetic: &'r Arithmetic,
    /// Of the messages that the step takes.
    takes: Option<&'r dyn Codec>,
    /// Of those that it gives.
    gives: Option<&'r dyn Codec>,
    buffers: &'r mut UserBuffers<'b>,
    stats: &'r mut Stats,
    scratch: &'r mut Scratch,
    scales: Option<&'r mut TensorScales>,
    /// Of error feedback, if the call has it.
    residuals: Option<&'r mut Residuals>,
    chunk: &'r Chunk,
    /// What encoding this rank's contribution draws, and what encoding a sum draws.
    randoms: [Random; 2],
    step: &'r Step,
    tile: usize,
    nranks: usize,
    isa: Isa,
    /// Input elements are not what is sent and added as they are.
    premultiplied: bool,
    /// The sum is divided at the end.
    averaged: bool,
    /// This step is the one that takes note of its chunk of the input.
    notes_input: bool,
}

/// Runs one step whose messages are there and whose slots are free. Returns the payload bytes
/// that it sent.
pub(super) fn execute(engine: &mut HostEngine, job: Job<'_, '_>) -> u64 {
    let Job {
        plan, chunk, chain, ..
    } = job;
    let step = &plan.schedule.steps[job.step];
    let spec = plan.spec_of(step.gives);
    let randoms = state::randoms(spec, job.chunk, job.signature[3], engine.links.rank);
    let nranks = engine.links.nranks;
    let base = job.channel * nranks;
    let chained = step.op.sums() && (step.more || chain.acc.is_some());
    if chained {
        // The open sum takes the place of the scratch accumulators for this step.
        let tile = chain.acc.take().or_else(|| chain.spare.take());
        let tile = tile.unwrap_or_else(|| Tile::new(plan.geometry.chunk()));
        chain.acc = Some(std::mem::replace(&mut engine.scratch.acc, tile));
    }
    // Kept are the scales of one codec: settings see to it that the other has none.
    let tensor = matches!(spec.scale, ScaleRule::Tensor { .. });
    let scales = job.scales.filter(|_| tensor);
    let whole = chained || scales.is_some();
    let mut work = Work {
        plan,
        arithmetic: job.arithmetic,
        takes: plan.codec_of(step.takes),
        gives: plan.codec_of(step.gives),
        buffers: job.buffers,
        stats: job.stats,
        scratch: &mut engine.scratch,
        tile: if whole { chunk.elements.max(1) } else { TILE },
        scales,
        residuals: job.residuals,
        chunk,
        randoms,
        step,
        nranks,
        isa: engine.isa,
        premultiplied: matches!(job.request.op, ReduceOp::PreMulSum(_)),
        averaged: job.request.op == ReduceOp::Avg,
        notes_input: plan.notes_input[job.step],
    };
    let sources = Sources::of(&engine.links.recvs, base, step);
    let target = match step.send_to.first() {
        Some(&to) if !job.sends_later => engine.links.sends[base + to as usize].as_deref_mut(),
        _ => None,
    };
    match step.op {
        Op::Send => work.send(target),
        Op::Recv => work.recv(&sources),
        Op::Copy => work.copy(),
        Op::Reduce => work.reduce_into_output(),
        Op::RecvCopySend => {
            work.forward(&sources, target);
            if step.writes() {
                work.recv(&sources);
            }
        }
        Op::RecvReduceCopy | Op::RecvReduceSend | Op::RecvReduceCopySend => {
            work.recv_reduce(&sources, target, chain);
        }
    }
    let open = chain
        .acc
        .take()
        .map(|tile| std::mem::replace(&mut engine.scratch.acc, tile));
    *chain = match step.more {
        true => Chain {
            acc: open,
            ..std::mem::take(chain)
        },
        false => Chain {
            spare: open.or_else(|| chain.spare.take()),
            ..Chain::default()
        },
    };
    let header = Header {
        bytes: chunk.given as u32,
        signature: job.signature,
    };
    if !job.sends_later {
        publish(&mut engine.links.sends, base, step, header);
    }
    // A chain that forwards one message holds it until its last step.
    if !(step.more && step.op == Op::RecvCopySend) {
        for &from in step.recv_from.iter() {
            if let Some(end) = &mut engine.links.recvs[base + from as usize] {
                end.release();
            }
        }
    }
    match job.sends_later {
        true => 0,
        false => chunk.given as u64 * step.send_to.len() as u64,
    }
}

/// Copies the first target's encoding to the other targets and hands all of them over.
fn publish(sends: &mut [Option<Box<dyn SendEnd>>], base: usize, step: &Step, header: Header) {
    let bytes = header.bytes as usize;
    let Some((&first, others)) = step.send_to.split_first() else {
        return;
    };
    let first = base + first as usize;
    for &other in others {
        if let Ok([Some(from), Some(to)]) = sends.get_disjoint_mut([first, base + other as usize]) {
            to.slot()[..bytes].copy_from_slice(&from.written()[..bytes]);
            to.publish(header);
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
    fn of(recvs: &'l [Option<Box<dyn RecvEnd>>], base: usize, step: &Step) -> Sources<'l> {
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

/// What the report learns from an encode.
#[derive(Clone, Copy)]
enum Note {
    /// All about this rank's input.
    Input,
    /// That a sum saturated.
    Sum,
    /// Nothing: it is known.
    Nothing,
}

/// Which accumulators.
#[derive(Clone, Copy)]
enum Into {
    Sum,
    Own,
}

/// The target's slot, if the step sends.
type Target<'l> = Option<&'l mut (dyn SendEnd + 'static)>;

impl Work<'_, '_> {
    /// Tiles of the chunk: first element and length.
    fn tiles(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (elements, tile) = (self.chunk.elements, self.tile);
        (0..elements)
            .step_by(tile)
            .map(move |at| (at, tile.min(elements - at)))
    }

    fn size(&self) -> usize {
        self.plan.dtype.size()
    }

    /// Where a tile lies in its chunk. A step without sources has this rank's contribution, which
    /// several may send to some peers each; the others that encode have a sum.
    fn span(&self, at: usize) -> Span {
        let step = self.step;
        let source = step.recv_from.is_empty() && step.own == Own::FIRST;
        let random = self.randoms[usize::from(step.op != Op::Send && !source)];
        Span::new(self.chunk.elements, at).drawing(random)
    }

    /// Wire bytes of a raw tile.
    fn raw(&self, at: usize, n: usize) -> std::ops::Range<usize> {
        at * self.size()..(at + n) * self.size()
    }

    /// The rank's own contribution to `into`: input, widened, times its factor.
    fn load(&mut self, at: usize, n: usize, into: Into) {
        let size = self.size();
        let from = (self.chunk.input.unwrap_or(0) + at) * size;
        let Scratch {
            acc, own, bytes, ..
        } = &mut *self.scratch;
        let tile = match into {
            Into::Sum => acc,
            Into::Own => own,
        };
        if self.plan.dtype.accumulator() == self.plan.dtype && !self.premultiplied {
            self.buffers.read_input(from, tile.bytes_mut(n * size));
        } else {
            self.buffers.read_input(from, &mut bytes[..n * size]);
            self.arithmetic.own.load(&bytes[..n * size], tile);
        }
    }

    /// output = acc, rounded.
    fn store(&mut self, at: usize, n: usize) {
        let size = self.size();
        let to = (self.chunk.output.unwrap_or(0) + at) * size;
        if self.plan.dtype.accumulator() == self.plan.dtype {
            self.buffers
                .write_output(to, self.scratch.acc.bytes(n * size));
        } else {
            self.arithmetic
                .own
                .store(&self.scratch.acc, &mut self.scratch.bytes[..n * size]);
            self.buffers
                .write_output(to, &self.scratch.bytes[..n * size]);
        }
    }

    /// Takes note of this rank's contribution in `tile` where no encode does.
    fn observe(&mut self, n: usize, from: Into) {
        if !(self.notes_input && self.stats.wanted) {
            return;
        }
        let tile = match from {
            Into::Sum => &self.scratch.acc,
            Into::Own => &self.scratch.own,
        };
        let seen = reduce::observe(self.isa, tile.f32(n));
        self.stats.seen = true;
        self.stats.input.merge(&EncodeStats {
            saturated: 0,
            non_finite: seen.non_finite,
            abs_max: seen.abs_max,
            sum_squares: seen.sum_squares,
        });
    }

    /// The scale to encode `values` with, if scales are kept: the kept one, or a fresh one.
    fn kept_scale(&mut self, n: usize, from: Into) -> Option<f32> {
        let isa = self.isa;
        let site = self.chunk.site;
        let values = match from {
            Into::Sum => self.scratch.acc.f32(n),
            Into::Own => self.scratch.own.f32(n),
        };
        self.scales
            .as_mut()
            .map(|scales| scales.scale(site, || codec::abs_max(isa, values)))
    }

    /// slot = enc(acc), with what there is to note about the accumulators. Under error feedback
    /// enc(acc + residual), with the accumulators left as they are: a chain encodes them again.
    fn encode(&mut self, codec: &dyn Codec, at: usize, n: usize, wire: &mut [u8], note: Note) {
        let role = match self.step.op {
            Op::RecvReduceCopySend => Role::Owner,
            _ => Role::Worker,
        };
        let (mut from, mut note) = (Into::Sum, note);
        if let Some(residuals) = &self.residuals {
            let Scratch { acc, own, .. } = &mut *self.scratch;
            own.f32_mut(n).copy_from_slice(acc.f32(n));
            residuals.add(role, self.chunk.number, at, own.f32_mut(n));
            from = Into::Own;
            if matches!(note, Note::Input) {
                // The report is about the input, not about what feedback made of it.
                self.observe(n, Into::Sum);
                note = Note::Sum;
            }
        }
        let scale = self.kept_scale(n, from);
        let span = self.span(at);
        let values = match from {
            Into::Sum => self.scratch.acc.f32(n),
            Into::Own => self.scratch.own.f32(n),
        };
        match note {
            Note::Input => {
                self.stats.seen = true;
                codec.encode(span, values, scale, wire, Some(&mut self.stats.input));
            }
            Note::Sum => {
                // Sums that saturate count too; their magnitudes are not the input's. Under a
                // scale of its own a block cannot saturate.
                let mut sums = EncodeStats::default();
                let kind = self.plan.spec_of(self.step.gives).kind;
                let can = scale.is_some() || !kind.has_scale();
                codec.encode(span, values, scale, wire, can.then_some(&mut sums));
                self.stats.input.saturated += sums.saturated;
            }
            Note::Nothing => codec.encode(span, values, scale, wire, None),
        }
        if let Some(residuals) = &mut self.residuals {
            let Scratch { own, decoded, .. } = &mut *self.scratch;
            codec.decode(span, wire, decoded.f32_mut(n));
            let chunk = (self.chunk.number, self.chunk.elements);
            residuals.keep(role, chunk, at, own.f32(n), decoded.f32(n));
        }
    }

    /// What to note when the input is encoded: a fan of several steps encodes it several times.
    fn note_input(&self) -> Note {
        if self.notes_input {
            Note::Input
        } else {
            Note::Nothing
        }
    }

    fn send(&mut self, target: Target<'_>) {
        let Some(end) = target else { return };
        let bytes = self.chunk.given;
        // Under a codec at the other level the report wants to know the input.
        let unseen = self.notes_input && self.stats.wanted;
        if self.gives.is_none() && !self.premultiplied && !unseen {
            let from = self.chunk.input.unwrap_or(0) * self.size();
            self.buffers.read_input(from, &mut end.slot()[..bytes]);
            return;
        }
        for (at, n) in self.tiles() {
            self.load(at, n, Into::Sum);
            let wire = &mut end.slot()[..bytes];
            match self.gives {
                None => {
                    self.arithmetic
                        .own
                        .store(&self.scratch.acc, &mut wire[self.raw(at, n)]);
                    self.observe(n, Into::Sum);
                }
                Some(codec) => self.encode(codec, at, n, wire, self.note_input()),
            }
        }
    }

    fn recv(&mut self, sources: &Sources<'_>) {
        let Some(payload) = sources.iter().next() else {
            return;
        };
        match self.takes {
            None => {
                let to = self.chunk.output.unwrap_or(0) * self.size();
                self.buffers.write_output(to, &payload[..self.chunk.taken]);
            }
            Some(codec) => {
                for (at, n) in self.tiles() {
                    codec.decode(self.span(at), payload, self.scratch.acc.f32_mut(n));
                    self.store(at, n);
                }
            }
        }
    }

    fn forward(&mut self, sources: &Sources<'_>, target: Target<'_>) {
        if let (Some(payload), Some(end)) = (sources.iter().next(), target) {
            let bytes = self.chunk.taken;
            end.slot()[..bytes].copy_from_slice(&payload[..bytes]);
        }
    }

    fn copy(&mut self) {
        let size = self.size();
        let from = self.chunk.input.unwrap_or(0) * size;
        let to = self.chunk.output.unwrap_or(0) * size;
        self.buffers.copy(from, to, self.chunk.elements * size);
    }

    fn reduce_into_output(&mut self) {
        let size = self.size();
        for (at, n) in self.tiles() {
            self.load(at, n, Into::Sum);
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
