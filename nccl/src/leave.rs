//! Leaving: finalize, destroy, abort, revoke.

use crate::boundary::Progress;
use crate::comm::{self, Comm, Stage};
use crate::group;
use crate::remains::{self, Leaving};
use crate::types::*;
use cinch::sys::log::{self, Level};
use cinch::{Communicator, Error, ErrorKind, Result};
use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a revoke waits for kernels: those that were told to stop, and what is on their streams
/// before them.
const STOPPING: Duration = Duration::from_secs(10);
/// Time between two looks at calls that were told to end.
const LOOK: Duration = Duration::from_millis(1);

export! {
    /// Waits until what this rank called on the communicator has ended, and for no rank but where
    /// that does. It takes no more calls then, and is there to be destroyed. That another rank has
    /// ended is no error. NULL is nothing to finalize.
    counted fn ncclCommFinalize | pncclCommFinalize(comm: ncclComm_t) {
        if comm.is_null() {
            return Ok(Progress::Done);
        }
        let comm = comm::lookup(comm)?;
        let communicator = comm.ready()?;
        group::check_leave(&comm)?;
        comm.enter(Stage::Finalized);
        let leave = Leave { comm, communicator, leaving: None };
        leave.submit()
    }
}

export! {
    /// Ends the handle, after it has waited as `ncclCommFinalize` does if that was not called. What
    /// it holds is freed when the other ranks have called either, too. NULL is nothing to end.
    counted fn ncclCommDestroy | pncclCommDestroy(comm: ncclComm_t) {
        if comm.is_null() {
            return Ok(Progress::Done);
        }
        let held = comm::lookup(comm)?;
        if held.is_underway() {
            // The one error that keeps the handle: ncclCommAbort is for this.
            held.connection()?;
        }
        group::check_leave(&held)?;
        // Ahead of the handle's end: whoever looks for calls that go on finds it one way or the other.
        let leaving = held.communicator().map(Leaving::new);
        comm::remove(comm)?;
        match held.take() {
            Some(communicator) if held.stage() == Stage::Open => {
                let leave = Leave { comm: held, communicator, leaving };
                leave.submit()
            }
            Some(communicator) => {
                drop(leaving);
                remains::part_with(communicator);
                Ok(Progress::Done)
            }
            None => Ok(Progress::Done),
        }
    }
}

/// What is left of a finalize or destroy when it was checked: to wait for this rank's own calls.
pub(crate) struct Leave {
    comm: Arc<Comm>,
    communicator: Arc<Communicator>,
    /// If the handle has ended.
    leaving: Option<Leaving>,
}

impl Leave {
    /// Runs it, or records it if a group is open.
    fn submit(self) -> Result<Progress> {
        match group::record_leave(self) {
            None => Ok(Progress::Done),
            Some(leave) => leave.run(),
        }
    }

    fn run(self) -> Result<Progress> {
        let Leave {
            comm,
            communicator,
            leaving,
        } = self;
        let devices = [comm.device()];
        if let Some(leaving) = leaving {
            let is_known = communicator.async_error().is_some();
            let retired = communicator.retire();
            drop(leaving);
            remains::clear_away(&devices);
            match retired {
                Ok(()) => remains::outlast(communicator),
                Err(error) => {
                    if !is_known {
                        log::line(Level::Warn, format_args!("ncclCommDestroy: {error}"));
                    }
                    remains::part_with(communicator);
                }
            }
            return Ok(Progress::Done);
        }
        if comm.asked.blocking {
            let retired = communicator.retire();
            match &retired {
                Ok(()) => {
                    comm.leave();
                    remains::clear_away(&devices);
                    remains::outlast(communicator);
                }
                // An abort may have ended the handle meanwhile.
                Err(_) => remains::part_with(communicator),
            }
            return retired.map(|()| Progress::Done);
        }
        comm.begin(false);
        let ending = comm.clone();
        let retires = move || {
            let retired = cinch::ffi::caught("ncclCommFinalize", || communicator.retire());
            let is_retired = retired.is_ok();
            ending.left(retired);
            if is_retired {
                return Some(communicator);
            }
            remains::leave_behind(communicator);
            None
        };
        remains::keep(retires).map_err(|cause| {
            comm.end(false);
            Error::system("cannot start a thread that ends a communicator", cause)
        })?;
        Ok(Progress::Underway)
    }

    /// Undoes it, for a group that does not run. A handle that has ended is not there again: its
    /// rank leaves without waiting.
    pub(crate) fn withdraw(self) {
        match self.leaving {
            None => self.comm.enter(Stage::Open),
            Some(leaving) => {
                drop(leaving);
                remains::part_with(self.communicator);
            }
        }
    }
}

/// Runs those of a group, one after the other: none waits for other ranks but where the calls of this
/// one do, which were all made.
pub(crate) fn run(leaves: Vec<Leave>) -> Result<Progress> {
    let mut progress = Ok(Progress::Done);
    for leave in leaves {
        progress = match (progress, leave.run()) {
            (Ok(Progress::Done), ran) => ran,
            (Ok(Progress::Underway), Err(error)) => Err(error),
            (progress, _) => progress,
        };
    }
    progress
}

export! {
    /// Ends the handle and waits for nobody. Calls that wait end, and so do kernels; then the
    /// communicator has failed, and the others are told. Where nothing is cut short, this rank leaves
    /// in good order: others may still read what it sent. NULL is nothing to abort.
    fn ncclCommAbort | pncclCommAbort(comm: ncclComm_t) {
        if comm.is_null() {
            return Ok(Progress::Done);
        }
        let comm = comm::remove(comm)?;
        if comm.has_left() {
            // The others know, and nothing of this rank is there to be cut short.
            if let Some(communicator) = comm.take() {
                remains::cut_off(communicator);
            }
            return Ok(Progress::Done);
        }
        if let Some(communicator) = comm.take() {
            if communicator.gpu().is_some() {
                // A kernel that waits for this rank would know nothing of its goodbye, and has hours: GPUs
                // hear of every abort. Kernels of other communicators may wait for ranks that are gone,
                // until they are aborted, too: nothing waits for those here.
                communicator.abort();
                remains::cut_off(communicator);
            } else if let Err(in_call) = Arc::try_unwrap(communicator) {
                // Who else holds it is in a call.
                in_call.abort();
            }
        }
        // One that is connecting has no connection to tell the others by; the meeting tells them.
        comm.fault.raise(Error::new(
            ErrorKind::Aborted,
            "ncclCommAbort was called on this rank",
        ));
        Ok(Progress::Done)
    }
}

export! {
    /// Ends what runs on the communicator, waits for that on this rank, and leaves a communicator
    /// that can only be split, shrunk, destroyed or aborted. NULL is nothing to revoke.
    fn ncclCommRevoke | pncclCommRevoke(comm: ncclComm_t, revokeFlags: c_int) {
        if comm.is_null() {
            return Ok(Progress::Done);
        }
        let comm = comm::lookup(comm)?;
        if revokeFlags != NCCL_REVOKE_DEFAULT {
            return Err(Error::invalid_argument(format!(
                "revokeFlags is {revokeFlags}; it takes NCCL_REVOKE_DEFAULT ({NCCL_REVOKE_DEFAULT})"
            )));
        }
        // A split that waits for a rank is what this is to end, too.
        let communicator = match comm.communicator() {
            Some(communicator) if comm.is_underway() => communicator,
            _ => comm.connection()?,
        };
        if comm.stage() == Stage::Finalized {
            return Err(Error::invalid_usage("the communicator was finalized"));
        }
        comm.enter(Stage::Revoked);
        communicator.abort();
        let until = Instant::now() + STOPPING;
        while comm.is_underway() {
            if Instant::now() > until {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("calls on the communicator have not ended in {} s", STOPPING.as_secs()),
                ));
            }
            std::thread::sleep(LOOK);
        }
        communicator.wait_stopped(STOPPING)?;
        Ok(Progress::Done)
    }
}
