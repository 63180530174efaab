//! Operations on one tile: load, store and encode, and the statistics that an encode returns.

use super::super::state::{Scratch, residual_role};
use super::StepWork;
use crate::codec::feedback::{self, Role};
use crate::codec::{self, Codec, EncodeStats, Span};
use crate::reduce;
use crate::schedule::{Op, Own};
use std::ops::Range;

/// Statistics that an encode adds to the report.
#[derive(Clone, Copy)]
pub(super) enum StatsNote {
    /// Adds all statistics, because the encoded values are this rank's input.
    Input,
    /// Adds only the number of saturated values, because the encoded values are a sum.
    Sum,
    /// Adds nothing, because an earlier encode has added the statistics.
    Nothing,
}

/// The accumulators that an operation works on.
#[derive(Clone, Copy)]
pub(super) enum Operand {
    /// The accumulators of the sum, `Scratch::acc`.
    Sum,
    /// The accumulators of this rank's contribution, `Scratch::own`.
    Own,
}

impl Scratch {
    fn values(&self, operand: Operand, n: usize) -> &[f32] {
        match operand {
            Operand::Sum => self.acc.f32(n),
            Operand::Own => self.own.f32(n),
        }
    }
}

impl StepWork<'_, '_> {
    /// Returns the first element and the length of each tile of the chunk.
    pub(super) fn tiles(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (elements, tile) = (self.chunk.elements, self.tile);
        (0..elements)
            .step_by(tile)
            .map(move |at| (at, tile.min(elements - at)))
    }

    pub(super) fn size(&self) -> usize {
        self.plan.dtype.size()
    }

    /// Returns whether own elements are multiplied by a factor before they are sent or added.
    pub(super) fn premultiplied(&self) -> bool {
        self.arithmetic.own.scales()
    }

    /// Returns whether this step is the first to read its chunk of the input, and so collects statistics.
    pub(super) fn notes_input(&self) -> bool {
        self.plan.notes_input[self.index]
    }

    /// Returns which statistics to add when this step encodes the input. If several steps of one send encode
    /// it, only the first adds them.
    pub(super) fn note_input(&self) -> StatsNote {
        if self.notes_input() {
            StatsNote::Input
        } else {
            StatsNote::Nothing
        }
    }

    /// Returns the tile's position in its chunk, with the random numbers for encoding it. A step without
    /// received messages encodes this rank's contribution; any other step encodes a sum.
    pub(super) fn span(&self, at: usize) -> Span {
        let step = self.step;
        let source = step.recv_from.is_empty() && step.own == Own::FIRST;
        let random = self.randoms[usize::from(step.op != Op::Send && !source)];
        Span::new(self.chunk.elements, at).drawing(random)
    }

    /// Returns the tile's byte range in a raw message.
    pub(super) fn raw(&self, at: usize, n: usize) -> Range<usize> {
        at * self.size()..(at + n) * self.size()
    }

    /// Loads this rank's contribution: the input, widened, times the factor.
    pub(super) fn load(&mut self, at: usize, n: usize, operand: Operand) {
        let size = self.size();
        let from = (self.chunk.input.unwrap_or(0) + at) * size;
        let premultiplied = self.premultiplied();
        let Scratch {
            acc, own, bytes, ..
        } = &mut *self.scratch;
        let tile = match operand {
            Operand::Sum => acc,
            Operand::Own => own,
        };
        if self.plan.dtype.accumulator() == self.plan.dtype && !premultiplied {
            self.buffers.read_input(from, tile.bytes_mut(n * size));
        } else {
            self.buffers.read_input(from, &mut bytes[..n * size]);
            self.arithmetic.own.load(&bytes[..n * size], tile);
        }
    }

    /// Stores the sum in the output, rounded to the element type.
    pub(super) fn store(&mut self, at: usize, n: usize) {
        let size = self.size();
        let to = (self.chunk.output.unwrap_or(0) + at) * size;
        if self.plan.dtype.accumulator() == self.plan.dtype {
            let sum = self.scratch.acc.bytes(n * size);
            self.writes.write(self.buffers, to, sum);
        } else {
            self.arithmetic
                .own
                .store(&self.scratch.acc, &mut self.scratch.bytes[..n * size]);
            let sum = &self.scratch.bytes[..n * size];
            self.writes.write(self.buffers, to, sum);
        }
    }

    /// Adds this rank's contribution to the input statistics, in a step whose encode does not add
    /// it.
    pub(super) fn observe(&mut self, n: usize, operand: Operand) {
        if !(self.notes_input() && self.stats.wanted) {
            return;
        }
        let seen = reduce::observe(self.isa, self.scratch.values(operand, n));
        self.stats.seen = true;
        self.stats.input.merge(&EncodeStats {
            saturated: 0,
            non_finite: seen.non_finite,
            abs_max: seen.abs_max,
            sum_squares: seen.sum_squares,
        });
    }

    /// Returns the kept scale for this encode; `None` if the codec keeps no scales. A scale that is due for
    /// an update is computed from the values of `operand`.
    fn kept_scale(&mut self, n: usize, operand: Operand) -> Option<f32> {
        let (isa, site) = (self.isa, self.chunk.site);
        let values = self.scratch.values(operand, n);
        self.scales
            .as_mut()
            .map(|scales| scales.scale(site, || codec::abs_max(isa, values)))
    }

    /// Encodes the sum into `wire`. With error feedback, encodes sum + residual, and keeps the encoding error
    /// as the new residual. The accumulators are unchanged, because a chain encodes them again.
    pub(super) fn encode(
        &mut self,
        codec: &dyn Codec,
        at: usize,
        n: usize,
        wire: &mut [u8],
        note: StatsNote,
    ) {
        let role = residual_role(self.step);
        let (mut operand, mut note) = (Operand::Sum, note);
        if let Some(residuals) = &self.residuals {
            let Scratch { acc, own, .. } = &mut *self.scratch;
            own.f32_mut(n).copy_from_slice(acc.f32(n));
            residuals.add(role, self.chunk.number, at, own.f32_mut(n));
            operand = Operand::Own;
            if matches!(note, StatsNote::Input) {
                // The report describes the input alone, but the encoded values include residuals.
                self.observe(n, Operand::Sum);
                note = StatsNote::Sum;
            }
        }
        let scale = self.kept_scale(n, operand);
        let span = self.span(at);
        let values = self.scratch.values(operand, n);
        match note {
            StatsNote::Input => {
                self.stats.seen = true;
                codec.encode(span, values, scale, wire, Some(&mut self.stats.input));
            }
            StatsNote::Sum => {
                // The report counts saturated sums, but its magnitudes describe the input only. A block with
                // its own scale cannot saturate.
                let mut sums = EncodeStats::default();
                let kind = self.plan.spec_of(self.step.gives).kind;
                let saturates = scale.is_some() || !kind.has_scale();
                codec.encode(span, values, scale, wire, saturates.then_some(&mut sums));
                self.stats.input.saturated += sums.saturated;
            }
            StatsNote::Nothing => codec.encode(span, values, scale, wire, None),
        }
        if let Some(residuals) = &mut self.residuals {
            feedback::damp(codec, span, n, wire);
            let Scratch {
                own,
                decoded,
                bytes,
                ..
            } = &mut *self.scratch;
            codec.decode(span, wire, decoded.f32_mut(n));
            if role == Role::Owner && self.plan.dtype.accumulator() != self.plan.dtype {
                // All ranks round these values to the element type, so the residual includes that error.
                let rounded = &mut bytes[..n * self.plan.dtype.size()];
                self.arithmetic.own.store(decoded, rounded);
                self.arithmetic.received.load(rounded, decoded);
            }
            let chunk = (self.chunk.number, self.chunk.elements);
            residuals.keep(role, chunk, at, own.f32(n), decoded.f32(n));
        }
    }
}
