//! The sockets of one pair on one channel, and what carries slots through them both ways.
//!
//! The ends of a connection work on FIFOs in this process, as threads do; the pump is the other
//! end of both. Message m goes over socket m % k: its frame, then its payload.
//! A socket is read only as far as there are free slots for what it brings; the rest waits in
//! the kernel, and in the end at the sender. Payloads go from slot to kernel and from kernel to
//! slot without a copy between; or from the memory of the caller and to it, which spares the copy
//! into a slot and out of one. Such a message takes the number of a slot, and its place in the
//! order, but not the slot.

use super::super::frame::{FRAME, decode, encode};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{Consumer, Header, Producer};
use crate::sys::socket::{self, Interest};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Silence of a host, with data on the way to it, that means that it is gone.
const SILENCE: Duration = Duration::from_secs(3);

/// Both directions between this rank and one peer on one channel.
#[derive(Debug)]
pub(super) struct Pump {
    /// The peer, as messages name it.
    who: Box<str>,
    sockets: Vec<Socket>,
    slot_bytes: usize,
    /// What the sending end has published.
    outgoing: Consumer,
    /// By message number modulo depth: whether it is whole in the kernel.
    left: Vec<bool>,
    /// Where the receiving end reads.
    incoming: Producer,
    /// By message number modulo depth: header of a message that is whole, but not the next.
    arrived: Vec<Option<Header>>,
    /// Number of the message that is on its way from the memory of the caller, who comes again.
    lent: Option<u64>,
    /// Whether the caller wants the next message in memory of its own, and comes again: what there
    /// is to read waits for that.
    claimed: bool,
    /// Why no more can be sent or received in this or another direction.
    broken: Option<Error>,
}

#[derive(Debug)]
struct Socket {
    socket: socket::Socket,
    /// Number of the message that it sends next or is sending.
    out_message: u64,
    /// Bytes of that frame that are in the kernel.
    out_at: usize,
    /// Number of the message that it receives next or is receiving.
    in_message: u64,
    /// Header of that message, once it is there.
    in_header: Option<Header>,
    /// Payload bytes of it that are there.
    in_at: usize,
    /// Whether they are in memory of the caller instead of the message's slot.
    in_place: bool,
    /// The next frame header, as far as it is there.
    frame: [u8; FRAME],
    frame_at: usize,
    /// The peer has closed it, or it is broken.
    closed: bool,
}

/// What reading a socket once led to.
enum Read {
    /// More may be there.
    More,
    /// Nothing more is there, or there is no slot for it.
    Nothing,
}

impl Pump {
    /// Carries `outgoing` away and `incoming` in over `sockets`.
    pub fn new(
        who: &str,
        sockets: Vec<socket::Socket>,
        slot_bytes: usize,
        depth: usize,
        outgoing: Consumer,
        incoming: Producer,
    ) -> Pump {
        let sockets = sockets
            .into_iter()
            .enumerate()
            .map(|(index, socket)| Socket {
                socket,
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

    /// Why the connection is of no more use, if it is not.
    pub fn broken(&self) -> Result<()> {
        match &self.broken {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Whether all that was published is in the kernel.
    pub fn drained(&mut self) -> Result<bool> {
        Ok(self.outgoing.available()? == 0)
    }

    /// Writes as much as the kernel takes.
    pub fn send(&mut self) {
        if self.broken.is_none()
            && let Err(error) = self.send_all()
        {
            self.broken = Some(error);
        }
    }

    /// Reads as much as there is and slots are free for: all sockets, unless what they bring is
    /// claimed, or the one that carries the next message.
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

    /// Whether the socket that carries the next message will bring nothing more.
    pub fn ended(&self) -> bool {
        self.sockets[self.next()].closed
    }

    /// Whether a message is on its way from the memory of the caller.
    pub fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// Writes as much as the kernel takes of message `number`, the next one, whose payload is in no
    /// slot; true if that is all of it, and [`Pump::settle`] follows.
    ///
    /// # Errors
    /// Remote, naming the peer, if the connection broke.
    pub fn send_from(&mut self, number: u64, header: &Header, payload: &[u8]) -> Result<bool> {
        let count = self.sockets.len() as u64;
        let socket = &mut self.sockets[(number % count) as usize];
        if socket.out_message != number {
            // Earlier ones are still on their way into this socket.
            return Ok(false);
        }
        self.lent = Some(number);
        let written = socket.write(&self.who, header, payload);
        written.inspect_err(|error| self.broken = Some(error.clone()))
    }

    /// The message that is in the kernel as a whole is now published: counts it as sent.
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

    /// Header of the next message, which is not in a slot as a whole, if its frame is there; the
    /// caller wants the message in memory of its own.
    ///
    /// # Errors
    /// As for [`Pump::broken`], if nothing more comes.
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

    /// Reads as much as there is of the message that [`Pump::expect`] found into `place`; true if
    /// that was the rest of it, which publishes it.
    ///
    /// # Errors
    /// As for [`Pump::broken`], if the rest does not come; internal if no message was found.
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

    /// Adds what to wait for. A closed socket is nothing to wait for; nor is one that may neither
    /// be read nor has anything to write.
    pub fn interests(&mut self, interests: &mut Vec<Interest>) -> Result<()> {
        let free = self.incoming.free()? as u64;
        let waiting = self.outgoing.available()? as u64;
        for socket in &self.sockets {
            let ahead = socket.in_message - self.incoming.published();
            let read = ahead < if self.claimed { 1 } else { free };
            let sends = socket.out_message - self.outgoing.released() < waiting;
            let write = self.broken.is_none() && (sends || self.lent == Some(socket.out_message));
            if !socket.closed && (read || write) {
                interests.push(socket::interest(&socket.socket, read, write));
            }
        }
        Ok(())
    }

    /// Finds out whether the peer's host has stopped answering: what a kernel notices by itself
    /// only after minutes.
    pub fn listen_for_life(&mut self) {
        for socket in self.sockets.iter_mut().filter(|socket| !socket.closed) {
            if let Some(silence) = socket::silence(&socket.socket)
                && silence >= SILENCE
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

    /// Gives back the slots of messages that are in the kernel, with all before them.
    fn release_left(&mut self) {
        let depth = self.left.len() as u64;
        while std::mem::take(&mut self.left[(self.outgoing.released() % depth) as usize]) {
            self.outgoing.release();
        }
    }

    /// The socket that carries the next message.
    fn next(&self) -> usize {
        (self.incoming.published() % self.sockets.len() as u64) as usize
    }

    fn close(&mut self, index: usize, error: Error) {
        self.sockets[index].closed = true;
        self.broken.get_or_insert(error);
    }

    /// The message that a socket has brought is whole.
    fn end_message(&mut self, index: usize, header: Header) {
        let (count, depth) = (self.sockets.len() as u64, self.arrived.len() as u64);
        let socket = &mut self.sockets[index];
        self.arrived[(socket.in_message % depth) as usize] = Some(header);
        (socket.in_header, socket.in_place) = (None, false);
        socket.in_message += count;
    }

    /// Hands over the messages that are whole, with all before them.
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
            match read(&self.who, &socket.socket, &mut parts)? {
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
    /// Writes what the kernel takes of the message that it sends next; whether that is the rest.
    fn write(&mut self, who: &str, header: &Header, payload: &[u8]) -> Result<bool> {
        let frame = encode(header, self.out_message);
        while self.out_at < FRAME + payload.len() {
            let parts = [
                IoSlice::new(&frame[self.out_at.min(FRAME)..]),
                IoSlice::new(&payload[self.out_at.saturating_sub(FRAME)..]),
            ];
            match socket::write(&self.socket, &parts) {
                Ok(written) => {
                    self.out_at += written;
                    // Where the kernel took less it is full: asking again would only tell us so.
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

    /// Reads what there is of a message's payload, and `along` with it the next frame's header, if
    /// there may be another message: one system call a message.
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
        let Some(got) = read(who, &self.socket, &mut parts)? else {
            return Ok(Read::Nothing);
        };
        self.in_at += got.min(missing);
        self.frame_at = got.saturating_sub(missing);
        // Where the kernel has no more, asking again would only tell us so.
        Ok(match got < missing + along {
            true => Read::Nothing,
            false => Read::More,
        })
    }
}

/// Reads; None if nothing is there now.
fn read(who: &str, from: &OwnedFd, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>> {
    match socket::read(from, parts) {
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
