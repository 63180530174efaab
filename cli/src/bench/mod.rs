//! `cinch bench`: measures a collective and checks its results.

mod columns;
mod combine;
mod compare;
mod compare_saved;
mod contributions;
mod data;
mod emulate;
pub mod gpu;
pub mod hosts;
mod limit;
mod measure;
pub mod metrics;
mod nccl_tests;
pub mod options;
pub mod output;
mod page;
mod page_summary;
mod pipeline;
pub mod record;
mod row;
mod suite;
mod table;
pub mod values;
pub mod verify;
mod workload;
mod world;

use crate::join;
use crate::launch::{LocalLaunch, one_core_each};
use crate::machine::available_memory;
use crate::{FAILURE, USAGE, WRONG};
use cinch::config::Origin;
use cinch::schedule::Groups;
use cinch::{Communicator, Config};
use measure::HostBackend;
use options::BenchOptions;
use output::Output;
use record::{RankSetup, Record, RunInfo};
use std::collections::BTreeSet;
use std::io;
use table::TableKind;
use workload::Workload;
use world::BenchRank;

/// Runs `cinch bench` and returns its exit code.
///
/// # Errors
/// Returns an exit code and an error message.
pub fn main(options: &BenchOptions, mut config: Config) -> crate::ExitResult {
    let usage = |sentence| (USAGE, sentence);
    let refused = |error: cinch::Error| (USAGE, error.message().to_string());
    let failure = |error: cinch::Error| (FAILURE, error.to_string());
    let options = &options
        .with_nccl_tests_letters(&mut config)
        .map_err(usage)?;
    options.check_outputs().map_err(usage)?;
    if let (Some(from), Some(to)) = (&options.report, &options.output) {
        let records = record::read(from).map_err(refused)?;
        let text = page::report(&records);
        output::save(to, |out| io::Write::write_all(out, text.as_bytes())).map_err(failure)?;
        let (rows, from, to) = (records.len(), from.display(), to.display());
        println!("{rows} rows of {from} drawn in {to}");
        return Ok(0);
    }
    if let [old, new] = &options.compare[..] {
        return compare_saved::main(old, new, options.json.as_deref());
    }
    // With an `auto:` codec the planner decides by measured costs, so the communicator must measure
    // them.
    config.codec.auto |= options.codec.iter().any(|codec| codec.auto);
    if options.gpu.on_gpus(options.ranks).map_err(usage)? {
        return gpu::main(options, config);
    }
    if let Some(kind) = options.transport.0 {
        config
            .set("CINCH_TRANSPORT", kind.name(), Origin::Program)
            .map_err(refused)?;
    }
    let ranks = options.ranks.map(|ranks| ranks as usize);
    config.emulated = options.emulate.machine(ranks).map_err(usage)?;
    if let Some((hosts, ranks)) = options.explain_hosts {
        let shape = Groups::even_hosts(hosts, ranks);
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
    let comm = join::join(config.clone()).map_err(failure)?;
    let (rank, nranks) = (Communicator::rank(&comm), Communicator::nranks(&comm));
    let workload = workload(options, nranks).map_err(usage)?;
    workload
        .check_memory(nranks, 1, available_memory())
        .map_err(usage)?;
    let mut output = match rank {
        0 => Output::new(options, TableKind::Host, nranks).map_err(refused)?,
        _ => Output::silent(),
    };
    let records = run(&comm, &workload, (options, &config), &mut output)
        .map_err(|error| (FAILURE, format!("rank {rank}: {error}")))?;
    comm.finalize().map_err(failure)?;
    output
        .end()
        .map_err(|error| (FAILURE, error.message().to_string()))?;
    let failed = records.iter().any(Record::failed);
    Ok(if failed { WRONG } else { 0 })
}

/// Returns the rows of the suite, or of the one collective that the options name.
fn workload(options: &BenchOptions, nranks: usize) -> Result<Workload, String> {
    match options.suite {
        true => suite::workload(options, nranks, false),
        false => Workload::new(options, nranks),
    }
}

/// Returns how many ranks this process must start; `None` if this process is a rank itself.
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
            "--ranks {ranks} starts ranks, but {name} shows that a launcher has done so; leave out \
             --ranks or unset {name}"
        )),
        (Some(ranks), None, None) => Ok(Some(ranks)),
    }
}

/// Starts this command as `ranks` ranks. Errors that every rank would report are reported once,
/// before the start.
fn start(options: &BenchOptions, ranks: usize, config: &Config) -> crate::ExitResult {
    let usage = |sentence| (USAGE, sentence);
    workload(options, ranks)
        .and_then(|workload| workload.check_memory(ranks, ranks, available_memory()))
        .map_err(usage)?;
    Output::new(options, TableKind::Host, ranks)
        .map_err(|error| (USAGE, error.message().to_string()))?;
    let failure = |sentence| (FAILURE, sentence);
    let launch = LocalLaunch {
        // Each rank is bound to a core if there are enough cores, as mpirun does. The system then
        // does not move ranks between cores.
        cores: one_core_each(ranks).unwrap_or_default(),
        ..LocalLaunch::of_this_command(ranks).map_err(failure)?
    };
    launch.run_with_rendezvous(config).map_err(failure)
}

/// Measures all rows on host memory. All ranks get the same records.
fn run<W: BenchRank>(
    world: &W,
    workload: &Workload,
    (options, config): (&BenchOptions, &Config),
    output: &mut Output,
) -> cinch::Result<Vec<Record>> {
    let (nranks, places) = (world.nranks(), world.places());
    let hosts: BTreeSet<&String> = places.iter().map(|place| &place.0).collect();
    let mut backend = HostBackend {
        world,
        source: &workload.source,
        ranks: RankSetup {
            nranks,
            per_gpu: 1,
            hosts: hosts.len().max(1),
            processes: true,
        },
        run: RunInfo::on_host().under(config).with(options),
        in_place: !options.suite,
    };
    for line in head(options, &places) {
        output.note(&line);
    }
    if let Some(emulation) = &backend.run.emulated {
        output.note(&emulate::note(emulation));
    }
    output.head(&places);
    if let Some(note) = workload.repeats(nranks) {
        output.note(&note);
    }
    pipeline::run(&mut backend, &workload.rows, options, output)
}

/// Describes the run for the head of the output: versions, options and ranks.
fn head(options: &BenchOptions, places: &[(String, u32)]) -> Vec<String> {
    let mut lines = vec![
        format!("cinch {} bench {}", cinch::VERSION, options.collective),
        format!(
            "ranks {} transport {} algo {} codec {} iters {} warmup {} check {}",
            places.len(),
            options.transport.0.map_or("auto", |kind| kind.name()),
            options.algo.0.map_or("auto", |algo| algo.name()),
            options.codecs(),
            options.iters,
            options.warmup,
            options.check
        ),
        match options.data.as_slice() {
            [] => format!("data {} seed {}", options.distribution.name(), options.seed),
            _ => format!("data {}", options.files()),
        },
    ];
    if places.len() == 1 {
        lines.push("one rank moves no data; --ranks N starts more".into());
    }
    let ranks = places.iter().enumerate();
    lines.extend(ranks.map(|(rank, (host, pid))| format!("rank {rank:>4} pid {pid:>7} on {host}")));
    lines
}

#[cfg(test)]
mod tests {
    use super::world::threads::{self, Flaw};
    use super::*;
    use crate::testing::parsed;
    use std::time::{Duration, Instant};

    fn options(line: &str) -> BenchOptions {
        parsed(line).unwrap()
    }

    fn records(line: &str, flaw: Flaw) -> Vec<Vec<Record>> {
        let options = options(line);
        let workload = workload(&options, 4).unwrap();
        threads::run(4, flaw, |world| {
            let settings = (&options, &Config::default());
            run(world, &workload, settings, &mut Output::silent()).unwrap()
        })
    }

    #[test]
    fn sweep_gives_every_rank_a_record_for_each_row() {
        let all = records("all_gather -b 64 -e 4K -f 8 -n 2 -w 1 -d all", Flaw::None);
        for records in all {
            assert_eq!(records.len(), 12 * 3);
            assert!(records.iter().all(|record| !record.failed()));
            assert!(records.iter().all(|record| record.in_place.is_some()));
            let sizes: Vec<_> = records[..3].iter().map(|record| record.size).collect();
            assert_eq!(sizes, [64, 512, 4096]);
            let wire = records[0].wire_bytes;
            assert_eq!(wire, 16, "{:?}", records[0]);
        }
    }

    #[test]
    fn real_data_runs_and_wrong_results_fail() {
        let line = concat!(
            "all_reduce --data ",
            env!("CARGO_MANIFEST_DIR"),
            "/../benches/data -n 1 -w 0 -b 1K -e 4K -f 4"
        );
        assert!(
            records(line, Flaw::None)[3]
                .iter()
                .all(|record| !record.failed())
        );
        assert!(
            records(line, Flaw::WrongElement)[3]
                .iter()
                .all(Record::failed)
        );
        let unchecked = format!("{line} -c 0");
        let found = records(&unchecked, Flaw::WrongElement);
        assert!(!found[0][0].failed());
        assert_eq!(found[0][0].out_of_place.nwrong, None);
    }

    #[test]
    fn a_time_limit_leaves_rows_out() {
        let line = "all_reduce -b 1K -e 512K -f 2 -n 1000 --time-limit 0.000001";
        assert_eq!(records(line, Flaw::None)[2].len(), 1);
    }

    /// The time limit includes warm-up, even if warm-up alone would take hours.
    #[test]
    fn a_time_limit_ends_the_warm_up() {
        let begin = Instant::now();
        let line = "all_reduce -b 512K -w 1000000 -n 1000000 --time-limit 0.2";
        let record = &records(line, Flaw::None)[1][0];
        assert!(record.out_of_place.iterations < 1_000_000);
        assert!(begin.elapsed() < Duration::from_secs(20));
        // Without warm-up, one call before the timed ones estimates their time.
        let line = "all_reduce -b 512K -w 0 -n 1000000 --time-limit 0.2";
        let record = &records(line, Flaw::None)[1][0];
        assert!(record.out_of_place.iterations < 1_000_000);
        assert!(begin.elapsed() < Duration::from_secs(40));
    }

    #[test]
    fn suite_gives_every_rank_a_record_for_each_row() {
        let line = "--suite --output x -b 1K -e 1K --codec raw -n 2 -w 0 -d f32,bf16";
        for records in records(line, Flaw::None) {
            // Seven collectives are measured with two element types each.
            assert_eq!(records.len(), 14);
            assert!(records.iter().all(|record| !record.failed()));
            let plain = |record: &Record| record.mode == "eager" && record.in_place.is_none();
            assert!(records.iter().all(plain));
        }
        let wrong = &records(line, Flaw::WrongElement)[1];
        // The wrong element is on rank 1, but only the root has a result of a reduce, so the reduce
        // rows are right.
        let right = wrong.iter().filter(|record| !record.failed());
        assert!(right.clone().all(|record| record.collective == "reduce"));
        assert_eq!(right.count(), 2);
        let limited = format!("{line} --time-limit 0.000001");
        assert_eq!(records(&limited, Flaw::None)[2].len(), 1);
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
