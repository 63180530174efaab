//! Combines the measurements of all ranks into one result.

use super::metrics::{median, quantile};
use super::row::Row;
use super::verify::{CheckOutcome, same_on_all_ranks};
use super::world::BenchRank;
use cinch::types::{CodecSetting, TransportKind};
use cinch::{Algorithm, Report, Result};

/// Times of a call over its iterations or repetitions, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// Median over the iterations, in seconds.
    pub median: f64,
    /// Shortest iteration, in seconds.
    pub least: f64,
    /// 99th percentile of the iterations, in seconds.
    pub p99: f64,
}

impl Times {
    /// Summarises times that are already sorted.
    pub fn of(sorted: &[f64]) -> Times {
        Times {
            median: median(sorted),
            least: quantile(sorted, 0.0),
            p99: quantile(sorted, 0.99),
        }
    }
}

/// Results of a row in one placement, the same on all ranks.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Times of the slowest rank.
    pub times: Times,
    /// Number of timed iterations.
    pub iterations: usize,
    /// Seconds of each iteration on each rank.
    pub rank_times: Vec<Vec<f64>>,
    /// Elements outside their bound, over all ranks; `None` if not compared.
    pub wrong: Option<u64>,
    /// Largest difference from the exact result.
    pub max_abs_err: Option<f64>,
    /// RMS difference relative to the RMS of the exact result.
    pub rms_rel_err: Option<f64>,
    /// Whether all ranks hold the same bits; `None` where they may differ.
    pub identical: Option<bool>,
    /// Hash of the outputs of all ranks, in rank order.
    pub bits: Option<u64>,
    /// Codecs that the call used.
    pub codecs: CodecSetting,
    /// Algorithm that the call used.
    pub algorithm: Algorithm,
    /// Slowest transport that any rank used.
    pub transport: Option<TransportKind>,
    /// Number of channels that the call used.
    pub channels: usize,
    /// Payload bytes that the busiest rank sent.
    pub wire_bytes: u64,
    /// Bytes that an uncompressed run would have sent, divided by the bytes that were sent; `None`
    /// if no rank sent any.
    pub ratio: Option<f64>,
}

/// Returns each iteration's time on its slowest rank, in seconds, sorted. All ranks must pass
/// slices of equal length.
///
/// # Errors
/// Returns the errors of the all_gather.
pub fn slowest<W: BenchRank>(world: &W, times: &[f64]) -> Result<Vec<f64>> {
    Ok(slowest_of(&times_of_ranks(world, times)?))
}

/// Returns the times of all ranks, in rank order.
fn times_of_ranks<W: BenchRank>(world: &W, times: &[f64]) -> Result<Vec<Vec<f64>>> {
    let words: Vec<u64> = times.iter().map(|time| time.to_bits()).collect();
    let all = world.gather_words(&words)?;
    let ranks = all.chunks(times.len().max(1));
    Ok(ranks
        .map(|rank| rank.iter().map(|&word| f64::from_bits(word)).collect())
        .collect())
}

fn slowest_of(ranks: &[Vec<f64>]) -> Vec<f64> {
    let mut slowest = vec![0.0; ranks.first().map_or(0, Vec::len)];
    for rank in ranks {
        for (most, time) in slowest.iter_mut().zip(rank) {
            *most = time.max(*most);
        }
    }
    slowest.sort_by(f64::total_cmp);
    slowest
}

/// Combines the reports, times and comparisons of all ranks. Every rank gets the same result.
///
/// # Errors
/// Returns the errors of the all_gather.
pub fn share<W: BenchRank>(
    world: &W,
    row: &Row,
    report: &Report,
    times: &[f64],
    outcome: Option<CheckOutcome>,
) -> Result<Measured> {
    let found = outcome.unwrap_or_default();
    let transport = report.transport.map_or(0, |kind| kind as u64 + 1);
    let words = [
        found.wrong,
        found.max_abs_err.to_bits(),
        found.error_squares.to_bits(),
        found.exact_squares.to_bits(),
        found.hash,
        report.wire_bytes,
        transport,
        report.raw_bytes,
    ];
    let all = world.gather_words(&words)?;
    let ranks: Vec<&[u64]> = all.chunks(words.len()).collect();
    let rank_times = times_of_ranks(world, times)?;
    let slowest = slowest_of(&rank_times);
    let real = |word: u64| f64::from_bits(word);
    let (errors, exact): (f64, f64) = ranks.iter().fold((0.0, 0.0), |sums, words| {
        (sums.0 + real(words[2]), sums.1 + real(words[3]))
    });
    let rms = match exact > 0.0 {
        true => (errors / exact).sqrt(),
        false => errors.sqrt(),
    };
    let sum = |of: usize| ranks.iter().map(|words| words[of]).sum::<u64>();
    let (travelled, raw) = (sum(5), sum(7));
    let same = || ranks.iter().all(|words| words[4] == ranks[0][4]);
    let transport = ranks.iter().map(|words| words[6]).max().unwrap_or(0);
    Ok(Measured {
        times: Times::of(&slowest),
        iterations: slowest.len(),
        rank_times,
        wrong: outcome.map(|_| ranks.iter().map(|words| words[0]).sum()),
        max_abs_err: outcome.map(|_| ranks.iter().map(|words| real(words[1])).fold(0.0, f64::max)),
        rms_rel_err: outcome.map(|_| rms),
        identical: outcome
            .filter(|_| same_on_all_ranks(row.collective))
            .map(|_| same()),
        bits: outcome.map(|_| {
            let hashes = ranks.iter().map(|words| words[4]);
            hashes.fold(0, |all: u64, hash| all.rotate_left(7) ^ hash)
        }),
        codecs: report.codec,
        algorithm: report.algorithm,
        transport: TransportKind::ALL
            .into_iter()
            .find(|&kind| kind as u64 + 1 == transport),
        channels: report.channels,
        wire_bytes: ranks.iter().map(|words| words[5]).max().unwrap_or(0),
        ratio: (travelled > 0).then(|| raw as f64 / travelled as f64),
    })
}
