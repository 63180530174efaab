//! `minmax1`, `minmax2`, `minmax4`, `minmax8`: integers of b bits between the smallest and the
//! largest element of a block.
//!
//! Source: compression.md 1.6 (CompLL). With gap = (max - min)/(2^b - 1) an element's code is
//! (x - min)/gap rounded half to even, and a code is worth min + code * gap. With a seed, rounding
//! is stochastic: up with the probability of the fraction, so that what decodes is x on average.
//!
//! A block's numbers are min and max. Codes of less than a byte start at its least significant
//! bit. Arithmetic is fp32: the reciprocal of the gap is rounded, then x - min, then their
//! product. Ranges below 2^-100 are worked on 2^64 times as large, ranges from 2^126 up four
//! times smaller, both exactly where it matters, so that no range is too small or too large.

mod simd;

use super::blocked::{BlockFormat, Blocked, Numbers};
use super::simd::Lanes;
use super::{ErrorLaw, Zero};
use crate::types::CodecKind;

/// The codec of `BITS` bits.
pub(super) type MinMax<const BITS: usize> = Blocked<Range<BITS>>;

/// Ranges below this are raised.
const TINY: f32 = f32::from_bits((127 - 100) << 23);
/// 2^64.
const RAISE: f32 = f32::from_bits((127 + 64) << 23);
/// 2^-64.
const LOWER: f32 = f32::from_bits((127 - 64) << 23);
/// Ranges from here up, whose width may overflow, are lowered.
const HUGE: f32 = f32::from_bits((127 + 126) << 23);
/// Just below 1: a lowered range decodes to no more than its largest element, which may be the
/// largest number there is.
const SHRINK: f32 = 1.0 - 1.0 / 4_194_304.0;

/// Meaning of the codes.
#[derive(Debug)]
pub(super) struct Range<const BITS: usize>;

/// code = ((x * raise) - low) * factor.
#[derive(Clone, Copy)]
pub(super) struct Encoder {
    raise: f32,
    low: f32,
    factor: f32,
}

/// value = (code * gap + low) * lower.
#[derive(Clone, Copy)]
pub(super) struct Decoder {
    gap: f32,
    low: f32,
    lower: f32,
}

impl<const BITS: usize> Range<BITS> {
    /// The largest code.
    const LEVELS: u32 = (1 << BITS) - 1;
}

impl<const BITS: usize> BlockFormat for Range<BITS> {
    const BITS: usize = BITS;
    const NUMBERS: usize = 2;
    const FITS_EXTREMES: bool = true;
    const ZERO: Zero = Zero::Inexact;
    const ALWAYS_RANDOM: bool = false;

    type Encoder = Encoder;
    type Decoder = Decoder;

    fn kind() -> CodecKind {
        match BITS {
            1 => CodecKind::MinMax1,
            2 => CodecKind::MinMax2,
            4 => CodecKind::MinMax4,
            _ => CodecKind::MinMax8,
        }
    }

    /// Half of the gap of a block that reaches from -scale to scale.
    fn errors() -> ErrorLaw {
        ErrorLaw {
            of_scale: 1.0005 / f64::from(Self::LEVELS),
            ..ErrorLaw::EXACT
        }
    }

    /// Adding 0 turns -0 into +0.
    fn fit(x: &[f32]) -> Numbers {
        let low = x.iter().copied().fold(f32::INFINITY, f32::min);
        let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        [low + 0.0, high + 0.0]
    }

    #[inline(always)]
    fn fit_lanes<L: Lanes>(lanes: L, x: &[f32]) -> Numbers {
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
            factor: match range == 0.0 {
                true => 0.0,
                false => Self::LEVELS as f32 / range,
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
    fn code(encoder: Encoder, x: f32) -> u32 {
        place(encoder, x).round_ties_even() as u32
    }

    #[inline(always)]
    fn code_lanes<L: Lanes>(lanes: L, encoder: Encoder, x: L::F) -> L::I {
        simd::code(lanes, encoder, x)
    }

    /// The fraction is exact, and so is the probability of rounding up to 2^-24.
    #[inline(always)]
    fn draw(encoder: Encoder, x: f32, u: f32) -> u32 {
        let place = place(encoder, x);
        let below = place.floor();
        (below as u32 + u32::from(place - below > u)).min(Self::LEVELS)
    }

    #[inline(always)]
    fn draw_lanes<L: Lanes>(lanes: L, encoder: Encoder, x: L::F, u: L::F) -> L::I {
        simd::draw(lanes, encoder, x, u, Self::LEVELS as i32)
    }

    /// Adding 0 turns what vanished below the subnormals into +0.
    #[inline(always)]
    fn value(decoder: Decoder, code: u32) -> f32 {
        (code as f32).mul_add(decoder.gap, decoder.low) * decoder.lower + 0.0
    }

    #[inline(always)]
    fn value_lanes<L: Lanes>(lanes: L, decoder: Decoder, code: L::I) -> L::F {
        simd::value(lanes, decoder, code)
    }
}

/// What a block with this range is multiplied with. A range below [`TINY`] that is not 0 belongs
/// to numbers below 2^-75, which are raised exactly.
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

/// Where x lies between 0 and the largest code, which it exceeds by a rounding at most.
#[inline(always)]
fn place(encoder: Encoder, x: f32) -> f32 {
    (x * encoder.raise - encoder.low) * encoder.factor
}

#[cfg(test)]
mod tests;
