//! Communicators as programs hold them: a ticket, and what it stands for from the call that asks
//! for it on, which may be long before there is a connection.

use crate::config::CommOptions;
use crate::deferred_free;
use crate::op::CreatedOps;
use crate::types::{ncclComm, ncclComm_t};
use cinch::capi::HandleTable;
use cinch::sync::Fault;
use cinch::sys::fork::ProcessId;
use cinch::types::DeviceChoice;
use cinch::{Communicator, Config, Error, ErrorKind, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

static LIVE: HandleTable<Comm> = HandleTable::new("comm", "communicator", 0xACC1);

/// What a ticket stands for.
#[derive(Debug)]
pub(crate) struct Comm {
    /// What the program options of it.
    pub(crate) options: CommOptions,
    /// The settings that hold where nothing is options; those of communicators made from it, too.
    pub(crate) defaults: Config,
    /// Raising it ends whatever waits, an init too.
    pub(crate) fault: Arc<Fault>,
    pub(crate) ops: CreatedOps,
    owner: ProcessId,
    state: Mutex<CommState>,
}

#[derive(Debug, Default)]
struct CommState {
    communicator: Option<Arc<Communicator>>,
    /// Calls that go on, on whatever thread.
    underway: usize,
    /// Those of them that returned before their end.
    background: usize,
    /// Why there is no connection, or why it could not be finalized.
    failure: Option<Error>,
    stage: CommStage,
    /// Whether this rank has retired: a finalize has ended, and well.
    has_closed: bool,
}

impl CommState {
    fn end(&mut self, blocking: bool) {
        self.underway -= 1;
        self.background -= usize::from(!blocking);
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CommStage {
    /// It takes calls.
    #[default]
    Open,
    /// It was finalized, and is there to be destroyed.
    Finalized,
    /// It was revoked, and is there to be destroyed.
    Revoked,
}

impl Comm {
    /// One that is being connected: [`Comm::joined`] says how that went.
    pub(crate) fn connecting(options: CommOptions, defaults: Config, fault: Arc<Fault>) -> Comm {
        let comm = Comm {
            options,
            defaults,
            fault,
            ops: CreatedOps::default(),
            owner: ProcessId::this(),
            state: Mutex::default(),
        };
        comm.begin(comm.options.blocking);
        comm
    }

    fn state(&self) -> MutexGuard<'_, CommState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where its buffers are.
    pub(crate) fn device(&self) -> DeviceChoice {
        self.defaults.device
    }

    /// Whether it makes calls, or is about to: it has not left, nor failed to connect.
    pub(crate) fn is_in_use(&self) -> bool {
        let state = self.state();
        state.underway > 0 || (state.communicator.is_some() && !state.has_closed)
    }

    /// Whether calls of it on this rank go on, or kernels of theirs. One that is being connected has none.
    pub(crate) fn is_busy(&self) -> bool {
        self.communicator()
            .is_some_and(|communicator| !communicator.is_idle())
    }

    /// Ends the connecting.
    pub(crate) fn joined(&self, result: Result<Communicator>) {
        let mut state = self.state();
        state.end(self.options.blocking);
        match result {
            Ok(communicator) => state.communicator = Some(Arc::new(communicator)),
            Err(error) => state.failure = Some(error),
        }
    }

    /// A call begins, which returns when it has ended if it is `blocking`.
    pub(crate) fn begin(&self, blocking: bool) {
        let mut state = self.state();
        state.underway += 1;
        state.background += usize::from(!blocking);
    }

    /// It ended.
    pub(crate) fn end(&self, blocking: bool) {
        self.state().end(blocking);
    }

    /// A finalize that returned before its end has ended.
    pub(crate) fn finalize_ended(&self, result: Result<()>) {
        let mut state = self.state();
        state.end(false);
        state.has_closed = result.is_ok();
        state.failure = result.err();
    }

    /// A finalize that blocks has ended, and well.
    pub(crate) fn set_closed(&self) {
        self.state().has_closed = true;
    }

    /// Whether a finalize has ended, and well.
    pub(crate) fn has_closed(&self) -> bool {
        self.state().has_closed
    }

    /// Lets nothing happen to it meanwhile.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> impl Sized + '_ {
        self.state()
    }

    /// The connection, if there is one and nothing is under way.
    ///
    /// # Errors
    /// Invalid argument while something is; why there is no connection.
    pub(crate) fn connection(&self) -> Result<Arc<Communicator>> {
        let state = self.state();
        if state.underway > 0 {
            return Err(Error::invalid_argument(
                "the communicator is not ready: an earlier call on it returned ncclInProgress or \
                 runs on another thread; wait until ncclCommGetAsyncError no longer says so",
            ));
        }
        match (&state.communicator, &state.failure) {
            (_, Some(failure)) => Err(failure.clone()),
            (Some(communicator), None) => Ok(communicator.clone()),
            (None, None) => Err(Error::internal("a communicator without a connection")),
        }
    }

    /// The connection, for calls.
    ///
    /// # Errors
    /// As [`Comm::connection`]; invalid usage after finalize or revoke.
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

    pub(crate) fn stage(&self) -> CommStage {
        self.state().stage
    }

    pub(crate) fn enter(&self, stage: CommStage) {
        self.state().stage = stage;
    }

    /// The connection, if there is one, whatever is under way.
    pub(crate) fn communicator(&self) -> Option<Arc<Communicator>> {
        self.state().communicator.clone()
    }

    /// The connection, for good: for whoever ends the communicator.
    pub(crate) fn take(&self) -> Option<Arc<Communicator>> {
        self.state().communicator.take()
    }

    /// Whether a call goes on, on whatever thread.
    pub(crate) fn is_underway(&self) -> bool {
        self.state().underway > 0
    }

    /// Whether a call goes on that has returned. One that blocks another thread does not count:
    /// programs take the first state that is not success for the end of the communicator.
    pub(crate) fn is_in_progress(&self) -> bool {
        self.state().background > 0
    }

    /// Why it has failed, if it has and was not revoked. One that has left needs no other rank.
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
        let is_anothers_end = matches!(error.kind(), ErrorKind::Remote | ErrorKind::Aborted);
        (!(has_closed && is_anothers_end)).then_some(error)
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // It was aborted while it connected, say.
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(communicator) = state.communicator.take() {
            deferred_free::free_in_background(communicator);
        }
    }
}

/// Gives `comm` a ticket.
pub(crate) fn register(comm: Arc<Comm>) -> Result<ncclComm_t> {
    LIVE.register(comm)
}

/// What the ticket stands for.
///
/// # Errors
/// As [`HandleTable::lookup`]; invalid usage in a process that was forked since, which may find a lock of
/// it held for ever.
pub(crate) fn lookup(comm: *const ncclComm) -> Result<Arc<Comm>> {
    let found = LIVE.lookup(comm)?;
    found.owner.check()?;
    Ok(found)
}

/// Takes the ticket back.
///
/// # Errors
/// As [`lookup`].
pub(crate) fn remove(comm: *const ncclComm) -> Result<Arc<Comm>> {
    lookup(comm)?;
    LIVE.remove(comm)
}

/// The communicators of this process.
pub(crate) fn all() -> Vec<Arc<Comm>> {
    let mut all = LIVE.all();
    all.retain(|comm| comm.owner.is_this());
    all
}

const _: () = {
    // Handles are shared by threads; calls on one run one after the other.
    const fn shared<T: Send + Sync>() {}
    shared::<Comm>();
};
