//! Joining and splitting.

use super::{CommInfo, Communicator};
use crate::bootstrap::{self, ExchangeRef, Star, UniqueId};
use crate::config::{Config, launcher_environment};
use crate::engine::HostEngine;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::Machine;
use crate::simd::Isa;
use crate::sync::Fault;
use crate::transport::{self, ConnectContext};
use crate::types::TransportKind;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
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
    let exchange = Star::join(id, rank, nranks, &config, fault.clone())?;
    connect(exchange, fault, config)
}

pub(super) fn by_environment(config: Config) -> Result<Communicator> {
    let launch = bootstrap::discover(launcher_environment)?.ok_or_else(|| {
        Error::invalid_usage(
            "no launcher's variables are set; start ranks with `cinch run`, torchrun, mpirun or \
             srun, or give each rank its id with Communicator::init",
        )
    })?;
    let id = launch.unique_id(&config)?;
    by_id(&id, launch.rank, launch.nranks, config, Fault::new())
}

pub(super) fn connect(
    exchange: ExchangeRef,
    fault: Arc<Fault>,
    config: Config,
) -> Result<Communicator> {
    let isa = Isa::from_setting(&config.simd)?;
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let tables = agree(&exchange, &config, cores)?;
    let links = transport::connect_all(&ConnectContext {
        exchange: &*exchange,
        config: &config,
        fault: &fault,
        deadline: Instant::now() + config.init_timeout,
    })
    .inspect_err(|error| exchange.announce(error))?;
    let machine = machine(&exchange, &tables, &config);
    let info = CommInfo {
        transports: links.kinds.clone(),
        channels: links.channels,
        slot_bytes: links.slot_bytes,
        slots: links.slots,
        buffer_bytes: links.buffer_bytes,
    };
    let engine = HostEngine::new(
        links,
        exchange.clone(),
        fault.clone(),
        &config,
        isa,
        machine,
    )?;
    Ok(Communicator {
        exchange,
        fault,
        config,
        info,
        engine: Mutex::new(engine),
    })
}

/// What each rank says of itself before connecting.
struct Table {
    cores: usize,
}

/// Compares the settings that decide what runs, and learns how many cores each rank may use.
fn agree(exchange: &ExchangeRef, config: &Config, cores: usize) -> Result<Vec<Table>> {
    let mine = format!(
        "CINCH_CODEC={} CINCH_CODEC_MIN_BYTES={} CINCH_ALGO={}",
        config.codec,
        config.codec_min_bytes,
        config
            .algorithm
            .map_or("auto", |algorithm| algorithm.name()),
    );
    let texts = exchange.all_gather(format!("{cores}\n{mine}").as_bytes())?;
    let peers = exchange.peers();
    let mut first = None;
    texts
        .iter()
        .enumerate()
        .map(|(rank, bytes)| {
            let text = String::from_utf8_lossy(bytes);
            let (cores, settings) = text.split_once('\n').unwrap_or(("", ""));
            let settings = settings.to_string();
            match &first {
                None => first = Some(settings),
                Some(expected) if *expected == settings => {}
                Some(expected) => {
                    return Err(Error::new(
                        ErrorKind::Mismatch,
                        format!(
                            "settings that all ranks must share differ: {} has {expected}, {} has \
                             {settings}",
                            peers[0], peers[rank]
                        ),
                    ));
                }
            }
            Ok(Table {
                cores: cores.parse().unwrap_or(1),
            })
        })
        .collect()
}

/// The facts behind selection: the same on all ranks, from what all ranks said.
fn machine(exchange: &ExchangeRef, tables: &[Table], config: &Config) -> Machine {
    let peers = exchange.peers();
    let mut hosts: HashMap<[u8; 16], (usize, usize)> = HashMap::new();
    for (peer, table) in peers.iter().zip(tables) {
        let (ranks, cores) = hosts.entry(peer.host_id).or_insert((0, usize::MAX));
        *ranks += 1;
        *cores = table.cores.min(*cores);
    }
    let between = if hosts.len() > 1 {
        TransportKind::Tcp
    } else {
        TransportKind::Shm
    };
    Machine {
        transport: config.transport.unwrap_or(between),
        oversubscribed: hosts.values().any(|&(ranks, cores)| ranks > cores),
    }
}

pub(super) fn split(
    comm: &Communicator,
    color: Option<u32>,
    key: i64,
) -> Result<Option<Communicator>> {
    let mut said = [0u8; 13];
    if let Some(color) = color {
        said[0] = 1;
        said[1..5].copy_from_slice(&color.to_le_bytes());
        said[5..].copy_from_slice(&key.to_le_bytes());
    }
    let all = comm.exchange.all_gather(&said)?;
    let mut members: Vec<(i64, usize)> = Vec::new();
    for (rank, other) in all.iter().enumerate() {
        let other: &[u8; 13] = other.as_slice().try_into().map_err(|_| {
            Error::new(
                ErrorKind::Mismatch,
                format!(
                    "rank {} splits, {} does something else",
                    comm.rank(),
                    comm.peers()[rank]
                ),
            )
        })?;
        if color.is_some() && other[..5] == said[..5] {
            let mut key = [0; 8];
            key.copy_from_slice(&other[5..]);
            members.push((i64::from_le_bytes(key), rank));
        }
    }
    members.sort_unstable();
    let leads = members
        .first()
        .is_some_and(|&(_, rank)| rank == comm.rank());
    let id = if leads {
        Some(UniqueId::create(&comm.config)?)
    } else {
        None
    };
    let ids = comm
        .exchange
        .all_gather(id.as_ref().map_or(&[], |id| &id.as_bytes()[..]))?;
    let Some(&(_, leader)) = members.first() else {
        return Ok(None);
    };
    let id: &[u8; 128] = ids[leader]
        .as_slice()
        .try_into()
        .map_err(|_| Error::internal("the leader of a split sent no id"))?;
    let rank = members
        .iter()
        .position(|&(_, rank)| rank == comm.rank())
        .ok_or_else(|| Error::internal("a rank is missing from its own split"))?;
    let fault = comm.fault.child();
    by_id(
        &UniqueId::from_bytes(id)?,
        rank,
        members.len(),
        comm.config.clone(),
        fault,
    )
    .map(Some)
}
