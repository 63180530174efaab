//! Two ends of a new socket prove to each other that they know the communicator's key, and agree
//! which link the socket is. Nothing else is read before that: 128 bytes by the acceptor, 129 by
//! the connector.
//!
//! ```text
//! connector -> acceptor: hello (96 bytes)
//! acceptor -> connector: hello, HMAC-SHA256(key, "acceptor" | both hellos)
//! connector -> acceptor: HMAC-SHA256(key, "connector" | both hellos)
//! acceptor -> connector: one byte, welcome
//! ```
//! Each hello holds a fresh nonce, so nothing that was overheard is of use later. The welcome
//! says that the acceptor has read the proof: it drops who is late or displaced by strangers, and
//! a connector that took its socket for good before would never come again.

use super::mesh::Link;
use crate::error::{Error, Result};
use crate::sys::socket;
use crate::types::FORMAT_VERSION;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;

const MAGIC: &[u8; 8] = b"cinchlnk";
const HELLO: usize = 96;
const PROOF: usize = 32;
const WELCOME: u8 = 6;

/// Whether a handshake goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Waits until the socket can be read, or written if the flag is set.
    Pending { write: bool },
    /// Both sides are who they say they are.
    Done,
}

/// One side of a handshake.
pub(super) struct Handshake<'a> {
    key: &'a [u8; 32],
    me: usize,
    /// The link that a connector opens; an acceptor learns it.
    link: Option<Link>,
    accepts: bool,
    own: [u8; HELLO],
    incoming: [u8; HELLO + PROOF + 1],
    received: usize,
    outgoing: Vec<u8>,
    sent: usize,
    /// The other side has shown its proof.
    proven: bool,
}

impl<'a> Handshake<'a> {
    /// The side that connected, to open `link`.
    pub fn connector(key: &'a [u8; 32], me: usize, link: Link) -> Result<Handshake<'a>> {
        let own = hello(me, link)?;
        Ok(Handshake {
            key,
            me,
            link: Some(link),
            accepts: false,
            own,
            incoming: [0; HELLO + PROOF + 1],
            received: 0,
            outgoing: own.to_vec(),
            sent: 0,
            proven: false,
        })
    }

    /// The side that was connected to.
    pub fn acceptor(key: &'a [u8; 32], me: usize) -> Handshake<'a> {
        Handshake {
            key,
            me,
            link: None,
            accepts: true,
            own: [0; HELLO],
            incoming: [0; HELLO + PROOF + 1],
            received: 0,
            outgoing: Vec::new(),
            sent: 0,
            proven: false,
        }
    }

    /// The link, once it is known. Trust it when the handshake is done.
    pub fn link(&self) -> Option<Link> {
        self.link
    }

    /// Goes on as far as the socket allows.
    ///
    /// # Errors
    /// What the system says; invalid data if the other side is not a rank of ours.
    pub fn advance(&mut self, socket: &OwnedFd) -> io::Result<Progress> {
        loop {
            while self.sent < self.outgoing.len() {
                match socket::write(socket, &[IoSlice::new(&self.outgoing[self.sent..])]) {
                    Ok(count) => self.sent += count,
                    Err(error) if waits(&error) => return Ok(Progress::Pending { write: true }),
                    Err(error) => return Err(error),
                }
            }
            // Not a byte more than is due: what follows belongs to the link.
            let due = match (self.accepts, self.proven) {
                (true, true) => return Ok(Progress::Done),
                (true, false) if self.link.is_none() => HELLO,
                (_, false) => HELLO + PROOF,
                (false, true) => HELLO + PROOF + 1,
            };
            if self.received == due {
                return match self.incoming[due - 1] {
                    WELCOME => Ok(Progress::Done),
                    _ => Err(stranger()),
                };
            }
            let mut parts = [IoSliceMut::new(&mut self.incoming[self.received..due])];
            match socket::read(socket, &mut parts) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received += count,
                Err(error) if waits(&error) => return Ok(Progress::Pending { write: false }),
                Err(error) => return Err(error),
            }
            match self.received {
                HELLO if self.accepts && self.link.is_none() => self.greet()?,
                count if count == HELLO + PROOF => self.verify()?,
                _ => {}
            }
        }
    }

    fn greet(&mut self) -> io::Result<()> {
        let link = parse(&self.incoming[..HELLO], self.me).ok_or_else(stranger)?;
        self.link = Some(link);
        self.own = hello(self.me, link).map_err(|_| io::Error::other("no randomness"))?;
        self.outgoing.extend_from_slice(&self.own);
        let proof = self.proof("acceptor").finalize().into_bytes();
        self.outgoing.extend_from_slice(&proof);
        Ok(())
    }

    fn verify(&mut self) -> io::Result<()> {
        let whose = if self.accepts {
            "connector"
        } else {
            "acceptor"
        };
        let known = parse(&self.incoming[..HELLO], self.me);
        // Constant time: the comparison tells nothing about where a guess went wrong.
        let proof = self
            .proof(whose)
            .verify_slice(&self.incoming[HELLO..HELLO + PROOF]);
        if known != self.link || proof.is_err() {
            return Err(stranger());
        }
        if self.accepts {
            self.outgoing.push(WELCOME);
        } else {
            let proof = self.proof("connector").finalize().into_bytes();
            self.outgoing.extend_from_slice(&proof);
        }
        self.proven = true;
        Ok(())
    }

    fn proof(&self, whose: &str) -> Hmac<Sha256> {
        let their = &self.incoming[..HELLO];
        let (first, second) = if self.accepts {
            (their, &self.own[..])
        } else {
            (&self.own[..], their)
        };
        let mut proof = keyed(self.key);
        proof.update(whose.as_bytes());
        proof.update(first);
        proof.update(second);
        proof
    }
}

fn keyed(key: &[u8; 32]) -> Hmac<Sha256> {
    // HMAC pads keys with zeros to a block; done here because this way nothing can fail.
    let mut block = [0; 64];
    block[..32].copy_from_slice(key);
    <Hmac<Sha256> as KeyInit>::new(&block.into())
}

fn waits(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::NotConnected
    )
}

fn stranger() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "not a rank of this communicator",
    )
}

/// `me` greets the peer of `link`.
fn hello(me: usize, link: Link) -> Result<[u8; HELLO]> {
    let mut hello = [0; HELLO];
    hello[..8].copy_from_slice(MAGIC);
    hello[8] = FORMAT_VERSION;
    hello[12..16].copy_from_slice(&(me as u32).to_le_bytes());
    hello[16..20].copy_from_slice(&(link.peer as u32).to_le_bytes());
    hello[20..24].copy_from_slice(&(link.channel as u32).to_le_bytes());
    hello[24..28].copy_from_slice(&(link.socket as u32).to_le_bytes());
    getrandom::fill(&mut hello[64..])
        .map_err(|error| Error::internal(format!("no random numbers: {error}")))?;
    Ok(hello)
}

/// The link that a greeting to `me` is about, from `me`'s side.
fn parse(hello: &[u8], me: usize) -> Option<Link> {
    let word = |at: usize| {
        let bytes = hello[at..at + 4].try_into().unwrap_or_default();
        u32::from_le_bytes(bytes) as usize
    };
    let ours = hello[..8] == *MAGIC && hello[8] == FORMAT_VERSION && word(16) == me;
    ours.then(|| Link {
        peer: word(12),
        channel: word(20),
        socket: word(24),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    const LINK: Link = Link {
        peer: 1,
        channel: 3,
        socket: 2,
    };

    fn sockets() -> (OwnedFd, OwnedFd) {
        let (one, two) = UnixStream::pair().unwrap();
        one.set_nonblocking(true).unwrap();
        two.set_nonblocking(true).unwrap();
        (one.into(), two.into())
    }

    /// Runs both sides; the first error of each.
    fn run<'a>(
        connector: &mut Handshake<'a>,
        acceptor: &mut Handshake<'a>,
    ) -> [io::Result<bool>; 2] {
        let (here, there) = sockets();
        let mut ends = [Ok(false), Ok(false)];
        for _ in 0..10 {
            for (end, side, socket) in [(0, &mut *connector, &here), (1, &mut *acceptor, &there)] {
                if let Ok(false) = ends[end] {
                    ends[end] = side
                        .advance(socket)
                        .map(|progress| progress == Progress::Done);
                }
            }
        }
        ends
    }

    #[test]
    fn ranks_that_share_the_key_agree_on_the_link() {
        let key = [7; 32];
        let mut connector = Handshake::connector(&key, 0, LINK).unwrap();
        let mut acceptor = Handshake::acceptor(&key, 1);
        for end in run(&mut connector, &mut acceptor) {
            assert!(end.unwrap());
        }
        let link = Link { peer: 0, ..LINK };
        assert_eq!(acceptor.link(), Some(link));
    }

    #[test]
    fn another_key_or_rank_proves_nothing() {
        for (key, me) in [([8; 32], 1), ([7; 32], 2)] {
            let mut connector = Handshake::connector(&[7; 32], 0, LINK).unwrap();
            let mut acceptor = Handshake::acceptor(&key, me);
            let [here, there] = run(&mut connector, &mut acceptor);
            assert!(!matches!(here, Ok(true)) && !matches!(there, Ok(true)));
        }
    }

    #[test]
    fn a_mirror_proves_nothing() {
        // Whoever sends back what it gets, as a man in the middle without the key could.
        let key = [7; 32];
        let mut connector = Handshake::connector(&key, 1, LINK).unwrap();
        let (here, there) = sockets();
        let mut outcome = Ok(Progress::Pending { write: false });
        for _ in 0..10 {
            let mut bytes = [0; 200];
            outcome = connector.advance(&here);
            if outcome.is_err() {
                break;
            }
            let mut parts = [IoSliceMut::new(&mut bytes)];
            if let Ok(count) = socket::read(&there, &mut parts) {
                socket::write(&there, &[IoSlice::new(&bytes[..count])]).unwrap();
                socket::write(&there, &[IoSlice::new(&bytes[..PROOF])]).unwrap();
            }
        }
        assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_connector_is_done_with_its_welcome_and_not_before() {
        let key = [7; 32];
        for (welcome, right) in [(&[][..], false), (&[WELCOME], true), (b"x", false)] {
            let (here, there) = sockets();
            let mut connector = Handshake::connector(&key, 0, LINK).unwrap();
            let mut acceptor = Handshake::acceptor(&key, 1);
            let waits = Progress::Pending { write: false };
            assert_eq!(connector.advance(&here).unwrap(), waits);
            assert_eq!(acceptor.advance(&there).unwrap(), waits);
            // Its proof goes, and nobody has read it yet.
            assert_eq!(connector.advance(&here).unwrap(), waits);
            if !welcome.is_empty() {
                socket::write(&there, &[IoSlice::new(welcome)]).unwrap();
            }
            drop(there);
            match connector.advance(&here) {
                Ok(progress) => assert!(right && progress == Progress::Done),
                // Ends are tried again; whoever says something else is none of ours.
                Err(error) => {
                    let ended = error.kind() != io::ErrorKind::InvalidData;
                    assert!(!right && ended == welcome.is_empty(), "{error}");
                }
            }
        }
    }

    #[test]
    fn garbage_is_dropped_after_96_bytes() {
        let key = [7; 32];
        let mut acceptor = Handshake::acceptor(&key, 1);
        let (here, there) = sockets();
        socket::write(&here, &[IoSlice::new(&[65; 1000])]).unwrap();
        let error = acceptor.advance(&there).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(acceptor.received, 96);
    }
}
