//! Init of a communicator: log, agreement on settings, connections.

use super::requests::CallThread;
use super::sample::Sampler;
use super::stats::CommCounters;
use super::{CommInfo, Communicator, DeviceState, agreement, costs, gpu, topology};
use crate::bootstrap::{self, ControlPlane, OutOfBandRef, PeerInfo, UniqueId};
use crate::config::{
    CodecPolicy, CommFacts, Config, FileChoice, NVTX_VARIABLE, launcher_environment, nvtx_library,
};
use crate::cpu::{FloatEnvironment, Isa};
use crate::engine::HostEngine;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::{MachineFacts, TuningTable};
use crate::recorder::{self, CommLabel, GpuNumbers, RankName, RecorderSettings};
use crate::schedule::Groups;
use crate::sync::Fault;
use crate::sys::file;
use crate::sys::fork::{ForkOwned, ProcessId};
use crate::sys::log::{self, Level, LineForm, LogLabel};
use crate::sys::numa;
use crate::sys::nvml::Nvml;
use crate::sys::nvtx;
use crate::transport::{self, ConnectContext, HostLoad};
use crate::types::{CodecSpec, DeviceChoice, Subsystem, TransportKind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

/// Joins the communicator of `id`.
pub(super) fn by_id(
    id: &UniqueId,
    rank: usize,
    nranks: usize,
    config: Config,
    fault: Arc<Fault>,
) -> Result<Communicator> {
    if nranks == 0 || rank >= nranks {
        return Err(Error::invalid_argument(format!(
            "rank {rank} of {nranks}: a communicator of n ranks has ranks 0 to n-1"
        )));
    }
    let _label = log::label(LogLabel {
        rank,
        communicator: config.comm_name.clone(),
    });
    start_log(&config);
    let begun = Instant::now();
    let exchange = ControlPlane::join(id, rank, nranks, &config, fault.clone())?;
    connect(exchange, fault, config, begun)
}

/// Returns when an init ends that began at `begun`, at the latest. If the rendezvous has taken the whole
/// time, a tenth of it is left to connect.
fn deadline(config: &Config, begun: Instant) -> Instant {
    let timeout = config.init_timeout;
    (begun + timeout).max(Instant::now() + timeout / 10)
}

/// Opens the log and warns of misspelt settings, once in a process. Other threads do not wait for
/// this work: a forked child has no thread that would finish it.
fn start_log(config: &Config) {
    let decided = log::configure(&log::Settings {
        level: &config.log_level,
        subsystems: config.log_subsystems,
        file: config.log_file.as_deref(),
        host: &bootstrap::host_name(),
        form: match config.log_format.as_str() {
            "long" => LineForm::Long,
            "json" => LineForm::Json,
            _ if config.as_nccl => LineForm::Nccl,
            _ => LineForm::Short,
        },
    });
    if !decided {
        return;
    }
    nvtx::open(NVTX_VARIABLE, nvtx_library());
    // NCCL logs its version only if NCCL_DEBUG is set. In the drop-in that variable sets CINCH_LOG.
    if config.as_nccl && config.is_set("CINCH_LOG") {
        let version = crate::VERSION;
        log::line(
            Level::Version,
            format_args!("cinch {version} answers in NCCL's place"),
        );
    }
    // All ranks of `cinch run` have the same environment, so only rank 0 warns.
    let rank_0_warns = launcher_environment("CINCH_LAUNCH_RANK").is_some_and(|rank| rank != "0");
    let unknown = Config::unknown_names().into_iter();
    for name in unknown.filter(|_| !rank_0_warns) {
        log::line(
            Level::Warn,
            format_args!("no setting is called {name}; it has no effect"),
        );
    }
    for note in &config.notes {
        let level = if note.warns { Level::Warn } else { Level::Info };
        log::line_of(Subsystem::Env, level, format_args!("{}", note.text));
    }
}

/// Logs transports, slots and codec policy of the communicator in one line.
fn log_connected(comm: &Communicator) {
    let served = comm.info.transports.iter().flatten();
    let names: Vec<&str> = match comm.info.classes.is_empty() {
        true => served.map(|kind| kind.name()).collect(),
        false => comm.info.classes.iter().map(String::as_str).collect(),
    };
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for name in names {
        match counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    let counts: Vec<String> = counts
        .iter()
        .map(|(name, count)| format!("{name} to {count}"))
        .collect();
    let named = match comm.config.comm_name.as_str() {
        "" => String::new(),
        name => format!(" of communicator \"{name}\""),
    };
    log::line(
        Level::Info,
        format_args!(
            "{} of {} on {}{named}: {}; {} slots of {} bytes on {} channels, {} bytes in all; \
             algorithm {}; {}",
            comm.peers()[comm.rank()],
            comm.nranks(),
            comm.info.hosts,
            if counts.is_empty() {
                "no peers".into()
            } else {
                counts.join(", ")
            },
            comm.info.slots,
            comm.info.slot_bytes,
            comm.info.channels,
            comm.info.buffer_bytes,
            comm.config
                .algorithm
                .map_or("by cost", |algorithm| algorithm.name()),
            comm.policy,
        ),
    );
}

/// Joins the communicator that the launcher's variables describe.
pub(super) fn by_environment(config: Config) -> Result<Communicator> {
    let launch = bootstrap::discover(&config, launcher_environment)?.ok_or_else(|| {
        let found = match bootstrap::half_set(launcher_environment) {
            Some((set, unset)) => format!("{set} is set and {unset} is not"),
            None => "no launcher's variables are set".into(),
        };
        Error::invalid_usage(format!(
            "{found}; start ranks with `cinch run -n N`, torchrun, mpirun or srun, or hand each rank its \
             number and one unique id"
        ))
    })?;
    let id = launch.unique_id(&config)?;
    by_id(&id, launch.rank, launch.nranks, config, Fault::new())
}

/// Number of communicators that this process has begun to connect.
static CREATED: AtomicUsize = AtomicUsize::new(0);

/// Makes the communicator of ranks that have joined a control plane: compares settings, then
/// connects memory. The init began at `begun`, and fails after [`Config::init_timeout`].
pub(super) fn connect(
    exchange: OutOfBandRef,
    fault: Arc<Fault>,
    config: Config,
    begun: Instant,
) -> Result<Communicator> {
    let deadline = deadline(&config, begun);
    let _label = log::label(LogLabel {
        rank: exchange.rank(),
        communicator: config.comm_name.clone(),
    });
    let order = CREATED.fetch_add(1, Ordering::Relaxed) + 1;
    exchange.limit_exchanges(Some(deadline));
    let made = connect_until(exchange.clone(), fault.clone(), (config, order), deadline);
    exchange.limit_exchanges(None);
    // Without the announcement, the exit of a rank whose time is up, or whose parent communicator has failed,
    // would look like a death.
    made.inspect_err(|error| {
        if error.kind() == ErrorKind::Timeout || fault.is_raised() {
            exchange.announce(error);
        }
    })
}

fn connect_until(
    exchange: OutOfBandRef,
    fault: Arc<Fault>,
    (config, order): (Config, usize),
    deadline: Instant,
) -> Result<Communicator> {
    // Another rounding mode could give costs by which this rank selects another algorithm.
    let _environment = FloatEnvironment::standard();
    // An error of this rank is announced, because the other ranks wait for this rank next.
    let (isa, table) = Isa::from_setting(&config.simd)
        .and_then(|isa| Ok((isa, table(&config)?)))
        .inspect_err(|error| exchange.announce(error))?;
    let exchange = transport::merge_hosts(exchange, &config, &fault)?;
    let policy = policy(&*exchange, &config, order)?;
    let settings = agreement::compare_settings(&*exchange, &config, &policy, table.as_deref())?;
    let (info, state) = if config.device == DeviceChoice::Host {
        let (info, engine) = on_host(&exchange, &fault, &config, &policy, isa, deadline)?;
        (
            info,
            DeviceState::Host(ForkOwned::new(Box::new(Mutex::new(engine)))),
        )
    } else {
        let (config, agreed) = ((&config, deadline), (&policy, &*settings));
        let (info, state) = gpu::connect(&exchange, &fault, config, agreed, isa, table)?;
        (info, DeviceState::Gpu(ForkOwned::new(Box::new(state))))
    };
    let groups = match &state {
        DeviceState::Host(engine) => {
            let engine = engine.lock().unwrap_or_else(PoisonError::into_inner);
            engine.limits().groups().count()
        }
        DeviceState::Gpu(gpu) => gpu.engine()?.limits().groups().count(),
    };
    let policy = policy.on_groups(groups);
    let recorder = recorder::register(
        CommLabel {
            name: config.comm_name.clone(),
            id: std::array::from_fn(|at| exchange.key("flight recorder")[at]),
            rank: exchange.rank(),
            ranks: exchange.peers().iter().map(rank_name).collect(),
            gpu: gpu_numbers(&state, &config),
        },
        RecorderSettings {
            answers_ps: config.answers_ps,
            dump_file: config.dump_file.clone(),
            metrics_file: config
                .metrics_file
                .clone()
                .map(|path| (path, config.metrics_interval)),
            host: bootstrap::host_name(),
        },
    );
    recorder.set_fault(fault.clone());
    match &state {
        DeviceState::Host(engine) => {
            let mut engine = engine.lock().unwrap_or_else(PoisonError::into_inner);
            engine.set_recorder(recorder.clone());
        }
        DeviceState::Gpu(gpu) => gpu.engine()?.set_recorder(recorder.clone()),
    }
    let comm = Communicator {
        owner: ProcessId::this(),
        recorder,
        exchange,
        fault,
        announced: AtomicBool::new(false),
        config,
        policy,
        sampler: Sampler::default(),
        counters: CommCounters::default(),
        info,
        state,
        started: ForkOwned::new(CallThread::default()),
        spare_buffers: Mutex::default(),
        shrink_rendezvous: OnceLock::new(),
        grow_id: Mutex::default(),
    };
    if log::enabled(Level::Info) {
        log_connected(&comm);
    }
    Ok(comm)
}

/// Returns the policy for calls that name no codec. All ranks call it together.
fn policy(
    exchange: &dyn bootstrap::OutOfBand,
    config: &Config,
    order: usize,
) -> Result<CodecPolicy> {
    let peers = exchange.peers();
    let facts = CommFacts {
        ranks: peers.len(),
        hosts: Groups::of_hosts(peers.iter().map(|peer| peer.host_id)).count(),
        order: first_order(exchange, order)?,
    };
    let policy = CodecPolicy::new(config, facts);
    Ok(
        match facts.hosts == 1 && !topology::may_have_groups(config) {
            true => policy.on_groups(1),
            false => policy,
        },
    )
}

/// Returns the order of the communicator on rank 0. Other ranks may have created more communicators, or several ranks
/// of this one.
fn first_order(exchange: &dyn bootstrap::OutOfBand, order: usize) -> Result<usize> {
    let orders = exchange.all_gather(&(order as u64).to_le_bytes())?;
    let damaged = || Error::new(ErrorKind::Mismatch, "rank 0 sent no order of communicators");
    let first = orders
        .first()
        .and_then(|bytes| bytes.as_slice().try_into().ok());
    Ok(u64::from_le_bytes(first.ok_or_else(damaged)?) as usize)
}

fn rank_name(peer: &PeerInfo) -> RankName {
    RankName {
        text: peer.to_string(),
        host: peer.host.clone(),
        pid: peer.pid,
    }
}

/// Returns the numbers of the communicator's GPU; `None` on host memory. NVML is opened only if clients of
/// `CINCH_NCCL_RAS` read its number.
fn gpu_numbers(state: &DeviceState, config: &Config) -> Option<GpuNumbers> {
    let DeviceState::Gpu(gpu) = state else {
        return None;
    };
    let device = gpu.context().device();
    let nvml_number = || {
        let bus_id = device.pci_bus_id.to_ascii_lowercase().parse().ok()?;
        // Without NVML the number is unknown, and calls run.
        let known = Nvml::open().and_then(|nvml| nvml.gpu_at(bus_id));
        Some(known.ok()??.index)
    };
    Some(GpuNumbers {
        cuda: device.ordinal(),
        nvml: config.nccl_ras.then(nvml_number).flatten(),
    })
}

/// Connects this rank's host memory with the memory of all other ranks.
fn on_host(
    exchange: &OutOfBandRef,
    fault: &Arc<Fault>,
    config: &Config,
    policy: &CodecPolicy,
    isa: Isa,
    deadline: Instant,
) -> Result<(CommInfo, HostEngine)> {
    let links = transport::connect_all(&ConnectContext {
        exchange: &**exchange,
        config,
        fault,
        deadline,
        place: topology::place_of_cores(config),
        sys: Path::new(numa::SYS),
        verbs: None,
    })
    .inspect_err(|error| exchange.announce(error))?;
    let hosts = Groups::of_hosts(exchange.peers().iter().map(|peer| peer.host_id));
    let machine = machine(exchange.peers(), config, &links.kinds, links.load);
    let info = CommInfo {
        transports: links.kinds.clone(),
        classes: Vec::new(),
        channels: links.channels,
        slot_bytes: links.slot_bytes,
        slots: links.slots,
        buffer_bytes: links.buffer_bytes,
        hosts: hosts.clone(),
    };
    let mut engine = HostEngine::new(
        links,
        exchange.clone(),
        fault.clone(),
        config,
        isa,
        (machine, hosts),
    );
    if let Some(topology) = topology::on_host(&**exchange, config)? {
        log::line(
            Level::Info,
            format_args!("rings and groups are chosen by a topology: {topology}"),
        );
        engine.set_topology(topology);
    }
    // All ranks have agreed on the policy, and measure together.
    let automatic = policy.codecs.iter().filter(|one| one.codec.auto);
    let automatic: Vec<CodecSpec> = automatic.map(|one| one.codec.inter).collect();
    if !automatic.is_empty() {
        costs::measure(exchange, &automatic, &mut engine, isa)
            .inspect_err(|error| exchange.announce(error))?;
    }
    Ok((info, engine))
}

/// Largest size of a tuning table in bytes; tables of `cinch tune` have a few hundred kilobytes.
const MAX_TABLE_BYTES: usize = 8 << 20;

/// Reads the tuning table that `CINCH_TUNING` names.
fn table(config: &Config) -> Result<Option<Arc<TuningTable>>> {
    let FileChoice::File(path) = &config.tuning else {
        return Ok(None);
    };
    let name = path.display().to_string();
    let text = file::read_text(path, MAX_TABLE_BYTES)
        .map_err(|error| Error::invalid_argument(format!("CINCH_TUNING={name}: {error}")))?;
    let table = TuningTable::parse(&name, &text).map_err(|error| error.context("CINCH_TUNING"))?;
    Ok(Some(Arc::new(table)))
}

/// Returns the facts from which all ranks select the same algorithms.
fn machine(
    peers: &[PeerInfo],
    config: &Config,
    kinds: &[Option<TransportKind>],
    load: HostLoad,
) -> MachineFacts {
    let slowest = transport::slowest_links(peers, config, kinds);
    MachineFacts {
        transport: slowest.any,
        inside: slowest.inside,
        load,
        measured: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_that_one_rank_cannot_follow_is_announced() {
        let missing = FileChoice::File("/no/such/table".into());
        let mut settings = vec![(String::new(), missing, "CINCH_TUNING=/no/such/table")];
        if Isa::detect() < Isa::Avx512 {
            settings.push(("avx512".into(), FileChoice::Auto, "CINCH_SIMD=avx512"));
        }
        for (simd, tuning, word) in settings {
            let faults = [Fault::new(), Fault::new()];
            let world = bootstrap::LocalOutOfBand::world(2, &faults);
            let config = Config {
                simd,
                tuning,
                ..Config::default()
            };
            let exchange: OutOfBandRef = world[1].clone();
            assert!(connect(exchange, faults[1].clone(), config, Instant::now()).is_err());
            let reason = faults[0].reason().expect("announced to rank 0");
            assert!(reason.message().contains(word), "{reason}");
        }
    }

    /// Columns of the cases: host and process of each rank; transports between and inside hosts with shared
    /// memory; both transports without shared memory.
    #[test]
    fn machine_names_the_transports_that_carry() {
        use TransportKind::{Rdma, Shm, Tcp};
        for (ranks, by_shm, by_network) in [
            (&[(0, 0), (0, 1)][..], (Shm, Shm), (Tcp, Tcp)),
            (&[(0, 0), (0, 0)], (Shm, Shm), (Shm, Shm)),
            (&[(0, 0), (0, 0), (1, 1)], (Tcp, Shm), (Tcp, Shm)),
            (&[(0, 0), (0, 2), (1, 1)], (Tcp, Shm), (Tcp, Tcp)),
        ] {
            let peer = |(rank, &(host, process)): (usize, &(u8, u8))| PeerInfo {
                rank,
                pid: 1,
                uid: 1,
                host: String::new(),
                host_id: [host; 16],
                process_id: [process; 16],
                address: [127, 0, 0, 1].into(),
            };
            let peers: Vec<PeerInfo> = ranks.iter().enumerate().map(peer).collect();
            let of = |shm_disable, transport, kind| {
                let config = Config {
                    shm_disable,
                    transport,
                    ..Config::default()
                };
                let machine = machine(&peers, &config, &[None, Some(kind)], HostLoad::LIGHT);
                (machine.transport, machine.inside)
            };
            assert_eq!(of(false, None, Tcp), by_shm, "{ranks:?}");
            assert_eq!(of(true, None, Tcp), by_network, "{ranks:?}");
            let rdma = |kind| if kind == Tcp { Rdma } else { kind };
            let by_rdma = (rdma(by_network.0), rdma(by_network.1));
            assert_eq!(of(true, None, Rdma), by_rdma, "{ranks:?}");
            assert_eq!(of(true, Some(Tcp), Tcp), (Tcp, Tcp), "{ranks:?}");
        }
    }
}
