//! The suite on host memory: this library alone.

use super::{Case, Cases};
use crate::bench::measure::{Bench, Effort, Placement};
use crate::bench::options::BenchOptions;
use crate::bench::record::{How, Record, RunRecord};
use crate::bench::world::World;
use crate::{FAILURE, WRONG};
use cinch::Result;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// Runs the suite on one of the ranks and returns the exit code.
///
/// # Errors
/// Exit code and sentence.
pub fn main<W: World>(
    world: &W,
    cases: &Cases,
    options: &BenchOptions,
) -> std::result::Result<i32, (i32, String)> {
    let failure = |sentence: String| (FAILURE, sentence);
    let folder = super::folder(options).map_err(failure)?;
    let mut output = match world.rank() {
        0 => Some(Rows::new(&super::rows(folder)).map_err(failure)?),
        _ => None,
    };
    let rank = world.rank();
    let records = run(world, cases, options, &mut output)
        .map_err(|error| failure(format!("rank {rank}: {error}")))?;
    if rank == 0 {
        let said = super::write_report(folder, &records).map_err(failure)?;
        say(&format!("# {said}"));
    }
    let failed = records.iter().any(|record| record.entry.failed());
    Ok(if failed { WRONG } else { 0 })
}

/// Runs all cases; all ranks get the same records.
fn run<W: World>(
    world: &W,
    cases: &Cases,
    options: &BenchOptions,
    output: &mut Option<Rows>,
) -> Result<Vec<Record>> {
    let deadline = options
        .time_limit
        .map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
    let effort = Effort {
        iterations: options.iters,
        warmup: options.warmup,
        check: options.check == 1,
        deadline,
    };
    let run = RunRecord::on_host();
    let how = How {
        nranks: world.nranks(),
        per_gpu: 1,
        hosts: 1,
        processes: true,
        graph: false,
    };
    let mut records = Vec::new();
    for (index, Case { row, .. }) in cases.list.iter().enumerate() {
        if let Some(deadline) = deadline {
            let late = u64::from(index > 0 && Instant::now() >= deadline);
            if world.gather_words(&[late])?[0] == 1 {
                if output.is_some() {
                    let (left, all) = (cases.list.len() - index, cases.list.len());
                    say(&format!("# time limit: {left} of {all} rows were left out"));
                }
                break;
            }
        }
        let effort = Effort {
            deadline: super::row_deadline(deadline, cases.list.len() - index),
            ..effort
        };
        let mut bench = Bench::new(world, &cases.source, *row, effort)?;
        let measured = bench.run(Placement::OutOfPlace)?;
        let record = Record::new(how, &run, row, &measured, 1, "-");
        if let Some(rows) = output {
            rows.write(&record)?;
        }
        records.push(record);
    }
    Ok(records)
}

/// A reader that left is no failure: files and exit code are still worth having.
fn say(text: &str) {
    let _ = writeln!(io::stdout().lock(), "{text}");
}

/// The file of rows, with a line on the screen for each.
struct Rows {
    file: File,
}

impl Rows {
    fn new(path: &Path) -> std::result::Result<Rows, String> {
        let named = |error: io::Error| format!("{}: {error}", path.display());
        Ok(Rows {
            file: File::create(path).map_err(named)?,
        })
    }

    fn write(&mut self, record: &Record) -> Result<()> {
        let named = |error: io::Error| cinch::Error::internal(format!("rows of JSON: {error}"));
        let line = serde_json::to_string(record).map_err(|error| named(error.into()))?;
        writeln!(self.file, "{line}").map_err(named)?;
        let entry = &record.entry;
        say(&format!(
            "{:<14} {:>12} {:>5} {:<19} {:>11.2} us {:>8.3} GB/s",
            record.collective,
            entry.size,
            entry.dtype,
            entry.codec,
            entry.out_of_place.time_us,
            entry.out_of_place.eff_bus_bw
        ));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::world::threads::{self, Flaw};
    use crate::testing::parsed;

    fn records(line: &str, flaw: Flaw) -> Vec<Vec<Record>> {
        let options = parsed(line).unwrap();
        let cases = Cases::new(&options, 3, false).unwrap();
        threads::run(3, flaw, |world| {
            run(world, &cases, &options, &mut None).unwrap()
        })
    }

    #[test]
    fn every_rank_has_every_record() {
        let line = "--suite --output x -b 1K -e 1K --codec raw -n 2 -w 0";
        for records in records(line, Flaw::None) {
            // Seven collectives of two types.
            assert_eq!(records.len(), 14);
            assert!(records.iter().all(|record| !record.entry.failed()));
            assert!(
                records
                    .iter()
                    .all(|record| record.mode == "eager" && record.vs.is_none())
            );
        }
        let wrong = &records(line, Flaw::WrongElement)[1];
        // The element is one of rank 1, which has no result of a reduce.
        let right = wrong.iter().filter(|record| !record.entry.failed());
        assert!(right.clone().all(|record| record.collective == "reduce"));
        assert_eq!(right.count(), 2);
    }

    #[test]
    fn a_time_limit_leaves_rows_out() {
        let line = "--suite --output x -b 1K -e 1K --codec raw -n 2 -w 0 --time-limit 0.000001";
        assert_eq!(records(line, Flaw::None)[2].len(), 1);
    }
}
