//! The FIFO of slots: one producer, one consumer, a power of two of slots.
//!
//! ```text
//! memory of the receiver:  | line 64 | payload | line 64 | payload | ...
//! memory of the sender:    head (128 bytes) ...
//! ```
//! The tail is spread over the slots: each slot's line carries the number of its message, so that
//! the receiver polls the very line whose header it reads next. A tail of its own would cost
//! another trip between the cores for every message.
//!
//! Each counter lies where it is polled; the head has a pair of cache lines to itself (the
//! prefetcher fetches pairs). Counters are 64-bit and never reset. Each side indexes by its own
//! counters; what the other side writes is a hint that is bounded by local geometry before it is
//! used.

use super::region::Region;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::types::SIGNATURE_WORDS;
use std::sync::Arc;

/// Bytes that a counter takes.
pub const COUNTER_BYTES: usize = 128;

/// Bytes before the payload of a slot: the header's cache line.
pub const LINE_BYTES: usize = 64;

/// What precedes the payload of every message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Payload bytes.
    pub bytes: u32,
    /// Call signature of the sender.
    pub signature: [u64; SIGNATURE_WORDS],
}

/// Header as it lies in a slot, without the number that announces it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Line {
    signature: [u64; SIGNATURE_WORDS],
    bytes: u32,
    rest: u32,
}

/// Where in a line its message's number lies: message m of a FIFO is there when it reads m + 1.
const NUMBER_AT: usize = size_of::<Line>();

const _: () = assert!(NUMBER_AT + size_of::<u64>() <= LINE_BYTES);

/// Size of a FIFO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FifoShape {
    /// Slots, a power of two.
    pub depth: usize,
    /// Payload bytes of a slot, a multiple of 64.
    pub slot_bytes: usize,
}

impl FifoShape {
    /// Bytes of all slots.
    pub fn bytes(&self) -> usize {
        self.depth * self.stride()
    }

    fn stride(&self) -> usize {
        LINE_BYTES + self.slot_bytes
    }
}

/// A place in a region.
#[derive(Clone, Debug)]
pub struct Place {
    /// Where.
    pub region: Arc<Region>,
    /// At which byte.
    pub at: usize,
}

/// Where the parts of a FIFO are.
#[derive(Clone, Debug)]
pub struct FifoPlaces {
    /// [`FifoShape::bytes`] bytes, in the receiver's memory.
    pub slots: Place,
    /// [`COUNTER_BYTES`] bytes, in the sender's memory.
    pub head: Place,
}

impl FifoPlaces {
    /// Bytes of a FIFO that lies in one piece.
    pub fn bytes(shape: &FifoShape) -> usize {
        COUNTER_BYTES + shape.bytes()
    }

    /// A FIFO in one piece at byte `at`.
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

/// Pointers of one end, and what keeps them valid.
#[derive(Debug)]
struct Memory {
    shape: FifoShape,
    places: FifoPlaces,
    slots: *mut u8,
    head: *const AtomicU64,
}

// SAFETY: the pointers lead into regions that `places` holds. Counters are atomic; slots are
// handed from one end to the other by the counters.
unsafe impl Send for Memory {}

impl Memory {
    fn new(shape: FifoShape, places: FifoPlaces) -> Memory {
        assert!(
            shape.depth.is_power_of_two() && shape.slot_bytes.is_multiple_of(64),
            "impossible FIFO {shape:?}"
        );
        let slots = &places.slots;
        Memory {
            slots: slots.region.place(slots.at, shape.bytes(), 64),
            head: places.head.region.counter(places.head.at),
            shape,
            places,
        }
    }

    #[inline]
    fn head(&self) -> &AtomicU64 {
        debug_assert!(self.places.head.region.bytes() > 0);
        // SAFETY: `places` keeps the region mapped.
        unsafe { &*self.head }
    }

    /// The header line of message `number`; its payload follows.
    #[inline]
    fn line(&self, number: u64) -> *mut u8 {
        let index = number as usize & (self.shape.depth - 1);
        // SAFETY: below `depth` strides, which `new` found to be inside the region.
        unsafe { self.slots.add(index * self.shape.stride()) }
    }

    /// The word that announces message `number`.
    #[inline]
    fn number(&self, number: u64) -> &AtomicU64 {
        // SAFETY: inside the line, at a multiple of 8; only accessed atomically.
        unsafe { &*self.line(number).add(NUMBER_AT).cast::<AtomicU64>() }
    }

    #[inline]
    fn payload(&self, number: u64) -> *mut u8 {
        // SAFETY: a slot is longer than its line.
        unsafe { self.line(number).add(LINE_BYTES) }
    }
}

/// The sender's counters.
#[derive(Debug, Default)]
struct SendCursor {
    sent: u64,
    freed: u64,
}

impl SendCursor {
    /// Free slots, without looking at the receiver's counter.
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

    /// `number` is the word of the slot that message `sent` is in.
    #[inline]
    fn publish(&mut self, number: &AtomicU64) {
        self.sent += 1;
        // SYNC POINT slot-number: publishes line and payload to `RecvCursor::look`.
        number.store(self.sent, Ordering::Release);
    }
}

/// The receiver's counters.
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

    /// Whether message `arrived` has come; `number` is the word of the slot that it goes to.
    #[inline]
    fn look(&mut self, number: &AtomicU64, depth: usize) -> Result<bool> {
        // SYNC POINT slot-number: pairs with `SendCursor::publish`; line and payload are there.
        let seen = number.load(Ordering::Acquire);
        if seen == self.arrived + 1 {
            self.arrived += 1;
            return Ok(true);
        }
        // Until then the word is that of the message that was in the slot before.
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
            "the peer says that it has {verb} {seen} slots, which is not between {low} and {high}: \
             shared memory is corrupted"
        ),
    )
}

/// The end that fills slots.
#[derive(Debug)]
pub struct Producer {
    memory: Memory,
    cursor: SendCursor,
}

impl Producer {
    /// The sending end of a FIFO whose counters are zero.
    ///
    /// # Safety
    /// There is no other producer of these places, in any process that plays by the rules.
    ///
    /// # Panics
    /// If the places are outside their regions.
    pub unsafe fn new(shape: FifoShape, places: FifoPlaces) -> Producer {
        Producer {
            memory: Memory::new(shape, places),
            cursor: SendCursor::default(),
        }
    }

    /// Whether a slot is free.
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

    /// How many slots are free.
    ///
    /// # Errors
    /// As for [`Producer::ready`].
    #[inline]
    pub fn free(&mut self) -> Result<usize> {
        self.cursor.refresh(self.memory.head())?;
        Ok(self.cursor.known(self.memory.shape.depth))
    }

    /// Payload space of the free slot that is `ahead` of the next one to be published.
    ///
    /// # Panics
    /// If that slot is not known to be free.
    #[inline]
    pub fn slot(&mut self, ahead: usize) -> &mut [u8] {
        let number = self.check(ahead);
        // SAFETY: a whole slot, which is ours until it is published, by the check.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.memory.payload(number),
                self.memory.shape.slot_bytes,
            )
        }
    }

    /// The next slot to be published, for reading.
    ///
    /// # Panics
    /// If it is not known to be free.
    #[inline]
    pub fn written(&self) -> &[u8] {
        let number = self.check(0);
        // SAFETY: as for `slot`.
        unsafe {
            std::slice::from_raw_parts(self.memory.payload(number), self.memory.shape.slot_bytes)
        }
    }

    /// Hands the next slot to the consumer.
    ///
    /// # Panics
    /// If it is not known to be free, or `header.bytes` exceeds it.
    #[inline]
    pub fn publish(&mut self, header: Header) {
        let number = self.check(0);
        assert!(
            header.bytes as usize <= self.memory.shape.slot_bytes,
            "a message of {} bytes in a slot of {}",
            header.bytes,
            self.memory.shape.slot_bytes
        );
        let line = Line {
            signature: header.signature,
            bytes: header.bytes,
            rest: 0,
        };
        // SAFETY: the line of a slot that is ours; 64-byte aligned by `Memory::new`.
        unsafe { self.memory.line(number).cast::<Line>().write(line) };
        self.cursor.publish(self.memory.number(number));
    }

    /// Messages published so far.
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

/// The end that reads slots.
#[derive(Debug)]
pub struct Consumer {
    memory: Memory,
    cursor: RecvCursor,
    /// Header of the next message, copied once: the peer could change it after it was checked.
    current: Option<Header>,
}

impl Consumer {
    /// The receiving end of a FIFO whose counters are zero.
    ///
    /// # Safety
    /// There is no other consumer of these places, in any process that plays by the rules.
    ///
    /// # Panics
    /// If the places are outside their regions.
    pub unsafe fn new(shape: FifoShape, places: FifoPlaces) -> Consumer {
        Consumer {
            memory: Memory::new(shape, places),
            cursor: RecvCursor::default(),
            current: None,
        }
    }

    /// Whether a message is there.
    ///
    /// # Errors
    /// Mismatch, with the numbers, if the sender's counter or header is impossible.
    #[inline]
    pub fn ready(&mut self) -> Result<bool> {
        if self.current.is_some() {
            return Ok(true);
        }
        if self.cursor.known() == 0 && !self.look()? {
            return Ok(false);
        }
        self.current = Some(self.read_header(0)?);
        Ok(true)
    }

    /// How many messages are there.
    ///
    /// # Errors
    /// As for [`Consumer::ready`].
    #[inline]
    pub fn available(&mut self) -> Result<usize> {
        while self.cursor.known() < self.memory.shape.depth && self.look()? {}
        Ok(self.cursor.known())
    }

    #[inline]
    fn look(&mut self) -> Result<bool> {
        let number = self.memory.number(self.cursor.arrived);
        self.cursor.look(number, self.memory.shape.depth)
    }

    /// Header of the next message, after `ready` returned true; zeros before.
    #[inline]
    pub fn header(&self) -> Header {
        self.current.unwrap_or_default()
    }

    /// Payload of the next message, after `ready` returned true; nothing before.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        self.bytes(0, self.header().bytes)
    }

    /// The message that is `ahead` of the next one.
    ///
    /// # Errors
    /// As for [`Consumer::ready`].
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
    /// If no message is known to be there.
    #[inline]
    pub fn release(&mut self) {
        assert!(self.cursor.known() > 0, "release without a message");
        self.current = None;
        // SAFETY: `places` keeps the region mapped.
        self.cursor.release(unsafe { &*self.memory.head });
    }

    /// Messages released so far.
    pub fn released(&self) -> u64 {
        self.cursor.taken
    }

    fn read_header(&self, ahead: usize) -> Result<Header> {
        assert!(ahead < self.cursor.known(), "a message that is not there");
        let line = self.memory.line(self.cursor.taken + ahead as u64);
        // SAFETY: a whole, aligned line of a slot that was handed to us. Volatile: a peer that
        // breaks the rules may write meanwhile, and the value must be read only once.
        let line = unsafe { line.cast::<Line>().read_volatile() };
        if line.bytes as usize > self.memory.shape.slot_bytes {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "message {} says that it has {} bytes in a slot of {}",
                    self.cursor.taken + ahead as u64,
                    line.bytes,
                    self.memory.shape.slot_bytes
                ),
            ));
        }
        Ok(Header {
            bytes: line.bytes,
            signature: line.signature,
        })
    }

    #[inline]
    fn bytes(&self, ahead: usize, bytes: u32) -> &[u8] {
        let payload = self.memory.payload(self.cursor.taken + ahead as u64);
        // SAFETY: `bytes` was bounded by the slot when its header was read.
        unsafe { std::slice::from_raw_parts(payload, bytes as usize) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::cell::UnsafeCell;

    const DEPTH: usize = 2;
    const MESSAGES: u64 = 4;

    struct Shared {
        numbers: [AtomicU64; DEPTH],
        head: AtomicU64,
        slots: [UnsafeCell<u64>; DEPTH],
    }

    /// loom finds an access to a slot that the counters do not order, and a wrong value.
    #[test]
    fn loom_slots_are_handed_over_and_back() {
        loom::model(|| {
            let shared = Arc::new(Shared {
                numbers: std::array::from_fn(|_| AtomicU64::new(0)),
                head: AtomicU64::new(0),
                slots: Default::default(),
            });
            let there = shared.clone();
            let sender = loom::thread::spawn(move || {
                let mut cursor = SendCursor::default();
                for value in 0..MESSAGES {
                    while cursor.known(DEPTH) == 0 {
                        cursor.refresh(&there.head).unwrap();
                        loom::thread::yield_now();
                    }
                    let index = cursor.sent as usize & (DEPTH - 1);
                    let slot = &there.slots[index];
                    // SAFETY: loom checks that nobody else is at it.
                    slot.with_mut(|slot| unsafe { *slot = value + 100 });
                    cursor.publish(&there.numbers[index]);
                }
            });
            let mut cursor = RecvCursor::default();
            for value in 0..MESSAGES {
                let index = cursor.taken as usize & (DEPTH - 1);
                while !cursor.look(&shared.numbers[index], DEPTH).unwrap() {
                    loom::thread::yield_now();
                }
                let slot = &shared.slots[index];
                // SAFETY: as above.
                assert_eq!(slot.with(|slot| unsafe { *slot }), value + 100);
                cursor.release(&shared.head);
            }
            sender.join().unwrap();
        });
    }
}
