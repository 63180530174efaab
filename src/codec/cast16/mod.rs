//! `cast16`: IEEE binary16, rounded to nearest even, subnormals kept.
//!
//! Infinity stays infinite and NaN becomes a quiet NaN. A finite element beyond 65,504 becomes 65,504,
//! so that rounding never makes an infinity.

mod simd;

use super::elementwise::{ElementFormat, Elementwise};
use super::feedback::Contraction;
use super::{CodecInfo, ErrorLaw, KernelInfo, MessageRange, Zero};
use crate::types::{CodecKind, CodecSpec};
use std::sync::Arc;

pub(super) const INFO: CodecInfo = CodecInfo {
    kind: CodecKind::Cast16,
    encode_seconds: 0.06e-9,
    decode_seconds: 0.05e-9,
    range: MessageRange::Half,
    contraction: |_| Contraction::relative(1.0 / 2048.0),
    kernels: Some(KernelInfo {
        encode_seconds: 0.3e-12,
        decode_seconds: 0.2e-12,
        ..KernelInfo::new("cast16")
    }),
    build: |_, isa| Arc::new(Elementwise::new(Fp16, isa)),
};

/// The element format of `cast16`: binary16.
#[derive(Debug)]
pub(super) struct Fp16;

/// The largest finite binary16.
const LARGEST: f32 = 65_504.0;
/// Exponent bias of fp32 minus the bias of binary16.
const REBIAS: u32 = 127 - 15;
/// The smallest normal binary16, as fp32 bits.
const NORMAL: u32 = (REBIAS + 1) << 23;

impl ElementFormat for Fp16 {
    const BITS: usize = 16;
    const ZERO: Zero = Zero::Signed;

    fn spec(&self) -> CodecSpec {
        CodecSpec::of(CodecKind::Cast16)
    }

    fn encode(&self, x: f32) -> u32 {
        let sign = (x.to_bits() >> 16) & 0x8000;
        let magnitude = if x.is_nan() {
            0x7e00 | (x.to_bits() >> 13 & 0x3ff)
        } else if x.is_infinite() {
            0x7c00
        } else {
            finite(x.abs().min(LARGEST).to_bits())
        };
        sign | magnitude
    }

    fn decode(&self, code: u32) -> f32 {
        let sign = (code & 0x8000) << 16;
        let (exponent, mantissa) = (code >> 10 & 0x1f, code & 0x3ff);
        let magnitude = match (exponent, mantissa) {
            // A binary16 subnormal is a multiple of 2^-24, which is a normal number in fp32.
            (0, _) => (mantissa as f32 * 2f32.powi(-24)).to_bits(),
            (0x1f, 0) => f32::INFINITY.to_bits(),
            (0x1f, _) => 0x7fc0_0000 | mantissa << 13,
            _ => (exponent + REBIAS) << 23 | mantissa << 13,
        };
        f32::from_bits(sign | magnitude)
    }

    fn largest(&self) -> f32 {
        LARGEST
    }

    /// Returns 2^-11 of |x|, plus half of the smallest subnormal.
    fn error_bound(&self, x: f32) -> f32 {
        x.abs() * 2f32.powi(-11) + 2f32.powi(-25)
    }

    fn errors(&self) -> ErrorLaw {
        ErrorLaw {
            of_value: 2f64.powi(-11),
            floor: 2f64.powi(-25),
            largest: LARGEST.into(),
            ..ErrorLaw::EXACT
        }
    }
}

/// Rounds a magnitude of at most [`LARGEST`], given as fp32 bits, to a binary16 code.
fn finite(bits: u32) -> u32 {
    if bits >= NORMAL {
        let rounded = bits + 0xfff + (bits >> 13 & 1);
        return (rounded >> 13) - (REBIAS << 10);
    }
    // A subnormal result is the mantissa with its leading 1, shifted to units of 2^-24. A shift of 31
    // or more rounds to 0.
    let shift = (REBIAS + 14).saturating_sub(bits >> 23).min(31);
    let mantissa = u64::from(bits & 0x7f_ffff | 0x80_0000);
    let half = (1 << (shift - 1)) - 1;
    ((mantissa + half + (mantissa >> shift & 1)) >> shift) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_values_equal_the_half_crate() {
        for code in 0..=u16::MAX {
            let value = half::f16::from_bits(code).to_f32_const();
            assert_eq!(
                Fp16.decode(code.into()).to_bits(),
                value.to_bits(),
                "{code:#x}"
            );
        }
        for upper in 0..=u16::MAX {
            for lower in [0u32, 1, 0xfff, 0x1000, 0x1001, 0x8000, 0xffff] {
                let x = f32::from_bits(u32::from(upper) << 16 | lower);
                let oracle = half::f16::from_f32_const(x);
                let oracle = if oracle.is_finite() || !x.is_finite() {
                    oracle
                } else if x > 0.0 {
                    half::f16::MAX
                } else {
                    half::f16::MIN
                };
                assert_eq!(
                    Fp16.encode(x),
                    u32::from(oracle.to_bits()),
                    "{:#x}",
                    x.to_bits()
                );
            }
        }
    }
}
