//! Element types as f64: the checker's own arithmetic, written without the library's, so that a
//! mistake in one is not hidden by the same mistake in the other.

use cinch::DType;

/// A binary floating format: sign, exponent, fraction.
#[derive(Clone, Copy)]
struct Format {
    exponent_bits: u32,
    fraction_bits: u32,
    /// The all-ones exponent holds infinities and NaN; otherwise (E4M3) only the all-ones word is
    /// NaN.
    has_infinity: bool,
}

const fn small_format(dtype: DType) -> Option<Format> {
    let (exponent_bits, fraction_bits, has_infinity) = match dtype {
        DType::F16 => (5, 10, true),
        DType::BF16 => (8, 7, true),
        DType::F8E4M3 => (4, 3, false),
        DType::F8E5M2 => (5, 2, true),
        _ => return None,
    };
    Some(Format {
        exponent_bits,
        fraction_bits,
        has_infinity,
    })
}

/// Largest relative error of rounding to nearest; 0 for integers.
pub fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 2f64.powi(-53),
        DType::F32 => 2f64.powi(-24),
        _ => small_format(dtype).map_or(0.0, |f| 2f64.powi(-(f.fraction_bits as i32) - 1)),
    }
}

/// Smallest positive number of a floating type; 0 for integers.
pub fn smallest(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::from_bits(1),
        DType::F32 => f64::from(f32::from_bits(1)),
        _ => small_format(dtype).map_or(0.0, |f| 2f64.powi(1 - f.bias() - f.fraction_bits as i32)),
    }
}

/// Largest finite number of a type.
pub fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::MAX,
        DType::F32 => f64::from(f32::MAX),
        DType::F16 => 65504.0,
        DType::BF16 => f64::from(f32::from_bits(0x7f7f_0000)),
        DType::F8E4M3 => 448.0,
        DType::F8E5M2 => 57344.0,
        DType::I8 => f64::from(i8::MAX),
        DType::U8 => f64::from(u8::MAX),
        DType::I32 => f64::from(i32::MAX),
        DType::U32 => f64::from(u32::MAX),
        DType::I64 => i64::MAX as f64,
        DType::U64 => u64::MAX as f64,
    }
}

impl Format {
    const fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    fn decode(self, bits: u32) -> f64 {
        let fraction = bits & ((1 << self.fraction_bits) - 1);
        let top = (1 << self.exponent_bits) - 1;
        let exponent = (bits >> self.fraction_bits) & top;
        let negative = bits >> (self.fraction_bits + self.exponent_bits) & 1 == 1;
        let magnitude = if exponent == top && self.has_infinity {
            if fraction == 0 {
                f64::INFINITY
            } else {
                f64::NAN
            }
        } else if exponent == top && fraction == (1 << self.fraction_bits) - 1 {
            f64::NAN
        } else if exponent == 0 {
            f64::from(fraction) * 2f64.powi(1 - self.bias() - self.fraction_bits as i32)
        } else {
            let significand = f64::from(fraction + (1 << self.fraction_bits));
            significand * 2f64.powi(exponent as i32 - self.bias() - self.fraction_bits as i32)
        };
        if negative { -magnitude } else { magnitude }
    }

    /// Round to nearest, ties to even. Beyond the largest number: infinity, or NaN without one.
    fn encode(self, value: f64) -> u32 {
        let sign = u32::from(value.is_sign_negative()) << (self.fraction_bits + self.exponent_bits);
        let all_ones = (1 << (self.exponent_bits + self.fraction_bits)) - 1;
        let infinity = if self.has_infinity {
            ((1 << self.exponent_bits) - 1) << self.fraction_bits
        } else {
            all_ones
        };
        if value.is_nan() {
            return sign | all_ones;
        }
        let magnitude = value.abs();
        if magnitude == 0.0 {
            return sign;
        }
        if magnitude.is_infinite() {
            return sign | infinity;
        }
        // Of a subnormal f64 this is far below every exponent here, so the clamp is right too.
        let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(1 - self.bias());
        let quantum = 2f64.powi(exponent - self.fraction_bits as i32);
        let steps = (magnitude / quantum).round_ties_even() as u32;
        // Carries out of the fraction move into the exponent, as the encoding intends; steps below
        // 2^fraction_bits are subnormal and the biased exponent of the lowest binade becomes 0.
        let base = ((exponent + self.bias() - 1) as u32) << self.fraction_bits;
        let bits = base + steps;
        if bits >= infinity {
            sign | infinity
        } else {
            sign | bits
        }
    }
}

/// The value of one element of a floating type.
pub fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    match dtype {
        DType::F64 => f64::from_ne_bytes(array(bytes)),
        DType::F32 => f64::from(f32::from_ne_bytes(array(bytes))),
        DType::F16 | DType::BF16 => {
            let bits = u16::from_ne_bytes(array(bytes));
            small_format(dtype).map_or(f64::NAN, |f| f.decode(u32::from(bits)))
        }
        _ => small_format(dtype).map_or(f64::NAN, |f| f.decode(u32::from(bytes[0]))),
    }
}

/// Writes `value`, rounded to nearest even, as one element of a floating type.
pub fn encode(dtype: DType, value: f64, bytes: &mut [u8]) {
    match dtype {
        DType::F64 => bytes.copy_from_slice(&value.to_ne_bytes()),
        DType::F32 => bytes.copy_from_slice(&(value as f32).to_ne_bytes()),
        _ => {
            let bits = small_format(dtype).map_or(0, |f| f.encode(value));
            match bytes.len() {
                1 => bytes[0] = bits as u8,
                _ => bytes.copy_from_slice(&(bits as u16).to_ne_bytes()),
            }
        }
    }
}

/// The value of one element of an integer type.
pub fn decode_integer(dtype: DType, bytes: &[u8]) -> i128 {
    match dtype {
        DType::I8 => i128::from(bytes[0] as i8),
        DType::U8 => i128::from(bytes[0]),
        DType::I32 => i128::from(i32::from_ne_bytes(array(bytes))),
        DType::U32 => i128::from(u32::from_ne_bytes(array(bytes))),
        DType::I64 => i128::from(i64::from_ne_bytes(array(bytes))),
        _ => i128::from(u64::from_ne_bytes(array(bytes))),
    }
}

/// Writes the low bits of `value` as one element of an integer type.
pub fn encode_integer(value: i128, bytes: &mut [u8]) {
    let size = bytes.len();
    match size {
        1 => bytes[0] = value as u8,
        4 => bytes.copy_from_slice(&(value as u32).to_ne_bytes()),
        _ => bytes.copy_from_slice(&(value as u64).to_ne_bytes()),
    }
}

/// `value` modulo the range of an integer type.
pub fn wrap_integer(dtype: DType, value: i128) -> i128 {
    let mut bytes = [0; 8];
    let bytes = &mut bytes[..dtype.size()];
    encode_integer(value, bytes);
    decode_integer(dtype, bytes)
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_floats_equal_the_half_crate() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_ne_bytes();
            for (dtype, expected) in [
                (DType::F16, half::f16::from_bits(bits).to_f64()),
                (DType::BF16, half::bf16::from_bits(bits).to_f64()),
            ] {
                let value = decode(dtype, &bytes);
                assert!(
                    value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan(),
                    "{dtype} {bits:#06x}: {value} is not {expected}"
                );
                if !value.is_nan() {
                    let mut back = [0; 2];
                    encode(dtype, value, &mut back);
                    assert_eq!(back, bytes, "{dtype} {bits:#06x}");
                }
            }
        }
        let mut state = 7u64;
        for _ in 0..200_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            let value = f64::from(f32::from_bits((state >> 32) as u32));
            let mut bytes = [0; 2];
            encode(DType::F16, value, &mut bytes);
            let half = half::f16::from_f32(value as f32);
            assert!(half.is_nan() || half.to_ne_bytes() == bytes, "{value}");
            encode(DType::BF16, value, &mut bytes);
            let half = half::bf16::from_f32(value as f32);
            assert!(half.is_nan() || half.to_ne_bytes() == bytes, "{value}");
        }
    }

    #[test]
    fn eight_bit_floats_have_their_landmarks() {
        let value = |dtype, bits: u8| decode(dtype, &[bits]);
        assert_eq!(value(DType::F8E4M3, 0x7e), 448.0);
        assert!(value(DType::F8E4M3, 0x7f).is_nan());
        assert_eq!(value(DType::F8E4M3, 0x01), 2f64.powi(-9));
        assert_eq!(value(DType::F8E4M3, 0x38), 1.0);
        assert_eq!(value(DType::F8E5M2, 0x7b), 57344.0);
        assert_eq!(value(DType::F8E5M2, 0xfc), f64::NEG_INFINITY);
        assert_eq!(value(DType::F8E5M2, 0x01), 2f64.powi(-16));
        for dtype in [DType::F8E4M3, DType::F8E5M2] {
            for bits in 0..=u8::MAX {
                let expected = value(dtype, bits);
                if !expected.is_nan() {
                    let mut back = [0];
                    encode(dtype, expected, &mut back);
                    assert_eq!(back[0], bits, "{dtype} {bits:#04x}");
                }
            }
            let largest = largest(dtype);
            let mut back = [0];
            encode(dtype, largest * 1.01, &mut back);
            assert_eq!(value(dtype, back[0]), largest);
        }
    }

    #[test]
    fn integers_wrap() {
        assert_eq!(wrap_integer(DType::I8, 200), -56);
        assert_eq!(wrap_integer(DType::U8, -1), 255);
        assert_eq!(wrap_integer(DType::U64, -1), i128::from(u64::MAX));
        assert_eq!(
            wrap_integer(DType::I32, i128::from(i32::MAX) + 1),
            i128::from(i32::MIN)
        );
    }
}
