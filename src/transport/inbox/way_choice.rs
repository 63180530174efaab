//! Chooses, by measurement, whether payloads go to slots through the caches or past them.
//!
//! A store to a slot waits until the receiver's core has given up the line that it read last. Between cores that share a
//! cache this is fast. Between others a round trip through memory is several times faster. Which cores two ranks have,
//! whether other ranks use the memory's bandwidth, and which data are in which cache, may change at any time. So both ends
//! measure some messages of each size in both ways: the sender its write, whose time the message carries, and the receiver
//! the time from when it finds the message until it releases it. The receiver wishes for the way with the smaller sum.

use crate::cpu::CAN_STREAM;

/// Least bytes of a payload that may go past the caches.
pub(super) const LEAST_BYTES: usize = 2 << 10;

/// Sizes with a choice of their own: from 2 KiB, 4 KiB and so on, to 128 KiB.
const SIZES: usize = 7;

/// Position of the bits that ask for times, in a word of wishes. The bits below ask for stores past the caches.
const TIMED_AT: usize = 32;

/// Messages of whose times the median counts in a comparison. During some of them the receiver may have waited for others.
const SAMPLES: usize = 9;

/// Stores past the caches take bandwidth of the memory, which others may need. So their time must be below this part of the
/// other time.
const LEAST_GAIN: f32 = 0.75;

/// Comparisons in a row that stores past the caches must win before they are used.
const WINS: u32 = 3;

/// Messages after which the way that is not in use is tried again, at least and at most.
const TRIAL_INTERVALS: (u32, u32) = (1024, 16384);

/// Returns the index of the size of a payload; `None` for small ones.
#[inline]
fn size_of_payload(bytes: usize) -> Option<usize> {
    match bytes / LEAST_BYTES {
        0 => None,
        times => Some((times.ilog2() as usize).min(SIZES - 1)),
    }
}

/// Returns whether the receiver wishes a payload of this size past the caches.
#[inline]
pub(super) fn is_streamed(wishes: u64, bytes: usize) -> bool {
    size_of_payload(bytes).is_some_and(|size| wishes >> size & 1 != 0)
}

/// Returns whether the receiver wishes to know the time of a write of this size.
#[inline]
pub(super) fn is_timed(wishes: u64, bytes: usize) -> bool {
    size_of_payload(bytes).is_some_and(|size| wishes >> (TIMED_AT + size) & 1 != 0)
}

/// Phase of the choice for one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The way in use stays, without measurement.
    Stays,
    /// The way in use is measured, before the other one is tried.
    Measured,
    /// The other way is tried and measured.
    Trial,
}

/// State of the choice for payloads of one size.
#[derive(Clone, Copy, Debug)]
struct Size {
    /// Whether the way in use, or on trial, goes past the caches.
    streams: bool,
    phase: Phase,
    /// Times of the messages of this phase, in nanoseconds for a KiB.
    times: [f32; SAMPLES],
    /// Median of the times before the trial.
    before: f32,
    /// Messages of this phase.
    seen: u32,
    /// Comparisons in a row that stores past the caches have won.
    wins: u32,
    /// Messages from one trial to the next.
    interval: u32,
}

impl Size {
    const NEW: Size = Size {
        streams: false,
        phase: if CAN_STREAM {
            Phase::Measured
        } else {
            Phase::Stays
        },
        times: [0.0; SAMPLES],
        before: 0.0,
        seen: 0,
        wins: 0,
        interval: TRIAL_INTERVALS.0,
    };

    fn enter(&mut self, phase: Phase, streams: bool) {
        (self.phase, self.streams, self.seen) = (phase, streams, 0);
    }

    /// Counts a message with its time in nanoseconds for a KiB, if it was measured. Returns whether the wishes change.
    #[inline]
    fn count(&mut self, streamed: bool, per_kib: Option<f32>) -> bool {
        if !CAN_STREAM {
            return false;
        }
        if self.phase == Phase::Stays {
            self.seen += 1;
            if self.seen < self.interval {
                return false;
            }
            self.enter(Phase::Measured, self.streams);
            return true;
        }
        // Messages that were written before the sender saw the wishes do not count.
        match per_kib {
            Some(time) if streamed == self.streams => self.measure(time),
            _ => false,
        }
    }

    #[cold]
    fn measure(&mut self, time: f32) -> bool {
        self.times[self.seen as usize] = time;
        self.seen += 1;
        if (self.seen as usize) < SAMPLES {
            return false;
        }
        self.times.sort_unstable_by(f32::total_cmp);
        let median = self.times[SAMPLES / 2];
        if self.phase == Phase::Measured {
            self.before = median;
            self.enter(Phase::Trial, !self.streams);
            return true;
        }
        let was_streaming = !self.streams;
        let (cached, streamed) = match was_streaming {
            true => (median, self.before),
            false => (self.before, median),
        };
        self.wins = match streamed < cached * LEAST_GAIN {
            true => (self.wins + 1).min(WINS),
            false => 0,
        };
        if (1..WINS).contains(&self.wins) {
            self.enter(Phase::Measured, false);
            return true;
        }
        let streams = self.wins == WINS;
        let (least, most) = TRIAL_INTERVALS;
        self.interval = match streams == was_streaming {
            true => (self.interval * 2).min(most),
            false => least,
        };
        self.enter(Phase::Stays, streams);
        true
    }
}

/// The choices of one receiver for one sender.
#[derive(Debug)]
pub(super) struct WayChoice {
    sizes: [Size; SIZES],
}

impl WayChoice {
    /// Begins with stores through the caches.
    pub fn new() -> WayChoice {
        WayChoice {
            sizes: [Size::NEW; SIZES],
        }
    }

    /// Returns the word for the sender; see [`is_streamed`] and [`is_timed`].
    pub fn wishes(&self) -> u64 {
        let bits = self.sizes.iter().enumerate();
        bits.map(|(at, size)| {
            let timed = u64::from(size.phase != Phase::Stays);
            u64::from(size.streams) << at | timed << (TIMED_AT + at)
        })
        .sum()
    }

    /// Counts a message of `bytes`, which was `streamed` past the caches or not. `taken` is the time of its write and read in
    /// nanoseconds, if it was measured. Returns the new wishes if they change.
    #[inline]
    pub fn count(&mut self, bytes: usize, streamed: bool, taken: Option<u64>) -> Option<u64> {
        let size = &mut self.sizes[size_of_payload(bytes)?];
        let per_kib = taken.map(|taken| taken as f32 * 1024.0 / bytes as f32);
        size.count(streamed, per_kib).then(|| self.wishes())
    }
}

#[cfg(all(test, not(loom), target_arch = "x86_64", not(miri)))]
mod tests {
    use super::*;

    /// Runs messages of `bytes`, which take these times through the caches and past them. Returns how many were streamed.
    fn run(choice: &mut WayChoice, bytes: usize, messages: usize, times: [u64; 2]) -> usize {
        let mut streamed_count = 0;
        // The sender reads a wish one message late.
        let mut wishes = choice.wishes();
        for message in 0..messages {
            let (streamed, timed) = (is_streamed(wishes, bytes), is_timed(wishes, bytes));
            wishes = choice.wishes();
            streamed_count += usize::from(streamed);
            // Every third message waits for another one.
            let delay = if message % 3 == 0 { 100_000 } else { 0 };
            let taken = times[usize::from(streamed)] + delay;
            choice.count(bytes, streamed, timed.then_some(taken));
        }
        streamed_count
    }

    #[test]
    fn sizes_have_bits_of_their_own() {
        let sizes = [0, 1, 2, 3, 4, 8, 127, 128, 16384].map(|kib| size_of_payload(kib << 10));
        let wanted = [
            None,
            None,
            Some(0),
            Some(0),
            Some(1),
            Some(2),
            Some(5),
            Some(6),
            Some(6),
        ];
        assert_eq!(sizes, wanted);
        let wishes = 1 << 2 | 1 << (TIMED_AT + 6);
        assert!(is_streamed(wishes, 8 << 10) && !is_streamed(wishes, 16 << 10));
        assert!(is_timed(wishes, 1 << 20) && !is_timed(wishes, 8 << 10));
    }

    #[test]
    fn slower_way_is_tried_and_left() {
        let mut choice = WayChoice::new();
        assert_eq!(run(&mut choice, 64 << 10, SAMPLES, [3000, 7000]), 0);
        let streamed = run(&mut choice, 64 << 10, 100_000, [3000, 7000]);
        assert!(
            (SAMPLES..20 * SAMPLES).contains(&streamed),
            "{streamed} streamed"
        );
        let timed = choice.wishes() >> TIMED_AT;
        assert_eq!(choice.wishes() & 0x7f, 0);
        assert!(
            timed.count_ones() >= 6,
            "only the size in use stays: {timed:#b}"
        );
    }

    #[test]
    fn faster_way_is_kept_for_its_size_alone() {
        let mut choice = WayChoice::new();
        let streamed = run(&mut choice, 64 << 10, 100_000, [17000, 7000]);
        assert!(streamed > 100_000 - 40 * SAMPLES, "{streamed} streamed");
        run(&mut choice, 16 << 10, 1000, [1000, 3000]);
        assert!(is_streamed(choice.wishes(), 64 << 10));
        assert!(!is_streamed(choice.wishes(), 16 << 10));
    }

    #[test]
    fn ranks_that_move_to_other_cores_change_the_way() {
        let mut choice = WayChoice::new();
        for (times, streams) in [
            ([6000, 9000], false),
            ([34000, 7000], true),
            ([6000, 9000], false),
        ] {
            run(&mut choice, 128 << 10, 60_000, times);
            assert_eq!(
                is_streamed(choice.wishes(), 128 << 10),
                streams,
                "{times:?}"
            );
        }
    }
}
