//! `trunc8`, `trunc16`, `trunc24`: the upper 1, 2 or 3 bytes of each fp32 number.
//!
//! Source: Bitpack of ADT, "Reducing data motion to accelerate the training of deep neural networks".
//! Truncation rounds towards zero and keeps the sign, so that -0 stays -0. The kept bytes are little
//! endian, element after element; decoding sets the dropped bytes to zero. `trunc16` is bfloat16 by
//! truncation. `trunc8` keeps seven bits of the exponent and loses up to three quarters of a number.
//!
//! Unlike Bitpack, these codecs keep non-finite elements. A NaN is first made quiet, which sets a bit in
//! the upper two bytes. One byte has no such bit. Bitpack gives 0x7f and 0xff to numbers from 2^127 up;
//! in `trunc8` these codes stand for NaN, and such numbers saturate at 0x7e. All other codes equal those
//! of Bitpack; [`pack_upper`] has Bitpack's codes throughout.

mod simd;
mod upper;

use super::elementwise::{ElementFormat, Elementwise};
use super::feedback::Contraction;
use super::{CodecInfo, ErrorLaw, KernelInfo, MessageRange, Zero};
use crate::types::{CodecKind, CodecSpec};
use std::sync::Arc;
pub(crate) use upper::{pack_upper, unpack_upper};

/// Returns the facts about the codec that keeps `BITS` bits: 8, 16 or 24.
pub(super) const fn info<const BITS: usize>() -> CodecInfo {
    CodecInfo {
        kind: kind(BITS),
        encode_seconds: 0.06e-9,
        decode_seconds: 0.05e-9,
        range: MessageRange::Full,
        contraction: |_| Contraction {
            output: 1.0,
            ..Contraction::relative(match BITS {
                8 => 0.75,
                16 => 1.0 / 128.0,
                _ => 1.0 / 32768.0,
            })
        },
        kernels: Some(KernelInfo {
            words: |_, words| words[6] = BITS as u32,
            ..KernelInfo::new("trunc")
        }),
        build: |_, isa| Arc::new(Elementwise::new(Upper::<BITS>, isa)),
    }
}

const fn kind(bits: usize) -> CodecKind {
    match bits {
        8 => CodecKind::Trunc8,
        16 => CodecKind::Trunc16,
        _ => CodecKind::Trunc24,
    }
}

/// The element format that keeps the upper `BITS` bits.
#[derive(Debug)]
pub(super) struct Upper<const BITS: usize>;

/// fp32 bits of infinity.
const INFINITE: u32 = 0x7f80_0000;
/// The fp32 bit that makes a NaN quiet.
const QUIET: u32 = 0x0040_0000;
/// Magnitude code of `trunc8` for non-finite elements.
const NOT_FINITE: u32 = 0x7f;
/// fp32 bits of the largest magnitude whose `trunc8` code is below [`NOT_FINITE`].
const LARGEST8: u32 = 0x7eff_ffff;

impl<const BITS: usize> ElementFormat for Upper<BITS> {
    const BITS: usize = BITS;
    const ZERO: Zero = Zero::Signed;

    fn spec(&self) -> CodecSpec {
        CodecSpec::of(kind(BITS))
    }

    fn encode(&self, x: f32) -> u32 {
        let sign = x.to_bits() & 0x8000_0000;
        let magnitude = x.to_bits() & 0x7fff_ffff;
        let kept = match BITS {
            8 if magnitude >= INFINITE => magnitude | NOT_FINITE << 24,
            8 => magnitude.min(LARGEST8),
            _ if magnitude > INFINITE => magnitude | QUIET,
            _ => magnitude,
        };
        (sign | kept) >> (32 - BITS)
    }

    fn decode(&self, code: u32) -> f32 {
        match BITS {
            8 if code & 0x7f == NOT_FINITE => f32::NAN,
            _ => f32::from_bits(code << (32 - BITS)),
        }
    }

    fn largest(&self) -> f32 {
        match BITS {
            8 => f32::from_bits(LARGEST8),
            _ => f32::MAX,
        }
    }

    /// Returns the bound that the error law gives for x, rounded up.
    fn error_bound(&self, x: f32) -> f32 {
        let law = self.errors();
        ((law.of_value * f64::from(x.abs()) + law.floor) as f32).next_up()
    }

    fn errors(&self) -> ErrorLaw {
        ErrorLaw {
            of_value: match BITS {
                8 => 0.75,
                16 => 2f64.powi(-7),
                _ => 2f64.powi(-15),
            },
            floor: f64::from(f32::from_bits(1 << (32 - BITS))),
            largest: self.largest().into(),
            ..ErrorLaw::EXACT
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both<const BITS: usize>(x: f32) -> (u32, f32) {
        let code = Upper::<BITS>.encode(x);
        (code, Upper::<BITS>.decode(code))
    }

    #[test]
    fn golden_inputs_become_the_published_codes() {
        assert_eq!(both::<24>(1.23), (0x3f9d70, 1.229_980_5));
        assert_eq!(both::<16>(1.23), (0x3f9d, 1.226_562_5));
        assert_eq!(both::<8>(1.23), (0x3f, 0.5));
        assert_eq!(both::<16>(-std::f32::consts::PI), (0xc049, -3.140_625));
    }

    #[test]
    fn non_finite_elements_stay_non_finite() {
        let faint = f32::from_bits(INFINITE + 1);
        assert_eq!(both::<16>(f32::INFINITY).1, f32::INFINITY);
        assert_eq!(both::<24>(f32::NEG_INFINITY).1, f32::NEG_INFINITY);
        assert!(both::<16>(faint).1.is_nan() && both::<24>(-faint).1.is_nan());
        for x in [faint, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            assert!(both::<8>(x).1.is_nan());
        }
        assert_eq!(both::<8>(f32::MAX), (0x7e, f32::from_bits(0x7e00_0000)));
        assert_eq!(both::<8>(-2f32.powi(127)).0, 0xfe);
    }

    /// The relative errors reach the bounds of truncation: 2^-15 with three bytes, 2^-7 with two, 3/4
    /// with one.
    #[test]
    fn truncation_errors_reach_the_published_bounds() {
        let x: Vec<f32> = (0..1 << 16)
            .map(|i| (i as f32 / 65_536.0 * 4.0).exp2())
            .collect();
        let worst = |y: fn(f32) -> f32| {
            let errors = x.iter().map(|&x| (x - y(x)) / x);
            errors.fold((0f32, 0f32), |(low, high), e| (low.min(e), high.max(e)))
        };
        let (low, high) = worst(|x| both::<24>(x).1);
        assert!(low >= 0.0 && high < 2f32.powi(-15) && high > 0.9 * 2f32.powi(-15));
        let (low, high) = worst(|x| both::<16>(x).1);
        assert!(low >= 0.0 && high < 2f32.powi(-7) && high > 0.9 * 2f32.powi(-7));
        let (low, high) = worst(|x| both::<8>(x).1);
        assert!(low >= 0.0 && high < 0.75 && high > 0.74);
    }
}
