//! `cinch bench`: measures a collective and checks its results.

mod combine;
mod compare;
mod contributions;
mod data;
pub mod gpu;
mod hosts;
mod html;
mod limit;
mod measure;
pub mod metrics;
mod number;
pub mod options;
mod output;
mod plan;
pub mod record;
mod report;
mod row;
mod suite;
mod table;
pub mod verify;
mod world;

use crate::join;
use crate::launch::{Launch, one_core_each};
use crate::machine::{Machine, available_memory};
use crate::{FAILURE, USAGE, WRONG};
use cinch::config::{KNOBS, Origin};
use cinch::schedule::Hosts;
use cinch::{Communicator, Config};
use measure::{Bench, Effort, Placement, is_late};
use options::BenchOptions;
use output::Output;
use plan::Plan;
use report::{Entry, Results, RunConfig};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::{Duration, Instant};
use suite::Cases;
use world::World;

/// Runs `cinch bench` and returns its exit code.
///
/// # Errors
/// Exit code and sentence.
pub fn main(options: &BenchOptions, mut config: Config) -> Result<i32, (i32, String)> {
    let usage = |sentence| (USAGE, sentence);
    options.check_outputs().map_err(usage)?;
    if let (Some(from), Some(to)) = (&options.report, &options.output) {
        let rows = html::redraw(from, to)?;
        println!(
            "{rows} rows of {} drawn in {}",
            from.display(),
            to.display()
        );
        return Ok(0);
    }
    if options.gpu.on_gpus(options.ranks).map_err(usage)? {
        return gpu::main(options, config);
    }
    if let Some(kind) = options.transport.0 {
        config
            .set("CINCH_TRANSPORT", kind.name(), Origin::Program)
            .map_err(|error| usage(error.to_string()))?;
    }
    // Rows that are left to the model go by measured costs.
    config.codec.auto |= options.codec.iter().any(|codec| codec.auto);
    if let Some((hosts, ranks)) = options.explain_hosts {
        let shape = Hosts::even(hosts, ranks);
        return hosts::main(
            options,
            &config,
            (hosts * ranks, shape),
            &mut io::stdout().lock(),
        );
    }
    if let Some(ranks) = starts(options, join::launched_size(), join::launcher()).map_err(usage)? {
        return start(options, ranks, &config);
    }
    let failure = |error: cinch::Error| (FAILURE, error.to_string());
    let comm = join::join(config.clone()).map_err(failure)?;
    let nranks = Communicator::nranks(&comm);
    if options.suite {
        let cases = Cases::new(options, nranks, false).map_err(usage)?;
        let code = suite::host::main(&comm, &cases, options, &config)?;
        comm.finalize().map_err(failure)?;
        return Ok(code);
    }
    let rank = Communicator::rank(&comm);
    let plan = Plan::new(options, nranks).map_err(usage)?;
    plan.check_memory(nranks, 1, available_memory())
        .map_err(usage)?;
    let mut output = match rank {
        0 => Output::new(options, nranks).map_err(usage)?,
        _ => Output::silent(),
    };
    let entries = run(&comm, &plan, options, &mut output)
        .map_err(|error| (FAILURE, format!("rank {rank}: {error}")))?;
    comm.finalize().map_err(failure)?;
    let failed = entries.iter().any(Entry::failed);
    if rank == 0 {
        let results = Results {
            version: cinch::VERSION.into(),
            config: run_config(options, &config, &comm),
            results: entries,
        };
        output
            .finish(&results)
            .map_err(|sentence| (FAILURE, sentence))?;
    }
    Ok(if failed { WRONG } else { 0 })
}

/// How many ranks to start here; `None` = this process is a rank itself.
fn starts(
    options: &BenchOptions,
    launched: Option<usize>,
    launcher: Option<&str>,
) -> Result<Option<usize>, String> {
    match (
        options.ranks.map(|ranks| ranks as usize),
        launched,
        launcher,
    ) {
        (None, ..) => Ok(None),
        (Some(ranks), Some(size), _) if ranks == size => Ok(None),
        (Some(ranks), Some(size), _) => Err(format!(
            "--ranks {ranks}, but this was started as one of {size} ranks; leave out --ranks"
        )),
        (Some(ranks), None, Some(name)) => Err(format!(
            "--ranks {ranks} starts ranks, but {name} says that a launcher has done so; leave out \
             --ranks or unset {name}"
        )),
        (Some(ranks), None, None) => Ok(Some(ranks)),
    }
}

/// Runs this very command as `ranks` ranks. What can be refused is refused once, here.
fn start(options: &BenchOptions, ranks: usize, config: &Config) -> Result<i32, (i32, String)> {
    let usage = |sentence| (USAGE, sentence);
    let plan = match options.suite {
        true => Cases::new(options, ranks, false).map(|cases| cases.into_plan().0),
        false => Plan::new(options, ranks),
    };
    plan.and_then(|plan| plan.check_memory(ranks, ranks, available_memory()))
        .map_err(usage)?;
    match options.suite {
        true => drop(suite::folder(options).map_err(usage)?),
        false => drop(Output::new(options, ranks).map_err(usage)?),
    }
    let failure = |sentence| (FAILURE, sentence);
    let launch = Launch {
        // As mpirun does: where each rank can have a core, the system must not move them about.
        cores: one_core_each(ranks).unwrap_or_default(),
        ..Launch::of_this_command(ranks).map_err(failure)?
    };
    launch.run_with_rendezvous(config).map_err(failure)
}

/// Runs all rows. All ranks get the same entries.
fn run<W: World>(
    world: &W,
    plan: &Plan,
    options: &BenchOptions,
    output: &mut Output,
) -> cinch::Result<Vec<Entry>> {
    let start = Instant::now();
    let deadline = options
        .time_limit
        .map(|seconds| start + Duration::from_secs_f64(seconds));
    let effort = Effort {
        iterations: options.iters,
        warmup: options.warmup,
        check: options.check == 1,
        deadline,
    };
    output.head(options, world.nranks(), &world.places());
    if let Some(note) = plan.repeats(world.nranks()) {
        output.note(&note);
    }
    let mut entries = Vec::new();
    for (index, row) in plan.rows.iter().enumerate() {
        if index > 0 && is_late(world, deadline)? {
            output.note(&format!(
                "time limit: {} of {} rows were left out",
                plan.rows.len() - index,
                plan.rows.len()
            ));
            break;
        }
        output.progress(index, plan.rows.len());
        let mut bench = Bench::new(world, &plan.source, *row, effort)?;
        if options.explain {
            output.note(&bench.explain()?);
        }
        let out_of_place = bench.run(Placement::OutOfPlace)?;
        let in_place = match bench.has_in_place() {
            true => Some(bench.run(Placement::InPlace)?),
            false => None,
        };
        let entry = Entry::new(row, world.nranks(), &out_of_place, in_place.as_ref());
        output.row(&entry);
        entries.push(entry);
    }
    Ok(entries)
}

/// Hosts that the ranks are on.
fn host_count(world: &impl World) -> usize {
    let hosts: BTreeSet<String> = world.places().into_iter().map(|place| place.0).collect();
    hosts.len().max(1)
}

/// What is not at its default.
fn settings(config: &Config) -> BTreeMap<String, String> {
    KNOBS
        .iter()
        .zip(&config.origins)
        .filter(|(_, origin)| **origin != Origin::Default)
        .map(|(knob, _)| (knob.name.to_string(), (knob.show)(config)))
        .collect()
}

fn run_config(options: &BenchOptions, config: &Config, world: &impl World) -> RunConfig {
    let mut shown = BTreeMap::new();
    let mut show = |name: &str, value: String| {
        shown.insert(name.to_string(), value);
    };
    show("iters", options.iters.to_string());
    show("warmup-iters", options.warmup.to_string());
    show("check", options.check.to_string());
    show("seed", options.seed.to_string());
    show("distribution", options.distribution.name());
    show(
        "transport",
        options
            .transport
            .0
            .map_or("auto", |kind| kind.name())
            .into(),
    );
    show(
        "algo",
        options.algo.0.map_or("auto", |algo| algo.name()).into(),
    );
    if !options.codec.is_empty() {
        show("codec", options.codecs());
    }
    if let Some(seconds) = options.time_limit {
        show("time-limit", seconds.to_string());
    }
    for (name, size) in [
        ("minbytes", options.minbytes),
        ("maxbytes", options.maxbytes),
        ("stepfactor", options.stepfactor),
    ] {
        if let Some(size) = size {
            show(name, size.to_string());
        }
    }
    if !options.data.is_empty() {
        let files: Vec<_> = options
            .data
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        show("data", files.join(" "));
    }
    RunConfig {
        collective: options.collective.name().into(),
        ranks: world.nranks(),
        hosts: host_count(world),
        options: shown,
        settings: settings(config),
        machine: Machine::detect(),
    }
}

#[cfg(test)]
mod tests {
    use super::world::threads::{self, Flaw};
    use super::*;
    use crate::testing::parsed;

    fn options(line: &str) -> BenchOptions {
        parsed(line).unwrap()
    }

    fn entries(line: &str, flaw: Flaw) -> Vec<Vec<Entry>> {
        let options = options(line);
        let plan = Plan::new(&options, 4).unwrap();
        threads::run(4, flaw, |world| {
            run(world, &plan, &options, &mut Output::silent()).unwrap()
        })
    }

    #[test]
    fn a_sweep_gives_an_entry_a_row_on_every_rank() {
        let all = entries("all_gather -b 64 -e 4K -f 8 -n 2 -w 1 -d all", Flaw::None);
        for entries in all {
            assert_eq!(entries.len(), 12 * 3);
            assert!(entries.iter().all(|entry| !entry.failed()));
            let sizes: Vec<_> = entries[..3].iter().map(|entry| entry.size).collect();
            assert_eq!(sizes, [64, 512, 4096]);
            let wire = entries[0].wire_bytes;
            assert_eq!(wire, 16, "{:?}", entries[0]);
        }
    }

    #[test]
    fn real_data_runs_and_wrong_results_fail() {
        let line = "all_reduce --data benches/data -n 1 -w 0 -b 1K -e 4K -f 4";
        assert!(
            entries(line, Flaw::None)[3]
                .iter()
                .all(|entry| !entry.failed())
        );
        assert!(
            entries(line, Flaw::WrongElement)[3]
                .iter()
                .all(Entry::failed)
        );
        let unchecked = format!("{line} -c 0");
        let entries = entries(&unchecked, Flaw::WrongElement);
        assert!(!entries[0][0].failed());
        assert_eq!(entries[0][0].out_of_place.nwrong, None);
    }

    #[test]
    fn a_time_limit_leaves_rows_out() {
        let line = "all_reduce -b 1K -e 512K -f 2 -n 1000 --time-limit 0.000001";
        assert_eq!(entries(line, Flaw::None)[2].len(), 1);
    }

    /// Warming up is a part of the time, also where it alone would take hours.
    #[test]
    fn a_time_limit_ends_the_warm_up() {
        let begin = Instant::now();
        let line = "all_reduce -b 512K -w 1000000 -n 1000000 --time-limit 0.2";
        let entry = &entries(line, Flaw::None)[1][0];
        assert!(entry.out_of_place.iterations < 1_000_000);
        assert!(begin.elapsed() < Duration::from_secs(20));
        // The only call that there is before the timed ones says what they cost.
        let line = "all_reduce -b 512K -w 0 -n 1000000 --time-limit 0.2";
        let entry = &entries(line, Flaw::None)[1][0];
        assert!(entry.out_of_place.iterations < 1_000_000);
        assert!(begin.elapsed() < Duration::from_secs(40));
    }

    #[test]
    fn ranks_are_started_once() {
        let four = options("all_reduce --ranks 4");
        assert_eq!(starts(&four, None, None), Ok(Some(4)));
        assert_eq!(starts(&four, Some(4), Some("CINCH_LAUNCH_SIZE")), Ok(None));
        assert!(starts(&four, Some(2), Some("CINCH_LAUNCH_SIZE")).is_err());
        assert!(starts(&four, None, Some("WORLD_SIZE")).is_err());
        assert_eq!(starts(&options("all_reduce"), None, None), Ok(None));
    }
}
