//! `cast_bf16`: bfloat16, rounded to nearest even.
//!
//! Infinity stays infinite and NaN becomes a quiet NaN. A finite element beyond the largest finite
//! bfloat16 becomes that largest number, so that rounding never makes an infinity.

mod simd;

use super::elementwise::{ElementFormat, Elementwise};
use super::feedback::Contraction;
use super::{CodecInfo, ErrorLaw, KernelInfo, MessageRange, Zero};
use crate::types::{CodecKind, CodecSpec};
use std::sync::Arc;

pub(super) const INFO: CodecInfo = CodecInfo {
    kind: CodecKind::CastBf16,
    encode_seconds: 0.06e-9,
    decode_seconds: 0.05e-9,
    range: MessageRange::Full,
    contraction: |_| Contraction::relative(1.0 / 256.0),
    kernels: Some(KernelInfo {
        encode_seconds: 0.3e-12,
        decode_seconds: 0.2e-12,
        ..KernelInfo::new("cast_bf16")
    }),
    build: |_, isa| Arc::new(Elementwise::new(Bf16, isa)),
};

/// The element format of `cast_bf16`: bfloat16.
#[derive(Debug)]
pub(super) struct Bf16;

/// The largest finite bfloat16, as fp32 bits.
const LARGEST: u32 = 0x7f7f_0000;
/// Infinity, as fp32 bits.
const INFINITE: u32 = 0x7f80_0000;
/// The bit of fp32 that makes a NaN quiet.
const QUIET: u32 = 0x0040_0000;

impl ElementFormat for Bf16 {
    const BITS: usize = 16;
    const ZERO: Zero = Zero::Signed;

    fn spec(&self) -> CodecSpec {
        CodecSpec::of(CodecKind::CastBf16)
    }

    fn encode(&self, x: f32) -> u32 {
        let sign = x.to_bits() & 0x8000_0000;
        let bits = x.to_bits() & 0x7fff_ffff;
        let rounded = if bits > INFINITE {
            bits | QUIET
        } else if bits == INFINITE {
            bits
        } else {
            // Adds just under half of the last kept bit, or half if that bit is 1, so that rounding is to
            // nearest even.
            (bits + 0x7fff + (bits >> 16 & 1)).min(LARGEST)
        };
        (rounded | sign) >> 16
    }

    fn decode(&self, code: u32) -> f32 {
        f32::from_bits(code << 16)
    }

    fn largest(&self) -> f32 {
        f32::from_bits(LARGEST)
    }

    /// Returns 2^-8 of |x|, plus half of the smallest subnormal.
    fn error_bound(&self, x: f32) -> f32 {
        x.abs() * 2f32.powi(-8) + f32::from_bits(1 << 15)
    }

    fn errors(&self) -> ErrorLaw {
        ErrorLaw {
            of_value: 2f64.powi(-8),
            floor: 2f64.powi(-134),
            largest: self.largest().into(),
            ..ErrorLaw::EXACT
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_values_equal_the_half_crate() {
        for upper in 0..=u16::MAX {
            assert_eq!(
                Bf16.decode(upper.into()).to_bits(),
                f32::from_bits(u32::from(upper) << 16).to_bits()
            );
            for lower in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(upper) << 16 | lower);
                let oracle = half::bf16::from_f32(x);
                let oracle = if oracle.is_finite() || !x.is_finite() {
                    oracle
                } else if x > 0.0 {
                    half::bf16::MAX
                } else {
                    half::bf16::MIN
                };
                assert_eq!(
                    Bf16.encode(x),
                    u32::from(oracle.to_bits()),
                    "{:#x}",
                    x.to_bits()
                );
            }
        }
    }
}
