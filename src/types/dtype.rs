//! Element types: one table with their sizes, accumulators and Rust types.

use super::named_enum::named_enum;

/// A line of the table.
struct DTypeFacts {
    size: usize,
    is_float: bool,
    is_signed: bool,
    accumulator: DType,
    has_codecs: bool,
}

/// Describes an unsigned integer, which accumulates in its own type.
const fn unsigned(dtype: DType, size: usize) -> DTypeFacts {
    DTypeFacts {
        size,
        is_float: false,
        is_signed: false,
        accumulator: dtype,
        has_codecs: false,
    }
}

const fn signed(dtype: DType, size: usize) -> DTypeFacts {
    DTypeFacts {
        is_signed: true,
        ..unsigned(dtype, size)
    }
}

const fn float(size: usize, accumulator: DType) -> DTypeFacts {
    DTypeFacts {
        is_float: true,
        ..signed(accumulator, size)
    }
}

/// Describes a float that lossy codecs can encode; `size` is its number of bytes.
const fn coded(size: usize) -> DTypeFacts {
    DTypeFacts {
        has_codecs: true,
        ..float(size, DType::F32)
    }
}

named_enum! {
    /// The type of one element. Call signatures carry the numbers, which are equal to those of
    /// `cinch_dtype_t` and, for types that NCCL has, of `ncclDataType_t`.
    DType as DTypeFacts {
        /// Signed 8-bit integer.
        I8 = 0, "i8", signed(DType::I8, 1);
        /// Unsigned 8-bit integer.
        U8 = 1, "u8", unsigned(DType::U8, 1);
        /// Signed 32-bit integer.
        I32 = 2, "i32", signed(DType::I32, 4);
        /// Unsigned 32-bit integer.
        U32 = 3, "u32", unsigned(DType::U32, 4);
        /// Signed 64-bit integer.
        I64 = 4, "i64", signed(DType::I64, 8);
        /// Unsigned 64-bit integer.
        U64 = 5, "u64", unsigned(DType::U64, 8);
        /// IEEE binary16.
        F16 = 6, "f16", coded(2);
        /// IEEE binary32.
        F32 = 7, "f32", coded(4);
        /// IEEE binary64.
        F64 = 8, "f64", float(8, DType::F64);
        /// The upper half of a binary32.
        BF16 = 9, "bf16", coded(2);
        /// OCP 8-bit float, 4 exponent and 3 mantissa bits, no infinity.
        F8E4M3 = 10, "f8e4m3", float(1, DType::F32);
        /// OCP 8-bit float, 5 exponent and 2 mantissa bits.
        F8E5M2 = 11, "f8e5m2", float(1, DType::F32);
    }
}

impl DType {
    /// The element type with the highest number that NCCL also has.
    #[cfg(feature = "internal")]
    pub const LAST_OF_NCCL: DType = DType::F8E5M2;

    /// Returns the number of `ncclDataType_t`; `None` if NCCL lacks the type.
    #[cfg(feature = "internal")]
    pub const fn nccl_number(self) -> Option<u8> {
        if self as u8 <= DType::LAST_OF_NCCL as u8 {
            Some(self as u8)
        } else {
            None
        }
    }

    /// Returns the bytes of one element.
    pub const fn size(self) -> usize {
        self.facts().size
    }

    /// Returns whether the type is a floating-point type.
    pub const fn is_float(self) -> bool {
        self.facts().is_float
    }

    /// Returns whether the type has negative numbers.
    pub const fn is_signed(self) -> bool {
        self.facts().is_signed
    }

    /// Returns the type in which reductions accumulate: fp32 for floats of up to 32 bits, else the
    /// element type itself.
    pub const fn accumulator(self) -> DType {
        self.facts().accumulator
    }

    /// Returns whether lossy codecs take elements of this type.
    pub const fn has_codecs(self) -> bool {
        self.facts().has_codecs
    }
}

/// A Rust type that is an element type. With the feature `half`, `f16` and `bf16` of the crate `half` are
/// element types. No Rust type is an f8: calls on these pass bytes (`Communicator::call`).
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The [`DType`] whose elements this Rust type holds.
    const DTYPE: DType;
}

mod sealed {
    /// Keeps [`super::Element`] to the types of this crate: `mem::bytes_of` relies on them having
    /// no padding.
    pub trait Sealed {}
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),* $(,)?) => {
        $(impl sealed::Sealed for $rust {}
        impl Element for $rust { const DTYPE: DType = DType::$dtype; })*
    };
}
element! { i8 => I8, u8 => U8, i32 => I32, u32 => U32, i64 => I64, u64 => U64, f32 => F32, f64 => F64 }
#[cfg(feature = "half")]
element! { half::f16 => F16, half::bf16 => BF16 }
