//! Ranks on GPUs: started as threads or processes, each with its GPU, its communicators and its
//! buffers. What they do then is a [`Work`].

use super::device::GpuLane;
use super::layout::Layout;
use super::options::GpuOptions;
use super::output::Output;
use super::peer::{self, PeerComm};
use crate::bench::plan::Plan;
use crate::bench::record::RunRecord;
use crate::bench::world::World;
use crate::join;
use crate::launch::Launch;
use crate::{FAILURE, USAGE, WRONG};
use cinch::config::Origin;
use cinch::gpu::{Context, Device, Driver};
use cinch::sys::nccl::Nccl;
use cinch::types::{DeviceChoice, TransportKind};
use cinch::{Communicator, Config, Error, ErrorKind, Result, UniqueId};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

pub type Ended = std::result::Result<i32, (i32, String)>;

/// What ranks do.
pub trait Work: Sync {
    /// What it is, as a phrase.
    fn name(&self) -> String;
    /// The inputs, and the rows whose buffers must fit, for so many ranks.
    ///
    /// # Errors
    /// A sentence about options that cannot be.
    fn plan(&self, ranks: usize) -> std::result::Result<Plan, String>;
    /// Whether the other library is to run on symmetric windows, too.
    fn windows(&self) -> bool {
        false
    }
    /// Where the rows go.
    ///
    /// # Errors
    /// Invalid argument if a file cannot be written.
    fn output(&self) -> Result<Output>;
    /// Does it on one of the ranks; whether anything was wrong.
    ///
    /// # Errors
    /// What stopped it.
    fn run(
        &self,
        control: &Communicator,
        lane: &mut GpuLane<'_>,
        plan: &Plan,
        site: &Site<'_>,
        output: &mut Output,
    ) -> Result<bool>;
}

/// Where work runs.
pub struct Site<'a> {
    /// Machine, date, command.
    pub run: &'a RunRecord,
    /// Version of the other library.
    pub nccl: Option<String>,
}

/// Does `work` on the GPUs of `options` and returns the exit code.
///
/// # Errors
/// Exit code and sentence.
pub fn start(options: &GpuOptions, config: &Config, work: &dyn Work) -> Ended {
    let usage = |sentence: String| (USAGE, sentence);
    let failure = |error: Error| (FAILURE, error.to_string());
    let per_gpu = options.per_gpu();
    let launched = join::launcher().is_some();
    // The environment first: it is read by what comes then.
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
        return one_rank(&Setup::new(options, config, &driver, other, work));
    }
    let gpus = options.gpus.unwrap_or(visible);
    if gpus > visible || gpus == 0 {
        return Err(usage(format!(
            "--gpus {gpus}, but this process sees {visible} (CUDA_VISIBLE_DEVICES may hide some)"
        )));
    }
    let ranks = gpus as usize * per_gpu;
    let plan = work.plan(ranks).map_err(usage)?;
    options.host_of(0, ranks).map_err(usage)?;
    if options.procs {
        return processes(ranks, config);
    }
    let setup = Setup {
        plan: Some(plan),
        ..Setup::new(options, config, &driver, other, work)
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

fn open(path: &Path) -> std::result::Result<(Arc<Nccl>, Vec<String>), String> {
    peer::open(path).map_err(|error| format!("--vs: {error}"))
}

/// The settings of the communicator by which ranks meet.
fn on_host(config: &Config) -> Config {
    Config {
        device: DeviceChoice::Host,
        codec: cinch::CodecSetting::RAW,
        algorithm: None,
        // The transport of GPUs carries nothing between ranks on the host; any other one is meant for both.
        transport: config.transport.filter(|&kind| kind != TransportKind::Cuda),
        ..config.clone()
    }
}

/// Runs this very command as `ranks` processes. Their cores are left to the system: a rank has
/// threads besides, its watchdog and the other library's.
fn processes(ranks: usize, config: &Config) -> Ended {
    Launch::of_this_command(ranks)
        .and_then(|launch| launch.run_with_rendezvous(&on_host(config)))
        .map_err(|sentence| (FAILURE, sentence))
}

/// This process as one of several ranks.
fn one_rank(setup: &Setup<'_>) -> Ended {
    let failure = |error: Error| (FAILURE, error.to_string());
    let control = join::join(on_host(setup.config)).map_err(failure)?;
    let asked = setup.options.gpus.map(|gpus| gpus as usize);
    let per_gpu = setup.options.per_gpu();
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
    options: &'a GpuOptions,
    config: &'a Config,
    driver: &'a Arc<Driver>,
    work: &'a dyn Work,
    /// Made before there are threads, where the number of ranks is known.
    plan: Option<Plan>,
    nccl: Option<Arc<Nccl>>,
    notes: Vec<String>,
}

impl<'a> Setup<'a> {
    fn new(
        options: &'a GpuOptions,
        config: &'a Config,
        driver: &'a Arc<Driver>,
        other: Option<(Arc<Nccl>, Vec<String>)>,
        work: &'a dyn Work,
    ) -> Setup<'a> {
        let (nccl, notes) = other.map_or((None, Vec::new()), |(nccl, notes)| (Some(nccl), notes));
        Setup {
            options,
            config,
            driver,
            work,
            plan: None,
            nccl,
            notes,
        }
    }
}

/// One rank, from its context to the last row; whether anything was wrong.
fn run_rank(control: &Communicator, setup: &Setup<'_>) -> Result<bool> {
    let (rank, nranks) = (control.rank(), control.nranks());
    let own;
    let plan = match &setup.plan {
        Some(plan) => plan,
        None => {
            own = setup.work.plan(nranks).map_err(Error::invalid_argument)?;
            &own
        }
    };
    let gpu = setup.options.gpu_of(rank, nranks);
    let device = Device::at(setup.driver, gpu)?;
    let context = Context::primary(&device)?;
    let arenas = Layout::arenas(&plan.rows, nranks)?;
    let copies = if setup.work.windows() && setup.nccl.is_some() {
        2
    } else {
        1
    };
    check_memory(&context, setup.options.per_gpu(), copies, arenas)?;
    // The time to join is counted from when all have their contexts.
    control.barrier()?;
    let begin = Instant::now();
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
    let comm = Communicator::init(&UniqueId::from_bytes(&bytes)?, rank, nranks, config)?;
    let joined = begin.elapsed();
    let buffers = comm.info().buffer_bytes;
    let carriers = comm.info().classes.clone();
    let mut notes = setup.notes.clone();
    let peer = match &setup.nccl {
        None => None,
        Some(nccl) => {
            let id = (rank == 0).then(|| peer::unique_id(nccl)).transpose()?;
            let id = share_bytes(control, id)?;
            let mut peer = PeerComm::join(nccl, &context, id, rank, nranks)?;
            if setup.work.windows()
                && let Some(why) = open_windows(control, &mut peer, arenas)?
            {
                notes.push(format!("skipped: NCCL on symmetric windows: {why}"));
            }
            Some(peer)
        }
    };
    let mut lane = GpuLane::new(&context, comm, peer, &plan.source, arenas)?;
    let mut output = match rank {
        0 => setup.work.output()?,
        _ => Output::default(),
    };
    let run = RunRecord::new(&device, setup.driver.device_count()?).under(setup.config);
    output.line(&format!(
        "# cinch {} {}: {nranks} ranks on {} x {}{}, {}",
        cinch::VERSION,
        setup.work.name(),
        nranks.div_ceil(setup.options.per_gpu()),
        run.gpu,
        match setup.options.hosts() {
            1 => String::new(),
            hosts => format!(" as {}", comm_hosts(hosts, &carriers)),
        },
        match setup.options.processes() {
            true => "processes",
            false => "threads",
        },
    ));
    output.line(&format!(
        "# driver {} CUDA {}; kernels {}; joined in {:.3} s; {buffers} bytes of buffers on each GPU",
        run.driver,
        run.cuda,
        run.kernels,
        joined.as_secs_f64()
    ));
    for note in &notes {
        output.line(&format!("# {note}"));
    }
    let site = Site {
        run: &run,
        nccl: setup.nccl.as_ref().map(|nccl| nccl.version()),
    };
    let failed = setup
        .work
        .run(control, &mut lane, plan, &site, &mut output)?;
    control.barrier()?;
    lane.end()?;
    output.end()?;
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

/// Opens symmetric windows on all ranks or on none, as calls on them are collective; why on none.
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

/// Refuses arenas that do not fit the memory that is free for `per_gpu` ranks.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_meet_on_the_host_whatever_carries_their_data() {
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
