//! Measures all rows on host memory or GPUs. A [`Backend`] turns each row into a record.

use super::options::BenchOptions;
use super::output::Output;
use super::record::Record;
use super::row::Row;
use super::world::BenchRank;
use cinch::Result;
use std::time::{Duration, Instant};

/// The part of a bench that depends on where the buffers are: host memory or GPUs.
pub trait Backend {
    /// A rank, over which ranks agree on times and results.
    type Rank: BenchRank;

    /// Returns this rank, over which ranks agree on times and results.
    fn world(&self) -> &Self::Rank;

    /// Returns the candidates of a row's call and the winner, as text.
    ///
    /// # Errors
    /// Returns the communicator's errors.
    fn explain(&self, row: &Row) -> Result<String>;

    /// Measures a row. All ranks get the same record.
    ///
    /// # Errors
    /// Returns the errors of the calls.
    fn measure(&mut self, row: &Row, effort: Effort) -> Result<Record>;
}

/// How long and how thoroughly to measure a row.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Number of timed iterations.
    pub iterations: u32,
    /// Untimed iterations before the timed ones.
    pub warmup: u32,
    /// Number of calls whose results are compared with exact ones.
    pub checks: u32,
    /// Time at which the row should end, if there is a time limit. Rank 0's clock decides.
    pub deadline: Option<Instant>,
}

impl Effort {
    /// Returns the middle of the time that remains until the deadline. Warm-up ends then.
    pub fn half(&self) -> Option<Instant> {
        let now = Instant::now();
        let left = self.deadline?.saturating_duration_since(now);
        Some(now + left / 2)
    }

    /// Returns how many iterations of `each` seconds fit before the deadline. The number comes from
    /// rank 0's clock and the slowest rank's iterations, so all ranks get the same number.
    ///
    /// # Errors
    /// Returns the errors of the all_gather.
    pub fn affordable<W: BenchRank>(&self, world: &W, each: f64) -> Result<usize> {
        let wanted = self.iterations as usize;
        let Some(deadline) = self.deadline else {
            return Ok(wanted);
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let all = world.gather_words(&[left.as_secs_f64().to_bits(), each.to_bits()])?;
        let left = f64::from_bits(all[0]);
        let each = all.chunks(2).map(|words| f64::from_bits(words[1]));
        Ok(((left / 2.0 / each.fold(1e-9, f64::max)) as usize).clamp(1, wanted))
    }
}

/// Returns whether the time `by` has passed, by rank 0's clock. All ranks get the same answer.
///
/// # Errors
/// Returns the errors of the all_gather.
pub fn is_late<W: BenchRank>(world: &W, by: Option<Instant>) -> Result<bool> {
    let Some(by) = by else { return Ok(false) };
    let late = u64::from(Instant::now() >= by);
    Ok(world.gather_words(&[late])?[0] == 1)
}

/// Measures all rows and prints them. All ranks get the same records.
///
/// # Errors
/// Returns the backend's and the output's errors.
pub fn run(
    backend: &mut impl Backend,
    rows: &[Row],
    options: &BenchOptions,
    output: &mut Output,
) -> Result<Vec<Record>> {
    let limit = options.time_limit.map(Duration::from_secs_f64);
    let deadline = limit.map(|limit| Instant::now() + limit);
    let mut records = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let left = rows.len() - index;
        if index > 0 && is_late(backend.world(), deadline)? {
            let all = rows.len();
            output.note(&format!("time limit: {left} of {all} rows were left out"));
            break;
        }
        output.progress(index, rows.len());
        if options.explain {
            output.note(&backend.explain(row)?);
        }
        let starts = index == 0 || rows[index - 1].collective != row.collective;
        if options.suite && starts {
            let mode = if row.graph { "graph" } else { "eager" };
            output.note(&format!("{}, {mode}", row.collective));
        }
        let effort = Effort {
            iterations: options.iters,
            warmup: options.warmup,
            checks: options.check,
            deadline: match options.suite {
                true => row_deadline(deadline, left),
                false => deadline,
            },
        };
        let mut record = backend.measure(row, effort)?;
        output.row(&record)?;
        if options.nccl_tests.per_iter_timing == 0 {
            record.forget_rank_times();
        }
        records.push(record);
    }
    output.finish(&records)?;
    Ok(records)
}

/// Returns the deadline of the next row; `left` rows remain. Each row should take 1/`left` of the
/// remaining time. The deadline lies twice as far away, because a row measures for at most half of
/// the time until its deadline.
fn row_deadline(deadline: Option<Instant>, left: usize) -> Option<Instant> {
    let now = Instant::now();
    let share = deadline?.saturating_duration_since(now) / left.max(1) as u32;
    Some(now + 2 * share)
}
