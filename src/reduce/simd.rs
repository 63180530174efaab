//! Compiles the kernels for each instruction set, and selects one when a reducer is created.
//!
//! The loops of `kernel` are inlined into functions with the target features of each set. Only binary16 needs
//! intrinsics: compilers do not emit its conversions (F16C, AVX-512 F) by themselves.

use super::format::{F16, Format, raw_casts, with_format};
use super::number::{Max, Min, Operator, Prod, Sum};
use super::{Observation, kernel};
use crate::cpu::{Isa, Tile};
use crate::types::{DType, ReduceOp};

// Functions of these types may be called only on machines that have the instruction set for which
// they were compiled.
type LoadFn = unsafe fn(&[u8], &mut Tile, u64);
type CombineFn = unsafe fn(&[u8], &mut Tile);
type PairFn = unsafe fn(&[u8], &[u8], &mut [u8]);
type AssignFn = unsafe fn(&mut [u8], &[u8]);
type DivideFn = unsafe fn(&mut Tile, usize, usize);
type AverageFn = unsafe fn(&mut Tile, usize, f32, f32);
type StoreFn = unsafe fn(&Tile, &mut [u8]);

/// Functions for one element type and one operator, for an instruction set that the machine has.
#[derive(Clone, Copy)]
pub(super) struct ReduceKernels {
    load: LoadFn,
    combine: CombineFn,
    pair: PairFn,
    assign: AssignFn,
    divide: DivideFn,
    average: AverageFn,
    store: StoreFn,
}

/// Functions that exist for fp32 only.
#[derive(Clone, Copy)]
pub(super) struct Fp32 {
    observe: unsafe fn(&[f32]) -> Observation,
}

/// Functions that convert between a float type of up to 32 bits and fp32.
#[derive(Clone, Copy)]
pub(super) struct Conversion {
    widen: unsafe fn(&[u8], &mut [f32]),
    narrow: unsafe fn(&[f32], &mut [u8]),
}

/// Panics if the machine lacks `isa`. The constructors below call it, so that their function pointers are
/// safe to call.
fn check(isa: Isa) {
    assert!(isa <= Isa::detect(), "this machine lacks {}", isa.name());
}

/// Calls `$function` in the module that is compiled for `$isa`.
macro_rules! of_isa {
    ($isa:expr, $function:ident($($argument:expr),*)) => {{
        check($isa);
        match $isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::$function($($argument),*),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::$function($($argument),*),
            _ => scalar::$function($($argument),*),
        }
    }};
}

impl ReduceKernels {
    /// Chooses the functions for `isa`.
    ///
    /// # Panics
    /// If the machine lacks `isa`.
    pub(super) fn new(dtype: DType, op: ReduceOp, isa: Isa) -> ReduceKernels {
        of_isa!(isa, kernels(dtype, op))
    }

    /// Returns these functions with a load that multiplies by the factor.
    pub(super) fn scaling(self, dtype: DType, isa: Isa) -> ReduceKernels {
        ReduceKernels {
            load: of_isa!(isa, scaled_load(dtype)),
            ..self
        }
    }

    #[inline]
    pub(super) fn load(&self, src: &[u8], acc: &mut Tile, factor: u64) {
        // SAFETY: `ReduceKernels::new` checked that the machine has the instruction set of the
        // function.
        unsafe { (self.load)(src, acc, factor) }
    }

    #[inline]
    pub(super) fn combine(&self, src: &[u8], acc: &mut Tile) {
        // SAFETY: `ReduceKernels::new` checked that the machine has the instruction set of the
        // function.
        unsafe { (self.combine)(src, acc) }
    }

    #[inline]
    pub(super) fn pair(&self, a: &[u8], b: &[u8], dst: &mut [u8]) {
        // SAFETY: `ReduceKernels::new` checked that the machine has the instruction set of the
        // function.
        unsafe { (self.pair)(a, b, dst) }
    }

    #[inline]
    pub(super) fn assign(&self, dst: &mut [u8], b: &[u8]) {
        // SAFETY: `ReduceKernels::new` checked that the machine has the instruction set of the
        // function.
        unsafe { (self.assign)(dst, b) }
    }

    #[inline]
    pub(super) fn divide(&self, acc: &mut Tile, n: usize, nranks: usize) {
        // SAFETY: `ReduceKernels::new` checked that the machine has the instruction set of the
        // function.
        unsafe { (self.divide)(acc, n, nranks) }
    }

    #[inline]
    pub(super) fn average(&self, acc: &mut Tile, n: usize, divisor: f32, most: f32) {
        // SAFETY: `ReduceKernels::new` checked that the machine has the instruction set of the
        // function.
        unsafe { (self.average)(acc, n, divisor, most) }
    }

    #[inline]
    pub(super) fn store(&self, acc: &Tile, dst: &mut [u8]) {
        // SAFETY: `ReduceKernels::new` checked that the machine has the instruction set of the
        // function.
        unsafe { (self.store)(acc, dst) }
    }
}

impl Conversion {
    /// Chooses the functions for `isa`; `None` if `dtype` is not a float of up to 32 bits.
    ///
    /// # Panics
    /// If the machine lacks `isa`.
    pub(super) fn new(dtype: DType, isa: Isa) -> Option<Conversion> {
        of_isa!(isa, conversion(dtype))
    }

    #[inline]
    pub(super) fn widen(&self, src: &[u8], dst: &mut [f32]) {
        // SAFETY: `Conversion::new` checked that the machine has the instruction set of the
        // function.
        unsafe { (self.widen)(src, dst) }
    }

    #[inline]
    pub(super) fn narrow(&self, src: &[f32], dst: &mut [u8]) {
        // SAFETY: `Conversion::new` checked that the machine has the instruction set of the
        // function.
        unsafe { (self.narrow)(src, dst) }
    }
}

impl Fp32 {
    /// Chooses the functions for `isa`.
    ///
    /// # Panics
    /// If the machine lacks `isa`.
    pub(super) fn new(isa: Isa) -> Fp32 {
        of_isa!(isa, fp32())
    }

    #[inline]
    pub(super) fn observe(&self, src: &[f32]) -> Observation {
        // SAFETY: `Fp32::new` checked that the machine has the instruction set of the function.
        unsafe { (self.observe)(src) }
    }
}

/// Defines the module of an instruction set from its name, its binary16 format and its target
/// features.
macro_rules! instruction_set {
    ($(#[$configured:meta])? $module:ident, $half:ty $(, $features:literal)?) => {
        $(#[$configured])?
        mod $module {
            use super::*;

            $(#[target_feature(enable = $features)])?
            fn load<F: Format>(src: &[u8], acc: &mut Tile, factor: u64) {
                kernel::load::<F>(src, acc, factor);
            }

            $(#[target_feature(enable = $features)])?
            fn load_scaled<F: Format>(src: &[u8], acc: &mut Tile, factor: u64) {
                kernel::load_scaled::<F>(src, acc, factor);
            }

            $(#[target_feature(enable = $features)])?
            fn combine<F: Format, O: Operator>(src: &[u8], acc: &mut Tile) {
                kernel::combine::<F, O>(src, acc);
            }

            $(#[target_feature(enable = $features)])?
            fn pair<F: Format, O: Operator>(a: &[u8], b: &[u8], dst: &mut [u8]) {
                kernel::pair::<F, O>(a, b, dst);
            }

            $(#[target_feature(enable = $features)])?
            fn assign<F: Format, O: Operator>(dst: &mut [u8], b: &[u8]) {
                kernel::assign::<F, O>(dst, b);
            }

            $(#[target_feature(enable = $features)])?
            fn divide<F: Format>(acc: &mut Tile, n: usize, nranks: usize) {
                kernel::divide::<F>(acc, n, nranks);
            }

            $(#[target_feature(enable = $features)])?
            fn average(acc: &mut Tile, n: usize, divisor: f32, most: f32) {
                kernel::average(acc, n, divisor, most);
            }

            $(#[target_feature(enable = $features)])?
            fn store<F: Format>(acc: &Tile, dst: &mut [u8]) {
                kernel::store::<F>(acc, dst);
            }

            $(#[target_feature(enable = $features)])?
            fn widen<F: Format<Accumulator = f32>>(src: &[u8], dst: &mut [f32]) {
                kernel::widen::<F>(src, dst);
            }

            $(#[target_feature(enable = $features)])?
            fn narrow<F: Format<Accumulator = f32>>(src: &[f32], dst: &mut [u8]) {
                kernel::narrow::<F>(src, dst);
            }

            $(#[target_feature(enable = $features)])?
            fn observe(src: &[f32]) -> Observation {
                kernel::observe(src)
            }

            pub(super) fn kernels(dtype: DType, op: ReduceOp) -> ReduceKernels {
                with_format!(dtype, $half, of | of(op))
            }

            fn of<F: Format>(op: ReduceOp) -> ReduceKernels {
                let kernels = match op {
                    ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => with::<F, Sum>(),
                    ReduceOp::Prod => with::<F, Prod>(),
                    ReduceOp::Max => with::<F, Max>(),
                    ReduceOp::Min => with::<F, Min>(),
                };
                match op {
                    ReduceOp::PreMulSum(_) => ReduceKernels { load: load_scaled::<F>, ..kernels },
                    _ => kernels,
                }
            }

            fn with<F: Format, O: Operator>() -> ReduceKernels {
                ReduceKernels {
                    load: load::<F>,
                    combine: combine::<F, O>,
                    pair: pair::<F, O>,
                    assign: assign::<F, O>,
                    divide: divide::<F>,
                    average,
                    store: store::<F>,
                }
            }

            pub(super) fn scaled_load(dtype: DType) -> LoadFn {
                with_format!(dtype, $half, scaled | scaled())
            }

            fn scaled<F: Format>() -> LoadFn {
                load_scaled::<F>
            }

            pub(super) fn conversion(dtype: DType) -> Option<Conversion> {
                with_format!(dtype, $half, conversion_of | no_conversion())
            }

            fn conversion_of<F: Format<Accumulator = f32>>() -> Option<Conversion> {
                Some(Conversion {
                    widen: widen::<F>,
                    narrow: narrow::<F>,
                })
            }

            fn no_conversion<F: Format>() -> Option<Conversion> {
                None
            }

            pub(super) fn fp32() -> Fp32 {
                Fp32 { observe }
            }
        }
    };
}

instruction_set!(scalar, F16);
instruction_set!(
    #[cfg(target_arch = "x86_64")]
    avx2,
    half::F16C,
    "avx2,fma,f16c"
);
instruction_set!(
    #[cfg(target_arch = "x86_64")]
    avx512,
    half::F16Wide,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);

/// Binary16 formats that use conversion instructions, which round as `format` specifies. Only the
/// modules `avx2` and `avx512` name these types, and their functions enable the instructions.
#[cfg(target_arch = "x86_64")]
mod half {
    use super::*;
    use std::arch::x86_64::*;

    macro_rules! half {
        ($name:ident, $lanes:literal, |$from:ident, $to:ident| $widen:expr, $narrow:expr) => {
            pub(super) struct $name;

            impl Format for $name {
                type Accumulator = f32;
                const BLOCKED: bool = true;
                raw_casts!(2);

                #[inline(always)]
                fn widen(raw: [u8; 2]) -> f32 {
                    F16::widen(raw)
                }

                #[inline(always)]
                fn narrow(number: f32) -> [u8; 2] {
                    F16::narrow(number)
                }

                #[inline(always)]
                fn widen_slice(raw: &[[u8; 2]], numbers: &mut [f32]) {
                    let (raw, raw_tail) = raw.as_chunks::<$lanes>();
                    let (numbers, tail) = numbers.as_chunks_mut::<$lanes>();
                    for ($from, $to) in raw.iter().zip(numbers) {
                        // SAFETY: both chunks hold one vector. Only the modules `avx2` and `avx512`
                        // use this type, and their functions enable the instructions.
                        unsafe { $widen }
                    }
                    F16::widen_slice(raw_tail, tail);
                }

                #[inline(always)]
                fn narrow_slice(numbers: &[f32], raw: &mut [[u8; 2]]) {
                    let (numbers, tail) = numbers.as_chunks::<$lanes>();
                    let (raw, raw_tail) = raw.as_chunks_mut::<$lanes>();
                    for ($from, $to) in numbers.iter().zip(raw) {
                        // SAFETY: both chunks hold one vector. Only the modules `avx2` and `avx512`
                        // use this type, and their functions enable the instructions.
                        unsafe { $narrow }
                    }
                    F16::narrow_slice(tail, raw_tail);
                }
            }
        };
    }

    half!(
        F16C,
        8,
        |from, to| {
            let half = _mm_loadu_si128(from.as_ptr().cast());
            _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(half));
        },
        {
            let single = _mm256_loadu_ps(from.as_ptr());
            let half = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(single);
            _mm_storeu_si128(to.as_mut_ptr().cast(), half);
        }
    );
    half!(
        F16Wide,
        16,
        |from, to| {
            let half = _mm256_loadu_si256(from.as_ptr().cast());
            _mm512_storeu_ps(to.as_mut_ptr(), _mm512_cvtph_ps(half));
        },
        {
            let single = _mm512_loadu_ps(from.as_ptr());
            let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(single);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), half);
        }
    );
}
