//! The clock of a rank on the emulated machine, where no rank waits for a core.
//!
//! Where ranks share the cores of this host, a rank often runs only some time after the message that it waits for has
//! arrived. Schedules with many messages in a row would measure that time and not the links. So a rank that was woken
//! late dates what it sends back to the arrival. Time that a rank computes counts in full.

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sys::clock::monotonic_nanoseconds;
use std::sync::Arc;

/// No time.
const NEVER: u64 = u64::MAX;

/// The clock that the ends and the waiter of a rank share.
#[derive(Clone, Debug)]
pub(super) struct RankClock(Arc<ClockState>);

/// Times in nanoseconds of the monotonic clock. One thread at a time uses the connections of a rank, and nothing else
/// depends on these words, so all accesses are relaxed.
#[derive(Debug)]
struct ClockState {
    /// Next time at which a scan will find more.
    next_arrival: AtomicU64,
    /// Beginning of the wait; `NEVER` while the rank does not wait.
    waiting_since: AtomicU64,
    /// Time from the arrival that ended the last wait until the rank ran.
    late: AtomicU64,
}

impl RankClock {
    /// Creates the clock of a rank that does not wait.
    pub fn new() -> RankClock {
        RankClock(Arc::new(ClockState {
            next_arrival: AtomicU64::new(NEVER),
            waiting_since: AtomicU64::new(NEVER),
            late: AtomicU64::new(0),
        }))
    }

    /// Notes a time in the future at which a scan will find more. No peer rings then.
    pub fn expect(&self, arrival: u64) {
        self.0.next_arrival.fetch_min(arrival, Ordering::Relaxed);
    }

    /// Begins a wait or continues it. Returns the earliest time that scans have noted since the last call.
    pub fn wait(&self) -> Option<u64> {
        let waiting_since = &self.0.waiting_since;
        if waiting_since.load(Ordering::Relaxed) == NEVER {
            waiting_since.store(monotonic_nanoseconds(), Ordering::Relaxed);
        }
        let arrival = self.0.next_arrival.swap(NEVER, Ordering::Relaxed);
        (arrival != NEVER).then_some(arrival)
    }

    /// Ends the wait, if there is one, at `now`, because a message was found that arrived at `arrival`.
    pub fn end_wait(&self, arrival: u64, now: u64) {
        let since = self.0.waiting_since.swap(NEVER, Ordering::Relaxed);
        if since != NEVER {
            let late = now.saturating_sub(arrival.max(since));
            self.0.late.store(late, Ordering::Relaxed);
        }
    }

    /// Returns the time at which the rank would publish a message on the emulated machine.
    pub fn publication(&self) -> u64 {
        let now = monotonic_nanoseconds();
        // A wait for a free slot has no arrival to date back to.
        if self.0.waiting_since.swap(NEVER, Ordering::Relaxed) != NEVER {
            self.reset();
        }
        now.saturating_sub(self.0.late.load(Ordering::Relaxed))
    }

    /// Sets the clock to the time of this host, so that no call begins in the past.
    pub fn reset(&self) {
        self.0.late.store(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn rank_that_was_woken_late_dates_its_message_back() {
        let clock = RankClock::new();
        assert!(clock.publication() <= monotonic_nanoseconds());
        assert_eq!(clock.wait(), None);
        clock.expect(50);
        clock.expect(70);
        assert_eq!((clock.wait(), clock.wait()), (Some(50), None));
        // The message arrives a second after the wait began, and the rank runs two seconds later.
        let second = 1_000_000_000;
        let arrival = monotonic_nanoseconds() + second;
        clock.end_wait(arrival, arrival + 2 * second);
        let late = |clock: &RankClock| clock.0.late.load(Ordering::Relaxed);
        assert_eq!(late(&clock), 2 * second);
        assert!(clock.publication() < monotonic_nanoseconds() - second);
        // A message that was there before the wait began dates back to the beginning.
        clock.wait();
        let since = clock.0.waiting_since.load(Ordering::Relaxed);
        clock.end_wait(since - second, since + second);
        assert_eq!(late(&clock), second);
        // Messages found without a wait change nothing; neither the wait for a slot nor the end of a call dates back.
        clock.end_wait(0, since);
        assert_eq!(late(&clock), second);
        clock.wait();
        clock.publication();
        assert_eq!(late(&clock), 0);
    }
}
