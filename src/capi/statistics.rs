//! Statistics of a call, and how a program reads them.

use super::core::arguments::check_out;
use super::error::cinch_result_t;
use super::handle::{self, cinch_comm_t};
use super::report::{ReportTarget, cinch_report_t};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::DeviceBuffers;
use crate::types::CallStatistics;
use std::ffi::c_void;

/// Bit of `cinch_statistics_t.verdict`: at least one element of this rank's output is NaN or infinite.
pub const CINCH_VERDICT_NON_FINITE: u32 = 1;

/// Statistics of one call: of this rank's contribution, and of this rank's output. The contribution is the
/// input, or for a created operator its products.
///
/// A call writes the whole struct (`cinch_call_t.statistics`). Zeros mean that no call has; other contents of memory
/// that no call has written are not detected. The size of the struct never changes: new fields take the place of
/// reserved ones.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_statistics_t {
    /// Number of finite elements of the contribution beyond the codec's largest number, which saturate. In an
    /// average the codec encodes the contribution times a power of two.
    pub saturated: u64,
    /// Number of NaN and infinite elements of the contribution.
    pub non_finite: u64,
    /// Sum of squares of the finite elements of the contribution, the square of their L2 norm. About six
    /// digits are right; infinite, or 0 beside a larger `abs_max`, where squares of f64 leave the range of f64.
    pub sum_squares: f64,
    /// Largest magnitude of the finite elements of the contribution.
    pub abs_max: f64,
    /// Verdict of the output: `CINCH_VERDICT_NON_FINITE`, or 0. An all_reduce gives all ranks the same
    /// verdict, since it gives them the same output.
    pub verdict: u32,
    /// Bits of `verdict` that were taken.
    pub known: u32,
    /// 1 if the four fields of the contribution were taken; 0 if they are 0 because the call took the verdict alone.
    pub has_input: u32,
    /// Reserved; a call sets them to 0.
    pub reserved: [u32; 5],
}

const _: () = assert!(size_of::<cinch_statistics_t>() == size_of::<CallStatistics>());
const _: () = assert!(CINCH_VERDICT_NON_FINITE == CallStatistics::NON_FINITE);

impl From<&cinch_statistics_t> for CallStatistics {
    fn from(from: &cinch_statistics_t) -> CallStatistics {
        CallStatistics {
            saturated: from.saturated,
            non_finite: from.non_finite,
            sum_squares: from.sum_squares,
            abs_max: from.abs_max,
            verdict: from.verdict,
            known: from.known,
            has_input: from.has_input,
            unused: from.reserved,
        }
    }
}

impl From<&CallStatistics> for cinch_statistics_t {
    fn from(from: &CallStatistics) -> cinch_statistics_t {
        cinch_statistics_t {
            saturated: from.saturated,
            non_finite: from.non_finite,
            sum_squares: from.sum_squares,
            abs_max: from.abs_max,
            verdict: from.verdict,
            known: from.known,
            has_input: from.has_input,
            reserved: from.unused,
        }
    }
}

/// Copies `count` statistics, which calls of `comm` have written in one array at `statistics`, to `copies` in host
/// memory. First waits until the work that is queued on `stream` has ended.
///
/// `CINCH_ERROR_UNSUPPORTED` on a communicator of host memory; `CINCH_ERROR_INVALID_USAGE` while `stream` is captured.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_statistics_read(
    comm: *mut cinch_comm_t,
    statistics: *const cinch_statistics_t,
    count: usize,
    stream: *mut c_void,
    copies: *mut cinch_statistics_t,
) -> cinch_result_t {
    guard!("cinch_statistics_read", {
        let entry = handle::lookup(comm)?;
        check_out("copies", copies)?;
        if statistics.is_null() {
            return Err(Error::invalid_argument("statistics are NULL"));
        }
        let comm = &entry.comm;
        if comm.gpu().is_none() {
            return Err(refused_on_host());
        }
        let bytes = count.checked_mul(size_of::<cinch_statistics_t>());
        let bytes = bytes.ok_or_else(|| Error::invalid_argument(format!("count {count}")))?;
        let array = (statistics.addr() as u64, bytes);
        // SAFETY: cinch.h requires of the program that the array and the stream are valid.
        let array = unsafe { DeviceBuffers::new(array, (0, 0), stream.addr()) };
        let read = comm.read_statistics(array)?;
        for (at, one) in read.iter().enumerate() {
            // SAFETY: cinch.h requires of the program that `copies` has `count` elements.
            unsafe { copies.add(at).write_unaligned(one.into()) };
        }
        Ok(())
    })
}

/// Sets the fields `saturated`, `non_finite`, `abs_max` and `l2_norm` of a report, and the bit
/// `CINCH_REPORT_INPUT` of its field `valid`, to statistics in host memory. A call on a GPU cannot report
/// them itself, because it returns before it runs.
///
/// `CINCH_ERROR_INVALID_ARGUMENT` if no call has written the statistics, or if the call took the verdict alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_report_add_statistics(
    report: *mut cinch_report_t,
    statistics: *const cinch_statistics_t,
) -> cinch_result_t {
    guard!("cinch_report_add_statistics", {
        check_out("report", report)?;
        // SAFETY: cinch.h requires of the program that both are NULL or valid structs.
        unsafe {
            let statistics = read(statistics, 1)?;
            if statistics[0].known == 0 {
                return Err(Error::invalid_argument(
                    "no call has written the statistics",
                ));
            }
            if statistics[0].has_input == 0 {
                return Err(Error::invalid_argument(
                    "the call took the verdict of its output alone: set call.verdict_only to 0",
                ));
            }
            ReportTarget::new(report)?.add(&statistics[0]);
        }
        Ok(())
    })
}

/// Returns `count` statistics of the program in host memory.
///
/// # Errors
/// Invalid argument for NULL, unless `count` is 0.
///
/// # Safety
/// The array is NULL, or readable for `count` elements.
pub(super) unsafe fn read(
    statistics: *const cinch_statistics_t,
    count: usize,
) -> Result<Vec<CallStatistics>> {
    if statistics.is_null() && count > 0 {
        return Err(Error::invalid_argument("statistics are NULL"));
    }
    let one = |at: usize| {
        // SAFETY: the caller passes an array that is readable for `count` elements.
        let one = unsafe { statistics.add(at).read_unaligned() };
        CallStatistics::from(&one)
    };
    Ok((0..count).map(one).collect())
}

/// Returns the error of a call on host memory that is to write statistics.
pub(super) fn refused_on_host() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "this communicator is on host memory; calls on GPUs alone write statistics. Set call.statistics to \
         NULL: cinch_report_t has those of a call with a codec, and cinch_count_non_finite those of its output",
    )
}
