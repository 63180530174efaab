//! [`FirstLook`]: when a rank that has sent its message first looks for its peer's.
//!
//! In calls of a few bytes both ranks send at about the same time. A look at a line that the peer has yet to write takes the
//! line from the peer's core, and the peer waits for it again before its store. So the peer's message is late, this rank's
//! next call is late in turn, and both stay out of step. Between cores that do not share a cache that costs up to a call's
//! whole time. A rank that waits a part of the line's travel time first does not disturb the peer's store. Between cores that
//! share a cache the wait would cost more than it saves. Which cores two ranks have may change at any time, so the travel
//! time is measured. See benches/FIGURES.md, Host memory and network.

use crate::sys::clock::monotonic_nanoseconds;

/// Messages between two measurements. The number is odd because two ranks that are out of step take turns at waiting.
const INTERVAL: u32 = 61;

/// Messages from a look that found nothing to the next measurement.
const RETRY: u32 = 7;

/// Measurements that count.
const SAMPLES: usize = 8;

/// Position of the measurement that counts, among the last ones in ascending order. Some looks find a message that the
/// prefetcher has already brought, and interrupts prolong others.
const COUNTED: usize = SAMPLES / 2;

/// Part of the travel time that passes before the first look.
const WAITED: (u32, u32) = (2, 5);

/// Most pause instructions before the first look.
const MAX_PAUSES: u32 = 6;

/// Times of this processor.
#[derive(Clone, Copy, Debug)]
struct PauseTimes {
    /// Nanoseconds between two readings of the clock.
    reading: u32,
    /// Nanoseconds of a pause instruction, at least 1.
    pause: u32,
}

impl PauseTimes {
    fn measure() -> PauseTimes {
        const PAUSES: u32 = 64;
        let time = |work: fn()| {
            let runs = (0..16).map(|_| {
                let begun = monotonic_nanoseconds();
                work();
                elapsed(begun)
            });
            runs.min().unwrap_or(0)
        };
        let reading = time(|| ());
        let pauses = time(|| (0..PAUSES).for_each(|_| std::hint::spin_loop()));
        PauseTimes {
            reading,
            pause: (pauses.saturating_sub(reading) / PAUSES).max(1),
        }
    }
}

/// The first looks for the messages of one peer.
#[derive(Clone, Debug)]
pub(super) struct FirstLook {
    processor: PauseTimes,
    pauses: u32,
    /// Messages until the next measurement.
    left: u32,
    /// Nanoseconds of the last measured looks that found a message, and the place of the next.
    times: [u32; SAMPLES],
    next: usize,
}

impl FirstLook {
    /// Makes one for each of `peers` peers, which look at once before they have measured.
    pub(super) fn each(peers: usize) -> Vec<FirstLook> {
        vec![FirstLook::new(PauseTimes::measure()); peers]
    }

    fn new(processor: PauseTimes) -> FirstLook {
        FirstLook {
            processor,
            pauses: 0,
            left: INTERVAL,
            times: [0; SAMPLES],
            next: 0,
        }
    }

    /// Waits until the first look after this rank's own message is due. Returns the time if the look is measured.
    #[inline]
    pub(super) fn wait(&mut self) -> Option<u64> {
        for _ in 0..self.pauses {
            std::hint::spin_loop();
        }
        self.left -= 1;
        if self.left > 0 {
            return None;
        }
        self.left = RETRY;
        Some(monotonic_nanoseconds())
    }

    /// Counts a look from `begun` until now that found the message at once.
    #[inline(never)]
    pub(super) fn count(&mut self, begun: u64) {
        self.left = INTERVAL;
        self.count_time(elapsed(begun));
    }

    fn count_time(&mut self, nanoseconds: u32) {
        self.times[self.next] = nanoseconds.saturating_sub(self.processor.reading);
        self.next = (self.next + 1) % SAMPLES;
        let mut times = self.times;
        times.sort_unstable();
        let wait = u64::from(times[COUNTED]) * u64::from(WAITED.0) / u64::from(WAITED.1);
        self.pauses = (wait / u64::from(self.processor.pause)).min(MAX_PAUSES.into()) as u32;
    }
}

fn elapsed(begun: u64) -> u32 {
    let nanoseconds = monotonic_nanoseconds().saturating_sub(begun);
    nanoseconds.try_into().unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: PauseTimes = PauseTimes {
        reading: 25,
        pause: 20,
    };

    fn pauses_after(times: &[u32]) -> u32 {
        let mut look = FirstLook::new(TIMES);
        times.iter().for_each(|&time| look.count_time(time));
        look.pauses
    }

    #[test]
    fn near_peers_are_looked_for_at_once_and_far_ones_later() {
        assert_eq!(pauses_after(&[]), 0);
        assert_eq!(pauses_after(&[60; SAMPLES]), 0);
        assert_eq!(pauses_after(&[160; SAMPLES]), 2);
        assert_eq!(pauses_after(&[u32::MAX; SAMPLES]), MAX_PAUSES);
    }

    #[test]
    fn single_measurements_change_nothing_but_moved_cores_do() {
        let near = [[60; SAMPLES], [60, 60, 5_000, 60, 60, 60, 9_000, 60]].concat();
        assert_eq!(pauses_after(&near), 0);
        let moved = [[160; SAMPLES], [60; SAMPLES]].concat();
        assert_eq!(pauses_after(&moved), 0);
    }

    #[test]
    fn measurement_follows_a_look_that_finds_nothing_sooner() {
        let mut look = FirstLook::new(TIMES);
        let until_measured = |look: &mut FirstLook| (1..).find(|_| look.wait().is_some());
        assert_eq!(until_measured(&mut look), Some(INTERVAL));
        assert_eq!(until_measured(&mut look), Some(RETRY));
        assert_eq!(until_measured(&mut look), Some(RETRY));
        look.count(monotonic_nanoseconds());
        assert_eq!(until_measured(&mut look), Some(INTERVAL));
    }
}
