//! Opens all data sockets of a rank at once: connects to some peers while others connect to it.
//!
//! A single thread polls them all, so that no rank waits for one peer while another waits for it. Every
//! socket is authenticated by [`crate::bootstrap::auth`] under the communicator's key for the
//! transport.

use crate::bootstrap::PeerInfo;
use crate::bootstrap::auth::{
    ConnectFailure, ConnectionRole, Connector, FailureKind, HandshakeConfig, Listener, Peer,
    PeerIdentity, poll_for,
};
use crate::bootstrap::peer_stream::PeerStream;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::socket::{self, Address};
use nix::poll::PollFd;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Longest poll between two checks of the fault.
const FAULT_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Longest attempt to connect to a nearer address, which may lie in another network than it seems.
const NEARER_TIMEOUT: Duration = Duration::from_secs(2);

/// Identity of one socket of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SocketId {
    /// Rank at the other end.
    pub peer: usize,
    /// Number of the channel.
    pub channel: usize,
    /// Index among the sockets of the channel.
    pub index: usize,
}

impl SocketId {
    /// Identifies the only socket between this rank and `peer`.
    pub(crate) fn only(peer: usize) -> SocketId {
        SocketId {
            peer,
            channel: 0,
            index: 0,
        }
    }

    /// Packs the identity for the hello of the connector: target rank, channel and index.
    fn word(self) -> u64 {
        (self.peer as u64) << 32 | (self.channel as u64) << 16 | self.index as u64
    }

    /// Unpacks the identity of a socket that `peer` has connected to rank `me`; `None` if the peer
    /// meant another rank.
    fn accepted(peer: &Peer, me: usize) -> Option<SocketId> {
        let field = |shift: u32| (peer.word >> shift & 0xffff) as usize;
        (peer.word >> 32 == me as u64).then(|| SocketId {
            peer: peer.rank,
            channel: field(16),
            index: field(0),
        })
    }
}

/// The sockets to open.
pub(crate) struct SocketMesh<'a> {
    /// Name of the transport, for errors.
    pub purpose: &'static str,
    /// Key of the communicator for this purpose.
    pub key: [u8; 32],
    /// Whether sockets over TCP are encrypted.
    pub encrypts: bool,
    /// Number of this rank in the communicator.
    pub me: usize,
    /// Descriptions of all ranks, in rank order.
    pub peers: &'a [PeerInfo],
    /// Accepts the connections of higher ranks.
    pub listener: Listener,
    /// Ranks to connect with, and where they listen. Of two ranks the higher connects.
    pub addresses: Vec<(usize, Address)>,
    /// Addresses that are tried first, for some of the ranks. If no connection comes about there in
    /// [`NEARER_TIMEOUT`], the rank's other address is used.
    pub nearer: Vec<(usize, Address)>,
    /// Channels between two ranks.
    pub channels: usize,
    /// Sockets of a channel.
    pub sockets: usize,
    /// The fault that waits check.
    pub fault: &'a Fault,
    /// Deadline of the attempts to connect.
    pub deadline: Instant,
}

/// A socket that this rank opens.
struct Outgoing {
    id: SocketId,
    address: Address,
    /// Address for the first attempt, and the time at which that attempt ends.
    nearer: Option<(Address, Option<Instant>)>,
    config: HandshakeConfig,
    connector: Option<Connector>,
    next_attempt: Instant,
    attempts: u32,
    /// Whether a connection to `address` was established and ended before its welcome.
    was_answered: bool,
    last: Option<ConnectFailure>,
}

/// Sockets that are still to be opened, and those that are open.
struct Opening {
    config: HandshakeConfig,
    accepts: Vec<SocketId>,
    outgoing: Vec<Outgoing>,
    open: HashMap<SocketId, PeerStream>,
}

impl SocketMesh<'_> {
    /// Opens all sockets, then closes the listener.
    ///
    /// # Errors
    /// Timeout, naming the ranks that are missing and why, or remote if their listeners do not know
    /// the key; the fault's reason; mismatch if a rank runs another version; system if descriptors
    /// run out, with the limit. Remote if the last step of a handshake is lost: the acceptor counts that
    /// connection as open, and may have closed its listener.
    pub fn open(mut self) -> Result<HashMap<SocketId, PeerStream>> {
        let mut opening = self.begin();
        self.listener.expect_connections(opening.accepts.len());
        while opening.open.len() < self.total() {
            self.fault.check()?;
            let now = Instant::now();
            if now >= self.deadline {
                return Err(self.late(&opening));
            }
            for outgoing in &mut opening.outgoing {
                outgoing.leave_nearer(now);
                if outgoing.connector.is_none() && now >= outgoing.next_attempt {
                    outgoing
                        .start()
                        .or_else(|error| self.retry(outgoing, error))?;
                }
            }
            let mut ready = self.poll(&opening.outgoing, now);
            let accepting = ready.split_off(opening.outgoing.len());
            self.advance(&mut opening, &ready)?;
            let served = self.listener.serve(&opening.config, &accepting);
            served.map_err(|error| error.context(self.need()))?;
            while let Some(peer) = self.listener.next() {
                let peer = peer?;
                // A rank whose first connection was displaced connects again, so its last
                // connection replaces the first.
                let id = SocketId::accepted(&peer, self.me);
                if let Some(id) = id.filter(|id| opening.accepts.contains(id)) {
                    opening.open.insert(id, peer.stream);
                }
            }
        }
        Ok(opening.open)
    }

    fn begin(&self) -> Opening {
        let identity = PeerIdentity {
            role: ConnectionRole::Data,
            rank: self.me,
            word: 0,
        };
        let config = HandshakeConfig::new(&self.key, identity);
        let config = config.with_encryption(self.encrypts.into());
        let (mut accepts, mut outgoing) = (Vec::new(), Vec::new());
        for &(peer, address) in &self.addresses {
            let nearer = self.nearer.iter().find(|(rank, _)| *rank == peer);
            let nearer = nearer.map(|(_, address)| *address);
            for (channel, index) in
                (0..self.channels).flat_map(|at| (0..self.sockets).map(move |index| (at, index)))
            {
                let id = SocketId {
                    peer,
                    channel,
                    index,
                };
                if peer > self.me {
                    accepts.push(id);
                    continue;
                }
                outgoing.push(Outgoing {
                    id,
                    address,
                    nearer: nearer.map(|address| (address, None)),
                    config: config.clone().with_word(id.word()),
                    connector: None,
                    next_attempt: Instant::now(),
                    attempts: 0,
                    was_answered: false,
                    last: None,
                });
            }
        }
        Opening {
            config,
            accepts,
            outgoing,
            open: HashMap::new(),
        }
    }

    /// Waits for an event. Returns which outgoing sockets are ready, then which descriptors of the
    /// listener are ready.
    fn poll(&self, outgoing: &[Outgoing], now: Instant) -> Vec<bool> {
        let mut limit = FAULT_POLL_INTERVAL.min(self.deadline - now);
        limit = limit.min(self.listener.poll_limit(now));
        for waiting in outgoing.iter().filter(|one| one.connector.is_none()) {
            limit = limit.min(waiting.next_attempt.saturating_duration_since(now));
        }
        let connectors = outgoing.iter().flat_map(|one| &one.connector);
        let connectors = connectors.map(Connector::interest);
        let mut fds: Vec<PollFd<'_>> = connectors.chain(self.listener.descriptors()).collect();
        poll_for(&mut fds, limit);
        let mut ready = fds.iter().map(|fd| fd.any().unwrap_or(true));
        let mut all: Vec<bool> = outgoing
            .iter()
            .map(|one| one.connector.is_some() && ready.next().unwrap_or(false))
            .collect();
        all.extend(ready);
        all
    }

    /// Advances the outgoing sockets that are ready.
    fn advance(&self, opening: &mut Opening, ready: &[bool]) -> Result<()> {
        let outgoing = std::mem::take(&mut opening.outgoing);
        for (mut outgoing, &ready) in outgoing.into_iter().zip(ready) {
            match if ready { outgoing.advance() } else { Ok(None) } {
                Ok(None) => opening.outgoing.push(outgoing),
                Ok(Some(peer)) if peer.rank == outgoing.id.peer => {
                    opening.open.insert(outgoing.id, peer.stream);
                }
                Ok(Some(peer)) => {
                    let error = Error::internal(format!("rank {} answered", peer.rank));
                    return Err(error.context(&self.peers[outgoing.id.peer]));
                }
                Err(failure) => {
                    self.retry(&mut outgoing, failure)?;
                    opening.outgoing.push(outgoing);
                }
            }
        }
        Ok(())
    }

    /// Schedules another attempt: the peer's queue may be full, or a flood of unauthenticated
    /// connections may have displaced this one.
    fn retry(&self, outgoing: &mut Outgoing, failure: ConnectFailure) -> Result<()> {
        let is_last_address = outgoing.nearer.is_none();
        match failure.kind {
            FailureKind::Closed => outgoing.was_answered |= is_last_address,
            // A listener that answered is closed only once all its connections are open, or its rank
            // has failed. No other attempt helps.
            FailureKind::Refused if outgoing.was_answered => {
                let peer = &self.peers[outgoing.id.peer];
                let last = outgoing.last.as_ref().unwrap_or(&failure);
                let what = format!(
                    "the {} connection to {peer} was lost, and its listener is closed",
                    self.purpose
                );
                return Err(last.error.clone().context(what));
            }
            FailureKind::System => return Err(failure.error.context(self.need())),
            FailureKind::Foreign => {
                let peer = &self.peers[outgoing.id.peer];
                let what = format!("the {} connection to {peer}", self.purpose);
                return Err(failure.error.context(what));
            }
            _ => {}
        }
        outgoing.connector = None;
        let pause = Duration::from_millis(u64::from(outgoing.attempts.min(20)) * 5);
        outgoing.next_attempt = Instant::now() + pause;
        outgoing.last = Some(failure);
        Ok(())
    }

    fn total(&self) -> usize {
        self.addresses.len() * self.channels * self.sockets
    }

    fn need(&self) -> String {
        format!(
            "{} needs {} sockets on rank {} and the process may hold {} descriptors (raise \
             `ulimit -n`, or lower CINCH_CHANNELS or CINCH_TCP_SOCKETS)",
            self.purpose,
            self.total(),
            self.me,
            socket::descriptor_limit()
        )
    }

    fn late(&self, opening: &Opening) -> Error {
        let waiting = opening.outgoing.iter();
        let first = waiting.filter(|one| one.id == SocketId::only(one.id.peer));
        let why = first.map(|one| {
            let why = match &one.last {
                Some(failure) => failure.error.message().to_string(),
                None => "no answer".into(),
            };
            format!("{} at {} ({why})", self.peers[one.id.peer], one.address)
        });
        let mut missing: Vec<String> = why.collect();
        let accepts = opening.accepts.iter();
        let silent = accepts.filter(|id| !opening.open.contains_key(id));
        let mut silent: Vec<usize> = silent.map(|id| id.peer).collect();
        silent.sort_unstable();
        silent.dedup();
        let silent = silent.into_iter().map(|peer| &self.peers[peer]);
        missing.extend(silent.map(|peer| format!("{peer} has not connected to us")));
        missing.truncate(8);
        // A listener that always hangs up does not know the key.
        let refuses = |one: &Outgoing| {
            let last = one.last.as_ref();
            last.is_some_and(|failure| failure.kind == FailureKind::Closed)
        };
        let kind = match opening.outgoing.iter().any(refuses) {
            true => ErrorKind::Remote,
            false => ErrorKind::Timeout,
        };
        Error::new(
            kind,
            format!(
                "{} opened {} of {} sockets for {} before the deadline; missing: {}",
                self.peers[self.me],
                opening.open.len(),
                self.total(),
                self.purpose,
                missing.join(", ")
            ),
        )
    }
}

impl Outgoing {
    fn start(&mut self) -> std::result::Result<(), ConnectFailure> {
        self.attempts += 1;
        let mut address = self.address;
        match &mut self.nearer {
            Some((nearer, end @ None)) => {
                address = *nearer;
                *end = Some(Instant::now() + NEARER_TIMEOUT);
            }
            _ => self.nearer = None,
        }
        self.connector = Some(Connector::start(address, &self.config)?);
        Ok(())
    }

    /// Ends the attempt at the nearer address if its time is over.
    fn leave_nearer(&mut self, now: Instant) {
        if let Some((_, Some(end))) = self.nearer
            && now >= end
            && self.connector.take().is_some()
        {
            self.next_attempt = now;
        }
    }

    /// Goes on with the handshake. Returns the peer once it is authenticated.
    fn advance(&mut self) -> std::result::Result<Option<Peer>, ConnectFailure> {
        let Some(mut connector) = self.connector.take() else {
            return Ok(None);
        };
        if !connector.advance(&self.config)? {
            self.connector = Some(connector);
            return Ok(None);
        }
        let peer = connector.finish(&self.config);
        peer.map(Some).map_err(|error| ConnectFailure {
            kind: FailureKind::Foreign,
            error,
        })
    }
}

#[cfg(all(test, not(loom)))]
#[path = "mesh_tests.rs"]
mod tests;
