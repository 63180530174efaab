//! The measurement of all rows, whatever memory the buffers are in: a [`Backend`] turns each row into a
//! record.

use super::measure::{Effort, is_late};
use super::options::BenchOptions;
use super::output::Output;
use super::record::Record;
use super::row::Row;
use super::world::World;
use cinch::Result;
use std::time::{Duration, Instant};

/// What measures rows: host memory or GPUs.
pub trait Backend {
    /// The ranks, which agree through it.
    type World: World;

    /// Returns the ranks.
    fn world(&self) -> &Self::World;

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
            check: options.check == 1,
            deadline: match options.suite {
                true => row_deadline(deadline, left),
                false => deadline,
            },
        };
        let record = backend.measure(row, effort)?;
        output.row(&record)?;
        records.push(record);
    }
    output.finish(&records)?;
    Ok(records)
}

/// Returns when the next of `left` rows should end so that each row has its share of the time. A row
/// takes up to half of what is left until its deadline.
fn row_deadline(deadline: Option<Instant>, left: usize) -> Option<Instant> {
    let now = Instant::now();
    let share = deadline?.saturating_duration_since(now) / left.max(1) as u32;
    Some(now + 2 * share)
}
