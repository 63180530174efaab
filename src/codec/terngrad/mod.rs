//! `terngrad`: -s, 0 or s, by stochastic rounding.
//!
//! Source: Wen et al., "TernGrad" (2017). Elements are clipped to 2.5 times the root mean square (RMS) of
//! their block, and s is the largest magnitude that is left. An element becomes s with its sign with
//! probability |x|/s, otherwise 0. On average it decodes to the clipped element.
//! Elements beyond s are clipped by intent and are not counted as saturated.
//!
//! Wen et al. clip to standard deviations. The RMS lets a block of equal numbers keep its value. Wen et
//! al. share s among ranks so that ternary numbers can be added as such. Here sums are fp32, and
//! each block has its own s, which never exceeds a shared s.
//!
//! Codes are 0 for 0, 1 for s and 2 for -s. Code 3 is never written and decodes to 0. Every code
//! needs a random number. A seed selects other random numbers; without a seed rounding is
//! stochastic as well.

mod simd;

use super::blocked::{BlockFormat, Blocked, Draws, Numbers, total};
use super::feedback::Contraction;
use super::simd::Lanes;
use super::{CodecInfo, ErrorLaw, KernelInfo, MessageRange, Zero};
use crate::types::{CodecKind, CodecSpec, ScaleRule};
use std::sync::Arc;

pub(super) const INFO: CodecInfo = CodecInfo {
    kind: CodecKind::TernGrad,
    encode_seconds: 0.4e-9,
    decode_seconds: 0.15e-9,
    range: MessageRange::Full,
    contraction,
    kernels: Some(KernelInfo {
        words: |spec, words| words[1] = contraction(spec).damping.to_bits(),
        ..KernelInfo::new("terngrad")
    }),
    build: |spec, isa| Arc::new(Blocked::new(Ternary, spec, isa)),
};

/// The block format of `terngrad`.
#[derive(Debug)]
pub(super) struct Ternary;

/// Magnitudes beyond this many times the RMS of the block are clipped to it.
const CLIP: f64 = 2.5;
/// Before the reciprocal of a scale is computed, scales below this are multiplied by [`RAISE`], and scales
/// from [`HUGE`] up by [`LOWER`].
const TINY: f32 = f32::from_bits((127 - 100) << 23);
const HUGE: f32 = f32::from_bits((127 + 100) << 23);
/// 2^64, by which small scales are multiplied.
const RAISE: f32 = f32::from_bits((127 + 64) << 23);
/// 2^-64, by which huge scales are multiplied.
const LOWER: f32 = f32::from_bits((127 - 64) << 23);

/// Returns the contraction in the Euclidean norm of a block of n elements, on average over random numbers.
///
/// Let c be the clipped block, s its scale and d the damping. Then E‖v - d C(v)‖² is
/// ‖v‖² - 2 d <v, c> + d² s ‖c‖₁, since E C(v) = c and E‖C(v)‖² = s ‖c‖₁. Undamped this may exceed ‖v‖²: it
/// is 1.0 ‖v‖² for normal numbers, and residuals wander off. As s <= 2.5 ‖v‖ / √n and ‖c‖₁ <= √n ‖v‖, the last
/// term is at most 2.5 d² ‖v‖², which also bounds ‖C(v)‖². The worst block found has one clipped spike among
/// equal small elements; with d = 1/4, δ √n is 0.447 there for n = 4096 and more for smaller n. With d = 1/2
/// δ is negative from n = 1024 on.
fn contraction(spec: CodecSpec) -> Contraction {
    const DAMPING: f32 = 0.25;
    let block = match spec.scale {
        ScaleRule::Block(block) => f64::from(block),
        _ => 4096.0,
    };
    let output = f64::from(DAMPING) * CLIP.sqrt();
    Contraction::euclidean(0.44 / block.sqrt(), output, DAMPING)
}

/// Values for encoding: an element becomes nonzero with probability |x| * raise * factor.
#[derive(Clone, Copy)]
pub(super) struct Encoder {
    raise: f32,
    factor: f32,
}

impl BlockFormat for Ternary {
    const KIND: CodecKind = CodecKind::TernGrad;
    const BITS: usize = 2;
    const NUMBERS: usize = 1;
    const FITS_EXTREMES: bool = false;
    const ZERO: Zero = Zero::Positive;
    const DRAWS: Draws = Draws::Always;

    type Encoder = Encoder;
    type Decoder = f32;
    type Registers<'a, L: Lanes> = ();

    /// An element may become 0 or s, or be clipped, so its error may reach the block's largest
    /// magnitude.
    fn errors() -> ErrorLaw {
        ErrorLaw {
            of_scale: 1.0,
            ..ErrorLaw::EXACT
        }
    }

    #[inline(always)]
    fn registers<L: Lanes>(&self, _: L) {}

    fn fit(x: &[f32], largest: f32) -> Numbers {
        let squares = total(x.iter().map(|&x| f64::from(x) * f64::from(x)));
        scale(largest, squares, x.len())
    }

    #[inline(always)]
    fn fit_lanes<L: Lanes>(lanes: L, x: &[f32], largest: f32) -> Numbers {
        simd::fit(lanes, x, largest)
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
            factor: if scale == 0.0 {
                0.0
            } else {
                1.0 / (scale * raise)
            },
        }
    }

    #[inline(always)]
    fn decoder([scale, _]: Numbers) -> f32 {
        scale
    }

    /// Rounds deterministically to the nearest of -s, 0 and s.
    #[inline(always)]
    fn code(&self, encoder: Encoder, x: f32) -> u32 {
        self.draw(encoder, x, 0.5)
    }

    #[inline(always)]
    fn code_lanes<L: Lanes>(lanes: L, _: (), encoder: Encoder, x: L::F) -> L::I {
        simd::draw(lanes, encoder, x, lanes.splat(0.5))
    }

    #[inline(always)]
    fn draw(&self, encoder: Encoder, x: f32, u: f32) -> u32 {
        let probability = (x.abs() * encoder.raise) * encoder.factor;
        if probability > u {
            1 + (x.to_bits() >> 31)
        } else {
            0
        }
    }

    #[inline(always)]
    fn draw_lanes<L: Lanes>(lanes: L, _: (), encoder: Encoder, x: L::F, u: L::F) -> L::I {
        simd::draw(lanes, encoder, x, u)
    }

    #[inline(always)]
    fn value(&self, scale: f32, code: u32) -> f32 {
        match code {
            1 => scale,
            2 => -scale,
            _ => 0.0,
        }
    }

    #[inline(always)]
    fn value_lanes<L: Lanes>(lanes: L, _: (), scale: f32, code: L::I) -> L::F {
        simd::value(lanes, scale, code)
    }
}

/// Returns the numbers of a block of `n` elements with this largest magnitude and this sum of
/// squares.
#[inline(always)]
fn scale(largest: f32, squares: f64, n: usize) -> Numbers {
    let clip = CLIP * (squares / n as f64).sqrt();
    // A `clip` beyond the range of fp32 becomes infinite, so that the largest magnitude is taken.
    [largest.min(clip as f32), 0.0]
}

#[cfg(test)]
mod tests {
    use super::super::{Codec, RoundingRandom, Span, build};
    use crate::cpu::Isa;
    use std::sync::Arc;

    fn codec(isa: Isa) -> Arc<dyn Codec> {
        build("terngrad:block=64".parse().unwrap(), isa)
            .unwrap()
            .unwrap()
    }

    fn decoded(codec: &dyn Codec, x: &[f32], random: RoundingRandom) -> Vec<f32> {
        let span = Span::whole(x.len()).drawing(random);
        let mut wire = vec![0xee; codec.wire_bytes(x.len())];
        let mut y = vec![0.0; x.len()];
        codec.encode(span, x, None, &mut wire, None);
        codec.decode(span, &wire, &mut y);
        y
    }

    #[test]
    fn values_beyond_the_clip_become_the_scale() {
        // With 63 ones and one 100 the mean square is 157.2, so that 2.5 times the RMS is
        // 31.3.
        let mut x = vec![1f32; 64];
        x[17] = -100.0;
        let s = (2.5 * (10_063f64 / 64.0).sqrt()) as f32;
        for isa in Isa::available() {
            let y = decoded(&*codec(isa), &x, RoundingRandom::new(1, 1, 1));
            assert_eq!(y[17], -s);
            assert!(y.iter().all(|&y| y == 0.0 || y == s || y == -s));
            // A block of equal numbers has their magnitude as its scale, and so decodes exactly.
            assert_eq!(
                decoded(&*codec(isa), &[-3.5; 64], RoundingRandom::default()),
                [-3.5; 64]
            );
        }
    }

    #[test]
    fn mean_of_unclipped_values_is_unbiased() {
        const DRAWS: u64 = 40_000;
        let x: Vec<f32> = (0..64).map(|i| (i as f32 - 31.5) / 32.0).collect();
        for isa in [Isa::Scalar, Isa::detect()] {
            let codec = codec(isa);
            let mut sums = vec![0f64; x.len()];
            for operation in 0..DRAWS {
                let y = decoded(&*codec, &x, RoundingRandom::new(0, operation, 5));
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
