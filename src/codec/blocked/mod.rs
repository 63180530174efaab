//! Codecs whose blocks carry one or two numbers besides codes of a few bits: what
//! [`super::minmax`], [`super::terngrad`] and [`super::onebit`] share, which is all but how a
//! block is fitted and what a code means.
//!
//! A block with a non-finite element has codes 0 and NaN for its numbers, and decodes to NaN
//! throughout. A block of numbers that are not all finite does so, whoever wrote it.

mod kernel;
mod sums;

use super::pack::code_bytes;
use super::simd::{Available, Lanes, launch};
use super::wire::{Layout, ends_chunk, read_scale, write_scale};
use super::{Codec, Description, EncodeStats, ErrorLaw, Random, Reencode, Span, Zero};
use crate::types::{CodecKind, CodecSpec, ScaleRule};
pub(super) use kernel::load_any;
use kernel::{Decode, Encode};
use std::fmt::Debug;
use std::marker::PhantomData;
pub(super) use sums::{WideSum, total};

/// Numbers of a block; a format with one leaves the other 0.
pub(super) type Numbers = [f32; 2];

/// How a block is fitted and what its codes mean. The scalar methods are the specification; the
/// others equal them bit for bit and are `#[inline(always)]`. Blocks that they see are not empty
/// and hold finite elements only.
pub(super) trait BlockFormat: Debug + Send + Sync + 'static {
    /// Bits of a code.
    const BITS: usize;
    /// Numbers on the wire for each block: 1 or 2.
    const NUMBERS: usize;
    /// Whether [`BlockFormat::fit`] looks at the smallest and largest element only.
    const FITS_EXTREMES: bool;
    /// What a zero comes back as.
    const ZERO: Zero;
    /// Whether a draw decides about every code, seed or not.
    const ALWAYS_RANDOM: bool;

    /// What encoding needs of a block's numbers.
    type Encoder: Copy;
    /// What decoding needs of them.
    type Decoder: Copy;

    /// Which codec.
    fn kind() -> CodecKind;

    /// The error in plain terms, of deterministic encoding.
    fn errors() -> ErrorLaw;

    /// The numbers of a block.
    fn fit(x: &[f32]) -> Numbers;
    /// [`BlockFormat::fit`].
    fn fit_lanes<L: Lanes>(lanes: L, x: &[f32]) -> Numbers;

    fn encoder(numbers: Numbers) -> Self::Encoder;
    fn decoder(numbers: Numbers) -> Self::Decoder;

    /// The code of an element.
    fn code(encoder: Self::Encoder, x: f32) -> u32;
    /// [`BlockFormat::code`].
    fn code_lanes<L: Lanes>(lanes: L, encoder: Self::Encoder, x: L::F) -> L::I;

    /// The code of an element that draws `u` of [0, 1).
    fn draw(encoder: Self::Encoder, x: f32, u: f32) -> u32;
    /// [`BlockFormat::draw`].
    fn draw_lanes<L: Lanes>(lanes: L, encoder: Self::Encoder, x: L::F, u: L::F) -> L::I;

    /// The value of a code.
    fn value(decoder: Self::Decoder, code: u32) -> f32;
    /// [`BlockFormat::value`].
    fn value_lanes<L: Lanes>(lanes: L, decoder: Self::Decoder, code: L::I) -> L::F;
}

/// A codec of one such format.
#[derive(Debug)]
pub(super) struct Blocked<F> {
    block: u32,
    seed: u8,
    isa: Available,
    format: PhantomData<F>,
}

impl<F: BlockFormat> Blocked<F> {
    /// # Panics
    /// If `spec`, which was checked, has no block.
    pub fn new(spec: CodecSpec, isa: Available) -> Blocked<F> {
        let ScaleRule::Block(block) = spec.scale else {
            unreachable!("{spec} has no block")
        };
        Blocked {
            block,
            seed: spec.seed,
            isa,
            format: PhantomData,
        }
    }

    fn layout(&self, n: usize) -> Layout {
        let numbers = F::NUMBERS * n.div_ceil(self.granule());
        Layout::new(n, F::BITS, numbers)
    }

    fn decode_span<const REDUCE: bool>(&self, span: Span, wire: &[u8], dst: &mut [f32]) {
        ends_chunk(span, dst.len(), self.granule());
        let (codes, numbers) = self.layout(span.chunk).split(wire);
        let decode = Decode::<F, REDUCE> {
            format: self.format,
            block: self.granule(),
            first_block: span.at / self.granule(),
            codes: &codes[code_bytes(span.at, F::BITS)..code_bytes(span.at + dst.len(), F::BITS)],
            numbers,
            dst,
        };
        launch(self.isa, decode);
    }
}

/// Encodes one block of any length into exactly its codes and returns its numbers.
pub(super) fn encode_block<F: BlockFormat>(
    isa: Available,
    random: Option<Random>,
    src: &[f32],
    codes: &mut [u8],
    stats: &mut EncodeStats,
) -> Numbers {
    let mut numbers = [0; 8];
    let encode = Encode::<F> {
        format: PhantomData,
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
    [read_scale(&numbers, 0), read_scale(&numbers, 1)]
}

/// Decodes one block of any length from exactly its codes.
pub(super) fn decode_block<F: BlockFormat>(
    isa: Available,
    numbers: Numbers,
    codes: &[u8],
    dst: &mut [f32],
) {
    let mut bytes = [0; 8];
    write_scale(&mut bytes, 0, numbers[0]);
    write_scale(&mut bytes, 1, numbers[1]);
    let decode = Decode::<F, false> {
        format: PhantomData,
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
            scale: ScaleRule::Block(self.block),
            seed: self.seed,
            ..CodecSpec::of(F::kind())
        }
    }

    fn granule(&self) -> usize {
        self.block as usize
    }

    fn wire_bytes(&self, n: usize) -> usize {
        self.layout(n).bytes()
    }

    fn description(&self) -> Description {
        // A draw may round to the further of two neighbours.
        let factor = if self.seed != 0 && !F::ALWAYS_RANDOM {
            2.0
        } else {
            1.0
        };
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

    /// [`Description::errors`], with 2^-21 of the largest magnitude for the roundings on the way
    /// and the smallest subnormal.
    fn error_bound(&self, x: f32, abs_max: f32) -> f32 {
        let law = self.description().errors;
        let scale = f64::from(abs_max);
        let bound = law.of_scale * scale + law.of_value * f64::from(x.abs()) + law.floor;
        ((bound + scale * 2f64.powi(-21)).min(f32::MAX.into()) as f32).next_up() + f32::from_bits(1)
    }

    fn encode(
        &self,
        span: Span,
        src: &[f32],
        scale: Option<f32>,
        wire: &mut [u8],
        stats: Option<&mut EncodeStats>,
    ) {
        assert_eq!(scale, None, "this format has no tensor scale");
        let ends = ends_chunk(span, src.len(), self.granule());
        let (codes, numbers) = self.layout(span.chunk).split_mut(wire, ends);
        let bytes = code_bytes(span.at, F::BITS)..code_bytes(span.at + src.len(), F::BITS);
        let encode = Encode {
            format: self.format,
            block: self.granule(),
            first_block: span.at / self.granule(),
            first: span.at,
            random: (self.seed != 0 || F::ALWAYS_RANDOM).then_some(span.random),
            src,
            codes: &mut codes[bytes],
            numbers,
            stats,
        };
        launch(self.isa, encode);
    }

    fn decode(&self, span: Span, wire: &[u8], dst: &mut [f32]) {
        self.decode_span::<false>(span, wire, dst);
    }

    fn decode_reduce(&self, span: Span, wire: &[u8], acc: &mut [f32]) {
        self.decode_span::<true>(span, wire, acc);
    }
}
