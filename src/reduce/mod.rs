//! Element arithmetic: widens, combines, finishes and rounds elements of every type, for every operator.
//!
//! A step of a reduction runs tile by tile. [`Reducer::load`] reads this rank's elements into a
//! [`Tile`], [`Reducer::combine`] adds elements of peers, [`Reducer::finish`] completes a final result,
//! and [`Reducer::store`] rounds it. The tile holds accumulators ([`DType::accumulator`]): fp32 for
//! floats of up to 32 bits, the type itself otherwise.
//!
//! `number` and `format` specify the arithmetic of an element. `kernel` holds the loops, and `simd`
//! compiles them for each instruction set. Every set gives the same bits.

// Vector forms are instantiated for the instruction sets of x86-64 alone.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_imports))]

mod format;
mod kernel;
mod number;
#[allow(unsafe_code)]
mod simd;

pub use crate::cpu::Tile;

use crate::cpu::Isa;
use crate::error::{Error, ErrorKind, Result};
use crate::types::{DType, ReduceOp, Scalar};
use simd::{Conversion, Fp32, ReduceKernels};

/// The arithmetic of one element type and one operator. It is cheap to copy, and each method costs one
/// indirect call per tile.
///
/// Element slices may have any alignment. They must hold whole elements that fit the tile; otherwise methods
/// panic.
#[derive(Clone, Copy)]
pub struct Reducer {
    dtype: DType,
    op: ReduceOp,
    isa: Isa,
    /// Bits of the factor of a pre-multiplied sum, in the accumulator type; narrower types use the
    /// low bits.
    factor: u64,
    /// Limits and division of an average; unused for other operators.
    average: Average,
    kernels: ReduceKernels,
}

/// How an average of floats with fp32 accumulators is scaled and limited.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Average {
    /// Contributions are multiplied by 2^-shift.
    shift: u32,
    /// Largest finite number of the element type, which bounds every average of finite elements; infinity if
    /// results are not limited.
    largest: f32,
}

impl Reducer {
    /// Creates the arithmetic for elements of `dtype`, combined by `op`.
    ///
    /// The factor of a pre-multiplied sum is rounded to the accumulator type; an integer factor wraps.
    ///
    /// # Errors
    /// Invalid argument if integers have a floating factor or floats an integer factor; unsupported if
    /// the machine lacks `isa`.
    pub fn new(dtype: DType, op: ReduceOp, isa: Isa) -> Result<Reducer> {
        if isa > Isa::detect() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "a reduction for {} was asked for, but this machine goes up to {}",
                    isa.name(),
                    Isa::detect().name()
                ),
            ));
        }
        let factor = match op {
            ReduceOp::PreMulSum(scalar) => factor_word(dtype, scalar)?,
            _ => 0,
        };
        Ok(Reducer {
            dtype,
            op,
            isa,
            factor,
            average: Average {
                shift: 0,
                largest: narrow_largest(dtype).unwrap_or(f32::INFINITY),
            },
            kernels: ReduceKernels::new(dtype, op, isa),
        })
    }

    /// Creates the arithmetic of an average whose contributions are multiplied by 2^-`shift`, so that sums fit
    /// the messages that carry them. [`Reducer::finish`] divides by nranks * 2^-`shift`.
    ///
    /// # Errors
    /// See [`Reducer::new`].
    ///
    /// # Panics
    /// If `shift` is not 0 and the accumulator is not fp32.
    pub fn averaging(dtype: DType, shift: u32, isa: Isa) -> Result<Reducer> {
        let plain = Reducer::new(dtype, ReduceOp::Avg, isa)?;
        if shift == 0 {
            return Ok(plain);
        }
        assert_eq!(dtype.accumulator(), DType::F32, "only fp32 sums are scaled");
        Ok(Reducer {
            factor: scale_of(shift).to_bits().into(),
            average: Average {
                shift,
                ..plain.average
            },
            kernels: plain.kernels.scaling(dtype, isa),
            ..plain
        })
    }

    /// Returns whether [`Reducer::load`] multiplies by a factor.
    pub fn scales(&self) -> bool {
        matches!(self.op, ReduceOp::PreMulSum(_)) || self.average.shift > 0
    }

    /// Returns whether partial sums and results are limited to the finite numbers of the element type. Sums of
    /// an average of narrow floats are: their exact values are in this range, and rounding may exceed it.
    pub fn limits(&self) -> bool {
        self.op == ReduceOp::Avg && self.average.largest.is_finite()
    }

    /// Limits the finite numbers among the first `n` of a partial sum, if [`Reducer::limits`].
    #[inline]
    pub fn limit(&self, acc: &mut Tile, n: usize) {
        if self.limits() {
            self.kernels.average(acc, n, 1.0, self.average.largest);
        }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the operator.
    pub fn op(&self) -> ReduceOp {
        self.op
    }

    /// Sets acc\[i\] = src\[i\], multiplied by the factor of a pre-multiplied sum. `src` is this rank's
    /// input.
    #[inline]
    pub fn load(&self, src: &[u8], acc: &mut Tile) {
        self.kernels.load(src, acc, self.factor);
    }

    /// Sets acc\[i\] = acc\[i\] op src\[i\]. `src` comes from a peer, which has applied the factor.
    #[inline]
    pub fn combine(&self, src: &[u8], acc: &mut Tile) {
        self.kernels.combine(src, acc);
    }

    /// Sets dst\[i\] = a\[i\] op b\[i\] in one pass. The result equals `load`, then `combine`, then `store`,
    /// but the factor is not applied. The order of `a` and `b` does not matter.
    #[inline]
    pub fn pair(&self, a: &[u8], b: &[u8], dst: &mut [u8]) {
        self.kernels.pair(a, b, dst);
    }

    /// Sets dst\[i\] = dst\[i\] op b\[i\], as [`Reducer::pair`] does, but in place.
    #[inline]
    pub fn assign(&self, dst: &mut [u8], b: &[u8]) {
        self.kernels.assign(dst, b);
    }

    /// Completes the first `n` elements of the tile, which are fully combined. Averages are divided
    /// by the number of ranks, where integers truncate towards zero, and limited ([`Reducer::limits`]). Other
    /// operators need nothing.
    ///
    /// # Panics
    /// If `nranks` is 0.
    #[inline]
    pub fn finish(&self, acc: &mut Tile, n: usize, nranks: usize) {
        if self.op == ReduceOp::Avg {
            assert!(nranks > 0, "an average over no ranks");
            if self.dtype.accumulator() != DType::F32 {
                return self.kernels.divide(acc, n, nranks);
            }
            // Both products are exact for up to 2^13 ranks, so the quotient of a limited sum is the limit.
            let divisor = nranks as f32 * scale_of(self.average.shift);
            let most = self.average.largest * divisor;
            self.kernels.average(acc, n, divisor, most);
        }
    }

    /// Sets dst\[i\] = acc\[i\], rounded to nearest even. Beyond the largest finite value f16, bf16 and
    /// f8e5m2 become infinite, and f8e4m3 becomes NaN.
    #[inline]
    pub fn store(&self, acc: &Tile, dst: &mut [u8]) {
        self.kernels.store(acc, dst);
    }
}

impl std::fmt::Debug for Reducer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Reducer({} of {}, {})",
            self.op,
            self.dtype,
            self.isa.name()
        )
    }
}

/// Returns the factor by which contributions of an average are multiplied.
pub fn scale_of(shift: u32) -> f32 {
    2f32.powi(-(shift as i32))
}

/// Returns the largest finite number of a float type of up to 16 bits; `None` for other types.
pub fn narrow_largest(dtype: DType) -> Option<f32> {
    match dtype {
        DType::F16 => Some(65_504.0),
        DType::BF16 => Some(f32::from_bits(0x7f7f_0000)),
        DType::F8E4M3 => Some(448.0),
        DType::F8E5M2 => Some(57_344.0),
        _ => None,
    }
}

/// Returns the factor of a pre-multiplied sum as the bits of the accumulator type of `dtype`, in the low bits
/// of a word.
///
/// # Errors
/// Invalid argument if integers have a floating factor or floats an integer factor.
pub fn factor_word(dtype: DType, scalar: Scalar) -> Result<u64> {
    match (dtype.accumulator(), scalar) {
        (DType::F32, Scalar::Float(factor)) => Ok((factor as f32).to_bits().into()),
        (DType::F64, Scalar::Float(factor)) => Ok(factor.to_bits()),
        (other, Scalar::Int(factor)) if !other.is_float() => Ok(factor as u64),
        (_, Scalar::Float(factor)) => Err(Error::invalid_argument(format!(
            "premulsum of {dtype} elements with the floating factor {factor}: pass an integer"
        ))),
        (_, Scalar::Int(factor)) => Err(Error::invalid_argument(format!(
            "premulsum of {dtype} elements with the integer factor {factor}: pass a float"
        ))),
        (_, Scalar::Device(address)) => Err(Error::invalid_argument(format!(
            "the factor of a premulsum lies at {address:#x} of a GPU, where only calls on GPUs \
             find it: pass a number"
        ))),
    }
}

/// Converts elements of a float type of up to 32 bits to fp32, exactly.
///
/// # Panics
/// If `dtype` is another type, the machine lacks `isa`, or the slices differ in their number of
/// elements.
pub fn widen(dtype: DType, isa: Isa, src: &[u8], dst: &mut [f32]) {
    conversion(dtype, isa).widen(src, dst);
}

/// Rounds fp32 elements to a float type of up to 32 bits, as [`Reducer::store`] does.
///
/// # Panics
/// If `dtype` is another type, the machine lacks `isa`, or the slices differ in their number of
/// elements.
pub fn narrow(dtype: DType, isa: Isa, src: &[f32], dst: &mut [u8]) {
    conversion(dtype, isa).narrow(src, dst);
}

fn conversion(dtype: DType, isa: Isa) -> Conversion {
    Conversion::new(dtype, isa).unwrap_or_else(|| panic!("{dtype} does not fit fp32"))
}

/// Statistics of an input that travels without a codec.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Observation {
    /// Count of NaN and infinite elements.
    pub non_finite: u64,
    /// Largest magnitude among the finite elements.
    pub abs_max: f32,
    /// Sum of squares of the finite elements. It is added up in 16 partial sums, so that every instruction
    /// set gives equal bits.
    pub sum_squares: f64,
}

/// Computes the statistics of `src`.
///
/// # Panics
/// If the machine lacks `isa`.
pub fn observe(isa: Isa, src: &[f32]) -> Observation {
    Fp32::new(isa).observe(src)
}

#[cfg(test)]
mod tests;
