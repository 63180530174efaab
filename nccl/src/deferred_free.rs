//! Decides when communicators that were finalized, destroyed or aborted are freed: other ranks may still
//! write to their memory.
//!
//! A background thread per communicator waits for the other ranks to close, so that no call has to. Process
//! exit waits for these threads for a limited time. Ranks that exit together then close in order, and nothing
//! is freed while the driver shuts down. The other ranks know by then that this rank has closed.
//!
//! **When GPU memory is freed.** The driver waits for all kernels of a GPU before it frees memory, and holds
//! back new launches meanwhile; those kernels may wait for such a launch. So an unused communicator is
//! queued, and freed in one of two cases:
//! - no other communicator uses its GPU;
//! - no other communicator of the GPU has running calls, and the calling function creates or ends a
//!   communicator there. All ranks call such functions in the same order as their other calls. An abort is
//!   not ordered, since a watchdog thread may call it.
//!
//! If the queue of a GPU is full, an ordered call frees memory beside running calls, as NCCL does: the
//! running calls end if all ranks keep the order.
//!
//! A communicator whose memory another rank of this process maps stays queued, so that no rank frees memory
//! of another rank's GPU. Memory that a CUDA graph uses is freed with the graph. Graph launches that are not
//! ordered with calls (`CINCH_GRAPH_MIXING=0`) are not considered.

use crate::comm;
use cinch::Communicator;
use cinch::sys::deferred_drop::{DeferredQueue, drop_when};
use cinch::sys::fork_safe::ForkSafe;
use cinch::sys::process::block_signals;
use cinch::types::DeviceChoice;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest time that the exit of the process waits for other ranks to close.
const PEER_CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest time that the exit of the process, or the creation of a communicator, waits for running
/// frees.
const FREE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time that a call which ends a communicator waits for the communicator's kernels, which
/// were told to stop.
const KERNEL_STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time that an ordered call waits for calls of other communicators, in order to free
/// queued communicators.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval at which an ordered call checks whether other communicators have running calls.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Number of queued communicators of a GPU from which on ordered calls free them without waiting.
const MAX_DEFERRED: usize = 8;

/// Number of threads that wait for other ranks to close.
static CLOSING_THREADS: ThreadCount = ThreadCount(AtomicU64::new(0));
/// Number of threads that free communicators, or check whether they may.
static FREEING_THREADS: ThreadCount = ThreadCount(AtomicU64::new(0));
/// Whether the exit of the process has begun.
static IS_EXITING: AtomicBool = AtomicBool::new(false);
/// Whether [`at_exit`] was registered.
static EXIT_HANDLER_SET: AtomicBool = AtomicBool::new(false);
/// Queue of communicators to free, without duplicates. A thread may still hold one of them, or a
/// handle refer to it.
static DEFERRED: DeferredQueue<Arc<Communicator>> = DeferredQueue::new(Arc::ptr_eq);
/// Communicators whose handles were removed while their calls may still run.
static IN_TEARDOWN: ForkSafe<Vec<Arc<Communicator>>> = ForkSafe::new(Vec::new());
/// Whether the last ordered call timed out while waiting. If so, no call waits until a communicator
/// was freed.
static LAST_WAIT_FAILED: AtomicBool = AtomicBool::new(false);

/// Number of threads, and in the upper half of the word the process to which they belong.
///
/// A forked child has none of its parent's threads. It must not wait for a lock that they hold, so
/// the number is atomic.
struct ThreadCount(AtomicU64);

impl ThreadCount {
    fn count(&self) -> u64 {
        match self.0.load(Ordering::SeqCst) {
            word if word >> 32 == u64::from(std::process::id()) => word & u64::from(u32::MAX),
            _ => 0,
        }
    }

    /// Counts a thread until the returned value is dropped.
    fn enter(&'static self) -> CountedThread {
        let own = u64::from(std::process::id()) << 32;
        let next = |word: u64| Some(if word >> 32 == own >> 32 { word } else { own } + 1);
        let _ = self
            .0
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        CountedThread(self)
    }

    /// Waits until the count is 0, but at most for `timeout`.
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
    /// Registers an exit handler with the C library.
    safe fn atexit(handler: extern "C" fn()) -> c_int;
}

extern "C" fn at_exit() {
    CLOSING_THREADS.wait_zero(PEER_CLOSE_TIMEOUT);
    IS_EXITING.store(true, Ordering::SeqCst);
    FREEING_THREADS.wait_zero(FREE_TIMEOUT);
}

/// Runs `close` on a new thread. It returns a closed communicator, which the thread frees once the
/// other ranks have closed.
///
/// # Errors
/// Error of the system if no thread can start; `close` has not run then.
pub(crate) fn close_in_background(
    close: impl FnOnce() -> Option<Arc<Communicator>> + Send + 'static,
) -> std::io::Result<()> {
    // Exit handlers run in reverse order of registration. cinch's handler is registered after the
    // driver's, so it runs before.
    if !EXIT_HANDLER_SET.swap(true, Ordering::Relaxed) {
        let _ = atexit(at_exit);
    }
    let closing = CLOSING_THREADS.enter();
    let thread = std::thread::Builder::new().name("cinch-leave".into());
    let spawned = thread.spawn(move || {
        block_signals();
        let communicator = close();
        if let Some(communicator) = &communicator {
            communicator.wait_closed();
        }
        let _freeing = FREEING_THREADS.enter();
        drop(closing);
        if let Some(communicator) = communicator {
            free_in_background(communicator);
        }
    });
    spawned.map(drop)
}

/// Frees `communicator`, which this rank has closed, once the other ranks have closed it.
pub(crate) fn free_when_closed(communicator: Arc<Communicator>) {
    DEFERRED.push(communicator.clone());
    if !IS_EXITING.load(Ordering::SeqCst) {
        // If no thread starts, the communicator is freed without waiting for the other ranks.
        let _ = close_in_background(move || Some(communicator));
    }
}

/// Keeps a communicator whose handle was removed among the users of its GPU while its calls may
/// run.
pub(crate) struct TeardownGuard(Arc<Communicator>);

impl TeardownGuard {
    pub(crate) fn new(communicator: Arc<Communicator>) -> TeardownGuard {
        IN_TEARDOWN.with(|all| all.push(communicator.clone()));
        TeardownGuard(communicator)
    }
}

impl Drop for TeardownGuard {
    fn drop(&mut self) {
        let is_this = |one: &Arc<Communicator>| Arc::ptr_eq(one, &self.0);
        let found = IN_TEARDOWN.with(|all| {
            let at = all.iter().position(is_this)?;
            Some(all.swap_remove(at))
        });
        // Drops `found` outside of the lock; `self.0` still holds the communicator.
        drop(found);
    }
}

/// Frees `communicator`, which only calls on other threads still use. It is freed now if its kernels stop and
/// its GPU allows it, otherwise later. Only functions that all ranks call in one order with their other calls
/// may use this.
pub(crate) fn free_on_destroy(communicator: Arc<Communicator>) {
    let device = communicator.config().device;
    wait_kernels(&communicator);
    free_when_unused(communicator, &[device]);
}

/// Frees `communicator` as [`free_on_destroy`] does, for an abort, which ranks may call in any
/// order with other calls.
pub(crate) fn free_on_abort(communicator: Arc<Communicator>) {
    wait_kernels(&communicator);
    free_when_unused(communicator, &[]);
}

/// Frees `communicator` from a background thread, without waiting for the communicator's kernels.
pub(crate) fn free_in_background(communicator: Arc<Communicator>) {
    free_when_unused(communicator, &[]);
}

/// Waits for the communicator's kernels, which were told to stop, because the program may reuse its buffers.
fn wait_kernels(communicator: &Arc<Communicator>) {
    // If another thread holds the communicator, it is in a call, or waits for other ranks.
    if communicator.gpu().is_some() && Arc::strong_count(communicator) == 1 {
        let _ = communicator.wait_stopped(KERNEL_STOP_TIMEOUT);
    }
}

fn free_when_unused(communicator: Arc<Communicator>, ordered: &[DeviceChoice]) {
    let queued = Arc::downgrade(&communicator);
    DEFERRED.push(communicator);
    reap(ordered);
    let is_used = move || {
        !IS_EXITING.load(Ordering::SeqCst) && queued.upgrade().is_some_and(|one| is_underway(&one))
    };
    if is_used() {
        // A call on another thread may hold the communicator, or a kernel still run, and no later
        // call may come to free it.
        drop_when(ReapOnDrop, move || !is_used());
    }
}

/// Frees queued communicators in the background when it is dropped.
struct ReapOnDrop;

impl Drop for ReapOnDrop {
    fn drop(&mut self) {
        let freeing = FREEING_THREADS.enter();
        // Freeing waits for kernels and must not delay other deferred drops, so it runs on a thread of its
        // own.
        let thread = std::thread::Builder::new().name("cinch-leave".into());
        let spawned = thread.spawn(move || {
            block_signals();
            reap(&[]);
            drop(freeing);
        });
        // If no thread starts, a later call frees the communicators.
        drop(spawned);
    }
}

/// Returns whether another holder than the queue and the caller keeps `one`, or its kernels run.
fn is_underway(one: &Arc<Communicator>) -> bool {
    Arc::strong_count(one) > 2 || !one.is_idle()
}

/// Frees queued communicators of `devices`. Calls that create or end communicators on these devices
/// call this.
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

/// Frees the queued communicators that may be freed. `ordered` lists the devices on which all ranks make the
/// caller's call in one order. Returns whether a communicator is kept only because others have running calls.
fn reap(ordered: &[DeviceChoice]) -> bool {
    loop {
        let (mut waits_for_calls, mut has_unmapped) = (false, false);
        DEFERRED.sweep(|one| {
            // The driver may have shut down, so nothing may be freed any more.
            if IS_EXITING.load(Ordering::SeqCst) {
                return Some(one);
            }
            has_unmapped |= Arc::strong_count(&one) == 1 && one.unmap_local_peers();
            let decision = decide(&one, ordered);
            waits_for_calls |= decision == FreeDecision::WaitForCalls;
            if decision != FreeDecision::Free {
                return Some(one);
            }
            // If another thread holds a reference for a moment, dropping `one` would leave the
            // freeing to that thread. So `one` stays queued then.
            let unused = match Arc::try_unwrap(one) {
                Ok(unused) => unused,
                Err(one) => return Some(one),
            };
            LAST_WAIT_FAILED.store(false, Ordering::Relaxed);
            drop(unused);
            None
        });
        // Unmapping memory may allow other queued communicators to be freed, so the loop checks
        // again.
        if !has_unmapped {
            return waits_for_calls;
        }
    }
}

fn decide(one: &Arc<Communicator>, ordered: &[DeviceChoice]) -> FreeDecision {
    let device = one.config().device;
    let is_of_device = |queued: &Arc<Communicator>| queued.config().device == device;
    let conditions = FreeConditions {
        is_held: Arc::strong_count(one) > 1,
        is_on_gpu: one.gpu().is_some(),
        is_idle: one.is_idle(),
        is_mapped_by_peers: one.is_mapped_by_peers(),
        is_queue_full: DEFERRED.count(is_of_device) >= MAX_DEFERRED,
    };
    // Whether other users have running calls changes often, so it is read last.
    conditions.decision(&users(device), ordered.contains(&device))
}

/// Returns an entry for each communicator that may make calls on `device`: whether its calls run.
fn users(device: DeviceChoice) -> Vec<bool> {
    if device == DeviceChoice::Host {
        return Vec::new();
    }
    let all = comm::all().into_iter();
    let mut users: Vec<bool> = all
        .filter(|comm| comm.device() == device && comm.is_in_use())
        .map(|comm| comm.is_busy())
        .collect();
    let mut in_teardown = IN_TEARDOWN.with(|all| all.clone());
    in_teardown.retain(|one| one.config().device == device && one.check_process().is_ok());
    users.extend(in_teardown.iter().map(|one| !one.is_idle()));
    users
}

/// The facts on which freeing a queued communicator depends.
#[derive(Clone, Copy)]
struct FreeConditions {
    /// Whether another thread holds the communicator, so that dropping it would not free it.
    is_held: bool,
    is_on_gpu: bool,
    is_idle: bool,
    /// Whether other ranks of this process map the communicator's memory.
    is_mapped_by_peers: bool,
    /// Whether [`MAX_DEFERRED`] communicators of the GPU are queued.
    is_queue_full: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FreeDecision {
    Free,
    Keep,
    /// Keep the communicator until the running calls of other communicators have ended.
    WaitForCalls,
}

impl FreeConditions {
    /// Decides from these conditions. `users` has an entry for each other user of the GPU: whether
    /// its calls run.
    fn decision(self, users: &[bool], is_ordered: bool) -> FreeDecision {
        if self.is_held {
            return FreeDecision::Keep;
        }
        if !self.is_on_gpu {
            return FreeDecision::Free;
        }
        if !self.is_idle || self.is_mapped_by_peers {
            return FreeDecision::Keep;
        }
        match (users.is_empty(), is_ordered) {
            (true, _) => FreeDecision::Free,
            (false, false) => FreeDecision::Keep,
            (false, true) if users.contains(&true) && !self.is_queue_full => {
                FreeDecision::WaitForCalls
            }
            (false, true) => FreeDecision::Free,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn communicator_beside_running_kernel_is_kept() {
        let free = FreeConditions {
            is_held: false,
            is_on_gpu: true,
            is_idle: true,
            is_mapped_by_peers: false,
            is_queue_full: false,
        };
        // The GPU has no other user, an idle user, or a user whose kernels run.
        for (others, unordered, in_order) in [
            (&[][..], FreeDecision::Free, FreeDecision::Free),
            (&[false], FreeDecision::Keep, FreeDecision::Free),
            (
                &[false, true],
                FreeDecision::Keep,
                FreeDecision::WaitForCalls,
            ),
        ] {
            assert_eq!(free.decision(others, false), unordered);
            assert_eq!(free.decision(others, true), in_order);
            for is_ordered in [false, true] {
                let held = FreeConditions {
                    is_held: true,
                    ..free
                };
                let running = FreeConditions {
                    is_idle: false,
                    ..free
                };
                let mapped = FreeConditions {
                    is_mapped_by_peers: true,
                    is_queue_full: true,
                    ..free
                };
                let on_host = FreeConditions {
                    is_on_gpu: false,
                    ..running
                };
                assert_eq!(mapped.decision(others, is_ordered), FreeDecision::Keep);
                assert_eq!(held.decision(others, is_ordered), FreeDecision::Keep);
                assert_eq!(running.decision(others, is_ordered), FreeDecision::Keep);
                assert_eq!(on_host.decision(others, is_ordered), FreeDecision::Free);
            }
        }
        let full = FreeConditions {
            is_queue_full: true,
            ..free
        };
        assert_eq!(full.decision(&[true], false), FreeDecision::Keep);
        assert_eq!(full.decision(&[true], true), FreeDecision::Free);
    }

    #[test]
    fn held_communicator_is_freed_by_its_last_holder() {
        let config = cinch::Config::default();
        let id = cinch::UniqueId::create_for_one_host(&config).unwrap();
        let held = Arc::new(Communicator::init(&id, 0, 1, config).unwrap());
        let seen = Arc::downgrade(&held);
        let in_teardown = TeardownGuard::new(held.clone());
        free_in_background(held.clone());
        free_in_background(held.clone());
        drop(in_teardown);
        reap(&[]);
        assert_eq!(
            Arc::strong_count(&held),
            2,
            "this one and that of the queue"
        );
        free_in_background(held);
        assert!(seen.upgrade().is_none());
    }

    #[test]
    fn thread_count_ignores_threads_of_parent_process() {
        static COUNT: ThreadCount = ThreadCount(AtomicU64::new(7));
        assert_eq!(COUNT.count(), 0);
        let one = COUNT.enter();
        let two = COUNT.enter();
        assert_eq!(COUNT.count(), 2);
        drop(one);
        assert_eq!(COUNT.count(), 1);
        // Sets the count as a forked child finds it: its parent's, with the parent's process.
        COUNT.0.store(3, Ordering::SeqCst);
        drop(two);
        assert_eq!((COUNT.count(), COUNT.0.load(Ordering::SeqCst)), (0, 3));
        COUNT.wait_zero(Duration::from_secs(60));
    }
}
