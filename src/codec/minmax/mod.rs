//! `minmax1`, `minmax2`, `minmax4`, `minmax8`: integers of b bits between the smallest and the
//! largest element of a block.
//!
//! Source: the min-max quantisation of CompLL, the codec compiler of HiPress. With gap =
//! (max - min)/(2^b - 1) an element's code is (x - min)/gap rounded half to even. A code decodes to
//! min + code * gap. With a seed, rounding is stochastic: up with a probability equal to the
//! fraction, so that the decoded mean is x.
//!
//! A block's numbers are min and max. Codes of less than a byte start at its least significant bit.
//! Arithmetic is fp32: the reciprocal of the gap is rounded, then x - min, then their product.
//! Ranges below 2^-100 are computed 2^64 times as large, ranges from 2^126 up four times smaller,
//! so that every range can be encoded. Both are exact where rounding could matter.

mod simd;

use super::blocked::{BlockFormat, Blocked, Draws, Numbers, decode_block, encode_block};
use super::feedback::Contraction;
use super::simd::{Available, Lanes};
use super::{CodecInfo, EncodeStats, ErrorLaw, KernelInfo, MessageRange, RoundingRandom, Zero};
use crate::cpu::Isa;
use crate::types::{CodecKind, CodecSpec};
use std::sync::Arc;

/// Returns the facts about the codec of `BITS` bits: 1, 2, 4 or 8.
pub(super) const fn info<const BITS: usize>() -> CodecInfo {
    let kernels = KernelInfo {
        is_fused: BITS == 4,
        words: |spec, words| {
            words[1] = contraction::<BITS>(spec).damping.to_bits();
            words[6] = BITS as u32;
        },
        ..KernelInfo::new(if BITS == 4 { "minmax4" } else { "minmax" })
    };
    CodecInfo {
        kind: Range::<BITS>::KIND,
        encode_seconds: if BITS == 8 { 0.2e-9 } else { 0.3e-9 },
        decode_seconds: if BITS == 8 { 0.08e-9 } else { 0.15e-9 },
        range: MessageRange::Full,
        contraction: contraction::<BITS>,
        kernels: Some(kernels),
        build: |spec, isa| Arc::new(Blocked::new(Range::<BITS>, spec, isa)),
    }
}

/// Returns the contraction in the largest magnitude A of a block. A gap between L + 1 codes is at most 2 A / L.
///
/// To nearest an error is at most half a gap, A / L. For `minmax1`, where L is 1, this is no contraction, and
/// for `minmax2` the errors of a ring's partial sums grow with each hop. Halved values v - C(v) / 2 lie
/// between half of the smallest and half of the largest element: C(v) rises only at midpoints, so v - C(v) / 2
/// is largest at the largest element or just below a midpoint, and is at most A / 2 in both. With a seed C(v)
/// may be a whole gap below v, and the error is at most A (1 - damping) + damping * gap.
fn contraction<const BITS: usize>(spec: CodecSpec) -> Contraction {
    let levels = f64::from(Range::<BITS>::LEVELS);
    let damping = if BITS <= 2 { 0.5 } else { 1.0 };
    let kept = 1.0 - f64::from(damping);
    let error = if spec.seed != 0 {
        kept + 2.0 * f64::from(damping) / levels
    } else if BITS <= 2 {
        kept
    } else {
        1.0 / levels
    };
    Contraction {
        output: damping.into(),
        damping,
        ..Contraction::largest(error)
    }
}

/// Blocks whose range (largest minus smallest element) is below this are multiplied by [`RAISE`].
const TINY: f32 = f32::from_bits((127 - 100) << 23);
/// 2^64, by which small ranges are multiplied.
const RAISE: f32 = f32::from_bits((127 + 64) << 23);
/// 2^-64, which undoes [`RAISE`].
const LOWER: f32 = f32::from_bits((127 - 64) << 23);
/// Blocks whose range is at least this are divided by 4, because the range may overflow.
const HUGE: f32 = f32::from_bits((127 + 126) << 23);
/// Factor just below 1 for blocks that are divided by 4, so that no code decodes beyond the largest
/// element, which may be [`f32::MAX`].
const SHRINK: f32 = 1.0 - 1.0 / 4_194_304.0;

/// Block format whose codes of `BITS` bits divide the range from the smallest to the largest
/// element.
#[derive(Debug)]
pub(super) struct Range<const BITS: usize>;

/// Values for encoding: code = (x * raise - low) * factor, rounded.
#[derive(Clone, Copy)]
pub(super) struct Encoder {
    raise: f32,
    low: f32,
    factor: f32,
}

/// Values for decoding: value = (code * gap + low) * lower.
#[derive(Clone, Copy)]
pub(super) struct Decoder {
    gap: f32,
    low: f32,
    lower: f32,
}

impl<const BITS: usize> Range<BITS> {
    /// The largest code, which stands for the largest element of a block.
    const LEVELS: u32 = (1 << BITS) - 1;
}

impl<const BITS: usize> BlockFormat for Range<BITS> {
    const KIND: CodecKind = match BITS {
        1 => CodecKind::MinMax1,
        2 => CodecKind::MinMax2,
        4 => CodecKind::MinMax4,
        _ => CodecKind::MinMax8,
    };
    const BITS: usize = BITS;
    const NUMBERS: usize = 2;
    const FITS_EXTREMES: bool = true;
    const ZERO: Zero = Zero::Inexact;
    const DRAWS: Draws = Draws::Seeded;

    type Encoder = Encoder;
    type Decoder = Decoder;
    type Registers<'a, L: Lanes> = ();

    /// The error is largest in a block that reaches from -scale to scale: half of its gap between
    /// codes.
    fn errors() -> ErrorLaw {
        ErrorLaw {
            of_scale: 1.0005 / f64::from(Self::LEVELS),
            ..ErrorLaw::EXACT
        }
    }

    #[inline(always)]
    fn registers<L: Lanes>(&self, _: L) {}

    /// Adds 0, which turns -0 into +0.
    fn fit(x: &[f32], _: f32) -> Numbers {
        let low = x.iter().copied().fold(f32::INFINITY, f32::min);
        let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        [low + 0.0, high + 0.0]
    }

    #[inline(always)]
    fn fit_lanes<L: Lanes>(lanes: L, x: &[f32], _: f32) -> Numbers {
        simd::fit(lanes, x)
    }

    #[inline(always)]
    fn encoder([low, high]: Numbers) -> Encoder {
        let raise = regime(high - low);
        let (low, high) = (low * raise, high * raise);
        let range = high - low;
        Encoder {
            raise,
            low,
            factor: if range == 0.0 {
                0.0
            } else {
                Self::LEVELS as f32 / range
            },
        }
    }

    #[inline(always)]
    fn decoder([low, high]: Numbers) -> Decoder {
        let raise = regime(high - low);
        let (low, high) = (low * raise, high * raise);
        let gap = (high - low) / Self::LEVELS as f32;
        Decoder {
            gap: if raise < 1.0 { gap * SHRINK } else { gap },
            low,
            lower: match raise {
                RAISE => LOWER,
                1.0 => 1.0,
                _ => 4.0,
            },
        }
    }

    #[inline(always)]
    fn code(&self, encoder: Encoder, x: f32) -> u32 {
        place(encoder, x).round_ties_even() as u32
    }

    #[inline(always)]
    fn code_lanes<L: Lanes>(lanes: L, _: (), encoder: Encoder, x: L::F) -> L::I {
        simd::code(lanes, encoder, x)
    }

    /// Rounds up with a probability equal to the fraction of the exact code. The probability is
    /// exact to 2^-24.
    #[inline(always)]
    fn draw(&self, encoder: Encoder, x: f32, u: f32) -> u32 {
        let place = place(encoder, x);
        let below = place.floor();
        (below as u32 + u32::from(place - below > u)).min(Self::LEVELS)
    }

    #[inline(always)]
    fn draw_lanes<L: Lanes>(lanes: L, _: (), encoder: Encoder, x: L::F, u: L::F) -> L::I {
        simd::draw(lanes, encoder, x, u, Self::LEVELS as i32)
    }

    /// Adds 0, which turns a result that underflows to -0 into +0.
    #[inline(always)]
    fn value(&self, decoder: Decoder, code: u32) -> f32 {
        (code as f32).mul_add(decoder.gap, decoder.low) * decoder.lower + 0.0
    }

    #[inline(always)]
    fn value_lanes<L: Lanes>(lanes: L, _: (), decoder: Decoder, code: L::I) -> L::F {
        simd::value(lanes, decoder, code)
    }
}

/// Returns the factor by which a block with this range is multiplied. A range below [`TINY`] that is
/// not 0 implies elements below 2^-75, for which the multiplication is exact.
#[inline(always)]
fn regime(range: f32) -> f32 {
    let range = range.abs();
    if range >= HUGE {
        0.25
    } else if range < TINY && range > 0.0 {
        RAISE
    } else {
        1.0
    }
}

/// Returns the code of x before rounding to an integer. Rounding errors may make it exceed the
/// largest code.
#[inline(always)]
fn place(encoder: Encoder, x: f32) -> f32 {
    (x * encoder.raise - encoder.low) * encoder.factor
}

/// Encodes `x` as one block and returns its smallest and largest element. `codes` must have exactly the bytes
/// of the block's codes. With `random`, rounding is stochastic.
///
/// If the machine lacks `isa`, the scalar form runs, with an equal result.
pub(crate) fn encode_range<const BITS: usize>(
    isa: Isa,
    random: Option<RoundingRandom>,
    x: &[f32],
    codes: &mut [u8],
    stats: &mut EncodeStats,
) -> [f32; 2] {
    let isa = Available::new(isa).unwrap_or(Available::SCALAR);
    encode_block(&Range::<BITS>, isa, random, x, codes, stats)
}

/// Decodes one block whose smallest and largest element are `ends`. `codes` must have exactly the
/// bytes of its codes.
pub(crate) fn decode_range<const BITS: usize>(
    isa: Isa,
    ends: [f32; 2],
    codes: &[u8],
    y: &mut [f32],
) {
    let isa = Available::new(isa).unwrap_or(Available::SCALAR);
    decode_block(&Range::<BITS>, isa, ends, codes, y);
}

#[cfg(test)]
mod tests;
