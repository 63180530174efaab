//! Joining and splitting.

use super::sample::Sampler;
use super::stats::CommCounters;
use super::{CommInfo, Communicator, DeviceState, costs, gpu};
use crate::bootstrap::{
    self, ControlPlane, OutOfBand, OutOfBandRef, PeerInfo, ShrinkRendezvous, UniqueId,
};
use crate::config::{CodecPolicy, Config, TuningChoice, launcher_environment};
use crate::cpu::{FloatEnvironment, Isa};
use crate::engine::HostEngine;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::{Machine, Table};
use crate::schedule::Hosts;
use crate::sync::Fault;
use crate::sys::fork::{ForkOwned, ProcessId};
use crate::sys::log::{self, Level};
use crate::transport::{self, ConnectContext};
use crate::types::{DeviceChoice, Subsystem, TransportKind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

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
    start_log(&config);
    let exchange = ControlPlane::join(id, rank, nranks, &config, fault.clone())?;
    connect(exchange, fault, config)
}

/// Opens the log, and says which settings are misspelt: once a process. Who comes meanwhile does not
/// wait for that: a child of a fork has no thread that would end it.
fn start_log(config: &Config) {
    let decided = log::configure(&log::Settings {
        level: &config.log_level,
        subsystems: config.log_subsystems,
        file: config.log_file.as_deref(),
        host: &bootstrap::host_name(),
        as_nccl: config.as_nccl,
    });
    if !decided {
        return;
    }
    // As NCCL does: with nothing asked for, nothing is said.
    if config.as_nccl && config.says("CINCH_LOG") {
        let version = crate::VERSION;
        log::line(
            Level::Version,
            format_args!("cinch {version} answers in NCCL's place"),
        );
    }
    // All ranks of `cinch run` have one environment.
    let told = launcher_environment("CINCH_LAUNCH_RANK").is_some_and(|rank| rank != "0");
    for name in Config::unknown_names().into_iter().filter(|_| !told) {
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

/// One line about a communicator: what carries it, and how.
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

pub(super) fn by_environment(config: Config) -> Result<Communicator> {
    let launch = bootstrap::discover(&config, launcher_environment)?.ok_or_else(|| {
        let found = match bootstrap::half_set(launcher_environment) {
            Some((set, unset)) => format!("{set} is set and {unset} is not"),
            None => "no launcher's variables are set".into(),
        };
        Error::invalid_usage(format!(
            "{found}; start ranks with `cinch run`, torchrun, mpirun or srun, or hand each rank its \
             number and one unique id"
        ))
    })?;
    let id = launch.unique_id(&config)?;
    by_id(&id, launch.rank, launch.nranks, config, Fault::new())
}

pub(super) fn connect(
    exchange: OutOfBandRef,
    fault: Arc<Fault>,
    config: Config,
) -> Result<Communicator> {
    // Costs that differ by a rounding may select otherwise.
    let _environment = FloatEnvironment::standard();
    // What this rank alone finds wrong, the others must hear: they wait for it in what follows.
    let (isa, table) = Isa::from_setting(&config.simd)
        .and_then(|isa| Ok((isa, table(&config)?)))
        .inspect_err(|error| exchange.announce(error))?;
    let one_host = one_host(&exchange);
    let policy = CodecPolicy::new(&config, one_host);
    agree(&exchange, &config, &policy, table.as_deref())?;
    let (info, state) = if config.device == DeviceChoice::Host {
        let (info, engine) = on_host(&exchange, &fault, &config, &policy, isa)?;
        (
            info,
            DeviceState::Host(ForkOwned::new(Box::new(Mutex::new(engine)))),
        )
    } else {
        let (info, state) = gpu::connect(&exchange, &fault, &config, &policy, isa, table)?;
        (info, DeviceState::Gpu(ForkOwned::new(Box::new(state))))
    };
    let comm = Communicator {
        owner: ProcessId::this(),
        exchange,
        fault,
        announced: AtomicBool::new(false),
        config,
        policy,
        sampler: Sampler::default(),
        counters: CommCounters::default(),
        info,
        state,
        spare_buffers: Mutex::default(),
        shrink_rendezvous: OnceLock::new(),
    };
    if log::enabled(Level::Info) {
        log_connected(&comm);
    }
    Ok(comm)
}

/// Connects this rank's memory with that of all others.
fn on_host(
    exchange: &OutOfBandRef,
    fault: &Arc<Fault>,
    config: &Config,
    policy: &CodecPolicy,
    isa: Isa,
) -> Result<(CommInfo, HostEngine)> {
    let links = transport::connect_all(&ConnectContext {
        exchange: &**exchange,
        config,
        fault,
        deadline: Instant::now() + config.init_timeout,
        verbs: None,
    })
    .inspect_err(|error| exchange.announce(error))?;
    let hosts = Hosts::new(exchange.peers().iter().map(|peer| peer.host_id));
    let machine = machine(exchange.peers(), config, &links.kinds, links.oversubscribed);
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
    // What is in effect, on which all ranks have agreed: settings by which they came to it may differ.
    if policy.codec.auto {
        costs::measure(exchange, policy.codec.spec, &mut engine, isa)
            .inspect_err(|error| exchange.announce(error))?;
    }
    Ok((info, engine))
}

/// The tuning table that was asked for.
fn table(config: &Config) -> Result<Option<Arc<Table>>> {
    let TuningChoice::File(path) = &config.tuning else {
        return Ok(None);
    };
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::invalid_argument(format!("CINCH_TUNING={name}: {error}")))?;
    let table = Table::parse(&name, &text).map_err(|error| error.context("CINCH_TUNING"))?;
    Ok(Some(Arc::new(table)))
}

/// Compares the settings that decide what runs.
fn agree(
    exchange: &OutOfBandRef,
    config: &Config,
    policy: &CodecPolicy,
    table: Option<&Table>,
) -> Result<()> {
    let mine = format!(
        "CINCH_DEVICE={} {} CINCH_FUSE_BYTES={} CINCH_ALGO={} CINCH_PROTO={} CINCH_KERNEL={} CINCH_TUNING={}",
        // Which GPU is each rank's own business.
        match config.device {
            DeviceChoice::Host => "host",
            DeviceChoice::Current | DeviceChoice::Cuda(_) => "cuda",
        },
        policy.shared(),
        config.fuse_bytes,
        config
            .algorithm
            .map_or("auto", |algorithm| algorithm.name()),
        config.protocol.map_or("auto", |protocol| protocol.name()),
        config.kernel.map_or("auto", |kernel| kernel.name()),
        // A file may lie elsewhere on every host; what it says counts.
        match (&config.tuning, table) {
            (_, Some(table)) => format!("table {}", table.fingerprint()),
            (TuningChoice::Off, None) => "off".into(),
            (_, None) => "auto".into(),
        },
    );
    let texts = exchange.all_gather(mine.as_bytes())?;
    let peers = exchange.peers();
    match texts.iter().position(|text| *text != texts[0]) {
        None => Ok(()),
        Some(rank) => Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "settings that all ranks must share differ: {} has {}, {} has {}",
                peers[0],
                String::from_utf8_lossy(&texts[0]),
                peers[rank],
                String::from_utf8_lossy(&texts[rank])
            ),
        )),
    }
}

/// The facts behind selection: the same on all ranks, from what all ranks said.
fn machine(
    peers: &[PeerInfo],
    config: &Config,
    kinds: &[Option<TransportKind>],
    oversubscribed: bool,
) -> Machine {
    // All ranks or none.
    let network = match kinds.contains(&Some(TransportKind::Rdma)) {
        true => TransportKind::Rdma,
        false => TransportKind::Tcp,
    };
    let any = |pair: fn(&PeerInfo, &PeerInfo) -> bool| {
        let mut ones = peers.iter();
        ones.any(|one| peers.iter().any(|other| pair(one, other)))
    };
    let apart = |one: &PeerInfo, other: &PeerInfo| {
        one.host_id == other.host_id && one.process_id != other.process_id
    };
    let inside = match config.shm_disable && any(apart) {
        true => network,
        false => TransportKind::Shm,
    };
    let between = match any(|one, other| one.host_id != other.host_id) {
        true => network,
        false => inside,
    };
    Machine {
        transport: config.transport.unwrap_or(between),
        inside: config.transport.unwrap_or(inside),
        oversubscribed,
        measured: None,
    }
}

/// Whether all ranks are on one host.
fn one_host(exchange: &OutOfBandRef) -> bool {
    let peers = exchange.peers();
    peers.iter().all(|peer| peer.host_id == peers[0].host_id)
}

pub(super) fn split(
    comm: &Communicator,
    color: Option<u32>,
    key: i64,
    config: Config,
    fault: Arc<Fault>,
) -> Result<Option<Communicator>> {
    split_over(&*comm.exchange, color, key, config, fault)
}

pub(super) fn split_again(
    comm: &Communicator,
    color: Option<u32>,
    key: i64,
    config: Config,
    fault: Arc<Fault>,
) -> Result<Option<Communicator>> {
    let (rank, nranks) = (comm.rank(), comm.nranks());
    let all: Vec<usize> = (0..nranks).collect();
    let id = shrink_rendezvous(comm)?.meeting(&all, &config)?;
    // What ends the new communicator ends this meeting of all ranks, not the other way around.
    let exchange = ControlPlane::join(&id, rank, nranks, &config, fault.child())
        .inspect_err(|error| cancel(&id, &comm.peers()[rank], error))?;
    let made = split_over(&*exchange, color, key, config, fault);
    match &made {
        Ok(_) => exchange.leave(),
        // A rank that fails leaves the others waiting for it.
        Err(error) => exchange.announce(error),
    }
    made
}

/// Splits among the ranks of `exchange`.
fn split_over(
    exchange: &dyn OutOfBand,
    color: Option<u32>,
    key: i64,
    config: Config,
    fault: Arc<Fault>,
) -> Result<Option<Communicator>> {
    let (own, peers) = (exchange.rank(), exchange.peers());
    let mut said = [0u8; 13];
    if let Some(color) = color {
        said[0] = 1;
        said[1..5].copy_from_slice(&color.to_le_bytes());
        said[5..].copy_from_slice(&key.to_le_bytes());
    }
    let all = exchange.all_gather(&said)?;
    let mut members: Vec<(i64, usize)> = Vec::new();
    for (rank, other) in all.iter().enumerate() {
        let other: &[u8; 13] = other.as_slice().try_into().map_err(|_| {
            Error::new(
                ErrorKind::Mismatch,
                format!("rank {own} splits, {} does something else", peers[rank]),
            )
        })?;
        if color.is_some() && other[..5] == said[..5] {
            let mut key = [0; 8];
            key.copy_from_slice(&other[5..]);
            members.push((i64::from_le_bytes(key), rank));
        }
    }
    members.sort_unstable();
    let leads = members.first().is_some_and(|&(_, rank)| rank == own);
    let opened = leads.then(|| UniqueId::create(&config));
    let said = opened.as_ref().map_or(Vec::new(), encode_split_id);
    let all = exchange.all_gather(&said).inspect_err(|error| {
        if let Some(Ok(id)) = &opened {
            cancel(id, &peers[own], error);
        }
    })?;
    let Some(&(_, leader)) = members.first() else {
        return Ok(None);
    };
    let id = decode_split_id(&all[leader], &peers[leader])?;
    let rank = members
        .iter()
        .position(|&(_, rank)| rank == own)
        .ok_or_else(|| Error::internal("a rank is missing from its own split"))?;
    by_id(&id, rank, members.len(), config, fault)
        .inspect_err(|error| cancel(&id, &peers[own], error))
        .map(Some)
}

/// Where `me`, in the process that opened the meeting of `id`, cannot be part of the communicator
/// that it is for: the others would wait there until their time is up, and hear why instead.
fn cancel(id: &UniqueId, me: &PeerInfo, error: &Error) {
    let who = format!("{me} cannot be part of the new communicator");
    id.cancel_because(&error.clone().context(who));
}

/// First byte of what the leader of a split says: an id follows.
const SPLIT_ID: u8 = 1;
/// The same: the reason follows why there is no id.
const SPLIT_ERROR: u8 = 2;

/// What the leader of a split says to its ranks. A reason comes instead of an id, so that nobody
/// waits for one.
fn encode_split_id(id: &Result<UniqueId>) -> Vec<u8> {
    match id {
        Ok(id) => [&[SPLIT_ID], id.as_bytes().as_slice()].concat(),
        Err(error) => [&[SPLIT_ERROR], error.to_string().as_bytes()].concat(),
    }
}

/// The id that `leader` said in an [`encode_split_id`].
fn decode_split_id(said: &[u8], leader: &PeerInfo) -> Result<UniqueId> {
    match said {
        [SPLIT_ID, id @ ..] => UniqueId::from_slice(id)
            .map_err(|error| error.context(format!("the split that {leader} leads"))),
        [SPLIT_ERROR, why @ ..] => Err(Error::new(
            ErrorKind::Remote,
            format!(
                "{leader} cannot lead a split: {}",
                String::from_utf8_lossy(why)
            ),
        )),
        _ => Err(Error::new(
            ErrorKind::Mismatch,
            format!("{leader} leads a split in another format: use one version"),
        )),
    }
}

pub(super) fn shrink(
    comm: &Communicator,
    exclude: &[usize],
    config: Config,
    fault: Arc<Fault>,
) -> Result<Communicator> {
    let (rank, nranks) = (comm.rank(), comm.nranks());
    for (at, &gone) in exclude.iter().enumerate() {
        let why = if gone >= nranks {
            "is not a rank of it"
        } else if gone == rank {
            "is the caller: ranks that are excluded do not call"
        } else if exclude[..at].contains(&gone) {
            "is there twice"
        } else {
            continue;
        };
        return Err(Error::invalid_argument(format!(
            "shrinking a communicator of {nranks} ranks by {exclude:?}: {gone} {why}"
        )));
    }
    let members: Vec<usize> = (0..nranks).filter(|rank| !exclude.contains(rank)).collect();
    let own = members.iter().take_while(|&&other| other < rank).count();
    let id = shrink_rendezvous(comm)?.meeting(&members, &config)?;
    by_id(&id, own, members.len(), config, fault)
        .inspect_err(|error| cancel(&id, &comm.peers()[rank], error))
}

/// Where the ranks of `comm` can meet again.
fn shrink_rendezvous(comm: &Communicator) -> Result<&ShrinkRendezvous> {
    comm.owner.check()?;
    comm.shrink_rendezvous.get().ok_or_else(|| {
        Error::invalid_usage(
            "the communicator was not prepared to shrink when all ranks were there",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_others_hear_of_settings_that_one_rank_cannot_follow() {
        let missing = TuningChoice::File("/no/such/table".into());
        let mut settings = vec![(String::new(), missing, "CINCH_TUNING=/no/such/table")];
        if Isa::detect() < Isa::Avx512 {
            settings.push(("avx512".into(), TuningChoice::Auto, "CINCH_SIMD=avx512"));
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
            assert!(connect(exchange, faults[1].clone(), config).is_err());
            let told = faults[0].reason().expect("rank 0 hears of it");
            assert!(told.message().contains(word), "{told}");
        }
    }

    /// Hosts and processes of ranks, and what is between them with and without shared memory.
    #[test]
    fn costs_are_those_of_what_carries() {
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
                let machine = machine(&peers, &config, &[None, Some(kind)], false);
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

    /// The leader cannot come to its own meeting. Rank 1 would wait for it for 20 s.
    #[test]
    fn the_others_hear_why_the_leader_of_a_split_does_not_come() {
        let faults = [Fault::new(), Fault::new()];
        let world = bootstrap::LocalOutOfBand::world(2, &faults);
        let config = || Config {
            init_timeout: std::time::Duration::from_secs(20),
            ..Config::default()
        };
        let fault = Fault::new();
        fault.raise(Error::new(ErrorKind::Aborted, "enough"));
        let made = std::thread::scope(|scope| {
            let other = scope.spawn(|| split_over(&*world[1], Some(0), 0, config(), Fault::new()));
            let leader = split_over(&*world[0], Some(0), 0, config(), fault);
            [leader, other.join().unwrap()].map(|made| made.unwrap_err())
        });
        assert_eq!(made[0].message(), "enough");
        assert_eq!(made[1].kind(), ErrorKind::Aborted, "{}", made[1]);
        let me = &world[0].peers()[0];
        let told = format!("{me} cannot be part of the new communicator: enough");
        assert_eq!(made[1].message(), told);
    }

    /// Also a reason that is as long as an id.
    #[test]
    fn ids_and_reasons_of_splits_are_told_apart() {
        let faults = [Fault::new(), Fault::new()];
        let world = bootstrap::LocalOutOfBand::world(2, &faults);
        let leader = &world[0].peers()[1];
        let id = UniqueId::create_for_one_host(&Config::default()).unwrap();
        let len = id.as_bytes().len();
        assert!(decode_split_id(&encode_split_id(&Ok(id)), leader).unwrap() == id);
        let name = Error::invalid_argument("").to_string().len();
        for length in [0, len - name - 1, len - name, len] {
            let why = Error::invalid_argument("x".repeat(length));
            let error = decode_split_id(&encode_split_id(&Err(why.clone())), leader).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Remote, "{length}: {error}");
            let said = format!("{leader} cannot lead a split: {why}");
            assert_eq!(error.message(), said);
        }
        for nonsense in [vec![], vec![3; len + 1]] {
            let error = decode_split_id(&nonsense, leader).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        }
    }
}
