//! `cinch bench --device gpu`: buffers on GPUs, times of events, graphs, another library beside.
//!
//! Each rank is a thread of this process, or with `--procs` a process. Ranks meet and tell each
//! other what they saw on a communicator of host memory; what is measured is another one.

#[allow(unsafe_code)]
mod device;
mod layout;
pub mod options;
pub mod output;
#[allow(unsafe_code)]
mod peer;
mod ranks;
mod runner;
mod suite;
mod table;
pub mod tune;

pub use super::record::driver_version;

use super::data::Source;
use super::measure::{Effort, is_late};
use super::options::BenchOptions;
use super::plan::Plan;
use super::record::{How, Record, Versus};
use super::row::Row;
use crate::USAGE;
use cinch::config::Origin;
use cinch::{Communicator, Config, Result};
use device::GpuLane;
use layout::Mode;
use output::Output;
use ranks::{Ended, Site, Work};
use runner::Found;
use std::time::{Duration, Instant};

/// Runs the bench and returns its exit code.
///
/// # Errors
/// Exit code and sentence.
pub fn main(options: &BenchOptions, mut config: Config) -> Ended {
    let usage = |sentence: String| (USAGE, sentence);
    refuse(options).map_err(usage)?;
    let asked = [
        ("CINCH_PROTO", &options.gpu.proto),
        ("CINCH_KERNEL", &options.gpu.kernel),
    ];
    for (knob, value) in asked.into_iter().filter(|(_, value)| *value != "auto") {
        config
            .set(knob, value, Origin::Program)
            .map_err(|error| usage(error.to_string()))?;
    }
    match options.suite {
        true => suite::main(options, &config),
        false => ranks::start(&options.gpu, &config, &Bench { options }),
    }
}

/// Options that mean nothing here.
fn refuse(options: &BenchOptions) -> std::result::Result<(), String> {
    let said = [
        ("--csv", options.csv.is_some()),
        ("--plot", options.plot.is_some()),
        ("--compare", options.compare.is_some()),
        ("--transport", options.transport.0.is_some()),
    ];
    match said.iter().find(|(_, said)| *said) {
        Some((name, _)) => Err(format!("{name} is for host memory; leave out --device gpu")),
        None => Ok(()),
    }
}

/// The rows, with inputs that repeat.
fn repeating(plan: Plan) -> Plan {
    let Plan { source, rows } = plan;
    let source = source.repeating(layout::PERIOD);
    Plan { source, rows }
}

/// One collective over its sizes.
struct Bench<'a> {
    options: &'a BenchOptions,
}

impl Work for Bench<'_> {
    fn name(&self) -> String {
        let how = match self.options.gpu.graph {
            true => "graph replay",
            false => "eager",
        };
        format!("bench {}, {how}", self.options.collective)
    }

    fn plan(&self, ranks: usize) -> std::result::Result<Plan, String> {
        Plan::new(self.options, ranks).map(repeating)
    }

    fn output(&self) -> Result<Output> {
        Output::new(self.options.json.as_deref())
    }

    fn run(
        &self,
        control: &Communicator,
        lane: &mut GpuLane<'_>,
        plan: &Plan,
        site: &Site<'_>,
        output: &mut Output,
    ) -> Result<bool> {
        output.write(table::write_head);
        let options = self.options;
        let source: &Source = &plan.source;
        let limit = options.time_limit.map(Duration::from_secs_f64);
        let deadline = limit.map(|limit| Instant::now() + limit);
        let effort = Effort {
            iterations: options.iters,
            warmup: options.warmup,
            check: options.check == 1,
            deadline,
        };
        let mode = match (options.gpu.graph, options.gpu.per_gpu()) {
            (true, _) => Mode::Graph,
            (false, 1) => Mode::Eager,
            (false, _) => Mode::Crowded,
        };
        let mut records = Vec::new();
        for (index, row) in plan.rows.iter().enumerate() {
            if index > 0 && is_late(control, deadline)? {
                let left = plan.rows.len() - index;
                output.line(&format!(
                    "# time limit: {left} of {} rows were left out",
                    plan.rows.len()
                ));
                break;
            }
            let explained = lane.explain(row)?;
            if options.explain {
                for line in explained.lines() {
                    output.line(&format!("# {line}"));
                }
            }
            let found = runner::run(control, lane, source, row, effort, mode)?;
            let protocol = layout::protocol(&explained).unwrap_or("-".into());
            let how = How {
                nranks: control.nranks(),
                per_gpu: options.gpu.per_gpu(),
                hosts: options.gpu.hosts(),
                processes: options.gpu.processes(),
                graph: options.gpu.graph,
            };
            let record = record(how, site, row, &found, &protocol);
            output.write(|out| table::write_row(&record, out));
            output.record(&record)?;
            records.push(record);
        }
        output.write(|out| table::write_foot(&records, out));
        Ok(records.iter().any(|record| record.entry.failed()))
    }
}

/// A row that ran here, for machines.
fn record(how: How, site: &Site<'_>, row: &Row, found: &Found, protocol: &str) -> Record {
    let ours = found.measured.median;
    let versus = |times: runner::Times| {
        let times = [times.median, times.least, times.p99];
        Versus::new(site.nccl.as_deref(), times, ours)
    };
    Record {
        vs: found.peer.map(versus),
        symmetric: found.symmetric.map(versus),
        ..Record::new(how, site.run, row, &found.measured, found.calls, protocol)
    }
}
