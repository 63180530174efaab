//! `cinch bench --device gpu`: buffers on GPUs, times of events, graphs, another library beside.
//!
//! Each rank is a thread of this process, or with `--procs` a process. Ranks meet and tell each
//! other what they saw on a communicator of host memory; what is measured is another one.

#[allow(unsafe_code)]
mod device;
mod layout;
pub mod options;
#[allow(unsafe_code)]
mod peer;
mod record;
mod runner;
mod table;

pub use record::driver_version;

use super::data::Source;
use super::measure::Effort;
use super::options::BenchOptions;
use super::plan::Plan;
use super::world::World;
use crate::join;
use crate::run::Launch;
use crate::{FAILURE, USAGE, WRONG};
use cinch::config::Origin;
use cinch::gpu::{Context, Device, Driver};
use cinch::sys::nccl::Nccl;
use cinch::types::DeviceChoice;
use cinch::{Communicator, Config, Error, ErrorKind, Result, UniqueId};
use device::GpuLane;
use layout::{Layout, Mode};
use peer::PeerComm;
use record::{Record, RunRecord};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Ended = std::result::Result<i32, (i32, String)>;

/// Runs the bench and returns its exit code.
///
/// # Errors
/// Exit code and sentence.
pub fn main(options: &BenchOptions, mut config: Config) -> Ended {
    let usage = |sentence: String| (USAGE, sentence);
    let failure = |error: Error| (FAILURE, error.to_string());
    refuse(options).map_err(usage)?;
    if let Some(protocol) = options.gpu.proto.0 {
        config
            .set("CINCH_PROTO", protocol.name(), Origin::Program)
            .map_err(|error| usage(error.to_string()))?;
    }
    let per_gpu = options.gpu.per_gpu();
    let launched = join::launcher().is_some();
    // The environment first: it is read by what comes then.
    if per_gpu > 1 {
        peer::separate_queues();
    }
    let other = match &options.gpu.vs {
        Some(path) if launched || !options.gpu.procs => {
            Some(peer::open(path).map_err(|error| usage(format!("--vs: {error}")))?)
        }
        _ => None,
    };
    let driver = Driver::load().map_err(failure)?;
    let visible = driver.device_count().map_err(failure)?;
    if launched {
        return one_rank(&Setup::new(options, &config, &driver, other));
    }
    let gpus = options.gpu.gpus.unwrap_or(visible);
    if gpus > visible || gpus == 0 {
        return Err(usage(format!(
            "--gpus {gpus}, but this process sees {visible} (CUDA_VISIBLE_DEVICES may hide some)"
        )));
    }
    let ranks = gpus as usize * per_gpu;
    let plan = plan(options, ranks).map_err(usage)?;
    options.gpu.host_of(0, ranks).map_err(usage)?;
    if options.gpu.procs {
        return start(ranks, &config);
    }
    let setup = Setup {
        plan: Some(plan),
        ..Setup::new(options, &config, &driver, other)
    };
    let ended = cinch::testing::try_local_world(ranks, &on_host(&config), |control| {
        run_rank(&control?, &setup)
    });
    let mut failed = false;
    let mut errors = Vec::new();
    for rank in ended {
        match rank {
            Ok(bad) => failed |= bad,
            Err(error) => errors.push(error),
        }
    }
    // Others only repeat what the first cause made of them.
    let cause = errors
        .iter()
        .find(|error| error.kind() != ErrorKind::Remote)
        .or(errors.first());
    match cause {
        Some(error) => Err((FAILURE, error.to_string())),
        None => Ok(if failed { WRONG } else { 0 }),
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

/// The settings of the communicator by which ranks meet.
fn on_host(config: &Config) -> Config {
    Config {
        device: DeviceChoice::Host,
        codec: cinch::CodecSpec::RAW,
        algorithm: None,
        ..config.clone()
    }
}

/// Runs this very command as `ranks` processes.
fn start(ranks: usize, config: &Config) -> Ended {
    let program = std::env::current_exe()
        .map_err(|error| (FAILURE, format!("cannot find this program: {error}")))?;
    let launch = Launch {
        command: std::iter::once(program.into_os_string())
            .chain(std::env::args_os().skip(1))
            .collect(),
        ranks,
        variables: Vec::new(),
        label: false,
        // A rank has threads besides: its watchdog, the other library's.
        cores: Vec::new(),
        grace: Duration::from_secs(3),
        world: None,
        orphaned: None,
    };
    launch
        .run_with_rendezvous(&on_host(config))
        .map_err(|sentence| (FAILURE, sentence))
}

/// This process as one of several ranks.
fn one_rank(setup: &Setup<'_>) -> Ended {
    let failure = |error: Error| (FAILURE, error.to_string());
    let control = join::join(on_host(setup.config)).map_err(failure)?;
    let asked = setup.options.gpu.gpus.map(|gpus| gpus as usize);
    let per_gpu = setup.options.gpu.per_gpu();
    if asked.is_some_and(|gpus| gpus * per_gpu != control.nranks()) {
        return Err((
            USAGE,
            format!(
                "--gpus and --ranks-per-gpu say {} ranks, but {} were started",
                asked.unwrap_or(0) * per_gpu,
                control.nranks()
            ),
        ));
    }
    let rank = control.rank();
    let failed =
        run_rank(&control, setup).map_err(|error| (FAILURE, format!("rank {rank}: {error}")))?;
    control.finalize().map_err(failure)?;
    Ok(if failed { WRONG } else { 0 })
}

/// What all ranks of a process share.
struct Setup<'a> {
    options: &'a BenchOptions,
    config: &'a Config,
    driver: &'a Arc<Driver>,
    /// Made before there are threads, where the number of ranks is known.
    plan: Option<Plan>,
    nccl: Option<Arc<Nccl>>,
    notes: Vec<String>,
}

impl<'a> Setup<'a> {
    fn new(
        options: &'a BenchOptions,
        config: &'a Config,
        driver: &'a Arc<Driver>,
        other: Option<(Arc<Nccl>, Vec<String>)>,
    ) -> Setup<'a> {
        let (nccl, notes) = other.map_or((None, Vec::new()), |(nccl, notes)| (Some(nccl), notes));
        Setup {
            options,
            config,
            driver,
            plan: None,
            nccl,
            notes,
        }
    }
}

/// The rows, with inputs that repeat.
fn plan(options: &BenchOptions, ranks: usize) -> std::result::Result<Plan, String> {
    let Plan { source, rows } = Plan::new(options, ranks)?;
    let source = source.repeating(layout::PERIOD);
    Ok(Plan { source, rows })
}

/// One rank, from its context to the last row; whether anything was wrong.
fn run_rank(control: &Communicator, setup: &Setup<'_>) -> Result<bool> {
    let (rank, nranks) = (control.rank(), control.nranks());
    let own;
    let plan = match &setup.plan {
        Some(plan) => plan,
        None => {
            own = plan(setup.options, nranks).map_err(Error::invalid_argument)?;
            &own
        }
    };
    let gpu = layout::gpu_of(rank, setup.options.gpu.per_gpu());
    let device = Device::at(setup.driver, gpu)?;
    let context = Context::primary(&device)?;
    let arenas = Layout::arenas(&plan.rows, nranks)?;
    check_memory(&context, setup.options.gpu.per_gpu(), arenas)?;
    // The time to join is counted from when all have their contexts.
    control.barrier()?;
    let begin = Instant::now();
    let mut config = setup.config.clone();
    config.set("CINCH_DEVICE", &format!("cuda:{gpu}"), Origin::Program)?;
    let host = setup.options.gpu.host_of(rank, nranks);
    if let Some(host) = host.map_err(Error::invalid_argument)? {
        config.set("CINCH_HOST_ID", &host, Origin::Program)?;
    }
    let id = match rank {
        0 => Some(join::create_id(&config)?),
        _ => None,
    };
    let bytes = share_bytes(control, id.as_ref().map(|id| *id.as_bytes()))?;
    let comm = Communicator::init(&UniqueId::from_bytes(&bytes)?, rank, nranks, config)?;
    let joined = begin.elapsed();
    let buffers = comm.info().buffer_bytes;
    let carriers = comm.info().classes.clone();
    let peer = match &setup.nccl {
        None => None,
        Some(nccl) => {
            let id = (rank == 0).then(|| peer::unique_id(nccl)).transpose()?;
            let id = share_bytes(control, id)?;
            Some(PeerComm::join(nccl, &context, id, rank, nranks)?)
        }
    };
    let mut lane = GpuLane::new(&context, comm, peer, &plan.source, arenas)?;
    let mut output = match rank {
        0 => Output::new(setup.options.json.as_deref())?,
        _ => Output::default(),
    };
    let run = RunRecord::new(&device, setup.driver.device_count()?);
    let how = if setup.options.gpu.graph {
        "graph replay"
    } else {
        "eager"
    };
    output.line(&format!(
        "# cinch {} bench {}: {nranks} ranks on {} x {}{}, {}, {how}",
        cinch::VERSION,
        setup.options.collective,
        nranks.div_ceil(setup.options.gpu.per_gpu()),
        run.gpu,
        match setup.options.gpu.hosts() {
            1 => String::new(),
            hosts => format!(" as {}", comm_hosts(hosts, &carriers)),
        },
        if setup.options.gpu.procs {
            "processes"
        } else {
            "threads"
        },
    ));
    output.line(&format!(
        "# driver {} CUDA {}; kernels {}; joined in {:.3} s; {buffers} bytes of buffers on each GPU",
        run.driver,
        run.cuda,
        run.kernels,
        joined.as_secs_f64()
    ));
    for note in &setup.notes {
        output.line(&format!("# {note}"));
    }
    output.write(table::write_head);
    let failed = run_rows(control, &mut lane, plan, setup, &run, &mut output)?;
    control.barrier()?;
    lane.end()?;
    Ok(failed)
}

/// `2 hosts (NVLink to 3, pinned staging through tcp to 4)`, as the first rank sees them.
fn comm_hosts(hosts: usize, carriers: &[String]) -> String {
    let mut kinds: Vec<&String> = carriers.iter().collect();
    kinds.sort();
    let kinds: Vec<String> = kinds
        .chunk_by(|one, next| one == next)
        .map(|alike| format!("{} to {}", alike[0], alike.len()))
        .collect();
    format!("{hosts} hosts ({})", kinds.join(", "))
}

fn run_rows(
    control: &Communicator,
    lane: &mut GpuLane<'_>,
    plan: &Plan,
    setup: &Setup<'_>,
    run: &RunRecord,
    output: &mut Output,
) -> Result<bool> {
    let options = setup.options;
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
    let version = setup.nccl.as_ref().map(|nccl| nccl.version());
    let mut records = Vec::new();
    for (index, row) in plan.rows.iter().enumerate() {
        if let Some(deadline) = deadline {
            let late = u64::from(index > 0 && Instant::now() >= deadline);
            if control.gather_words(&[late])?[0] == 1 {
                let left = plan.rows.len() - index;
                output.line(&format!(
                    "# time limit: {left} of {} rows were left out",
                    plan.rows.len()
                ));
                break;
            }
        }
        let explained = lane.explain(row)?;
        if options.explain {
            for line in explained.lines() {
                output.line(&format!("# {line}"));
            }
        }
        let found = runner::run(control, lane, source, row, effort, mode)?;
        let protocol = layout::protocol(&explained).unwrap_or("-");
        let nranks = control.nranks();
        let record = Record::new(
            options,
            run,
            row,
            nranks,
            &found,
            protocol,
            version.as_deref(),
        );
        output.row(&record)?;
        records.push(record);
    }
    output.write(|out| table::write_foot(&records, out));
    Ok(records.iter().any(|record| record.entry.failed()))
}

/// Refuses arenas that do not fit the memory that is free for `per_gpu` ranks.
fn check_memory(context: &Context, per_gpu: usize, arenas: (usize, usize)) -> Result<()> {
    let (free, _) = context.memory()?;
    let needed = (arenas.0 + arenas.1).saturating_mul(per_gpu);
    if needed > free / 10 * 9 {
        return Err(Error::invalid_argument(format!(
            "the largest size needs {} MiB of buffers for {per_gpu} ranks on {}, of which {} MiB \
             are free; use a smaller -e or fewer ranks",
            needed >> 20,
            context.device(),
            free >> 20
        )));
    }
    Ok(())
}

/// Rank 0's bytes, on all ranks.
fn share_bytes(control: &Communicator, bytes: Option<[u8; 128]>) -> Result<[u8; 128]> {
    let mut words = [0u64; 16];
    if let Some(bytes) = bytes {
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
    }
    let all = control.gather_words(&words)?;
    let mut shared = [0; 128];
    for (bytes, word) in shared.as_chunks_mut().0.iter_mut().zip(all) {
        *bytes = word.to_ne_bytes();
    }
    Ok(shared)
}

/// Where rows go; those of ranks other than 0, nowhere.
#[derive(Default)]
struct Output {
    speaks: bool,
    json: Option<File>,
}

impl Output {
    fn new(json: Option<&Path>) -> Result<Output> {
        let create = |path: &Path| {
            File::create(path)
                .map_err(|error| Error::invalid_argument(format!("{}: {error}", path.display())))
        };
        Ok(Output {
            speaks: true,
            json: json.map(create).transpose()?,
        })
    }

    fn line(&mut self, text: &str) {
        self.write(|out| writeln!(out, "{text}"));
    }

    /// A reader that left is no failure: files and exit code are still worth having.
    fn write(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
        if self.speaks {
            let mut out = io::stdout().lock();
            let _ = write(&mut out).and_then(|()| out.flush());
        }
    }

    /// One row, on the screen and in the file at once: a run that is cut off leaves what it had.
    fn row(&mut self, record: &Record) -> Result<()> {
        self.write(|out| table::write_row(record, out));
        if let Some(file) = &mut self.json {
            let named = |error: io::Error| Error::internal(format!("--json: {error}"));
            let line = serde_json::to_string(record).map_err(|error| named(error.into()))?;
            writeln!(file, "{line}").map_err(named)?;
        }
        Ok(())
    }
}
