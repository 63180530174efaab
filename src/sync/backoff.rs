//! How a wait goes from spinning to sleeping.

use std::time::Duration;

/// What to do after a scan that found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// Stay on the core.
    Spin,
    /// Let another thread run.
    Yield,
    /// Block until woken.
    Sleep,
}

/// When a wait spins, yields and sleeps, by the number of scans in a row that found nothing.
///
/// A spinning rank that has its core to itself sees a message within tens of nanoseconds. A rank
/// that shares its core must not: while it spins, the peer that it waits for cannot run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    spins: u32,
    yields: u32,
    longest_nap: Duration,
}

impl Backoff {
    /// For a host whose ranks share cores (`crowded`) or have one each.
    pub fn new(crowded: bool) -> Backoff {
        if crowded {
            // Measured with 4 ranks on 2 cores, all_reduce of 1 KiB: 5 to 9 us with these. With 4
            // spins and 2 yields 5 or 16 to 23 us, from run to run: a core whose ranks all sleep
            // halts, and takes longer to come back than the message. 200 spins: 11 us a hop.
            Backoff {
                spins: 1,
                yields: 60,
                longest_nap: Duration::MAX,
            }
        } else {
            // About 20 us: a futex wake costs several. Longer would hold up a peer that another
            // program has driven onto this core.
            Backoff {
                spins: 800,
                yields: 200,
                longest_nap: Duration::from_millis(1),
            }
        }
    }

    /// Bound of one sleep. Where ranks have cores of their own, peers ring without a fence and
    /// may miss a rank that is just falling asleep.
    pub fn longest_nap(&self) -> Duration {
        self.longest_nap
    }

    /// The same for scans that end in a system call, each of which takes as long as a hundred
    /// looks at memory.
    pub fn with_system_calls(self) -> Backoff {
        Backoff {
            spins: self.spins / 20,
            yields: self.yields / 20,
            ..self
        }
    }

    /// What to do after `scans` scans in a row found nothing before this one.
    #[inline]
    pub fn pause(&self, scans: u32) -> Pause {
        if scans < self.spins {
            Pause::Spin
        } else if scans < self.spins + self.yields {
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
    fn waits_get_gentler() {
        for crowded in [false, true] {
            let backoff = Backoff::new(crowded);
            let order: Vec<_> = (0..5000).map(|scans| backoff.pause(scans)).collect();
            assert_eq!(order[0], Pause::Spin);
            assert_eq!(order[4999], Pause::Sleep);
            assert!(order.is_sorted_by_key(|&pause| pause as u8));
        }
        assert_eq!(Backoff::new(true).pause(100), Pause::Sleep);
        assert_eq!(Backoff::new(false).pause(100), Pause::Spin);
    }
}
