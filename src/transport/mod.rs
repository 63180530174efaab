//! Connections that carry slots between two ranks: one folder per transport, one table of transports,
//! one conformance suite.
//!
//! A connection has one direction, between two ranks, on one channel. It is a FIFO of slots: the sender
//! fills a slot and publishes it, the receiver reads the slot and releases it. Ends never block; the
//! engine waits through [`Waiter::idle`].
//!
//! Sockets copy payloads in any case, so such a transport can copy from and to the caller's memory
//! instead of a slot: see [`SendFrom`] and [`RecvInto`]. The receiver cannot see which path a message took.
//!
//! A new transport is a folder that implements `Transport`, a line in `TRANSPORTS`, and a line in the table
//! of [`TransportKind`]. Code elsewhere reads [`Caps`] and never matches on a kind.

pub(crate) mod connect;
mod contract;
mod emulated;
mod ends;
mod frame;
#[cfg(feature = "internal")]
pub mod fuzz;
mod host_load;
mod inbox;
mod loopback;
pub(crate) mod mesh;
mod rdma;
mod settings;
mod shared_host;
pub(crate) mod shm;
mod tcp;
mod waiter;

#[cfg(all(test, not(loom)))]
pub(crate) mod conformance;

pub use crate::mem::Header;
pub use connect::connect_all;
pub use contract::Caps;
pub use ends::{RecvEnd, RecvInto, SendEnd, SendFrom, Waiter};
pub use host_load::HostLoad;
pub use inbox::InboxMemory;
pub use settings::{SlowestLinks, slot_bytes, slowest_links};
pub use shared_host::merge_hosts;

use crate::bootstrap::OutOfBand;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::ibverbs;
use crate::topology::RankPlace;
use crate::types::TransportKind;
use contract::Transport;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The transports that carry host memory, in order of preference: a pair of ranks takes the first that
/// can connect the pair.
static TRANSPORTS: &[&dyn Transport] = &[&loopback::Loopback, &shm::Shm, &rdma::Rdma, &tcp::Tcp];

/// Returns the transports that carry host memory, in order of preference.
pub fn kinds() -> impl Iterator<Item = TransportKind> {
    TRANSPORTS.iter().map(|transport| transport.kind())
}

fn find(kind: TransportKind) -> Option<&'static dyn Transport> {
    let mut all = TRANSPORTS.iter();
    all.find(|transport| transport.kind() == kind).copied()
}

/// Returns the facts about a transport; `None` if the transport carries GPU memory.
pub fn caps(kind: TransportKind) -> Option<&'static Caps> {
    find(kind).map(Transport::caps)
}

/// Returns the number of descriptors that a connection to one peer takes.
pub fn descriptors_per_peer(kind: TransportKind, config: &Config) -> usize {
    find(kind).map_or(0, |transport| transport.descriptors(config))
}

/// Tries out a transport on this host. Returns a phrase about the resource in use, which may be empty;
/// `None` if the transport carries GPU memory.
///
/// # Errors
/// The reason for which this host cannot use the transport.
pub fn probe(kind: TransportKind, config: &Config) -> Option<Result<&'static str>> {
    find(kind).map(|transport| transport.probe(config))
}

/// Returns the transport with the slowest hop; the last in numeric order if several are as slow.
pub fn slowest(kinds: impl Iterator<Item = TransportKind>) -> Option<TransportKind> {
    let hops = kinds.map(|kind| (caps(kind).map_or(0.0, |caps| caps.hop_seconds), kind));
    let slowest = hops.max_by(|(one, kind), (other, second)| {
        one.total_cmp(other)
            .then((*kind as u8).cmp(&(*second as u8)))
    });
    slowest.map(|(_, kind)| kind)
}

/// All connections of one rank.
#[derive(Debug)]
pub struct Links {
    /// Number of ranks of the communicator.
    pub nranks: usize,
    /// Number of this rank in the communicator.
    pub rank: usize,
    /// Number of channels; each channel has its own connections.
    pub channels: usize,
    /// Payload bytes of a slot.
    pub slot_bytes: usize,
    /// Number of slots of a connection.
    pub slots: usize,
    /// Sending ends. The end to rank r on channel c has index c * nranks + r; this rank has `None`.
    pub sends: Vec<Option<Box<dyn SendEnd>>>,
    /// Receiving ends. The end from rank r on channel c has index c * nranks + r; this rank has `None`.
    pub recvs: Vec<Option<Box<dyn RecvEnd>>>,
    /// The transport to each rank; `None` for this rank.
    pub kinds: Vec<Option<TransportKind>>,
    /// Bytes of slot memory of this rank.
    pub buffer_bytes: usize,
    /// The load of the host with the most ranks for a core; [`HostLoad::LIGHT`] if no host has more ranks than cores.
    /// All ranks have the same value.
    pub load: HostLoad,
    /// Whether messages carry the CRC-32C of their payload.
    pub checks_data: bool,
    /// Waits for any of the connections.
    pub waiter: Box<dyn Waiter>,
}

/// Returns the error of a message from `peer` over `way` whose payload has another CRC-32C than its header.
pub fn damaged(peer: &dyn fmt::Display, way: &str, header: &Header, found: u32) -> Error {
    Error::new(
        ErrorKind::Remote,
        format!(
            "{} bytes from {peer} changed on their way over {way}: their CRC-32C is {found:08x}, and was {:08x}",
            header.bytes, header.crc
        ),
    )
}

/// Control plane, settings, fault and deadline with which a rank connects.
pub struct ConnectContext<'a> {
    /// The control plane; all ranks connect together.
    pub exchange: &'a dyn OutOfBand,
    /// The settings of this rank.
    pub config: &'a Config,
    /// The fault that ends waits when it is raised.
    pub fault: &'a Arc<Fault>,
    /// Deadline of the attempts to connect.
    pub deadline: std::time::Instant,
    /// The place of this rank, whose nearest network devices carry its data.
    pub place: RankPlace,
    /// Directory that describes devices as /sys does.
    pub sys: &'a Path,
    /// Replaces the system's libibverbs, which RDMA otherwise opens.
    pub verbs: Option<Arc<dyn ibverbs::Api>>,
}
