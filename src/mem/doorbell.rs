//! The doorbell: a rank sleeps on a futex, and its peers wake it.
//!
//! Two words lie in the sleeper's memory: `sleeping` requests a ring, and `rings` is the futex word. The
//! protocol is Dekker's. The sleeper writes `sleeping` and then reads the message counters once more; a peer
//! writes its counter and then reads `sleeping`. A full fence between write and read on both sides
//! guarantees that at least one side sees the other's write.

use super::region::Region;
use crate::sync::atomic::{AtomicU32, Ordering, fence};
use crate::sys::futex;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a doorbell. Its words lie on separate pairs of cache lines, because peers read `sleeping` after
/// every message.
pub const DOORBELL_BYTES: usize = 256;

const SLEEPING: usize = 0;
const RINGS: usize = 128;

/// The waking end of a doorbell; every peer of the sleeper holds a clone.
#[derive(Debug, Clone)]
pub struct Ringer {
    fenced: bool,
    region: Arc<Region>,
    sleeping: *const AtomicU32,
    rings: *const AtomicU32,
}

// SAFETY: the pointers lead into `region`, which the ringer holds, to words that all sides access
// atomically.
unsafe impl Send for Ringer {}

impl Ringer {
    /// Makes a ringer for the doorbell at byte `at` of its owner's region. Without `fenced` it omits the fence,
    /// which costs as much as the message itself. A ring can then miss an owner that goes to sleep at the
    /// same moment, and the owner sleeps until its limit.
    ///
    /// # Panics
    /// If the doorbell is outside the region.
    pub fn new(region: Arc<Region>, at: usize, fenced: bool) -> Ringer {
        Ringer {
            fenced,
            sleeping: region.word(at + SLEEPING),
            rings: region.word(at + RINGS),
            region,
        }
    }

    /// Wakes the owner if it sleeps or is about to sleep. The caller has advanced a counter before.
    #[inline]
    pub fn ring(&self) {
        debug_assert!(self.region.bytes() >= DOORBELL_BYTES);
        // SAFETY: `region` keeps the words mapped.
        let (sleeping, rings) = unsafe { (&*self.sleeping, &*self.rings) };
        if must_wake(sleeping, rings, self.fenced) {
            // SAFETY: `region` keeps the futex word mapped.
            unsafe { futex::wake(self.rings.cast()) };
        }
    }
}

/// The sleeping end of a doorbell; each doorbell has one.
#[derive(Debug)]
pub struct Sleeper {
    region: Arc<Region>,
    at: usize,
    state: SleepState,
}

impl Sleeper {
    /// Makes the sleeper of the doorbell at byte `at` of this rank's region.
    ///
    /// # Panics
    /// If the doorbell is outside the region.
    pub fn new(region: Arc<Region>, at: usize) -> Sleeper {
        let _ = (region.word(at + SLEEPING), region.word(at + RINGS));
        Sleeper {
            region,
            at,
            state: SleepState::default(),
        }
    }

    /// Takes two calls to sleep. The first call announces the sleep and returns at once, and the caller scans
    /// its connections again. The second call in a row sleeps until a ring or until `limit` has passed. A
    /// peer that advances a counter after the scan rings.
    pub fn sleep(&mut self, limit: Duration) {
        let sleeping = self.region.word(self.at + SLEEPING);
        let rings = self.region.word(self.at + RINGS);
        if let Some(seen) = self.state.step(sleeping, rings) {
            // SAFETY: `region` keeps the futex word mapped.
            unsafe { futex::wait(std::ptr::from_ref(rings).cast(), seen, limit) };
            self.state.end(sleeping);
        }
    }

    /// Withdraws the announcement of a sleep, because the scan after it found work.
    #[inline]
    pub fn stay_awake(&mut self) {
        if self.state.announced.is_some() {
            self.state.end(self.region.word(self.at + SLEEPING));
        }
    }
}

/// Returns whether the sleeper has announced itself and must be woken; if so, takes the announcement back.
#[inline]
fn must_wake(sleeping: &AtomicU32, rings: &AtomicU32, fenced: bool) -> bool {
    if fenced {
        // SYNC POINT doorbell: the counter was advanced before this fence; pairs with
        // `SleepState::step`.
        fence(Ordering::SeqCst);
    }
    // The swap lets only the first of several ringers make the system call.
    if sleeping.load(Ordering::Relaxed) == 0 || sleeping.swap(0, Ordering::AcqRel) == 0 {
        return false;
    }
    rings.fetch_add(1, Ordering::Release);
    true
}

/// State of the sleeper in the protocol.
#[derive(Debug, Default)]
struct SleepState {
    announced: Option<u32>,
}

impl SleepState {
    /// Announces the sleep; after an announcement returns the value of `rings` to sleep on. A ring since the
    /// announcement has changed `rings`, so that the kernel does not sleep.
    fn step(&mut self, sleeping: &AtomicU32, rings: &AtomicU32) -> Option<u32> {
        if self.announced.is_none() {
            // `rings` is read before the announcement, so that any ring for it changes the word later.
            self.announced = Some(rings.load(Ordering::Acquire));
            sleeping.store(1, Ordering::Relaxed);
            // SYNC POINT doorbell: the counters are read after this fence, by the caller's scan;
            // pairs with `must_wake`.
            fence(Ordering::SeqCst);
            return None;
        }
        self.announced
    }

    fn end(&mut self, sleeping: &AtomicU32) {
        sleeping.store(0, Ordering::Relaxed);
        self.announced = None;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ring_ends_a_sleep_that_was_announced() {
        let region = Region::heap(DOORBELL_BYTES).unwrap();
        let mut sleeper = Sleeper::new(region.clone(), 0);
        let ringer = Ringer::new(region.clone(), 0, true);
        let rings = || region.word(RINGS).load(Ordering::Relaxed);
        ringer.ring();
        assert_eq!(rings(), 0);
        sleeper.sleep(Duration::from_secs(1000)); // announces
        ringer.ring();
        ringer.ring();
        assert_eq!(rings(), 1);
        sleeper.sleep(Duration::from_secs(1000)); // the ring has come already
        sleeper.sleep(Duration::from_secs(1000));
        sleeper.stay_awake();
        ringer.ring();
        assert_eq!(rings(), 1);
        let there = std::thread::spawn(move || {
            while region.word(SLEEPING).load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            ringer.ring();
        });
        sleeper.sleep(Duration::from_secs(1000));
        sleeper.sleep(Duration::from_secs(1000));
        there.join().unwrap();
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::sync::atomic::AtomicU64;
    use loom::sync::{Condvar, Mutex};
    use std::sync::Arc;

    /// Models the kernel's futex: compare and sleep are one atomic step with respect to a wake.
    #[derive(Default)]
    struct FutexModel {
        lock: Mutex<()>,
        wake: Condvar,
    }

    struct ModelState {
        counters: Vec<AtomicU64>,
        sleeping: AtomicU32,
        rings: AtomicU32,
        kernel: FutexModel,
    }

    fn peer(shared: &ModelState, index: usize) {
        shared.counters[index].store(1, Ordering::Release);
        if must_wake(&shared.sleeping, &shared.rings, true) {
            let _guard = shared.kernel.lock.lock().unwrap();
            shared.kernel.wake.notify_all();
        }
    }

    /// Checks that every sleep is woken: loom reports a sleep without a wake as a deadlock.
    fn no_wake_is_lost(peers: usize) {
        loom::model(move || {
            let shared = Arc::new(ModelState {
                counters: (0..peers).map(|_| AtomicU64::new(0)).collect(),
                sleeping: AtomicU32::new(0),
                rings: AtomicU32::new(0),
                kernel: FutexModel::default(),
            });
            let threads: Vec<_> = (0..peers)
                .map(|index| {
                    let shared = shared.clone();
                    loom::thread::spawn(move || peer(&shared, index))
                })
                .collect();
            let mut state = SleepState::default();
            let done = |counter: &AtomicU64| counter.load(Ordering::Acquire) == 1;
            while !shared.counters.iter().all(done) {
                if let Some(seen) = state.step(&shared.sleeping, &shared.rings) {
                    let mut guard = shared.kernel.lock.lock().unwrap();
                    while shared.rings.load(Ordering::Acquire) == seen {
                        guard = shared.kernel.wake.wait(guard).unwrap();
                    }
                    drop(guard);
                    state.end(&shared.sleeping);
                }
            }
            for thread in threads {
                thread.join().unwrap();
            }
        });
    }

    #[test]
    fn loom_one_peer_wakes_the_sleeper() {
        no_wake_is_lost(1);
    }

    #[test]
    fn loom_two_peers_wake_the_sleeper() {
        no_wake_is_lost(2);
    }
}
