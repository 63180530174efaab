//! The pump of one pair on one channel, which carries slots through sockets in both directions.
//!
//! The ends of a connection work on FIFOs in this process; the pump is the other end of both FIFOs.
//! Message m goes over socket m % k: its frame, then its payload. The pump reads a socket only while it has
//! free slots. Other messages wait in the kernel, and finally at the sender.
//!
//! Payloads move between slot and kernel without a further copy. A zero-copy message moves between the
//! caller's memory and the kernel, and takes the number of a slot but not the slot.

use super::super::frame::{FRAME, decode, encode};
use crate::bootstrap::peer_stream::PeerStream;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{Consumer, Header, Producer};
use crate::sys::socket::{self, Interest};
use std::io::{self, IoSlice, IoSliceMut};
use std::time::Duration;

/// Longest time without an acknowledgement from a host that has data to acknowledge.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(3);

/// The connection between this rank and one peer on one channel, in both directions.
#[derive(Debug)]
pub(super) struct Pump {
    /// The peer, as errors name it.
    who: Box<str>,
    sockets: Vec<Socket>,
    slot_bytes: usize,
    /// Messages that the sending end has published.
    outgoing: Consumer,
    /// Whether the kernel has taken the whole message, by message number modulo depth.
    left: Vec<bool>,
    /// Messages for the receiving end.
    incoming: Producer,
    /// Header of a whole message that must wait for earlier ones, by message number modulo depth.
    arrived: Vec<Option<Header>>,
    /// Number of the message that the caller is sending from its memory by repeated calls.
    lent: Option<u64>,
    /// Whether the caller is receiving the next message into its memory by repeated calls. Nothing else reads
    /// meanwhile.
    claimed: bool,
    /// The first failure of a socket.
    broken: Option<Error>,
}

#[derive(Debug)]
struct Socket {
    stream: PeerStream,
    /// Number of the message to send next, or in progress.
    out_message: u64,
    /// Bytes of that message that the kernel has, frame included.
    out_at: usize,
    /// Number of the message to receive next, or in progress.
    in_message: u64,
    /// Header of that message, once it has arrived.
    in_header: Option<Header>,
    /// Payload bytes of that message that have arrived.
    in_at: usize,
    /// Whether that payload is in the caller's memory instead of the slot.
    in_place: bool,
    /// Bytes of the next frame that have arrived.
    frame: [u8; FRAME],
    frame_at: usize,
    /// Whether the peer has closed the socket, or the socket is broken.
    closed: bool,
}

/// Result of reading a socket once.
enum Read {
    /// The kernel may have more.
    More,
    /// The kernel has nothing more, or no slot is free.
    Nothing,
}

impl Pump {
    /// Creates a pump that sends `outgoing` and fills `incoming` over `sockets`.
    pub fn new(
        who: &str,
        sockets: Vec<PeerStream>,
        slot_bytes: usize,
        depth: usize,
        outgoing: Consumer,
        incoming: Producer,
    ) -> Pump {
        let sockets = sockets
            .into_iter()
            .enumerate()
            .map(|(index, stream)| Socket {
                stream,
                out_message: index as u64,
                out_at: 0,
                in_message: index as u64,
                in_header: None,
                in_at: 0,
                in_place: false,
                frame: [0; FRAME],
                frame_at: 0,
                closed: false,
            })
            .collect();
        Pump {
            who: who.into(),
            sockets,
            slot_bytes,
            outgoing,
            left: vec![false; depth],
            incoming,
            arrived: vec![None; depth],
            lent: None,
            claimed: false,
            broken: None,
        }
    }

    /// Returns the failure of the connection, if it has failed.
    ///
    /// # Errors
    /// Remote, naming the peer; mismatch if the peer sent an impossible frame.
    pub fn broken(&self) -> Result<()> {
        match &self.broken {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Returns whether the kernel has all published messages.
    pub fn drained(&mut self) -> Result<bool> {
        let has_unsent = |socket: &Socket| socket.stream.has_unsent();
        Ok(self.outgoing.available()? == 0 && !self.sockets.iter().any(has_unsent))
    }

    /// Writes as many messages as the kernel takes.
    pub fn send(&mut self) {
        if self.broken.is_none()
            && let Err(error) = self.send_all()
        {
            self.broken = Some(error);
        }
    }

    /// Reads arrived messages into free slots: from all sockets if `all` is set, else from the socket of the
    /// next message. While the next message is claimed, a call with `all` reads nothing.
    pub fn receive(&mut self, all: bool) {
        let next = self.next();
        if self.sockets[next].in_place || all && self.claimed {
            return;
        }
        self.claimed = false;
        for index in if all {
            0..self.sockets.len()
        } else {
            next..next + 1
        } {
            if !self.sockets[index].closed
                && let Err(error) = self.receive_on(index)
            {
                self.close(index, error);
            }
        }
        self.publish_arrived();
    }

    /// Returns whether the socket of the next message has ended.
    pub fn ended(&self) -> bool {
        self.sockets[self.next()].closed
    }

    /// Returns whether a message from the caller's memory is in progress.
    pub fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// Writes as much as the kernel takes of message `number`, the next one, whose payload lies in no slot.
    /// Returns true once the kernel has all of it; the caller then publishes it and calls [`Pump::settle`].
    ///
    /// # Errors
    /// Remote, naming the peer, if the connection broke.
    pub fn send_from(&mut self, number: u64, header: &Header, payload: &[u8]) -> Result<bool> {
        let count = self.sockets.len() as u64;
        let socket = &mut self.sockets[(number % count) as usize];
        if socket.out_message != number {
            // Earlier messages of this socket are not written yet.
            return Ok(false);
        }
        self.lent = Some(number);
        let written = socket.write(&self.who, header, payload);
        written.inspect_err(|error| self.broken = Some(error.clone()))
    }

    /// Counts the message of [`Pump::send_from`] as sent, after the caller has published it.
    ///
    /// # Errors
    /// As for [`Consumer::available`].
    pub fn settle(&mut self) -> Result<()> {
        let (count, depth) = (self.sockets.len() as u64, self.left.len() as u64);
        if let Some(number) = self.lent.take() {
            self.outgoing.available()?;
            self.sockets[(number % count) as usize].out_message += count;
            self.left[(number % depth) as usize] = true;
            self.release_left();
        }
        Ok(())
    }

    /// Claims the next message for the caller's memory; returns its header once the frame has arrived. The
    /// message must not be in a slot as a whole.
    ///
    /// # Errors
    /// As for [`Pump::broken`], if the socket has ended.
    pub fn expect(&mut self) -> Result<Option<Header>> {
        self.claimed = true;
        let index = self.next();
        if !self.sockets[index].closed && self.sockets[index].in_header.is_none() {
            let free = self.incoming.free()? as u64;
            if let Err(error) = self.receive_frame(index, free) {
                self.close(index, error);
            }
        }
        if self.sockets[index].closed {
            self.broken()?;
        }
        Ok(self.sockets[index].in_header)
    }

    /// Reads the message that [`Pump::expect`] found into `place`, as far as it has arrived. Returns true, and
    /// publishes the message, once all of it is there.
    ///
    /// # Errors
    /// As for [`Pump::broken`], if the socket has ended; internal if no message was found.
    pub fn recv_into(&mut self, place: &mut [u8]) -> Result<bool> {
        let index = self.next();
        let free = self.incoming.free()? as u64;
        let socket = &mut self.sockets[index];
        let Some(header) = socket.in_header else {
            return Err(Error::internal("no message was expected"));
        };
        assert_eq!(
            place.len(),
            header.bytes as usize,
            "a place of another length"
        );
        if !socket.in_place {
            let came = socket.in_at;
            place[..came].copy_from_slice(&self.incoming.slot(0)[..came]);
            socket.in_place = true;
        }
        let along = (self.sockets.len() as u64) < free;
        if let Err(error) = self.sockets[index].read(&self.who, place, along) {
            self.close(index, error);
        }
        let socket = &mut self.sockets[index];
        if socket.in_at < place.len() {
            return match socket.closed {
                true => self.broken().map(|()| false),
                false => Ok(false),
            };
        }
        self.end_message(index, header);
        self.claimed = false;
        self.publish_arrived();
        Ok(true)
    }

    /// Appends the sockets to wait for: open sockets that have a free slot or something to write.
    ///
    /// # Errors
    /// Mismatch if a counter of a FIFO is impossible.
    pub fn interests(&mut self, interests: &mut Vec<Interest>) -> Result<()> {
        let free = self.incoming.free()? as u64;
        let waiting = self.outgoing.available()? as u64;
        for socket in &self.sockets {
            let ahead = socket.in_message - self.incoming.published();
            let read = ahead < if self.claimed { 1 } else { free };
            let sends = socket.out_message - self.outgoing.released() < waiting
                || socket.stream.has_unsent();
            let write = self.broken.is_none() && (sends || self.lent == Some(socket.out_message));
            if !socket.closed && (read || write) {
                interests.push(socket::interest(socket.stream.socket(), read, write));
            }
        }
        Ok(())
    }

    /// Breaks the connection if the peer's host has stopped answering, which the kernel reports only after
    /// minutes.
    pub fn check_peer(&mut self) {
        for socket in self.sockets.iter_mut().filter(|socket| !socket.closed) {
            if let Some(silence) = socket::unacknowledged_time(socket.stream.socket())
                && silence >= SILENCE_TIMEOUT
            {
                socket.closed = true;
                self.broken.get_or_insert_with(|| {
                    Error::new(
                        ErrorKind::Remote,
                        format!(
                            "the host of {} has answered nothing for {:.1} s: it is down or cut off",
                            self.who,
                            silence.as_secs_f64()
                        ),
                    )
                });
            }
        }
    }

    fn send_all(&mut self) -> Result<()> {
        for socket in &mut self.sockets {
            let flushed = socket.stream.flush();
            flushed.map_err(|error| lost(&self.who, &error))?;
        }
        let waiting = self.outgoing.available()? as u64;
        if waiting == 0 {
            return Ok(());
        }
        let (count, depth) = (self.sockets.len() as u64, self.left.len() as u64);
        let first = self.outgoing.released();
        for socket in &mut self.sockets {
            while socket.out_message - first < waiting {
                let number = socket.out_message;
                let (header, payload) = self.outgoing.message((number - first) as usize)?;
                if !socket.write(&self.who, &header, payload)? {
                    break;
                }
                socket.out_message += count;
                self.left[(number % depth) as usize] = true;
            }
        }
        self.release_left();
        Ok(())
    }

    /// Releases the slots of written messages, up to the first message that is not written.
    fn release_left(&mut self) {
        let depth = self.left.len() as u64;
        while std::mem::take(&mut self.left[(self.outgoing.released() % depth) as usize]) {
            self.outgoing.release();
        }
    }

    /// Returns the index of the socket that carries the next message to receive.
    fn next(&self) -> usize {
        (self.incoming.published() % self.sockets.len() as u64) as usize
    }

    fn close(&mut self, index: usize, error: Error) {
        self.sockets[index].closed = true;
        self.broken.get_or_insert(error);
    }

    /// Notes that a socket has received a whole message.
    fn end_message(&mut self, index: usize, header: Header) {
        let (count, depth) = (self.sockets.len() as u64, self.arrived.len() as u64);
        let socket = &mut self.sockets[index];
        self.arrived[(socket.in_message % depth) as usize] = Some(header);
        (socket.in_header, socket.in_place) = (None, false);
        socket.in_message += count;
    }

    /// Publishes whole messages, up to the first message that is not whole.
    fn publish_arrived(&mut self) {
        let depth = self.arrived.len() as u64;
        while let Some(header) = self.arrived[(self.incoming.published() % depth) as usize].take() {
            self.incoming.publish(header);
        }
    }

    fn receive_on(&mut self, index: usize) -> Result<()> {
        loop {
            let free = self.incoming.free()? as u64;
            match self.sockets[index].in_header {
                None => match self.receive_frame(index, free)? {
                    Read::More => {}
                    Read::Nothing => return Ok(()),
                },
                Some(header) => match self.receive_payload(index, header, free)? {
                    Read::More => {}
                    Read::Nothing => return Ok(()),
                },
            }
        }
    }

    fn receive_frame(&mut self, index: usize, free: u64) -> Result<Read> {
        let socket = &mut self.sockets[index];
        if socket.in_message - self.incoming.published() >= free {
            return Ok(Read::Nothing);
        }
        if socket.frame_at < FRAME {
            let room = FRAME - socket.frame_at;
            let mut parts = [IoSliceMut::new(&mut socket.frame[socket.frame_at..])];
            match read(&self.who, &mut socket.stream, &mut parts)? {
                None => return Ok(Read::Nothing),
                Some(count) => {
                    socket.frame_at += count;
                    if count < room {
                        return Ok(Read::Nothing);
                    }
                }
            }
        }
        let header = decode(&self.who, &socket.frame, socket.in_message, self.slot_bytes)?;
        socket.in_header = Some(header);
        socket.in_at = 0;
        socket.frame_at = 0;
        Ok(Read::More)
    }

    fn receive_payload(&mut self, index: usize, header: Header, free: u64) -> Result<Read> {
        let count = self.sockets.len() as u64;
        let socket = &mut self.sockets[index];
        let ahead = socket.in_message - self.incoming.published();
        let bytes = header.bytes as usize;
        let payload = &mut self.incoming.slot(ahead as usize)[..bytes];
        let state = socket.read(&self.who, payload, ahead + count < free)?;
        if socket.in_at == bytes {
            self.end_message(index, header);
        }
        Ok(state)
    }
}

impl Socket {
    /// Writes as much of the next message as the kernel takes. Returns whether the kernel now has
    /// the whole message.
    fn write(&mut self, who: &str, header: &Header, payload: &[u8]) -> Result<bool> {
        let frame = encode(header, self.out_message);
        while self.out_at < FRAME + payload.len() {
            let parts = [
                IoSlice::new(&frame[self.out_at.min(FRAME)..]),
                IoSlice::new(&payload[self.out_at.saturating_sub(FRAME)..]),
            ];
            match self.stream.write(&parts) {
                Ok(written) => {
                    self.out_at += written;
                    // A short write means that the kernel is full, so another call would fail.
                    if self.out_at < FRAME + payload.len() {
                        return Ok(false);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(who, &error)),
            }
        }
        self.out_at = 0;
        Ok(true)
    }

    /// Reads as much of a message's payload as has arrived. With `along`, also reads the next frame, so that a
    /// message takes one system call.
    fn read(&mut self, who: &str, payload: &mut [u8], along: bool) -> Result<Read> {
        let missing = payload.len() - self.in_at;
        if missing == 0 {
            return Ok(Read::More);
        }
        let along = if along { FRAME } else { 0 };
        let mut parts = [
            IoSliceMut::new(&mut payload[self.in_at..]),
            IoSliceMut::new(&mut self.frame[..along]),
        ];
        let Some(got) = read(who, &mut self.stream, &mut parts)? else {
            return Ok(Read::Nothing);
        };
        self.in_at += got.min(missing);
        self.frame_at = got.saturating_sub(missing);
        // A short read means that the kernel has no more, so another call would find nothing.
        Ok(match got < missing + along {
            true => Read::Nothing,
            false => Read::More,
        })
    }
}

/// Reads from a socket. Returns `None` if nothing has arrived.
fn read(who: &str, from: &mut PeerStream, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>> {
    match from.read(parts) {
        Ok(0) => Err(Error::new(
            ErrorKind::Remote,
            format!("{who} closed its connection"),
        )),
        Ok(count) => Ok(Some(count)),
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
            _ => Err(lost(who, &error)),
        },
    }
}

#[cold]
fn lost(who: &str, error: &io::Error) -> Error {
    Error::new(
        ErrorKind::Remote,
        format!("the connection to {who} broke: {error}"),
    )
}

#[cfg(all(test, not(loom)))]
#[path = "pump_tests.rs"]
mod tests;
