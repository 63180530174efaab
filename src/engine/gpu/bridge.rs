//! One lane between this rank's kernels and those of a rank on another host, as the proxy serves
//! it: both directions, between boxes in pinned memory and a connection of a host transport.

use super::course::{Courses, Follower, Way};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{StagedRecv, StagedSend};
use crate::transport::{Header, RecvEnd, SendEnd};
use crate::types::CallSignature;
use std::time::Instant;

/// A lane to and from one peer.
#[derive(Debug)]
pub(super) struct Bridge {
    peer: usize,
    /// What kernels send, where it goes, and where in their call they are.
    outgoing: StagedSend,
    send: Box<dyn SendEnd>,
    sending: Follower,
    /// Whether something that was sent may still be in this process.
    unflushed: bool,
    /// What came, where kernels look for it, and where in its call the peer is.
    incoming: StagedRecv,
    recv: Box<dyn RecvEnd>,
    receiving: Follower,
    /// Since when, and why, nothing can be sent, and nothing more will come.
    cut: [Option<(Instant, Error)>; 2],
}

const SEND: usize = 0;
const RECV: usize = 1;

impl Bridge {
    pub fn new(
        (peer, lane): (usize, usize),
        (outgoing, incoming): (StagedSend, StagedRecv),
        (send, recv): (Box<dyn SendEnd>, Box<dyn RecvEnd>),
    ) -> Bridge {
        Bridge {
            peer,
            outgoing,
            send,
            sending: Follower::new(Way::ToPeer, peer, lane),
            unflushed: false,
            incoming,
            recv,
            receiving: Follower::new(Way::FromPeer, peer, lane),
            cut: [None, None],
        }
    }

    /// The rank at the other end.
    pub fn peer(&self) -> usize {
        self.peer
    }

    /// Carries what can be carried; whether anything was.
    ///
    /// # Errors
    /// Mismatch, naming the peer, if it sent what its call has not; internal if kernels have left
    /// their schedule. A connection that breaks is no error yet: see [`Bridge::cut`].
    pub fn turn(&mut self, courses: &mut Courses) -> Result<bool> {
        Ok(self.carry_out(courses)? | self.carry_in(courses)?)
    }

    /// Whether messages of kernels, or parts of them, are still to leave this process.
    ///
    /// # Errors
    /// As for [`StagedSend::ready`].
    pub fn is_laden(&self) -> Result<bool> {
        Ok(self.unflushed || self.outgoing.ready()?)
    }

    /// Since when, and why, this lane serves kernels no longer that wait for it, those that send, or
    /// that `may_wait`.
    ///
    /// # Errors
    /// As for [`Bridge::is_laden`].
    pub fn cut(&self, may_wait: bool) -> Result<Option<&(Instant, Error)>> {
        let [send, recv] = &self.cut;
        Ok(match send {
            Some(cut) if may_wait || self.is_laden()? => Some(cut),
            _ => recv.as_ref().filter(|_| may_wait),
        })
    }

    fn carry_out(&mut self, courses: &mut Courses) -> Result<bool> {
        if self.cut[SEND].is_some() {
            return Ok(false);
        }
        let mut moved = false;
        while self.outgoing.ready()? {
            let ready = self.send.ready();
            if !self.note(SEND, ready)? {
                break;
            }
            let bytes = match self.sending.next() {
                Some(bytes) => bytes,
                None => self.sending.begin(self.outgoing.signature(), courses)?,
            };
            let slot = self.send.slot();
            let room = slot.len().min(self.outgoing.slot_bytes());
            if bytes > room {
                return Err(Error::internal(format!(
                    "a message of {bytes} bytes in a slot of {room}"
                )));
            }
            slot[..bytes].copy_from_slice(self.outgoing.payload(bytes));
            self.outgoing.release();
            self.send.publish(Header {
                bytes: bytes as u32,
                signature: self.sending.signature(),
            });
            (moved, self.unflushed) = (true, true);
        }
        if self.unflushed {
            let flushed = self.send.flushed();
            self.unflushed = !self.note(SEND, flushed)?;
        }
        Ok(moved)
    }

    fn carry_in(&mut self, courses: &mut Courses) -> Result<bool> {
        let mut moved = false;
        while self.cut[RECV].is_none() && self.incoming.ready()? {
            let ready = self.recv.ready();
            if !self.note(RECV, ready)? {
                break;
            }
            let header = self.recv.header();
            let (bytes, room) = (header.bytes as usize, self.incoming.slot_bytes());
            let expected = self.receiving.expect(header.signature, courses)?;
            if bytes != expected || bytes > room {
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    format!(
                        "rank {} sent {bytes} bytes for a message of {} that has {expected}, in a \
                         slot of {room}",
                        self.peer,
                        CallSignature::describe(&header.signature)
                    ),
                ));
            }
            let payload = self.recv.payload();
            self.incoming.slot(bytes).copy_from_slice(&payload[..bytes]);
            self.recv.release();
            self.incoming.publish(header.signature);
            moved = true;
        }
        Ok(moved)
    }

    /// Remembers a connection that broke; false then.
    fn note(&mut self, direction: usize, result: Result<bool>) -> Result<bool> {
        result.or_else(|error| match error.kind() {
            ErrorKind::Remote => {
                self.cut[direction] = Some((Instant::now(), error));
                Ok(false)
            }
            _ => Err(error),
        })
    }
}

#[cfg(test)]
#[path = "bridge_tests.rs"]
mod tests;
