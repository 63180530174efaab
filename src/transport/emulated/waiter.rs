//! How a rank waits for messages that are still on emulated links.

use super::rank_clock::RankClock;
use crate::error::Result;
use crate::sys::clock::monotonic_nanoseconds;
use crate::transport::Waiter;
use std::time::Duration;

/// Sleeps no longer than until the next arrival, because no peer rings then.
#[derive(Debug)]
pub(super) struct EmulatedWaiter {
    waiter: Box<dyn Waiter>,
    clock: RankClock,
}

impl EmulatedWaiter {
    /// Wraps the waiter of a rank whose ends note arrivals in `clock`.
    pub fn new(waiter: Box<dyn Waiter>, clock: RankClock) -> EmulatedWaiter {
        EmulatedWaiter { waiter, clock }
    }
}

impl Waiter for EmulatedWaiter {
    fn idle(&mut self, scans: u32, limit: Duration) -> Result<()> {
        // Every scan before a sleep notes the arrivals that it found anew.
        let limit = match self.clock.wait() {
            None => limit,
            Some(time) => {
                let left = time.saturating_sub(monotonic_nanoseconds());
                limit.min(Duration::from_nanos(left))
            }
        };
        self.waiter.idle(scans, limit)
    }

    fn leaves_core(&self, scans: u32) -> bool {
        self.waiter.leaves_core(scans)
    }
}
