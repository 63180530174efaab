//! Arithmetic of the accumulator types, which specifies every operator.
//!
//! A NaN result is always the canonical quiet NaN (0x7fc00000, 0x7ff8000000000000). Hardware and compilers
//! may pick either operand's payload, but results must not depend on the instruction set. The two extra
//! instructions take no time, because loops wait for memory.

use crate::types::Element;

/// A type in which reductions accumulate.
pub(super) trait Number: Element {
    /// The divisor of [`Number::divide`].
    type Divisor: Copy;

    fn sum(self, other: Self) -> Self;
    fn prod(self, other: Self) -> Self;
    fn maximum(self, other: Self) -> Self;
    fn minimum(self, other: Self) -> Self;
    /// Returns the number whose bits are the low bits of a word; `factor_word` makes such words.
    fn from_word(word: u64) -> Self;
    fn divisor(nranks: usize) -> Self::Divisor;
    fn divide(self, by: Self::Divisor) -> Self;
}

/// A binary operator. Each operator is a type of its own, so that kernels are compiled for each.
pub(super) trait Operator {
    fn apply<N: Number>(a: N, b: N) -> N;
}

macro_rules! operators {
    ($($name:ident $method:ident),*) => {$(
        pub(super) struct $name;
        impl Operator for $name {
            #[inline(always)]
            fn apply<N: Number>(a: N, b: N) -> N { a.$method(b) }
        }
    )*};
}
operators!(Sum sum, Prod prod, Max maximum, Min minimum);

macro_rules! wrapping {
    () => {
        #[inline(always)]
        fn sum(self, other: Self) -> Self {
            self.wrapping_add(other)
        }
        #[inline(always)]
        fn prod(self, other: Self) -> Self {
            self.wrapping_mul(other)
        }
        #[inline(always)]
        fn maximum(self, other: Self) -> Self {
            Ord::max(self, other)
        }
        #[inline(always)]
        fn minimum(self, other: Self) -> Self {
            Ord::min(self, other)
        }
        #[inline(always)]
        fn from_word(word: u64) -> Self {
            word as Self
        }
    };
}

// Divides integers as doubles, because vector units divide only floats. For operands below 2^32 the double
// quotient truncates correctly. An exact quotient that is not an integer is at least 1/divisor away from an
// integer, and the rounding error is below 2^-21/divisor.
macro_rules! integer_by_double {
    ($($integer:ty),*) => {$(impl Number for $integer {
        type Divisor = f64;
        wrapping!();
        #[inline(always)]
        fn divisor(nranks: usize) -> f64 { nranks as f64 }
        #[inline(always)]
        fn divide(self, by: f64) -> Self { (f64::from(self) / by) as Self }
    })*};
}
integer_by_double!(i8, u8, i32, u32);

macro_rules! integer {
    ($($integer:ty),*) => {$(impl Number for $integer {
        type Divisor = $integer;
        wrapping!();
        #[inline(always)]
        fn divisor(nranks: usize) -> Self { nranks as Self }
        #[inline(always)]
        fn divide(self, by: Self) -> Self { self / by }
    })*};
}
integer!(i64, u64);

macro_rules! float {
    ($($float:ident $bits:ident $nan:literal),*) => {$(impl Number for $float {
        type Divisor = $float;
        #[inline(always)]
        fn sum(self, other: Self) -> Self { canonical::$float(self + other) }
        #[inline(always)]
        fn prod(self, other: Self) -> Self { canonical::$float(self * other) }
        // Maximum and minimum of IEEE 754-2019. Operands that compare equal have equal bits except
        // for zeros. With `and` the result is +0 if either zero is positive, with `or` it is -0 if
        // either is negative.
        #[inline(always)]
        fn maximum(self, other: Self) -> Self {
            let equal = $float::from_bits(self.to_bits() & other.to_bits());
            let larger = if self > other { self } else { other };
            let ordered = if self == other { equal } else { larger };
            if self.is_nan() | other.is_nan() { $float::from_bits($nan) } else { ordered }
        }
        #[inline(always)]
        fn minimum(self, other: Self) -> Self {
            let equal = $float::from_bits(self.to_bits() | other.to_bits());
            let smaller = if self < other { self } else { other };
            let ordered = if self == other { equal } else { smaller };
            if self.is_nan() | other.is_nan() { $float::from_bits($nan) } else { ordered }
        }
        #[inline(always)]
        fn from_word(word: u64) -> Self { $float::from_bits(word as $bits) }
        #[inline(always)]
        fn divisor(nranks: usize) -> Self { nranks as $float }
        #[inline(always)]
        fn divide(self, by: Self) -> Self { canonical::$float(self / by) }
    })*

    mod canonical {$(
        #[inline(always)]
        pub(super) fn $float(x: $float) -> $float {
            if x.is_nan() { $float::from_bits($nan) } else { x }
        }
    )*}};
}
float!(f32 u32 0x7fc0_0000, f64 u64 0x7ff8_0000_0000_0000);
