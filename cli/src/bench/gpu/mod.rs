//! `cinch bench --device gpu`: measures collectives on GPU buffers with CUDA events, as stream
//! launches or graphs, and beside NCCL.
//!
//! Each rank is a thread of this process, or a process with `--procs`. Ranks exchange measurements
//! over a communicator on host memory, apart from the communicator that is measured.

mod layout;
#[allow(unsafe_code)]
mod nccl;
pub mod options;
#[allow(unsafe_code)]
mod peer;
#[allow(unsafe_code)]
mod queue;
mod ranks;
mod runner;
pub mod tune;

pub use super::record::driver_version;

use super::combine::Times;
use super::data::InputSource;
use super::emulate;
use super::options::BenchOptions;
use super::output::Output;
use super::pipeline::{self, Backend, Effort};
use super::record::{RankSetup, Record, RunInfo, Versus};
use super::row::Row;
use super::suite;
use super::table::TableKind;
use super::workload::Workload;
use super::world::BenchRank;
use crate::{ExitResult, USAGE};
use cinch::config::Origin;
use cinch::{Communicator, Config, Result};
use layout::Mode;
use queue::GpuQueue;
use ranks::{GpuTask, RunContext};

/// Runs the bench and returns its exit code.
///
/// # Errors
/// Returns an exit code and an error message.
pub fn main(options: &BenchOptions, mut config: Config) -> ExitResult {
    let refused = |error: cinch::Error| (USAGE, error.message().to_string());
    if options.transport.0.is_some() {
        let sentence = "--transport is for host memory; leave out --device gpu";
        return Err((USAGE, sentence.into()));
    }
    let asked = [
        ("CINCH_PROTO", &options.gpu.proto),
        ("CINCH_KERNEL", &options.gpu.kernel),
    ];
    for (knob, value) in asked.into_iter().filter(|(_, value)| *value != "auto") {
        config.set(knob, value, Origin::Program).map_err(refused)?;
    }
    let ranks = options
        .gpu
        .gpus
        .map(|gpus| gpus as usize * options.gpu.per_gpu());
    let machine = options.emulate.machine_of_gpus(ranks);
    config.emulated = machine.map_err(|sentence| (USAGE, sentence))?;
    ranks::start(&options.gpu, &config, &GpuBench { options })
}

/// The benchmark of one collective over its sizes, or of the suite.
struct GpuBench<'a> {
    options: &'a BenchOptions,
}

impl GpuTask for GpuBench<'_> {
    fn name(&self) -> String {
        match (self.options.suite, self.options.gpu.graph) {
            (true, _) => "bench --suite".into(),
            (_, true) => format!("bench {}, graph replay", self.options.collective),
            (_, false) => format!("bench {}, eager", self.options.collective),
        }
    }

    fn workload(&self, ranks: usize) -> std::result::Result<Workload, String> {
        let made = match self.options.suite {
            true => suite::workload(self.options, ranks, true),
            false => Workload::new(self.options, ranks),
        };
        made.map(|Workload { source, rows }| Workload {
            source: source.repeating(layout::PERIOD),
            rows,
        })
    }

    fn windows(&self) -> bool {
        self.options.suite
    }

    fn output(&self, ranks: usize) -> Result<Output> {
        Output::new(self.options, TableKind::Gpu, ranks)
    }

    fn run(
        &self,
        control: &Communicator,
        queue: &mut GpuQueue<'_>,
        workload: &Workload,
        context: &RunContext<'_>,
        output: &mut Output,
    ) -> Result<bool> {
        if let Some(emulation) = &context.run.emulated {
            output.note(&emulate::note_of_gpus(emulation));
        }
        output.head(&control.places());
        let mut backend = GpuBackend {
            control,
            queue,
            source: &workload.source,
            ranks: RankSetup {
                nranks: control.nranks(),
                per_gpu: self.options.gpu.per_gpu(),
                hosts: self.options.gpu.hosts(),
                processes: self.options.gpu.processes(),
            },
            run: context.run.clone().with(self.options),
            nccl: context.nccl.as_deref(),
        };
        let records = pipeline::run(&mut backend, &workload.rows, self.options, output)?;
        Ok(records.iter().any(Record::failed))
    }
}

/// The benchmark backend for GPU buffers.
struct GpuBackend<'a, 'b> {
    control: &'a Communicator,
    queue: &'a mut GpuQueue<'b>,
    source: &'a InputSource,
    ranks: RankSetup,
    run: RunInfo,
    /// Version of the NCCL library of `--vs`.
    nccl: Option<&'a str>,
}

impl Backend for GpuBackend<'_, '_> {
    type Rank = Communicator;

    fn world(&self) -> &Communicator {
        self.control
    }

    fn explain(&self, row: &Row) -> Result<String> {
        self.queue.explain(row)
    }

    fn measure(&mut self, row: &Row, effort: Effort) -> Result<Record> {
        let mode = match (row.graph, self.ranks.per_gpu) {
            (true, _) => Mode::Graph,
            (false, 1) => Mode::Eager,
            (false, _) => Mode::Crowded,
        };
        let explained = self.queue.explain(row)?;
        let found = runner::run(self.control, self.queue, self.source, row, effort, mode)?;
        let ours = found.measured.times.median;
        let versus = |times: Times| Versus {
            nccl: self.nccl.unwrap_or("unknown").into(),
            time_us: times.median * 1e6,
            min_us: times.least * 1e6,
            p99_us: times.p99 * 1e6,
            ratio: times.median / ours,
        };
        Ok(Record {
            calls: found.calls,
            protocol: layout::protocol(&explained).unwrap_or("-".into()),
            vs: found.peer.map(versus),
            symmetric: found.symmetric.map(versus),
            ..Record::new(self.ranks, &self.run, row, &found.measured, None)
        })
    }
}
