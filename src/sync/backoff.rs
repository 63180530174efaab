//! How a wait goes from spinning to sleeping.

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
}

impl Backoff {
    /// For `ranks` ranks on a host that gives this one `cpus` cores to run on.
    pub fn new(ranks: usize, cpus: usize) -> Backoff {
        if ranks <= cpus {
            // About 50 us: a futex wake costs several, and a step of a large call takes longer
            // than that only if the peer is really late.
            Backoff {
                spins: 2000,
                yields: 50,
            }
        } else {
            // Measured with 4 and 8 ranks on 2 cores: a hop takes 1.6 us with these, 2.5 us with
            // six times as many, and 11 us with 200 spins.
            Backoff {
                spins: 4,
                yields: 2,
            }
        }
    }

    /// The same for scans that end in a system call, each of which takes as long as a hundred
    /// looks at memory.
    pub fn with_system_calls(self) -> Backoff {
        Backoff {
            spins: self.spins / 20,
            yields: self.yields / 20,
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
        for (ranks, cpus) in [(1, 1), (2, 2), (8, 2)] {
            let backoff = Backoff::new(ranks, cpus);
            let order: Vec<_> = (0..5000).map(|scans| backoff.pause(scans)).collect();
            assert_eq!(order[0], Pause::Spin);
            assert_eq!(order[4999], Pause::Sleep);
            assert!(order.is_sorted_by_key(|&pause| pause as u8));
        }
        assert_eq!(Backoff::new(3, 2).pause(100), Pause::Sleep);
        assert_eq!(Backoff::new(2, 2).pause(100), Pause::Spin);
    }
}
