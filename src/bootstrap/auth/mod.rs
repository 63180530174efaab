//! Mutual proof of a shared key, before anything else is read from a connection.
//!
//! Both sides send one 96-byte hello, then HMAC-SHA256 over both hellos under a key derived from
//! the shared one and the role, each with its own direction in it:
//!
//! ```text
//! connector -> acceptor: hello
//! acceptor  -> connector: hello, proof
//! connector -> acceptor: proof
//! acceptor  -> connector: one byte, welcome
//! ```
//!
//! Two round trips. The acceptor reads 96 bytes from a stranger, then 32 more, and nothing beyond:
//! what follows stays in the socket for the owner of the connection. The last byte says that the
//! connector's place was not given to another stranger meanwhile; without it, it tries again.
//! The fixed part of the hello never changes, so that two versions of the library can complete
//! the proof and then refuse each other by name.
//!
//! Two processes that [`connect`] to each other at the same time without either in
//! [`Listener::accept`] would wait for ever: let each rank connect to all lower ranks first, and
//! accept all higher ones then.

mod connect;
mod listener;

pub use connect::connect;
pub(super) use connect::{Patience, connect_to_any, connect_with};
pub use listener::Listener;

use super::keys::{self, Authenticator, Key};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::fork::CloseOnFork;
use crate::types::FORMAT_VERSION;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::time::Duration;

const HELLO_BYTES: usize = 96;
const PROOF_BYTES: usize = 32;
const WELCOME: u8 = 6;
const MAGIC: [u8; 8] = *b"cinch\x01\r\n";

/// What a connection is for. Each role has its own keys: a proof for one is none for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// A rank comes to the meeting.
    Meeting = 1,
    /// A rank's control connection.
    Control = 2,
    /// A data connection of a transport.
    Data = 3,
}

/// What one side says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// What the connection is for.
    pub role: Role,
    /// The speaker's rank.
    pub rank: usize,
    /// Eight bytes for the owner, proven with the rest: a channel and a socket index, say.
    pub word: u64,
}

/// The other side, proven.
pub struct Peer {
    /// The connection: blocking, without Nagle's delay, nothing read beyond the proof.
    pub stream: CloseOnFork<TcpStream>,
    /// Where it comes from or goes to.
    pub address: SocketAddr,
    /// The rank that the other side says it is.
    pub rank: usize,
    /// The other side's word.
    pub word: u64,
    /// A key that only the two ends of this one connection know.
    pub session: [u8; 32],
    /// Whether this side connected.
    pub connector: bool,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer")
            .field("address", &self.address)
            .field("rank", &self.rank)
            .field("word", &self.word)
            .finish_non_exhaustive()
    }
}

/// Versions that must be equal on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version {
    library: [u16; 3],
    wire: u8,
}

impl Version {
    pub(super) fn ours() -> Version {
        let mut parts = crate::VERSION
            .split(['.', '-', '+'])
            .map(|part| part.parse().unwrap_or(0));
        Version {
            library: std::array::from_fn(|_| parts.next().unwrap_or(0)),
            wire: FORMAT_VERSION,
        }
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [major, minor, patch] = self.library;
        let wire = self.wire;
        write!(f, "cinch {major}.{minor}.{patch} with wire format {wire}")
    }
}

/// One side's part of a handshake: what it knows and what it says.
#[derive(Clone)]
pub(super) struct HandshakeConfig {
    prove: Authenticator,
    session: Key,
    fingerprint: [u8; 4],
    greeting: PeerIdentity,
    version: Version,
}

impl HandshakeConfig {
    pub(super) fn new(key: &[u8; 32], greeting: PeerIdentity) -> HandshakeConfig {
        let role = [greeting.role as u8];
        let fingerprint = keys::derive(key, b"", "handshake fingerprint");
        HandshakeConfig {
            prove: keys::authenticator(&keys::derive(key, &role, "handshake proof")),
            session: keys::derive(key, &role, "handshake session"),
            fingerprint: std::array::from_fn(|at| fingerprint[at]),
            greeting,
            version: Version::ours(),
        }
    }

    #[cfg(test)]
    pub(super) fn with_library(mut self, library: [u16; 3]) -> HandshakeConfig {
        self.version.library = library;
        self
    }

    fn hello(&self, side: Side) -> Result<[u8; HELLO_BYTES]> {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = self.version.wire;
        bytes[9] = self.greeting.role as u8;
        bytes[10] = side as u8;
        for (at, number) in self.version.library.iter().enumerate() {
            bytes[12 + 2 * at..][..2].copy_from_slice(&number.to_le_bytes());
        }
        bytes[20..24].copy_from_slice(&self.fingerprint);
        bytes[24..28].copy_from_slice(&(self.greeting.rank as u32).to_le_bytes());
        bytes[28..36].copy_from_slice(&self.greeting.word.to_le_bytes());
        bytes[40..72].copy_from_slice(&keys::random::<32>()?);
        Ok(bytes)
    }

    fn proof(&self, prover: Side, transcript: &Transcript) -> Key {
        keys::seal(&self.prove, &transcript.parts(prover))
    }

    fn proves(&self, prover: Side, transcript: &Transcript, proof: &[u8]) -> bool {
        keys::opens(&self.prove, &transcript.parts(prover), proof)
    }

    fn session(&self, transcript: &Transcript) -> Key {
        let hash = keys::digest(&transcript.parts(Side::Connector));
        keys::derive(&self.session, &hash, "session")
    }

    /// Refuses a proven peer of another version, naming both.
    fn check_version(&self, hello: &Hello, address: SocketAddr) -> Result<()> {
        if hello.version == self.version {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "rank {} at {} runs {}, rank {} runs {}: install the same version everywhere",
                hello.rank,
                address.ip(),
                hello.version,
                self.greeting.rank,
                self.version
            ),
        ))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Side {
    Connector = 0,
    Acceptor = 1,
}

struct Transcript {
    connector: [u8; HELLO_BYTES],
    acceptor: [u8; HELLO_BYTES],
}

impl Transcript {
    /// The direction is part of what is proven: a proof sent back to its maker proves nothing.
    fn parts(&self, prover: Side) -> [&[u8]; 3] {
        let direction: &[u8] = match prover {
            Side::Connector => b"connector",
            Side::Acceptor => b"acceptor",
        };
        [direction, &self.connector, &self.acceptor]
    }
}

/// The fields of the other side's hello.
struct Hello {
    version: Version,
    rank: usize,
    word: u64,
}

/// Why a hello is none of ours, as a phrase behind "it".
fn parse_hello(
    bytes: &[u8; HELLO_BYTES],
    terms: &HandshakeConfig,
    side: Side,
) -> std::result::Result<Hello, &'static str> {
    let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    if bytes[..8] != MAGIC || bytes[10] != side as u8 {
        return Err("does not speak cinch's protocol");
    }
    if bytes[9] != terms.greeting.role as u8 {
        return Err("serves another purpose");
    }
    if bytes[20..24] != terms.fingerprint {
        return Err("belongs to another communicator, or holds another secret");
    }
    Ok(Hello {
        version: Version {
            library: [number(12), number(14), number(16)],
            wire: bytes[8],
        },
        rank: u32::from_le_bytes([bytes[24], bytes[25], bytes[26], bytes[27]]) as usize,
        word: u64::from_le_bytes(std::array::from_fn(|at| bytes[28 + at])),
    })
}

/// Waits until the descriptor is ready or broken, or `limit` has passed. Returns whether it is.
/// Signals end the wait early.
pub(super) fn wait_ready(fd: BorrowedFd<'_>, events: PollFlags, limit: Duration) -> bool {
    let mut fds = [PollFd::new(fd, events)];
    poll_for(&mut fds, limit) && fds[0].any().unwrap_or(true)
}

/// `poll`, rounding the limit up so that it never spins. Returns whether something is ready.
pub(super) fn poll_for(fds: &mut [PollFd<'_>], limit: Duration) -> bool {
    let milliseconds = limit.as_micros().div_ceil(1000).min(60_000) as u16;
    matches!(poll(fds, PollTimeout::from(milliseconds)), Ok(1..))
}

#[cfg(test)]
pub(in crate::bootstrap) mod tests;
