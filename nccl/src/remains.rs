//! What is left of communicators that were finalized or destroyed: memory that other ranks may still
//! write to, and a thread each that waits for those.
//!
//! No call waits for such a thread. The end of the process does for a moment, so that ranks which end
//! together part in good order, and so that nothing is given back to a driver that ends itself; what
//! other ranks keep waiting then goes with the process, which they know to have retired.
//!
//! **When memory of a GPU goes.** The driver waits for all kernels of a GPU before it frees memory,
//! and keeps launches there waiting meanwhile (seen with driver 580), for one of which those kernels may
//! wait. So a communicator that nobody uses any more is put on a shelf, and goes from there when no other
//! one of its GPU has calls under way, by a call that makes or ends a communicator of that very GPU, which
//! all ranks make in one order with their others; or, whoever looks, when its GPU has no other. An abort is
//! no such call: a thread makes it that watches others. Where many wait on the shelf, such a call frees them
//! beside whatever runs, as NCCL's do: what that waits for ends if the ranks keep their order.
//!
//! Memory that another rank of this process still maps stays with its owner, so that none of them frees that
//! of another's GPU. What a graph holds that outlives its communicator goes with the graph, and replays that
//! are not ordered with calls (`CINCH_GRAPH_MIXING=0`) are not seen.

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
/// How long calls that end a communicator wait for its kernels, which were told to stop.
const STOPPING: Duration = Duration::from_secs(2);
/// How long calls that have something to free wait for those of other communicators.
const IDLING: Duration = Duration::from_secs(1);
/// Time between two looks at them.
const LOOK: Duration = Duration::from_millis(1);
/// Time between two looks at one that ends for itself.
const SELDOM: Duration = Duration::from_millis(50);
/// So many of a GPU wait for calls of others there.
const CROWD: usize = 8;

/// Threads that wait for other ranks.
static WAITING: Tally = Tally(AtomicU64::new(0));
/// Threads that free what they waited with, or are about to find that they must not.
static ENDING: Tally = Tally(AtomicU64::new(0));
/// Whether the process ends.
static EXITS: AtomicBool = AtomicBool::new(false);
/// Whether the end of the process comes here.
static EXPECTS_EXIT: AtomicBool = AtomicBool::new(false);
/// Communicators that end, each once. A thread may still wait with one, or a handle have it.
static SHELF: Guarded<Vec<Arc<Communicator>>> = Guarded::new(Vec::new());
/// Those whose handles are gone, and whose calls may go on.
static LEAVING: Guarded<Vec<Arc<Communicator>>> = Guarded::new(Vec::new());
/// Whether who waited last for calls of others did so for nothing: nobody waits then until something goes.
static IN_VAIN: AtomicBool = AtomicBool::new(false);
/// How often [`sweep`] was called.
static SWEEPS: AtomicU64 = AtomicU64::new(0);

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
            leave_behind(communicator);
        }
    });
    spawned.map(drop)
}

/// Lets `communicator`, which has retired, end when the other ranks have retired, too.
pub(crate) fn outlast(communicator: Arc<Communicator>) {
    shelve(communicator.clone());
    if !EXITS.load(Ordering::SeqCst) {
        // Where there can be no thread nobody waits for the others.
        let _ = keep(move || Some(communicator));
    }
}

/// A communicator whose handle is gone, for as long as its calls may go on.
pub(crate) struct Leaving(Arc<Communicator>);

impl Leaving {
    pub(crate) fn new(communicator: Arc<Communicator>) -> Leaving {
        LEAVING.with(|leaving| leaving.push(communicator.clone()));
        Leaving(communicator)
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let is_this = |one: &Arc<Communicator>| Arc::ptr_eq(one, &self.0);
        let found = LEAVING.with(|leaving| {
            let at = leaving.iter().position(is_this)?;
            Some(leaving.swap_remove(at))
        });
        // Out here, and never the last: who made this has another.
        drop(found);
    }
}

/// Lets `communicator` end, which nobody uses any more but calls on other threads: soon, if its kernels
/// stop and other communicators of its GPU have no calls under way; else later. For calls that end it in one
/// order with the others of this rank.
pub(crate) fn part_with(communicator: Arc<Communicator>) {
    let device = communicator.config().device;
    stop(&communicator);
    let_go(communicator, &[device]);
}

/// The same, for an abort.
pub(crate) fn cut_off(communicator: Arc<Communicator>) {
    stop(&communicator);
    let_go(communicator, &[]);
}

/// The same, for a thread that waits for nothing.
pub(crate) fn leave_behind(communicator: Arc<Communicator>) {
    let_go(communicator, &[]);
}

/// Waits for the kernels of a communicator, which were told to stop: the program may take its buffers back.
fn stop(communicator: &Arc<Communicator>) {
    // One that others hold is in a call, or waits for other ranks.
    if communicator.gpu().is_some() && Arc::strong_count(communicator) == 1 {
        let _ = communicator.wait_stopped(STOPPING);
    }
}

fn let_go(communicator: Arc<Communicator>, ordered: &[DeviceChoice]) {
    let left = Arc::downgrade(&communicator);
    shelve(communicator);
    sweep(ordered);
    if !left.upgrade().is_some_and(|one| is_underway(&one)) || EXITS.load(Ordering::SeqCst) {
        return;
    }
    // A call on another thread holds it, or a kernel runs on behind other work: nobody else may look again.
    let thread = std::thread::Builder::new().name("cinch-leave".into());
    let looks = move || {
        block_signals();
        let has_exited = || EXITS.load(Ordering::SeqCst);
        while !has_exited() && left.upgrade().is_some_and(|one| is_underway(&one)) {
            std::thread::sleep(SELDOM);
        }
        let _ending = ENDING.enter();
        sweep(&[]);
    };
    // Without a thread it goes when a call looks.
    let _ = thread.spawn(looks);
}

/// Whether `one`, which is on the shelf and in the hands of who asks, is in others', or its kernels run.
fn is_underway(one: &Arc<Communicator>) -> bool {
    Arc::strong_count(one) > 2 || !one.is_idle()
}

/// Frees what nobody needs any more of these devices. For calls that make or end communicators there.
pub(crate) fn clear_away(devices: &[DeviceChoice]) {
    if devices.is_empty() {
        return;
    }
    ENDING.settle(FREEING);
    let until = Instant::now() + IDLING;
    while sweep(devices) && !IN_VAIN.load(Ordering::Relaxed) {
        if Instant::now() >= until {
            IN_VAIN.store(true, Ordering::Relaxed);
        }
        std::thread::sleep(LOOK);
    }
}

fn shelve(communicator: Arc<Communicator>) {
    let mut one = Some(communicator);
    SHELF.with(|shelf| {
        let is_this =
            |other: &Arc<Communicator>| one.as_ref().is_some_and(|one| Arc::ptr_eq(one, other));
        if !shelf.iter().any(is_this) {
            shelf.extend(one.take());
        }
    });
}

/// Ends those on the shelf that may go. Returns whether others would, but for calls of communicators that
/// are under way on `ordered` devices: those that the calling thread's calls are in order with.
fn sweep(ordered: &[DeviceChoice]) -> bool {
    let mut call = SWEEPS.fetch_add(1, Ordering::SeqCst) + 1;
    loop {
        let (mut is_kept, mut looks_again) = (false, false);
        for _ in 0..SHELF.with(|shelf| shelf.len()) {
            // It is too late then: the driver may have ended.
            if EXITS.load(Ordering::SeqCst) {
                return false;
            }
            let first = |shelf: &mut Vec<_>| (!shelf.is_empty()).then(|| shelf.remove(0));
            let Some(one) = SHELF.with(first) else {
                break;
            };
            if one.check_process().is_err() {
                // The parent's. The driver of this process knows nothing of it.
                std::mem::forget(one);
                continue;
            }
            looks_again |= Arc::strong_count(&one) == 1 && one.part_from_near();
            let fate = fate_of(&one, ordered);
            is_kept |= fate == Fate::StaysForOthers;
            if fate != Fate::Goes {
                shelve(one);
                continue;
            }
            // Who looks at it just now must not be the one that frees it.
            match Arc::try_unwrap(one) {
                Ok(over) => {
                    IN_VAIN.store(false, Ordering::Relaxed);
                    drop(over);
                }
                Err(one) => shelve(one),
            }
        }
        // Who looked meanwhile missed what was in these hands.
        let last = SWEEPS.load(Ordering::SeqCst);
        if std::mem::replace(&mut call, last) == last && !looks_again {
            return is_kept;
        }
    }
}

fn fate_of(one: &Arc<Communicator>, ordered: &[DeviceChoice]) -> Fate {
    let device = one.config().device;
    let state = State {
        is_held: Arc::strong_count(one) > 1,
        is_on_gpu: one.gpu().is_some(),
        is_idle: one.is_idle(),
        is_lent: one.is_lent(),
        is_crowded: SHELF.with(|shelf| {
            let of_device = shelf.iter().filter(|one| one.config().device == device);
            of_device.count() >= CROWD
        }),
    };
    // Last of all: what they say holds for a moment.
    state.fate(&users(device), ordered.contains(&device))
}

/// Of each communicator that may make calls on `device`: whether it has some under way.
fn users(device: DeviceChoice) -> Vec<bool> {
    if device == DeviceChoice::Host {
        return Vec::new();
    }
    let all = comm::all().into_iter();
    let mut users: Vec<bool> = all
        .filter(|comm| comm.device() == device && comm.is_in_use())
        .map(|comm| comm.is_busy())
        .collect();
    let mut leaving = LEAVING.with(|leaving| leaving.clone());
    leaving.retain(|one| one.config().device == device && one.check_process().is_ok());
    users.extend(leaving.iter().map(|one| !one.is_idle()));
    users
}

/// What there is to say of a communicator on the shelf.
#[derive(Clone, Copy)]
struct State {
    /// Whether something else holds it: it would not end here.
    is_held: bool,
    is_on_gpu: bool,
    is_idle: bool,
    /// Whether other ranks of this process map its memory: they would free it.
    is_lent: bool,
    /// Whether many of its GPU are on the shelf.
    is_crowded: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Goes,
    Stays,
    StaysForOthers,
}

impl State {
    /// `others` are those of its device, and whether they have calls under way.
    fn fate(self, others: &[bool], is_ordered: bool) -> Fate {
        match self {
            State { is_held: true, .. } => Fate::Stays,
            State {
                is_on_gpu: false, ..
            } => Fate::Goes,
            State { is_idle: false, .. } | State { is_lent: true, .. } => Fate::Stays,
            _ if others.is_empty() => Fate::Goes,
            _ if !is_ordered => Fate::Stays,
            _ if others.contains(&true) && !self.is_crowded => Fate::StaysForOthers,
            _ => Fate::Goes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_goes_beside_a_kernel_that_may_wait_for_this_thread() {
        let over = State {
            is_held: false,
            is_on_gpu: true,
            is_idle: true,
            is_lent: false,
            is_crowded: false,
        };
        // Alone on its GPU; beside one that rests; beside one whose kernels run.
        for (others, by_anybody, by_a_call) in [
            (&[][..], Fate::Goes, Fate::Goes),
            (&[false], Fate::Stays, Fate::Goes),
            (&[false, true], Fate::Stays, Fate::StaysForOthers),
        ] {
            assert_eq!(over.fate(others, false), by_anybody);
            assert_eq!(over.fate(others, true), by_a_call);
            for is_ordered in [false, true] {
                let held = State {
                    is_held: true,
                    ..over
                };
                let runs = State {
                    is_idle: false,
                    ..over
                };
                let lent = State {
                    is_lent: true,
                    is_crowded: true,
                    ..over
                };
                let on_host = State {
                    is_on_gpu: false,
                    ..runs
                };
                assert_eq!(lent.fate(others, is_ordered), Fate::Stays);
                assert_eq!(held.fate(others, is_ordered), Fate::Stays);
                assert_eq!(runs.fate(others, is_ordered), Fate::Stays);
                assert_eq!(on_host.fate(others, is_ordered), Fate::Goes);
            }
        }
        let crowded = State {
            is_crowded: true,
            ..over
        };
        assert_eq!(crowded.fate(&[true], false), Fate::Stays);
        assert_eq!(crowded.fate(&[true], true), Fate::Goes);
    }

    /// One that is on the shelf and in other hands goes with the last of them.
    #[test]
    fn what_nobody_holds_goes_once() {
        let config = cinch::Config::default();
        let id = cinch::UniqueId::create_for_one_host(&config).unwrap();
        let held = Arc::new(Communicator::init(&id, 0, 1, config).unwrap());
        let seen = Arc::downgrade(&held);
        let leaving = Leaving::new(held.clone());
        leave_behind(held.clone());
        leave_behind(held.clone());
        drop(leaving);
        sweep(&[]);
        assert_eq!(Arc::strong_count(&held), 2, "this one and the shelf's");
        leave_behind(held);
        assert!(seen.upgrade().is_none());
    }

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
