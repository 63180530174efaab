//! `linear8`: sign and a 7-bit integer k with the value k * s/127, where s is the scale of the block.
//!
//! Source: linear quantization in Dettmers, "8-Bit Approximations for Parallelism in Deep Learning". The
//! magnitude code is the integer nearest to |x| * 127/s; ties go to the smaller integer. The error is at most
//! half a step, s/254. For s = [`f32::MAX`] the unit s/127 rounds up. The codec then uses the next smaller
//! fp32 number as the unit, so that 127 units stay finite.
//!
//! With a seed, rounding is stochastic and unbiased; see [`super::blocked::Scaled`].

mod simd;

use super::blocked::{Blocked, Draws, ROUNDING, Scaled, ScaledFormat};
use super::feedback::Contraction;
use super::{CodecInfo, ErrorLaw, KernelInfo, MessageRange};
use crate::types::CodecKind;
use std::sync::Arc;

pub(super) const INFO: CodecInfo = CodecInfo {
    kind: CodecKind::Linear8,
    encode_seconds: 0.13e-9,
    decode_seconds: 0.05e-9,
    range: MessageRange::Full,
    // Half a step; with a seed, the step between the two codes around an element.
    contraction: |spec| {
        Contraction::largest(if spec.seed == 0 {
            1.0 / 254.0
        } else {
            1.0 / 127.0
        })
    },
    kernels: Some(KernelInfo {
        is_fused: true,
        encode_seconds: 0.6e-12,
        decode_seconds: 0.3e-12,
        ..KernelInfo::new("linear8")
    }),
    build: |spec, isa| Arc::new(Blocked::new(Scaled(Linear), spec, isa)),
};

/// The block format of `linear8`.
#[derive(Debug)]
pub(super) struct Linear;

const LEVELS: f32 = 127.0;

/// The largest unit for which 127 units are finite.
const LARGEST_UNIT: f32 = f32::from_bits(0x7c01_0203);

impl ScaledFormat for Linear {
    const KIND: CodecKind = CodecKind::Linear8;
    const DRAWS: Draws = Draws::Seeded;

    const ERRORS: ErrorLaw = ErrorLaw {
        of_scale: 1.0 / 254.0 + ROUNDING,
        ..ErrorLaw::EXACT
    };

    #[inline(always)]
    fn factor(scale: f32) -> f32 {
        LEVELS / scale
    }

    #[inline(always)]
    fn unit(scale: f32) -> f32 {
        (scale / LEVELS).min(LARGEST_UNIT)
    }

    /// Rounds to nearest, ties down, as the ceiling of the product minus one half. The multiply-add is fused,
    /// so that the product is not rounded before the comparison.
    #[inline(always)]
    fn magnitude(&self, x: f32, factor: f32) -> u8 {
        x.mul_add(factor, -0.5).ceil().min(LEVELS) as u8
    }

    #[inline(always)]
    fn value(&self, code: u8) -> f32 {
        let k = f32::from(code & 0x7f);
        if code & 0x80 == 0 { k } else { -k }
    }

    fn half_step(&self, _: f64, scale: f64) -> f64 {
        scale / 254.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_of_a_finite_scale_keeps_127_units_finite() {
        assert!((LARGEST_UNIT * LEVELS).is_finite());
        assert!((LARGEST_UNIT.next_up() * LEVELS).is_infinite());
        let below = f32::MAX.next_down();
        assert_eq!(
            Linear::unit(below),
            below / LEVELS,
            "only the largest number"
        );
        assert!((Linear::unit(f32::MAX) * LEVELS).is_finite());
    }

    #[test]
    fn magnitude_at_a_tie_is_the_smaller() {
        // With s = 127 the factor is 1, so that k + 0.5 is an exact tie.
        for k in 0..127 {
            let middle = k as f32 + 0.5;
            assert_eq!(Linear.magnitude(middle, 1.0), k);
            assert_eq!(Linear.magnitude(middle.next_up(), 1.0), k + 1);
            assert_eq!(Linear.magnitude(k as f32, 1.0), k);
        }
        assert_eq!(Linear.magnitude(1e30, 1.0), 127);
        assert_eq!(Linear.magnitude(f32::INFINITY, 1.0), 127);
    }
}
