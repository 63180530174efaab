//! The FIFO of slots: one producer, one consumer, a power of two of slots.
//!
//! ```text
//! memory of the receiver:  | line 64 | payload | line 64 | payload | ...
//! memory of the sender:    head (128 bytes) ...
//! ```
//! The tail is spread over the slots: each slot's line carries the number of its message. So the receiver
//! polls the very line whose header it reads next; a separate tail would cost another cache miss for every
//! message.
//!
//! Each counter lies in the memory of the side that polls it. The head has a pair of cache lines to itself,
//! because the prefetcher fetches pairs; only the [`StoreHints`], which change rarely, share it. Counters are 64-bit and
//! never reset. Each side indexes by its own counters, and checks the other side's counter against local geometry
//! before it uses it.

mod store_hints;

pub use store_hints::StoreHints;

use super::region::Region;
use crate::cpu::{prefetch, prefetch_to_write};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::types::SIGNATURE_WORDS;
use std::sync::Arc;

/// Bytes that a counter occupies: a pair of cache lines, so that no other data but [`StoreHints`] share them.
pub const COUNTER_BYTES: usize = 128;

/// Bytes before the payload of a slot: a cache line for header and number.
pub const LINE_BYTES: usize = 64;

/// The header before the payload of every message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Number of payload bytes of the message.
    pub bytes: u32,
    /// Call signature of the sender.
    pub signature: [u64; SIGNATURE_WORDS],
    /// CRC-32C of the payload with `CINCH_CHECK=crc32c`, else 0.
    pub crc: u32,
}

/// A slot's line, without the message number.
#[repr(C)]
#[derive(Clone, Copy)]
struct SlotLine {
    signature: [u64; SIGNATURE_WORDS],
    bytes: u32,
    crc: u32,
}

/// How the sender wrote the payload of a message. A receiver that measures both ways requests the faster one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fill {
    /// Nanoseconds that the write took; 0 if it was not measured.
    pub nanoseconds: u32,
    /// 1 if the stores went past the caches, else 0.
    pub streamed: u32,
}

/// Offset of the message number in a line. Message m of a FIFO has arrived when the number is m + 1.
const NUMBER_AT: usize = size_of::<SlotLine>();

/// Offset of the [`Fill`] in a line.
const FILL_AT: usize = NUMBER_AT + size_of::<u64>();

const _: () = assert!(FILL_AT + size_of::<Fill>() <= LINE_BYTES);

/// Most bytes of a message whose lines the sender's core owns before it writes. Larger messages may be stored past the
/// caches, and their lines would displace others.
const OWNED_BYTES: u32 = 1024;

/// Number and size of the slots of a FIFO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FifoShape {
    /// Number of slots, a power of two.
    pub depth: usize,
    /// Payload bytes of a slot, a multiple of 64.
    pub slot_bytes: usize,
}

impl FifoShape {
    /// Returns the bytes of all slots.
    pub fn bytes(&self) -> usize {
        self.depth * self.stride()
    }

    fn stride(&self) -> usize {
        LINE_BYTES + self.slot_bytes
    }
}

/// A byte offset in a shared memory region.
#[derive(Clone, Debug)]
pub struct Place {
    /// Region that contains the place; the reference keeps the region mapped.
    pub region: Arc<Region>,
    /// Bytes from the beginning of the region.
    pub at: usize,
}

/// Places of a FIFO's parts.
#[derive(Clone, Debug)]
pub struct FifoPlaces {
    /// The slots: [`FifoShape::bytes`] bytes in the receiver's memory.
    pub slots: Place,
    /// The head: [`COUNTER_BYTES`] bytes in the sender's memory.
    pub head: Place,
}

impl FifoPlaces {
    /// Returns the bytes of a FIFO whose head and slots are adjacent.
    pub fn bytes(shape: &FifoShape) -> usize {
        COUNTER_BYTES + shape.bytes()
    }

    /// Returns the places of a FIFO whose head and slots are adjacent, from byte `at`.
    pub fn together(region: &Arc<Region>, at: usize) -> FifoPlaces {
        let place = |offset| Place {
            region: region.clone(),
            at: at + offset,
        };
        FifoPlaces {
            head: place(0),
            slots: place(COUNTER_BYTES),
        }
    }
}

/// Pointers of one end, with the regions that they lead into.
#[derive(Debug)]
struct FifoMemory {
    shape: FifoShape,
    places: FifoPlaces,
    slots: *mut u8,
    head: *const AtomicU64,
}

// SAFETY: the pointers lead into regions that `places` holds. Counters are atomic, and pass each slot from one
// end to the other.
unsafe impl Send for FifoMemory {}

impl FifoMemory {
    fn new(shape: FifoShape, places: FifoPlaces) -> FifoMemory {
        assert!(
            shape.depth.is_power_of_two() && shape.slot_bytes.is_multiple_of(64),
            "impossible FIFO {shape:?}"
        );
        let slots = &places.slots;
        FifoMemory {
            slots: slots.region.place(slots.at, shape.bytes(), 64),
            head: places.head.region.counter(places.head.at),
            shape,
            places,
        }
    }

    #[inline]
    fn head(&self) -> &AtomicU64 {
        debug_assert!(self.places.head.region.bytes() > 0);
        // SAFETY: `places` holds the region, which keeps the counter mapped.
        unsafe { &*self.head }
    }

    /// Returns the header line of message `number`; its payload follows.
    #[inline]
    fn line(&self, number: u64) -> *mut u8 {
        let index = number as usize & (self.shape.depth - 1);
        // SAFETY: the index is below `depth`, and `new` checked that all slots are inside the region.
        unsafe { self.slots.add(index * self.shape.stride()) }
    }

    /// Returns the word that announces message `number`.
    #[inline]
    fn number(&self, number: u64) -> &AtomicU64 {
        // SAFETY: the word lies inside the line at a multiple of 8, and is accessed atomically only. `places`
        // holds the region, which keeps the word mapped.
        unsafe { &*self.line(number).add(NUMBER_AT).cast::<AtomicU64>() }
    }

    /// Returns the place of the note how message `number` was written.
    #[inline]
    fn fill(&self, number: u64) -> *mut Fill {
        // SAFETY: the place lies inside the line, at a multiple of 8.
        unsafe { self.line(number).add(FILL_AT).cast() }
    }

    /// Asks for the lines that message `number` writes if it has `bytes`, so that this core owns all of them when it writes.
    /// If it owned only some, the receiver, which polls the header's line, would take that back while this core waits for
    /// the others. Every message gets the first line of its payload.
    #[inline]
    fn own_soon(&self, number: u64, bytes: usize) {
        let bytes = bytes.clamp(1, self.shape.slot_bytes);
        prefetch_to_write(self.line(number));
        let payload = self.payload(number);
        for at in (0..bytes).step_by(LINE_BYTES) {
            prefetch_to_write(payload.wrapping_add(at));
        }
    }

    #[inline]
    fn payload(&self, number: u64) -> *mut u8 {
        // SAFETY: the payload follows the line in the same slot, which `new` checked to be inside
        // the region.
        unsafe { self.line(number).add(LINE_BYTES) }
    }
}

/// The sender's counters: messages published, and slots that the receiver is known to have freed.
#[derive(Debug, Default)]
struct SendCursor {
    sent: u64,
    freed: u64,
}

impl SendCursor {
    /// Returns the number of slots that were free at the last refresh.
    #[inline]
    fn known(&self, depth: usize) -> usize {
        depth - (self.sent - self.freed) as usize
    }

    #[inline]
    fn refresh(&mut self, head: &AtomicU64) -> Result<()> {
        // SYNC POINT slot-head: pairs with `RecvCursor::release`; the receiver has read the slots.
        let seen = head.load(Ordering::Acquire);
        if seen.wrapping_sub(self.freed) > self.sent - self.freed {
            return Err(impossible("freed", seen, self.freed, self.sent));
        }
        self.freed = seen;
        Ok(())
    }

    /// Announces message `sent` in its slot's word.
    #[inline]
    fn publish(&mut self, number: &AtomicU64) {
        self.sent += 1;
        // SYNC POINT slot-number: publishes line and payload to `RecvCursor::poll`.
        number.store(self.sent, Ordering::Release);
    }
}

/// The receiver's counters: messages released, and messages known to have arrived.
#[derive(Debug, Default)]
struct RecvCursor {
    taken: u64,
    arrived: u64,
}

impl RecvCursor {
    #[inline]
    fn known(&self) -> usize {
        (self.arrived - self.taken) as usize
    }

    /// Returns whether the next message has arrived; `number` is the word of its slot.
    #[inline]
    fn poll(&mut self, number: &AtomicU64, depth: usize) -> Result<bool> {
        // SYNC POINT slot-number: pairs with `SendCursor::publish`; line and payload are there.
        let seen = number.load(Ordering::Acquire);
        if seen == self.arrived + 1 {
            self.arrived += 1;
            return Ok(true);
        }
        // Until the message arrives, the word holds the number of the slot's previous message.
        if seen != (self.arrived + 1).saturating_sub(depth as u64) {
            return Err(impossible("sent", seen, self.arrived, self.arrived + 1));
        }
        Ok(false)
    }

    #[inline]
    fn release(&mut self, head: &AtomicU64) {
        self.taken += 1;
        // SYNC POINT slot-head: gives the slot back to `SendCursor::refresh`.
        head.store(self.taken, Ordering::Release);
    }
}

#[cold]
fn impossible(verb: &str, seen: u64, low: u64, high: u64) -> Error {
    Error::new(
        ErrorKind::Mismatch,
        format!(
            "the peer reports that it has {verb} {seen} slots, which is not between {low} and {high}: \
             shared memory is corrupted"
        ),
    )
}

/// The sending end of a FIFO.
#[derive(Debug)]
pub struct Producer {
    memory: FifoMemory,
    cursor: SendCursor,
    /// Bytes of the last message if its lines were worth owning, else 0.
    last_bytes: u32,
}

impl Producer {
    /// Makes the sending end of a FIFO whose counters are zero.
    ///
    /// # Safety
    /// No other producer uses these places, in this or any other cinch process.
    ///
    /// # Panics
    /// If the places are outside their regions.
    pub unsafe fn new(shape: FifoShape, places: FifoPlaces) -> Producer {
        Producer {
            memory: FifoMemory::new(shape, places),
            cursor: SendCursor::default(),
            last_bytes: 0,
        }
    }

    /// Returns whether a slot is free.
    ///
    /// # Errors
    /// Mismatch if the receiver's counter is impossible.
    #[inline]
    pub fn ready(&mut self) -> Result<bool> {
        if self.cursor.known(self.memory.shape.depth) == 0 {
            self.cursor.refresh(self.memory.head())?;
        }
        Ok(self.cursor.known(self.memory.shape.depth) > 0)
    }

    /// Returns the number of free slots.
    ///
    /// # Errors
    /// See [`Producer::ready`].
    #[inline]
    pub fn free(&mut self) -> Result<usize> {
        self.cursor.refresh(self.memory.head())?;
        Ok(self.cursor.known(self.memory.shape.depth))
    }

    /// Returns the payload space of the free slot that lies `ahead` slots after the next slot.
    ///
    /// # Panics
    /// If that slot is not known to be free.
    #[inline]
    pub fn slot(&mut self, ahead: usize) -> &mut [u8] {
        let number = self.check(ahead);
        // SAFETY: `check` proves that the slot is free, so it belongs to this end until `publish`.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.memory.payload(number),
                self.memory.shape.slot_bytes,
            )
        }
    }

    /// Returns the payload of the next slot, for reading.
    ///
    /// # Panics
    /// If the slot is not known to be free.
    #[inline]
    pub fn written(&self) -> &[u8] {
        let number = self.check(0);
        // SAFETY: `check` proves that the slot is free, so it belongs to this end until `publish`.
        unsafe {
            std::slice::from_raw_parts(self.memory.payload(number), self.memory.shape.slot_bytes)
        }
    }

    /// Publishes the next slot to the consumer.
    ///
    /// # Panics
    /// If the slot is not known to be free, or `header.bytes` exceeds it.
    #[inline]
    pub fn publish(&mut self, header: Header) {
        let number = self.check(0);
        assert!(
            header.bytes as usize <= self.memory.shape.slot_bytes,
            "a message of {} bytes in a slot of {}",
            header.bytes,
            self.memory.shape.slot_bytes
        );
        let line = SlotLine {
            signature: header.signature,
            bytes: header.bytes,
            crc: header.crc,
        };
        // SAFETY: `check` proves that the slot belongs to this end; `FifoMemory::new` aligned its line to 64 bytes.
        unsafe { self.memory.line(number).cast::<SlotLine>().write(line) };
        self.cursor.publish(self.memory.number(number));
        // Calls of two sizes in turns, such as a collective and a barrier, have the next message's size in the last two.
        let bytes = if header.bytes <= OWNED_BYTES {
            header.bytes
        } else {
            0
        };
        let before = std::mem::replace(&mut self.last_bytes, bytes);
        self.memory.own_soon(number + 1, bytes.max(before) as usize);
    }

    /// Notes how the next slot was filled, before it is published. Without this the slot keeps the note of an earlier
    /// message.
    ///
    /// # Panics
    /// If the slot is not known to be free.
    #[inline]
    pub fn note(&mut self, fill: Fill) {
        let number = self.check(0);
        // SAFETY: `check` proves that the slot, with its line, belongs to this end until `publish`.
        unsafe { self.memory.fill(number).write(fill) };
    }

    /// Returns the number of messages published so far.
    pub fn published(&self) -> u64 {
        self.cursor.sent
    }

    #[inline]
    fn check(&self, ahead: usize) -> u64 {
        assert!(
            ahead < self.cursor.known(self.memory.shape.depth),
            "slot {ahead} of a FIFO without that many free slots"
        );
        self.cursor.sent + ahead as u64
    }
}

/// The receiving end of a FIFO.
#[derive(Debug)]
pub struct Consumer {
    memory: FifoMemory,
    cursor: RecvCursor,
    /// Header of the next message. It is copied once, because the peer could change it after the check.
    current: Option<Header>,
}

impl Consumer {
    /// Makes the receiving end of a FIFO whose counters are zero.
    ///
    /// # Safety
    /// No other consumer uses these places, in this or any other cinch process.
    ///
    /// # Panics
    /// If the places are outside their regions.
    pub unsafe fn new(shape: FifoShape, places: FifoPlaces) -> Consumer {
        Consumer {
            memory: FifoMemory::new(shape, places),
            cursor: RecvCursor::default(),
            current: None,
        }
    }

    /// Returns whether a message has arrived.
    ///
    /// # Errors
    /// Mismatch, with the numbers, if the sender's counter or header is impossible.
    #[inline]
    pub fn ready(&mut self) -> Result<bool> {
        if self.current.is_some() {
            return Ok(true);
        }
        if self.cursor.known() == 0 && !self.poll()? {
            return Ok(false);
        }
        self.current = Some(self.read_header(0)?);
        Ok(true)
    }

    /// Returns the number of messages that have arrived.
    ///
    /// # Errors
    /// See [`Consumer::ready`].
    #[inline]
    pub fn available(&mut self) -> Result<usize> {
        while self.cursor.known() < self.memory.shape.depth && self.poll()? {}
        Ok(self.cursor.known())
    }

    #[inline]
    fn poll(&mut self) -> Result<bool> {
        let next = self.cursor.arrived;
        let arrived = self
            .cursor
            .poll(self.memory.number(next), self.memory.shape.depth)?;
        if arrived {
            // Its transfer from the sender's core begins while the header is checked.
            prefetch(self.memory.payload(next));
        }
        Ok(arrived)
    }

    /// Returns the header of the next message after `ready` returned true; zeros before.
    #[inline]
    pub fn header(&self) -> Header {
        self.current.unwrap_or_default()
    }

    /// Returns the note how the next message was written.
    ///
    /// # Panics
    /// If no message is known to have arrived.
    #[inline]
    pub fn fill(&self) -> Fill {
        assert!(self.cursor.known() > 0, "a note without a message");
        let fill = self.memory.fill(self.cursor.taken);
        // SAFETY: the assertion keeps the line inside the FIFO, and any bytes are a note. The read is volatile because a
        // faulty peer may write meanwhile.
        unsafe { fill.read_volatile() }
    }

    /// Returns the payload of the next message after `ready` has returned true; empty before.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        self.bytes(0, self.header().bytes)
    }

    /// Returns the message that lies `ahead` messages after the next one.
    ///
    /// # Errors
    /// See [`Consumer::ready`].
    ///
    /// # Panics
    /// If [`Consumer::available`] has not seen it.
    #[inline]
    pub fn message(&self, ahead: usize) -> Result<(Header, &[u8])> {
        let header = self.read_header(ahead)?;
        Ok((header, self.bytes(ahead, header.bytes)))
    }

    /// Gives the slot of the next message back.
    ///
    /// # Panics
    /// If no message is known to have arrived.
    #[inline]
    pub fn release(&mut self) {
        assert!(self.cursor.known() > 0, "release without a message");
        self.current = None;
        // SAFETY: `places` holds the region, which keeps the counter mapped.
        self.cursor.release(unsafe { &*self.memory.head });
    }

    /// Returns the number of messages released so far.
    pub fn released(&self) -> u64 {
        self.cursor.taken
    }

    #[inline]
    fn read_header(&self, ahead: usize) -> Result<Header> {
        assert!(ahead < self.cursor.known(), "a message that is not there");
        let line = self.memory.line(self.cursor.taken + ahead as u64);
        // SAFETY: the assertion keeps the line inside the FIFO, and `FifoMemory::new` aligned it.
        // The read is volatile because a faulty peer may write meanwhile, so that the value must be
        // read only once.
        let line = unsafe { line.cast::<SlotLine>().read_volatile() };
        if line.bytes as usize > self.memory.shape.slot_bytes {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "message {} has {} bytes in a slot of {}",
                    self.cursor.taken + ahead as u64,
                    line.bytes,
                    self.memory.shape.slot_bytes
                ),
            ));
        }
        Ok(Header {
            bytes: line.bytes,
            signature: line.signature,
            crc: line.crc,
        })
    }

    #[inline]
    fn bytes(&self, ahead: usize, bytes: u32) -> &[u8] {
        let payload = self.memory.payload(self.cursor.taken + ahead as u64);
        // SAFETY: `read_header` checked that `bytes` does not exceed a slot when it read the header.
        unsafe { std::slice::from_raw_parts(payload, bytes as usize) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod models;
