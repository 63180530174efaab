//! `linear8`: sign and a 7-bit integer k, worth k * s/127.
//!
//! Source: compression.md 1.1, "linear quant". The magnitude code is the integer nearest to
//! |x| * 127/s, ties to the smaller. Half a step is s/254. Of the largest number, whose 127th part
//! rounds up, the step is one place smaller: 127 of them must not be infinite.

mod simd;

use super::ErrorLaw;
use super::scaled::{Scaled, ScaledFormat};
use crate::types::CodecKind;

/// The codec.
pub(super) type Linear8 = Scaled<Linear>;

/// Meaning of the codes.
#[derive(Debug)]
pub(super) struct Linear;

const LEVELS: f32 = 127.0;

/// The largest number of which 127 are finite.
const LARGEST_UNIT: f32 = f32::from_bits(0x7c01_0203);

impl ScaledFormat for Linear {
    const KIND: CodecKind = CodecKind::Linear8;

    const ERRORS: ErrorLaw = ErrorLaw {
        of_scale: 1.00001 / 254.0,
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

    /// Nearest, ties down, is the ceiling of what lies half below; one fused step, so that the
    /// product is not rounded before the decision.
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
    fn no_magnitude_of_a_finite_scale_is_infinite() {
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
    fn ties_go_to_the_smaller_magnitude() {
        // With s = 127 the factor is 1, so that halves are ties.
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
