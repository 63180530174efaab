//! Calls that run together.
//!
//! A group belongs to a thread. Between start and end, calls are checked and recorded with their
//! pointers; the outermost end runs them. An error in between poisons the group: the end returns
//! that error, and nothing runs.

use super::error::cinch_result_t;
use super::handle::Handle;
use super::report::ReportTarget;
use crate::comm::{Call, Communicator, Group};
use crate::error::{Error, Result};
use crate::mem::Buffers;
use std::cell::RefCell;
use std::sync::Arc;

/// Opens a group on this thread; groups nest.
///
/// Small all_reduces that follow one another on a communicator of host memory, of one type,
/// operator, codec and algorithm, travel as one (`CINCH_FUSE_BYTES`): none may use what another
/// one writes. What keeps scales or residuals for a tensor goes alone; so do calls on GPUs, and
/// pre-multiplied sums, whose factors are each rank's own.
///
/// So all ranks must group such calls alike, or be set to `CINCH_FUSE_BYTES=0`. A group of one call is
/// as that call without a group, but for `CINCH_CODEC_SAMPLE`: calls on host memory that are in groups
/// are not sampled, so that with it all ranks must make a coded sum in a group, or none.
///
/// The collectives that follow return once they are recorded. Their buffers and reports must live,
/// and must not be touched, until the outermost `cinch_group_end` of this thread returns.
#[unsafe(no_mangle)]
pub extern "C" fn cinch_group_start() -> cinch_result_t {
    guard!("cinch_group_start", {
        OPEN.with_borrow_mut(|open| {
            let group = open.get_or_insert_default();
            group.depth = group
                .depth
                .checked_add(1)
                .ok_or_else(|| Error::invalid_usage("groups nest 4294967295 deep"))?;
            Ok(())
        })
    })
}

/// Closes this thread's innermost group; the outermost close runs what was recorded.
///
/// Calls on GPUs are queued, those of all communicators without waiting for one another, in the order
/// in which the communicators were first named: let it be the same on all ranks where they share a
/// stream. Those of one communicator run on the stream of the first of them, behind what is on the
/// streams of all, which go on behind them. Then calls on host memory run. Calls of one communicator
/// start in order.
/// If any cinch function failed on this thread since the outermost start, that error is returned
/// again and nothing runs on this rank. Reports are filled on success.
#[unsafe(no_mangle)]
pub extern "C" fn cinch_group_end() -> cinch_result_t {
    guard!("cinch_group_end", {
        // The group leaves the thread's storage before it runs: a panic in it closes it.
        match OPEN.with_borrow_mut(close)? {
            Some(group) => group.run(),
            None => Ok(()),
        }
    })
}

thread_local! {
    static OPEN: RefCell<Option<OpenGroup>> = const { RefCell::new(None) };
}

#[derive(Default)]
struct OpenGroup {
    depth: u32,
    failure: Option<Error>,
    /// Borrows the communicators of `keep`; declared, and so dropped, before it.
    group: Group<'static>,
    reports: Vec<ReportTarget>,
    keep: Vec<Arc<Handle>>,
}

impl OpenGroup {
    fn add(
        &mut self,
        handle: &Arc<Handle>,
        call: &Call,
        buffers: Buffers<'static>,
        report: ReportTarget,
    ) -> Result<()> {
        // SAFETY: `keep` holds the handle, which does not move, for longer than `group` lives.
        let comm: &'static Communicator = unsafe { &(*Arc::as_ptr(handle)).comm };
        self.keep.push(Arc::clone(handle));
        match buffers {
            Buffers::Host(buffers) => self.group.add(comm, call, buffers)?,
            Buffers::Gpu(buffers) => self.group.add_on(comm, call, buffers)?,
        }
        self.reports.push(report);
        Ok(())
    }

    fn run(self) -> Result<()> {
        // The last to be dropped: the group borrows from it.
        let _keep = self.keep;
        let OpenGroup {
            failure,
            group,
            reports,
            ..
        } = self;
        if let Some(error) = failure {
            return Err(error.context("a call inside the group failed, so nothing ran"));
        }
        if reports.is_empty() {
            return Ok(());
        }
        let ran = group.run()?;
        if ran.len() != reports.len() {
            return Err(Error::internal(format!(
                "a group of {} calls returned {} reports",
                reports.len(),
                ran.len()
            )));
        }
        for (target, report) in reports.iter().zip(&ran) {
            target.fill(report);
        }
        Ok(())
    }
}

fn close(open: &mut Option<OpenGroup>) -> Result<Option<OpenGroup>> {
    let Some(group) = open else {
        return Err(Error::invalid_usage(
            "no group is open on this thread; cinch_group_start opens one",
        ));
    };
    group.depth -= 1;
    Ok(if group.depth == 0 { open.take() } else { None })
}

/// Runs a call, or records it if a group is open.
pub(super) fn submit(
    handle: &Arc<Handle>,
    call: &Call,
    buffers: Buffers<'static>,
    report: ReportTarget,
) -> Result<()> {
    if OPEN.with_borrow(Option::is_some) {
        return OPEN.with_borrow_mut(|open| {
            let group = open.get_or_insert_default();
            group.add(handle, call, buffers, report)
        });
    }
    let ran = match buffers {
        Buffers::Host(buffers) => handle.comm.call(call, buffers)?,
        Buffers::Gpu(buffers) => handle.comm.call_on(call, buffers)?,
    };
    report.fill(&ran);
    Ok(())
}

/// Fails what cannot be part of a group. `what` is a clause.
pub(super) fn refuse(what: &str) -> Result<()> {
    if OPEN.with_borrow(Option::is_none) {
        return Ok(());
    }
    Err(Error::invalid_usage(format!(
        "{what} inside a group; call cinch_group_end first"
    )))
}

/// Fails the thread's open group, if there is one: the first error is the one that counts.
pub(super) fn poison(error: &Error) {
    let _ = OPEN.try_with(|open| {
        if let Ok(mut open) = open.try_borrow_mut()
            && let Some(group) = open.as_mut()
        {
            group.failure.get_or_insert_with(|| error.clone());
        }
    });
}
