//! Counters of a communicator's calls on one rank, by collective, size and codec, and of its waits for other ranks.
//!
//! Writers hold the communicator's lock of counters, so a counter is loaded, changed and stored: a few nanoseconds a
//! call. Readers see each counter by itself; sums over counters may be off by a call that is being counted.

use crate::types::{CodecKind, Collective, RawReason};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Number of counted combinations of collective, size class and codec. Further ones count under `other`.
const CELLS: usize = 128;

/// Calls of at least this size are all timed; of smaller ones one of 2 to [`TIMED_OF_LOG2`], because reading the
/// clock twice would take a tenth of the smallest call's time.
const ALWAYS_TIMED: usize = 64 << 10;

/// Binary logarithm of the number of small calls of which one is timed.
const TIMED_OF_LOG2: u32 = 6;

/// Waits for a rank that are shorter than this are not counted: they are the time that messages take.
pub const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// Collective, size and codec of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallClass {
    /// The collective.
    pub collective: Collective,
    /// Codec between hosts, or of the whole call.
    pub codec: CodecKind,
    /// Bytes of the larger buffer of the call are at most 2 to this power.
    pub size_log2: u8,
}

impl CallClass {
    /// Returns the class of a call whose larger buffer has `bytes` bytes.
    pub fn new(collective: Collective, codec: CodecKind, bytes: usize) -> CallClass {
        CallClass {
            collective,
            codec,
            size_log2: bytes.next_power_of_two().trailing_zeros() as u8,
        }
    }

    /// Returns the class as a word that is not 0.
    fn word(self) -> u64 {
        1 << 24
            | (self.collective as u64) << 16
            | (self.codec as u64) << 8
            | u64::from(self.size_log2)
    }

    fn from_word(word: u64) -> Option<CallClass> {
        if word == 0 {
            return None;
        }
        let collective = Collective::ALL
            .into_iter()
            .find(|it| *it as u64 == word >> 16 & 0xff)?;
        let codec = CodecKind::ALL
            .into_iter()
            .find(|it| *it as u64 == word >> 8 & 0xff)?;
        Some(CallClass {
            collective,
            codec,
            size_log2: word as u8,
        })
    }
}

/// Counts of the calls of a class, or of all calls beyond the classes that are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// Calls that have returned without an error.
    pub calls: u64,
    /// Bytes of the larger buffer, summed over the calls.
    pub bytes: u64,
    /// Bytes that this rank sent.
    pub wire_bytes: u64,
    /// Bytes that this rank would have sent with the same algorithms and without codecs.
    pub raw_bytes: u64,
    /// Calls whose time was measured. Calls on GPUs are not: they end later.
    pub timed: u64,
    /// Nanoseconds of these calls.
    pub nanoseconds: u64,
}

impl CallCounts {
    fn add(&mut self, by: &CallCounts) {
        self.calls += by.calls;
        self.bytes += by.bytes;
        self.wire_bytes += by.wire_bytes;
        self.raw_bytes += by.raw_bytes;
        self.timed += by.timed;
        self.nanoseconds += by.nanoseconds;
    }

    /// Returns the counts of one call.
    fn of_call(
        bytes: usize,
        [wire_bytes, raw_bytes]: [u64; 2],
        time: Option<Duration>,
    ) -> CallCounts {
        CallCounts {
            calls: 1,
            bytes: bytes as u64,
            wire_bytes,
            raw_bytes,
            timed: u64::from(time.is_some()),
            nanoseconds: time.map_or(0, |time| time.as_nanos() as u64),
        }
    }
}

/// Counts of one call that an engine repeats, which differ in time only. Counting a repeat is one addition.
#[derive(Debug)]
pub struct RepeatedCall {
    class: CallClass,
    /// Why the call runs without a codec.
    pub raw_reason: RawReason,
    bytes: usize,
    sent: [u64; 2],
    calls: AtomicU64,
    timed: AtomicU64,
    nanoseconds: AtomicU64,
}

impl RepeatedCall {
    /// Creates counts of zero for a call as [`CommMetrics::count_call`] describes it.
    pub fn new(
        class: CallClass,
        raw_reason: RawReason,
        bytes: usize,
        sent: [u64; 2],
    ) -> RepeatedCall {
        RepeatedCall {
            class,
            raw_reason,
            bytes,
            sent,
            calls: AtomicU64::new(0),
            timed: AtomicU64::new(0),
            nanoseconds: AtomicU64::new(0),
        }
    }

    /// Adds a repeat. A single thread adds at a time: the one that holds the engine.
    #[inline]
    pub fn add(&self, time: Option<Duration>) {
        let add = |count: &AtomicU64, by| {
            count.store(count.load(Ordering::Relaxed) + by, Ordering::Relaxed)
        };
        add(&self.calls, 1);
        if let Some(time) = time {
            add(&self.timed, 1);
            add(&self.nanoseconds, time.as_nanos() as u64);
        }
    }

    /// Returns the counts of all repeats.
    pub fn read(&self) -> CallCounts {
        let calls = self.calls.load(Ordering::Relaxed);
        CallCounts {
            calls,
            bytes: calls * self.bytes as u64,
            wire_bytes: calls * self.sent[0],
            raw_bytes: calls * self.sent[1],
            timed: self.timed.load(Ordering::Relaxed),
            nanoseconds: self.nanoseconds.load(Ordering::Relaxed),
        }
    }
}

/// A counted class. `word` is 0 until the class is met.
#[derive(Debug, Default)]
struct MetricCell {
    word: AtomicU64,
    counts: [AtomicU64; 6],
}

impl MetricCell {
    /// Adds a call. Callers hold the lock of the communicator's counters.
    fn add(&self, by: &CallCounts) {
        let CallCounts {
            calls,
            bytes,
            wire_bytes,
            raw_bytes,
            timed,
            nanoseconds,
        } = *by;
        let by = [calls, bytes, wire_bytes, raw_bytes, timed, nanoseconds];
        for (count, by) in self.counts.iter().zip(by) {
            count.store(count.load(Ordering::Relaxed) + by, Ordering::Relaxed);
        }
    }

    fn read(&self) -> CallCounts {
        let [calls, bytes, wire_bytes, raw_bytes, timed, nanoseconds] =
            [0, 1, 2, 3, 4, 5].map(|at| self.counts[at].load(Ordering::Relaxed));
        CallCounts {
            calls,
            bytes,
            wire_bytes,
            raw_bytes,
            timed,
            nanoseconds,
        }
    }
}

/// The counters of a communicator on one rank.
#[derive(Debug)]
pub struct CommMetrics {
    cells: Box<[MetricCell]>,
    other: MetricCell,
    /// Calls that the engine repeats, and those that it has dropped since the last that was added here.
    repeated: Mutex<Vec<Arc<RepeatedCall>>>,
    /// Nanoseconds of waits for each rank.
    waits: Box<[AtomicU64]>,
}

impl CommMetrics {
    /// Creates counters of zero for a communicator of `nranks`.
    pub(super) fn new(nranks: usize) -> CommMetrics {
        CommMetrics {
            cells: (0..CELLS).map(|_| MetricCell::default()).collect(),
            other: MetricCell::default(),
            repeated: Mutex::default(),
            waits: (0..nranks).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Returns whether call `number` of `bytes` bytes is timed.
    #[inline]
    pub fn is_timed(number: u64, bytes: usize) -> bool {
        // A program may repeat 8 calls for ever, so the choice must not repeat with the numbers.
        let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bytes >= ALWAYS_TIMED || mixed.leading_zeros() >= TIMED_OF_LOG2
    }

    /// Adds a call of `bytes` bytes. This rank sent `sent[0]` bytes, and would have sent `sent[1]` without a codec.
    /// Callers hold the lock of the communicator's counters.
    #[inline]
    pub fn count_call(
        &self,
        class: CallClass,
        bytes: usize,
        sent: [u64; 2],
        time: Option<Duration>,
    ) {
        let counts = CallCounts::of_call(bytes, sent, time);
        self.cell(class.word()).add(&counts);
    }

    /// Includes a call that the engine repeats, and gives up those that it has dropped: their counts move to the cells,
    /// and `dropped` gets them. Callers hold the lock of the communicator's counters.
    pub fn include(&self, call: Arc<RepeatedCall>, mut dropped: impl FnMut(&RepeatedCall)) {
        let mut repeated = self.repeated();
        repeated.retain(|call| {
            let is_used = Arc::strong_count(call) > 1;
            if !is_used {
                self.cell(call.class.word()).add(&call.read());
                dropped(call);
            }
            is_used
        });
        repeated.push(call);
    }

    /// Passes the counts of each call that the engine repeats to `visit`.
    pub fn each_repeated(&self, visit: impl FnMut(&RepeatedCall)) {
        self.repeated().iter().map(|call| &**call).for_each(visit);
    }

    fn repeated(&self) -> MutexGuard<'_, Vec<Arc<RepeatedCall>>> {
        // A panic cannot leave a partial change: no code under the lock panics.
        self.repeated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the cell of a class, which is made if there is room.
    fn cell(&self, word: u64) -> &MetricCell {
        // Fibonacci hashing; classes that meet take the next free cell.
        let first = (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57) as usize;
        for step in 0..CELLS {
            let cell = &self.cells[(first + step) % CELLS];
            match cell.word.load(Ordering::Relaxed) {
                found if found == word => return cell,
                0 => {
                    cell.word.store(word, Ordering::Relaxed);
                    return cell;
                }
                _ => {}
            }
        }
        &self.other
    }

    /// Adds a wait for `rank`.
    pub fn add_wait(&self, rank: usize, time: Duration) {
        if let Some(wait) = self.waits.get(rank) {
            wait.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// Returns the counts of all classes that were met, in order, and of the calls beyond them (`None`).
    pub fn calls(&self) -> Vec<(Option<CallClass>, CallCounts)> {
        // Under the lock, the counts of a dropped call are either here or there.
        let repeated = self.repeated();
        let mut by_class = BTreeMap::<u64, CallCounts>::new();
        let cells = self.cells.iter();
        let cells = cells.map(|cell| (cell.word.load(Ordering::Relaxed), cell.read()));
        let of_repeated = repeated.iter().map(|call| (call.class.word(), call.read()));
        for (word, counts) in cells.chain(of_repeated) {
            by_class.entry(word).or_default().add(&counts);
        }
        let met = by_class.into_iter().filter(|(_, counts)| counts.calls > 0);
        let mut calls: Vec<_> = met
            .filter_map(|(word, counts)| Some((Some(CallClass::from_word(word)?), counts)))
            .collect();
        let other = self.other.read();
        if other.calls > 0 {
            calls.push((None, other));
        }
        calls
    }

    /// Returns the ranks that this rank has waited for, with the time.
    pub fn waits(&self) -> Vec<(usize, Duration)> {
        let waits = self.waits.iter().map(|wait| wait.load(Ordering::Relaxed));
        let waits = waits
            .enumerate()
            .filter(|(_, nanoseconds)| *nanoseconds > 0);
        waits
            .map(|(rank, nanoseconds)| (rank, Duration::from_nanos(nanoseconds)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(bytes: usize) -> CallClass {
        CallClass::new(Collective::AllReduce, CodecKind::Linear8, bytes)
    }

    #[test]
    fn calls_count_by_collective_codec_and_power_of_two() {
        let metrics = CommMetrics::new(2);
        let time = Some(Duration::from_micros(3));
        metrics.count_call(class(1024), 1024, [300, 1100], time);
        metrics.count_call(class(513), 513, [200, 700], None);
        metrics.count_call(class(1025), 1025, [500, 500], time);
        let raw = CallClass::new(Collective::Broadcast, CodecKind::Raw, 0);
        metrics.count_call(raw, 0, [0; 2], None);
        let calls = metrics.calls();
        let small = CallCounts {
            calls: 2,
            bytes: 1537,
            wire_bytes: 500,
            raw_bytes: 1800,
            timed: 1,
            nanoseconds: 3000,
        };
        assert_eq!(calls.len(), 3);
        assert!(calls.contains(&(Some(class(1000)), small)), "{calls:?}");
        assert!(
            calls
                .iter()
                .any(|(class, counts)| *class == Some(raw) && counts.calls == 1)
        );
    }

    #[test]
    fn every_class_survives_its_word() {
        for collective in Collective::ALL {
            for codec in CodecKind::ALL {
                for bytes in [0, 1, 2, 3, 1 << 20, usize::MAX >> 1] {
                    let class = CallClass::new(collective, codec, bytes);
                    assert_eq!(CallClass::from_word(class.word()), Some(class));
                }
            }
        }
        assert_eq!(CallClass::from_word(0), None);
    }

    #[test]
    fn classes_beyond_the_cells_count_as_others() {
        let metrics = CommMetrics::new(1);
        let mut classes = Vec::new();
        for collective in Collective::ALL {
            for codec in CodecKind::ALL {
                classes.push(CallClass::new(collective, codec, 64));
            }
        }
        assert!(classes.len() > CELLS);
        for class in &classes {
            metrics.count_call(*class, 64, [1; 2], None);
        }
        let calls = metrics.calls();
        assert_eq!(calls.len(), CELLS + 1);
        let all: u64 = calls.iter().map(|(_, counts)| counts.calls).sum();
        assert_eq!(all, classes.len() as u64);
        assert_eq!(calls.last().unwrap().0, None);
    }

    #[test]
    fn repeated_calls_count_while_they_are_used_and_afterwards() {
        let metrics = CommMetrics::new(1);
        let raw = CallClass::new(Collective::AllReduce, CodecKind::Raw, 8);
        let time = Some(Duration::from_micros(2));
        metrics.count_call(raw, 8, [16, 16], time);
        let repeated = || Arc::new(RepeatedCall::new(raw, RawReason::NotAsked, 8, [16, 16]));
        let (first, second) = (repeated(), repeated());
        let mut moved = Vec::new();
        metrics.include(first.clone(), |call| moved.push(call.read().calls));
        first.add(None);
        first.add(time);
        let of_three = CallCounts {
            calls: 3,
            bytes: 24,
            wire_bytes: 48,
            raw_bytes: 48,
            timed: 2,
            nanoseconds: 4000,
        };
        assert_eq!(metrics.calls(), [(Some(raw), of_three)]);
        drop(first);
        metrics.include(second.clone(), |call| moved.push(call.read().calls));
        assert_eq!(moved, [2]);
        assert_eq!(metrics.calls(), [(Some(raw), of_three)]);
        second.add(None);
        assert_eq!(metrics.calls()[0].1.calls, 4);
        let mut live = 0;
        metrics.each_repeated(|call| live += call.read().calls);
        assert_eq!(live, 1);
    }

    #[test]
    fn waits_add_up_by_rank() {
        let metrics = CommMetrics::new(3);
        metrics.add_wait(2, Duration::from_millis(5));
        metrics.add_wait(2, Duration::from_millis(7));
        metrics.add_wait(9, Duration::from_millis(7));
        assert_eq!(metrics.waits(), [(2, Duration::from_millis(12))]);
    }

    #[test]
    fn large_calls_are_timed_always_and_small_ones_in_turn() {
        assert!((0..8).all(|number| CommMetrics::is_timed(number, 64 << 10)));
        // A step of a program makes so many calls, and one of them is looked at.
        for calls in 1..=64 {
            for at in 0..calls.min(8) {
                let numbers = (0..16384).map(|step| step * calls + at);
                let timed = numbers.filter(|&number| CommMetrics::is_timed(number, 8));
                let timed = timed.count();
                assert!((150..=400).contains(&timed), "{at} of {calls}: {timed}");
            }
        }
    }
}
