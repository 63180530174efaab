//! A small vector trait, so that each codec is written once for every vector width.
//!
//! [`Lanes`] is implemented by tokens that only [`launch`] creates, after it enabled the instruction
//! set. A token therefore proves that the machine runs its instructions, and the methods are safe.
//! Every function between `launch` and the instructions must be `#[inline(always)]`: a function that is
//! not inlined is compiled without the instruction set, and each intrinsic becomes a call.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use crate::cpu::Isa;
use crate::error::{Error, ErrorKind, Result};

/// Elements of the widest vector. A buffer of this length suffices for every [`Lanes::load`].
pub(super) const WIDEST: usize = 16;

/// An instruction set that this machine was found to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Available(Isa);

impl Available {
    /// The scalar form, which every machine runs.
    pub const SCALAR: Available = Available(Isa::Scalar);

    /// Checks that this machine has `isa`.
    ///
    /// # Errors
    /// Unsupported if the machine lacks `isa`.
    pub fn new(isa: Isa) -> Result<Available> {
        if isa > Isa::detect() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "a codec for {} was asked for, but this machine goes up to {}",
                    isa.name(),
                    Isa::detect().name()
                ),
            ));
        }
        Ok(Available(isa))
    }
}

/// A loop with a scalar and a vector form.
pub(super) trait SimdKernel {
    type Output;
    /// Runs the scalar form, which specifies the result.
    fn scalar(self) -> Self::Output;
    /// Runs the vector form for any width; implementations are `#[inline(always)]`.
    fn vector<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// Runs the form of a kernel for an instruction set.
#[inline]
pub(super) fn launch<K: SimdKernel>(isa: Available, kernel: K) -> K::Output {
    match isa.0 {
        Isa::Scalar => kernel.scalar(),
        // SAFETY: `Available::new` compared `isa` with `Isa::detect`, so this machine has AVX2, FMA
        // and F16C.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { launch_avx2(kernel) },
        // SAFETY: `Available::new` compared `isa` with `Isa::detect`, so this machine has AVX-512
        // F, BW, DQ and VL.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { launch_avx512(kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => kernel.scalar(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn launch_avx2<K: SimdKernel>(kernel: K) -> K::Output {
    // SAFETY: only `launch` calls this function, after `Available::new` found the features that it
    // enables.
    kernel.vector(unsafe { avx2::Avx2::new() })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn launch_avx512<K: SimdKernel>(kernel: K) -> K::Output {
    // SAFETY: only `launch` calls this function, after `Available::new` found the features that it
    // enables.
    kernel.vector(unsafe { avx512::Avx512::new() })
}

/// Evaluates an expression for the numbers 0 to 3 and returns an array. A closure would not be inlined, and so
/// compiled without the instruction set.
macro_rules! four {
    ($i:ident => $value:expr) => {
        [
            {
                let $i: usize = 0;
                $value
            },
            {
                let $i: usize = 1;
                $value
            },
            {
                let $i: usize = 2;
                $value
            },
            {
                let $i: usize = 3;
                $value
            },
        ]
    };
}
pub(super) use four;

/// Operations on vectors of [`Lanes::N`] elements. Floats in registers are fp32, and integers have 32 bits.
/// No operation flushes subnormals or reorders arithmetic.
pub(super) trait Lanes: Copy {
    /// Number of elements of a vector.
    const N: usize;
    /// Vector of N fp32 numbers.
    type F: Copy;
    /// Vector of N 32-bit integers.
    type I: Copy;
    /// Vector of truth values, as comparisons return them.
    type M: Copy;
    /// Vector of fp64 sums, one for each element of a vector of floats.
    type D: Copy;
    /// Table of 16 floats, in registers if they fit.
    type T16<'a>: Copy;
    /// Table of 128 floats, in registers if they fit.
    type T128<'a>: Copy;

    /// Loads the first N elements of `from`; panics if there are fewer.
    fn load(self, from: &[f32]) -> Self::F;
    /// Stores to the first N elements of `to`; panics if there are fewer.
    fn store(self, v: Self::F, to: &mut [f32]);
    /// Loads N bytes and widens them.
    fn load_u8(self, from: &[u8]) -> Self::I;
    /// Stores the low byte of each element; all must be below 256.
    fn store_u8(self, v: Self::I, to: &mut [u8]);
    /// Packs four vectors of elements below 256 into a vector of 4N bytes, in the order of this instruction set.
    fn pack(self, v: [Self::I; 4]) -> Self::I;
    /// Sets bit 7 of each nonzero byte, as [`Lanes::pack`] returns them, to the sign of its element of `of`. All
    /// bytes must be below 128, or have no nonzero sign.
    fn with_signs(self, bytes: Self::I, of: [Self::F; 4]) -> Self::I;
    /// Orders the bytes that [`Lanes::pack`] returns.
    fn in_order(self, bytes: Self::I) -> Self::I;
    /// Packs four vectors of elements below 256 into a vector of 4N bytes, in order.
    #[inline(always)]
    fn pack_bytes(self, v: [Self::I; 4]) -> Self::I {
        self.in_order(self.pack(v))
    }
    /// Returns the table entries at the indexes in the bytes of `at`, all below 16.
    fn lookup_bytes(self, table: &[u8; 16], at: Self::I) -> Self::I;
    /// Returns the smaller of each two unsigned bytes.
    fn min_bytes(self, a: Self::I, b: Self::I) -> Self::I;
    /// Stores the 4N bytes of a vector.
    fn store_bytes(self, v: Self::I, to: &mut [u8]);
    /// Stores the low 4, 2 or 1 bits of each of the 4N bytes of a vector next to each other; the bits
    /// above must be zero.
    fn store_bits<const BITS: usize>(self, v: Self::I, to: &mut [u8]);
    /// Loads N little-endian 16-bit integers and widens them.
    fn load_u16(self, from: &[u8]) -> Self::I;
    /// Stores the low two bytes of each element; all must be below 65,536.
    fn store_u16(self, v: Self::I, to: &mut [u8]);

    /// Loads N little-endian 24-bit integers and widens them. Reads exactly 3N bytes.
    fn load_u24(self, from: &[u8]) -> Self::I;
    /// Stores the low three bytes of each element; all must be below 2^24. Writes exactly 3N bytes.
    fn store_u24(self, v: Self::I, to: &mut [u8]);

    fn splat(self, x: f32) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// Returns a * b + c, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// Returns the larger of two numbers, neither NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// Returns the smaller of two numbers, neither NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Rounds up to an integer.
    fn ceil(self, a: Self::F) -> Self::F;
    fn gt(self, a: Self::F, b: Self::F) -> Self::M;
    /// Returns whether all elements are larger than `limit`.
    fn all_gt(self, v: [Self::F; 4], limit: Self::F) -> bool;
    fn select(self, m: Self::M, yes: Self::F, no: Self::F) -> Self::F;

    fn splat_i(self, x: i32) -> Self::I;
    /// Returns 0 in the first element, 1 in the second, and so on.
    fn count(self) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Returns the low 32 bits of each product.
    fn mul_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Returns the larger of two signed integers.
    fn max_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Returns the smaller of two signed integers.
    fn min_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Returns whether a > b, as signed integers.
    fn gt_i(self, a: Self::I, b: Self::I) -> Self::M;
    /// Adds 1 to each element of `a` where `m` is set.
    fn increment(self, m: Self::M, a: Self::I) -> Self::I;
    /// Returns a - b of the unsigned halves of each element, or 0 where b is larger.
    fn subs_u16(self, a: Self::I, b: Self::I) -> Self::I;
    /// Returns the products of the high halves of each element plus those of the low halves, all signed.
    fn mul_halves(self, a: Self::I, b: Self::I) -> Self::I;
    /// Returns whether the low half of any element, as an unsigned number, is below `limit`, from 1 to 32,767.
    fn any_low_half_below(self, v: [Self::I; 4], limit: i32) -> bool;
    /// Returns whether a truth value is true.
    fn any(self, m: Self::M) -> bool;
    fn eq_i(self, a: Self::I, b: Self::I) -> Self::M;
    fn select_i(self, m: Self::M, yes: Self::I, no: Self::I) -> Self::I;
    fn shl<const S: u32>(self, a: Self::I) -> Self::I;
    /// Shifts right and fills with zeros.
    fn shr<const S: u32>(self, a: Self::I) -> Self::I;

    /// Returns the bits of floats.
    fn bits(self, a: Self::F) -> Self::I;
    /// Returns the floats that have these bits.
    fn float(self, a: Self::I) -> Self::F;
    /// Returns the integer part of each float. NaN and numbers beyond 32-bit integers become [`i32::MIN`].
    fn truncate(self, a: Self::F) -> Self::I;
    /// Converts integers to floats.
    fn convert(self, a: Self::I) -> Self::F;
    /// Rounds each float to binary16, nearest even; a NaN becomes quiet.
    fn narrow_f16(self, a: Self::F) -> Self::I;
    /// Converts each binary16 number to fp32.
    fn widen_f16(self, a: Self::I) -> Self::F;

    fn table16(self, table: &[f32; 16]) -> Self::T16<'_>;
    fn table128(self, table: &[f32; 128]) -> Self::T128<'_>;
    /// Returns the table entries at the indexes `at`, all below 16.
    fn lookup16(self, table: Self::T16<'_>, at: Self::I) -> Self::F;
    /// Returns the table entries at the indexes `at`, all from 8 to 15, or all up to 15 if the
    /// upper half of the table equals the lower.
    fn lookup_upper(self, table: Self::T16<'_>, at: Self::I) -> Self::F;
    /// Returns the table entries whose indexes are the low 7 bits of `at`.
    fn lookup128(self, table: Self::T128<'_>, at: Self::I) -> Self::F;
    /// Returns the table entries at the indexes `at`. An index that is negative or beyond the table
    /// reads the last entry.
    fn gather(self, table: &[i32], at: Self::I) -> Self::I;

    /// Returns the largest element of a vector of signed integers.
    fn reduce_max(self, a: Self::I) -> i32;
    /// Returns the sum of all elements; none may be negative.
    fn reduce_sum(self, a: Self::I) -> u64;
    fn zero_sum(self) -> Self::D;
    /// Returns sum + a * a in fp64.
    fn add_squares(self, sum: Self::D, a: Self::F) -> Self::D;
    /// Returns `above` + a where a is 0 or more, and `below` + a where a is less than 0, in fp64. NaN is added to
    /// both.
    fn add_by_sign(self, above: Self::D, below: Self::D, a: Self::F) -> (Self::D, Self::D);
    /// Stores the N sums to `to`, in the order of the elements.
    fn sums(self, sum: Self::D, to: &mut [f64]);
    fn total(self, sum: Self::D) -> f64;
}

/// Loads up to N elements and pads the vector with zeros.
#[inline(always)]
pub(super) fn load_part<L: Lanes>(lanes: L, from: &[f32]) -> L::F {
    let mut whole = [0.0; WIDEST];
    whole[..from.len()].copy_from_slice(from);
    lanes.load(&whole)
}

/// Sets bit 7 of each nonzero code to the sign of `x`.
#[inline(always)]
pub(super) fn with_sign<L: Lanes>(lanes: L, magnitude: L::I, x: L::F) -> L::I {
    let sign = lanes.and(lanes.shr::<24>(lanes.bits(x)), lanes.splat_i(0x80));
    let zero = lanes.splat_i(0);
    let signed = lanes.or(magnitude, sign);
    lanes.select_i(lanes.gt_i(magnitude, zero), signed, zero)
}

/// Gives each value the sign in bit 7 of its code.
#[inline(always)]
pub(super) fn apply_sign<L: Lanes>(lanes: L, value: L::F, code: L::I) -> L::F {
    let sign = lanes.shl::<24>(lanes.and(code, lanes.splat_i(0x80)));
    lanes.float(lanes.or(lanes.bits(value), sign))
}

/// Returns |x|.
#[inline(always)]
pub(super) fn abs<L: Lanes>(lanes: L, x: L::F) -> L::F {
    lanes.float(abs_bits(lanes, x))
}

/// Returns the bits of |x|. As integers they are ordered like the magnitudes, with NaN above infinity.
#[inline(always)]
pub(super) fn abs_bits<L: Lanes>(lanes: L, x: L::F) -> L::I {
    lanes.and(lanes.bits(x), lanes.splat_i(0x7fff_ffff))
}
