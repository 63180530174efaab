//! The suite on GPUs: this library and NCCL, by default and on symmetric windows, taking turns.

use super::device::GpuLane;
use super::layout::{self, Mode};
use super::output::Output;
use super::ranks::{self, Ended, Site, Work};
use super::{record, repeating, runner, table};
use crate::USAGE;
use crate::bench::measure::{Effort, is_late};
use crate::bench::options::BenchOptions;
use crate::bench::plan::Plan;
use crate::bench::record::How;
use crate::bench::suite::{self, Cases};
use cinch::{Communicator, Config, Error, Result};
use std::time::{Duration, Instant};

/// Runs the suite and returns its exit code.
///
/// # Errors
/// Exit code and sentence.
pub fn main(options: &BenchOptions, config: &Config) -> Ended {
    suite::folder(options).map_err(|sentence| (USAGE, sentence))?;
    ranks::start(&options.gpu, config, &Suite { options })
}

struct Suite<'a> {
    options: &'a BenchOptions,
}

impl Work for Suite<'_> {
    fn name(&self) -> String {
        "bench --suite".into()
    }

    fn plan(&self, ranks: usize) -> std::result::Result<Plan, String> {
        let cases = Cases::new(self.options, ranks, true)?;
        Ok(repeating(cases.into_plan().0))
    }

    fn windows(&self) -> bool {
        true
    }

    fn output(&self) -> Result<Output> {
        let folder = suite::folder(self.options).map_err(Error::invalid_argument)?;
        Output::new(Some(&suite::rows(folder)))
    }

    fn run(
        &self,
        control: &Communicator,
        lane: &mut GpuLane<'_>,
        plan: &Plan,
        site: &Site<'_>,
        output: &mut Output,
    ) -> Result<bool> {
        let options = self.options;
        let list = Cases::new(options, control.nranks(), true)
            .map_err(Error::invalid_argument)?
            .list;
        let limit = options.time_limit.map(Duration::from_secs_f64);
        let deadline = limit.map(|limit| Instant::now() + limit);
        let effort = Effort {
            iterations: options.iters,
            warmup: options.warmup,
            check: options.check == 1,
            deadline,
        };
        output.write(table::write_head);
        let mut records = Vec::new();
        for (index, case) in list.iter().enumerate() {
            if index > 0 && is_late(control, deadline)? {
                let left = list.len() - index;
                output.line(&format!(
                    "# time limit: {left} of {} rows were left out",
                    list.len()
                ));
                break;
            }
            let mode = match (case.graph, options.gpu.per_gpu()) {
                (true, _) => Mode::Graph,
                (false, 1) => Mode::Eager,
                (false, _) => Mode::Crowded,
            };
            let effort = Effort {
                deadline: suite::row_deadline(deadline, list.len() - index),
                ..effort
            };
            let explained = lane.explain(&case.row)?;
            let found = runner::run(control, lane, &plan.source, &case.row, effort, mode)?;
            let protocol = layout::protocol(&explained).unwrap_or("-".into());
            let how = How {
                nranks: control.nranks(),
                per_gpu: options.gpu.per_gpu(),
                hosts: options.gpu.hosts(),
                processes: options.gpu.processes(),
                graph: case.graph,
            };
            let record = record(how, site, &case.row, &found, &protocol);
            if index == 0 || list[index - 1].row.collective != case.row.collective {
                let how = if case.graph { "graph" } else { "eager" };
                output.line(&format!("# {}, {how}", case.row.collective));
            }
            output.write(|out| table::write_row(&record, out));
            output.record(&record)?;
            records.push(record);
        }
        output.write(|out| table::write_foot(&records, out));
        if control.rank() == 0 {
            let folder = suite::folder(options).map_err(Error::invalid_argument)?;
            let said = suite::write_report(folder, &records).map_err(Error::internal)?;
            output.line(&format!("# {said}"));
        }
        Ok(records.iter().any(|record| record.entry.failed()))
    }
}
