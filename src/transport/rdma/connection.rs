//! A connection between this rank and one peer on one channel, in both directions, over queue pairs.
//!
//! ```text
//! here                                 there
//! outgoing slot m ── write payload ──> incoming slot m      (payloads beyond one packet or two)
//!                 ── write line, immediate m ──> completion (or line and payload in one write)
//!                 <── write of nothing, immediate: slots released ──
//! ```
//! Message m goes over queue pair m % k. Writes of one reliable queue pair take effect in order. The
//! completion of a write with an immediate proves that the whole write is in memory, and the receiver
//! touches a slot only after that completion. Credits are immediates too, so they end a sleep. No memory
//! is polled.

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

/// Largest payload, in bytes, that is sent in one write with its header line. A larger payload is a separate
/// write, which switches may spread over several paths. The write of the line takes effect after it.
const ONE_WRITE: usize = 8192;

const _: () = assert!(FRAME == LINE_BYTES);

/// Returns the bytes of a connection in registered memory.
pub(super) fn bytes(shape: &FifoShape) -> usize {
    2 * shape.bytes()
}

/// The objects from which a connection is created.
#[derive(Debug)]
pub(super) struct Parts {
    /// The peer, as errors name it.
    pub who: String,
    pub port: Port,
    pub shape: FifoShape,
    pub memory: Arc<Registered>,
    /// Offset of the connection in the memory.
    pub at: usize,
    pub queue: Arc<Queue>,
    pub pairs: Vec<Pair>,
    /// Address and key of the peer's memory.
    pub remote: (u64, u32),
    /// Timeout and retries, which errors name.
    pub patience: (u8, u8),
}

/// A connection in both directions.
#[derive(Debug)]
pub(super) struct Connection {
    // Queue pairs are dropped first, because they use the memory in `parts`.
    flows: Vec<QpFlow>,
    parts: Parts,
    sent: u64,
    freed: u64,
    taken: u64,
    /// Number of messages whose slots the peer knows to be free.
    credited: u64,
    /// Whether a message has arrived, by message number modulo depth.
    arrived: Vec<bool>,
    /// Header of the next message, after its check.
    current: Option<Header>,
    /// Whether the completion queue announces its next completion.
    armed: bool,
    broken: Option<Error>,
    /// Whether `broken` comes from flushed work. A later completion may still give the cause.
    flushed: bool,
}

impl Connection {
    /// Creates a connection. Messages may arrive as soon as the queue pairs are connected.
    ///
    /// # Errors
    /// System if a queue pair rejects a receive request.
    pub fn new(mut parts: Parts) -> Result<Connection> {
        let pairs = std::mem::take(&mut parts.pairs).into_iter().enumerate();
        let flows = pairs
            .map(|(index, pair)| QpFlow::new(index, pair, &parts.shape))
            .collect::<io::Result<_>>()
            .map_err(|error| Error::system("making room for messages", error))?;
        Ok(Connection {
            flows,
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

    /// Returns the queue pairs.
    pub fn pairs(&self) -> impl Iterator<Item = &Pair> {
        self.flows.iter().map(QpFlow::pair)
    }

    /// Sets address and key of the peer's memory.
    pub fn set_remote(&mut self, address: u64, key: u32) {
        self.parts.remote = (address, key);
    }

    /// Checks that the connection is not broken or closed.
    pub fn usable(&self) -> Result<()> {
        match &self.broken {
            _ if self.peer_has_closed() => Err(Error::new(
                ErrorKind::Remote,
                format!("{} closed its connection", self.parts.who),
            )),
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Breaks the connection for a reason that no completion reports.
    pub fn break_off(&mut self, error: Error) {
        self.broken.get_or_insert(error);
    }

    /// Returns whether a slot is free, and the send queue has room for a message.
    pub fn can_send(&mut self) -> Result<bool> {
        self.usable()?;
        if self.has_slot() && self.has_room() {
            return Ok(true);
        }
        self.progress();
        self.usable()?;
        Ok(self.has_slot() && self.has_room())
    }

    fn has_slot(&self) -> bool {
        self.sent - self.freed < self.parts.shape.depth as u64
    }

    fn has_room(&self) -> bool {
        self.flows[self.flow_of(self.sent)].has_room_for_message()
    }

    /// Returns the payload of the next message to send.
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
        // SAFETY: `has_slot` proves that the peer has given the slot back, so only this rank writes its line.
        unsafe { line.cast::<[u8; FRAME]>().write(encode(&header, number)) };
        self.sent += 1;
        let index = self.flow_of(number);
        let there = self.parts.remote.0 + (self.incoming_at(number) - self.parts.at) as u64;
        // SYNC POINT rdma-message: the write with the immediate, posted after the write of the payload,
        // publishes line and payload; pairs with the completion that the peer's `can_receive` polls for.
        let immediate = Some(Immediate::Message(number));
        let whole = bytes <= ONE_WRITE;
        let first = self.write(
            at,
            LINE_BYTES + if whole { bytes } else { 0 },
            there,
            immediate,
        );
        let done = match whole {
            // The last message of a call is most often a small one, and `drained` waits for its completion.
            true => self.post(index, &mut [first], true),
            false => {
                let payload = self.write(at + LINE_BYTES, bytes, there + LINE_BYTES as u64, None);
                self.post(index, &mut [payload, first], false)
            }
        };
        self.flows[index].end_message();
        if let Err(error) = done {
            self.reject(&error);
        }
    }

    /// Returns whether all messages are in the peer's memory, or the peer has closed.
    pub fn drained(&mut self) -> Result<bool> {
        if self.flows.iter().all(QpFlow::drained) {
            return Ok(true);
        }
        for index in 0..self.flows.len() {
            if !self.flows[index].message_is_signaled() && self.broken.is_none() {
                // The probe completes after all work before it.
                self.probe(index);
            }
        }
        self.progress();
        // A peer that has closed in good order needs no more messages.
        if self.peer_has_closed() || self.flows.iter().all(QpFlow::drained) {
            return Ok(true);
        }
        self.usable().map(|()| false)
    }

    /// Returns whether the next message has arrived.
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
        // SAFETY: `place` checks that the line lies in the region, which `Registered` keeps mapped. The read is
        // volatile and single, because a hostile peer may write meanwhile.
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

    /// Returns the header of the next message after `can_receive` returned true; zeros before.
    pub fn header(&self) -> Header {
        self.current.unwrap_or_default()
    }

    /// Returns the payload of the next message after `can_receive` returned true; no bytes before.
    pub fn incoming(&self) -> *const [u8] {
        // `decode` has checked that the payload fits the slot.
        let bytes = self.header().bytes as usize;
        let at = self.incoming_at(self.taken) + LINE_BYTES;
        let place = self.parts.memory.region().place(at, bytes, 64);
        std::ptr::slice_from_raw_parts(place, bytes)
    }

    /// Gives the slot of the next message back to the peer.
    ///
    /// # Panics
    /// If `can_receive` has found no message.
    pub fn release(&mut self) {
        assert!(self.current.take().is_some(), "release without a message");
        let depth = self.parts.shape.depth as u64;
        self.arrived[(self.taken % depth) as usize] = false;
        self.taken += 1;
        // A sender that has three quarters of its slots free does not wait, so credits may be rare.
        if self.taken - self.credited >= (depth / 4).max(1) {
            self.give_credit();
        }
    }

    /// Sends the count of free slots to the peer. If the send queue is full, a later call sends the count,
    /// which includes all earlier ones.
    fn give_credit(&mut self) {
        if self.usable().is_err() || self.flows[0].free() < 2 {
            return;
        }
        let write = self.empty_write(Some(Immediate::Credit(self.taken)));
        match self.post(0, &mut [write], false) {
            Ok(()) => self.credited = self.taken,
            Err(error) => self.reject(&error),
        }
    }

    /// Sends a credit that found no room in the send queue.
    pub fn catch_up(&mut self) {
        if self.taken - self.credited >= (self.parts.shape.depth as u64 / 4).max(1) {
            self.progress();
            self.give_credit();
        }
    }

    /// Handles the completions that have arrived.
    pub fn progress(&mut self) {
        const BATCH: usize = 16;
        let mut found = [IbvWc::default(); BATCH];
        loop {
            let count = match self.parts.queue.poll(&mut found) {
                Ok(count) => count,
                Err(error) => {
                    let what = format!("the completion queue of {}", self.parts.who);
                    return self.break_off(Error::system(what, error));
                }
            };
            for completion in &found[..count] {
                if completion.status != IBV_WC_SUCCESS {
                    self.fail(completion);
                    continue;
                }
                match Tag::decode(completion.wr_id) {
                    Tag::Room(index) => {
                        self.handle_immediate(index, u32::from_be(completion.imm_data))
                    }
                    Tag::Done(index, number) => self.flows[index].complete(number),
                }
            }
            if count < BATCH {
                return;
            }
        }
    }

    /// Handles an immediate of the queue pair with this index.
    fn handle_immediate(&mut self, index: usize, word: u32) {
        let done = match Immediate::decode(word) {
            Some(Immediate::Message(number)) => self.add_arrived(index, number),
            Some(Immediate::Credit(count)) => self.add_credit(count),
            Some(Immediate::Close) => {
                match std::mem::replace(&mut self.flows[index].is_closed, true) {
                    // Nothing follows a close, so the queue pair needs no further receive request.
                    false => return,
                    true => Err(format!("closed twice over queue pair {index}")),
                }
            }
            None => Err(format!(
                "sent {word:#x} over queue pair {index}, which means nothing"
            )),
        };
        if let Err(what) = done {
            let text = format!("{} {what}", self.parts.who);
            self.break_off(Error::new(ErrorKind::Mismatch, text));
        } else if let Err(error) = self.flows[index].post_room() {
            self.reject(&error);
        }
    }

    /// Marks a message as arrived. `end` is the lower bits of its number, as the immediate carries
    /// them.
    ///
    /// # Errors
    /// Why the peer cannot have sent this number, as text.
    fn add_arrived(&mut self, index: usize, end: u64) -> std::result::Result<(), String> {
        let depth = self.parts.shape.depth as u64;
        let number = self.taken + (end.wrapping_sub(self.taken) & Immediate::NUMBERS);
        let place = (number % depth) as usize;
        if number - self.taken >= depth || self.arrived[place] || self.flow_of(number) != index {
            let (first, last) = (self.taken, self.taken + depth - 1);
            return Err(format!(
                "announced message {end} over queue pair {index}, where {first} to {last} may come \
                 once each"
            ));
        }
        self.arrived[place] = true;
        Ok(())
    }

    /// Frees slots that the peer has released. `end` is the lower bits of the number of all
    /// released messages.
    ///
    /// # Errors
    /// Why the peer cannot have sent this count, as text.
    fn add_credit(&mut self, end: u64) -> std::result::Result<(), String> {
        let new = end.wrapping_sub(self.freed) & Immediate::NUMBERS;
        let held = self.sent - self.freed;
        if !(1..=held).contains(&new) {
            return Err(format!(
                "reports that it has freed {new} more slots than {}, and holds {held}",
                self.freed
            ));
        }
        self.freed += new;
        Ok(())
    }

    /// Breaks the connection after failed work. Only the first failure carries the cause; later work is
    /// flushed.
    #[cold]
    fn fail(&mut self, completion: &IbvWc) {
        let flushed = completion.status == IBV_WC_WR_FLUSH_ERR;
        if self.peer_has_closed() || self.broken.is_some() && (flushed || !self.flushed) {
            return;
        }
        self.flushed = flushed;
        let parts = &self.parts;
        let error = status::explain(&parts.who, &parts.port, completion, parts.patience);
        self.broken = Some(error);
    }

    #[cold]
    fn reject(&mut self, error: &io::Error) {
        let (who, port) = (&self.parts.who, &self.parts.port);
        self.break_off(Error::system(
            format!("{port} takes no more work for {who}"),
            io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO)),
        ));
    }

    /// Returns whether the peer has closed in good order, and all its messages have arrived.
    fn peer_has_closed(&self) -> bool {
        self.flows.iter().all(|flow| flow.is_closed)
    }

    fn post(&mut self, index: usize, writes: &mut [Write], signaled: bool) -> io::Result<()> {
        // SAFETY: `write` makes pieces of the connection's memory, and `Connection` drops its queue pairs before
        // that memory.
        unsafe { self.flows[index].post(writes, signaled) }
    }

    /// Returns a write from the registered memory.
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

    /// Returns a write of no bytes.
    fn empty_write(&self, immediate: Option<Immediate>) -> Write {
        self.write(self.parts.at, 0, self.parts.remote.0, immediate)
    }

    /// Posts an empty write, which completes after all work before it.
    fn probe(&mut self, index: usize) {
        let write = self.empty_write(None);
        if let Err(error) = self.post(index, &mut [write], true) {
            self.reject(&error);
        }
    }

    /// Posts a probe on every queue pair. Connecting sends no packet, so only a probe shows that the peer
    /// answers.
    pub fn probe_all(&mut self) {
        for index in 0..self.flows.len() {
            self.probe(index);
        }
    }

    /// Returns whether the peer has answered all probes.
    pub fn has_answered(&mut self) -> Result<bool> {
        self.progress();
        if self.flows.iter().all(QpFlow::idle) {
            return Ok(true);
        }
        self.usable().map(|()| false)
    }

    /// Returns the peer and the port to it, as text.
    pub fn route(&self) -> String {
        format!("{} through {}", self.parts.who, self.parts.port)
    }

    /// Checks that the peer still answers. Work in flight checks that by itself; otherwise posts a probe.
    pub fn check_peer(&mut self) {
        self.progress();
        let first = &self.flows[0];
        // Unsignaled work reports no failure, so a signaled probe follows it.
        let silent = !first.all_is_signaled() && first.has_room_for_message();
        if self.usable().is_ok() && (first.idle() || silent) {
            self.probe(0);
        }
    }

    /// Sends a close on every queue pair, unless the connection is broken.
    pub fn close(&mut self) {
        self.progress();
        for index in 0..self.flows.len() {
            if self.usable().is_err() || self.flows[index].free() == 0 {
                return;
            }
            let write = self.empty_write(Some(Immediate::Close));
            if self.post(index, &mut [write], true).is_err() {
                return;
            }
        }
    }

    /// Returns whether the peer has received all work, or can receive none.
    pub fn is_closed(&mut self) -> bool {
        self.progress();
        self.usable().is_err() || self.flows.iter().all(QpFlow::idle)
    }

    /// Makes the queue announce the next completion, unless it is armed already.
    pub fn arm(&mut self) {
        if !self.armed && self.broken.is_none() {
            self.armed = self.parts.queue.arm().is_ok();
        }
    }

    /// Notes that the queue has announced a completion.
    pub fn disarmed(&mut self) {
        self.armed = false;
    }

    fn flow_of(&self, number: u64) -> usize {
        (number % self.flows.len() as u64) as usize
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
