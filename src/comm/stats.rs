//! Counters of a communicator's calls on this rank.

use super::choice::CodecDecision;
use super::{Call, Communicator, RawReason, Report};
use crate::recorder::{self, CallClass, CommLabel, CommMetrics, FlightRecorder, RepeatedCall};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Counts of this rank's calls since the communicator was made. A captured call counts once, when it
/// is recorded; replays of its graph do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CodecStats {
    /// Number of calls with a codec inside hosts, between hosts, or both.
    pub coded_calls: u64,
    /// Number of calls without a codec for each reason, in the order of [`RawReason::ALL`].
    pub exact_calls: [u64; RawReason::ALL.len()],
    /// Bytes that this rank sent.
    pub wire_bytes: u64,
    /// Bytes that this rank would have sent with the same algorithms and no codec.
    pub raw_bytes: u64,
    /// Number of coded calls of which a window was also summed exactly and compared.
    pub sampled: u64,
    /// The largest relative RMS error of the sampled calls.
    pub worst_error: f64,
    /// Whether a sample's error was above the bound, so that later calls run without a codec.
    pub switched_off: bool,
}

impl CodecStats {
    /// Returns the number of bytes that codecs saved on the wire.
    pub fn bytes_saved(&self) -> u64 {
        self.raw_bytes.saturating_sub(self.wire_bytes)
    }

    fn add_repeated(&mut self, call: &RepeatedCall) {
        let counts = call.read();
        self.exact_calls[call.raw_reason as usize] += counts.calls;
        self.wire_bytes += counts.wire_bytes;
        self.raw_bytes += counts.raw_bytes;
    }

    /// Returns the number of calls that ran without a codec because of `why`.
    pub fn exact(&self, why: RawReason) -> u64 {
        self.exact_calls[why as usize]
    }
}

impl fmt::Display for CodecStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact: u64 = self.exact_calls.iter().sum();
        write!(f, "{} coded, {exact} exact", self.coded_calls)?;
        let reasons: Vec<String> = RawReason::ALL
            .into_iter()
            .filter(|&why| self.exact(why) > 0)
            .map(|why| format!("{} {}", self.exact(why), why.name()))
            .collect();
        if !reasons.is_empty() {
            write!(f, " ({})", reasons.join(", "))?;
        }
        let saved = self.bytes_saved();
        write!(f, "; {} bytes sent, {saved} saved", self.wire_bytes)?;
        if self.sampled > 0 {
            let (sampled, worst) = (self.sampled, self.worst_error);
            write!(f, "; {sampled} samples, the worst off by {worst:.3e}")?;
        }
        Ok(())
    }
}

/// The counters of one communicator.
#[derive(Debug, Default)]
pub(super) struct CommCounters(Mutex<CodecStats>);

impl CommCounters {
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut CodecStats) -> T) -> T {
        // Each change leaves the counts consistent, so a poisoned lock does not matter.
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a call that ran to the counters. Runs `also` under their lock.
    fn count_call(&self, decision: &CodecDecision, report: &Report, also: impl FnOnce()) {
        let exact = match (decision.raw_reason, report.codec.is_lossy()) {
            (None, true) => None,
            (Some(why), _) => Some(why),
            (None, false) if decision.codec.auto => Some(RawReason::Costs),
            // The codec is for contributions inside hosts, but the algorithm treats all ranks alike and uses
            // only the codec between hosts.
            (None, false) => Some(RawReason::NotAsked),
        };
        self.change(|stats| {
            match exact {
                Some(why) => stats.exact_calls[why as usize] += 1,
                None => stats.coded_calls += 1,
            }
            stats.wire_bytes += report.wire_bytes;
            stats.raw_bytes += report.raw_bytes;
            also();
        });
    }
}

/// Returns the bytes of the larger buffer of a call, over all ranks.
pub(super) fn call_bytes(call: &Call, nranks: usize) -> usize {
    let has_blocks = call.collective.splits_input() || call.collective.joins_output();
    let blocks = if has_blocks { nranks } else { 1 };
    // The buffers exist, so the product does not overflow; where this rank has none, it is the largest number.
    let bytes = call.count.checked_mul(call.dtype.size() * blocks);
    bytes.unwrap_or(usize::MAX >> 1)
}

impl Communicator {
    /// Adds a call that ran to the counters, with its time if it was measured.
    pub(super) fn count_call(
        &self,
        call: &Call,
        decision: &CodecDecision,
        report: &Report,
        time: Option<Duration>,
    ) {
        if self.recorder.is_muted() {
            return;
        }
        let bytes = call_bytes(call, self.nranks());
        let class = CallClass::new(call.collective, report.codec.inter.kind, bytes);
        let metrics = self.recorder.metrics();
        self.counters.count_call(decision, report, || {
            metrics.count_call(class, bytes, [report.wire_bytes, report.raw_bytes], time);
        });
    }

    /// Makes the counters of a call that the engine is to repeat without a codec. Its first runs have been counted.
    pub(super) fn count_repeats(
        &self,
        call: &Call,
        raw_reason: RawReason,
        report: &Report,
    ) -> Arc<RepeatedCall> {
        let bytes = call_bytes(call, self.nranks());
        let class = CallClass::new(call.collective, report.codec.inter.kind, bytes);
        let sent = [report.wire_bytes, report.raw_bytes];
        let repeated = Arc::new(RepeatedCall::new(class, raw_reason, bytes, sent));
        let metrics = self.recorder.metrics();
        self.counters
            .change(|stats| metrics.include(repeated.clone(), |call| stats.add_repeated(call)));
        repeated
    }

    /// Reads the clock before a call of `bytes` bytes if its time is counted.
    #[inline]
    pub(super) fn start_clock(&self, bytes: usize) -> Option<Instant> {
        let recorder = &self.recorder;
        let is_timed = !recorder.is_muted() && CommMetrics::is_timed(recorder.count(), bytes);
        is_timed.then(Instant::now)
    }

    /// Returns the counters of this rank's calls by collective, codec and size, and of its waits for other ranks, as one
    /// JSON object. In a forked child of the process it has no calls.
    pub fn metrics_json(&self) -> String {
        match self.owner.is_this() {
            true => recorder::metrics_json(&self.recorder),
            false => recorder::metrics_json(&FlightRecorder::new(CommLabel::default())),
        }
    }

    /// Returns the counts of this rank's calls so far. In a forked child of the process all counts
    /// are zero.
    pub fn codec_stats(&self) -> CodecStats {
        match self.owner.is_this() {
            true => self.counters.change(|stats| {
                let mut all = *stats;
                let metrics = self.recorder.metrics();
                metrics.each_repeated(|call| all.add_repeated(call));
                all
            }),
            false => CodecStats::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Algorithm, CodecSetting};

    #[test]
    fn bytes_and_reasons_are_counted() {
        let counters = CommCounters::default();
        let setting = |text: &str| text.parse::<CodecSetting>().unwrap();
        let report = |codec: &str, wire_bytes, raw_bytes| Report {
            codec: setting(codec),
            algorithm: Algorithm::Ring,
            transport: None,
            channels: 1,
            wire_bytes,
            raw_bytes,
            input: None,
            residual_norm: None,
            fused: 1,
        };
        let ran = |asked: &str, raw_reason, report| {
            let codec = setting(asked);
            counters.count_call(&CodecDecision { codec, raw_reason }, &report, || {});
        };
        // A call counts as coded if there is a codec inside hosts or between hosts.
        ran("linear8", None, report("linear8", 260_000, 1_024_000));
        let inside = "intra=linear8,inter=raw";
        ran(inside, None, report(inside, 260_000, 512_000));
        let between = "intra=raw,inter=cast16";
        ran(between, None, report(between, 2_000, 4_000));
        ran("raw", Some(RawReason::Small), report("raw", 100, 100));
        ran("raw", Some(RawReason::DType), report("raw", 10, 10));
        // The next calls run without a codec. The cost model rejects the first codec. The second codec is
        // only for messages inside hosts, and the algorithm treats all ranks alike.
        ran("auto:linear8", None, report("raw", 0, 0));
        ran(inside, None, report("raw", 0, 0));
        let stats = counters.change(|stats| *stats);
        assert_eq!(
            (
                stats.exact(RawReason::Costs),
                stats.exact(RawReason::NotAsked)
            ),
            (1, 1)
        );
        assert_eq!(
            (stats.coded_calls, stats.exact_calls.iter().sum::<u64>()),
            (3, 4)
        );
        assert_eq!(
            (stats.exact(RawReason::Small), stats.exact(RawReason::DType)),
            (1, 1)
        );
        assert_eq!(stats.wire_bytes, 522_110);
        assert_eq!(stats.raw_bytes, 1_024_000 + 512_000 + 4_000 + 110);
        assert_eq!(stats.bytes_saved(), 1_018_000);
        // examples/ddp/compare.py parses this line of the log.
        assert_eq!(
            stats.to_string(),
            "3 coded, 4 exact (1 no codec, 1 data type, 1 small, 1 does not pay); 522110 bytes sent, 1018000 saved"
        );
    }
}
