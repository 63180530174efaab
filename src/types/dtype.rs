//! Element types.

use std::fmt;

/// The type of one element. Numbers are those of `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    /// Signed 8-bit integer.
    I8 = 0,
    /// Unsigned 8-bit integer.
    U8 = 1,
    /// Signed 32-bit integer.
    I32 = 2,
    /// Unsigned 32-bit integer.
    U32 = 3,
    /// Signed 64-bit integer.
    I64 = 4,
    /// Unsigned 64-bit integer.
    U64 = 5,
    /// IEEE binary16.
    F16 = 6,
    /// IEEE binary32.
    F32 = 7,
    /// IEEE binary64.
    F64 = 8,
    /// The upper half of a binary32.
    BF16 = 9,
    /// OCP 8-bit float, 4 exponent and 3 mantissa bits, no infinity.
    F8E4M3 = 10,
    /// OCP 8-bit float, 5 exponent and 2 mantissa bits.
    F8E5M2 = 11,
}

impl DType {
    /// Every type, in numeric order.
    pub const ALL: [DType; 12] = [
        DType::I8,
        DType::U8,
        DType::I32,
        DType::U32,
        DType::I64,
        DType::U64,
        DType::F16,
        DType::F32,
        DType::F64,
        DType::BF16,
        DType::F8E4M3,
        DType::F8E5M2,
    ];

    /// The type with this number.
    pub fn from_number(number: u32) -> Option<DType> {
        DType::ALL.get(number as usize).copied()
    }

    /// The type with this name, as [`DType::name`] prints it.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Short lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::I64 => "i64",
            DType::U64 => "u64",
            DType::F16 => "f16",
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::BF16 => "bf16",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
        }
    }

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 | DType::F8E4M3 | DType::F8E5M2 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::U32 | DType::F32 => 4,
            DType::I64 | DType::U64 | DType::F64 => 8,
        }
    }

    /// Whether the type has fractions.
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            DType::F16 | DType::F32 | DType::F64 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2
        )
    }

    /// The type in which reductions of this one accumulate: fp32 for floats of up to 32 bits,
    /// itself otherwise.
    pub const fn accumulator(self) -> DType {
        match self {
            DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2 => DType::F32,
            other => other,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that is an element type. Types that Rust lacks (f16, bf16, f8) go through the
/// byte interface of the communicator.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The corresponding [`DType`].
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
