//! What is left of communicators that were finalized or destroyed: memory that other ranks may still
//! write to, and a thread each that waits for those.
//!
//! No call waits for such a thread. The end of the process does for a moment, so that ranks which end
//! together part in good order, and so that nothing is given back to a driver that ends itself; what
//! other ranks keep waiting then goes with the process, which they know to have retired.
//!
//! **When memory of a GPU goes.** The driver waits for all kernels of a GPU before it frees memory,
//! and keeps launches there waiting meanwhile (seen with driver 580), for one of which those kernels may
//! wait. So a communicator that nobody uses any more is put on a deferred, and goes from there when no other
//! one of its GPU has calls under way, by a call that makes or ends a communicator of that very GPU, which
//! all ranks make in one order with their others; or, whoever looks, when its GPU has no other. An abort is
//! no such call: a thread makes it that watches others. Where many wait on the deferred, such a call frees them
//! beside whatever runs, as NCCL's do: what that waits for ends if the ranks keep their order.
//!
//! Memory that another rank of this process still maps stays with its owner, so that none of them frees that
//! of another's GPU. What a graph holds that outlives its communicator goes with the graph, and replays that
//! are not ordered with calls (`CINCH_GRAPH_MIXING=0`) are not seen.

use crate::comm;
use cinch::Communicator;
use cinch::sys::fork_safe::ForkSafe;
use cinch::sys::process::block_signals;
use cinch::types::DeviceChoice;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long the end of the process waits for other ranks.
const PEER_CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long it, or the making of a communicator, waits for memory that is being freed.
const FREE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long calls that end a communicator wait for its kernels, which were told to stop.
const KERNEL_STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// How long calls that have something to free wait for those of other communicators.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time between two looks at them.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Time between two looks at one that ends for itself.
const BACKGROUND_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// So many of a GPU wait for calls of others there.
const MAX_DEFERRED: usize = 8;

/// Threads that wait for other ranks.
static CLOSING_THREADS: ThreadCount = ThreadCount(AtomicU64::new(0));
/// Threads that free what they waited with, or are about to find that they must not.
static FREEING_THREADS: ThreadCount = ThreadCount(AtomicU64::new(0));
/// Whether the process ends.
static IS_EXITING: AtomicBool = AtomicBool::new(false);
/// Whether the end of the process comes here.
static EXIT_HANDLER_SET: AtomicBool = AtomicBool::new(false);
/// Communicators that end, each once. A thread may still wait with one, or a handle have it.
static DEFERRED: ForkSafe<Vec<Arc<Communicator>>> = ForkSafe::new(Vec::new());
/// Those whose handles are gone, and whose calls may go on.
static IN_TEARDOWN: ForkSafe<Vec<Arc<Communicator>>> = ForkSafe::new(Vec::new());
/// Whether who waited last for calls of others did so for nothing: nobody waits then until something goes.
static LAST_WAIT_FAILED: AtomicBool = AtomicBool::new(false);
/// How often [`reap`] was called.
static REAPS: AtomicU64 = AtomicU64::new(0);

/// Counts threads of a process: its number in the upper half. A child of a fork has none of them, and
/// finds no lock here that it would wait for.
struct ThreadCount(AtomicU64);

impl ThreadCount {
    fn count(&self) -> u64 {
        match self.0.load(Ordering::SeqCst) {
            tally if tally >> 32 == u64::from(std::process::id()) => tally & u64::from(u32::MAX),
            _ => 0,
        }
    }

    /// Counts one until the returned value is dropped.
    fn enter(&'static self) -> CountedThread {
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
        CountedThread(self)
    }

    /// Waits until there are none, at most `timeout`.
    fn wait_zero(&self, timeout: Duration) {
        let until = Instant::now() + timeout;
        while self.count() > 0 && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

struct CountedThread(&'static ThreadCount);

impl Drop for CountedThread {
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
    CLOSING_THREADS.wait_zero(PEER_CLOSE_TIMEOUT);
    IS_EXITING.store(true, Ordering::SeqCst);
    FREEING_THREADS.wait_zero(FREE_TIMEOUT);
}

/// Runs `close` on a thread of its own, and lets the communicator that it returns, which has retired,
/// end when that of the other ranks have.
///
/// # Errors
/// The system's, if there can be no thread: nothing has run then.
pub(crate) fn close_in_background(
    close: impl FnOnce() -> Option<Arc<Communicator>> + Send + 'static,
) -> std::io::Result<()> {
    // Behind the driver's own handler, which was there first, if there is one: it runs before that.
    if !EXIT_HANDLER_SET.swap(true, Ordering::Relaxed) {
        let _ = atexit(at_exit);
    }
    let waiting = CLOSING_THREADS.enter();
    let thread = std::thread::Builder::new().name("cinch-leave".into());
    let spawned = thread.spawn(move || {
        block_signals();
        let communicator = close();
        if let Some(communicator) = &communicator {
            communicator.wait_closed();
        }
        let _ending = FREEING_THREADS.enter();
        drop(waiting);
        if let Some(communicator) = communicator {
            free_in_background(communicator);
        }
    });
    spawned.map(drop)
}

/// Lets `communicator`, which has retired, end when the other ranks have retired, too.
pub(crate) fn free_when_closed(communicator: Arc<Communicator>) {
    enqueue(communicator.clone());
    if !IS_EXITING.load(Ordering::SeqCst) {
        // Where there can be no thread nobody waits for the others.
        let _ = close_in_background(move || Some(communicator));
    }
}

/// A communicator whose handle is gone, for as long as its calls may go on.
pub(crate) struct TeardownGuard(Arc<Communicator>);

impl TeardownGuard {
    pub(crate) fn new(communicator: Arc<Communicator>) -> TeardownGuard {
        IN_TEARDOWN.with(|guard| guard.push(communicator.clone()));
        TeardownGuard(communicator)
    }
}

impl Drop for TeardownGuard {
    fn drop(&mut self) {
        let is_this = |one: &Arc<Communicator>| Arc::ptr_eq(one, &self.0);
        let found = IN_TEARDOWN.with(|guard| {
            let at = guard.iter().position(is_this)?;
            Some(guard.swap_remove(at))
        });
        // Out here, and never the last: who made this has another.
        drop(found);
    }
}

/// Lets `communicator` end, which nobody uses any more but calls on other threads: soon, if its kernels
/// stop and other communicators of its GPU have no calls under way; else later. For calls that end it in one
/// order with the others of this rank.
pub(crate) fn free_on_destroy(communicator: Arc<Communicator>) {
    let device = communicator.config().device;
    wait_kernels(&communicator);
    free_when_unused(communicator, &[device]);
}

/// The same, for an abort.
pub(crate) fn free_on_abort(communicator: Arc<Communicator>) {
    wait_kernels(&communicator);
    free_when_unused(communicator, &[]);
}

/// The same, for a thread that waits for nothing.
pub(crate) fn free_in_background(communicator: Arc<Communicator>) {
    free_when_unused(communicator, &[]);
}

/// Waits for the kernels of a communicator, which were told to stop: the program may take its buffers back.
fn wait_kernels(communicator: &Arc<Communicator>) {
    // One that others hold is in a call, or waits for other ranks.
    if communicator.gpu().is_some() && Arc::strong_count(communicator) == 1 {
        let _ = communicator.wait_stopped(KERNEL_STOP_TIMEOUT);
    }
}

fn free_when_unused(communicator: Arc<Communicator>, ordered: &[DeviceChoice]) {
    let left = Arc::downgrade(&communicator);
    enqueue(communicator);
    reap(ordered);
    if !left.upgrade().is_some_and(|one| is_underway(&one)) || IS_EXITING.load(Ordering::SeqCst) {
        return;
    }
    // A call on another thread holds it, or a kernel runs on behind other work: nobody else may look again.
    let thread = std::thread::Builder::new().name("cinch-leave".into());
    let poll = move || {
        block_signals();
        let has_exited = || IS_EXITING.load(Ordering::SeqCst);
        while !has_exited() && left.upgrade().is_some_and(|one| is_underway(&one)) {
            std::thread::sleep(BACKGROUND_POLL_INTERVAL);
        }
        let _ending = FREEING_THREADS.enter();
        reap(&[]);
    };
    // Without a thread it goes when a call looks.
    let _ = thread.spawn(poll);
}

/// Whether `one`, which is on the deferred and in the hands of who asks, is in others', or its kernels run.
fn is_underway(one: &Arc<Communicator>) -> bool {
    Arc::strong_count(one) > 2 || !one.is_idle()
}

/// Frees what nobody needs any more of these devices. For calls that make or end communicators there.
pub(crate) fn reap_devices(devices: &[DeviceChoice]) {
    if devices.is_empty() {
        return;
    }
    FREEING_THREADS.wait_zero(FREE_TIMEOUT);
    let until = Instant::now() + IDLE_TIMEOUT;
    while reap(devices) && !LAST_WAIT_FAILED.load(Ordering::Relaxed) {
        if Instant::now() >= until {
            LAST_WAIT_FAILED.store(true, Ordering::Relaxed);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn enqueue(communicator: Arc<Communicator>) {
    let mut one = Some(communicator);
    DEFERRED.with(|deferred| {
        let is_this =
            |other: &Arc<Communicator>| one.as_ref().is_some_and(|one| Arc::ptr_eq(one, other));
        if !deferred.iter().any(is_this) {
            deferred.extend(one.take());
        }
    });
}

/// Ends those on the deferred that may go. Returns whether others would, but for calls of communicators that
/// are under way on `ordered` devices: those that the calling thread's calls are in order with.
fn reap(ordered: &[DeviceChoice]) -> bool {
    let mut call = REAPS.fetch_add(1, Ordering::SeqCst) + 1;
    loop {
        let (mut is_kept, mut reap_again) = (false, false);
        for _ in 0..DEFERRED.with(|deferred| deferred.len()) {
            // It is too late then: the driver may have ended.
            if IS_EXITING.load(Ordering::SeqCst) {
                return false;
            }
            let first = |deferred: &mut Vec<_>| (!deferred.is_empty()).then(|| deferred.remove(0));
            let Some(one) = DEFERRED.with(first) else {
                break;
            };
            if one.check_process().is_err() {
                // The parent's. The driver of this process knows nothing of it.
                std::mem::forget(one);
                continue;
            }
            reap_again |= Arc::strong_count(&one) == 1 && one.unmap_local_peers();
            let decision = decide(&one, ordered);
            is_kept |= decision == FreeDecision::WaitForCalls;
            if decision != FreeDecision::Free {
                enqueue(one);
                continue;
            }
            // Who looks at it just now must not be the one that frees it.
            match Arc::try_unwrap(one) {
                Ok(over) => {
                    LAST_WAIT_FAILED.store(false, Ordering::Relaxed);
                    drop(over);
                }
                Err(one) => enqueue(one),
            }
        }
        // Who looked meanwhile missed what was in these hands.
        let last = REAPS.load(Ordering::SeqCst);
        if std::mem::replace(&mut call, last) == last && !reap_again {
            return is_kept;
        }
    }
}

fn decide(one: &Arc<Communicator>, ordered: &[DeviceChoice]) -> FreeDecision {
    let device = one.config().device;
    let state = FreeConditions {
        is_held: Arc::strong_count(one) > 1,
        is_on_gpu: one.gpu().is_some(),
        is_idle: one.is_idle(),
        is_mapped_by_peers: one.is_mapped_by_peers(),
        is_queue_full: DEFERRED.with(|deferred| {
            let of_device = deferred.iter().filter(|one| one.config().device == device);
            of_device.count() >= MAX_DEFERRED
        }),
    };
    // Last of all: what they say holds for a moment.
    state.decision(&users(device), ordered.contains(&device))
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
    let mut guard = IN_TEARDOWN.with(|guard| guard.clone());
    guard.retain(|one| one.config().device == device && one.check_process().is_ok());
    users.extend(guard.iter().map(|one| !one.is_idle()));
    users
}

/// What there is to say of a communicator on the deferred.
#[derive(Clone, Copy)]
struct FreeConditions {
    /// Whether something else holds it: it would not end here.
    is_held: bool,
    is_on_gpu: bool,
    is_idle: bool,
    /// Whether other ranks of this process map its memory: they would free it.
    is_mapped_by_peers: bool,
    /// Whether many of its GPU are on the deferred.
    is_queue_full: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FreeDecision {
    Free,
    Keep,
    WaitForCalls,
}

impl FreeConditions {
    /// `others` are those of its device, and whether they have calls under way.
    fn decision(self, others: &[bool], is_ordered: bool) -> FreeDecision {
        match self {
            FreeConditions { is_held: true, .. } => FreeDecision::Keep,
            FreeConditions {
                is_on_gpu: false, ..
            } => FreeDecision::Free,
            FreeConditions { is_idle: false, .. }
            | FreeConditions {
                is_mapped_by_peers: true,
                ..
            } => FreeDecision::Keep,
            _ if others.is_empty() => FreeDecision::Free,
            _ if !is_ordered => FreeDecision::Keep,
            _ if others.contains(&true) && !self.is_queue_full => FreeDecision::WaitForCalls,
            _ => FreeDecision::Free,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_goes_beside_a_kernel_that_may_wait_for_this_thread() {
        let over = FreeConditions {
            is_held: false,
            is_on_gpu: true,
            is_idle: true,
            is_mapped_by_peers: false,
            is_queue_full: false,
        };
        // Alone on its GPU; beside one that rests; beside one whose kernels run.
        for (others, by_anybody, by_a_call) in [
            (&[][..], FreeDecision::Free, FreeDecision::Free),
            (&[false], FreeDecision::Keep, FreeDecision::Free),
            (
                &[false, true],
                FreeDecision::Keep,
                FreeDecision::WaitForCalls,
            ),
        ] {
            assert_eq!(over.decision(others, false), by_anybody);
            assert_eq!(over.decision(others, true), by_a_call);
            for is_ordered in [false, true] {
                let held = FreeConditions {
                    is_held: true,
                    ..over
                };
                let runs = FreeConditions {
                    is_idle: false,
                    ..over
                };
                let lent = FreeConditions {
                    is_mapped_by_peers: true,
                    is_queue_full: true,
                    ..over
                };
                let on_host = FreeConditions {
                    is_on_gpu: false,
                    ..runs
                };
                assert_eq!(lent.decision(others, is_ordered), FreeDecision::Keep);
                assert_eq!(held.decision(others, is_ordered), FreeDecision::Keep);
                assert_eq!(runs.decision(others, is_ordered), FreeDecision::Keep);
                assert_eq!(on_host.decision(others, is_ordered), FreeDecision::Free);
            }
        }
        let crowded = FreeConditions {
            is_queue_full: true,
            ..over
        };
        assert_eq!(crowded.decision(&[true], false), FreeDecision::Keep);
        assert_eq!(crowded.decision(&[true], true), FreeDecision::Free);
    }

    /// One that is on the deferred and in other hands goes with the last of them.
    #[test]
    fn what_nobody_holds_goes_once() {
        let config = cinch::Config::default();
        let id = cinch::UniqueId::create_for_one_host(&config).unwrap();
        let held = Arc::new(Communicator::init(&id, 0, 1, config).unwrap());
        let seen = Arc::downgrade(&held);
        let guard = TeardownGuard::new(held.clone());
        free_in_background(held.clone());
        free_in_background(held.clone());
        drop(guard);
        reap(&[]);
        assert_eq!(Arc::strong_count(&held), 2, "this one and the deferred's");
        free_in_background(held);
        assert!(seen.upgrade().is_none());
    }

    #[test]
    fn a_tally_counts_threads_of_this_process_only() {
        static TALLY: ThreadCount = ThreadCount(AtomicU64::new(7));
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
        TALLY.wait_zero(Duration::from_secs(60));
    }
}
