//! What a communicator's calls did, counted on this rank.

use super::choice::CodecDecision;
use super::{Communicator, RawReason, Report};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Counts since the communicator was made, on this rank. Replays of captured graphs are not seen;
/// a captured call counts once, when it is recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CodecStats {
    /// Calls that a codec carried, on either level.
    pub coded_calls: u64,
    /// Calls that ran exactly, by reason: the order is that of [`RawReason::ALL`].
    pub exact_calls: [u64; RawReason::ALL.len()],
    /// Bytes that this rank sent.
    pub wire_bytes: u64,
    /// Bytes that it would have sent with the same algorithms and no codec.
    pub raw_bytes: u64,
    /// Coded calls of which a slice was also run exactly, and compared.
    pub sampled: u64,
    /// The largest relative RMS error of those.
    pub worst_error: f64,
    /// Whether such an error was beyond the bound, so that calls have been exact since.
    pub switched_off: bool,
}

impl CodecStats {
    /// Bytes that codecs kept off the wire.
    pub fn bytes_saved(&self) -> u64 {
        self.raw_bytes.saturating_sub(self.wire_bytes)
    }

    /// Calls that ran exactly because of `why`.
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
        // Whole after every change, so that a panic elsewhere does not matter.
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes note of a call that ran.
    pub(super) fn ran(&self, decision: &CodecDecision, report: &Report) {
        let exact = match (decision.raw_reason, report.codecs().is_lossy()) {
            (None, true) => None,
            (Some(why), _) => Some(why),
            (None, false) if decision.codec.auto => Some(RawReason::Costs),
            // Its codec is for contributions inside hosts, and its algorithm has one level.
            (None, false) => Some(RawReason::NotAsked),
        };
        self.change(|stats| {
            match exact {
                Some(why) => stats.exact_calls[why as usize] += 1,
                None => stats.coded_calls += 1,
            }
            stats.wire_bytes += report.wire_bytes;
            stats.raw_bytes += report.raw_bytes;
        });
    }
}

impl Communicator {
    /// What this communicator's calls did so far, on this rank.
    /// None in a child that the process forked, which has no part in them.
    pub fn codec_stats(&self) -> CodecStats {
        match self.owner.is_this() {
            true => self.counters.change(|stats| *stats),
            false => CodecStats::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Algorithm, CodecChoice, LevelCodecs};

    #[test]
    fn bytes_and_reasons_add_up() {
        let counters = CommCounters::default();
        let levels = |text: &str| match LevelCodecs::names_levels(text) {
            true => text.parse().unwrap(),
            false => LevelCodecs::of(text.parse().unwrap()),
        };
        let report = |codecs: &str, wire_bytes, raw_bytes| {
            let codecs = levels(codecs);
            Report {
                codec: codecs.inter,
                intra: codecs.intra,
                algorithm: Algorithm::Ring,
                transport: None,
                channels: 1,
                wire_bytes,
                raw_bytes,
                input: None,
                fused: 1,
            }
        };
        let ran = |asked: &str, raw_reason, report| {
            let (auto, asked) = match asked.strip_prefix("auto:") {
                Some(asked) => (true, levels(asked)),
                None => (false, levels(asked)),
            };
            let codec = CodecChoice {
                spec: asked.inter,
                auto,
                intra: Some(asked.intra),
            };
            counters.ran(&CodecDecision { codec, raw_reason }, &report);
        };
        // A codec on either level is one.
        ran("linear8", None, report("linear8", 260_000, 1_024_000));
        let inside = "intra=linear8,inter=raw";
        ran(inside, None, report(inside, 260_000, 512_000));
        let between = "intra=raw,inter=cast16";
        ran(between, None, report(between, 2_000, 4_000));
        ran("raw", Some(RawReason::Small), report("raw", 100, 100));
        ran("raw", Some(RawReason::DType), report("raw", 10, 10));
        // The model decided, or nobody did.
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
        // examples/ddp/compare.py reads this out of the log.
        assert_eq!(
            stats.to_string(),
            "3 coded, 4 exact (1 no codec, 1 data type, 1 small, 1 does not pay); 522110 bytes sent, 1018000 saved"
        );
    }
}
