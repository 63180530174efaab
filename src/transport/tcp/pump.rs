//! The sockets of one pair on one channel, and what carries slots through them both ways.
//!
//! The ends of a connection work on FIFOs in this process, as threads do; the pump is the other
//! end of both. Message m goes over socket m % k: its frame, then its payload.
//! A socket is read only as far as there are free slots for what it brings; the rest waits in
//! the kernel, and in the end at the sender. Payloads go from slot to kernel and from kernel to
//! slot without a copy between.

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
    /// Why no more can be sent or received in this or another direction.
    broken: Option<Error>,
}

#[derive(Debug)]
struct Socket {
    socket: OwnedFd,
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
        sockets: Vec<OwnedFd>,
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

    /// Reads as much as there is and slots are free for: all sockets, or the one that carries the
    /// next message.
    pub fn receive(&mut self, all: bool) {
        let count = self.sockets.len();
        let next = (self.incoming.published() % count as u64) as usize;
        for index in if all { 0..count } else { next..next + 1 } {
            if !self.sockets[index].closed
                && let Err(error) = self.receive_on(index)
            {
                self.sockets[index].closed = true;
                self.broken.get_or_insert(error);
            }
        }
        let depth = self.arrived.len() as u64;
        while let Some(header) = self.arrived[(self.incoming.published() % depth) as usize].take() {
            self.incoming.publish(header);
        }
    }

    /// Whether the socket that carries the next message will bring nothing more.
    pub fn ended(&self) -> bool {
        let count = self.sockets.len() as u64;
        self.sockets[(self.incoming.published() % count) as usize].closed
    }

    /// Adds what to wait for. A closed socket is nothing to wait for; nor is one that may neither
    /// be read nor has anything to write.
    pub fn interests(&mut self, interests: &mut Vec<Interest>) -> Result<()> {
        let free = self.incoming.free()? as u64;
        let waiting = self.outgoing.available()? as u64;
        for socket in &self.sockets {
            let read = socket.in_message - self.incoming.published() < free;
            let write =
                self.broken.is_none() && socket.out_message - self.outgoing.released() < waiting;
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
                let frame = encode(&header, number);
                let parts = [
                    IoSlice::new(&frame[socket.out_at.min(FRAME)..]),
                    IoSlice::new(&payload[socket.out_at.saturating_sub(FRAME)..]),
                ];
                match socket::write(&socket.socket, &parts) {
                    Ok(written) => socket.out_at += written,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(lost(&self.who, &error)),
                }
                if socket.out_at == FRAME + payload.len() {
                    socket.out_at = 0;
                    socket.out_message += count;
                    self.left[(number % depth) as usize] = true;
                }
            }
        }
        loop {
            let left = &mut self.left[(self.outgoing.released() % depth) as usize];
            if !std::mem::take(left) {
                return Ok(());
            }
            self.outgoing.release();
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
        let mut state = Read::More;
        if socket.in_at < bytes {
            // The next frame's header comes along, if it may: one system call a message.
            let along = if ahead + count < free { FRAME } else { 0 };
            let payload = &mut self.incoming.slot(ahead as usize)[socket.in_at..bytes];
            let room = payload.len() + along;
            let mut parts = [
                IoSliceMut::new(payload),
                IoSliceMut::new(&mut socket.frame[..along]),
            ];
            match read(&self.who, &socket.socket, &mut parts)? {
                None => return Ok(Read::Nothing),
                Some(got) => {
                    let missing = bytes - socket.in_at;
                    socket.in_at += got.min(missing);
                    socket.frame_at = got.saturating_sub(missing);
                    if got < room {
                        // The kernel has no more: asking again would only tell us so.
                        state = Read::Nothing;
                    }
                }
            }
            if socket.in_at < bytes {
                return Ok(state);
            }
        }
        let depth = self.arrived.len() as u64;
        self.arrived[(socket.in_message % depth) as usize] = Some(header);
        socket.in_header = None;
        socket.in_message += count;
        Ok(state)
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
