//! Functions that end communicators: finalize, destroy, abort, revoke.

use crate::boundary::CallProgress;
use crate::comm::{self, CommStage};
use crate::deferred_free::{self, TeardownGuard};
use crate::group;
use crate::teardown_job::TeardownJob;
use crate::types::*;
use cinch::{Error, ErrorKind};
use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time that a revoke waits for running calls, and for kernels, which were told to stop.
const REVOKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which a revoke checks running calls.
const REVOKE_POLL_INTERVAL: Duration = Duration::from_millis(1);

export! {
    /// Waits until this rank's calls on the communicator have ended. The communicator then takes no more
    /// calls and can only be destroyed. It waits for other ranks only where those calls do; a rank that
    /// has already ended is no error. NULL is ignored.
    counted fn ncclCommFinalize | pncclCommFinalize(comm: ncclComm_t) {
        if comm.is_null() {
            return Ok(CallProgress::Done);
        }
        let comm = comm::lookup(comm)?;
        let communicator = comm.ready()?;
        group::check_teardown(&comm)?;
        comm.enter(CommStage::Finalized);
        group::tear_down(TeardownJob { comm, communicator, guard: None })
    }
}

export! {
    /// Destroys the handle. Waits as `ncclCommFinalize` does if the program did not call that before.
    /// Resources are freed when the other ranks have also finalized or destroyed. NULL is ignored.
    counted fn ncclCommDestroy | pncclCommDestroy(comm: ncclComm_t) {
        if comm.is_null() {
            return Ok(CallProgress::Done);
        }
        let held = comm::lookup(comm)?;
        if held.is_underway() {
            // Only a running call fails the destroy and keeps the handle; ncclCommAbort ends such a
            // call.
            held.connection()?;
        }
        group::check_teardown(&held)?;
        // The guard is made before the handle is removed, so that `deferred_free::users` always finds the
        // communicator.
        let guard = held.communicator().map(TeardownGuard::new);
        comm::remove(comm)?;
        if let Some(communicator) = held.communicator() {
            communicator.mark_destroyed();
        }
        match held.take() {
            Some(communicator) if held.stage() == CommStage::Open => {
                group::tear_down(TeardownJob { comm: held, communicator, guard })
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

export! {
    /// Destroys the handle without waiting for other ranks. Waiting calls and kernels end, and the
    /// communicator then fails on the other ranks as well. A communicator of host memory without a running
    /// call shuts down cleanly instead, because other ranks may still be reading data that this rank sent.
    /// NULL is ignored.
    fn ncclCommAbort | pncclCommAbort(comm: ncclComm_t) {
        if comm.is_null() {
            return Ok(CallProgress::Done);
        }
        let comm = comm::remove(comm)?;
        if comm.has_closed() {
            // A close has informed the other ranks that this rank ends, and none of its calls runs.
            if let Some(communicator) = comm.take() {
                deferred_free::free_on_abort(communicator);
            }
            return Ok(CallProgress::Done);
        }
        if let Some(communicator) = comm.take() {
            if communicator.gpu().is_some() {
                // A peer's kernel that waits for this rank would not notice a close for hours, until its
                // timeout. So every abort reaches the GPUs. The abort does not wait for kernels of other
                // communicators, which may wait for ranks that are gone until their own abort.
                communicator.abort();
                deferred_free::free_on_abort(communicator);
            } else if let Err(in_call) = Arc::try_unwrap(communicator) {
                // A call of another thread holds the communicator.
                in_call.abort();
            }
        }
        // The communicator is still connecting: the rendezvous reports the abort to the other ranks.
        comm.fault.raise(Error::new(
            ErrorKind::Aborted,
            "ncclCommAbort was called on this rank",
        ));
        Ok(CallProgress::Done)
    }
}

export! {
    /// Ends running calls and kernels of the communicator and waits for them on this rank. It can then
    /// only be split, shrunk, destroyed or aborted. NULL is ignored.
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
        // A split that is running may wait for a rank, so the revoke ends the split.
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
