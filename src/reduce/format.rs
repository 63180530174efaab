//! Element formats: convert each [`DType`](crate::types::DType) from its bytes to a number of its accumulator
//! type and back. They specify widening and rounding.
//!
//! Rounding is to nearest, ties to even, subnormals included. Beyond the largest finite value f16, bf16 and
//! f8e5m2 become infinite. f8e4m3 has no infinity and becomes NaN, as in NVIDIA's conversions without
//! saturation. A NaN keeps its sign and the upper bits of its payload and becomes quiet, as in F16C and the
//! `half` crate. There is only one f8e4m3 NaN of each sign.

use super::number::Number;

/// The format in which elements of one type are stored.
pub(super) trait Format {
    /// The bytes of one element.
    type Raw: Copy;
    /// The type in which elements are combined.
    type Accumulator: Number;
    /// Whether [`Format::widen_slice`] is so much faster than widening each element by itself that an extra
    /// copy to a scratch block is worth it.
    const BLOCKED: bool = false;

    /// Returns the elements in a byte slice of any alignment.
    fn raw(bytes: &[u8]) -> &[Self::Raw];
    /// Returns the elements in a writable byte slice.
    fn raw_mut(bytes: &mut [u8]) -> &mut [Self::Raw];
    /// Converts an element to a number, exactly.
    fn widen(raw: Self::Raw) -> Self::Accumulator;
    /// Returns the element nearest to a number.
    fn narrow(number: Self::Accumulator) -> Self::Raw;

    /// Applies [`Format::widen`] to each element of a slice; both slices have equal lengths.
    #[inline(always)]
    fn widen_slice(raw: &[Self::Raw], numbers: &mut [Self::Accumulator]) {
        for (number, raw) in numbers.iter_mut().zip(raw) {
            *number = Self::widen(*raw);
        }
    }

    /// Applies [`Format::narrow`] to each element of a slice; both slices have equal lengths.
    #[inline(always)]
    fn narrow_slice(numbers: &[Self::Accumulator], raw: &mut [Self::Raw]) {
        for (raw, number) in raw.iter_mut().zip(numbers) {
            *raw = Self::narrow(*number);
        }
    }
}

/// Defines the conversions between byte slices and slices of elements of `$size` bytes.
macro_rules! raw_casts {
    ($size:expr) => {
        type Raw = [u8; $size];
        #[inline(always)]
        fn raw(bytes: &[u8]) -> &[Self::Raw] {
            let (raw, rest) = bytes.as_chunks();
            assert!(rest.is_empty(), "a part of an element");
            raw
        }
        #[inline(always)]
        fn raw_mut(bytes: &mut [u8]) -> &mut [Self::Raw] {
            let (raw, rest) = bytes.as_chunks_mut();
            assert!(rest.is_empty(), "a part of an element");
            raw
        }
    };
}
pub(super) use raw_casts;

/// Calls a generic function with the format of an element type. `$fp32` is called for types that accumulate
/// in fp32, `$other` for the rest. `$half` is the format to use for f16.
macro_rules! with_format {
    ($dtype:expr, $half:ty, $fp32:ident | $other:ident $arguments:tt) => {{
        use $crate::reduce::format;
        match $dtype {
            DType::I8 => $other::<i8> $arguments,
            DType::U8 => $other::<u8> $arguments,
            DType::I32 => $other::<i32> $arguments,
            DType::U32 => $other::<u32> $arguments,
            DType::I64 => $other::<i64> $arguments,
            DType::U64 => $other::<u64> $arguments,
            DType::F16 => $fp32::<$half> $arguments,
            DType::F32 => $fp32::<f32> $arguments,
            DType::F64 => $other::<f64> $arguments,
            DType::BF16 => $fp32::<format::BF16> $arguments,
            DType::F8E4M3 => $fp32::<format::F8E4M3> $arguments,
            DType::F8E5M2 => $fp32::<format::F8E5M2> $arguments,
        }
    }};
}
pub(super) use with_format;

macro_rules! itself {
    ($($number:ty),*) => {$(impl Format for $number {
        type Accumulator = $number;
        raw_casts!(size_of::<$number>());
        #[inline(always)]
        fn widen(raw: Self::Raw) -> $number { <$number>::from_le_bytes(raw) }
        #[inline(always)]
        fn narrow(number: $number) -> Self::Raw { number.to_le_bytes() }
    })*};
}
itself!(i8, u8, i32, u32, i64, u64, f32, f64);

/// bfloat16, which is the upper half of a binary32.
pub(super) struct BF16;

impl Format for BF16 {
    type Accumulator = f32;
    raw_casts!(2);

    #[inline(always)]
    fn widen(raw: [u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(raw)) << 16)
    }

    #[inline(always)]
    fn narrow(number: f32) -> [u8; 2] {
        let bits = number.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        let upper = if number.is_nan() { quiet } else { rounded };
        (upper as u16).to_le_bytes()
    }
}

/// IEEE binary16.
pub(super) struct F16;

impl F16 {
    const SMALL: Small = Small {
        exponent_bits: 5,
        mantissa_bits: 10,
        special: 0x7c00,
        overflow: 65520f32.to_bits(),
    };
}

impl Format for F16 {
    type Accumulator = f32;
    raw_casts!(2);

    #[inline(always)]
    fn widen(raw: [u8; 2]) -> f32 {
        Self::SMALL.widen(u16::from_le_bytes(raw).into())
    }

    #[inline(always)]
    fn narrow(number: f32) -> [u8; 2] {
        (Self::SMALL.narrow(number) as u16).to_le_bytes()
    }
}

/// OCP E5M2: IEEE binary16 with only 2 mantissa bits.
pub(super) struct F8E5M2;

impl F8E5M2 {
    const SMALL: Small = Small {
        exponent_bits: 5,
        mantissa_bits: 2,
        special: 0x7c,
        overflow: 61440f32.to_bits(),
    };
}

impl Format for F8E5M2 {
    type Accumulator = f32;
    raw_casts!(1);

    #[inline(always)]
    fn widen(raw: [u8; 1]) -> f32 {
        Self::SMALL.widen(raw[0].into())
    }

    #[inline(always)]
    fn narrow(number: f32) -> [u8; 1] {
        [Self::SMALL.narrow(number) as u8]
    }
}

/// OCP E4M3: its largest exponent also has finite numbers; it is NaN only if all mantissa bits are
/// set.
pub(super) struct F8E4M3;

impl F8E4M3 {
    const SMALL: Small = Small {
        exponent_bits: 4,
        mantissa_bits: 3,
        special: 0x7f,
        // The code after 448 would be 480. 464 lies halfway and rounds to 448, whose mantissa is
        // even, so only larger numbers overflow.
        overflow: 464f32.to_bits() + 1,
    };
}

impl Format for F8E4M3 {
    type Accumulator = f32;
    raw_casts!(1);

    #[inline(always)]
    fn widen(raw: [u8; 1]) -> f32 {
        Self::SMALL.widen(raw[0].into())
    }

    #[inline(always)]
    fn narrow(number: f32) -> [u8; 1] {
        [Self::SMALL.narrow(number) as u8]
    }
}

const F32_INFINITY: u32 = 0x7f80_0000;
const F32_QUIET: u32 = 0x0040_0000;

/// Layout of a float narrower than binary32. Conversions neither make nor read a subnormal binary32, so they
/// give equal results on a thread that flushes subnormals to zero.
struct Small {
    exponent_bits: u32,
    mantissa_bits: u32,
    /// Smallest code, without the sign, that is not a finite number.
    special: u32,
    /// Bits of the smallest binary32 magnitude that rounds beyond the largest finite number.
    overflow: u32,
}

impl Small {
    const fn bias(&self) -> u32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    /// Returns the distance between subnormal numbers of the format, as a binary32.
    const fn step(&self) -> f32 {
        f32::from_bits((127 + 1 - self.bias() - self.mantissa_bits) << 23)
    }

    #[inline(always)]
    fn widen(&self, bits: u32) -> f32 {
        let width = self.exponent_bits + self.mantissa_bits;
        let magnitude = bits & ((1 << width) - 1);
        let shifted = magnitude << (23 - self.mantissa_bits);
        let normal = shifted + ((127 - self.bias()) << 23);
        let subnormal = (magnitude as i32 as f32 * self.step()).to_bits();
        let is_subnormal = magnitude < 1 << self.mantissa_bits;
        let finite = if is_subnormal { subnormal } else { normal };
        // The only special value of E4M3 is NaN, for which the shifted mantissa is not zero.
        let nan = F32_INFINITY | F32_QUIET | (shifted & 0x007f_ffff);
        let infinite_code = self.infinity();
        let special = if magnitude == infinite_code {
            F32_INFINITY
        } else {
            nan
        };
        let wide = if magnitude >= self.special {
            special
        } else {
            finite
        };
        f32::from_bits(wide | (bits >> width) << 31)
    }

    #[inline(always)]
    fn narrow(&self, number: f32) -> u32 {
        let bits = number.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let drop = 23 - self.mantissa_bits;
        let width = self.exponent_bits + self.mantissa_bits;
        let odd = magnitude >> drop & 1;
        let rounded = magnitude.wrapping_add((1 << (drop - 1)) - 1 + odd) >> drop;
        let normal = rounded.wrapping_sub((127 - self.bias()) << self.mantissa_bits);
        // Adding a number whose last mantissa bit is worth one subnormal step rounds to a multiple
        // of that step.
        let anchor = self.step() * (1u32 << 23) as f32;
        let subnormal = (f32::from_bits(magnitude) + anchor)
            .to_bits()
            .wrapping_sub(anchor.to_bits());
        let is_subnormal = magnitude < (127 + 1 - self.bias()) << 23;
        let finite = if is_subnormal { subnormal } else { normal };
        let payload = magnitude >> drop & ((1 << self.mantissa_bits) - 1);
        let nan = if self.infinity() == self.special {
            self.special | 1 << (self.mantissa_bits - 1) | payload
        } else {
            self.special
        };
        let special = if magnitude > F32_INFINITY {
            nan
        } else {
            self.special
        };
        let small = if magnitude >= self.overflow {
            special
        } else {
            finite
        };
        small | (bits >> 31) << width
    }

    /// Returns the code of infinity without the sign. If the format has no infinity, the code is a
    /// finite number.
    const fn infinity(&self) -> u32 {
        ((1 << self.exponent_bits) - 1) << self.mantissa_bits
    }
}
