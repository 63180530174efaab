//! `fp8_e4m3`, `fp8_e5m2`: OCP 8-bit floats times a scale, so that the largest magnitude of a block
//! becomes the largest finite number of the format, 448 or 57,344.
//!
//! Let s be the scale of the block, its largest magnitude. A magnitude is multiplied by that
//! largest number over s in fp32 and rounded to nearest even, as hardware conversions do.
//! Subnormals of the format are kept. The relative error is 2^-4 or 2^-3 down to the smallest
//! normal number. The encoder never writes the format's codes of infinity and NaN (0x7f; 0x7c and
//! up); they decode to NaN.

mod simd;

use super::blocked::{Blocked, Scaled, ScaledFormat};
use super::feedback::Contraction;
use super::{CodecInfo, ErrorLaw, KernelInfo, MessageRange};
use crate::types::CodecKind;
use std::sync::Arc;

/// Returns the facts about the codec with `MANTISSA` mantissa bits: 3 or 2.
pub(super) const fn info<const MANTISSA: usize>() -> CodecInfo {
    CodecInfo {
        kind: Fp8::<MANTISSA>::KIND,
        encode_seconds: 0.16e-9,
        decode_seconds: 0.07e-9,
        range: MessageRange::Full,
        contraction: |_| Contraction::largest(if MANTISSA == 3 { 0.0626 } else { 0.1251 }),
        kernels: Some(KernelInfo {
            is_fused: true,
            ..KernelInfo::new(Fp8::<MANTISSA>::KIND.name())
        }),
        build: |spec, isa| Arc::new(Blocked::new(Scaled(Fp8::<MANTISSA>), spec, isa)),
    }
}

/// The block format with `MANTISSA` mantissa bits.
#[derive(Debug)]
pub(super) struct Fp8<const MANTISSA: usize>;

impl<const MANTISSA: usize> Fp8<MANTISSA> {
    /// The largest finite number of the format.
    const LARGEST: f32 = if MANTISSA == 3 { 448.0 } else { 57_344.0 };
    /// The code of [`Fp8::LARGEST`].
    const TOP: u8 = if MANTISSA == 3 { 0x7e } else { 0x7b };
    /// Exponent bias of fp32 minus the bias of the format.
    const REBIAS: u32 = if MANTISSA == 3 { 127 - 7 } else { 127 - 15 };
    /// Number of fp32 mantissa bits that the format drops.
    const DROPPED: u32 = 23 - MANTISSA as u32;
    /// The smallest normal number of the format, as fp32 bits.
    const NORMAL: u32 = (Self::REBIAS + 1) << 23;
    /// The distance between subnormal numbers of the format.
    const STEP: f32 = f32::from_bits((Self::REBIAS + 1 - MANTISSA as u32) << 23);
    /// From this number to its double, fp32 numbers are [`Fp8::STEP`] apart, so that adding it to a
    /// number rounds to steps.
    const INTEGERS: f32 = Self::STEP * 8_388_608.0;
}

impl<const MANTISSA: usize> ScaledFormat for Fp8<MANTISSA> {
    const KIND: CodecKind = match MANTISSA {
        3 => CodecKind::Fp8E4M3,
        _ => CodecKind::Fp8E5M2,
    };

    /// The error is at most half of the last mantissa bit, plus half a step of the subnormals.
    const ERRORS: ErrorLaw = ErrorLaw {
        of_scale: (0.50001 * Self::STEP / Self::LARGEST) as f64 + 2.5e-7,
        of_value: if MANTISSA == 3 { 0.0625 } else { 0.125 },
        ..ErrorLaw::EXACT
    };

    #[inline(always)]
    fn factor(scale: f32) -> f32 {
        Self::LARGEST / scale
    }

    #[inline(always)]
    fn unit(scale: f32) -> f32 {
        scale / Self::LARGEST
    }

    #[inline(always)]
    fn magnitude(&self, x: f32, factor: f32) -> u8 {
        let y = (x * factor).min(Self::LARGEST);
        let bits = y.to_bits();
        if bits < Self::NORMAL {
            return ((y + Self::INTEGERS).to_bits() - Self::INTEGERS.to_bits()) as u8;
        }
        // Adds just under half of the last kept bit, or half if that bit is 1, so that rounding is to nearest
        // even.
        let odd = bits >> Self::DROPPED & 1;
        let rounded = bits + (1 << (Self::DROPPED - 1)) - 1 + odd;
        ((rounded >> Self::DROPPED) - (Self::REBIAS << MANTISSA)) as u8
    }

    #[inline(always)]
    fn value(&self, code: u8) -> f32 {
        let magnitude = u32::from(code & 0x7f);
        let value = if magnitude > u32::from(Self::TOP) {
            return f32::NAN;
        } else if magnitude < 1 << MANTISSA {
            magnitude as f32 * Self::STEP
        } else {
            f32::from_bits((magnitude << Self::DROPPED) + (Self::REBIAS << 23))
        };
        if code & 0x80 == 0 { value } else { -value }
    }

    fn half_step(&self, x: f64, scale: f64) -> f64 {
        let law = Self::ERRORS;
        // The small factor covers the fp32 rounding of x before it is rounded to a code.
        law.of_value * x.min(scale) * (1.0 + 2f64.powi(-20)) + law.of_scale * scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the finite numbers of a float format by its definition, ascending by code.
    fn numbers(mantissa: u32, bias: i32, top: u32) -> Vec<f32> {
        let of = |code: u32| {
            let (exponent, rest) = ((code >> mantissa) as i32, code & ((1 << mantissa) - 1));
            let fraction = rest as f32 / (1 << mantissa) as f32;
            match exponent {
                0 => fraction * 2f32.powi(1 - bias),
                _ => (1.0 + fraction) * 2f32.powi(exponent - bias),
            }
        };
        (0..=top).map(of).collect()
    }

    fn agrees<const MANTISSA: usize>(numbers: &[f32]) {
        let format = Fp8::<MANTISSA>;
        assert_eq!(*numbers.last().unwrap(), Fp8::<MANTISSA>::LARGEST);
        for (code, &number) in numbers.iter().enumerate() {
            assert_eq!(format.value(code as u8), number);
            assert_eq!(format.magnitude(number, 1.0), code as u8);
            assert_eq!(format.value(code as u8 | 0x80), -number);
        }
        for (low, pair) in numbers.windows(2).enumerate() {
            // The middle is exact in fp32; ties go to the even code.
            let middle = (pair[0] + pair[1]) / 2.0;
            let even = low + low % 2;
            assert_eq!(format.magnitude(middle, 1.0), even as u8, "{middle}");
            assert_eq!(format.magnitude(middle.next_down(), 1.0), low as u8);
            assert_eq!(format.magnitude(middle.next_up(), 1.0), low as u8 + 1);
        }
        assert_eq!(format.magnitude(1e30, 1.0), Fp8::<MANTISSA>::TOP);
        assert_eq!(format.magnitude(f32::INFINITY, 1.0), Fp8::<MANTISSA>::TOP);
        for code in Fp8::<MANTISSA>::TOP + 1..=0x7f {
            assert!(format.value(code).is_nan() && format.value(code | 0x80).is_nan());
        }
    }

    #[test]
    fn codes_equal_those_of_the_standard() {
        agrees::<3>(&numbers(3, 7, 0x7e));
        agrees::<2>(&numbers(2, 15, 0x7b));
    }
}
