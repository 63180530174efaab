//! Converts elements to and from f64 and 128-bit integers. The code follows the definitions of the formats.
//! It shares nothing with the library's conversions, because tests compare the library with it.

use crate::types::DType;

/// A binary float format.
#[derive(Clone, Copy, Debug)]
pub(super) struct FloatFormat {
    mantissa_bits: i32,
    bias: i32,
    /// The largest finite value.
    pub(super) largest: f64,
    /// Smallest magnitude code that encodes an infinity or NaN instead of a finite value.
    special: u64,
    has_infinity: bool,
}

impl FloatFormat {
    /// Returns the format of a float type.
    pub(super) fn of(dtype: DType) -> Option<FloatFormat> {
        let format = |mantissa_bits, bias, largest, special| FloatFormat {
            mantissa_bits,
            bias,
            largest,
            special,
            has_infinity: true,
        };
        Some(match dtype {
            DType::F16 => format(10, 15, 65504.0, 0x7c00),
            DType::BF16 => format(7, 127, f64::from(f32::from_bits(0x7f7f_0000)), 0x7f80),
            DType::F32 => format(23, 127, f32::MAX.into(), 0x7f80_0000),
            DType::F64 => format(52, 1023, f64::MAX, f64::INFINITY.to_bits()),
            DType::F8E5M2 => format(2, 15, 57344.0, 0x7c),
            DType::F8E4M3 => FloatFormat {
                has_infinity: false,
                ..format(3, 7, 448.0, 0x7f)
            },
            _ => return None,
        })
    }

    /// Returns half the distance between 1 and the next number, which is the largest relative
    /// rounding error.
    pub(super) fn unit_roundoff(self) -> f64 {
        power_of_two(-self.mantissa_bits - 1)
    }

    /// Returns the distance between subnormal numbers.
    pub(super) fn smallest(self) -> f64 {
        // The result is computed as two factors, because the smallest f64 is below the range of
        // `power_of_two`.
        power_of_two(1 - self.bias) * power_of_two(-self.mantissa_bits)
    }

    #[inline]
    fn decode(self, code: u64, width: u32) -> f64 {
        let magnitude = code & !(1 << (width - 1));
        let exponent = (magnitude >> self.mantissa_bits) as i32;
        let mantissa = magnitude & ((1 << self.mantissa_bits) - 1);
        let value = if magnitude >= self.special {
            if self.has_infinity && mantissa == 0 {
                f64::INFINITY
            } else {
                f64::NAN
            }
        } else if exponent == 0 {
            mantissa as f64 * self.smallest()
        } else {
            let exponent = (exponent - self.bias + 1023) as u64;
            f64::from_bits(exponent << 52 | mantissa << (52 - self.mantissa_bits))
        };
        if code >> (width - 1) == 1 {
            -value
        } else {
            value
        }
    }

    #[inline]
    fn encode(self, x: f64, width: u32) -> u64 {
        let sign = u64::from(x.is_sign_negative()) << (width - 1);
        let x = x.abs();
        if x.is_nan() {
            // Formats without infinity have one NaN; the others use their quiet NaN.
            let quiet = if self.has_infinity {
                1 << (self.mantissa_bits - 1)
            } else {
                0
            };
            return sign | self.special | quiet;
        }
        // Uses the exponent of x, but at least the exponent of subnormals.
        let exponent = ((x.to_bits() >> 52) as i32 - 1023).max(1 - self.bias);
        let step = power_of_two(exponent - self.mantissa_bits);
        let rounded = (x / step).round_ties_even();
        if rounded * step > self.largest {
            return sign | self.special;
        }
        // A mantissa that rounds up to the next power of two carries into the exponent.
        let binade = (exponent - (1 - self.bias)) as u64;
        sign | ((binade << self.mantissa_bits) + rounded as u64)
    }
}

/// Returns 2^exponent, for exponents from -1022 to 1023.
#[inline]
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// Converts elements to f64; 64-bit integers become the nearest f64.
pub(super) fn values(dtype: DType, bytes: &[u8], values: &mut [f64]) {
    macro_rules! each {
        ($size:literal, |$raw:ident| $value:expr) => {
            for (value, &$raw) in values.iter_mut().zip(bytes.as_chunks::<$size>().0) {
                *value = $value;
            }
        };
    }
    let format = FloatFormat::of(dtype);
    match (dtype, format) {
        (DType::F32, _) => each!(4, |raw| f32::from_le_bytes(raw).into()),
        (DType::F64, _) => each!(8, |raw| f64::from_le_bytes(raw)),
        (_, Some(format)) if dtype.size() == 2 => {
            each!(2, |raw| format.decode(u16::from_le_bytes(raw).into(), 16))
        }
        (_, Some(format)) => each!(1, |raw| format.decode(raw[0].into(), 8)),
        _ => {
            for (i, value) in values.iter_mut().enumerate() {
                *value = integer(dtype, &bytes[i * dtype.size()..]) as f64;
            }
        }
    }
}

/// Converts values to elements: floats round to nearest even; integers round towards zero and
/// saturate.
pub(super) fn round(dtype: DType, values: &[f64], bytes: &mut [u8]) {
    macro_rules! each {
        ($size:literal, |$value:ident| $raw:expr) => {
            for (raw, &$value) in bytes.as_chunks_mut::<$size>().0.iter_mut().zip(values) {
                *raw = $raw.to_le_bytes();
            }
        };
    }
    let format = FloatFormat::of(dtype);
    match (dtype, format) {
        (DType::F32, _) => each!(4, |value| (value as f32)),
        (DType::F64, _) => each!(8, |value| value),
        (_, Some(format)) if dtype.size() == 2 => {
            each!(2, |value| (format.encode(value, 16) as u16))
        }
        (_, Some(format)) => each!(1, |value| (format.encode(value, 8) as u8)),
        (DType::I8, _) => each!(1, |value| (value as i8)),
        (DType::U8, _) => each!(1, |value| (value as u8)),
        (DType::I32, _) => each!(4, |value| (value as i32)),
        (DType::U32, _) => each!(4, |value| (value as u32)),
        (DType::I64, _) => each!(8, |value| (value as i64)),
        _ => each!(8, |value| (value as u64)),
    }
}

/// Converts one element to f64; a 64-bit integer becomes the nearest f64.
pub fn value(dtype: DType, element: &[u8]) -> f64 {
    let mut value = [0.0];
    values(dtype, element, &mut value);
    value[0]
}

/// Writes `value` as one element: floats round to nearest even, integers truncate and saturate.
pub fn set_value(dtype: DType, value: f64, element: &mut [u8]) {
    round(dtype, &[value], element);
}

/// Writes the low bits of `value` as one element of an integer type.
pub fn set_integer(value: i128, element: &mut [u8]) {
    let size = element.len();
    element.copy_from_slice(&value.to_le_bytes()[..size]);
}

/// Returns half the distance between 1 and the next number of a float type; 0 for integers.
pub fn unit_roundoff(dtype: DType) -> f64 {
    FloatFormat::of(dtype).map_or(0.0, FloatFormat::unit_roundoff)
}

/// Returns the smallest positive number of a float type; 0 for integers.
pub fn smallest(dtype: DType) -> f64 {
    FloatFormat::of(dtype).map_or(0.0, FloatFormat::smallest)
}

/// Returns the largest finite number of a type.
pub fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::I8 => i8::MAX.into(),
        DType::U8 => u8::MAX.into(),
        DType::I32 => i32::MAX.into(),
        DType::U32 => u32::MAX.into(),
        DType::I64 => i64::MAX as f64,
        DType::U64 => u64::MAX as f64,
        _ => FloatFormat::of(dtype).map_or(f64::NAN, |format| format.largest),
    }
}

/// Returns the integer in the first bytes of `bytes`.
#[inline]
pub fn integer(dtype: DType, bytes: &[u8]) -> i128 {
    let size = dtype.size();
    let mut word = [0; 8];
    word[..size].copy_from_slice(&bytes[..size]);
    wrap(dtype, u64::from_le_bytes(word).into())
}

/// Wraps an integer to the range of its type.
#[inline]
pub fn wrap(dtype: DType, x: i128) -> i128 {
    match dtype {
        DType::I8 => (x as i8).into(),
        DType::U8 => (x as u8).into(),
        DType::I32 => (x as i32).into(),
        DType::U32 => (x as u32).into(),
        DType::I64 => (x as i64).into(),
        _ => (x as u64).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn decoded(dtype: DType, code: u64) -> f64 {
        value(dtype, &code.to_le_bytes()[..dtype.size()])
    }

    fn code(dtype: DType, x: f64) -> u64 {
        let mut bytes = [0; 8];
        set_value(dtype, x, &mut bytes[..dtype.size()]);
        u64::from_le_bytes(bytes)
    }

    #[test]
    fn halves_equal_the_half_crate() {
        for h in 0..=u16::MAX {
            for (dtype, expected) in [
                (DType::F16, f16::from_bits(h).to_f64()),
                (DType::BF16, bf16::from_bits(h).to_f64()),
            ] {
                let x = decoded(dtype, h.into());
                assert!(x == expected || x.is_nan() && expected.is_nan(), "{h:#x}");
                // Tests x, the midpoint between x and the next number, and points just above and
                // below the midpoint.
                let next = decoded(dtype, u64::from(h) + 1);
                for y in [
                    x,
                    (x + next) / 2.0,
                    x * 0.51 + next * 0.49,
                    x * 0.49 + next * 0.51,
                ] {
                    if h == u16::MAX || y.is_nan() {
                        continue;
                    }
                    let expected = match dtype {
                        DType::F16 => f16::from_f64(y).to_bits(),
                        _ => bf16::from_f64(y).to_bits(),
                    };
                    assert_eq!(code(dtype, y), u64::from(expected), "{dtype} {y:e}");
                }
            }
        }
    }

    #[test]
    fn known_bytes_have_their_values() {
        let e4m3 = [
            (0x7e, 448.0),
            (0x08, 1.0 / 64.0),
            (0x01, 1.0 / 512.0),
            (0xb8, -1.0),
        ];
        for (bits, x) in e4m3 {
            assert_eq!(
                (decoded(DType::F8E4M3, bits), code(DType::F8E4M3, x)),
                (x, bits)
            );
        }
        for (bits, x) in [
            (0x7b, 57344.0),
            (0x01, 1.0 / 65536.0),
            (0x7c, f64::INFINITY),
            (0xfc, f64::NEG_INFINITY),
        ] {
            assert_eq!(
                (decoded(DType::F8E5M2, bits), code(DType::F8E5M2, x)),
                (x, bits)
            );
        }
        assert!(decoded(DType::F8E4M3, 0xff).is_nan());
        assert_eq!(code(DType::F8E4M3, 464.0), 0x7e);
        assert_eq!(code(DType::F8E4M3, 464.1), 0x7f);
        assert_eq!(code(DType::F8E5M2, 61440.0), 0x7c);
        assert_eq!(code(DType::F32, 0.1), 0x3dcc_cccd);
        assert_eq!(decoded(DType::I64, u64::MAX), -1.0);
        assert_eq!(integer(DType::I32, &[0xfe, 0xff, 0xff, 0xff]), -2);
        assert_eq!(wrap(DType::U8, -1), 255);
        let of_f64 = (smallest(DType::F64), unit_roundoff(DType::F64));
        assert_eq!(of_f64, (5e-324, f64::EPSILON / 2.0));
        for (dtype, least) in [(DType::F8E4M3, -9), (DType::F8E5M2, -16), (DType::F16, -24)] {
            assert_eq!(smallest(dtype), 2f64.powi(least), "{dtype}");
            assert_eq!(decoded(dtype, 1), smallest(dtype));
            assert_eq!(decoded(dtype, code(dtype, largest(dtype))), largest(dtype));
        }
        for dtype in [DType::F8E4M3, DType::F8E5M2] {
            for bits in 0..=0xff {
                let x = decoded(dtype, bits);
                assert!(x.is_nan() || code(dtype, x) == bits, "{dtype} {bits:#04x}");
            }
        }
        let mut byte = [0];
        set_integer(200, &mut byte);
        assert_eq!(integer(DType::I8, &byte), -56);
    }
}
