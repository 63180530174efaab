//! Ranks of different hosts over TCP: one socket for each pair and channel, or several.
//!
//! Several sockets take messages in turn, for links that one stream does not fill. On a link that one
//! stream fills, more sockets cost time: bytes of a message interleave with those of the message before
//! it, which arrives later, and delays everything that waits for it.

#[cfg(feature = "internal")]
pub(super) mod fuzz;
mod networks;
mod pump;

use super::contract::{
    Caps, Connected, Ends, Peers, Pollable, Prepared, Setup, Transport, place_of_pair,
};
use super::inbox::InboxMemory;
use super::mesh::SocketId;
use super::{Header, RecvEnd, RecvInto, SendEnd, SendFrom};
use crate::bootstrap::auth::Listener;
use crate::bootstrap::peer_stream::PeerStream;
use crate::bootstrap::{HostAddress, PeerInfo, alternatives};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::mem::{Consumer, FifoPlaces, FifoShape, Producer, Region};
use crate::sys::log::{self, Level};
use crate::sys::pci::SysDirectory;
use crate::sys::socket::{self, Address, Interest};
use crate::topology::{InterfaceDistance, ProcessorFacts, interface_distances};
use crate::types::{Subsystem, TransportKind};
use crate::wire::Wire;
use networks::{AddressFacts, AddressOffer};
use pump::Pump;
use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Purpose of the sockets, in errors and in the key.
const PURPOSE: &str = "tcp";

/// The transport over TCP.
pub(super) struct Tcp;

/// Costs fitted to `benches/baselines/host-allreduce-vs-openmpi.jsonl`. Only proportions matter.
static CAPS: Caps = Caps {
    inbox: InboxMemory::None,
    moves_beside: true,
    may_decline: false,
    hop_seconds: 12e-6,
    message_seconds: 4e-6,
    byte_seconds: 0.4e-9,
};

impl Transport for Tcp {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn caps(&self) -> &'static Caps {
        &CAPS
    }

    fn obstruction(&self, _: &PeerInfo, _: &PeerInfo, _: &Config) -> Option<&'static str> {
        None
    }

    fn descriptors(&self, config: &Config) -> usize {
        config.channels * config.tcp_sockets
    }

    fn probe(&self, _: &Config) -> Result<&'static str> {
        let bound = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        bound.map_err(|error| Error::system("no socket listens on 127.0.0.1", error))?;
        Ok("")
    }

    fn prepare(&self, setup: &Setup<'_>) -> Result<Box<dyn Prepared>> {
        let (mut listener, bound) = Listener::bind(setup.peers()[setup.me()].address)?;
        let (addresses, distances) = interfaces(setup);
        let others = addresses.iter().filter(|one| one.ip != bound.ip());
        let bound = std::iter::once(bound).chain(others.filter_map(|one| listener.add(one.ip)));
        let bound: Vec<SocketAddr> = bound.collect();
        let facts = bound.into_iter();
        let facts = facts.map(|bound| AddressFacts::new(bound, &addresses, &distances));
        Ok(Box::new(TcpListener {
            offer: AddressOffer(facts.collect()),
            listener: Some(listener),
        }))
    }
}

/// Returns the addresses and interfaces of this host; none if the rank's place is unknown, so that no interface can be
/// nearer.
fn interfaces(setup: &Setup<'_>) -> (Vec<HostAddress>, Vec<InterfaceDistance>) {
    let context = setup.context;
    let processor = ProcessorFacts::read(Path::new("/proc/cpuinfo"));
    let distances = interface_distances(&SysDirectory::new(context.sys), processor, context.place);
    let found = distances.and_then(|distances| match distances.is_empty() {
        true => Ok((Vec::new(), distances)),
        false => Ok((alternatives(setup.config())?, distances)),
    });
    // Without interfaces ranks use the address that connected them with the rendezvous.
    found.unwrap_or_default()
}

/// The addresses at which this rank expects its peers.
struct TcpListener {
    offer: AddressOffer,
    listener: Option<Listener>,
}

impl Prepared for TcpListener {
    fn offer(&self) -> Vec<u8> {
        self.offer.to_bytes()
    }

    fn connect(&mut self, setup: &Setup<'_>, peers: &Peers<'_>) -> Result<Option<Connected>> {
        let config = setup.config();
        let listener = self.listener.take();
        let listener = listener.ok_or_else(|| Error::internal("TCP was not prepared"))?;
        let (mut addresses, mut nearer) = (Vec::new(), Vec::new());
        for &rank in peers.served {
            let offer: AddressOffer = peers.offer(setup, rank)?;
            let address = SocketAddr::new(setup.peers()[rank].address, offer.port());
            addresses.push((rank, Address::Tcp(address)));
            let turn = place_of_pair(setup.peers(), setup.me(), rank);
            if let Some(found) = offer.nearer(&self.offer, turn) {
                let address = SocketAddr::new(found.ip, found.port);
                nearer.push((rank, Address::Tcp(address)));
            }
        }
        log_nearer(&nearer);
        let counts = (config.channels, config.tcp_sockets);
        let mut mesh = setup.mesh(PURPOSE, listener, addresses, counts);
        mesh.nearer = nearer;
        // Leaves the buffer sizes of the sockets to the kernel, which adapts them to the path.
        let sockets = mesh.open()?;
        sockets
            .values()
            .try_for_each(|it| socket::keep_alive(it.socket()))?;
        connect_streams(setup, peers, sockets).map(Some)
    }
}

/// Logs the peers that are tried in a nearer network.
fn log_nearer(nearer: &[(usize, Address)]) {
    if nearer.is_empty() {
        return;
    }
    let each = nearer.iter();
    let each = each.map(|(rank, address)| format!("rank {rank} at {address}"));
    let each: Vec<String> = each.collect();
    log::line_of(
        Subsystem::Net,
        Level::Info,
        format_args!("TCP through nearer interfaces: {}", each.join(", ")),
    );
}

/// Creates the ends of all peers and channels over open stream sockets, which carry messages in turn.
///
/// # Errors
/// System if memory for the slots is short.
pub(super) fn connect_streams(
    setup: &Setup<'_>,
    peers: &Peers<'_>,
    mut sockets: HashMap<SocketId, PeerStream>,
) -> Result<Connected> {
    let config = setup.config();
    let (mut ends, mut pumps) = (Vec::new(), Pumps::default());
    for &peer in peers.served {
        let who = setup.peers()[peer].to_string();
        for channel in 0..config.channels {
            let own = (0..config.tcp_sockets).filter_map(|index| {
                sockets.remove(&SocketId {
                    peer,
                    channel,
                    index,
                })
            });
            let (send, recv, pump) = join(setup.shape, own.collect(), &who)?;
            pumps.pumps.push(pump);
            ends.push(Ends {
                peer,
                channel,
                send: Box::new(send),
                recv: Box::new(recv),
            });
        }
    }
    Ok(Connected {
        ends,
        pollable: Some(Box::new(pumps)),
        // Both sides have slots for both directions.
        bytes: 2 * setup.fifo_bytes() * peers.served.len(),
    })
}

/// The pumps of a rank.
#[derive(Debug, Default)]
struct Pumps {
    pumps: Vec<SharedPump>,
    /// For each pump, the index at which its part of the interests ends.
    parts: Vec<usize>,
}

impl Pollable for Pumps {
    fn is_polled(&self) -> bool {
        true
    }

    fn interests(&mut self, interests: &mut Vec<Interest>) -> Result<()> {
        let first = interests.len();
        self.parts.clear();
        for pump in &self.pumps {
            pump.lock().interests(interests)?;
            self.parts.push(interests.len() - first);
        }
        Ok(())
    }

    fn handle(&mut self, interests: &[Interest]) {
        let mut begin = 0;
        for (pump, &end) in self.pumps.iter().zip(&self.parts) {
            let part = &interests[begin..end];
            if part.iter().any(|interest| interest.revents != 0) {
                pump.progress();
            }
            begin = end;
        }
    }

    fn check_peers(&mut self) {
        self.pumps.iter().for_each(|pump| pump.lock().check_peer());
    }
}

/// The pump of a pair on one channel, which its two ends and the waiter share.
///
/// All three belong to one rank, so the lock is free unless a program polls ends from several threads.
/// Beside a system call a free lock costs nothing.
#[derive(Clone, Debug)]
struct SharedPump(Arc<Mutex<Pump>>);

impl SharedPump {
    fn lock(&self) -> MutexGuard<'_, Pump> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves data in both directions. A broken connection is reported by its ends: a peer that has left
    /// must not fail ranks that expect nothing from it.
    fn progress(&self) {
        let mut pump = self.lock();
        pump.send();
        pump.receive(true);
    }
}

/// Creates the ends of a pair on one channel, over sockets in the same order on both sides.
///
/// # Errors
/// System if there is no memory for the slots.
fn join(
    shape: FifoShape,
    sockets: Vec<PeerStream>,
    who: &str,
) -> Result<(TcpSend, TcpRecv, SharedPump)> {
    let out = Region::heap(FifoPlaces::bytes(&shape))?;
    let back = Region::heap(FifoPlaces::bytes(&shape))?;
    let (out, back) = (
        FifoPlaces::together(&out, 0),
        FifoPlaces::together(&back, 0),
    );
    // SAFETY: both regions are new, and each gets one producer and one consumer.
    let (producer, outgoing, incoming, consumer) = unsafe {
        (
            Producer::new(shape, out.clone()),
            Consumer::new(shape, out),
            Producer::new(shape, back.clone()),
            Consumer::new(shape, back),
        )
    };
    let pump = Pump::new(
        who,
        sockets,
        shape.slot_bytes,
        shape.depth,
        outgoing,
        incoming,
    );
    let pump = SharedPump(Arc::new(Mutex::new(pump)));
    let send = TcpSend {
        producer,
        pump: pump.clone(),
    };
    let recv = TcpRecv {
        consumer,
        pump: pump.clone(),
    };
    Ok((send, recv, pump))
}

/// Sending end of a TCP connection: a FIFO whose pump writes the slots to the sockets.
#[derive(Debug)]
struct TcpSend {
    producer: Producer,
    pump: SharedPump,
}

impl SendEnd for TcpSend {
    fn ready(&mut self) -> Result<bool> {
        let mut pump = self.pump.lock();
        pump.broken()?;
        if pump.is_lent() {
            return Ok(false);
        }
        if self.producer.ready()? {
            return Ok(true);
        }
        pump.send();
        pump.broken()?;
        self.producer.ready()
    }

    fn slot(&mut self) -> &mut [u8] {
        self.producer.slot(0)
    }

    fn written(&self) -> &[u8] {
        self.producer.written()
    }

    fn publish(&mut self, header: Header) {
        self.producer.publish(header);
        self.pump.lock().send();
    }

    fn zero_copy(&mut self) -> Option<&mut dyn SendFrom> {
        Some(self)
    }

    fn flushed(&mut self) -> Result<bool> {
        let mut pump = self.pump.lock();
        pump.send();
        if pump.drained()? {
            return Ok(true);
        }
        pump.broken().map(|()| false)
    }
}

impl SendFrom for TcpSend {
    fn send_from(&mut self, header: Header, payload: &[u8]) -> Result<bool> {
        let mut pump = self.pump.lock();
        pump.send();
        pump.broken()?;
        // A zero-copy message takes the number of a slot, but its payload bypasses the slot.
        if !self.producer.ready()?
            || !pump.send_from(self.producer.published(), &header, payload)?
        {
            return Ok(false);
        }
        self.producer.publish(header);
        pump.settle()?;
        Ok(true)
    }
}

/// Receiving end of a TCP connection: a FIFO whose pump fills the slots from the sockets.
#[derive(Debug)]
struct TcpRecv {
    consumer: Consumer,
    pump: SharedPump,
}

impl RecvEnd for TcpRecv {
    fn ready(&mut self) -> Result<bool> {
        if self.consumer.ready()? {
            return Ok(true);
        }
        let mut pump = self.pump.lock();
        pump.receive(false);
        if self.consumer.ready()? {
            return Ok(true);
        }
        if pump.ended() {
            pump.broken()?;
        }
        Ok(false)
    }

    fn header(&self) -> Header {
        self.consumer.header()
    }

    fn payload(&self) -> &[u8] {
        self.consumer.payload()
    }

    fn release(&mut self) {
        self.consumer.release();
    }

    fn zero_copy(&mut self) -> Option<&mut dyn RecvInto> {
        Some(self)
    }
}

impl RecvInto for TcpRecv {
    fn expect(&mut self) -> Result<Option<Header>> {
        if self.consumer.ready()? {
            return Ok(Some(self.consumer.header()));
        }
        self.pump.lock().expect()
    }

    fn recv_into(&mut self, place: &mut [u8]) -> Result<bool> {
        // The message may have arrived in its slot before the first call.
        if self.consumer.ready()? {
            place.copy_from_slice(self.consumer.payload());
            self.consumer.release();
            return Ok(true);
        }
        if !self.pump.lock().recv_into(place)? {
            return Ok(false);
        }
        // A zero-copy message takes the number of a slot, but its payload bypasses the slot.
        let published = self.consumer.ready()?;
        debug_assert!(published, "the pump has published it");
        self.consumer.release();
        Ok(true)
    }
}
