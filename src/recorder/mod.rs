//! Flight recorder: the latest calls of each communicator, for a person who asks why a job hangs.
//!
//! A recorder costs a dozen stores a call, so it is always on. Its times are those of the last heartbeat before. Its calls are shown
//! by `cinch ps`, where `CINCH_PS` permits it, and written to the file of `CINCH_DUMP_FILE` when a communicator
//! fails or the process gets SIGUSR2.

mod gather;
mod json;
mod metrics;
mod prometheus;
mod service;
mod snapshot;
mod socket_file;
mod text_service;

pub use gather::{CommSnapshot, GatheredRank, JobSnapshot, MissingRank};
pub use json::{metrics_json, process_json};
pub use metrics::{CallClass, CallCounts, CommMetrics, RepeatedCall, SHORTEST_WAIT};
pub use service::{RecorderHandle, RecorderSettings, dump, offer_text_service, register};
pub use snapshot::{ProcessSnapshot, RankSnapshot};
pub use socket_file::{check_folder, remove_stale, socket_folder};
pub use text_service::{TextReply, TextServiceSettings, TextSession};

use crate::error::{Error, ErrorKind};
use crate::sync::Fault;
use crate::sys::clock::last_tick;
use crate::types::{CallSignature, Collective, SIGNATURE_WORDS};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Number of calls that a recorder keeps.
pub const KEPT: usize = 256;

/// The state of a recorded call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallState {
    /// The call has begun on this rank and has not returned.
    Running = 0,
    /// The call has returned.
    Done = 1,
    /// The call waits for its turn on a GPU stream, runs there, or has ended. Only the GPU knows which.
    Queued = 2,
}

impl CallState {
    /// Returns the state as a lower-case word.
    pub fn name(self) -> &'static str {
        match self {
            CallState::Running => "running",
            CallState::Done => "done",
            CallState::Queued => "queued",
        }
    }

    fn from_number(number: u8) -> CallState {
        match number {
            0 => CallState::Running,
            1 => CallState::Done,
            _ => CallState::Queued,
        }
    }
}

/// Names a communicator and its ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommLabel {
    /// The name that the program gave; may be empty.
    pub name: String,
    /// Identifies the communicator; equal on all its ranks.
    pub id: [u8; 8],
    /// Number of this rank.
    pub rank: usize,
    /// Each rank with its host and process.
    pub ranks: Vec<RankName>,
    /// The rank's GPU; `None` on host memory.
    pub gpu: Option<GpuNumbers>,
}

/// Names a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankName {
    /// The rank with its host and process, for people.
    pub text: String,
    /// Name of the host.
    pub host: String,
    /// Process id, in the PID namespace of the rank.
    pub pid: u32,
}

/// Numbers of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuNumbers {
    /// Number by which CUDA knows the GPU in this process.
    pub cuda: u32,
    /// Number by which NVML knows the GPU on this host, if it does.
    pub nvml: Option<u32>,
}

/// A step by which a rank ends its communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndStep {
    /// The rank makes no more calls, and waits for those that run.
    Closing = 1,
    /// The program has given up its handle.
    Destroyed = 2,
    /// This rank has aborted the communicator.
    Aborted = 4,
}

/// A recorded call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRecord {
    /// Number of calls that the recorder has seen before this one.
    pub number: u64,
    /// Signature of the call, see [`crate::types::CallSignature::describe`].
    pub words: [u64; SIGNATURE_WORDS],
    /// State of the call.
    pub state: CallState,
    /// Nanoseconds of the host's monotonic clock at the last heartbeat before the begin.
    pub begun: u64,
}

/// The messages that a rank waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitRecord {
    /// Each rank with what is missing from it, for people.
    pub missing: Vec<(usize, String)>,
    /// Nanoseconds of the host's monotonic clock at the begin of the wait.
    pub since: u64,
}

/// A call in the ring, which fills a cache line. `version` is 2n + 1 while call n is written, and 2n + 2 from then on.
#[derive(Debug, Default)]
#[repr(align(64))]
struct RingEntry {
    version: AtomicU64,
    words: [AtomicU64; SIGNATURE_WORDS],
    state: AtomicU8,
    begun: AtomicU64,
}

/// The latest calls of a communicator on this rank. One thread at a time writes: the one that holds the engine.
#[derive(Debug)]
pub struct FlightRecorder {
    label: CommLabel,
    entries: Box<[RingEntry]>,
    /// Number of calls so far.
    count: AtomicU64,
    /// Whether `waits` has a value, so that a call without waits takes no lock.
    has_waits: AtomicBool,
    waits: Mutex<Option<WaitRecord>>,
    failure: OnceLock<String>,
    /// Number of calls of each collective; fused calls count one by one.
    collective_calls: [AtomicU64; Collective::ALL.len()],
    /// The steps of [`EndStep`] that were taken, one bit each.
    end_steps: AtomicU8,
    fault: OnceLock<Arc<Fault>>,
    metrics: CommMetrics,
    is_muted: AtomicBool,
}

impl FlightRecorder {
    /// Creates a recorder that is not shown; [`register`] creates those of communicators.
    pub fn new(label: CommLabel) -> FlightRecorder {
        FlightRecorder {
            metrics: CommMetrics::new(label.ranks.len()),
            label,
            entries: (0..KEPT).map(|_| RingEntry::default()).collect(),
            count: AtomicU64::new(0),
            has_waits: AtomicBool::new(false),
            waits: Mutex::new(None),
            failure: OnceLock::new(),
            collective_calls: Default::default(),
            end_steps: AtomicU8::new(0),
            fault: OnceLock::new(),
            is_muted: AtomicBool::new(false),
        }
    }

    /// Makes calls leave recorder and counters alone, or record again. Benchmarks compare both.
    pub fn mute(&self, is_muted: bool) {
        self.is_muted.store(is_muted, Ordering::Relaxed);
    }

    /// Returns whether calls leave the recorder alone.
    #[inline]
    pub fn is_muted(&self) -> bool {
        self.is_muted.load(Ordering::Relaxed)
    }

    /// Returns the communicator's names.
    pub fn label(&self) -> &CommLabel {
        &self.label
    }

    /// Returns the counters of this rank's calls and waits.
    pub fn metrics(&self) -> &CommMetrics {
        &self.metrics
    }

    /// Records the begin of a call, and returns its number.
    #[inline]
    pub fn begin(&self, words: &[u64; SIGNATURE_WORDS], state: CallState) -> u64 {
        let number = self.count.load(Ordering::Relaxed);
        let entry = &self.entries[number as usize % KEPT];
        entry.version.store(2 * number + 1, Ordering::Relaxed);
        // SYNC POINT call record: the odd version is visible before any new field. Read in `record`.
        fence(Ordering::Release);
        for (to, word) in entry.words.iter().zip(words) {
            to.store(*word, Ordering::Relaxed);
        }
        entry.begun.store(last_tick(), Ordering::Relaxed);
        entry.state.store(state as u8, Ordering::Relaxed);
        // SYNC POINT call record: publishes the fields with the even version. Read in `record`.
        entry.version.store(2 * number + 2, Ordering::Release);
        self.count.store(number + 1, Ordering::Relaxed);
        if let Some((collective, calls)) = CallSignature::collective_calls(words) {
            let counter = &self.collective_calls[collective as usize];
            // A single thread writes at a time, so that no atomic addition is needed.
            counter.store(counter.load(Ordering::Relaxed) + calls, Ordering::Relaxed);
        }
        number
    }

    /// Records the end of call `number`, unless the ring has a later call in its place.
    #[inline]
    pub fn end(&self, number: u64) {
        let entry = &self.entries[number as usize % KEPT];
        if entry.version.load(Ordering::Relaxed) == 2 * number + 2 {
            entry.state.store(CallState::Done as u8, Ordering::Relaxed);
        }
        if self.has_waits.load(Ordering::Relaxed) {
            self.set_waits(None);
        }
    }

    /// Records what the rank waits for, or that it waits no longer.
    pub fn set_waits(&self, waits: Option<WaitRecord>) {
        self.has_waits.store(waits.is_some(), Ordering::Relaxed);
        *self.waits.lock().unwrap_or_else(PoisonError::into_inner) = waits;
    }

    /// Returns what the rank waits for.
    pub fn waits(&self) -> Option<WaitRecord> {
        let waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.clone()
    }

    /// Records why the communicator failed. The first reason stays. Returns whether this is the first.
    pub fn fail(&self, reason: &str) -> bool {
        self.failure.set(reason.to_string()).is_ok()
    }

    /// Returns why the communicator failed.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Makes failures visible that no call has met yet: those of `fault`, the communicator's own.
    pub fn set_fault(&self, fault: Arc<Fault>) {
        let _ = self.fault.set(fault);
    }

    /// Returns why the communicator fails on this rank. Failures and exits of other ranks do not count for a rank that
    /// ends the communicator.
    pub fn error(&self) -> Option<Error> {
        let error = self.fault.get()?.reason()?;
        let is_of_end = matches!(error.kind(), ErrorKind::Remote | ErrorKind::Aborted);
        (!(is_of_end && self.is_ending())).then(|| error.clone())
    }

    /// Records a step by which this rank ends the communicator.
    pub fn mark_end(&self, step: EndStep) {
        self.end_steps.fetch_or(step as u8, Ordering::Relaxed);
    }

    /// Returns whether this rank has taken a step.
    pub fn has_ended(&self, step: EndStep) -> bool {
        self.end_steps.load(Ordering::Relaxed) & step as u8 != 0
    }

    fn is_ending(&self) -> bool {
        self.end_steps.load(Ordering::Relaxed) != 0
    }

    /// Returns the number of calls of each collective, by the collective's number. Fused calls count one by one.
    pub fn collective_counts(&self) -> Vec<u64> {
        let counters = self.collective_calls.iter();
        counters
            .map(|count| count.load(Ordering::Relaxed))
            .collect()
    }

    /// Returns the number of calls so far.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the latest calls, oldest first, without those that are overwritten meanwhile.
    pub fn records(&self) -> Vec<CallRecord> {
        let end = self.count();
        let first = end.saturating_sub(KEPT as u64);
        (first..end)
            .filter_map(|number| self.record(number))
            .collect()
    }

    fn record(&self, number: u64) -> Option<CallRecord> {
        let entry = &self.entries[number as usize % KEPT];
        let wanted = 2 * number + 2;
        // SYNC POINT call record: the fields of the even version are visible. Published in `begin`.
        if entry.version.load(Ordering::Acquire) != wanted {
            return None;
        }
        let record = CallRecord {
            number,
            words: std::array::from_fn(|at| entry.words[at].load(Ordering::Relaxed)),
            state: CallState::from_number(entry.state.load(Ordering::Relaxed)),
            begun: entry.begun.load(Ordering::Relaxed),
        };
        // SYNC POINT call record: a field of a later call makes its odd version visible here. Published in `begin`.
        fence(Ordering::Acquire);
        (entry.version.load(Ordering::Relaxed) == wanted).then_some(record)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn words(number: u64) -> [u64; SIGNATURE_WORDS] {
        [number; SIGNATURE_WORDS]
    }

    #[test]
    fn the_latest_calls_are_kept_with_their_states() {
        let recorder = FlightRecorder::new(CommLabel::default());
        assert!(recorder.records().is_empty());
        for number in 0..1000 {
            assert_eq!(recorder.begin(&words(number), CallState::Running), number);
            if number != 998 {
                recorder.end(number);
            }
        }
        let records = recorder.records();
        let numbers: Vec<u64> = records.iter().map(|record| record.number).collect();
        assert_eq!(numbers, (744..1000).collect::<Vec<_>>());
        for record in &records {
            assert_eq!(record.words, words(record.number));
            let is_open = record.number == 998;
            assert_eq!(record.state == CallState::Running, is_open);
            assert!(record.begun > 0);
        }
        // The end of a call that is no longer in the ring changes nothing.
        recorder.end(998 - KEPT as u64);
        assert_eq!(recorder.records(), records);
    }

    #[test]
    fn a_reader_beside_the_writer_sees_whole_calls() {
        let recorder = FlightRecorder::new(CommLabel::default());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..200_000 {
                    recorder.begin(&words(number), CallState::Running);
                    recorder.end(number);
                }
            });
            while recorder.count() < 200_000 {
                for record in recorder.records() {
                    assert_eq!(record.words, words(record.number));
                    assert!(record.begun > 0);
                }
            }
        });
    }

    #[test]
    fn the_end_of_a_call_ends_its_waits() {
        let recorder = FlightRecorder::new(CommLabel::default());
        let number = recorder.begin(&words(0), CallState::Running);
        let wait = WaitRecord {
            missing: vec![(2, "a message".into())],
            since: 5,
        };
        recorder.set_waits(Some(wait.clone()));
        assert_eq!(recorder.waits(), Some(wait));
        recorder.end(number);
        assert_eq!(recorder.waits(), None);
        assert!(recorder.fail("first") && !recorder.fail("second"));
        assert_eq!(recorder.failure(), Some("first"));
    }
}
