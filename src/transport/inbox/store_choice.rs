//! Chooses, by measurement, whether payloads go to slots through the caches or past them (non-temporal stores).
//!
//! A store to a slot waits until the receiver's core has given up the line that it read last. Between cores that share a
//! cache this is fast. Between others a round trip through memory is several times faster. Which cores two ranks have,
//! whether other ranks use the memory's bandwidth, and which data are in which cache, may change at any time. So both ends
//! measure some messages of each size in both ways: the sender its copy to the slot, whose time the message carries, and the
//! receiver the time from the last look at the message until its release. The receiver requests the way with the smaller
//! sum.

use crate::cpu::CAN_STREAM;

/// Least bytes of a payload that may go past the caches.
pub(super) const LEAST_BYTES: usize = 2 << 10;

/// Sizes with a choice of their own: from 2 KiB, 4 KiB and so on, to 128 KiB.
const SIZES: usize = 7;

/// Position of the bits that request times, in a word of hints. The bits below request stores past the caches.
const TIMED_AT: usize = 32;

/// Messages of each way in a comparison.
const SAMPLES: u8 = 16;

/// Position of the time that counts, among those of a way in ascending order. Messages of other steps, and those during which
/// the receiver waited for something else, take longer.
const COUNTED: usize = 3;

/// Stores past the caches take bandwidth of the memory, which others may need. So their time must be below this part of the
/// other time.
const LEAST_GAIN: f32 = 0.75;

/// Comparisons in a row that change the way.
const WINS: u8 = 2;

/// Messages after which the ways are compared again, at least and at most.
const INTERVALS: (u32, u32) = (1024, 8192);

/// Returns the index of the size of a payload; `None` for small ones.
#[inline]
fn size_of_payload(bytes: usize) -> Option<usize> {
    match bytes / LEAST_BYTES {
        0 => None,
        times => Some((times.ilog2() as usize).min(SIZES - 1)),
    }
}

/// Returns whether the receiver requests a payload of this size past the caches.
#[inline]
pub(super) fn is_streamed(hints: u64, bytes: usize) -> bool {
    size_of_payload(bytes).is_some_and(|size| hints >> size & 1 != 0)
}

/// Returns whether the receiver requests the time of a write of this size.
#[inline]
pub(super) fn is_timed(hints: u64, bytes: usize) -> bool {
    size_of_payload(bytes).is_some_and(|size| hints >> (TIMED_AT + size) & 1 != 0)
}

/// The least times of messages of one way, in nanoseconds for a KiB.
#[derive(Clone, Copy, Debug)]
struct LeastTimes {
    ascending: [f32; COUNTED + 1],
    seen: u8,
}

impl LeastTimes {
    const NONE: LeastTimes = LeastTimes {
        ascending: [f32::INFINITY; COUNTED + 1],
        seen: 0,
    };

    fn add(&mut self, time: f32) {
        if self.seen == SAMPLES {
            return;
        }
        self.seen += 1;
        if time < self.ascending[COUNTED] {
            self.ascending[COUNTED] = time;
            self.ascending.sort_unstable_by(f32::total_cmp);
        }
    }
}

/// State of the choice for payloads of one size.
#[derive(Clone, Copy, Debug)]
struct Size {
    /// Whether the receiver requests the next payload past the caches.
    streams: bool,
    /// Whether the ways are being compared. Each message then has a random way: a schedule repeats its messages in a fixed
    /// order, and they differ in what else their times contain.
    is_compared: bool,
    /// Times of the comparison, through the caches and past them.
    times: [LeastTimes; 2],
    /// Comparisons that stores past the caches have won, less those that they have lost, from 0 to [`WINS`].
    wins: u8,
    /// Messages since the last comparison, and up to the next one.
    seen: u32,
    interval: u32,
}

impl Size {
    const NEW: Size = Size {
        streams: false,
        is_compared: CAN_STREAM,
        times: [LeastTimes::NONE; 2],
        wins: 0,
        seen: 0,
        interval: INTERVALS.0,
    };

    /// Counts a message with its time in nanoseconds for a KiB, if it was measured. Returns whether the hints may change.
    #[inline]
    fn count(&mut self, streamed: bool, per_kib: Option<f32>, random: &mut u32) -> bool {
        if !CAN_STREAM {
            return false;
        }
        if self.is_compared {
            return per_kib.is_some_and(|time| self.compare(streamed, time, random));
        }
        self.seen += 1;
        self.is_compared = self.seen >= self.interval;
        self.is_compared
    }

    #[cold]
    fn compare(&mut self, streamed: bool, time: f32, random: &mut u32) -> bool {
        self.times[usize::from(streamed)].add(time);
        if self.times.iter().any(|times| times.seen < SAMPLES) {
            // xorshift32
            *random ^= *random << 13;
            *random ^= *random >> 17;
            *random ^= *random << 5;
            self.streams = *random & 0x100 != 0;
            return true;
        }
        let [cached, streamed] = self.times.map(|times| times.ascending[COUNTED]);
        self.times = [LeastTimes::NONE; 2];
        self.wins = match streamed < cached * LEAST_GAIN {
            true => (self.wins + 1).min(WINS),
            false => self.wins.saturating_sub(1),
        };
        self.is_compared = (1..WINS).contains(&self.wins);
        if !self.is_compared {
            self.streams = self.wins == WINS;
            let (least, most) = INTERVALS;
            self.interval = match self.streams {
                true => least,
                false => (self.interval * 2).min(most),
            };
            self.seen = 0;
        }
        true
    }
}

/// The choices of one receiver for one sender.
#[derive(Debug)]
pub(super) struct StoreChoice {
    sizes: [Size; SIZES],
    random: u32,
}

impl StoreChoice {
    /// Begins with comparisons.
    pub fn new() -> StoreChoice {
        StoreChoice {
            sizes: [Size::NEW; SIZES],
            random: 0x9e37_79b9,
        }
    }

    /// Returns the word for the sender; see [`is_streamed`] and [`is_timed`].
    pub fn hints(&self) -> u64 {
        let bits = self.sizes.iter().enumerate();
        bits.map(|(at, size)| {
            u64::from(size.streams) << at | u64::from(size.is_compared) << (TIMED_AT + at)
        })
        .sum()
    }

    /// Counts a message of `bytes`, which was `streamed` past the caches or not. `taken` is the time of its write and read in
    /// nanoseconds, if it was measured. Returns the new hints if they may have changed.
    #[inline]
    pub fn count(&mut self, bytes: usize, streamed: bool, taken: Option<u64>) -> Option<u64> {
        let size = &mut self.sizes[size_of_payload(bytes)?];
        let per_kib = taken.map(|taken| taken as f32 * 1024.0 / bytes as f32);
        let changes = size.count(streamed, per_kib, &mut self.random);
        changes.then(|| self.hints())
    }
}

#[cfg(all(test, not(loom), target_arch = "x86_64", not(miri), not(plain_copies)))]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// Runs messages of `bytes`, which take these times through the caches and past them, and also `extras` in turn: what
    /// other work their steps do. The sender reads hints that are `lag` messages old. Returns the streamed part.
    fn run(
        choice: &mut StoreChoice,
        (bytes, messages): (usize, usize),
        times: [u64; 2],
        (extras, lag): (&[u64], usize),
    ) -> f64 {
        let mut streamed_count = 0;
        let mut hints = VecDeque::from(vec![choice.hints(); lag + 1]);
        for message in 0..messages {
            let seen = hints.pop_front().unwrap();
            let (streamed, timed) = (is_streamed(seen, bytes), is_timed(seen, bytes));
            streamed_count += usize::from(streamed);
            // Some messages wait for others.
            let wait = if message * 7919 % 31 < 6 { 100_000 } else { 0 };
            let extra = extras[message % extras.len()];
            let taken = times[usize::from(streamed)] + extra + wait;
            choice.count(bytes, streamed, timed.then_some(taken));
            hints.push_back(choice.hints());
        }
        streamed_count as f64 / messages as f64
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
        let hints = 1 << 2 | 1 << (TIMED_AT + 6);
        assert!(is_streamed(hints, 8 << 10) && !is_streamed(hints, 16 << 10));
        assert!(is_timed(hints, 1 << 20) && !is_timed(hints, 8 << 10));
    }

    /// Schedules repeat their messages: contributions and sums in turn, or several of each.
    #[test]
    fn faster_way_is_found_among_messages_of_different_steps() {
        let [short, long] = [0, 10_000];
        let periods: [&[u64]; 4] = [
            &[short],
            &[short, long],
            &[long, long, long, short, short, short],
            &[&[long; 9][..], &[short; 9][..]].concat(),
        ];
        for extras in periods {
            for lag in 0..4 {
                let mut choice = StoreChoice::new();
                let slower = run(
                    &mut choice,
                    (64 << 10, 100_000),
                    [10_000, 13_000],
                    (extras, lag),
                );
                assert!(slower < 0.03, "{slower} streamed, {extras:?}, lag {lag}");
                let mut choice = StoreChoice::new();
                let faster = run(
                    &mut choice,
                    (64 << 10, 100_000),
                    [10_000, 5_000],
                    (extras, lag),
                );
                assert!(faster > 0.9, "{faster} streamed, {extras:?}, lag {lag}");
            }
        }
    }

    #[test]
    fn each_size_has_its_own_way() {
        let mut choice = StoreChoice::new();
        run(&mut choice, (64 << 10, 10_000), [17_000, 7_000], (&[0], 1));
        run(&mut choice, (16 << 10, 10_000), [1_000, 3_000], (&[0], 1));
        let (hints, kib) = (choice.hints(), 1 << 10);
        assert!(is_streamed(hints, 64 * kib) && !is_streamed(hints, 16 * kib));
        assert!(is_timed(hints, 4 * kib), "no message of this size has come");
    }

    #[test]
    fn ranks_that_move_to_other_cores_change_the_way() {
        let mut choice = StoreChoice::new();
        let near = ([6_000, 9_000], false);
        for (times, streams) in [near, ([34_000, 7_000], true), near] {
            run(&mut choice, (128 << 10, 30_000), times, (&[0], 1));
            let streamed = run(&mut choice, (128 << 10, 1_000), times, (&[0], 1));
            assert_eq!(streamed > 0.8, streams, "{streamed}, {times:?}");
        }
    }
}
