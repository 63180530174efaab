//! Functions that open and close groups of calls.

use super::core::open_group;
use super::error::cinch_result_t;
use super::report::ReportTarget;
use crate::comm::{Call, Communicator};
use crate::error::{Error, Result};
use crate::mem::Buffers;
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    /// Targets of the reports of the calls in this thread's open group, in the order of the calls.
    static REPORTS: RefCell<Vec<ReportTarget>> = const { RefCell::new(Vec::new()) };
}

/// Opens a group on this thread. Groups nest: the outermost `cinch_group_end` runs the calls.
///
/// Collectives inside a group return once they are recorded. Their buffers and reports must stay
/// valid and untouched until the outermost `cinch_group_end` of this thread returns.
///
/// Consecutive small all_reduces on a communicator of host memory are fused into one message if they
/// have the same type, operator, codec and algorithm (`CINCH_FUSE_BYTES` is the size limit). No such
/// call may use memory that another one writes. Calls are not fused if they keep scales or
/// residuals for a tensor, or use a created operator. On a GPU up to 16 small collectives that one kernel can
/// run share a launch.
///
/// So all ranks must group such calls alike, or set `CINCH_FUSE_BYTES=0`. A group of one call equals
/// that call without a group, with one exception: `CINCH_CODEC_SAMPLE` does not sample calls on host
/// memory in groups. With that setting all ranks must make a compressed sum in a group, or none.
#[unsafe(no_mangle)]
pub extern "C" fn cinch_group_start() -> cinch_result_t {
    guard!("cinch_group_start", {
        open_group::start()?;
        Ok(())
    })
}

/// Closes this thread's innermost group; closing the outermost group runs its calls.
///
/// Calls on GPUs are queued first, for all communicators without waiting in between, in the order in
/// which the group first named the communicators. That order must be the same on all ranks whose
/// communicators share a stream. All calls of one communicator run on the stream of its first call:
/// after the work on the streams of all its calls, and before later work on these streams. Then calls
/// on host memory run to their end. Calls of one communicator start in the order in which they were
/// made.
///
/// If a cinch function failed on this thread since the outermost `cinch_group_start`, nothing runs on
/// this rank and the first such error is returned. Reports are written on success.
#[unsafe(no_mangle)]
pub extern "C" fn cinch_group_end() -> cinch_result_t {
    guard!("cinch_group_end", {
        let Some(mut group) = open_group::end("cinch_group_start")? else {
            return Ok(());
        };
        let targets = REPORTS.try_with(RefCell::take).unwrap_or_default();
        group.check()?;
        let reports = group.run()?;
        if reports.len() != targets.len() {
            return Err(Error::internal(format!(
                "a group of {} calls returned {} reports",
                targets.len(),
                reports.len()
            )));
        }
        for (target, report) in targets.iter().zip(&reports) {
            target.fill(report);
        }
        Ok(())
    })
}

/// Runs a call, or records it in this thread's open group.
pub(super) fn submit(
    comm: &Arc<Communicator>,
    call: &Call,
    buffers: Buffers<'static>,
    target: ReportTarget,
) -> Result<()> {
    match open_group::submit(comm, call, buffers)? {
        Some(report) => target.fill(&report),
        None => {
            let _ = REPORTS.try_with(|targets| targets.borrow_mut().push(target));
        }
    }
    Ok(())
}

/// Returns an error if this thread has an open group, for functions that a group cannot record.
/// `what` is a clause of the error sentence.
///
/// # Errors
/// Invalid usage if this thread has an open group.
pub(super) fn refuse(what: &str) -> Result<()> {
    if open_group::is_open() {
        return Err(Error::invalid_usage(format!(
            "{what} inside a group; call cinch_group_end first"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capi::op::cinch_op_destroy;

    #[test]
    fn any_failing_function_fails_the_open_group() {
        assert_eq!(cinch_group_start(), cinch_result_t::CINCH_SUCCESS);
        // SAFETY: the lookup refuses NULL handles before the function uses another argument.
        let failed = unsafe { cinch_op_destroy(std::ptr::null_mut(), 16) };
        assert_eq!(failed, cinch_result_t::CINCH_ERROR_INVALID_ARGUMENT);
        assert_eq!(cinch_group_end(), failed);
        assert_eq!(cinch_group_start(), cinch_result_t::CINCH_SUCCESS);
        assert_eq!(cinch_group_end(), cinch_result_t::CINCH_SUCCESS);
    }
}
