//! Mutual authentication of every TCP and UNIX connection: both ends prove that they know a shared
//! key before either reads anything else.
//!
//! Each end sends a 96-byte hello with a fresh nonce, then HMAC-SHA256 over both hellos. The key of
//! the HMAC is derived from the shared key and the role of the connection:
//!
//! ```text
//! connector -> acceptor: hello
//! acceptor  -> connector: hello, HMAC("acceptor" | both hellos)
//! connector -> acceptor: HMAC("connector" | both hellos)
//! acceptor  -> connector: one byte, welcome
//! ```
//!
//! The handshake takes two round trips. The acceptor reads 96 bytes, then 32 more, and nothing
//! beyond: what follows stays in the socket for the owner of the connection. The acceptor drops
//! pending connections that are late or displaced by newer ones, so a connector without its welcome
//! connects again. The fixed part of the hello never changes between versions: two versions complete
//! the proof and then refuse each other by name.
//!
//! If both ends encrypt, the nonces are public keys of X25519, which the proofs authenticate. The keys of the stream
//! are derived from their agreement and the shared key; see [`super::peer_stream`].
//!
//! [`Handshake`] is the state machine of one connection and never blocks. [`Listener`] drives it for
//! accepted connections, [`Connector`] for one outgoing connection, [`connect_to_any`] until a
//! deadline.

mod connect;
mod handshake;
mod listener;

pub(crate) use connect::{ConnectFailure, Connector, FailureKind};
pub(super) use connect::{OnRefusal, connect_to_any};
pub(crate) use handshake::Handshake;
#[cfg(any(feature = "internal", all(test, not(loom))))]
pub(crate) use handshake::HandshakeProgress;
pub(crate) use listener::Listener;

use super::keys::{self, Authenticator, DerivedKey};
use super::peer_stream::PeerStream;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::socket::{Address, Socket};
use crate::types::FORMAT_VERSION;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::os::fd::BorrowedFd;
use std::time::Duration;

const HELLO_BYTES: usize = 96;
const PROOF_BYTES: usize = 32;
const NONCE_AT: usize = 40;
const NONCE_BYTES: usize = 32;
const WELCOME: u8 = 6;
const MAGIC: [u8; 8] = *b"cinch\x01\r\n";

/// Longest time that a wait blocks in poll before it checks the fault again.
const FAULT_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Purpose of a connection. Each role has its own keys: a proof for one role is invalid for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ConnectionRole {
    /// Registration with the rendezvous server.
    Rendezvous = 1,
    /// Control connection of a rank to the root.
    Control = 2,
    /// Data connection of a transport.
    Data = 3,
}

/// Contents of this side's hello. The proof covers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerIdentity {
    /// Purpose of the connection.
    pub role: ConnectionRole,
    /// Rank of the sender.
    pub rank: usize,
    /// Eight bytes for the owner of the connection, such as a channel and a socket index.
    pub word: u64,
}

/// An authenticated connection, with the rank at its other end.
pub(crate) struct Peer {
    /// The connection: non-blocking, without Nagle's delay, nothing read beyond the proof.
    pub stream: PeerStream,
    /// Address of the other end.
    pub address: Address,
    /// Rank that the other end has proven to be.
    pub rank: usize,
    /// [`PeerIdentity::word`] of the other end.
    pub word: u64,
    /// A key that only the two ends of this connection know.
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

/// Versions that both ends must share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    library: [u16; 3],
    wire: u8,
}

impl Version {
    fn of_this_library() -> Version {
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

/// Whether connections that leave the host are encrypted. Both sides must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encryption {
    /// No connection is encrypted.
    Off,
    /// All connections over TCP are encrypted.
    On,
    /// Accepted connections are encrypted if the connector encrypts. For the server of a rendezvous, which
    /// may belong to no rank.
    AsConnector,
}

impl From<bool> for Encryption {
    fn from(is_on: bool) -> Encryption {
        if is_on {
            Encryption::On
        } else {
            Encryption::Off
        }
    }
}

/// Keys and identity of this side, for any number of handshakes.
#[derive(Clone)]
pub(crate) struct HandshakeConfig {
    encryption: Encryption,
    proof: Authenticator,
    session: DerivedKey,
    fingerprint: [u8; 4],
    identity: PeerIdentity,
    version: Version,
}

impl HandshakeConfig {
    /// Derives the keys of `identity.role` from the shared `key`.
    pub(crate) fn new(key: &[u8; 32], identity: PeerIdentity) -> HandshakeConfig {
        let role = [identity.role as u8];
        let fingerprint = keys::derive(key, b"", "handshake fingerprint");
        HandshakeConfig {
            encryption: Encryption::Off,
            proof: keys::authenticator(&keys::derive(key, &role, "handshake proof")),
            session: keys::derive(key, &role, "handshake session"),
            fingerprint: std::array::from_fn(|at| fingerprint[at]),
            identity,
            version: Version::of_this_library(),
        }
    }

    /// Replaces the word of the identity.
    pub(crate) fn with_word(mut self, word: u64) -> HandshakeConfig {
        self.identity.word = word;
        self
    }

    /// Replaces the choice of encryption, which is off at first.
    pub(crate) fn with_encryption(mut self, encryption: Encryption) -> HandshakeConfig {
        self.encryption = encryption;
        self
    }

    #[cfg(test)]
    pub(super) fn with_library(mut self, library: [u16; 3]) -> HandshakeConfig {
        self.version.library = library;
        self
    }

    fn hello(
        &self,
        side: HandshakeSide,
        encrypts: bool,
        nonce: [u8; NONCE_BYTES],
    ) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = self.version.wire;
        bytes[9] = self.identity.role as u8;
        bytes[10] = side as u8;
        for (at, number) in self.version.library.iter().enumerate() {
            bytes[12 + 2 * at..][..2].copy_from_slice(&number.to_le_bytes());
        }
        bytes[20..24].copy_from_slice(&self.fingerprint);
        bytes[24..28].copy_from_slice(&(self.identity.rank as u32).to_le_bytes());
        bytes[28..36].copy_from_slice(&self.identity.word.to_le_bytes());
        bytes[36] = u8::from(encrypts);
        bytes[NONCE_AT..][..NONCE_BYTES].copy_from_slice(&nonce);
        bytes
    }

    fn prove(&self, prover: HandshakeSide, transcript: &Transcript) -> DerivedKey {
        keys::seal(&self.proof, &transcript.parts(prover))
    }

    /// Returns whether `proof` is the prover's proof for `transcript`. Compares in constant time.
    fn accepts(&self, prover: HandshakeSide, transcript: &Transcript, proof: &[u8]) -> bool {
        keys::opens(&self.proof, &transcript.parts(prover), proof)
    }

    fn session(&self, transcript: &Transcript) -> DerivedKey {
        let hash = keys::digest(&transcript.parts(HandshakeSide::Connector));
        keys::derive(&self.session, &hash, "session")
    }

    /// Refuses an authenticated peer of another version, naming both.
    fn check_version(&self, hello: &Hello, address: Address) -> Result<()> {
        if hello.version == self.version {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "rank {} at {} runs {}, rank {} runs {}: install the same version everywhere",
                hello.rank,
                host(address),
                hello.version,
                self.identity.rank,
                self.version
            ),
        ))
    }

    /// Refuses an authenticated peer if one side encrypts and the other does not, naming both.
    fn check_encryption(&self, encrypts: bool, hello: &Hello, address: Address) -> Result<()> {
        if hello.encrypts == encrypts {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "rank {} at {} has CINCH_ENCRYPT={}, rank {} has CINCH_ENCRYPT={}: set one value on \
                 all ranks",
                hello.rank,
                host(address),
                u8::from(hello.encrypts),
                self.identity.rank,
                u8::from(encrypts)
            ),
        ))
    }

    /// Reads the other side's hello. The error is the reason of a refusal, as a phrase that
    /// continues a sentence whose subject is "it".
    fn parse(
        &self,
        bytes: &[u8; HELLO_BYTES],
        side: HandshakeSide,
    ) -> std::result::Result<Hello, &'static str> {
        let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if bytes[..8] != MAGIC || bytes[10] != side as u8 {
            return Err("does not speak cinch's protocol");
        }
        if bytes[9] != self.identity.role as u8 {
            return Err("serves another purpose");
        }
        if bytes[20..24] != self.fingerprint {
            return Err("belongs to another communicator, or holds another secret");
        }
        Ok(Hello {
            version: Version {
                library: [number(12), number(14), number(16)],
                wire: bytes[8],
            },
            rank: u32::from_le_bytes([bytes[24], bytes[25], bytes[26], bytes[27]]) as usize,
            word: u64::from_le_bytes(std::array::from_fn(|at| bytes[28 + at])),
            encrypts: bytes[36] != 0,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum HandshakeSide {
    Connector = 0,
    Acceptor = 1,
}

struct Transcript {
    connector: [u8; HELLO_BYTES],
    acceptor: [u8; HELLO_BYTES],
}

impl Transcript {
    /// Returns the bytes that the HMAC covers. They name the prover, so that a proof reflected to
    /// its maker is invalid.
    fn parts(&self, prover: HandshakeSide) -> [&[u8]; 3] {
        let direction: &[u8] = match prover {
            HandshakeSide::Connector => b"connector",
            HandshakeSide::Acceptor => b"acceptor",
        };
        [direction, &self.connector, &self.acceptor]
    }
}

/// Fields of the other side's hello.
struct Hello {
    version: Version,
    rank: usize,
    word: u64,
    encrypts: bool,
}

/// Returns the nonce of a hello, which is a public key if the sender encrypts.
fn nonce(hello: &[u8; HELLO_BYTES]) -> [u8; NONCE_BYTES] {
    std::array::from_fn(|at| hello[NONCE_AT + at])
}

/// Returns the host of an address, as errors name it.
fn host(address: Address) -> String {
    match address {
        Address::Tcp(address) => address.ip().to_string(),
        local => local.to_string(),
    }
}

/// Waits until the descriptor is ready or broken, or `limit` has passed. Returns whether it is.
/// A signal ends the wait early.
pub(super) fn wait_ready(fd: BorrowedFd<'_>, events: PollFlags, limit: Duration) -> bool {
    let mut fds = [PollFd::new(fd, events)];
    poll_for(&mut fds, limit) && fds[0].any().unwrap_or(true)
}

/// Polls, with the limit rounded up so that a loop of polls never spins. Returns whether a
/// descriptor is ready.
pub(crate) fn poll_for(fds: &mut [PollFd<'_>], limit: Duration) -> bool {
    let milliseconds = limit.as_micros().div_ceil(1000).min(60_000) as u16;
    matches!(poll(fds, PollTimeout::from(milliseconds)), Ok(1..))
}

#[cfg(test)]
pub(in crate::bootstrap) mod tests;
