//! Training helpers: adaptive weight precision and a loss scaler.
//!
//! Each is a plain struct that holds its whole state, so that a checkpoint copies the struct.

use super::core::arguments::{check_out, store};
use super::error::cinch_result_t;
use super::statistics::{self, cinch_statistics_t};
use super::types::{ARGUMENT_NAMES, dtype_number};
use super::versioned;
use crate::cpu::Isa;
use crate::error::{Error, Result};
use crate::reduce;
use crate::training::{
    Awp, AwpConfig, AwpState, LossScaler, LossScalerConfig, LossScalerState, Verdict,
    count_non_finite,
};
use crate::types::DType;
use std::ffi::{c_char, c_int, c_void};

/// Adaptive weight precision (AWP) of one group of tensors: few bits at first, more once the L2 norm of
/// the group has stopped growing.
///
/// Initialise it with `cinch_awp_default(&awp)`, then set `threshold` and `interval`. The struct holds
/// the whole state. New fields are only ever added at the end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_awp_t {
    /// Bytes of the struct in the program's header. Set by `cinch_awp_default`.
    pub size: usize,
    /// Constant by which the library detects an uninitialised struct. Set by `cinch_awp_default`.
    pub magic: u32,
    /// Version of the program's header. Set by `cinch_awp_default`.
    pub version: u32,
    /// Relative growth of the norm above which a batch counts as growth (T of the paper).
    pub threshold: f64,
    /// State: norm of the previous batch, valid if `has_previous`.
    pub previous: f64,
    /// Consecutive batches without growth after which bits are added; about one epoch.
    pub interval: u32,
    /// Bits to add, 1 to 32; unset = 8 (N of the paper).
    pub step_bits: u32,
    /// State: bits to keep, 1 to 32; unset = 8. Its first value is the starting point.
    pub bits: u32,
    /// State: consecutive batches without growth.
    pub count: u32,
    /// State: 1 if `previous` is valid.
    pub has_previous: u32,
    /// Largest number of bits, 1 to 32; unset = 32. 16 moves at most half of the bytes of fp32.
    pub most_bits: u32,
}

cinch_struct!(cinch_awp_t, magic 0xC1C4_0A39, first 56, now 56);

/// Scale of a loss whose gradients are summed in 16 bits. A non-finite gradient halves the scale and
/// skips the step; many clean steps double the scale.
///
/// Initialise it with `cinch_loss_scaler_default(&scaler)`, which sets the defaults given below. The
/// struct holds the whole state. New fields are only ever added at the end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_loss_scaler_t {
    /// Bytes of the struct in the program's header. Set by `cinch_loss_scaler_default`.
    pub size: usize,
    /// Constant by which the library detects an uninitialised struct. Set by `cinch_loss_scaler_default`.
    pub magic: u32,
    /// Version of the program's header. Set by `cinch_loss_scaler_default`.
    pub version: u32,
    /// State: factor of the loss; default 65536.
    pub scale: f64,
    /// Factor of the scale after `interval` clean steps; default 2.
    pub growth: f64,
    /// Factor of the scale after a step with a non-finite value; default 0.5.
    pub backoff: f64,
    /// Lower limit of the scale; default 2^-126.
    pub smallest: f64,
    /// Upper limit of the scale; default 2^127.
    pub largest: f64,
    /// New scale divided by the old one at the last update: the factor of `cinch_feedback_rescale`.
    pub rescale: f64,
    /// State: number of skipped steps.
    pub skipped: u64,
    /// Consecutive clean steps until the scale grows; default 2000.
    pub interval: u32,
    /// State: clean steps since the last change of the scale.
    pub clean: u32,
}

cinch_struct!(cinch_loss_scaler_t, magic 0xC1C4_105C, first 80, now 80);

/// Initialises `*awp` with nothing set.
///
/// C programs use `cinch_awp_default(&awp)`, which passes `sizeof(cinch_awp_t)` and
/// `CINCH_API_VERSION` of the program's header as `size` and `version`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_awp_init(
    awp: *mut cinch_awp_t,
    size: usize,
    version: u32,
) -> cinch_result_t {
    guard!("cinch_awp_init", {
        // SAFETY: cinch.h requires of the program that `awp` is NULL or writable for `size` bytes.
        unsafe { versioned::initialise(awp, size, version) }
    })
}

/// Updates `*awp` with the group's L2 norm after a batch, which must be the same on all ranks.
///
/// Stores the bits to keep from now on in `awp->bits`. Stores the name of the codec that keeps them in
/// `*codec`, which may be NULL: static text `trunc8`, `trunc16`, `trunc24` or `raw`. A non-finite norm
/// changes nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_awp_update(
    awp: *mut cinch_awp_t,
    l2_norm: f64,
    codec: *mut *const c_char,
) -> cinch_result_t {
    guard!("cinch_awp_update", {
        // SAFETY: cinch.h requires of the program that `awp` is NULL or a readable struct.
        let mut fields = unsafe { versioned::read(awp) }?;
        let mut group = awp_of(&fields)?;
        group.update(l2_norm)?;
        let state = group.state();
        fields.step_bits = group.config().step_bits;
        fields.bits = state.bits;
        fields.count = state.count;
        fields.previous = state.previous.unwrap_or(0.0);
        fields.has_previous = state.previous.is_some().into();
        // SAFETY: `read` checked the struct, and cinch.h requires of the program that it is
        // writable.
        unsafe { versioned::fill(awp, &fields) };
        if !codec.is_null() {
            let name = match group.codec() {
                "trunc8" => c"trunc8",
                "trunc16" => c"trunc16",
                "trunc24" => c"trunc24",
                _ => c"raw",
            };
            // SAFETY: `codec` is not NULL, and cinch.h requires of the program that it is writable
            // then.
            unsafe { codec.write_unaligned(name.as_ptr()) };
        }
        Ok(())
    })
}

/// Initialises `*scaler` with the defaults.
///
/// C programs use `cinch_loss_scaler_default(&scaler)`, which passes `sizeof(cinch_loss_scaler_t)` and
/// `CINCH_API_VERSION` of the program's header as `size` and `version`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_loss_scaler_init(
    scaler: *mut cinch_loss_scaler_t,
    size: usize,
    version: u32,
) -> cinch_result_t {
    guard!("cinch_loss_scaler_init", {
        // SAFETY: cinch.h requires of the program that `scaler` is NULL or writable for `size`
        // bytes.
        unsafe { versioned::initialise(scaler, size, version) }?;
        let config = LossScalerConfig::default();
        let fields = cinch_loss_scaler_t {
            size,
            magic: 0,
            version,
            scale: config.start,
            growth: config.growth,
            backoff: config.backoff,
            smallest: config.smallest,
            largest: config.largest,
            rescale: 1.0,
            skipped: 0,
            interval: config.interval,
            clean: 0,
        };
        // SAFETY: `initialise` made `*scaler` a struct of `size` bytes, which the program keeps
        // writable.
        unsafe { versioned::fill(scaler, &fields) };
        Ok(())
    })
}

/// Updates `*scaler` after a step; `non_finite` is nonzero if a summed gradient was not finite.
///
/// Stores 1 in `*apply` if the step is to be applied and 0 if it is to be skipped. Stores the scale of
/// the next step in `scaler->scale`.
///
/// Codecs carry non-finite values to every rank, so all ranks find the same in their output. Pass the
/// result of `cinch_count_non_finite` for the output; the report describes this rank's input only. On GPUs
/// `cinch_loss_scaler_step` takes the verdicts of the calls.
///
/// Finite sums saturate instead of overflowing with cast16, cast_bf16, static8, mantissa8, trunc8,
/// threshold2 and `tensor=K`. With these codecs the ranks must also sum `saturated` of their reports,
/// and skip the step unless it is 0. Calls on GPUs count elements of the input that saturate, and no
/// sums: use other codecs there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_loss_scaler_update(
    scaler: *mut cinch_loss_scaler_t,
    non_finite: c_int,
    apply: *mut c_int,
) -> cinch_result_t {
    guard!("cinch_loss_scaler_update", {
        check_out("apply", apply)?;
        // SAFETY: cinch.h requires of the program that both are NULL, or a valid struct and writable.
        unsafe { update(scaler, apply, |running| Ok(running.update(non_finite != 0))) }
    })
}

/// Updates the program's scaler by `decide`, and stores whether to apply the step.
///
/// # Safety
/// `scaler` is NULL or a valid struct, and `apply` NULL or writable.
unsafe fn update(
    scaler: *mut cinch_loss_scaler_t,
    apply: *mut c_int,
    decide: impl FnOnce(&mut LossScaler) -> Result<Verdict>,
) -> Result<()> {
    // SAFETY: the caller passes `scaler` as NULL or a readable struct.
    let mut fields = unsafe { versioned::read(scaler) }?;
    let mut running = scaler_of(&fields)?;
    let verdict = decide(&mut running)?;
    let state = running.state();
    fields.scale = state.scale;
    fields.clean = state.clean;
    fields.skipped = state.skipped;
    fields.rescale = verdict.rescale;
    // SAFETY: `read` checked the struct, which the caller passes as writable.
    unsafe { versioned::fill(scaler, &fields) };
    // SAFETY: the caller passes `apply` as NULL or writable; `store` refuses NULL.
    unsafe { store("apply", apply, verdict.apply.into()) }
}

/// Updates `*scaler` after a step as `cinch_loss_scaler_update` does, by the verdicts of the step's calls: it is
/// to be skipped if any of `count` statistics has `CINCH_VERDICT_NON_FINITE`. They are in host memory; see
/// `cinch_statistics_read`. All ranks decide alike if the calls are all_reduces.
///
/// Codecs by which finite sums saturate (see `cinch_loss_scaler_update`) hide sums that overflow: use others with this
/// function.
///
/// `CINCH_ERROR_INVALID_ARGUMENT` if `count` is 0, or if no call has written one of the statistics.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_loss_scaler_step(
    scaler: *mut cinch_loss_scaler_t,
    statistics: *const cinch_statistics_t,
    count: usize,
    apply: *mut c_int,
) -> cinch_result_t {
    guard!("cinch_loss_scaler_step", {
        check_out("apply", apply)?;
        // SAFETY: cinch.h requires of the program that `statistics` is NULL or has `count` elements.
        let statistics = unsafe { statistics::read(statistics, count) }?;
        // SAFETY: cinch.h requires of the program that both are NULL, or a valid struct and writable.
        unsafe { update(scaler, apply, |running| running.step(&statistics)) }
    })
}

/// Stores the number of NaN and infinite values among `count` elements of `dtype` in host memory in
/// `*found`. On GPUs the call that writes the elements takes the verdict (`cinch_call_t.statistics`, with
/// `verdict_only` where nothing else is of interest).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_count_non_finite(
    data: *const c_void,
    count: usize,
    dtype: dtype_number,
    found: *mut u64,
) -> cinch_result_t {
    guard!("cinch_count_non_finite", {
        let dtype = ARGUMENT_NAMES.dtype(dtype.into())?;
        check_out("found", found)?;
        let bytes = count.checked_mul(dtype.size());
        let bytes = bytes.filter(|&bytes| isize::try_from(bytes).is_ok());
        let number = match bytes {
            Some(0) => 0,
            Some(bytes) if !data.is_null() => {
                // SAFETY: cinch.h requires of the program that `data` is readable for `count`
                // elements, which have `bytes` bytes.
                let data = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), bytes) };
                count_in(data, dtype)
            }
            _ => {
                return Err(Error::invalid_argument(format!(
                    "{count} {dtype} at data {data:?} are no array"
                )));
            }
        };
        // SAFETY: cinch.h requires of the program that `found` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("found", found, number) }
    })
}

/// Returns the number of NaN and infinite values among the elements of `dtype` in `data`.
fn count_in(data: &[u8], dtype: DType) -> u64 {
    /// Number of elements that are widened to fp32 at a time.
    const PIECE: usize = 4096;
    if !dtype.is_float() {
        return 0;
    }
    if dtype == DType::F64 {
        let numbers = data.chunks_exact(8).map(|bytes| {
            let mut word = [0; 8];
            word.copy_from_slice(bytes);
            f64::from_ne_bytes(word)
        });
        return numbers.filter(|number| !number.is_finite()).count() as u64;
    }
    let mut wide = [0f32; PIECE];
    let mut found = 0;
    for piece in data.chunks(PIECE * dtype.size()) {
        let wide = &mut wide[..piece.len() / dtype.size()];
        reduce::widen(dtype, Isa::detect(), piece, wide);
        found += count_non_finite(wide);
    }
    found
}

/// Returns `value`, or `default` if the program left it unset.
fn or<T: PartialEq + Default>(value: T, default: T) -> T {
    if value == T::default() {
        default
    } else {
        value
    }
}

fn awp_of(fields: &cinch_awp_t) -> Result<Awp> {
    let default = AwpConfig::new(fields.threshold, fields.interval);
    let config = AwpConfig {
        step_bits: or(fields.step_bits, default.step_bits),
        most_bits: or(fields.most_bits, default.most_bits),
        ..default
    };
    let state = AwpState {
        bits: or(fields.bits, default.start_bits),
        previous: (fields.has_previous != 0).then_some(fields.previous),
        count: fields.count,
    };
    Awp::restore(config, state)
}

fn scaler_of(fields: &cinch_loss_scaler_t) -> Result<LossScaler> {
    let default = LossScalerConfig::default();
    let config = LossScalerConfig {
        start: or(fields.scale, default.start),
        growth: or(fields.growth, default.growth),
        backoff: or(fields.backoff, default.backoff),
        interval: or(fields.interval, default.interval),
        smallest: or(fields.smallest, default.smallest),
        largest: or(fields.largest, default.largest),
    };
    let state = LossScalerState {
        scale: config.start,
        clean: fields.clean,
        skipped: fields.skipped,
    };
    LossScaler::restore(config, state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_finite_values_are_counted_in_every_type() {
        let f32s: Vec<u8> = [1.0, f32::NAN, f32::INFINITY]
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        assert_eq!(count_in(&f32s, DType::F32), 2);
        let f64s: Vec<u8> = [f64::MAX, f64::NAN]
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        assert_eq!(count_in(&f64s, DType::F64), 1);
        let halves: Vec<u8> = [0x7c00u16, 0x7bff, 0xfe00]
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        assert_eq!(count_in(&halves, DType::F16), 2);
        assert_eq!(count_in(&[0xff; 8], DType::I32), 0);
        let mut long = vec![0u8; 4 * 10_001];
        long[40_003] = 0x7f;
        long[40_002] = 0x80;
        assert_eq!(count_in(&long, DType::F32), 1);
    }
}
