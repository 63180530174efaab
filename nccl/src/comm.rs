//! Communicators as programs hold them: a ticket, and what it stands for from the call that asks
//! for it on, which may be long before there is a connection.

use crate::config::Asked;
use crate::op::CreatedOps;
use crate::remains;
use crate::types::{ncclComm, ncclComm_t};
use cinch::ffi::Tickets;
use cinch::sync::Fault;
use cinch::sys::fork::Owner;
use cinch::types::DeviceChoice;
use cinch::{Communicator, Config, Error, ErrorKind, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

static LIVE: Tickets<Comm> = Tickets::new("comm", "communicator", 0xACC1);

/// What a ticket stands for.
#[derive(Debug)]
pub(crate) struct Comm {
    /// What the program asked of it.
    pub(crate) asked: Asked,
    /// The settings that hold where nothing is asked; those of communicators made from it, too.
    pub(crate) defaults: Config,
    /// Raising it ends whatever waits, an init too.
    pub(crate) fault: Arc<Fault>,
    pub(crate) ops: CreatedOps,
    owner: Owner,
    life: Mutex<Life>,
}

#[derive(Debug, Default)]
struct Life {
    communicator: Option<Arc<Communicator>>,
    /// Calls that go on, on whatever thread.
    underway: usize,
    /// Those of them that returned before their end.
    background: usize,
    /// Why there is no connection, or why it could not be finalized.
    failure: Option<Error>,
    stage: Stage,
    /// Whether this rank has retired: a finalize has ended, and well.
    left: bool,
}

impl Life {
    fn end(&mut self, blocking: bool) {
        self.underway -= 1;
        self.background -= usize::from(!blocking);
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stage {
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
    pub(crate) fn connecting(asked: Asked, defaults: Config, fault: Arc<Fault>) -> Comm {
        let comm = Comm {
            asked,
            defaults,
            fault,
            ops: CreatedOps::default(),
            owner: Owner::this(),
            life: Mutex::default(),
        };
        comm.begin(comm.asked.blocking);
        comm
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where its buffers are.
    pub(crate) fn device(&self) -> DeviceChoice {
        self.defaults.device
    }

    /// Whether it makes calls, or is about to: it has not left, nor failed to connect.
    pub(crate) fn is_in_use(&self) -> bool {
        let life = self.life();
        life.underway > 0 || (life.communicator.is_some() && !life.left)
    }

    /// Whether calls of it on this rank go on, or kernels of theirs. One that is being connected has none.
    pub(crate) fn is_busy(&self) -> bool {
        self.communicator()
            .is_some_and(|communicator| !communicator.is_idle())
    }

    /// Ends the connecting.
    pub(crate) fn joined(&self, result: Result<Communicator>) {
        let mut life = self.life();
        life.end(self.asked.blocking);
        match result {
            Ok(communicator) => life.communicator = Some(Arc::new(communicator)),
            Err(error) => life.failure = Some(error),
        }
    }

    /// A call begins, which returns when it has ended if it is `blocking`.
    pub(crate) fn begin(&self, blocking: bool) {
        let mut life = self.life();
        life.underway += 1;
        life.background += usize::from(!blocking);
    }

    /// It ended.
    pub(crate) fn end(&self, blocking: bool) {
        self.life().end(blocking);
    }

    /// A finalize that returned before its end has ended.
    pub(crate) fn left(&self, result: Result<()>) {
        let mut life = self.life();
        life.end(false);
        life.left = result.is_ok();
        life.failure = result.err();
    }

    /// A finalize that blocks has ended, and well.
    pub(crate) fn leave(&self) {
        self.life().left = true;
    }

    /// Whether a finalize has ended, and well.
    pub(crate) fn has_left(&self) -> bool {
        self.life().left
    }

    /// Lets nothing happen to it meanwhile.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> impl Sized + '_ {
        self.life()
    }

    /// The connection, if there is one and nothing is under way.
    ///
    /// # Errors
    /// Invalid argument while something is; why there is no connection.
    pub(crate) fn connection(&self) -> Result<Arc<Communicator>> {
        let life = self.life();
        if life.underway > 0 {
            return Err(Error::invalid_argument(
                "the communicator is not ready: an earlier call on it returned ncclInProgress or \
                 runs on another thread; wait until ncclCommGetAsyncError no longer says so",
            ));
        }
        match (&life.communicator, &life.failure) {
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
            Stage::Open => Ok(communicator),
            Stage::Finalized => Err(Error::invalid_usage(
                "the communicator was finalized; it can only be destroyed",
            )),
            Stage::Revoked => Err(Error::invalid_usage(
                "the communicator was revoked; it can only be destroyed, aborted, split or shrunk",
            )),
        }
    }

    pub(crate) fn stage(&self) -> Stage {
        self.life().stage
    }

    pub(crate) fn enter(&self, stage: Stage) {
        self.life().stage = stage;
    }

    /// The connection, if there is one, whatever is under way.
    pub(crate) fn communicator(&self) -> Option<Arc<Communicator>> {
        self.life().communicator.clone()
    }

    /// The connection, for good: for whoever ends the communicator.
    pub(crate) fn take(&self) -> Option<Arc<Communicator>> {
        self.life().communicator.take()
    }

    /// Whether a call goes on, on whatever thread.
    pub(crate) fn is_underway(&self) -> bool {
        self.life().underway > 0
    }

    /// Whether a call goes on that has returned. One that blocks another thread does not count:
    /// programs take the first state that is not success for the end of the communicator.
    pub(crate) fn is_in_progress(&self) -> bool {
        self.life().background > 0
    }

    /// Why it has failed, if it has and was not revoked. One that has left needs no other rank.
    pub(crate) fn failure(&self) -> Option<Error> {
        let (communicator, has_left) = {
            let life = self.life();
            if life.stage == Stage::Revoked {
                return None;
            }
            if life.failure.is_some() {
                return life.failure.clone();
            }
            (life.communicator.clone(), life.left)
        };
        let error = communicator?.async_error()?;
        let is_anothers_end = matches!(error.kind(), ErrorKind::Remote | ErrorKind::Aborted);
        (!(has_left && is_anothers_end)).then_some(error)
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // It was aborted while it connected, say.
        let life = self.life.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(communicator) = life.communicator.take() {
            remains::leave_behind(communicator);
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
/// As [`Tickets::lookup`]; invalid usage in a process that was forked since, which may find a lock of
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
