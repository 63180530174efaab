//! Backoff of a wait: from spinning over yielding to sleeping.

use std::time::Duration;

/// Action after a poll that found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// Stay on the core.
    Spin,
    /// Let another thread run.
    Yield,
    /// Block in the kernel until a peer wakes this rank.
    Sleep,
}

/// Chooses between spinning, yielding and sleeping by the number of polls in a row that found
/// nothing.
///
/// A spinning rank with a core of its own sees a message within tens of nanoseconds. A rank that
/// shares its core must not spin, because its peer cannot run meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    spins: u32,
    yields: u32,
    sleep_timeout: Duration,
}

impl Backoff {
    /// Returns the backoff of a host whose ranks share cores (`crowded`) or have one each.
    pub fn new(crowded: bool) -> Backoff {
        if crowded {
            // With fewer yields a core whose ranks all sleep halts, and takes longer to wake than a
            // message takes. More spins keep the peer from running. See benches/FIGURES.md, Host memory.
            Backoff {
                spins: 1,
                yields: 60,
                sleep_timeout: Duration::MAX,
            }
        } else {
            // Spins for tens of microseconds, since a futex wake costs several. Longer spinning would delay a
            // peer that the kernel has moved to this core.
            Backoff {
                spins: 1600,
                yields: 200,
                sleep_timeout: Duration::from_millis(1),
            }
        }
    }

    /// Returns the longest sleep. Where ranks have cores of their own, peers ring the doorbell
    /// without a fence and may miss a rank that is about to sleep.
    pub fn sleep_timeout(&self) -> Duration {
        self.sleep_timeout
    }

    /// Reduces the number of polls for a wait that polls by system calls: each takes as long as a
    /// hundred polls of memory.
    pub fn with_system_calls(self) -> Backoff {
        Backoff {
            spins: self.spins / 40,
            yields: self.yields / 20,
            ..self
        }
    }

    /// Returns the action of a poll that found nothing, after `polls` others.
    #[inline]
    pub fn pause(&self, polls: u32) -> Pause {
        if polls < self.spins {
            Pause::Spin
        } else if polls < self.spins + self.yields {
            Pause::Yield
        } else {
            Pause::Sleep
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_go_from_spinning_to_sleeping() {
        for crowded in [false, true] {
            let backoff = Backoff::new(crowded);
            let order: Vec<_> = (0..5000).map(|polls| backoff.pause(polls)).collect();
            assert_eq!(order[0], Pause::Spin);
            assert_eq!(order[4999], Pause::Sleep);
            assert!(order.is_sorted_by_key(|&pause| pause as u8));
        }
        assert_eq!(Backoff::new(true).pause(100), Pause::Sleep);
        assert_eq!(Backoff::new(false).pause(100), Pause::Spin);
    }
}
