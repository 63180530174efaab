//! What a communicator's calls did, counted on this rank.

use super::{Call, Communicator, Exact, Report};
use crate::codec;
use crate::simd::Isa;
use crate::types::CodecSpec;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Counts since the communicator was made, on this rank. Replays of captured graphs are not seen;
/// a captured call counts once, when it is recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CodecStats {
    /// Calls that a codec carried.
    pub coded_calls: u64,
    /// Calls that ran exactly, by reason: the order is that of [`Exact::ALL`].
    pub exact_calls: [u64; Exact::ALL.len()],
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
    pub fn exact(&self, why: Exact) -> u64 {
        self.exact_calls[why as usize]
    }
}

impl fmt::Display for CodecStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact: u64 = self.exact_calls.iter().sum();
        write!(f, "{} coded, {exact} exact", self.coded_calls)?;
        let reasons: Vec<String> = Exact::ALL
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
pub(super) struct Counters(Mutex<Counted>);

#[derive(Debug, Default)]
struct Counted {
    stats: CodecStats,
    /// The last codec and its wire bytes an element: programs have one or two.
    size: Option<(CodecSpec, f64)>,
}

/// Elements over which the wire bytes of one are averaged: many blocks, and the scales of each.
const LONG: usize = 1 << 16;

impl Counters {
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut CodecStats) -> T) -> T {
        // Whole after every change, so that a panic elsewhere does not matter.
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut counted.stats)
    }

    /// Takes note of a call that ran.
    pub(super) fn ran(&self, call: &Call, exact: Option<Exact>, report: &Report) {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Left to the model of costs, a call may have run without its codec.
        let costs = exact.is_none() && !report.codec.is_lossy();
        let raw = match exact.or(costs.then_some(Exact::Costs)) {
            Some(why) => {
                counted.stats.exact_calls[why as usize] += 1;
                report.wire_bytes
            }
            None => {
                counted.stats.coded_calls += 1;
                let coded = counted.bytes_per_element(report.codec);
                let elements = report.wire_bytes as f64 / coded;
                (elements * call.dtype.size() as f64).round() as u64
            }
        };
        counted.stats.raw_bytes += raw;
        counted.stats.wire_bytes += report.wire_bytes;
    }
}

impl Counted {
    fn bytes_per_element(&mut self, spec: CodecSpec) -> f64 {
        match self.size {
            Some((known, bytes)) if known == spec => bytes,
            _ => {
                // The codec ran, so that it can be built.
                let built = codec::build(spec, Isa::Scalar).ok().flatten();
                let bytes = built.map_or(f64::INFINITY, |codec| {
                    codec.wire_bytes(LONG) as f64 / LONG as f64
                });
                self.size = Some((spec, bytes));
                bytes
            }
        }
    }
}

impl Communicator {
    /// What this communicator's calls did so far, on this rank.
    pub fn codec_stats(&self) -> CodecStats {
        self.counters.change(|stats| *stats)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Algorithm, Collective, DType};

    #[test]
    fn bytes_and_reasons_add_up() {
        let counters = Counters::default();
        let report = |codec: &str, wire_bytes| Report {
            codec: codec.parse().unwrap(),
            intra: codec.parse().unwrap(),
            algorithm: Algorithm::Ring,
            transport: None,
            channels: 1,
            wire_bytes,
            input: None,
            fused: 1,
        };
        let call = |dtype| Call::new(Collective::AllReduce, dtype, 1);
        // 1,000 blocks of 256 elements and one scale.
        counters.ran(&call(DType::F32), None, &report("linear8", 260_000));
        counters.ran(&call(DType::BF16), None, &report("linear8", 260_000));
        counters.ran(&call(DType::F32), None, &report("cast16", 2_000));
        counters.ran(&call(DType::F32), Some(Exact::Small), &report("raw", 100));
        counters.ran(&call(DType::I8), Some(Exact::DType), &report("raw", 10));
        counters.ran(&call(DType::F32), None, &report("raw", 0));
        let stats = counters.change(|stats| *stats);
        assert_eq!(stats.exact(Exact::Costs), 1);
        assert_eq!(
            (stats.coded_calls, stats.exact_calls.iter().sum::<u64>()),
            (3, 3)
        );
        assert_eq!(
            (stats.exact(Exact::Small), stats.exact(Exact::DType)),
            (1, 1)
        );
        assert_eq!(stats.wire_bytes, 522_110);
        assert_eq!(stats.raw_bytes, 1_024_000 + 512_000 + 4_000 + 110);
        assert_eq!(stats.bytes_saved(), 1_018_000);
        // examples/ddp/compare.py reads this out of the log.
        assert_eq!(
            stats.to_string(),
            "3 coded, 3 exact (1 data type, 1 small, 1 does not pay); 522110 bytes sent, 1018000 saved"
        );
    }
}
