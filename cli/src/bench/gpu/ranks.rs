//! Starts ranks as threads or processes, each with a GPU, its communicators and its buffers. Each
//! rank runs a [`GpuTask`].

use super::layout::ArenaLayout;
use super::nccl::Nccl;
use super::options::GpuOptions;
use super::peer::{self, PeerComm};
use super::queue::GpuQueue;
use crate::bench::output::Output;
use crate::bench::record::RunInfo;
use crate::bench::workload::Workload;
use crate::bench::world::BenchRank;
use crate::join;
use crate::launch::LocalLaunch;
use crate::{ExitResult, FAILURE, USAGE, WRONG};
use cinch::config::{FileChoice, Origin};
use cinch::gpu::{Context, Device, Driver};
use cinch::types::{DeviceChoice, TransportKind};
use cinch::{Communicator, Config, Error, ErrorKind, Result, UniqueId};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// The work that every rank runs on its GPU.
pub trait GpuTask: Sync {
    /// Returns the task's name for the first line of output.
    fn name(&self) -> String;
    /// Returns the benchmark's inputs, and all rows whose buffers must fit into GPU memory, for a
    /// run of `ranks` ranks.
    ///
    /// # Errors
    /// Returns an error message about options that cannot work.
    fn workload(&self, ranks: usize) -> std::result::Result<Workload, String>;
    /// Returns whether NCCL is also measured on symmetric windows.
    fn windows(&self) -> bool {
        false
    }
    /// Opens the output of rank 0 in a run of `ranks` ranks.
    ///
    /// # Errors
    /// Returns an invalid-argument error if a file cannot be written.
    fn output(&self, ranks: usize) -> Result<Output>;
    /// Runs the task on one rank and returns whether any result was wrong.
    ///
    /// # Errors
    /// Returns the error that stopped the task.
    fn run(
        &self,
        control: &Communicator,
        queue: &mut GpuQueue<'_>,
        workload: &Workload,
        context: &RunContext<'_>,
        output: &mut Output,
    ) -> Result<bool>;
}

/// Circumstances of a run, which go into its records.
pub struct RunContext<'a> {
    /// Machine, date and command.
    pub run: &'a RunInfo,
    /// Version of the NCCL library of `--vs`.
    pub nccl: Option<String>,
}

/// Runs `task` on the GPUs of `options` and returns the exit code.
///
/// # Errors
/// Returns an exit code and an error message.
pub fn start(options: &GpuOptions, config: &Config, task: &dyn GpuTask) -> ExitResult {
    let usage = |sentence: String| (USAGE, sentence);
    let failure = |error: Error| (FAILURE, error.to_string());
    let per_gpu = options.per_gpu();
    let launched = join::launcher().is_some();
    // The environment variable must be set before the driver or another thread reads it.
    if per_gpu > 1 {
        peer::separate_queues();
    }
    let other = match &options.vs {
        Some(path) if launched || !options.procs => Some(open(path).map_err(usage)?),
        _ => None,
    };
    let driver = Driver::load().map_err(failure)?;
    let visible = driver.device_count().map_err(failure)?;
    if launched {
        return one_rank(&Setup::new(options, config, &driver, other, task));
    }
    let gpus = options.gpus.unwrap_or(visible);
    if gpus > visible || gpus == 0 {
        return Err(usage(format!(
            "--gpus {gpus}, but this process sees {visible} (CUDA_VISIBLE_DEVICES may hide some)"
        )));
    }
    let ranks = gpus as usize * per_gpu;
    let workload = task.workload(ranks).map_err(usage)?;
    options.host_of(0, ranks).map_err(usage)?;
    if options.procs {
        return processes(ranks, config);
    }
    let setup = Setup {
        workload: Some(workload),
        ..Setup::new(options, config, &driver, other, task)
    };
    let ended = cinch::testing::try_local_world(ranks, &on_host(config), |control| {
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
    // A remote error only repeats the error of another rank, so the first error of another kind is
    // the cause.
    let cause = errors
        .iter()
        .find(|error| error.kind() != ErrorKind::Remote)
        .or(errors.first());
    match cause {
        Some(error) => Err((FAILURE, error.to_string())),
        None => Ok(if failed { WRONG } else { 0 }),
    }
}

fn open(path: &Path) -> std::result::Result<(Arc<Nccl>, Vec<String>), String> {
    peer::open(path).map_err(|error| format!("--vs: {error}"))
}

/// Returns the settings of the host-memory communicator over which ranks exchange results.
fn on_host(config: &Config) -> Config {
    Config {
        device: DeviceChoice::Host,
        codec: cinch::CodecSetting::RAW,
        algorithm: None,
        // The `cuda` transport cannot carry data in host memory; every other transport setting
        // applies to both communicators.
        transport: config.transport.filter(|&kind| kind != TransportKind::Cuda),
        topology: FileChoice::Off,
        emulated: None,
        ..config.clone()
    }
}

/// Starts this command as `ranks` processes. Ranks are not bound to cores, as each also runs a
/// watchdog thread and NCCL's threads.
fn processes(ranks: usize, config: &Config) -> ExitResult {
    LocalLaunch::of_this_command(ranks)
        .and_then(|launch| launch.run_with_rendezvous(&on_host(config)))
        .map_err(|sentence| (FAILURE, sentence))
}

/// Runs this process as a rank that a launcher has started.
fn one_rank(setup: &Setup<'_>) -> ExitResult {
    let failure = |error: Error| (FAILURE, error.to_string());
    let control = join::join(on_host(setup.config)).map_err(failure)?;
    let asked = setup.options.gpus.map(|gpus| gpus as usize);
    let per_gpu = setup.options.per_gpu();
    if asked.is_some_and(|gpus| gpus * per_gpu != control.nranks()) {
        return Err((
            USAGE,
            format!(
                "--gpus and --ranks-per-gpu mean {} ranks, but {} were started",
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

/// State that the ranks of a process share.
struct Setup<'a> {
    options: &'a GpuOptions,
    config: &'a Config,
    driver: &'a Arc<Driver>,
    task: &'a dyn GpuTask,
    /// The inputs and rows. They are prepared before threads start if the number of ranks is known
    /// by then.
    workload: Option<Workload>,
    nccl: Option<Arc<Nccl>>,
    notes: Vec<String>,
}

impl<'a> Setup<'a> {
    fn new(
        options: &'a GpuOptions,
        config: &'a Config,
        driver: &'a Arc<Driver>,
        other: Option<(Arc<Nccl>, Vec<String>)>,
        task: &'a dyn GpuTask,
    ) -> Setup<'a> {
        let (nccl, notes) = other.map_or((None, Vec::new()), |(nccl, notes)| (Some(nccl), notes));
        Setup {
            options,
            config,
            driver,
            task,
            workload: None,
            nccl,
            notes,
        }
    }
}

/// Runs one rank from creating its context to its last row. Returns whether any result was wrong.
fn run_rank(control: &Communicator, setup: &Setup<'_>) -> Result<bool> {
    let (rank, nranks) = (control.rank(), control.nranks());
    let own;
    let workload = match &setup.workload {
        Some(workload) => workload,
        None => {
            own = setup
                .task
                .workload(nranks)
                .map_err(Error::invalid_argument)?;
            &own
        }
    };
    let gpu = setup.options.gpu_of(rank, nranks);
    let device = Device::at(setup.driver, gpu)?;
    let context = Context::primary(&device)?;
    let arenas = ArenaLayout::arenas(&workload.rows, nranks)?;
    let copies = if setup.task.windows() && setup.nccl.is_some() {
        2
    } else {
        1
    };
    check_memory(&context, setup.options.per_gpu(), copies, arenas)?;
    // The time to join is measured from this barrier, when all ranks have created their contexts.
    control.barrier()?;
    let begin = Instant::now();
    let comm = join_gpus(control, setup, gpu)?;
    let joined = begin.elapsed();
    let buffers = comm.info().buffer_bytes;
    let carriers = comm.info().classes.clone();
    let mut notes = setup.notes.clone();
    let peer = join_peer(control, setup, &context, (arenas, &mut notes))?;
    let mut queue = GpuQueue::new(&context, comm, peer, &workload.source, arenas)?;
    let mut output = match rank {
        0 => setup.task.output(nranks)?,
        _ => Output::silent(),
    };
    let run = RunInfo::on_gpus(&device, setup.driver.device_count()?).under(setup.config);
    let place = describe(setup, &run, nranks, &carriers);
    output.note(&format!(
        "cinch {} {}: {place}",
        cinch::VERSION,
        setup.task.name()
    ));
    output.note(&format!(
        "driver {} CUDA {}; kernels {}; joined in {:.3} s; {buffers} bytes of buffers on each GPU",
        run.driver,
        run.cuda,
        run.kernels,
        joined.as_secs_f64()
    ));
    for note in &notes {
        output.note(note);
    }
    let run_context = RunContext {
        run: &run,
        nccl: setup.nccl.as_ref().map(|nccl| nccl.version()),
    };
    let failed = setup
        .task
        .run(control, &mut queue, workload, &run_context, &mut output)?;
    control.barrier()?;
    queue.end()?;
    output.end()?;
    Ok(failed)
}

/// Opens the communicator of rank `control.rank()` on GPU `gpu`.
fn join_gpus(control: &Communicator, setup: &Setup<'_>, gpu: u32) -> Result<Communicator> {
    let (rank, nranks) = (control.rank(), control.nranks());
    let mut config = setup.config.clone();
    config.set("CINCH_DEVICE", &format!("cuda:{gpu}"), Origin::Program)?;
    let host = setup.options.host_of(rank, nranks);
    if let Some(host) = host.map_err(Error::invalid_argument)? {
        config.set("CINCH_HOST_ID", &host, Origin::Program)?;
    }
    let id = match rank {
        0 => Some(join::create_id(&config)?),
        _ => None,
    };
    let bytes = share_bytes(control, id.as_ref().map(|id| *id.as_bytes()))?;
    Communicator::init(&UniqueId::from_bytes(&bytes)?, rank, nranks, config)
}

/// Opens NCCL's communicator, if the run has one. A note in `notes` states why its symmetric windows
/// are skipped.
fn join_peer(
    control: &Communicator,
    setup: &Setup<'_>,
    context: &Arc<Context>,
    (arenas, notes): ((usize, usize), &mut Vec<String>),
) -> Result<Option<PeerComm>> {
    let Some(nccl) = &setup.nccl else {
        return Ok(None);
    };
    let (rank, nranks) = (control.rank(), control.nranks());
    let id = (rank == 0).then(|| peer::unique_id(nccl)).transpose()?;
    let id = share_bytes(control, id)?;
    let mut peer = PeerComm::join(nccl, context, id, rank, nranks)?;
    if setup.task.windows()
        && let Some(why) = open_windows(control, &mut peer, arenas)?
    {
        notes.push(format!("skipped: NCCL on symmetric windows: {why}"));
    }
    Ok(Some(peer))
}

/// Formats ranks, GPUs, hosts and process model: `8 ranks on 8 x NVIDIA H100, threads`.
fn describe(setup: &Setup<'_>, run: &RunInfo, nranks: usize, carriers: &[String]) -> String {
    let gpus = nranks.div_ceil(setup.options.per_gpu());
    let hosts = match setup.options.hosts() {
        1 => String::new(),
        hosts => format!(" as {}", comm_hosts(hosts, carriers)),
    };
    let model = match setup.options.processes() {
        true => "processes",
        false => "threads",
    };
    format!("{nranks} ranks on {gpus} x {}{hosts}, {model}", run.gpu)
}

/// Formats the number of hosts, and for each kind of link the number of ranks that it connects with this
/// rank: `2 hosts (NVLink to 3, pinned staging through tcp to 4)`.
fn comm_hosts(hosts: usize, carriers: &[String]) -> String {
    let mut kinds: Vec<&String> = carriers.iter().collect();
    kinds.sort();
    let kinds: Vec<String> = kinds
        .chunk_by(|one, next| one == next)
        .map(|alike| format!("{} to {}", alike[0], alike.len()))
        .collect();
    format!("{hosts} hosts ({})", kinds.join(", "))
}

/// Opens NCCL's symmetric windows on all ranks or on none, as calls on windows are collective.
/// Returns the reason if none were opened.
fn open_windows(
    control: &Communicator,
    peer: &mut PeerComm,
    arenas: (usize, usize),
) -> Result<Option<String>> {
    for step in [0, 1] {
        let done = match step {
            0 => peer.allocate_windows(arenas),
            _ => peer.register_windows(),
        };
        let ranks = control.gather_words(&[u64::from(done.is_ok())])?;
        if ranks.contains(&0) {
            peer.close_windows()?;
            let elsewhere = || "they failed on another rank".to_string();
            return Ok(Some(
                done.err().map_or_else(elsewhere, |error| error.to_string()),
            ));
        }
    }
    Ok(None)
}

/// Refuses arenas that exceed the free GPU memory for `per_gpu` ranks.
fn check_memory(
    context: &Context,
    per_gpu: usize,
    copies: usize,
    arenas: (usize, usize),
) -> Result<()> {
    let (free, _) = context.memory()?;
    let needed = (arenas.0 + arenas.1).saturating_mul(per_gpu * copies);
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

/// Broadcasts 128 bytes from rank 0 over the host communicator.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_communicator_works_with_every_transport_setting() {
        for (name, kept) in [("cuda", None), ("tcp", Some(TransportKind::Tcp))] {
            let mut config = Config::default();
            config
                .set("CINCH_TRANSPORT", name, Origin::Environment)
                .unwrap();
            let control = on_host(&config);
            assert_eq!(control.transport, kept);
            let ranks = cinch::testing::try_local_world(2, &control, |comm| comm.is_ok());
            assert_eq!(ranks, [true, true], "{name}");
        }
    }
}
