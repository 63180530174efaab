//! What is left of communicators that were finalized or destroyed: memory that other ranks may still
//! write to, and a thread each that waits for those.
//!
//! No call waits for such a thread. The end of the process does for a moment, so that ranks which end
//! together part in good order, and so that nothing is given back to a driver that ends itself; what
//! other ranks keep waiting then goes with the process, which they know to have retired.
//!
//! **When memory of a GPU goes.** The driver waits for all kernels of a GPU before it frees memory,
//! and keeps launches there waiting meanwhile (seen with driver 580), for one of which those kernels may
//! wait. So it is freed by calls that make or end a communicator of that very GPU, which all ranks make in
//! one order with their others, while no other communicator there has calls under way; or where the
//! process has no communicator.

use crate::comm;
use cinch::Communicator;
use cinch::sys::process::block_signals;
use cinch::sys::whole::Guarded;
use cinch::types::DeviceChoice;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long the end of the process waits for other ranks.
const MEETING: Duration = Duration::from_secs(1);
/// How long it, or the making of a communicator, waits for memory that is being freed.
const FREEING: Duration = Duration::from_secs(5);
/// How long calls that have something to free wait for those of other communicators.
const IDLING: Duration = Duration::from_secs(1);
/// Time between two looks at them.
const LOOK: Duration = Duration::from_millis(1);

/// Threads that wait for other ranks.
static WAITING: Tally = Tally(AtomicU64::new(0));
/// Threads that free what they waited with, or are about to find that they must not.
static ENDING: Tally = Tally(AtomicU64::new(0));
/// Whether the process ends.
static EXITS: AtomicBool = AtomicBool::new(false);
/// Whether the end of the process comes here.
static EXPECTS_EXIT: AtomicBool = AtomicBool::new(false);
/// Communicators that nobody waits for any more.
static OVER: Guarded<Vec<Arc<Communicator>>> = Guarded::new(Vec::new());

/// Counts threads of a process: its number in the upper half. A child of a fork has none of them, and
/// finds no lock here that it would wait for.
struct Tally(AtomicU64);

impl Tally {
    fn count(&self) -> u64 {
        match self.0.load(Ordering::SeqCst) {
            tally if tally >> 32 == u64::from(std::process::id()) => tally & u64::from(u32::MAX),
            _ => 0,
        }
    }

    /// Counts one until the returned value is dropped.
    fn enter(&'static self) -> Counted {
        let own = u64::from(std::process::id()) << 32;
        let next = |tally: u64| {
            if tally >> 32 == own >> 32 {
                tally + 1
            } else {
                own + 1
            }
        };
        let _ = self
            .0
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |tally| {
                Some(next(tally))
            });
        Counted(self)
    }

    /// Waits until there are none, at most `patience`.
    fn settle(&self, patience: Duration) {
        let until = Instant::now() + patience;
        while self.count() > 0 && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
    }
}

struct Counted(&'static Tally);

impl Drop for Counted {
    fn drop(&mut self) {
        if self.0.count() > 0 {
            self.0.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

unsafe extern "C" {
    /// Of the C library.
    safe fn atexit(handler: extern "C" fn()) -> c_int;
}

extern "C" fn at_exit() {
    WAITING.settle(MEETING);
    EXITS.store(true, Ordering::SeqCst);
    ENDING.settle(FREEING);
}

/// Runs `retires` on a thread of its own, and lets the communicator that it returns, which has retired,
/// end when that of the other ranks have.
///
/// # Errors
/// The system's, if there can be no thread: nothing has run then.
pub(crate) fn keep(
    retires: impl FnOnce() -> Option<Arc<Communicator>> + Send + 'static,
) -> std::io::Result<()> {
    // Behind the driver's own handler, which was there first, if there is one: it runs before that.
    if !EXPECTS_EXIT.swap(true, Ordering::Relaxed) {
        let _ = atexit(at_exit);
    }
    let waiting = WAITING.enter();
    let thread = std::thread::Builder::new().name("cinch-leave".into());
    let spawned = thread.spawn(move || {
        block_signals();
        let communicator = retires();
        if let Some(communicator) = &communicator {
            communicator.outlast();
        }
        let _ending = ENDING.enter();
        drop(waiting);
        if let Some(communicator) = communicator {
            end(communicator);
        }
    });
    spawned.map(drop)
}

/// Lets `communicator`, which has retired, end when the other ranks have retired, too.
pub(crate) fn outlast(communicator: Arc<Communicator>) {
    if EXITS.load(Ordering::SeqCst) {
        return let_go(communicator);
    }
    let kept = communicator.clone();
    if keep(move || Some(kept)).is_err() {
        shelve(communicator);
    }
}

/// Keeps it for [`clear_away`].
fn shelve(communicator: Arc<Communicator>) {
    OVER.with(|over| over.push(communicator));
}

/// On a thread that no rank's calls are in order with.
fn end(communicator: Arc<Communicator>) {
    if communicator.gpu().is_some() && !comm::all().is_empty() {
        shelve(communicator);
    } else {
        let_go(communicator);
    }
}

/// Frees what `communicator` holds, which nobody uses any more; later if that would wait for calls of
/// other communicators of its GPU. For calls that end it.
pub(crate) fn part_with(communicator: Arc<Communicator>) {
    match communicator.gpu().is_some() && is_busy(communicator.config().device) {
        true => shelve(communicator),
        false => let_go(communicator),
    }
}

/// Whether calls of communicators on `device` are under way.
fn is_busy(device: DeviceChoice) -> bool {
    let mut all = comm::all().into_iter();
    all.any(|comm| comm.device() == device && comm.is_busy())
}

/// Frees what `communicator` holds, unless it is too late for that: the driver may have ended.
pub(crate) fn let_go(communicator: Arc<Communicator>) {
    if EXITS.load(Ordering::SeqCst) {
        std::mem::forget(communicator);
    }
}

/// Frees what nobody needs any more of `device`, or anywhere if the process has no communicator. For calls
/// that make or end communicators there.
pub(crate) fn clear_away(device: DeviceChoice) {
    ENDING.settle(FREEING);
    if comm::all().is_empty() {
        drop(OVER.with(std::mem::take));
        return;
    }
    let is_there = |over: &Arc<Communicator>| over.config().device == device;
    if !OVER.with(|over| over.iter().any(is_there)) {
        return;
    }
    let until = Instant::now() + IDLING;
    while is_busy(device) {
        if Instant::now() >= until {
            return;
        }
        std::thread::sleep(LOOK);
    }
    drop(OVER.with(|over| over.extract_if(.., |one| is_there(one)).collect::<Vec<_>>()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tally_counts_threads_of_this_process_only() {
        static TALLY: Tally = Tally(AtomicU64::new(7));
        assert_eq!(TALLY.count(), 0);
        let one = TALLY.enter();
        let two = TALLY.enter();
        assert_eq!(TALLY.count(), 2);
        drop(one);
        assert_eq!(TALLY.count(), 1);
        // As a child finds it, and as its parent's count ends there.
        TALLY.0.store(3, Ordering::SeqCst);
        drop(two);
        assert_eq!((TALLY.count(), TALLY.0.load(Ordering::SeqCst)), (0, 3));
        TALLY.settle(Duration::from_secs(60));
    }
}
