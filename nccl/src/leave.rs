//! Leaving: finalize, destroy, abort, revoke.

use crate::boundary::Progress;
use crate::comm::{self, Comm, Stage};
use crate::group;
use crate::types::*;
use cinch::sys::log::{self, Level};
use cinch::{Communicator, Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

/// How long a revoke waits for kernels: those that were told to stop, and what is on their streams
/// before them.
const STOPPING: Duration = Duration::from_secs(10);

export! {
    /// Waits until what was called on the communicator has ended on all ranks. It takes no more
    /// calls then, and is there to be destroyed. NULL is nothing to finalize.
    counted fn ncclCommFinalize | pncclCommFinalize(comm: ncclComm_t) {
        if comm.is_null() {
            return Ok(Progress::Done);
        }
        let comm = comm::lookup(comm)?;
        let communicator = comm.ready()?;
        group::check_leave(&comm)?;
        comm.enter(Stage::Finalized);
        let leave = Leave { comm, communicator, destroys: false };
        leave.submit()
    }
}

export! {
    /// Ends the handle and frees what it holds, after it has waited as `ncclCommFinalize` does if
    /// that was not called. NULL is nothing to end.
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
        comm::remove(comm)?;
        match held.take() {
            Some(communicator) if held.stage() == Stage::Open => {
                let leave = Leave { comm: held, communicator, destroys: true };
                leave.submit()
            }
            _ => Ok(Progress::Done),
        }
    }
}

/// What is left of a finalize or destroy when it was checked: to wait for the other ranks.
pub(crate) struct Leave {
    comm: Arc<Comm>,
    communicator: Arc<Communicator>,
    /// Whether the handle has ended.
    destroys: bool,
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
            destroys,
        } = self;
        if destroys {
            if communicator.async_error().is_none()
                && let Err(error) = flush(&comm, communicator)
            {
                log::line(Level::Warn, format_args!("ncclCommDestroy: {error}"));
            }
            return Ok(Progress::Done);
        }
        if comm.asked.blocking {
            flush(&comm, communicator)?;
            return Ok(Progress::Done);
        }
        comm.begin(false);
        let ending = comm.clone();
        in_background(move || {
            // Its failure is the communicator's, which is asked for it.
            let _ = communicator.finalize();
            ending.end(false);
        })
        .inspect_err(|_| comm.end(false))?;
        Ok(Progress::Underway)
    }

    /// Undoes it, for a group that does not run. A handle that has ended is not there again: its
    /// rank leaves without waiting.
    pub(crate) fn withdraw(self) {
        if !self.destroys {
            self.comm.enter(Stage::Open);
        }
    }
}

/// Runs those of a group, each on a thread of its own: other ranks may wait in any of them for this
/// rank to come.
pub(crate) fn run(mut leaves: Vec<Leave>) -> Result<Progress> {
    let Some(last) = leaves.pop() else {
        return Ok(Progress::Done);
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = leaves
            .into_iter()
            .map(|leave| {
                thread().spawn_scoped(scope, move || cinch::ffi::caught("leaving", || leave.run()))
            })
            .collect();
        let mut progress = last.run();
        for other in others {
            let ended = other.map_err(cannot_start).and_then(|thread| {
                let panicked = |_| Err(Error::internal("a thread that leaves panicked"));
                thread.join().unwrap_or_else(panicked)
            });
            progress = match (progress, ended) {
                (Ok(Progress::Done), ended) => ended,
                (Ok(Progress::Underway), Err(error)) => Err(error),
                (progress, _) => progress,
            };
        }
        progress
    })
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
        if let Some(communicator) = comm.take() {
            // Who else holds it is in a call. A kernel that waits for this rank would know nothing of
            // its goodbye, and has hours: GPUs hear of every abort.
            match Arc::try_unwrap(communicator) {
                Ok(communicator) if communicator.gpu().is_none() => drop(communicator),
                Ok(communicator) => communicator.abort(),
                Err(in_call) => in_call.abort(),
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
        let communicator = comm.connection()?;
        if comm.stage() == Stage::Finalized {
            return Err(Error::invalid_usage("the communicator was finalized"));
        }
        comm.enter(Stage::Revoked);
        communicator.abort();
        communicator.wait_stopped(STOPPING)?;
        Ok(Progress::Done)
    }
}

/// The ranks of one communicator that are in this process.
///
/// A thread that holds several of them ends them one after the other, and must not wait in the
/// first for the second: all but the last one end in the background, and the last one waits.
#[derive(Debug)]
pub(crate) struct Family {
    leaving: Mutex<Leaving>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Leaving {
    begun: usize,
    ended: usize,
    failure: Option<Error>,
}

static FAMILIES: Mutex<BTreeMap<[u8; 32], Weak<Family>>> = Mutex::new(BTreeMap::new());

impl Family {
    /// That of the communicator with this identity.
    pub(crate) fn of(identity: [u8; 32]) -> Arc<Family> {
        let mut families = FAMILIES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(family) = families.get(&identity).and_then(Weak::upgrade) {
            return family;
        }
        families.retain(|_, family| family.strong_count() > 0);
        let family = Arc::new(Family {
            leaving: Mutex::default(),
            changed: Condvar::new(),
        });
        families.insert(identity, Arc::downgrade(&family));
        family
    }
}

/// Finalizes, and returns when it is done for all ranks of this process, if this is the last of
/// them that begins. Takes the communicator: who is last drops it.
fn flush(comm: &Comm, communicator: Arc<Communicator>) -> Result<()> {
    let peers = communicator.peers();
    let own = peers[communicator.rank()].process_id;
    let here = peers.iter().filter(|peer| peer.process_id == own).count();
    if here == 1 {
        return communicator.finalize();
    }
    let family = comm.family(&communicator).clone();
    let lock = || {
        family
            .leaving
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    };
    let begun = {
        let mut leaving = lock();
        leaving.begun += 1;
        leaving.begun
    };
    let ours = family.clone();
    in_background(move || {
        let failure = communicator.finalize().err();
        drop(communicator);
        let mut leaving = ours.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        leaving.ended += 1;
        leaving.failure = leaving.failure.take().or(failure);
        ours.changed.notify_all();
    })
    .inspect_err(|_| lock().begun -= 1)?;
    if begun % here != 0 {
        return Ok(());
    }
    // Each of them waits for the other ranks with a deadline of its own.
    let mut leaving = lock();
    while leaving.ended < begun {
        leaving = family
            .changed
            .wait(leaving)
            .unwrap_or_else(PoisonError::into_inner);
    }
    leaving.failure.take().map_or(Ok(()), Err)
}

fn in_background(work: impl FnOnce() + Send + 'static) -> Result<()> {
    thread().spawn(work).map(drop).map_err(cannot_start)
}

fn thread() -> std::thread::Builder {
    std::thread::Builder::new().name("cinch-leave".into())
}

fn cannot_start(cause: std::io::Error) -> Error {
    Error::system("cannot start a thread that ends a communicator", cause)
}
