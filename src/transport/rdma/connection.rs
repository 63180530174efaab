//! Both directions between this rank and one peer on one channel, over queue pairs.
//!
//! ```text
//! here                                 there
//! outgoing slot m ── write payload ──> incoming slot m      (payloads beyond one packet or two)
//!                 ── write line, immediate m ──> completion (or line and payload in one write)
//!                 <── write of nothing, immediate: slots released ──
//! ```
//! Message m goes over queue pair m % k. Writes of one reliable queue pair take effect in order,
//! and the completion of a write with an immediate says that all of it is in memory: the receiver
//! touches a slot only after that completion. Credits come as immediates too, and so end a sleep. No
//! memory is polled.

use super::super::frame::{FRAME, decode, encode};
use super::ports::Port;
use super::qp_flow::{Immediate, QpFlow, Tag};
use super::status;
use super::verbs::{Pair, Queue, Registered, Write};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{FifoShape, Header, LINE_BYTES};
use crate::sys::ibverbs::{IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR, IbvSge, IbvWc};
use std::io;
use std::sync::Arc;

/// Payloads up to this travel in one write with their line. Above, the payload is a write of its
/// own, which switches may spread over several paths; the line behind it keeps its place.
const ONE_WRITE: usize = 8192;

const _: () = assert!(FRAME == LINE_BYTES);

/// Bytes of a connection in registered memory.
pub(super) fn bytes(shape: &FifoShape) -> usize {
    2 * shape.bytes()
}

/// What a connection consists of.
#[derive(Debug)]
pub(super) struct Parts {
    /// The peer, as messages name it.
    pub who: String,
    pub port: Port,
    pub shape: FifoShape,
    pub memory: Arc<Registered>,
    /// Where its part of the memory begins.
    pub at: usize,
    pub queue: Arc<Queue>,
    pub pairs: Vec<Pair>,
    /// Where the peer's part begins, and its key.
    pub remote: (u64, u32),
    /// Timeout and retries, for messages.
    pub patience: (u8, u8),
}

/// Both directions.
#[derive(Debug)]
pub(super) struct Connection {
    // Queue pairs first: they use what follows.
    ways: Vec<QpFlow>,
    parts: Parts,
    sent: u64,
    freed: u64,
    taken: u64,
    /// What the peer knows to be taken.
    credited: u64,
    /// By message number modulo depth.
    arrived: Vec<bool>,
    /// Header of the next message, once it was checked.
    current: Option<Header>,
    /// Whether the queue announces the next completion.
    armed: bool,
    broken: Option<Error>,
    /// Whether that came from work that never ran: what broke it may still be told.
    flushed: bool,
}

impl Connection {
    /// A connection whose peer does the same; messages may come as soon as the pairs are connected.
    ///
    /// # Errors
    /// System if a queue pair takes no room.
    pub fn new(mut parts: Parts) -> Result<Connection> {
        let pairs = std::mem::take(&mut parts.pairs).into_iter().enumerate();
        let ways = pairs
            .map(|(index, pair)| QpFlow::new(index, pair, &parts.shape))
            .collect::<io::Result<_>>()
            .map_err(|error| Error::system("making room for messages", error))?;
        Ok(Connection {
            ways,
            sent: 0,
            freed: 0,
            taken: 0,
            credited: 0,
            arrived: vec![false; parts.shape.depth],
            current: None,
            armed: false,
            broken: None,
            flushed: false,
            parts,
        })
    }

    /// Connects the queue pairs.
    pub fn pairs(&self) -> impl Iterator<Item = &Pair> {
        self.ways.iter().map(QpFlow::pair)
    }

    /// Where the peer's part of its memory begins, and its key.
    pub fn set_remote(&mut self, address: u64, key: u32) {
        self.parts.remote = (address, key);
    }

    /// Why the connection is of no more use, if it is not.
    pub fn usable(&self) -> Result<()> {
        match &self.broken {
            _ if self.left() => Err(Error::new(
                ErrorKind::Remote,
                format!("{} closed its connection", self.parts.who),
            )),
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Breaks it for a reason that no completion tells.
    pub fn condemn(&mut self, error: Error) {
        self.broken.get_or_insert(error);
    }

    // Sending.

    /// Whether a slot is free, and places for the works of a message.
    pub fn can_send(&mut self) -> Result<bool> {
        self.usable()?;
        if self.has_slot() && self.has_places() {
            return Ok(true);
        }
        self.progress();
        self.usable()?;
        Ok(self.has_slot() && self.has_places())
    }

    fn has_slot(&self) -> bool {
        self.sent - self.freed < self.parts.shape.depth as u64
    }

    fn has_places(&self) -> bool {
        self.ways[self.way_of(self.sent)].has_places_for_message()
    }

    /// Payload space of the next message.
    pub fn outgoing(&mut self) -> *mut [u8] {
        let at = self.outgoing_at(self.sent) + LINE_BYTES;
        let bytes = self.parts.shape.slot_bytes;
        let place = self.parts.memory.region().place(at, bytes, 64);
        std::ptr::slice_from_raw_parts_mut(place, bytes)
    }

    /// Hands the next message to the device.
    ///
    /// # Panics
    /// If no slot is free, or the header's payload exceeds it.
    pub fn publish(&mut self, header: Header) {
        let (number, bytes) = (self.sent, header.bytes as usize);
        assert!(self.has_slot(), "no slot is free");
        assert!(
            bytes <= self.parts.shape.slot_bytes,
            "{bytes} bytes in a slot"
        );
        let at = self.outgoing_at(number);
        let line = self.parts.memory.region().place(at, LINE_BYTES, 64);
        // SAFETY: the line of a slot that is ours until the peer gives it back.
        unsafe { line.cast::<[u8; FRAME]>().write(encode(&header, number)) };
        self.sent += 1;
        let index = self.way_of(number);
        let there = self.parts.remote.0 + (self.incoming_at(number) - self.parts.at) as u64;
        // SYNC POINT rdma-message: the write with the immediate, behind that of the payload, publishes
        // line and payload; pairs with the completion that the peer's `can_receive` looks for.
        let immediate = Some(Immediate::Message(number));
        let whole = bytes <= ONE_WRITE;
        let first = self.write(
            at,
            LINE_BYTES + if whole { bytes } else { 0 },
            there,
            immediate,
        );
        let done = match whole {
            // The last message of a call is most often one of these: whoever waits for it to be
            // gone needs its completion.
            true => self.post(index, &mut [first], true),
            false => {
                let payload = self.write(at + LINE_BYTES, bytes, there + LINE_BYTES as u64, None);
                self.post(index, &mut [payload, first], false)
            }
        };
        self.ways[index].message_ends();
        if let Err(error) = done {
            self.refused(&error);
        }
    }

    /// Whether all messages are in the peer's memory, or are of no more use to it.
    pub fn drained(&mut self) -> Result<bool> {
        if self.ways.iter().all(QpFlow::drained) {
            return Ok(true);
        }
        for index in 0..self.ways.len() {
            if !self.ways[index].message_is_signaled() && self.broken.is_none() {
                // Completes after all that was posted before it.
                self.probe(index);
            }
        }
        self.progress();
        // Who left in good order wants nothing more.
        if self.left() || self.ways.iter().all(QpFlow::drained) {
            return Ok(true);
        }
        self.usable().map(|()| false)
    }

    // Receiving.

    /// Whether the next message is there.
    pub fn can_receive(&mut self) -> Result<bool> {
        if self.current.is_some() {
            return Ok(true);
        }
        let depth = self.parts.shape.depth as u64;
        if !self.arrived[(self.taken % depth) as usize] {
            self.progress();
            if !self.arrived[(self.taken % depth) as usize] {
                return self.usable().map(|()| false);
            }
        }
        let line = self.parts.memory.region();
        let line = line.place(self.incoming_at(self.taken), LINE_BYTES, 64);
        // SYNC POINT rdma-message: the completion of the write with the immediate, polled by
        // `progress`, comes after line and payload are in memory; pairs with the peer's `publish`.
        // SAFETY: a whole line of a slot that was handed to us. Volatile: a peer that breaks the
        // rules may write meanwhile, and the value must be read only once.
        let line = unsafe { line.cast::<[u8; FRAME]>().read_volatile() };
        let shape = &self.parts.shape;
        self.current = Some(decode(
            &self.parts.who,
            &line,
            self.taken,
            shape.slot_bytes,
        )?);
        Ok(true)
    }

    /// Header of the next message, after `can_receive` returned true; zeros before.
    pub fn header(&self) -> Header {
        self.current.unwrap_or_default()
    }

    /// Payload of the next message, after `can_receive` returned true; nothing before.
    pub fn incoming(&self) -> *const [u8] {
        // Bounded by the slot when its header was read.
        let bytes = self.header().bytes as usize;
        let at = self.incoming_at(self.taken) + LINE_BYTES;
        let place = self.parts.memory.region().place(at, bytes, 64);
        std::ptr::slice_from_raw_parts(place, bytes)
    }

    /// Gives the slot of the next message back to the peer.
    ///
    /// # Panics
    /// If no message is known to be there.
    pub fn release(&mut self) {
        assert!(self.current.take().is_some(), "release without a message");
        let depth = self.parts.shape.depth as u64;
        self.arrived[(self.taken % depth) as usize] = false;
        self.taken += 1;
        // A sender with three quarters of its slots does not wait.
        if self.taken - self.credited >= (depth / 4).max(1) {
            self.give_credit();
        }
    }

    /// Tells the peer how many slots are free again. If there is no place for that now, the next
    /// call does it: the count holds for all before it.
    fn give_credit(&mut self) {
        if self.usable().is_err() || self.ways[0].free() < 2 {
            return;
        }
        let write = self.nothing(Some(Immediate::Credit(self.taken)));
        match self.post(0, &mut [write], false) {
            Ok(()) => self.credited = self.taken,
            Err(error) => self.refused(&error),
        }
    }

    /// Does what had to wait.
    pub fn catch_up(&mut self) {
        if self.taken - self.credited >= (self.parts.shape.depth as u64 / 4).max(1) {
            self.progress();
            self.give_credit();
        }
    }

    // Both.

    /// Takes what is complete.
    pub fn progress(&mut self) {
        const BATCH: usize = 16;
        let mut found = [IbvWc::default(); BATCH];
        loop {
            let count = match self.parts.queue.poll(&mut found) {
                Ok(count) => count,
                Err(error) => {
                    let what = format!("the completion queue of {}", self.parts.who);
                    return self.condemn(Error::system(what, error));
                }
            };
            for completion in &found[..count] {
                if completion.status != IBV_WC_SUCCESS {
                    self.failed(completion);
                    continue;
                }
                match Tag::decode(completion.wr_id) {
                    Tag::Room(index) => self.came(index, u32::from_be(completion.imm_data)),
                    Tag::Done(index, number) => self.ways[index].complete(number),
                }
            }
            if count < BATCH {
                return;
            }
        }
    }

    /// An immediate came over the queue pair with this index.
    fn came(&mut self, index: usize, word: u32) {
        let done = match Immediate::decode(word) {
            Some(Immediate::Message(number)) => self.announced(index, number),
            Some(Immediate::Credit(count)) => self.freed(count),
            Some(Immediate::Farewell) => {
                match std::mem::replace(&mut self.ways[index].farewell, true) {
                    // Nothing follows it, and so it needs no room.
                    false => return,
                    true => Err(format!("said farewell twice over queue pair {index}")),
                }
            }
            None => Err(format!(
                "sent {word:#x} over queue pair {index}, which means nothing"
            )),
        };
        if let Err(what) = done {
            let text = format!("{} {what}", self.parts.who);
            self.condemn(Error::new(ErrorKind::Mismatch, text));
        } else if let Err(error) = self.ways[index].post_room() {
            self.refused(&error);
        }
    }

    /// The end of a message's number came over a queue pair. Else: why it cannot be.
    fn announced(&mut self, index: usize, end: u64) -> std::result::Result<(), String> {
        let depth = self.parts.shape.depth as u64;
        let number = self.taken + (end.wrapping_sub(self.taken) & Immediate::NUMBERS);
        let place = (number % depth) as usize;
        if number - self.taken >= depth || self.arrived[place] || self.way_of(number) != index {
            let (first, last) = (self.taken, self.taken + depth - 1);
            return Err(format!(
                "announced message {end} over queue pair {index}, where {first} to {last} may come \
                 once each"
            ));
        }
        self.arrived[place] = true;
        Ok(())
    }

    /// The end of the count of messages that the peer took. Else: why it cannot be.
    fn freed(&mut self, end: u64) -> std::result::Result<(), String> {
        let new = end.wrapping_sub(self.freed) & Immediate::NUMBERS;
        let held = self.sent - self.freed;
        if !(1..=held).contains(&new) {
            return Err(format!(
                "says that it has freed {new} more slots than {}, and holds {held}",
                self.freed
            ));
        }
        self.freed += new;
        Ok(())
    }

    /// Work or room came back undone. The first to fail says why; the rest is flushed.
    #[cold]
    fn failed(&mut self, completion: &IbvWc) {
        let flushed = completion.status == IBV_WC_WR_FLUSH_ERR;
        if self.left() || self.broken.is_some() && (flushed || !self.flushed) {
            return;
        }
        self.flushed = flushed;
        let parts = &self.parts;
        let error = status::explain(&parts.who, &parts.port, completion, parts.patience);
        self.broken = Some(error);
    }

    #[cold]
    fn refused(&mut self, error: &io::Error) {
        let (who, port) = (&self.parts.who, &self.parts.port);
        self.condemn(Error::system(
            format!("{port} takes no more work for {who}"),
            io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO)),
        ));
    }

    /// Whether the peer has left in good order, and all that it sent before is here.
    fn left(&self) -> bool {
        self.ways.iter().all(|way| way.farewell)
    }

    fn post(&mut self, index: usize, writes: &mut [Write], signaled: bool) -> io::Result<()> {
        // SAFETY: pieces lie in the connection's memory, which outlives its queue pairs.
        unsafe { self.ways[index].post(writes, signaled) }
    }

    /// A write from the registered memory.
    fn write(&self, at: usize, bytes: usize, remote: u64, immediate: Option<Immediate>) -> Write {
        let memory = &self.parts.memory;
        debug_assert!(at >= self.parts.at && at + bytes <= memory.region().bytes());
        Write {
            id: 0,
            piece: IbvSge {
                addr: memory.address() + at as u64,
                length: bytes as u32,
                lkey: memory.local_key(),
            },
            remote,
            remote_key: self.parts.remote.1,
            immediate: immediate.map(Immediate::encode),
            signaled: false,
        }
    }

    /// A write of no bytes.
    fn nothing(&self, immediate: Option<Immediate>) -> Write {
        self.write(self.parts.at, 0, self.parts.remote.0, immediate)
    }

    /// A write that changes nothing and completes when all before it has.
    fn probe(&mut self, index: usize) {
        let write = self.nothing(None);
        if let Err(error) = self.post(index, &mut [write], true) {
            self.refused(&error);
        }
    }

    /// CompletionPoller for an answer over every queue pair: that they are connected, no packet has shown.
    pub fn ask(&mut self) {
        for index in 0..self.ways.len() {
            self.probe(index);
        }
    }

    /// Whether the peer has answered over all of them.
    pub fn has_answered(&mut self) -> Result<bool> {
        self.progress();
        if self.ways.iter().all(QpFlow::idle) {
            return Ok(true);
        }
        self.usable().map(|()| false)
    }

    /// The peer, and the port through which it should be reached.
    pub fn way_there(&self) -> String {
        format!("{} through {}", self.parts.who, self.parts.port)
    }

    /// Finds out whether the peer still answers, where nothing is on its way to it.
    pub fn listen_for_life(&mut self) {
        self.progress();
        let first = &self.ways[0];
        // What is on its way without a completion would not tell.
        let silent = !first.all_is_signaled() && first.has_places_for_message();
        if self.usable().is_ok() && (first.idle() || silent) {
            self.probe(0);
        }
    }

    /// Says farewell, if the peer listens.
    pub fn leave(&mut self) {
        self.progress();
        for index in 0..self.ways.len() {
            if self.usable().is_err() || self.ways[index].free() == 0 {
                return;
            }
            let write = self.nothing(Some(Immediate::Farewell));
            if self.post(index, &mut [write], true).is_err() {
                return;
            }
        }
    }

    /// Whether nothing is on its way to a peer that wants it.
    pub fn gone(&mut self) -> bool {
        self.progress();
        self.usable().is_err() || self.ways.iter().all(QpFlow::idle)
    }

    /// Has the queue announce the next completion, unless it does already.
    pub fn arm(&mut self) {
        if !self.armed && self.broken.is_none() {
            self.armed = self.parts.queue.arm().is_ok();
        }
    }

    /// The queue has announced one.
    pub fn disarmed(&mut self) {
        self.armed = false;
    }

    fn way_of(&self, number: u64) -> usize {
        (number % self.ways.len() as u64) as usize
    }

    fn outgoing_at(&self, number: u64) -> usize {
        self.parts.at + self.place(number)
    }

    fn incoming_at(&self, number: u64) -> usize {
        self.outgoing_at(number) + self.parts.shape.bytes()
    }

    fn place(&self, number: u64) -> usize {
        let index = number as usize & (self.parts.shape.depth - 1);
        index * (LINE_BYTES + self.parts.shape.slot_bytes)
    }
}
