//! A small vector trait, so that each codec is written once for every width.
//!
//! [`Lanes`] is implemented by tokens that exist only inside [`launch`], which enables the
//! instruction set before it hands one out. Holding a token therefore proves that the machine
//! runs its instructions, and the methods are safe. Everything between `launch` and the
//! instructions must be `#[inline(always)]`: a function that is not inlined there is compiled
//! without the instruction set and falls apart into calls.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use crate::cpu::Isa;
use crate::error::{Error, ErrorKind, Result};

/// Elements of the widest vector: the length of a buffer that any [`Lanes::load`] may read.
pub(super) const WIDEST: usize = 16;

/// An instruction set that this machine was seen to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Available(Isa);

impl Available {
    /// Every machine has it.
    pub const SCALAR: Available = Available(Isa::Scalar);

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

/// A loop in both of its forms.
pub(super) trait Kernel {
    type Output;
    /// The specification.
    fn scalar(self) -> Self::Output;
    /// The same for any width; `#[inline(always)]`.
    fn vector<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// Runs a kernel in the form that `isa` asks for.
#[inline]
pub(super) fn launch<K: Kernel>(isa: Available, kernel: K) -> K::Output {
    match isa.0 {
        Isa::Scalar => kernel.scalar(),
        // SAFETY: an `Available` holds only what `Isa::detect` found on this machine.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { launch_avx2(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { launch_avx512(kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => kernel.scalar(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn launch_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function has the features.
    kernel.vector(unsafe { avx2::Avx2::new() })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn launch_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function has the features.
    kernel.vector(unsafe { avx512::Avx512::new() })
}

/// A vector of [`Lanes::N`] elements. Floats are fp32, integers 32 bits, whatever width they
/// have in memory. Nothing here flushes subnormals or reorders arithmetic.
pub(super) trait Lanes: Copy {
    /// Elements of a vector.
    const N: usize;
    /// Floats.
    type F: Copy;
    /// Integers.
    type I: Copy;
    /// A truth value an element.
    type M: Copy;
    /// A running fp64 sum.
    type D: Copy;
    /// 16, 32 and 128 floats, in registers where they fit.
    type T16<'a>: Copy;
    /// As above.
    type T32<'a>: Copy;
    /// As above.
    type T128<'a>: Copy;

    /// The first N of `from`. Panics if there are fewer.
    fn load(self, from: &[f32]) -> Self::F;
    /// Writes the first N of `to`.
    fn store(self, v: Self::F, to: &mut [f32]);
    /// N bytes, widened.
    fn load_u8(self, from: &[u8]) -> Self::I;
    /// The low byte of each element; all must be below 256.
    fn store_u8(self, v: Self::I, to: &mut [u8]);
    /// 2N bytes as little-endian 16-bit integers, widened.
    fn load_u16(self, from: &[u8]) -> Self::I;
    /// The low two bytes of each element; all must be below 65,536.
    fn store_u16(self, v: Self::I, to: &mut [u8]);

    /// 3N bytes as little-endian 24-bit integers, widened. Reads no more than those.
    fn load_u24(self, from: &[u8]) -> Self::I;
    /// The low three bytes of each element; all must be below 2^24. Writes no more than 3N.
    fn store_u24(self, v: Self::I, to: &mut [u8]);

    fn splat(self, x: f32) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// Larger of two numbers, neither NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// Smaller of two numbers, neither NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Rounded up to an integer.
    fn ceil(self, a: Self::F) -> Self::F;
    fn gt(self, a: Self::F, b: Self::F) -> Self::M;
    fn select(self, m: Self::M, yes: Self::F, no: Self::F) -> Self::F;

    fn splat_i(self, x: i32) -> Self::I;
    /// 0 in the first element, 1 in the second, and so on.
    fn count(self) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Low 32 bits of the product.
    fn mul_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Larger, signed.
    fn max_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Smaller, signed.
    fn min_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// a > b, signed.
    fn gt_i(self, a: Self::I, b: Self::I) -> Self::M;
    fn eq_i(self, a: Self::I, b: Self::I) -> Self::M;
    fn select_i(self, m: Self::M, yes: Self::I, no: Self::I) -> Self::I;
    fn shl<const S: u32>(self, a: Self::I) -> Self::I;
    /// Shift right, zeros coming in.
    fn shr<const S: u32>(self, a: Self::I) -> Self::I;

    /// The bits of floats.
    fn bits(self, a: Self::F) -> Self::I;
    /// The floats of bits.
    fn float(self, a: Self::I) -> Self::F;
    /// Integer part of floats within the range of integers.
    fn truncate(self, a: Self::F) -> Self::I;
    /// Integers as floats.
    fn convert(self, a: Self::I) -> Self::F;
    /// To binary16, nearest even; NaN becomes quiet.
    fn narrow_f16(self, a: Self::F) -> Self::I;
    /// From binary16.
    fn widen_f16(self, a: Self::I) -> Self::F;

    fn table16(self, table: &[f32; 16]) -> Self::T16<'_>;
    fn table32(self, table: &[f32; 32]) -> Self::T32<'_>;
    fn table128(self, table: &[f32; 128]) -> Self::T128<'_>;
    /// Table entries at the low 4 bits of `at`.
    fn lookup16(self, table: Self::T16<'_>, at: Self::I) -> Self::F;
    /// Table entries at the low 5 bits of `at`.
    fn lookup32(self, table: Self::T32<'_>, at: Self::I) -> Self::F;
    /// Table entries at the low 7 bits of `at`.
    fn lookup128(self, table: Self::T128<'_>, at: Self::I) -> Self::F;
    /// Entries of any table; an index beyond it (or below 0) reads the last.
    fn gather(self, table: &[i32], at: Self::I) -> Self::I;

    /// Largest element, signed.
    fn reduce_max(self, a: Self::I) -> i32;
    /// Sum of all elements, none negative.
    fn reduce_sum(self, a: Self::I) -> u64;
    fn zero_sum(self) -> Self::D;
    /// sum + a * a in fp64.
    fn add_squares(self, sum: Self::D, a: Self::F) -> Self::D;
    /// sum + a in fp64.
    fn add_wide(self, sum: Self::D, a: Self::F) -> Self::D;
    /// The N sums, in the order of the elements.
    fn sums(self, sum: Self::D, to: &mut [f64]);
    fn total(self, sum: Self::D) -> f64;
}

/// Up to N elements, the rest being zeros.
#[inline(always)]
pub(super) fn load_part<L: Lanes>(lanes: L, from: &[f32]) -> L::F {
    let mut whole = [0.0; WIDEST];
    whole[..from.len()].copy_from_slice(from);
    lanes.load(&whole)
}

/// The sign bits of `x` moved to bit 7 of codes that are not 0.
#[inline(always)]
pub(super) fn with_sign<L: Lanes>(lanes: L, magnitude: L::I, x: L::F) -> L::I {
    let sign = lanes.and(lanes.shr::<24>(lanes.bits(x)), lanes.splat_i(0x80));
    let zero = lanes.splat_i(0);
    let signed = lanes.or(magnitude, sign);
    lanes.select_i(lanes.gt_i(magnitude, zero), signed, zero)
}

/// Bit 7 of codes as the sign of values.
#[inline(always)]
pub(super) fn apply_sign<L: Lanes>(lanes: L, value: L::F, code: L::I) -> L::F {
    let sign = lanes.shl::<24>(lanes.and(code, lanes.splat_i(0x80)));
    lanes.float(lanes.or(lanes.bits(value), sign))
}

/// |x|.
#[inline(always)]
pub(super) fn abs<L: Lanes>(lanes: L, x: L::F) -> L::F {
    lanes.float(abs_bits(lanes, x))
}

/// The bits of |x|: their order as integers is that of the magnitudes, NaN above infinity.
#[inline(always)]
pub(super) fn abs_bits<L: Lanes>(lanes: L, x: L::F) -> L::I {
    lanes.and(lanes.bits(x), lanes.splat_i(0x7fff_ffff))
}
