//! A channel between this rank's kernels and a rank on another host, as the proxy serves it. The proxy moves
//! messages, in both directions, between peer buffers in pinned memory and a connection of a host transport.

use super::message_cursor::{MessageCursor, MessageDirection, MessageSizesCache};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{StagedRecv, StagedSend};
use crate::transport::{self, Header, RecvEnd, SendEnd};
use crate::types::CallSignature;
use std::time::Instant;

/// A channel to a rank on another host, with the state of both directions.
#[derive(Debug)]
pub(super) struct ProxyChannel {
    peer: usize,
    /// The peer with its host and process, for errors.
    name: String,
    /// Messages from this rank's kernels. The next two fields are the connection to the peer, and
    /// the position in the kernels' call.
    outgoing: StagedSend,
    send: Box<dyn SendEnd>,
    sending: MessageCursor,
    /// Header of the message that is being sent, possibly in parts.
    send_header: Option<Header>,
    /// Whether sent bytes may still be in this process.
    unflushed: bool,
    /// Messages to this rank's kernels. The next two fields are the connection from the peer, and
    /// the position in the peer's call.
    incoming: StagedRecv,
    recv: Box<dyn RecvEnd>,
    receiving: MessageCursor,
    /// Header of the message that is being received, possibly in parts.
    recv_header: Option<Header>,
    /// Whether messages carry the CRC-32C of their payload.
    checks_data: bool,
    /// Time and cause of a break of the connection: first for sending, then for receiving. `None`
    /// while the connection works.
    breaks: [Option<(Instant, Error)>; 2],
}

const SEND: usize = 0;
const RECV: usize = 1;

impl ProxyChannel {
    pub fn new(
        (peer, name, channel): (usize, String, usize),
        (outgoing, incoming): (StagedSend, StagedRecv),
        (send, recv): (Box<dyn SendEnd>, Box<dyn RecvEnd>),
        checks_data: bool,
    ) -> ProxyChannel {
        ProxyChannel {
            peer,
            name,
            outgoing,
            send,
            sending: MessageCursor::new(MessageDirection::ToPeer, peer, channel),
            send_header: None,
            unflushed: false,
            incoming,
            recv,
            receiving: MessageCursor::new(MessageDirection::FromPeer, peer, channel),
            recv_header: None,
            checks_data,
            breaks: [None, None],
        }
    }

    /// Returns the rank on the other host.
    pub fn peer(&self) -> usize {
        self.peer
    }

    /// Moves all messages that can move; returns whether any message moved.
    ///
    /// # Errors
    /// Mismatch, naming the peer, if a message is not in the peer's call; internal if kernels deviate from
    /// their schedule. A broken connection is reported by [`ProxyChannel::broken`] instead.
    pub fn progress(&mut self, message_sizes: &mut MessageSizesCache) -> Result<bool> {
        Ok(self.carry_out(message_sizes)? | self.carry_in(message_sizes)?)
    }

    /// Returns whether messages of kernels, or parts of them, are still in this process.
    ///
    /// # Errors
    /// See [`StagedSend::ready`].
    pub fn has_pending(&self) -> Result<bool> {
        Ok(self.unflushed || self.outgoing.ready()?)
    }

    /// Returns time and cause of the break if a broken connection is still needed. Pending messages need the
    /// send side; kernels that `may_wait` need both sides.
    ///
    /// # Errors
    /// See [`ProxyChannel::has_pending`].
    pub fn broken(&self, may_wait: bool) -> Result<Option<&(Instant, Error)>> {
        let [send, recv] = &self.breaks;
        Ok(match send {
            Some(broken) if may_wait || self.has_pending()? => Some(broken),
            _ => recv.as_ref().filter(|_| may_wait),
        })
    }

    /// Sends the messages that kernels have published.
    fn carry_out(&mut self, message_sizes: &mut MessageSizesCache) -> Result<bool> {
        if self.breaks[SEND].is_some() {
            return Ok(false);
        }
        let mut moved = false;
        while self.outgoing.ready()? {
            let sent = self.send_next(message_sizes);
            if !self.catch_break(SEND, sent)? {
                break;
            }
            self.outgoing.release();
            self.send_header = None;
            (moved, self.unflushed) = (true, true);
        }
        if self.unflushed {
            let flushed = self.send.flushed();
            self.unflushed = !self.catch_break(SEND, flushed)?;
        }
        Ok(moved)
    }

    /// Sends the next message, or a part of it, from its slot. Returns whether the whole message was sent,
    /// which frees the slot.
    fn send_next(&mut self, message_sizes: &mut MessageSizesCache) -> Result<bool> {
        let has_slots = self.send.zero_copy().is_none();
        if has_slots && !self.send.ready()? {
            return Ok(false);
        }
        let header = match self.send_header {
            Some(header) => header,
            None => self.next_header(message_sizes)?,
        };
        let payload = self.outgoing.payload(header.bytes as usize);
        let header = match (self.checks_data, self.send_header) {
            (true, None) => Header {
                crc: crc32c::crc32c(payload),
                ..header
            },
            _ => header,
        };
        self.send_header = Some(header);
        if let Some(end) = self.send.zero_copy() {
            return end.send_from(header, payload);
        }
        self.send.slot()[..payload.len()].copy_from_slice(payload);
        self.send.publish(header);
        Ok(true)
    }

    /// Returns the header of the next message of the kernels' call.
    fn next_header(&mut self, message_sizes: &mut MessageSizesCache) -> Result<Header> {
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
            crc: 0,
        })
    }

    /// Delivers the peer's messages to kernels while slots are free.
    fn carry_in(&mut self, message_sizes: &mut MessageSizesCache) -> Result<bool> {
        let mut moved = false;
        while self.breaks[RECV].is_none() && self.incoming.ready()? {
            let received = self.recv_next(message_sizes);
            if !self.catch_break(RECV, received)? {
                break;
            }
            let signature = self.recv_header.take().unwrap_or_default().signature;
            self.incoming.publish(signature);
            moved = true;
        }
        Ok(moved)
    }

    /// Receives the next message, or a part of it, into a free slot. Returns whether the message is complete.
    fn recv_next(&mut self, message_sizes: &mut MessageSizesCache) -> Result<bool> {
        let header = match self.recv_header {
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
        self.recv_header = Some(header);
        let slot = self.incoming.slot(header.bytes as usize);
        let complete = match self.recv.zero_copy() {
            Some(end) => end.recv_into(slot)?,
            None => {
                slot.copy_from_slice(&self.recv.payload()[..slot.len()]);
                self.recv.release();
                true
            }
        };
        if complete && self.checks_data {
            let found = crc32c::crc32c(slot);
            if found != header.crc {
                return Err(transport::damaged(&self.name, "a network", &header, found));
            }
        }
        Ok(complete)
    }

    /// Checks that the next message of the peer's call has this length.
    fn check(&mut self, header: &Header, message_sizes: &mut MessageSizesCache) -> Result<()> {
        let (bytes, room) = (header.bytes as usize, self.incoming.slot_bytes());
        let expected = self.receiving.expect(header.signature, message_sizes)?;
        if bytes == expected && bytes <= room {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "{} sent {bytes} bytes for a message of {} that has {expected}, in a slot of \
                 {room}",
                self.name,
                CallSignature::describe(&header.signature)
            ),
        ))
    }

    /// Returns `result`, but turns the error of a broken connection into false and stores it.
    fn catch_break(&mut self, direction: usize, result: Result<bool>) -> Result<bool> {
        result.or_else(|error| match error.kind() {
            ErrorKind::Remote => {
                self.breaks[direction] = Some((Instant::now(), error));
                Ok(false)
            }
            _ => Err(error),
        })
    }
}

#[cfg(test)]
mod tests;
