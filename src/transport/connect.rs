//! Connects a rank with all others.

use super::contract::{Ends, Peers, Pollable, Prepared, Setup};
use super::emulated::{self, Emulation};
use super::inbox::{Inbox, InboxLayout};
use super::settings::{self, ConnectInfo};
use super::waiter::RankWaiter;
use super::{ConnectContext, HostLoad, InboxMemory, Links, TRANSPORTS, Transport};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{FifoShape, Sleeper};
use crate::sync::{CAUSE_TIMEOUT, Fault};
use crate::sys::cgroup::group_memory;
use crate::sys::cpu;
use crate::sys::socket;
use crate::wire::Wire;

/// Connects this rank with all others. All ranks call it together.
///
/// Each pair uses the transport that the settings force, or the first of the table that connects the
/// pair: loopback within a process, shm within a host, rdma between hosts if every rank has an active
/// port, else tcp. Slots shrink until the buffers fit `buffer_bytes`.
///
/// # Errors
/// On all ranks: mismatch naming two ranks and both values if settings differ; invalid argument
/// if the buffers cannot fit; remote, naming a rank that could not prepare itself. On this rank:
/// timeout naming missing ranks; the fault's reason; system. After these the caller announces the
/// failure, so that the other ranks do not wait for the deadline.
pub fn connect_all(context: &ConnectContext<'_>) -> Result<Links> {
    connect(context, Pairs::All)
}

/// Connects this rank with the ranks of other hosts only. All ranks call it together.
///
/// # Errors
/// As for [`connect_all`].
pub(crate) fn connect_across_hosts(context: &ConnectContext<'_>) -> Result<Links> {
    connect(context, Pairs::AcrossHosts)
}

/// The pairs of ranks that are connected: all, or only pairs on different hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pairs {
    All,
    AcrossHosts,
}

fn connect(context: &ConnectContext<'_>, pairs: Pairs) -> Result<Links> {
    let (exchange, config) = (context.exchange, context.config);
    let peers = exchange.peers();
    let shape = settings::shape(config, peers.len());
    if peers.len() < 2 {
        return Ok(alone(shape?, config.channels));
    }

    let mut info = ConnectInfo {
        cores: cpu::allowed(),
        group: group_memory().unwrap_or_default(),
        ..ConnectInfo::default()
    };
    let prepared = shape.and_then(|shape| Preparation::new(context, pairs, shape));
    match &prepared {
        Ok(prepared) => {
            info.offers = prepared.offers();
            let inbox = prepared.setup.inbox.as_ref();
            info.inbox_bytes = inbox.map_or(0, |inbox| inbox.bytes() as u64);
        }
        // The other ranks receive the failure, so that they do not wait for this rank.
        Err(error) => info.trouble = error.to_string(),
    }
    let compared = settings::compare(&exchange.all_gather(&info.to_bytes())?, peers);
    let (mut prepared, infos) = match (prepared, compared) {
        (Err(own), Err(other)) if other.kind() == ErrorKind::Remote => return Err(own),
        // Settings that differ between ranks explain more than a failure that they led to.
        (_, Err(error)) | (Err(error), _) => return Err(error),
        (Ok(prepared), Ok(infos)) => (prepared, infos),
    };
    let links = prepared
        .connect(&infos)
        .map_err(|error| cause_of(error, context.fault))?;
    // Peers need this rank's offers and listeners until their own connections are complete.
    exchange.barrier()?;
    drop(prepared);
    Ok(links)
}

/// Returns the cause of a broken connection, if its report arrives in time, else `error`: a rank that gave up closes
/// its connections, perhaps before other ranks receive the report of the rank that died.
fn cause_of(error: Error, fault: &Fault) -> Error {
    match error.kind() {
        ErrorKind::Remote => fault.reason_within(CAUSE_TIMEOUT).unwrap_or(error),
        _ => error,
    }
}

/// State of a rank that has not received the others' offers.
struct Preparation<'a> {
    setup: Setup<'a>,
    /// For each rank, the transports that may connect it with this rank, best first.
    candidates: Vec<Vec<&'static dyn Transport>>,
    prepared: Vec<(&'static dyn Transport, Box<dyn Prepared>)>,
}

impl<'a> Preparation<'a> {
    fn new(
        context: &'a ConnectContext<'a>,
        pairs: Pairs,
        shape: FifoShape,
    ) -> Result<Preparation<'a>> {
        let (exchange, config) = (context.exchange, context.config);
        let (me, peers) = (exchange.rank(), exchange.peers());
        let mut candidates = settings::candidates(peers, me, config)?;
        for (candidates, peer) in candidates.iter_mut().zip(peers) {
            if pairs == Pairs::AcrossHosts && peer.host_id == peers[me].host_id {
                candidates.clear();
            }
        }
        check_descriptors(context, &candidates)?;
        let memory = candidates.iter().flatten();
        let memory = memory.map(|transport| transport.caps().inbox).max();
        let mut layout = InboxLayout {
            nranks: peers.len(),
            channels: config.channels,
            shape,
            tail_bytes: 0,
        };
        let emulation = Emulation::new(config, peers.len())?;
        if let Some(emulation) = &emulation {
            check_emulation(&candidates)?;
            layout.tail_bytes = emulation.inbox_bytes(&layout);
        }
        let setup = Setup {
            context,
            shape,
            inbox: Inbox::new(layout, memory.unwrap_or(InboxMemory::None))?,
            emulation,
        };
        let mut prepared = Vec::new();
        for &transport in TRANSPORTS {
            let mut used = candidates.iter().flatten();
            if used.any(|used| used.kind() == transport.kind()) {
                prepared.push((transport, transport.prepare(&setup)?));
            }
        }
        Ok(Preparation {
            setup,
            candidates,
            prepared,
        })
    }

    fn offers(&self) -> Vec<(u8, Vec<u8>)> {
        let prepared = self.prepared.iter();
        prepared
            .map(|(transport, prepared)| (transport.kind() as u8, prepared.offer()))
            .collect()
    }

    fn connect(&mut self, infos: &[ConnectInfo]) -> Result<Links> {
        let (me, peers) = (self.setup.me(), self.setup.peers());
        let (nranks, channels) = (peers.len(), self.setup.config().channels);
        let mut links = alone(self.setup.shape, channels);
        (links.nranks, links.rank) = (nranks, me);
        links.checks_data = self.setup.config().checks_data;
        links.sends.resize_with(channels * nranks, || None);
        links.recvs.resize_with(channels * nranks, || None);
        links.kinds.resize(nranks, None);

        let loads = HostLoad::of_hosts(peers, infos);
        links.load = loads.values().copied().fold(HostLoad::LIGHT, HostLoad::max);
        let crowded = loads[&peers[me].host_id].is_crowded();
        let mut pollables: Vec<Box<dyn Pollable>> = Vec::new();
        for (transport, prepared) in &mut self.prepared {
            let kind = transport.kind();
            let is_served = |candidates: &Vec<&dyn Transport>| {
                let first = candidates.first();
                first.is_some_and(|first| first.kind() == kind)
            };
            let ranks = 0..nranks;
            let served: Vec<usize> = ranks
                .filter(|&rank| is_served(&self.candidates[rank]))
                .collect();
            if served.is_empty() {
                continue;
            }
            let connected = prepared.connect(
                &self.setup,
                &Peers {
                    served: &served,
                    offers: infos.iter().map(|info| info.offer(kind)).collect(),
                    crowded,
                },
            )?;
            let Some(connected) = connected else {
                for rank in served {
                    self.candidates[rank].remove(0);
                }
                continue;
            };
            for rank in served {
                links.kinds[rank] = Some(kind);
            }
            for Ends {
                peer,
                channel,
                send,
                recv,
            } in connected.ends
            {
                links.sends[channel * nranks + peer] = Some(send);
                links.recvs[channel * nranks + peer] = Some(recv);
            }
            links.buffer_bytes += connected.bytes;
            pollables.extend(connected.pollable);
        }
        let inbox = self.setup.inbox.as_ref();
        let sleeper = inbox.map(|inbox| Sleeper::new(inbox.region().clone(), 0));
        links.waiter = Box::new(RankWaiter::new(sleeper, pollables, crowded));
        if let Some(emulation) = &self.setup.emulation {
            links.waiter = emulation.waiter(links.waiter);
        }
        Ok(links)
    }
}

/// Checks that one transport with inboxes connects this rank with all others, as emulated links require.
fn check_emulation(candidates: &[Vec<&'static dyn Transport>]) -> Result<()> {
    let firsts = candidates
        .iter()
        .filter_map(|candidates| candidates.first());
    let mut kinds: Vec<_> = firsts.clone().map(|transport| transport.kind()).collect();
    kinds.dedup();
    let shares = firsts.clone().all(|first| first.caps().shares_memory());
    match kinds.len() == 1 && firsts.count() + 1 == candidates.len() && shares {
        true => Ok(()),
        false => Err(emulated::unshared()),
    }
}

/// Compares the descriptors that this rank will hold with the limit of the process.
fn check_descriptors(
    context: &ConnectContext<'_>,
    candidates: &[Vec<&'static dyn Transport>],
) -> Result<()> {
    let each = candidates.iter().flatten();
    let sum: usize = each
        .map(|transport| transport.descriptors(context.config))
        .sum();
    let (need, limit) = (sum + 16, socket::descriptor_limit());
    if need > limit {
        return Err(Error::invalid_usage(format!(
            "connecting needs about {need} descriptors and the process may hold {limit}: raise \
             `ulimit -n`, or lower CINCH_CHANNELS (on GPUs CINCH_GPU_CHANNELS) or \
             CINCH_TCP_SOCKETS"
        )));
    }
    Ok(())
}

/// Returns the links of a rank without peers.
fn alone(shape: FifoShape, channels: usize) -> Links {
    Links {
        nranks: 1,
        rank: 0,
        channels,
        slot_bytes: shape.slot_bytes,
        slots: shape.depth,
        sends: (0..channels).map(|_| None).collect(),
        recvs: (0..channels).map(|_| None).collect(),
        kinds: vec![None],
        buffer_bytes: 0,
        load: HostLoad::LIGHT,
        checks_data: false,
        waiter: Box::new(RankWaiter::new(None, Vec::new(), false)),
    }
}
