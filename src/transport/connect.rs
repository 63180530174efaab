//! Connects a rank with all others.

use super::inbox::InboxLayout;
use super::mesh::{SocketId, SocketMesh};
use super::rdma::{self, Endpoint, Ports};
use super::settings::{self, ConnectInfo};
use super::waiter::RankWaiter;
use super::{ConnectContext, Links, loopback, shm, tcp};
use crate::bootstrap::PeerInfo;
use crate::bootstrap::auth::Listener;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{FifoShape, LINE_BYTES, Region, Sleeper};
use crate::sync::Backoff;
use crate::sys::cpu;
use crate::sys::ibverbs::{self, Api};
use crate::sys::log::{self, Level};
use crate::sys::socket::{self, Address};
use crate::types::{Subsystem, TransportKind};
use crate::wire::Wire;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// Connects this rank with all others. All ranks call it together.
///
/// Each pair uses the best transport that connects it: loopback within a process, shm within a
/// host, rdma between hosts if every rank has an active port, tcp otherwise; or the one that the
/// settings force. Slots shrink until the buffers fit
/// `buffer_bytes`.
///
/// # Errors
/// On all ranks: mismatch naming two ranks and both values if settings differ; invalid argument
/// if the buffers cannot fit; remote, naming a rank that could not prepare itself. On this rank:
/// timeout naming missing ranks; the fault's reason; system. After these the caller announces the
/// failure, so that the other ranks do not wait for the deadline.
pub fn connect_all(context: &ConnectContext<'_>) -> Result<Links> {
    connect(context, Pairs::All)
}

/// Connects this rank with those of other hosts, and with no other. All ranks call it together.
///
/// # Errors
/// As for [`connect_all`].
pub(crate) fn connect_across_hosts(context: &ConnectContext<'_>) -> Result<Links> {
    connect(context, Pairs::AcrossHosts)
}

/// Which pairs of ranks to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pairs {
    All,
    AcrossHosts,
}

fn connect(context: &ConnectContext<'_>, pairs: Pairs) -> Result<Links> {
    let (exchange, config) = (context.exchange, context.config);
    let (me, peers) = (exchange.rank(), exchange.peers());
    let shape = settings::shape(config, peers.len());
    if peers.len() < 2 {
        return Ok(alone(shape?, config.channels));
    }

    let mut info = ConnectInfo {
        cores: cpu::allowed(),
        ..ConnectInfo::default()
    };
    let prepared = shape.and_then(|shape| Prepared::new(context, pairs, shape, &mut info));
    if let Err(error) = &prepared {
        // Told to the others instead of leaving them to wait.
        info.trouble = error.to_string();
    }
    let blobs = exchange.all_gather(&info.to_bytes())?;
    let compared = settings::compare(&blobs, peers);
    // Settings that differ explain more than what they led to here.
    let (mut prepared, infos) = match (prepared, compared) {
        (Err(own), Err(other)) if other.kind() == crate::error::ErrorKind::Remote => {
            return Err(own);
        }
        (_, Err(error)) | (Err(error), _) => return Err(error),
        (Ok(prepared), Ok(infos)) => (prepared, infos),
    };
    let links = prepared.connect(context, &infos)?;
    // Only now: offers and listeners have served every rank.
    exchange.barrier()?;
    drop(prepared);
    debug_assert_eq!(links.rank, me);
    Ok(links)
}

/// What a rank holds ready before it knows the others' addresses.
struct Prepared {
    kinds: Vec<Option<TransportKind>>,
    layout: InboxLayout,
    region: Option<Arc<Region>>,
    offer: Option<loopback::Offer>,
    local: Option<(Listener, OwnedFd)>,
    tcp: Option<Listener>,
    /// What RDMA would go through.
    ports: Option<Ports>,
}

impl Prepared {
    fn new(
        context: &ConnectContext<'_>,
        pairs: Pairs,
        shape: FifoShape,
        info: &mut ConnectInfo,
    ) -> Result<Prepared> {
        let (exchange, config) = (context.exchange, context.config);
        let (me, peers) = (exchange.rank(), exchange.peers());
        let mut kinds = settings::kinds(peers, me, config.transport, config.shm_disable)?;
        if pairs == Pairs::AcrossHosts {
            for (kind, peer) in kinds.iter_mut().zip(peers) {
                kind.take_if(|_| peer.host_id == peers[me].host_id);
            }
        }
        let layout = InboxLayout {
            nranks: peers.len(),
            channels: config.channels,
            shape,
        };
        let mut prepared = Prepared {
            layout,
            region: None,
            offer: None,
            local: None,
            tcp: None,
            ports: None,
            kinds,
        };
        prepared.check_descriptors(config.channels * config.tcp_sockets)?;
        if prepared.has(TransportKind::Shm) {
            let (region, memory) = Region::shareable(layout.bytes())?;
            getrandom::fill(&mut info.local)
                .map_err(|error| Error::internal(format!("no random numbers: {error}")))?;
            let listener = Listener::bind_local(info.local)?;
            prepared.region = Some(region);
            prepared.local = Some((listener, memory));
        } else if prepared.has(TransportKind::Loopback) {
            prepared.region = Some(Region::heap(layout.bytes())?);
        }
        if prepared.has(TransportKind::Loopback) {
            prepared.offer = prepared.region.clone().map(loopback::Offer::new);
            info.offer = prepared.offer.as_ref().map_or(0, |offer| offer.number);
        }
        if prepared.has(TransportKind::Tcp) {
            let (listener, bound) = Listener::bind(peers[me].address)?;
            prepared.tcp = Some(listener);
            info.port = bound.port();
        }
        let forced = prepared.has(TransportKind::Rdma);
        if forced || prepared.has(TransportKind::Tcp) && config.transport.is_none() {
            match find_ports(context.verbs.clone(), config, forced) {
                Ok(ports) => {
                    (info.rdma, info.rdma_note) = (ports.kinds(), ports.names());
                    prepared.ports = Some(ports);
                }
                Err(error) if forced => return Err(error),
                Err(error) => info.rdma_note = error.message().into(),
            }
        }
        Ok(prepared)
    }

    /// Connects hosts by RDMA where that is asked for, or where nothing is and every rank can.
    /// What was chosen, and why, is one line of the log.
    fn rdma(
        &mut self,
        context: &ConnectContext<'_>,
        infos: &[ConnectInfo],
    ) -> Result<Option<(Arc<Endpoint>, Vec<rdma::connect::Ends>)>> {
        let (exchange, config) = (context.exchange, context.config);
        let (me, peers) = (exchange.rank(), exchange.peers());
        let forced = self.has(TransportKind::Rdma);
        if !forced && (config.transport.is_some() || !self.has(TransportKind::Tcp)) {
            return Ok(None);
        }
        let kind = match settings::rdma_kind(infos, peers) {
            Ok(kind) => kind,
            Err(why) if forced => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("CINCH_TRANSPORT=rdma cannot connect the ranks: {why}"),
                ));
            }
            Err(why) => {
                chosen(format_args!(
                    "TCP between hosts, because RDMA has no way: {why}"
                ));
                return Ok(None);
            }
        };
        let plan = rdma::connect::Plan {
            me,
            peers,
            served: self.served(if forced {
                TransportKind::Rdma
            } else {
                TransportKind::Tcp
            }),
            channels: self.layout.channels,
            shape: self.layout.shape,
            config,
            kind,
        };
        let ports = self.ports.as_ref().map(|ports| ports.with(kind));
        let ports = ports.ok_or_else(|| Error::internal("no ports were looked for"))?;
        let prepared = rdma::connect::Prepared::new(plan, &ports);
        let offer = prepared.as_ref().map(rdma::connect::Prepared::offer);
        let offers = exchange.gather_results("use RDMA", &offer.map_err(Error::clone))?;
        let offers: Vec<Vec<u8>> = match offers.into_iter().collect() {
            Ok(offers) => offers,
            Err(why) => return fall_back(forced, prepared.err(), why).map(|()| None),
        };
        // Whether an active port reaches another one, the system finds out only here, if it has no
        // route, or when a packet has to arrive.
        let mut connected = prepared?.connect(&offers);
        for is_proven in [false, true] {
            if let (true, Ok((endpoint, _))) = (is_proven, &connected) {
                // Time is left to go on without.
                let left = context.deadline.saturating_duration_since(Instant::now());
                let proven = endpoint.prove(context.fault, Instant::now() + left / 2);
                connected = proven.and(connected);
            }
            let outcome = connected.as_ref().map(|_| ()).map_err(Error::clone);
            let outcomes = exchange.gather_results("reach others by RDMA", &outcome)?;
            if let Some(why) = outcomes.into_iter().find_map(Result::err) {
                return fall_back(forced, connected.err(), why).map(|()| None);
            }
        }
        let connected = connected?;
        let why = match forced {
            true => "CINCH_TRANSPORT=rdma asks for it",
            false => "every rank has an active port",
        };
        let names = ports.names();
        chosen(format_args!(
            "RDMA between hosts ({kind}, ports {names}), because {why}"
        ));
        for kind in &mut self.kinds {
            if *kind == Some(TransportKind::Tcp) {
                *kind = Some(TransportKind::Rdma);
            }
        }
        self.tcp = None;
        Ok(Some(connected))
    }

    fn connect(&mut self, context: &ConnectContext<'_>, infos: &[ConnectInfo]) -> Result<Links> {
        let (exchange, config) = (context.exchange, context.config);
        let (me, peers) = (exchange.rank(), exchange.peers());
        let (nranks, channels) = (peers.len(), self.layout.channels);
        let mut links = alone(self.layout.shape, channels);
        (links.nranks, links.rank) = (nranks, me);
        links.sends.resize_with(channels * nranks, || None);
        links.recvs.resize_with(channels * nranks, || None);

        let shares_cores = |peer: &PeerInfo| {
            let (ranks, cores) = settings::crowd(peers, infos, peer.host_id);
            ranks > cores
        };
        links.oversubscribed = peers.iter().any(shares_cores);
        let crowded = shares_cores(&peers[me]);

        let mut regions: Vec<(usize, Arc<Region>)> = Vec::new();
        for rank in self.served(TransportKind::Loopback) {
            let region = loopback::take(infos[rank].offer, self.layout.bytes())
                .map_err(|error| error.context(&peers[rank]))?;
            regions.push((rank, region));
        }
        if let Some((listener, memory)) = self.local.take() {
            let served = self.served(TransportKind::Shm).into_iter();
            let addresses = served.map(|rank| (rank, Address::Local(infos[rank].local)));
            let mesh = SocketMesh {
                purpose: shm::PURPOSE,
                key: exchange.key(shm::PURPOSE),
                me,
                peers,
                listener,
                addresses: addresses.collect(),
                channels: 1,
                sockets: 1,
                fault: context.fault,
                deadline: context.deadline,
            };
            regions.extend(shm::exchange(mesh, memory, self.layout.bytes())?);
        }
        if let Some(own) = &self.region {
            for (rank, region) in &regions {
                let who = peers[*rank].to_string();
                for channel in 0..channels {
                    let (here, there) = ((me, own), (*rank, region));
                    // SAFETY: each rank and channel comes up once here, on each of two ranks.
                    let (send, recv) =
                        unsafe { self.layout.join(here, there, channel, &who, crowded) };
                    links.sends[channel * nranks + rank] = Some(Box::new(send));
                    links.recvs[channel * nranks + rank] = Some(Box::new(recv));
                }
            }
        }

        let mut verbs = None;
        if let Some((endpoint, ends)) = self.rdma(context, infos)? {
            for end in ends {
                let index = end.channel * nranks + end.peer;
                links.sends[index] = Some(Box::new(end.send));
                links.recvs[index] = Some(Box::new(end.recv));
            }
            verbs = Some(endpoint);
        }

        let mut pumps = Vec::new();
        if let Some(listener) = self.tcp.take() {
            let served = self.served(TransportKind::Tcp);
            let addresses = served.iter().map(|&rank| {
                let address = SocketAddr::new(peers[rank].address, infos[rank].port);
                (rank, Address::Tcp(address))
            });
            let mut sockets = tcp::open(SocketMesh {
                purpose: tcp::PURPOSE,
                key: exchange.key(tcp::PURPOSE),
                me,
                peers,
                listener,
                addresses: addresses.collect(),
                channels,
                sockets: config.tcp_sockets,
                fault: context.fault,
                deadline: context.deadline,
            })?;
            for rank in served {
                let who = peers[rank].to_string();
                for channel in 0..channels {
                    let own = (0..config.tcp_sockets).filter_map(|index| {
                        sockets.remove(&SocketId {
                            peer: rank,
                            channel,
                            index,
                        })
                    });
                    let (send, recv, pump) = tcp::join(self.layout.shape, own.collect(), &who)?;
                    links.sends[channel * nranks + rank] = Some(Box::new(send));
                    links.recvs[channel * nranks + rank] = Some(Box::new(recv));
                    pumps.push(pump);
                }
            }
        }

        let mut backoff = Backoff::new(crowded);
        if !pumps.is_empty() {
            backoff = backoff.with_system_calls();
        }
        let fifo = config.slots * (self.layout.shape.slot_bytes + LINE_BYTES) * channels;
        // A pair of hosts has slots on both sides for both directions.
        let far = self.served(TransportKind::Tcp).len() + self.served(TransportKind::Rdma).len();
        links.buffer_bytes = fifo * (regions.len() + 2 * far);
        let sleeper = self.region.take().map(|region| Sleeper::new(region, 0));
        links.waiter = Box::new(RankWaiter::new(sleeper, pumps, verbs, backoff));
        links.kinds = std::mem::take(&mut self.kinds);
        Ok(links)
    }

    fn has(&self, kind: TransportKind) -> bool {
        self.kinds.contains(&Some(kind))
    }

    fn served(&self, kind: TransportKind) -> Vec<usize> {
        (0..self.kinds.len())
            .filter(|&rank| self.kinds[rank] == Some(kind))
            .collect()
    }

    /// Descriptors that this rank will hold at once, against the limit of the process.
    fn check_descriptors(&self, sockets: usize) -> Result<()> {
        let need = self.served(TransportKind::Shm).len()
            + self.served(TransportKind::Tcp).len() * sockets
            + 16;
        let limit = socket::descriptor_limit();
        if need > limit {
            return Err(Error::invalid_usage(format!(
                "connecting needs about {need} descriptors and the process may hold {limit}: raise \
                 `ulimit -n`, or lower CINCH_CHANNELS (on GPUs CINCH_GPU_CHANNELS) or \
                 CINCH_TCP_SOCKETS"
            )));
        }
        Ok(())
    }
}

/// The ports that RDMA may go through.
pub(super) fn find_ports(
    verbs: Option<Arc<dyn Api>>,
    config: &Config,
    forced: bool,
) -> Result<Ports> {
    if config.ib_disable && !forced {
        return Err(Error::invalid_usage("CINCH_IB_DISABLE=1"));
    }
    let api = match verbs {
        Some(api) => api,
        None => Arc::new(ibverbs::Loaded::open(ibverbs::Loaded::LIBRARY)?),
    };
    Ports::find(&api, config)
}

/// Falls back to TCP on all ranks together, unless RDMA is forced.
fn fall_back(forced: bool, own: Option<Error>, why: Error) -> Result<()> {
    if forced {
        return Err(own.unwrap_or(why));
    }
    log::line_of(
        Subsystem::Net,
        Level::Warn,
        format_args!("TCP between hosts, because {}", why.message()),
    );
    Ok(())
}

fn chosen(text: std::fmt::Arguments<'_>) {
    log::line_of(Subsystem::Net, Level::Info, text);
}

/// The links of a rank without peers.
fn alone(shape: FifoShape, channels: usize) -> Links {
    let backoff = Backoff::new(false);
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
        oversubscribed: false,
        waiter: Box::new(RankWaiter::new(None, Vec::new(), None, backoff)),
    }
}
