//! Jobs that end communicators: the part of finalize and destroy that waits for this rank's calls.

use crate::boundary::CallProgress;
use crate::comm::{Comm, CommStage};
use crate::deferred_free::{self, TeardownGuard};
use cinch::capi::core::guard::caught;
use cinch::sys::log::{self, Level};
use cinch::{Communicator, Error, Result};
use std::sync::Arc;

/// Job that closes one communicator.
pub(crate) struct TeardownJob {
    /// The program's communicator, which the job ends.
    pub(crate) comm: Arc<Comm>,
    /// The connected communicator behind `comm`, which the job closes.
    pub(crate) communicator: Arc<Communicator>,
    /// Guard of a communicator whose handle was destroyed; `None` for a finalize.
    pub(crate) guard: Option<TeardownGuard>,
}

impl TeardownJob {
    /// Closes the communicator. Waits for this rank's calls, and for other ranks only where these calls do.
    ///
    /// # Errors
    /// Error of the close, for a finalize. A destroy logs it instead.
    pub(crate) fn run(self) -> Result<CallProgress> {
        let TeardownJob {
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
                // An abort may have removed the connection meanwhile.
                Err(_) => deferred_free::free_on_destroy(communicator),
            }
            return closed.map(|()| CallProgress::Done);
        }
        comm.begin(false);
        let ending = comm.clone();
        let close = move || {
            let closed = caught("ncclCommFinalize", || communicator.close());
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

    /// Undoes a job whose group does not run. A destroyed handle stays destroyed: its communicator is freed
    /// without closing in order.
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

/// Runs the jobs of a group one after the other. A job waits for other ranks only where this rank's calls do,
/// and all of those were made.
pub(crate) fn run(jobs: Vec<TeardownJob>) -> Result<CallProgress> {
    let mut progress = Ok(CallProgress::Done);
    for job in jobs {
        progress = match (progress, job.run()) {
            (Ok(CallProgress::Done), ran) => ran,
            (Ok(CallProgress::Underway), Err(error)) => Err(error),
            (progress, _) => progress,
        };
    }
    progress
}
