//! How a rank sleeps, and how its peers wake it.
//!
//! Two words in the memory of the rank that sleeps: `sleeping`, which says that somebody must
//! ring, and `rings`, on which the kernel lets it sleep. The protocol is Dekker's: the sleeper
//! writes `sleeping` and then reads the counters once more; a peer writes its counter and then
//! reads `sleeping`. With a full fence between the two on both sides, at least one of them sees
//! the other.

use super::region::Region;
use crate::sync::atomic::{AtomicU32, Ordering, fence};
use crate::sys::futex;
use std::sync::Arc;
use std::time::Duration;

/// Bytes that a doorbell takes: its words lie on separate pairs of cache lines, because peers
/// read `sleeping` after every message.
pub const DOORBELL_BYTES: usize = 256;

const SLEEPING: usize = 0;
const RINGS: usize = 128;

/// The end that rings: held by every peer of the sleeper.
#[derive(Debug, Clone)]
pub struct Ringer {
    surely: bool,
    region: Arc<Region>,
    sleeping: *const AtomicU32,
    rings: *const AtomicU32,
}

// SAFETY: the pointers lead into `region`, which the ringer holds, to words that are only
// accessed atomically.
unsafe impl Send for Ringer {}

impl Ringer {
    /// Rings the doorbell at byte `at` of its owner's region. Not `surely`: without the fence,
    /// which costs as much as the message itself. A ring can then miss an owner that announces
    /// itself in the same moment, and its nap lasts to the end of its limit.
    ///
    /// # Panics
    /// If that is outside the region.
    pub fn new(region: Arc<Region>, at: usize, surely: bool) -> Ringer {
        Ringer {
            surely,
            sleeping: region.word(at + SLEEPING),
            rings: region.word(at + RINGS),
            region,
        }
    }

    /// Wakes the owner if it sleeps or is about to. Called after the counter that it waits for
    /// was advanced.
    #[inline]
    pub fn ring(&self) {
        debug_assert!(self.region.bytes() >= DOORBELL_BYTES);
        // SAFETY: the words live as long as `region`.
        let (sleeping, rings) = unsafe { (&*self.sleeping, &*self.rings) };
        if must_wake(sleeping, rings, self.surely) {
            // SAFETY: as above.
            unsafe { futex::wake(self.rings.cast()) };
        }
    }
}

/// The end that sleeps. There is one.
#[derive(Debug)]
pub struct Sleeper {
    region: Arc<Region>,
    at: usize,
    nap: Nap,
}

impl Sleeper {
    /// Sleeps on the doorbell at byte `at` of the own region.
    ///
    /// # Panics
    /// If that is outside the region.
    pub fn new(region: Arc<Region>, at: usize) -> Sleeper {
        let _ = (region.word(at + SLEEPING), region.word(at + RINGS));
        Sleeper {
            region,
            at,
            nap: Nap::default(),
        }
    }

    /// First call: announces the sleep and returns at once; the caller scans its connections
    /// again. Second call in a row: sleeps until rung or `limit` has passed. A peer that advances
    /// a counter after that scan rings.
    pub fn sleep(&mut self, limit: Duration) {
        let sleeping = self.region.word(self.at + SLEEPING);
        let rings = self.region.word(self.at + RINGS);
        if let Some(seen) = self.nap.step(sleeping, rings) {
            // SAFETY: the word lives as long as `region`.
            unsafe { futex::wait(std::ptr::from_ref(rings).cast(), seen, limit) };
            self.nap.end(sleeping);
        }
    }

    /// Takes an announcement back: the scan after it found work.
    #[inline]
    pub fn stay_awake(&mut self) {
        if self.nap.announced.is_some() {
            self.nap.end(self.region.word(self.at + SLEEPING));
        }
    }
}

/// Whether the sleeper has announced itself. Then its word is changed, and it must be woken.
#[inline]
fn must_wake(sleeping: &AtomicU32, rings: &AtomicU32, surely: bool) -> bool {
    if surely {
        // SYNC POINT doorbell: the counter was advanced before this fence; pairs with
        // `Nap::step`.
        fence(Ordering::SeqCst);
    }
    // The swap makes one ringer of many do the system call.
    if sleeping.load(Ordering::Relaxed) == 0 || sleeping.swap(0, Ordering::AcqRel) == 0 {
        return false;
    }
    rings.fetch_add(1, Ordering::Release);
    true
}

/// Where the sleeper is in the protocol.
#[derive(Debug, Default)]
struct Nap {
    announced: Option<u32>,
}

impl Nap {
    /// Announces, or after an announcement returns the value of `rings` to sleep on. A ring since
    /// the announcement has changed the word, so that the kernel refuses to sleep.
    fn step(&mut self, sleeping: &AtomicU32, rings: &AtomicU32) -> Option<u32> {
        if self.announced.is_none() {
            // Read before the announcement: any ring that answers it comes later.
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
    fn a_ring_ends_a_sleep_and_comes_only_if_announced() {
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

    /// The kernel's part: compare and sleep is one action with respect to a wake.
    #[derive(Default)]
    struct Kernel {
        lock: Mutex<()>,
        wake: Condvar,
    }

    struct Shared {
        counters: Vec<AtomicU64>,
        sleeping: AtomicU32,
        rings: AtomicU32,
        kernel: Kernel,
    }

    fn peer(shared: &Shared, index: usize) {
        shared.counters[index].store(1, Ordering::Release);
        if must_wake(&shared.sleeping, &shared.rings, true) {
            let _guard = shared.kernel.lock.lock().unwrap();
            shared.kernel.wake.notify_all();
        }
    }

    /// A sleep that nobody ends is a deadlock, which loom reports.
    fn no_wake_is_lost(peers: usize) {
        loom::model(move || {
            let shared = Arc::new(Shared {
                counters: (0..peers).map(|_| AtomicU64::new(0)).collect(),
                sleeping: AtomicU32::new(0),
                rings: AtomicU32::new(0),
                kernel: Kernel::default(),
            });
            let threads: Vec<_> = (0..peers)
                .map(|index| {
                    let shared = shared.clone();
                    loom::thread::spawn(move || peer(&shared, index))
                })
                .collect();
            let mut nap = Nap::default();
            let done = |counter: &AtomicU64| counter.load(Ordering::Acquire) == 1;
            while !shared.counters.iter().all(done) {
                if let Some(seen) = nap.step(&shared.sleeping, &shared.rings) {
                    let mut guard = shared.kernel.lock.lock().unwrap();
                    while shared.rings.load(Ordering::Acquire) == seen {
                        guard = shared.kernel.wake.wait(guard).unwrap();
                    }
                    drop(guard);
                    nap.end(&shared.sleeping);
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
