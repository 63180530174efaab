//! Communicators behind the `ncclComm_t` handles of programs, and the table of these handles.
//!
//! The call that creates a communicator returns its handle, perhaps long before the communicator is
//! connected.

use crate::config::CommOptions;
use crate::plugins::CommPlugins;
use crate::types::{ncclComm, ncclComm_t};
use cinch::capi::core::created_ops::CreatedOps;
use cinch::capi::core::handle_table::HandleTable;
use cinch::sync::Fault;
use cinch::sys::fork::ProcessId;
use cinch::types::DeviceChoice;
use cinch::{Communicator, Config, Error, ErrorKind, Result};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

static COMMS: HandleTable<Comm> = HandleTable::new("comm", "communicator", 0xACC1);

/// A communicator behind an `ncclComm_t`.
#[derive(Debug)]
pub(crate) struct Comm {
    /// Options that the program passed.
    pub(crate) options: CommOptions,
    /// Settings without the program's options. Communicators that are split from this one inherit
    /// them.
    pub(crate) defaults: Config,
    /// The communicator's fault. Raising it ends all waits, including the wait for the connection.
    pub(crate) fault: Arc<Fault>,
    /// Operators that the program created.
    pub(crate) ops: CreatedOps,
    owner: ProcessId,
    state: Mutex<CommState>,
    /// Plug-ins, once the communicator is connected. Finalized when the handle is gone and no call runs.
    plugins: OnceLock<Arc<CommPlugins>>,
}

#[derive(Debug, Default)]
struct CommState {
    communicator: Option<Arc<Communicator>>,
    /// Whether [`Comm::take`] was called. If so, a connection that is made later is closed.
    is_released: bool,
    /// Number of running calls on all threads.
    underway: usize,
    /// Number of running calls that have returned `ncclInProgress` to the program.
    background: usize,
    /// Reason why there is no connection, or why finalize failed.
    failure: Option<Error>,
    stage: CommStage,
    /// Whether a finalize has ended without error.
    has_closed: bool,
}

impl CommState {
    fn end(&mut self, blocking: bool) {
        self.underway -= 1;
        self.background -= usize::from(!blocking);
    }
}

/// Stage in the life of a communicator, which decides which calls it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CommStage {
    /// The communicator takes calls.
    #[default]
    Open,
    /// The communicator was finalized and can only be destroyed.
    Finalized,
    /// The communicator was revoked and can only be split, shrunk, destroyed or aborted.
    Revoked,
}

impl Comm {
    /// Creates a communicator in the connecting phase, which [`Comm::joined`] ends.
    pub(crate) fn connecting(options: CommOptions, defaults: Config, fault: Arc<Fault>) -> Comm {
        let comm = Comm {
            options,
            defaults,
            fault,
            ops: CreatedOps::default(),
            owner: ProcessId::this(),
            state: Mutex::default(),
            plugins: OnceLock::new(),
        };
        comm.begin(comm.options.blocking);
        comm
    }

    fn state(&self) -> MutexGuard<'_, CommState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the device on which the communicator's buffers are.
    pub(crate) fn device(&self) -> DeviceChoice {
        self.defaults.device
    }

    /// Initialises the plug-ins of the communicator, which is connected.
    pub(crate) fn open_plugins(&self, communicator: &Communicator) {
        if let Some(plugins) = CommPlugins::open(communicator) {
            let _ = self.plugins.set(plugins);
        }
    }

    /// Returns the communicator's plug-ins, if it has any.
    pub(crate) fn plugins(&self) -> Option<&Arc<CommPlugins>> {
        self.plugins.get()
    }

    /// Returns whether the communicator may make calls: it is being connected, or is connected and
    /// not closed.
    pub(crate) fn is_in_use(&self) -> bool {
        let state = self.state();
        state.underway > 0 || (state.communicator.is_some() && !state.has_closed)
    }

    /// Returns whether calls or kernels of the communicator run on this rank.
    pub(crate) fn is_busy(&self) -> bool {
        self.communicator()
            .is_some_and(|communicator| !communicator.is_idle())
    }

    /// Ends the connecting phase, and with it the call of `parent`: both become ready at once, because
    /// a program that sees one of them ready may use the other. Returns the connection for the caller
    /// to free if the communicator was aborted meanwhile.
    #[must_use]
    pub(crate) fn joined(
        &self,
        result: Result<Communicator>,
        parent: Option<&Comm>,
    ) -> Option<Arc<Communicator>> {
        // Child before parent: the only place where a thread locks two states.
        let mut state = self.state();
        let mut of_parent = parent.map(Comm::state);
        state.end(self.options.blocking);
        if let Some(of_parent) = &mut of_parent {
            of_parent.end(self.options.blocking);
        }
        match result {
            Ok(communicator) if state.is_released => return Some(Arc::new(communicator)),
            Ok(communicator) => state.communicator = Some(Arc::new(communicator)),
            Err(error) => state.failure = Some(error),
        }
        None
    }

    /// Counts a call that begins; a `blocking` call does not return before it has ended.
    pub(crate) fn begin(&self, blocking: bool) {
        let mut state = self.state();
        state.underway += 1;
        state.background += usize::from(!blocking);
    }

    /// Counts a call that has ended.
    pub(crate) fn end(&self, blocking: bool) {
        self.state().end(blocking);
    }

    /// Records the result of a finalize that ran in the background.
    pub(crate) fn finalize_ended(&self, result: Result<()>) {
        let mut state = self.state();
        state.end(false);
        state.has_closed = result.is_ok();
        state.failure = result.err();
    }

    /// Records that a blocking finalize has ended without error.
    pub(crate) fn set_closed(&self) {
        self.state().has_closed = true;
    }

    /// Returns whether a finalize has ended without error.
    pub(crate) fn has_closed(&self) -> bool {
        self.state().has_closed
    }

    /// Locks the state until the returned value is dropped.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> impl Sized + '_ {
        self.state()
    }

    /// Returns the connection if no call runs.
    ///
    /// # Errors
    /// Invalid argument while a call runs; else the reason why there is no connection.
    pub(crate) fn connection(&self) -> Result<Arc<Communicator>> {
        let state = self.state();
        if state.underway > 0 {
            return Err(Error::invalid_argument(
                "the communicator is not ready: an earlier call on it returned ncclInProgress or \
                 runs on another thread; wait until ncclCommGetAsyncError no longer returns that",
            ));
        }
        match (&state.communicator, &state.failure) {
            (_, Some(failure)) => Err(failure.clone()),
            (Some(communicator), None) => Ok(communicator.clone()),
            (None, None) => Err(Error::internal("a communicator without a connection")),
        }
    }

    /// Returns the connection if the communicator takes calls.
    ///
    /// # Errors
    /// See [`Comm::connection`]; invalid usage after finalize or revoke.
    pub(crate) fn ready(&self) -> Result<Arc<Communicator>> {
        let communicator = self.connection()?;
        match self.stage() {
            CommStage::Open => Ok(communicator),
            CommStage::Finalized => Err(Error::invalid_usage(
                "the communicator was finalized; it can only be destroyed",
            )),
            CommStage::Revoked => Err(Error::invalid_usage(
                "the communicator was revoked; it can only be destroyed, aborted, split or shrunk",
            )),
        }
    }

    /// Returns the communicator's stage.
    pub(crate) fn stage(&self) -> CommStage {
        self.state().stage
    }

    /// Sets the communicator's stage to `stage`.
    pub(crate) fn enter(&self, stage: CommStage) {
        self.state().stage = stage;
    }

    /// Returns the connection if there is one, even while calls run.
    pub(crate) fn communicator(&self) -> Option<Arc<Communicator>> {
        self.state().communicator.clone()
    }

    /// Removes and returns the connection, for a caller that ends the communicator.
    pub(crate) fn take(&self) -> Option<Arc<Communicator>> {
        let mut state = self.state();
        state.is_released = true;
        state.communicator.take()
    }

    /// Returns whether a call runs, on any thread.
    pub(crate) fn is_underway(&self) -> bool {
        self.state().underway > 0
    }

    /// Returns whether a call runs that has returned `ncclInProgress`.
    ///
    /// Calls that block other threads do not count: a program takes any state but success for a
    /// failure of the communicator.
    pub(crate) fn is_in_progress(&self) -> bool {
        self.state().background > 0
    }

    /// Returns the reason why the communicator has failed; `None` if it has not, or was revoked. A closed
    /// communicator needs no other rank, so failures of other ranks do not count.
    pub(crate) fn failure(&self) -> Option<Error> {
        let (communicator, has_closed) = {
            let state = self.state();
            if state.stage == CommStage::Revoked {
                return None;
            }
            if state.failure.is_some() {
                return state.failure.clone();
            }
            (state.communicator.clone(), state.has_closed)
        };
        let error = communicator?.async_error()?;
        let is_of_peer = matches!(error.kind(), ErrorKind::Remote | ErrorKind::Aborted);
        (!(has_closed && is_of_peer)).then_some(error)
    }
}

/// Returns a new handle for `comm`.
pub(crate) fn register(comm: Arc<Comm>) -> Result<ncclComm_t> {
    COMMS.register(comm)
}

/// Returns the communicator of the handle `comm`.
///
/// # Errors
/// See [`HandleTable::lookup`]; invalid usage in a process that was forked after the communicator was
/// made, where its locks may stay locked forever.
pub(crate) fn lookup(comm: *const ncclComm) -> Result<Arc<Comm>> {
    let found = COMMS.lookup(comm)?;
    found.owner.check()?;
    Ok(found)
}

/// Removes the handle `comm` and returns its communicator.
///
/// # Errors
/// See [`lookup`].
pub(crate) fn remove(comm: *const ncclComm) -> Result<Arc<Comm>> {
    lookup(comm)?;
    COMMS.remove(comm)
}

/// Returns all communicators of this process that have handles.
pub(crate) fn all() -> Vec<Arc<Comm>> {
    let mut all = COMMS.all();
    all.retain(|comm| comm.owner.is_this());
    all
}

const _: () = {
    // Asserts at compile time that threads may share handles; calls on one communicator run one
    // after the other.
    const fn shared<T: Send + Sync>() {}
    shared::<Comm>();
};
