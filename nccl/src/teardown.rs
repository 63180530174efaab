//! TeardownGuard: finalize, destroy, abort, revoke.

use crate::boundary::CallProgress;
use crate::comm::{self, Comm, CommStage};
use crate::deferred_free::{self, TeardownGuard};
use crate::group;
use crate::types::*;
use cinch::sys::log::{self, Level};
use cinch::{Communicator, Error, ErrorKind, Result};
use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a revoke waits for kernels: those that were told to stop, and what is on their streams
/// before them.
const REVOKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two looks at calls that were told to end.
const REVOKE_POLL_INTERVAL: Duration = Duration::from_millis(1);

export! {
    /// Waits until what this rank called on the communicator has ended, and for no rank but where
    /// that does. It takes no more calls then, and is there to be destroyed. That another rank has
    /// ended is no error. NULL is nothing to finalize.
    counted fn ncclCommFinalize | pncclCommFinalize(comm: ncclComm_t) {
        if comm.is_null() {
            return Ok(CallProgress::Done);
        }
        let comm = comm::lookup(comm)?;
        let communicator = comm.ready()?;
        group::check_teardown(&comm)?;
        comm.enter(CommStage::Finalized);
        let teardown = Teardown { comm, communicator, guard: None };
        teardown.submit()
    }
}

export! {
    /// Ends the handle, after it has waited as `ncclCommFinalize` does if that was not called. What
    /// it holds is freed when the other ranks have called either, too. NULL is nothing to end.
    counted fn ncclCommDestroy | pncclCommDestroy(comm: ncclComm_t) {
        if comm.is_null() {
            return Ok(CallProgress::Done);
        }
        let held = comm::lookup(comm)?;
        if held.is_underway() {
            // The one error that keeps the handle: ncclCommAbort is for this.
            held.connection()?;
        }
        group::check_teardown(&held)?;
        // Ahead of the handle's end: whoever looks for calls that go on finds it one way or the other.
        let guard = held.communicator().map(TeardownGuard::new);
        comm::remove(comm)?;
        match held.take() {
            Some(communicator) if held.stage() == CommStage::Open => {
                let teardown = Teardown { comm: held, communicator, guard };
                teardown.submit()
            }
            Some(communicator) => {
                drop(guard);
                deferred_free::free_on_destroy(communicator);
                Ok(CallProgress::Done)
            }
            None => Ok(CallProgress::Done),
        }
    }
}

/// What is left of a finalize or destroy when it was checked: to wait for this rank's own calls.
pub(crate) struct Teardown {
    comm: Arc<Comm>,
    communicator: Arc<Communicator>,
    /// If the handle has ended.
    guard: Option<TeardownGuard>,
}

impl Teardown {
    /// Runs it, or records it if a group is open.
    fn submit(self) -> Result<CallProgress> {
        match group::record_teardown(self) {
            None => Ok(CallProgress::Done),
            Some(teardown) => teardown.run(),
        }
    }

    fn run(self) -> Result<CallProgress> {
        let Teardown {
            comm,
            communicator,
            guard,
        } = self;
        let devices = [comm.device()];
        if let Some(guard) = guard {
            let is_known = communicator.async_error().is_some();
            let closed = communicator.close();
            drop(guard);
            deferred_free::reap_devices(&devices);
            match closed {
                Ok(()) => deferred_free::free_when_closed(communicator),
                Err(error) => {
                    if !is_known {
                        log::line(Level::Warn, format_args!("ncclCommDestroy: {error}"));
                    }
                    deferred_free::free_on_destroy(communicator);
                }
            }
            return Ok(CallProgress::Done);
        }
        if comm.options.blocking {
            let closed = communicator.close();
            match &closed {
                Ok(()) => {
                    comm.set_closed();
                    deferred_free::reap_devices(&devices);
                    deferred_free::free_when_closed(communicator);
                }
                // An abort may have ended the handle meanwhile.
                Err(_) => deferred_free::free_on_destroy(communicator),
            }
            return closed.map(|()| CallProgress::Done);
        }
        comm.begin(false);
        let ending = comm.clone();
        let close = move || {
            let closed = cinch::capi::caught("ncclCommFinalize", || communicator.close());
            let is_closed = closed.is_ok();
            ending.finalize_ended(closed);
            if is_closed {
                return Some(communicator);
            }
            deferred_free::free_in_background(communicator);
            None
        };
        deferred_free::close_in_background(close).map_err(|cause| {
            comm.end(false);
            Error::system("cannot start a thread that ends a communicator", cause)
        })?;
        Ok(CallProgress::Underway)
    }

    /// Undoes it, for a group that does not run. A handle that has ended is not there again: its
    /// rank teardowns without waiting.
    pub(crate) fn withdraw(self) {
        match self.guard {
            None => self.comm.enter(CommStage::Open),
            Some(guard) => {
                drop(guard);
                deferred_free::free_on_destroy(self.communicator);
            }
        }
    }
}

/// Runs those of a group, one after the other: none waits for other ranks but where the calls of this
/// one do, which were all made.
pub(crate) fn run(teardowns: Vec<Teardown>) -> Result<CallProgress> {
    let mut progress = Ok(CallProgress::Done);
    for teardown in teardowns {
        progress = match (progress, teardown.run()) {
            (Ok(CallProgress::Done), ran) => ran,
            (Ok(CallProgress::Underway), Err(error)) => Err(error),
            (progress, _) => progress,
        };
    }
    progress
}

export! {
    /// Ends the handle and waits for nobody. Calls that wait end, and so do kernels; then the
    /// communicator has failed, and the others are told. Where nothing is cut short, this rank teardowns
    /// in good order: others may still read what it sent. NULL is nothing to abort.
    fn ncclCommAbort | pncclCommAbort(comm: ncclComm_t) {
        if comm.is_null() {
            return Ok(CallProgress::Done);
        }
        let comm = comm::remove(comm)?;
        if comm.has_closed() {
            // The others know, and nothing of this rank is there to be cut short.
            if let Some(communicator) = comm.take() {
                deferred_free::free_on_abort(communicator);
            }
            return Ok(CallProgress::Done);
        }
        if let Some(communicator) = comm.take() {
            if communicator.gpu().is_some() {
                // A kernel that waits for this rank would know nothing of its goodbye, and has hours: GPUs
                // hear of every abort. Kernels of other communicators may wait for ranks that are gone,
                // until they are aborted, too: nothing waits for those here.
                communicator.abort();
                deferred_free::free_on_abort(communicator);
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
        Ok(CallProgress::Done)
    }
}

export! {
    /// Ends what runs on the communicator, waits for that on this rank, and teardowns a communicator
    /// that can only be split, shrunk, destroyed or aborted. NULL is nothing to revoke.
    fn ncclCommRevoke | pncclCommRevoke(comm: ncclComm_t, revokeFlags: c_int) {
        if comm.is_null() {
            return Ok(CallProgress::Done);
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
        if comm.stage() == CommStage::Finalized {
            return Err(Error::invalid_usage("the communicator was finalized"));
        }
        comm.enter(CommStage::Revoked);
        communicator.abort();
        let until = Instant::now() + REVOKE_TIMEOUT;
        while comm.is_underway() {
            if Instant::now() > until {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("calls on the communicator have not ended in {} s", REVOKE_TIMEOUT.as_secs()),
                ));
            }
            std::thread::sleep(REVOKE_POLL_INTERVAL);
        }
        communicator.wait_stopped(REVOKE_TIMEOUT)?;
        Ok(CallProgress::Done)
    }
}
