//! Implements codecs that store one or two numbers per block beside the codes of its elements.
//!
//! A [`BlockFormat`] defines how the numbers follow from a block and what a code means; [`Blocked`] does all
//! else. [`Scaled`] adapts formats whose codes are multiples of one scale: `linear8`, `dynamic8` and `fp8`.
//! `minmax`, `terngrad` and `onebit` implement [`BlockFormat`] themselves.
//!
//! A block with a non-finite element gets codes 0 and NaN for its numbers. A block whose numbers are not all
//! finite decodes to NaN throughout, whoever wrote it.

mod kernel;
mod scaled;
mod sums;

use super::pack::code_bytes;
use super::simd::{Available, Lanes, four, launch};
use super::wire::{ChunkLayout, ends_chunk, read_number, write_number};
use super::{Codec, Description, EncodeStats, ErrorLaw, Reencode, RoundingRandom, Span, Zero};
use crate::types::{CodecKind, CodecSpec, ScaleRule};
pub(super) use kernel::load_any;
use kernel::{DecodeBlocks, EncodeBlocks, EncodeTensor};
pub(super) use scaled::{
    ROUNDING, Scaled, ScaledFormat, VectorScaledFormat, VectorSteps, takes_upper,
};
use std::fmt::Debug;
pub(super) use sums::{SignSums, SquareSums, WideSum, add_all, total};

/// Numbers that a block stores beside its codes. A format with one number leaves the second 0.
pub(super) type Numbers = [f32; 2];

/// When a codec rounds stochastically, with random draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Draws {
    /// Rounding is always deterministic.
    Never,
    /// Rounding is stochastic if the codec's specification has a seed.
    Seeded,
    /// Rounding is stochastic with every specification.
    Always,
}

/// Defines how the numbers of a block are computed and what its codes mean.
///
/// The scalar methods are the specification. The `_lanes` methods equal them bit for bit and are
/// `#[inline(always)]`. Both are called only for blocks that are not empty and hold only finite
/// elements.
pub(super) trait BlockFormat: Debug + Send + Sync + 'static {
    /// The codec that uses this format.
    const KIND: CodecKind;
    /// Bits of one code.
    const BITS: usize;
    /// Number of fp32 parameters that a block carries on the wire: 1 (a scale) or 2 (such as
    /// minimum and maximum).
    const NUMBERS: usize;
    /// Whether [`BlockFormat::fit`] depends only on the smallest and the largest element.
    const FITS_EXTREMES: bool;
    /// Whether vector forms find non-finite elements when they fit: [`BlockFormat::fit_lanes`] then ignores the largest
    /// magnitude, and returns a number that is not finite exactly if an element is not finite.
    const FIT_FINDS_NON_FINITE: bool = false;
    /// How a zero decodes: with its sign, as +0, or with an error.
    const ZERO: Zero;
    /// When rounding is stochastic.
    const DRAWS: Draws;

    /// Values derived from a block's numbers for encoding.
    type Encoder: Copy;
    /// Values derived from a block's numbers for decoding.
    type Decoder: Copy;
    /// Tables that a vector loop keeps in registers.
    type Registers<'a, L: Lanes>: Copy;

    /// Returns the bound of the error of deterministic encoding.
    fn errors() -> ErrorLaw;

    /// Returns a bound of the error of an element with magnitude `x` in a block whose largest magnitude is
    /// `scale`, not yet rounded to fp32. `law` is [`Description::errors`], in which `halves` is included: the
    /// halves of a gap by which rounding may err, 2 if it is stochastic. The added 2^-20 of `scale` covers
    /// roundings of the numbers, the encoder and the decoder.
    fn error_bound(&self, law: ErrorLaw, halves: f64, x: f64, scale: f64) -> f64 {
        let _ = halves;
        law.of_scale * scale + law.of_value * x + law.floor + scale * 2f64.powi(-20)
    }

    /// Loads the tables that a vector loop keeps in registers.
    fn registers<L: Lanes>(&self, lanes: L) -> Self::Registers<'_, L>;

    /// Computes the numbers of a block whose largest magnitude is `largest`.
    fn fit(x: &[f32], largest: f32) -> Numbers;
    /// Vector form of [`BlockFormat::fit`].
    fn fit_lanes<L: Lanes>(lanes: L, x: &[f32], largest: f32) -> Numbers;

    /// Computes the encoder's values from a block's numbers.
    fn encoder(numbers: Numbers) -> Self::Encoder;
    /// Computes the decoder's values from a block's numbers.
    fn decoder(numbers: Numbers) -> Self::Decoder;

    /// Returns whether every code of a block with the parameters `numbers` is 0. [`Blocked`] then writes
    /// zeros without a call per element.
    #[inline(always)]
    fn is_zero(_numbers: Numbers) -> bool {
        false
    }

    /// Returns whether the parameters of a block are so small that vector forms would lose bits. [`Blocked`]
    /// then runs the scalar form.
    #[inline(always)]
    fn needs_scalar(_numbers: Numbers) -> bool {
        false
    }

    /// Returns the code of an element.
    fn code(&self, encoder: Self::Encoder, x: f32) -> u32;
    /// Vector form of [`BlockFormat::code`].
    fn code_lanes<L: Lanes>(
        lanes: L,
        registers: Self::Registers<'_, L>,
        encoder: Self::Encoder,
        x: L::F,
    ) -> L::I;

    /// Returns the code of an element under stochastic rounding, where `u` is its random number in
    /// [0, 1).
    #[inline(always)]
    fn draw(&self, encoder: Self::Encoder, x: f32, _u: f32) -> u32 {
        self.code(encoder, x)
    }
    /// Vector form of [`BlockFormat::draw`].
    #[inline(always)]
    fn draw_lanes<L: Lanes>(
        lanes: L,
        registers: Self::Registers<'_, L>,
        encoder: Self::Encoder,
        x: L::F,
        _u: L::F,
    ) -> L::I {
        Self::code_lanes(lanes, registers, encoder, x)
    }

    /// Returns the codes of four vectors, as [`Lanes::pack_bytes`] packs them.
    #[inline(always)]
    fn code_packed<L: Lanes>(
        lanes: L,
        registers: Self::Registers<'_, L>,
        encoder: Self::Encoder,
        x: [L::F; 4],
    ) -> L::I {
        lanes.pack_bytes(four!(i => Self::code_lanes(lanes, registers, encoder, x[i])))
    }

    /// Returns the codes of four vectors under stochastic rounding, as [`Lanes::pack_bytes`] packs them.
    #[inline(always)]
    fn draw_packed<L: Lanes>(
        lanes: L,
        registers: Self::Registers<'_, L>,
        encoder: Self::Encoder,
        x: [L::F; 4],
        u: [L::F; 4],
    ) -> L::I {
        lanes.pack_bytes(four!(i => Self::draw_lanes(lanes, registers, encoder, x[i], u[i])))
    }

    /// Returns the value that a code decodes to.
    fn value(&self, decoder: Self::Decoder, code: u32) -> f32;
    /// Vector form of [`BlockFormat::value`].
    fn value_lanes<L: Lanes>(
        lanes: L,
        registers: Self::Registers<'_, L>,
        decoder: Self::Decoder,
        code: L::I,
    ) -> L::F;

    /// Returns `sum` plus the value that a code decodes to.
    #[inline(always)]
    fn add(&self, decoder: Self::Decoder, code: u32, sum: f32) -> f32 {
        sum + self.value(decoder, code)
    }
    /// Vector form of [`BlockFormat::add`].
    #[inline(always)]
    fn add_lanes<L: Lanes>(
        lanes: L,
        registers: Self::Registers<'_, L>,
        decoder: Self::Decoder,
        code: L::I,
        sum: L::F,
    ) -> L::F {
        lanes.add(sum, Self::value_lanes(lanes, registers, decoder, code))
    }
}

/// Codec of a [`BlockFormat`].
#[derive(Debug)]
pub(super) struct Blocked<F> {
    format: F,
    rule: ScaleRule,
    seed: u8,
    isa: Available,
}

impl<F: BlockFormat> Blocked<F> {
    /// Creates the codec; `spec` must have been checked.
    pub fn new(format: F, spec: CodecSpec, isa: Available) -> Blocked<F> {
        Blocked {
            format,
            rule: spec.scale,
            seed: if F::KIND.has_seed() { spec.seed } else { 0 },
            isa,
        }
    }

    /// Returns the number of elements in a block, which share the block's numbers; `None` if the whole chunk
    /// is one block.
    fn block(&self) -> Option<usize> {
        match self.rule {
            ScaleRule::Block(block) => Some(block as usize),
            _ => None,
        }
    }

    fn is_stochastic(&self) -> bool {
        match F::DRAWS {
            Draws::Never => false,
            Draws::Seeded => self.seed != 0,
            Draws::Always => true,
        }
    }

    /// Returns by how many halves of a gap between values rounding errs at most: stochastic rounding may choose
    /// the further of two neighbouring values. [`Draws::Always`] formats state their errors so.
    fn halves(&self) -> f64 {
        match F::DRAWS {
            Draws::Seeded if self.seed != 0 => 2.0,
            _ => 1.0,
        }
    }

    fn layout(&self, n: usize) -> ChunkLayout {
        let blocks = match self.block() {
            Some(block) => n.div_ceil(block),
            None => usize::from(n > 0),
        };
        ChunkLayout::new(n, F::BITS, F::NUMBERS * blocks)
    }

    /// Returns the byte range of the codes of `len` elements from element `at` on.
    fn codes(at: usize, len: usize) -> std::ops::Range<usize> {
        code_bytes(at, F::BITS)..code_bytes(at + len, F::BITS)
    }

    fn decode_span<const REDUCE: bool>(&self, span: Span, wire: &[u8], dst: &mut [f32]) {
        ends_chunk(span, dst.len(), self.granule());
        let (codes, numbers) = self.layout(span.chunk).split(wire);
        let decode = DecodeBlocks::<F, REDUCE> {
            format: &self.format,
            block: self.block().unwrap_or(dst.len()).max(1),
            first_block: self.block().map_or(0, |block| span.at / block),
            codes: &codes[Self::codes(span.at, dst.len())],
            numbers,
            dst,
        };
        launch(self.isa, decode);
    }
}

/// Encodes `src` as one block of any length and returns its numbers. `codes` must have exactly the
/// bytes of its codes.
pub(super) fn encode_block<F: BlockFormat>(
    format: &F,
    isa: Available,
    random: Option<RoundingRandom>,
    src: &[f32],
    codes: &mut [u8],
    stats: &mut EncodeStats,
) -> Numbers {
    let mut numbers = [0; 8];
    let encode = EncodeBlocks {
        format,
        block: src.len().max(1),
        first_block: 0,
        first: 0,
        random,
        src,
        codes,
        numbers: &mut numbers,
        stats: Some(stats),
    };
    launch(isa, encode);
    [read_number(&numbers, 0), read_number(&numbers, 1)]
}

/// Decodes one block of any length. `codes` must have exactly the bytes of its codes.
pub(super) fn decode_block<F: BlockFormat>(
    format: &F,
    isa: Available,
    numbers: Numbers,
    codes: &[u8],
    dst: &mut [f32],
) {
    let mut bytes = [0; 8];
    write_number(&mut bytes, 0, numbers[0]);
    write_number(&mut bytes, 1, numbers[1]);
    let decode = DecodeBlocks::<F, false> {
        format,
        block: dst.len().max(1),
        first_block: 0,
        codes,
        numbers: &bytes,
        dst,
    };
    launch(isa, decode);
}

impl<F: BlockFormat> Codec for Blocked<F> {
    fn spec(&self) -> CodecSpec {
        CodecSpec {
            scale: self.rule,
            seed: self.seed,
            ..CodecSpec::of(F::KIND)
        }
    }

    fn granule(&self) -> usize {
        self.block().unwrap_or(1)
    }

    fn wire_bytes(&self, n: usize) -> usize {
        self.layout(n).bytes()
    }

    fn description(&self) -> Description {
        let factor = self.halves();
        let errors = F::errors();
        Description {
            code_bits: F::BITS,
            block_numbers: F::NUMBERS,
            fits_extremes: F::FITS_EXTREMES,
            poisons_block: true,
            zero: F::ZERO,
            errors: ErrorLaw {
                of_scale: factor * errors.of_scale,
                of_value: factor * errors.of_value,
                ..errors
            },
        }
    }

    fn reencode(&self) -> Reencode {
        Reencode::Lossy
    }

    /// Rounds [`BlockFormat::error_bound`] up and adds the smallest subnormal.
    fn error_bound(&self, x: f32, abs_max: f32) -> f32 {
        let law = self.description().errors;
        let (x, scale) = (x.abs().into(), abs_max.into());
        let bound = self.format.error_bound(law, self.halves(), x, scale);
        (bound.min(f32::MAX.into()) as f32).next_up() + f32::from_bits(1)
    }

    fn encode(
        &self,
        span: Span,
        src: &[f32],
        scale: Option<f32>,
        wire: &mut [u8],
        stats: Option<&mut EncodeStats>,
    ) {
        let ends = ends_chunk(span, src.len(), self.granule());
        let (codes, numbers) = self.layout(span.chunk).split_mut(wire, ends);
        let codes = &mut codes[Self::codes(span.at, src.len())];
        match (self.block(), scale) {
            (Some(block), None) => {
                let encode = EncodeBlocks {
                    format: &self.format,
                    block,
                    first_block: span.at / block,
                    first: span.at,
                    random: self.is_stochastic().then_some(span.random),
                    src,
                    codes,
                    numbers,
                    stats,
                };
                launch(self.isa, encode);
            }
            (None, Some(scale)) => {
                let encode = EncodeTensor {
                    format: &self.format,
                    scale,
                    first: span.at,
                    random: self.is_stochastic().then_some(span.random),
                    src,
                    codes,
                    number: numbers,
                    stats,
                };
                launch(self.isa, encode);
            }
            _ => panic!("a scale is given exactly with the tensor rule"),
        }
    }

    fn damp(&self, span: Span, len: usize, factor: f32, wire: &mut [u8]) {
        let (_, numbers) = self.layout(span.chunk).split_mut(wire, false);
        let block = self.block().unwrap_or(len).max(1);
        let first = self.block().map_or(0, |block| span.at / block);
        for at in F::NUMBERS * first..F::NUMBERS * (first + len.div_ceil(block)) {
            write_number(numbers, at, read_number(numbers, at) * factor);
        }
    }

    fn decode(&self, span: Span, wire: &[u8], dst: &mut [f32]) {
        self.decode_span::<false>(span, wire, dst);
    }

    fn decode_reduce(&self, span: Span, wire: &[u8], acc: &mut [f32]) {
        self.decode_span::<true>(span, wire, acc);
    }
}
