//! `terngrad`: -s, 0 or s, with chance.
//!
//! Source: Wen et al. 2017, as told in compression.md 1.6. Elements are clipped to 2.5 standard
//! deviations of their block; s is the largest magnitude that is left; an element becomes s with
//! its sign with probability |x|/s, otherwise 0. What decodes is the clipped element on average.
//! Elements beyond s are clipped by intent and are not counted as saturated.
//!
//! The standard deviation is that about 0, so that a block of equal numbers keeps its value. The
//! source shares s among ranks so that ternary numbers can be added as such; here sums are fp32
//! and each block has its own s, which is never larger than a shared one.
//!
//! Codes are 0 for 0, 1 for s, 2 for -s; 3, which is never written, decodes to 0. Every code
//! needs a draw, so a seed tells streams apart but is not needed to round at random.

mod simd;

use super::blocked::{BlockFormat, Blocked, Numbers, total};
use super::simd::Lanes;
use super::{ErrorLaw, Zero};
use crate::types::CodecKind;

/// The codec.
pub(super) type TernGrad = Blocked<Ternary>;

/// Meaning of the codes.
#[derive(Debug)]
pub(super) struct Ternary;

/// Standard deviations that are not clipped.
const CLIP: f64 = 2.5;
/// Scales below this are raised before they are inverted, scales from [`HUGE`] up lowered.
const TINY: f32 = f32::from_bits((127 - 100) << 23);
const HUGE: f32 = f32::from_bits((127 + 100) << 23);
/// 2^64 and 2^-64.
const RAISE: f32 = f32::from_bits((127 + 64) << 23);
const LOWER: f32 = f32::from_bits((127 - 64) << 23);

/// probability = (|x| * raise) * factor.
#[derive(Clone, Copy)]
pub(super) struct Encoder {
    raise: f32,
    factor: f32,
}

impl BlockFormat for Ternary {
    const BITS: usize = 2;
    const NUMBERS: usize = 1;
    const FITS_EXTREMES: bool = false;
    const ZERO: Zero = Zero::Positive;
    const ALWAYS_RANDOM: bool = true;

    type Encoder = Encoder;
    type Decoder = f32;

    fn kind() -> CodecKind {
        CodecKind::TernGrad
    }

    /// From 0 to s and back, and what is clipped.
    fn errors() -> ErrorLaw {
        ErrorLaw {
            of_scale: 1.0,
            ..ErrorLaw::EXACT
        }
    }

    fn fit(x: &[f32]) -> Numbers {
        let most = x.iter().fold(0f32, |most, x| most.max(x.abs()));
        let squares = total(x.iter().map(|&x| f64::from(x) * f64::from(x)));
        scale(most, squares, x.len())
    }

    #[inline(always)]
    fn fit_lanes<L: Lanes>(lanes: L, x: &[f32]) -> Numbers {
        simd::fit(lanes, x)
    }

    #[inline(always)]
    fn encoder([scale, _]: Numbers) -> Encoder {
        let raise = if scale < TINY {
            RAISE
        } else if scale >= HUGE {
            LOWER
        } else {
            1.0
        };
        Encoder {
            raise,
            factor: match scale == 0.0 {
                true => 0.0,
                false => 1.0 / (scale * raise),
            },
        }
    }

    #[inline(always)]
    fn decoder([scale, _]: Numbers) -> f32 {
        scale
    }

    /// Nearest of the three: no draw is a draw of the middle.
    #[inline(always)]
    fn code(encoder: Encoder, x: f32) -> u32 {
        Self::draw(encoder, x, 0.5)
    }

    #[inline(always)]
    fn code_lanes<L: Lanes>(lanes: L, encoder: Encoder, x: L::F) -> L::I {
        simd::draw(lanes, encoder, x, lanes.splat(0.5))
    }

    #[inline(always)]
    fn draw(encoder: Encoder, x: f32, u: f32) -> u32 {
        let probability = (x.abs() * encoder.raise) * encoder.factor;
        match probability > u {
            true => 1 + (x.to_bits() >> 31),
            false => 0,
        }
    }

    #[inline(always)]
    fn draw_lanes<L: Lanes>(lanes: L, encoder: Encoder, x: L::F, u: L::F) -> L::I {
        simd::draw(lanes, encoder, x, u)
    }

    #[inline(always)]
    fn value(scale: f32, code: u32) -> f32 {
        match code {
            1 => scale,
            2 => -scale,
            _ => 0.0,
        }
    }

    #[inline(always)]
    fn value_lanes<L: Lanes>(lanes: L, scale: f32, code: L::I) -> L::F {
        simd::value(lanes, scale, code)
    }
}

/// The scale of a block with this largest magnitude and sum of squares.
#[inline(always)]
fn scale(most: f32, squares: f64, n: usize) -> Numbers {
    let clip = CLIP * (squares / n as f64).sqrt();
    // A clip beyond fp32 is larger than any magnitude.
    [most.min(clip as f32), 0.0]
}

#[cfg(test)]
mod tests {
    use super::super::{Codec, Random, Span, build};
    use crate::cpu::Isa;
    use std::sync::Arc;

    fn codec(isa: Isa) -> Arc<dyn Codec> {
        build("terngrad:block=64".parse().unwrap(), isa)
            .unwrap()
            .unwrap()
    }

    fn decoded(codec: &dyn Codec, x: &[f32], random: Random) -> Vec<f32> {
        let span = Span::whole(x.len()).drawing(random);
        let mut wire = vec![0xee; codec.wire_bytes(x.len())];
        let mut y = vec![0.0; x.len()];
        codec.encode(span, x, None, &mut wire, None);
        codec.decode(span, &wire, &mut y);
        y
    }

    #[test]
    fn values_are_three_and_the_scale_is_clipped() {
        // 63 ones and one 100: the mean square is 157.2, so that 2.5 deviations are 31.3.
        let mut x = vec![1f32; 64];
        x[17] = -100.0;
        let s = (2.5 * (10_063f64 / 64.0).sqrt()) as f32;
        for isa in Isa::available() {
            let y = decoded(&*codec(isa), &x, Random::new(1, 1, 1));
            assert_eq!(y[17], -s);
            assert!(y.iter().all(|&y| y == 0.0 || y == s || y == -s));
            // Equal numbers are their own scale.
            assert_eq!(
                decoded(&*codec(isa), &[-3.5; 64], Random::default()),
                [-3.5; 64]
            );
        }
    }

    #[test]
    fn what_is_not_clipped_is_unbiased() {
        const DRAWS: u64 = 40_000;
        let x: Vec<f32> = (0..64).map(|i| (i as f32 - 31.5) / 32.0).collect();
        for isa in [Isa::Scalar, Isa::detect()] {
            let codec = codec(isa);
            let mut sums = vec![0f64; x.len()];
            for operation in 0..DRAWS {
                let y = decoded(&*codec, &x, Random::new(0, operation, 5));
                sums.iter_mut()
                    .zip(y)
                    .for_each(|(sum, y)| *sum += f64::from(y));
            }
            let s = f64::from(31.5f32 / 32.0);
            for (&x, sum) in x.iter().zip(sums) {
                let (x, mean) = (f64::from(x), sum / DRAWS as f64);
                let p = x.abs() / s;
                let deviation = s * (p * (1.0 - p) / DRAWS as f64).sqrt();
                assert!(
                    (mean - x).abs() <= 4.2 * deviation + 1e-6,
                    "{isa:?} {x}: {mean}"
                );
            }
        }
    }
}
