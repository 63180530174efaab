//! The handshake of one connection as a state machine that never blocks.

use super::super::peer_stream::{PeerStream, StreamKeys};
use super::*;
use crate::sys::socket;
use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use ring::rand::SystemRandom;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;

/// Bytes that the connector reads: hello, proof and welcome.
const INPUT_BYTES: usize = HELLO_BYTES + PROOF_BYTES + 1;

/// Progress of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeProgress {
    /// The handshake goes on once the socket is readable, or writable if `write` is set.
    Pending { write: bool },
    /// Both sides have proven that they know the key.
    Done,
}

/// Reason why a handshake ended without proof.
#[derive(Debug)]
pub(crate) enum HandshakeFailure {
    /// The other side closed the connection.
    Closed,
    /// The connection broke, or the system has no random numbers.
    Broken(io::Error),
    /// The other side does not know the key. The phrase continues an error sentence whose subject
    /// is "it".
    Refused(&'static str),
}

/// The message that this side waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HandshakeStage {
    /// The hello, with which the connector opens the handshake.
    Hello,
    /// The other side's proof that it knows the key, which follows its hello.
    Proof,
    /// The byte by which the acceptor confirms that it accepts the connection.
    Welcome,
    Done,
}

/// This side's state of one authentication handshake.
pub(crate) struct Handshake {
    side: HandshakeSide,
    stage: HandshakeStage,
    own: [u8; HELLO_BYTES],
    input: [u8; INPUT_BYTES],
    pub(super) received: usize,
    output: Vec<u8>,
    sent: usize,
    peer: Option<Hello>,
    /// Whether the connection is over TCP, so that it may be encrypted.
    is_remote: bool,
    /// Key whose public half is the nonce of the own hello; `None` without encryption.
    private: Option<EphemeralPrivateKey>,
}

impl Handshake {
    /// Starts the handshake on the side that connects to `address`.
    ///
    /// # Errors
    /// System if there are no random numbers.
    pub(crate) fn connector(config: &HandshakeConfig, address: Address) -> Result<Handshake> {
        let is_remote = matches!(address, Address::Tcp(_));
        let encrypts = is_remote && config.encryption == Encryption::On;
        let (own, private) = hello(config, HandshakeSide::Connector, encrypts)?;
        Ok(Handshake {
            side: HandshakeSide::Connector,
            stage: HandshakeStage::Proof,
            own,
            input: [0; INPUT_BYTES],
            received: 0,
            output: own.to_vec(),
            sent: 0,
            peer: None,
            is_remote,
            private,
        })
    }

    /// Starts the handshake on the side that accepted a connection from `address`.
    pub(crate) fn acceptor(address: Address) -> Handshake {
        Handshake {
            side: HandshakeSide::Acceptor,
            stage: HandshakeStage::Hello,
            own: [0; HELLO_BYTES],
            input: [0; INPUT_BYTES],
            received: 0,
            output: Vec::new(),
            sent: 0,
            peer: None,
            is_remote: matches!(address, Address::Tcp(_)),
            private: None,
        }
    }

    /// Returns whether the other side sent a hello of this communicator, as ranks do.
    pub(super) fn has_hello(&self) -> bool {
        self.peer.is_some()
    }

    /// Returns whether this side has sent any byte, which shows that the connection is established.
    pub(super) fn has_sent(&self) -> bool {
        self.sent > 0
    }

    /// Returns the events to poll for.
    pub(super) fn events(&self) -> PollFlags {
        match self.sent < self.output.len() {
            true => PollFlags::POLLOUT,
            false => PollFlags::POLLIN,
        }
    }

    /// Reads and writes as much of the handshake as the socket allows.
    pub(crate) fn advance(
        &mut self,
        config: &HandshakeConfig,
        socket: &OwnedFd,
    ) -> std::result::Result<HandshakeProgress, HandshakeFailure> {
        loop {
            while self.sent < self.output.len() {
                match socket::write(socket, &[IoSlice::new(&self.output[self.sent..])]) {
                    Ok(count) => self.sent += count,
                    Err(error) if is_pending(&error) => {
                        return Ok(HandshakeProgress::Pending { write: true });
                    }
                    Err(error) => return Err(HandshakeFailure::Broken(error)),
                }
            }
            // Reads no byte beyond the current stage, because later bytes belong to the owner of the
            // connection.
            let due = match self.stage {
                HandshakeStage::Done => return Ok(HandshakeProgress::Done),
                HandshakeStage::Hello => HELLO_BYTES,
                HandshakeStage::Proof => HELLO_BYTES + PROOF_BYTES,
                HandshakeStage::Welcome => HELLO_BYTES + PROOF_BYTES + 1,
            };
            while self.received < due {
                let mut parts = [IoSliceMut::new(&mut self.input[self.received..due])];
                match socket::read(socket, &mut parts) {
                    Ok(0) => return Err(HandshakeFailure::Closed),
                    Ok(count) => self.received += count,
                    Err(error) if is_pending(&error) => {
                        return Ok(HandshakeProgress::Pending { write: false });
                    }
                    Err(error) => return Err(HandshakeFailure::Broken(error)),
                }
            }
            self.finish_stage(config)?;
        }
    }

    fn finish_stage(
        &mut self,
        config: &HandshakeConfig,
    ) -> std::result::Result<(), HandshakeFailure> {
        match self.stage {
            HandshakeStage::Hello => {
                self.parse_hello(config)?;
                let no_random = |error: Error| HandshakeFailure::Broken(io::Error::other(error));
                let encrypts = match config.encryption {
                    Encryption::Off => false,
                    Encryption::On => self.is_remote,
                    Encryption::AsConnector => self.peer.as_ref().is_some_and(|it| it.encrypts),
                };
                let made = hello(config, HandshakeSide::Acceptor, encrypts);
                (self.own, self.private) = made.map_err(no_random)?;
                self.output.extend_from_slice(&self.own);
                let proof = config.prove(HandshakeSide::Acceptor, &self.transcript());
                self.output.extend_from_slice(&proof);
                self.stage = HandshakeStage::Proof;
            }
            HandshakeStage::Proof if self.side == HandshakeSide::Connector => {
                self.parse_hello(config)?;
                self.check_proof(config, HandshakeSide::Acceptor)?;
                let proof = config.prove(HandshakeSide::Connector, &self.transcript());
                self.output.extend_from_slice(&proof);
                self.stage = HandshakeStage::Welcome;
            }
            HandshakeStage::Proof => {
                self.check_proof(config, HandshakeSide::Connector)?;
                self.output.push(WELCOME);
                self.stage = HandshakeStage::Done;
            }
            HandshakeStage::Welcome if self.input[HELLO_BYTES + PROOF_BYTES] != WELCOME => {
                return Err(HandshakeFailure::Refused("does not speak cinch's protocol"));
            }
            HandshakeStage::Welcome | HandshakeStage::Done => self.stage = HandshakeStage::Done,
        }
        Ok(())
    }

    fn parse_hello(
        &mut self,
        config: &HandshakeConfig,
    ) -> std::result::Result<(), HandshakeFailure> {
        let other = match self.side {
            HandshakeSide::Connector => HandshakeSide::Acceptor,
            HandshakeSide::Acceptor => HandshakeSide::Connector,
        };
        let hello = config.parse(&self.other_hello(), other);
        self.peer = Some(hello.map_err(HandshakeFailure::Refused)?);
        Ok(())
    }

    fn check_proof(
        &self,
        config: &HandshakeConfig,
        prover: HandshakeSide,
    ) -> std::result::Result<(), HandshakeFailure> {
        let proof = &self.input[HELLO_BYTES..HELLO_BYTES + PROOF_BYTES];
        match config.accepts(prover, &self.transcript(), proof) {
            true => Ok(()),
            false => Err(HandshakeFailure::Refused(
                "could not prove that it knows the job's secret",
            )),
        }
    }

    fn other_hello(&self) -> [u8; HELLO_BYTES] {
        std::array::from_fn(|at| self.input[at])
    }

    fn transcript(&self) -> Transcript {
        let (connector, acceptor) = match self.side {
            HandshakeSide::Connector => (self.own, self.other_hello()),
            HandshakeSide::Acceptor => (self.other_hello(), self.own),
        };
        Transcript {
            connector,
            acceptor,
        }
    }

    /// Turns a handshake that is [`HandshakeProgress::Done`] into the authenticated connection.
    ///
    /// # Errors
    /// Mismatch, naming both sides, if the peer runs another version of the library, or if only one
    /// side encrypts.
    pub(crate) fn into_peer(
        mut self,
        config: &HandshakeConfig,
        socket: Socket,
        address: Address,
    ) -> Result<Peer> {
        let session = config.session(&self.transcript());
        let connector = self.side == HandshakeSide::Connector;
        let (private, public) = (self.private.take(), nonce(&self.other_hello()));
        let hello = self.peer.filter(|_| self.stage == HandshakeStage::Done);
        let hello = hello.ok_or_else(|| Error::internal("a handshake ended without proof"))?;
        config.check_version(&hello, address)?;
        config.check_encryption(private.is_some(), &hello, address)?;
        let keys = private.map(|private| stream_keys(private, public, &session, connector));
        Ok(Peer {
            stream: PeerStream::new(socket, keys.transpose()?),
            address,
            rank: hello.rank,
            word: hello.word,
            session,
            connector,
        })
    }
}

/// Returns a hello of this side. With `encrypts` its nonce is a public key of X25519, and the private
/// key is returned as well.
fn hello(
    config: &HandshakeConfig,
    side: HandshakeSide,
    encrypts: bool,
) -> Result<([u8; HELLO_BYTES], Option<EphemeralPrivateKey>)> {
    if !encrypts {
        return Ok((config.hello(side, false, keys::random()?), None));
    }
    let no_random = |_| Error::new(ErrorKind::System, "the system has no random bytes");
    let private = EphemeralPrivateKey::generate(&X25519, &SystemRandom::new());
    let private = private.map_err(no_random)?;
    let public = private.compute_public_key().map_err(no_random)?;
    let nonce = std::array::from_fn(|at| public.as_ref()[at]);
    Ok((config.hello(side, true, nonce), Some(private)))
}

/// Derives the keys of both directions from the agreement of X25519 and the session's key, so that they
/// stay secret unless both leak: the ephemeral keys, which no process keeps, and the job's secret.
fn stream_keys(
    private: EphemeralPrivateKey,
    public: [u8; NONCE_BYTES],
    session: &DerivedKey,
    connector: bool,
) -> Result<StreamKeys> {
    let public = UnparsedPublicKey::new(&X25519, public);
    let both = agree_ephemeral(private, &public, |shared| {
        ["connector", "acceptor"]
            .map(|from| keys::derive(shared, session, &format!("records of the {from}")))
    });
    let no_point = |_| {
        Error::new(
            ErrorKind::Remote,
            "the peer's public key is no point of X25519",
        )
    };
    let [from_connector, from_acceptor] = both.map_err(no_point)?;
    Ok(match connector {
        true => StreamKeys {
            sending: from_connector,
            receiving: from_acceptor,
        },
        false => StreamKeys {
            sending: from_acceptor,
            receiving: from_connector,
        },
    })
}

/// Returns whether a system call can be repeated later. A socket that is still connecting reports
/// that it is not connected.
fn is_pending(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::NotConnected
    )
}
