//! How a transport connects ranks: each rank prepares, all ranks exchange offers, each rank connects.

use super::emulated::Emulation;
use super::inbox::{Inbox, InboxMemory};
use super::mesh::SocketMesh;
use super::{ConnectContext, RecvEnd, SendEnd};
use crate::bootstrap::PeerInfo;
use crate::bootstrap::auth::Listener;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{FifoShape, Region};
use crate::sys::socket::{Address, Interest};
use crate::types::TransportKind;
use crate::wire::Wire;
use std::sync::Arc;

/// Facts about a transport, which planner, engine and communicator read instead of matching on kinds.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Memory into which peers write. If there is an inbox, published messages are visible at once, even
    /// after the peer has exited.
    pub inbox: InboxMemory,
    /// Whether messages make progress while this rank's cores do other work.
    pub moves_beside: bool,
    /// Whether all ranks together may decide against the transport after they have exchanged offers. The
    /// pairs then take the next transport of the table.
    pub may_decline: bool,
    /// Seconds from a published message to the peer's next action.
    pub hop_seconds: f64,
    /// Seconds of work per message on each side.
    pub message_seconds: f64,
    /// Seconds to move one byte on the wire, on each side.
    pub byte_seconds: f64,
}

impl Caps {
    /// Returns whether a rank's messages are visible to its peer at once, without a network between.
    pub const fn shares_memory(&self) -> bool {
        !matches!(self.inbox, InboxMemory::None)
    }
}

/// A kind of connection that carries host memory.
pub(crate) trait Transport: Sync {
    /// Returns the kind, which settings and reports name.
    fn kind(&self) -> TransportKind;

    /// Returns the facts about the transport.
    fn caps(&self) -> &'static Caps;

    /// Returns why the transport cannot connect two ranks; `None` if it can, or if only an attempt can show
    /// it. Depends on facts that all ranks share, so that both ranks of a pair decide alike.
    fn obstruction(&self, own: &PeerInfo, peer: &PeerInfo, config: &Config)
    -> Option<&'static str>;

    /// Returns the descriptors that a rank holds for each peer.
    fn descriptors(&self, _config: &Config) -> usize {
        0
    }

    /// Tries out the transport on this host. Returns a phrase about the resource in use, or nothing.
    ///
    /// # Errors
    /// The reason for which this host cannot use the transport.
    fn probe(&self, config: &Config) -> Result<&'static str>;

    /// Prepares this rank for connections, before it knows its peers' offers.
    ///
    /// # Errors
    /// The reason for which this rank cannot connect, which all ranks then report.
    fn prepare(&self, setup: &Setup<'_>) -> Result<Box<dyn Prepared>>;
}

/// The resources that a rank holds for its peers. They stay until all ranks are connected.
pub(crate) trait Prepared {
    /// Returns the bytes that peers need to connect with this rank.
    fn offer(&self) -> Vec<u8>;

    /// Connects this rank with `peers.served`. All ranks call it together. Returns `None` if all ranks
    /// decline, which [`Caps::may_decline`] permits.
    ///
    /// # Errors
    /// Timeout, naming missing ranks; remote or mismatch, naming the rank; the fault's reason; system.
    fn connect(&mut self, setup: &Setup<'_>, peers: &Peers<'_>) -> Result<Option<Connected>>;
}

/// Inputs that all transports of a rank share.
pub(crate) struct Setup<'a> {
    /// Control plane, settings, fault and deadline.
    pub context: &'a ConnectContext<'a>,
    /// Number and size of the slots of a connection.
    pub shape: FifoShape,
    /// Memory for incoming slots, if a transport in use has [`Caps::inbox`].
    pub inbox: Option<Inbox>,
    /// Links that delay the messages in inboxes, if they are emulated.
    pub emulation: Option<Emulation>,
}

impl<'a> Setup<'a> {
    /// Returns the number of this rank.
    pub fn me(&self) -> usize {
        self.context.exchange.rank()
    }

    /// Returns the descriptions of all ranks, in rank order.
    pub fn peers(&self) -> &'a [PeerInfo] {
        self.context.exchange.peers()
    }

    /// Returns the settings of this rank.
    pub fn config(&self) -> &'a Config {
        self.context.config
    }

    /// Returns the bytes of one peer's slots in one direction, over all channels.
    pub fn fifo_bytes(&self) -> usize {
        self.config().channels * self.shape.bytes()
    }

    /// Returns the inbox.
    ///
    /// # Errors
    /// Internal if no transport asked for an inbox.
    pub fn inbox(&self) -> Result<&Inbox> {
        let inbox = self.inbox.as_ref();
        inbox.ok_or_else(|| Error::internal("a transport without an inbox uses one"))
    }

    /// Connects this rank through the inbox with the ranks whose inboxes are `regions`. Each pair of
    /// ranks must be connected once, through one transport.
    ///
    /// # Errors
    /// See [`Setup::inbox`] and [`Emulation::connect`].
    pub fn connect_inbox(
        &self,
        peers: &Peers<'_>,
        regions: Vec<(usize, Arc<Region>)>,
    ) -> Result<Connected> {
        let inbox = self.inbox()?;
        let bytes = self.fifo_bytes() * regions.len();
        let own = (self.me(), inbox.region());
        let emulated = self.emulation.as_ref();
        let emulated = emulated.map(|emulation| emulation.connect(inbox.layout(), own, &regions));
        let emulated = emulated.transpose()?;
        let mut ends = Vec::new();
        for (peer, region) in regions {
            let who = self.peers()[peer].to_string();
            for channel in 0..self.config().channels {
                let names = (self.me(), (peer, &region));
                // SAFETY: the caller connects each pair once, and the loop visits each channel once.
                let (send, recv) = unsafe { inbox.join(names, channel, &who, peers.crowded) };
                let (send, recv): (Box<dyn SendEnd>, Box<dyn RecvEnd>) = match &emulated {
                    None => (Box::new(send), Box::new(recv)),
                    Some(links) => links.wrap((peer, &region), channel, send, recv),
                };
                ends.push(Ends {
                    peer,
                    channel,
                    send,
                    recv,
                });
            }
        }
        Ok(Connected {
            ends,
            pollable: None,
            bytes,
        })
    }

    /// Returns a mesh of sockets with the peers at `addresses`. Each of the `channels` has
    /// `sockets` sockets.
    pub fn mesh(
        &self,
        purpose: &'static str,
        listener: Listener,
        addresses: Vec<(usize, Address)>,
        (channels, sockets): (usize, usize),
    ) -> SocketMesh<'a> {
        SocketMesh {
            purpose,
            key: self.context.exchange.key(purpose),
            encrypts: self.config().encrypts,
            me: self.me(),
            peers: self.peers(),
            listener,
            addresses,
            nearer: Vec::new(),
            channels,
            sockets,
            fault: self.context.fault,
            deadline: self.context.deadline,
        }
    }
}

/// Returns the number by which both ends of a pair choose among equally near ports or networks: half the sum of their
/// indices on their hosts. Ranks with equal indices get their index, so that the ranks of a host spread over its ports.
pub(super) fn place_of_pair(peers: &[PeerInfo], one: usize, other: usize) -> usize {
    let index = |rank: usize| {
        let host = peers[rank].host_id;
        let before = peers[..rank].iter();
        before.filter(|peer| peer.host_id == host).count()
    };
    (index(one) + index(other)) / 2
}

/// The peers of one transport.
pub(crate) struct Peers<'a> {
    /// Ranks to connect with.
    pub served: &'a [usize],
    /// Offer of each rank; empty if the rank has none.
    pub offers: Vec<&'a [u8]>,
    /// Whether ranks of this host share cores, and therefore sleep often.
    pub crowded: bool,
}

impl Peers<'_> {
    /// Reads the offer of a rank.
    ///
    /// # Errors
    /// Mismatch, naming the rank, if the offer has another format.
    pub fn offer<T: Wire>(&self, setup: &Setup<'_>, rank: usize) -> Result<T> {
        T::from_bytes(self.offers[rank]).map_err(|_| another_format(&setup.peers()[rank]))
    }
}

/// Returns the error for a peer whose connection info cannot be read.
pub(super) fn another_format(peer: &PeerInfo) -> Error {
    Error::new(
        ErrorKind::Mismatch,
        format!("{peer} described its connections in another format: use one version"),
    )
}

/// The connections of one transport.
pub(crate) struct Connected {
    /// The sending end and the receiving end to each peer on each channel.
    pub ends: Vec<Ends>,
    /// The part of the transport through which the rank's waiter makes progress and sleeps. If it is `None`,
    /// peers ring the doorbell of the inbox instead.
    pub pollable: Option<Box<dyn Pollable>>,
    /// Bytes of slot memory.
    pub bytes: usize,
}

/// The ends of this rank to a peer on a channel.
pub(crate) struct Ends {
    pub peer: usize,
    pub channel: usize,
    pub send: Box<dyn SendEnd>,
    pub recv: Box<dyn RecvEnd>,
}

/// The descriptors of one transport that a rank's waiter sleeps on, and the work that the waiter
/// does for the transport.
pub(crate) trait Pollable: Send + std::fmt::Debug {
    /// Returns whether data moves only when the descriptors are polled. If so, the waiter polls the
    /// descriptors while it spins, not only while it sleeps.
    fn is_polled(&self) -> bool;

    /// Finishes work for which an end had no room, such as a credit. Called while the waiter spins,
    /// without a system call.
    fn progress(&mut self) {}

    /// Requests that the next event makes a descriptor readable. Returns whether a scan must follow before
    /// the rank sleeps, because an earlier event makes no descriptor readable.
    fn arm(&mut self) -> bool {
        false
    }

    /// Appends the descriptors to wait for.
    ///
    /// # Errors
    /// The state of a connection is impossible.
    fn interests(&mut self, interests: &mut Vec<Interest>) -> Result<()>;

    /// Handles the events of a wait. `interests` is the part that [`Pollable::interests`] appended last.
    fn handle(&mut self, interests: &[Interest]);

    /// Checks that the peers' hosts still answer. A dead host becomes an error of its connections.
    fn check_peers(&mut self);
}
