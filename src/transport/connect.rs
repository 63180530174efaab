//! Connects a rank with all others.

use super::inbox::InboxLayout;
use super::mesh::{Link, Mesh};
use super::settings::{self, Card};
use super::waiter::RankWaiter;
use super::{ConnectContext, Links, loopback, shm, tcp};
use crate::bootstrap::PeerInfo;
use crate::error::{Error, Result};
use crate::mem::{FifoShape, LINE_BYTES, Region, Sleeper};
use crate::sync::Backoff;
use crate::sys::{cpu, socket};
use crate::types::TransportKind;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Connects this rank with all others. All ranks call it together.
///
/// Each pair uses the best transport that connects it: loopback within a process, shm within a
/// host, tcp otherwise; or the one that the settings force. Slots shrink until the buffers fit
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
pub(super) fn connect_across_hosts(context: &ConnectContext<'_>) -> Result<Links> {
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

    let names = settings::shared(config);
    let mut card = Card {
        settings: names.map(|(_, value)| value),
        cores: cpu::allowed(),
        ..Card::default()
    };
    let prepared = shape.and_then(|shape| Prepared::new(context, pairs, shape, &mut card));
    if let Err(error) = &prepared {
        // Told to the others instead of leaving them to wait.
        card.trouble = error.to_string();
    }
    let blobs = exchange.all_gather(&card.encode())?;
    let compared = settings::compare(&blobs, peers, &names);
    // Settings that differ explain more than what they led to here.
    let (mut prepared, cards) = match (prepared, compared) {
        (Err(own), Err(other)) if other.kind() == crate::error::ErrorKind::Remote => {
            return Err(own);
        }
        (_, Err(error)) | (Err(error), _) => return Err(error),
        (Ok(prepared), Ok(cards)) => (prepared, cards),
    };
    let links = prepared.connect(context, &cards)?;
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
    local: Option<(OwnedFd, OwnedFd)>,
    tcp: Option<OwnedFd>,
}

impl Prepared {
    fn new(
        context: &ConnectContext<'_>,
        pairs: Pairs,
        shape: FifoShape,
        card: &mut Card,
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
            kinds,
        };
        prepared.check_descriptors(config.channels * config.tcp_sockets)?;
        if prepared.has(TransportKind::Shm) {
            let (region, memory) = Region::shareable(layout.bytes())?;
            getrandom::fill(&mut card.local)
                .map_err(|error| Error::internal(format!("no random numbers: {error}")))?;
            let listener = socket::listen(&socket::Address::Local(card.local))?;
            prepared.region = Some(region);
            prepared.local = Some((listener, memory));
        } else if prepared.has(TransportKind::Loopback) {
            prepared.region = Some(Region::heap(layout.bytes())?);
        }
        if prepared.has(TransportKind::Loopback) {
            prepared.offer = prepared.region.clone().map(loopback::Offer::new);
            card.offer = prepared.offer.as_ref().map_or(0, |offer| offer.number);
        }
        if prepared.has(TransportKind::Tcp) {
            let (listener, port) = tcp::connect::listen(peers[me].address)?;
            prepared.tcp = Some(listener);
            card.port = port;
        }
        Ok(prepared)
    }

    fn connect(&mut self, context: &ConnectContext<'_>, cards: &[Card]) -> Result<Links> {
        let (exchange, config) = (context.exchange, context.config);
        let (me, peers) = (exchange.rank(), exchange.peers());
        let (nranks, channels) = (peers.len(), self.layout.channels);
        let mut links = alone(self.layout.shape, channels);
        (links.nranks, links.rank) = (nranks, me);
        links.sends.resize_with(channels * nranks, || None);
        links.recvs.resize_with(channels * nranks, || None);

        let shares_cores = |peer: &PeerInfo| {
            let (ranks, cores) = settings::crowd(peers, cards, peer.host_id);
            ranks > cores
        };
        links.oversubscribed = peers.iter().any(shares_cores);
        let crowded = shares_cores(&peers[me]);

        let mut regions: Vec<(usize, Arc<Region>)> = Vec::new();
        for rank in self.served(TransportKind::Loopback) {
            let region = loopback::take(cards[rank].offer, self.layout.bytes())
                .map_err(|error| error.context(&peers[rank]))?;
            regions.push((rank, region));
        }
        if let Some((listener, memory)) = self.local.take() {
            let (accepts, connects) = self.local_links(me, cards);
            let mesh = Mesh {
                purpose: shm::PURPOSE,
                key: exchange.key(shm::PURPOSE),
                me,
                peers,
                listener,
                local: true,
                accepts,
                connects,
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

        let mut pumps = Vec::new();
        if let Some(listener) = self.tcp.take() {
            let served = self.served(TransportKind::Tcp);
            let mut sockets = tcp::connect::connect(tcp::connect::Plan {
                me,
                peers,
                ports: served
                    .iter()
                    .map(|&rank| (rank, cards[rank].port))
                    .collect(),
                channels,
                sockets: config.tcp_sockets,
                listener,
                key: exchange.key(tcp::connect::PURPOSE),
                fault: context.fault,
                deadline: context.deadline,
            })?;
            for rank in served {
                let who = peers[rank].to_string();
                for channel in 0..channels {
                    let own = (0..config.tcp_sockets).filter_map(|socket| {
                        sockets.remove(&Link {
                            peer: rank,
                            channel,
                            socket,
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
        // A pair over TCP has slots on both sides for both directions.
        links.buffer_bytes = fifo * (regions.len() + 2 * self.served(TransportKind::Tcp).len());
        let sleeper = self.region.take().map(|region| Sleeper::new(region, 0));
        links.waiter = Box::new(RankWaiter::new(sleeper, pumps, backoff));
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

    fn local_links(&self, me: usize, cards: &[Card]) -> (Vec<Link>, Vec<(Link, socket::Address)>) {
        let link = |peer| Link {
            peer,
            channel: 0,
            socket: 0,
        };
        // The higher rank connects.
        let (lower, higher): (Vec<_>, Vec<_>) = self
            .served(TransportKind::Shm)
            .into_iter()
            .partition(|&rank| rank < me);
        let connects = lower
            .into_iter()
            .map(|rank| (link(rank), socket::Address::Local(cards[rank].local)));
        (higher.into_iter().map(link).collect(), connects.collect())
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
        waiter: Box::new(RankWaiter::new(None, Vec::new(), backoff)),
    }
}
