//! What every rank saw, made one.

use super::measure::Measured;
use super::metrics::{median, quantile};
use super::row::Row;
use super::verify::{Outcome, same_on_all_ranks};
use super::world::World;
use cinch::types::TransportKind;
use cinch::{Report, Result};

/// Each iteration's time on its slowest rank, in seconds, sorted. All ranks give equally many.
///
/// # Errors
/// Those of the exchange.
pub fn slowest<W: World>(world: &W, times: &[f64]) -> Result<Vec<f64>> {
    let words: Vec<u64> = times.iter().map(|time| time.to_bits()).collect();
    let all = world.gather_words(&words)?;
    let mut slowest = vec![0.0; times.len()];
    for rank in all.chunks(times.len().max(1)) {
        for (most, time) in slowest.iter_mut().zip(rank) {
            *most = f64::from_bits(*time).max(*most);
        }
    }
    slowest.sort_by(f64::total_cmp);
    Ok(slowest)
}

/// Combines reports, times and comparisons; every rank gets the same.
///
/// # Errors
/// Those of the exchange.
pub fn share<W: World>(
    world: &W,
    row: &Row,
    report: &Report,
    times: &[f64],
    outcome: Option<Outcome>,
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
    let slowest = slowest(world, times)?;
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
        median: median(&slowest),
        least: quantile(&slowest, 0.0),
        p99: quantile(&slowest, 0.99),
        iterations: slowest.len(),
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
