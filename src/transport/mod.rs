//! What carries slots between two ranks. One folder a transport, one pair of traits, one
//! conformance suite.
//!
//! A connection is one-directional, between two ranks, on one channel: a FIFO of slots. The
//! sender fills a slot and publishes it; the receiver reads it and releases it. Nothing blocks:
//! waiting is the engine's business, through [`Waiter::idle`].
//!
//! A transport that copies payloads in any case, as sockets do, can do that from and to the memory
//! of the caller instead of a slot: see [`SendFrom`] and [`RecvInto`]. The message is the same: a
//! receiver cannot tell, and takes it either way.

pub(crate) mod connect;
mod frame;
mod inbox;
mod loopback;
pub(crate) mod mesh;
mod rdma;
mod settings;
pub(crate) mod shm;
mod tcp;
mod waiter;

#[cfg(all(test, not(loom)))]
pub(crate) mod conformance;

pub use crate::mem::Header;
pub use connect::connect_all;
pub use settings::slot_bytes;

use crate::bootstrap::OutOfBand;
use crate::config::Config;
use crate::error::Result;
use crate::sync::Fault;
use crate::sys::ibverbs;
use crate::types::TransportKind;
use std::sync::Arc;
use std::time::Duration;

/// The RDMA ports that `config` admits and that are up, by name.
///
/// # Errors
/// Why there is none: unsupported or invalid argument.
pub fn rdma_ports(config: &Config) -> Result<String> {
    connect::find_ports(None, config, true).map(|ports| ports.names())
}

/// The sender's end of a connection. There is one, and it is not shared.
pub trait SendEnd: Send + std::fmt::Debug {
    /// Whether a slot is free. Moves earlier messages along where that is this end's work.
    ///
    /// # Errors
    /// Remote, naming the peer, if the connection is broken.
    fn ready(&mut self) -> Result<bool>;

    /// Payload space of the free slot, after `ready` returned true. 64-byte aligned.
    fn slot(&mut self) -> &mut [u8];

    /// The same, for reading back what was written.
    fn written(&self) -> &[u8];

    /// Hands the slot to the receiver.
    fn publish(&mut self, header: Header);

    /// This end as one that sends from any memory, if the transport has such ends.
    fn zero_copy(&mut self) -> Option<&mut dyn SendFrom> {
        None
    }

    /// Whether all published messages have left this process: the buffers of a call may not be
    /// relied upon to move after it returns.
    ///
    /// # Errors
    /// As for `ready`.
    fn flushed(&mut self) -> Result<bool>;
}

/// The receiver's end of a connection. There is one, and it is not shared.
pub trait RecvEnd: Send + std::fmt::Debug {
    /// Whether a message is there.
    ///
    /// # Errors
    /// Remote, naming the peer, if the connection is broken and all that came is read; mismatch
    /// if the peer's header is impossible.
    fn ready(&mut self) -> Result<bool>;

    /// Header of the message, after `ready` returned true.
    fn header(&self) -> Header;

    /// Payload of the message: `header().bytes` bytes, never more than a slot. 64-byte aligned.
    /// The peer may be hostile: the contents may change while they are read.
    fn payload(&self) -> &[u8];

    /// Gives the slot back to the sender.
    fn release(&mut self);

    /// This end as one that receives into any memory, if the transport has such ends.
    fn zero_copy(&mut self) -> Option<&mut dyn RecvInto> {
        None
    }
}

/// Sends messages whose payload lies in no slot. It borrows the payload for no longer than a call
/// takes and keeps nothing of it, so whoever gives up in the middle owes nobody anything.
pub trait SendFrom {
    /// Sends as much of a message as can leave now; true when all of it has left this process.
    /// Until then the caller comes again with the same message, from the same memory, and uses
    /// the end for nothing else; [`SendEnd::ready`] says no meanwhile.
    ///
    /// # Errors
    /// As for [`SendEnd::ready`].
    fn send_from(&mut self, header: Header, payload: &[u8]) -> Result<bool>;
}

/// Receives messages into memory other than a slot. It borrows the place for no longer than a call
/// takes.
pub trait RecvInto {
    /// Header of the next message as soon as that is there, which may be before its payload. What
    /// comes behind that waits for [`RecvInto::recv_into`] or [`RecvEnd::ready`].
    ///
    /// # Errors
    /// As for [`RecvEnd::ready`].
    fn expect(&mut self) -> Result<Option<Header>>;

    /// Brings as much of the message of that header as is there to `place`, which has its length;
    /// true when all of it is there, which also releases it. Until then the caller comes again with
    /// the same place and uses the end for nothing else.
    ///
    /// # Errors
    /// Remote, naming the peer, if the connection broke before the end of the message.
    fn recv_into(&mut self, place: &mut [u8]) -> Result<bool>;
}

/// All connections of one rank.
#[derive(Debug)]
pub struct Links {
    /// Ranks of the communicator.
    pub nranks: usize,
    /// This rank.
    pub rank: usize,
    /// Channels.
    pub channels: usize,
    /// Payload bytes of a slot.
    pub slot_bytes: usize,
    /// Slots of a connection.
    pub slots: usize,
    /// To rank r on channel c: index c * nranks + r. None for this rank itself.
    pub sends: Vec<Option<Box<dyn SendEnd>>>,
    /// From rank r on channel c: index c * nranks + r. None for this rank itself.
    pub recvs: Vec<Option<Box<dyn RecvEnd>>>,
    /// Which transport serves rank r.
    pub kinds: Vec<Option<TransportKind>>,
    /// Bytes of slot memory of this rank.
    pub buffer_bytes: usize,
    /// Whether some host has more ranks than cores for them; the same on all ranks.
    pub oversubscribed: bool,
    /// Waits for any of the connections.
    pub waiter: Box<dyn Waiter>,
}

/// Waits until something may have changed on one of a rank's connections.
pub trait Waiter: Send + std::fmt::Debug {
    /// Called each time that a scan over the connections found nothing to do, with the number of
    /// such scans in a row (from 0): spins first, then yields the core, then sleeps until a peer
    /// wakes this rank or `limit` has passed, whichever is first. Also moves along what no scan
    /// of the engine touches (a socket whose peer waits for us).
    ///
    /// Going to sleep takes two calls: the first announces it and returns at once, so that the
    /// scan that follows sees whatever came before the announcement; the second sleeps. Hence a
    /// full scan between any two calls, and 0 for the first call of every wait.
    ///
    /// A connection that breaks is reported by its own ends, not here: a peer that has left must
    /// not fail a rank that expects nothing from it.
    ///
    /// # Errors
    /// System if the sockets cannot be waited for.
    fn idle(&mut self, scans: u32, limit: Duration) -> Result<()>;
}

/// What connecting needs to know.
pub struct ConnectContext<'a> {
    /// The out-of-band side; all ranks connect together.
    pub exchange: &'a dyn OutOfBand,
    /// Settings.
    pub config: &'a Config,
    /// Watched by waits.
    pub fault: &'a Arc<Fault>,
    /// Give up after this.
    pub deadline: std::time::Instant,
    /// Stands in for the system's libibverbs, which is otherwise opened where it is needed.
    pub verbs: Option<Arc<dyn ibverbs::Api>>,
}
