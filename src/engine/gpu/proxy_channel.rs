//! One channel between this rank's kernels and those of a rank on another host, as the proxy serves
//! it: both directions, between boxes in pinned memory and a connection of a host transport.

use super::message_cursor::{Direction, MessageCursor, MessageSizesCache};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{StagedRecv, StagedSend};
use crate::transport::{Header, RecvEnd, SendEnd};
use crate::types::CallSignature;
use std::time::Instant;

/// A channel to and from one peer.
#[derive(Debug)]
pub(super) struct ProxyChannel {
    peer: usize,
    /// What kernels send, where it goes, and where in their call they are.
    outgoing: StagedSend,
    send: Box<dyn SendEnd>,
    sending: MessageCursor,
    /// Header of the message that is on its way out, from the box itself.
    leaving: Option<Header>,
    /// Whether something that was sent may still be in this process.
    unflushed: bool,
    /// What came, where kernels look for it, and where in its call the peer is.
    incoming: StagedRecv,
    recv: Box<dyn RecvEnd>,
    receiving: MessageCursor,
    /// Header of the message that is on its way in, to the box itself.
    arriving: Option<Header>,
    /// Since when, and why, nothing can be sent, and nothing more will come.
    cut: [Option<(Instant, Error)>; 2],
}

const SEND: usize = 0;
const RECV: usize = 1;

impl ProxyChannel {
    pub fn new(
        (peer, channel): (usize, usize),
        (outgoing, incoming): (StagedSend, StagedRecv),
        (send, recv): (Box<dyn SendEnd>, Box<dyn RecvEnd>),
    ) -> ProxyChannel {
        ProxyChannel {
            peer,
            outgoing,
            send,
            sending: MessageCursor::new(Direction::ToPeer, peer, channel),
            leaving: None,
            unflushed: false,
            incoming,
            recv,
            receiving: MessageCursor::new(Direction::FromPeer, peer, channel),
            arriving: None,
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
    /// their schedule. A connection that breaks is no error yet: see [`ProxyChannel::cut`].
    pub fn turn(&mut self, message_sizes: &mut MessageSizesCache) -> Result<bool> {
        Ok(self.carry_out(message_sizes)? | self.carry_in(message_sizes)?)
    }

    /// Whether messages of kernels, or parts of them, are still to leave this process.
    ///
    /// # Errors
    /// As for [`StagedSend::ready`].
    pub fn has_pending(&self) -> Result<bool> {
        Ok(self.unflushed || self.outgoing.ready()?)
    }

    /// Since when, and why, this channel serves kernels no longer that wait for it, those that send, or
    /// that `may_wait`.
    ///
    /// # Errors
    /// As for [`ProxyChannel::has_pending`].
    pub fn cut(&self, may_wait: bool) -> Result<Option<&(Instant, Error)>> {
        let [send, recv] = &self.cut;
        Ok(match send {
            Some(cut) if may_wait || self.has_pending()? => Some(cut),
            _ => recv.as_ref().filter(|_| may_wait),
        })
    }

    fn carry_out(&mut self, message_sizes: &mut MessageSizesCache) -> Result<bool> {
        if self.cut[SEND].is_some() {
            return Ok(false);
        }
        let mut moved = false;
        while self.outgoing.ready()? {
            let left = self.pass_out(message_sizes);
            if !self.note(SEND, left)? {
                break;
            }
            self.outgoing.release();
            self.leaving = None;
            (moved, self.unflushed) = (true, true);
        }
        if self.unflushed {
            let flushed = self.send.flushed();
            self.unflushed = !self.note(SEND, flushed)?;
        }
        Ok(moved)
    }

    /// Sends the message that kernels have put into their box; whether all of it has left that.
    fn pass_out(&mut self, message_sizes: &mut MessageSizesCache) -> Result<bool> {
        let direct = self.send.zero_copy().is_some();
        if !direct && !self.send.ready()? {
            return Ok(false);
        }
        let header = match self.leaving {
            Some(header) => header,
            None => self.next_out(message_sizes)?,
        };
        self.leaving = Some(header);
        let payload = self.outgoing.payload(header.bytes as usize);
        if let Some(end) = self.send.zero_copy() {
            return end.send_from(header, payload);
        }
        self.send.slot()[..payload.len()].copy_from_slice(payload);
        self.send.publish(header);
        Ok(true)
    }

    fn next_out(&mut self, message_sizes: &mut MessageSizesCache) -> Result<Header> {
        let bytes = match self.sending.next() {
            Some(bytes) => bytes,
            None => self
                .sending
                .begin(self.outgoing.signature(), message_sizes)?,
        };
        let room = self.outgoing.slot_bytes();
        if bytes > room {
            return Err(Error::internal(format!(
                "a message of {bytes} bytes in a slot of {room}"
            )));
        }
        Ok(Header {
            bytes: bytes as u32,
            signature: self.sending.signature(),
        })
    }

    fn carry_in(&mut self, message_sizes: &mut MessageSizesCache) -> Result<bool> {
        let mut moved = false;
        while self.cut[RECV].is_none() && self.incoming.ready()? {
            let came = self.pass_in(message_sizes);
            if !self.note(RECV, came)? {
                break;
            }
            let signature = self.arriving.take().unwrap_or_default().signature;
            self.incoming.publish(signature);
            moved = true;
        }
        Ok(moved)
    }

    /// Brings the next message to the kernels' box; whether all of it is there.
    fn pass_in(&mut self, message_sizes: &mut MessageSizesCache) -> Result<bool> {
        let header = match self.arriving {
            Some(header) => header,
            None => {
                let header = match self.recv.zero_copy() {
                    Some(end) => end.expect()?,
                    None => self.recv.ready()?.then(|| self.recv.header()),
                };
                let Some(header) = header else {
                    return Ok(false);
                };
                self.check(&header, message_sizes)?;
                header
            }
        };
        self.arriving = Some(header);
        let place = self.incoming.slot(header.bytes as usize);
        if let Some(end) = self.recv.zero_copy() {
            return end.recv_into(place);
        }
        place.copy_from_slice(&self.recv.payload()[..place.len()]);
        self.recv.release();
        Ok(true)
    }

    /// Whether the peer's call has a message of this length next.
    fn check(&mut self, header: &Header, message_sizes: &mut MessageSizesCache) -> Result<()> {
        let (bytes, room) = (header.bytes as usize, self.incoming.slot_bytes());
        let expected = self.receiving.expect(header.signature, message_sizes)?;
        if bytes == expected && bytes <= room {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "rank {} sent {bytes} bytes for a message of {} that has {expected}, in a slot of \
                 {room}",
                self.peer,
                CallSignature::describe(&header.signature)
            ),
        ))
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
#[path = "proxy_channel_tests.rs"]
mod tests;
