//! The suite on host memory: this library alone.

use super::{Case, Cases};
use crate::bench::gpu::output::Output;
use crate::bench::host_count;
use crate::bench::measure::{Bench, Effort, Placement, is_late};
use crate::bench::options::BenchOptions;
use crate::bench::record::{How, Record, RunRecord};
use crate::bench::world::World;
use crate::{FAILURE, USAGE, WRONG};
use cinch::{Config, Result};
use std::time::{Duration, Instant};

/// Runs the suite on one of the ranks and returns the exit code.
///
/// # Errors
/// Exit code and sentence.
pub fn main<W: World>(
    world: &W,
    cases: &Cases,
    options: &BenchOptions,
    config: &Config,
) -> std::result::Result<i32, (i32, String)> {
    let failure = |sentence: String| (FAILURE, sentence);
    let folder = super::folder(options).map_err(|sentence| (USAGE, sentence))?;
    let rank = world.rank();
    let failed = |error: cinch::Error| failure(format!("rank {rank}: {error}"));
    let mut output = match rank {
        0 => Output::new(Some(&super::rows(folder))).map_err(failed)?,
        _ => Output::default(),
    };
    let records = run(world, cases, (options, config), &mut output).map_err(failed)?;
    if rank == 0 {
        let said = super::write_report(folder, &records).map_err(failure)?;
        output.line(&format!("# {said}"));
    }
    output.end().map_err(failed)?;
    let wrong = records.iter().any(|record| record.entry.failed());
    Ok(if wrong { WRONG } else { 0 })
}

/// Runs all cases; all ranks get the same records.
fn run<W: World>(
    world: &W,
    cases: &Cases,
    (options, config): (&BenchOptions, &Config),
    output: &mut Output,
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
    let run = RunRecord::on_host().under(config);
    let how = How {
        nranks: world.nranks(),
        per_gpu: 1,
        hosts: host_count(world),
        processes: true,
        graph: false,
    };
    let mut records = Vec::new();
    for (index, Case { row, .. }) in cases.list.iter().enumerate() {
        if index > 0 && is_late(world, deadline)? {
            let (left, all) = (cases.list.len() - index, cases.list.len());
            output.line(&format!("# time limit: {left} of {all} rows were left out"));
            break;
        }
        let effort = Effort {
            deadline: super::row_deadline(deadline, cases.list.len() - index),
            ..effort
        };
        let mut bench = Bench::new(world, &cases.source, *row, effort)?;
        let measured = bench.run(Placement::OutOfPlace)?;
        let record = Record::new(how, &run, row, &measured, 1, "-");
        write(&record, output)?;
        records.push(record);
    }
    Ok(records)
}

/// The row in the file, and a line on the screen for it.
fn write(record: &Record, output: &mut Output) -> Result<()> {
    output.record(record)?;
    let entry = &record.entry;
    output.line(&format!(
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::world::threads::{self, Flaw};
    use crate::testing::parsed;

    fn records(line: &str, flaw: Flaw) -> Vec<Vec<Record>> {
        let options = parsed(line).unwrap();
        let cases = Cases::new(&options, 3, false).unwrap();
        threads::run(3, flaw, |world| {
            let settings = (&options, &Config::default());
            run(world, &cases, settings, &mut Output::default()).unwrap()
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
