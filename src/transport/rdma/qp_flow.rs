//! A queue pair of a connection: the work posted and completed, and the numbers that travel with work and
//! messages.

use super::verbs::{Pair, Write};
use crate::mem::FifoShape;
use std::io;

/// Lower bound on the number of work requests in a send queue. A message takes two work requests; credits,
/// probes and the close need room beside messages.
const FEWEST_WORKS: usize = 16;

/// Number of work requests that messages leave free for credits, probes and the close.
const SPARE_WORKS: u64 = 6;

/// Returns the lengths of the send queue and of the receive queue. Each arriving write with immediate data
/// takes a receive request. At most one message per slot, one credit per slot and a close arrive before this
/// side polls.
pub(super) fn queue_sizes(shape: &FifoShape) -> (usize, usize) {
    ((4 * shape.depth).max(FEWEST_WORKS) + 8, 2 * shape.depth + 2)
}

/// Returns the length of the completion queue: all work and all receive requests may wait at once.
pub(super) fn completions(shape: &FifoShape, pairs: usize) -> usize {
    let (works, room) = queue_sizes(shape);
    pairs * (works + room)
}

/// The 32-bit immediate of a write: a kind in the upper two bits, a number below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Immediate {
    /// The 32-bit immediate data of an RDMA write: a kind in the upper two bits, a number in the other bits.
    Message(u64),
    /// The peer has released this many messages, so their slots are free.
    Credit(u64),
    /// The peer sends no more over this queue pair.
    Close,
}

impl Immediate {
    const KIND_AT: u32 = 30;
    /// Largest number that an immediate carries. Counts go on beyond it: only their lower bits are
    /// sent, and the receiver knows the upper bits.
    pub const NUMBERS: u64 = (1 << Immediate::KIND_AT) - 1;

    pub fn encode(self) -> u32 {
        let (kind, number) = match self {
            Immediate::Message(number) => (0, number),
            Immediate::Credit(number) => (1, number),
            Immediate::Close => (2, 0),
        };
        kind << Immediate::KIND_AT | (number & Immediate::NUMBERS) as u32
    }

    /// Returns `None` for a word that no correct peer sends.
    pub fn decode(word: u32) -> Option<Immediate> {
        let number = u64::from(word) & Immediate::NUMBERS;
        match word >> Immediate::KIND_AT {
            0 => Some(Immediate::Message(number)),
            1 => Some(Immediate::Credit(number)),
            2 if number == 0 => Some(Immediate::Close),
            _ => None,
        }
    }
}

/// The work request that a completion belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// A receive request of the queue pair with this index. A write with immediate data has consumed the
    /// request.
    Room(usize),
    /// All work of the queue pair with this index up to this number, counted from 1.
    Done(usize, u64),
}

impl Tag {
    const ROOM: u64 = 1 << 63;
    const INDEX_AT: u32 = 48;

    pub fn encode(self) -> u64 {
        match self {
            Tag::Room(index) => Tag::ROOM | index as u64,
            Tag::Done(index, number) => (index as u64) << Tag::INDEX_AT | number,
        }
    }

    pub fn decode(id: u64) -> Tag {
        match id & Tag::ROOM {
            0 => Tag::Done(
                (id >> Tag::INDEX_AT) as usize,
                id & ((1 << Tag::INDEX_AT) - 1),
            ),
            _ => Tag::Room((id & !Tag::ROOM) as usize),
        }
    }
}

/// A queue pair and its counts of work.
#[derive(Debug)]
pub(super) struct QpFlow {
    pair: Pair,
    index: usize,
    works: u64,
    posted: u64,
    completed: u64,
    /// Number of the last work request that causes a completion on success.
    signaled: u64,
    /// Number of the last work request that belongs to a message.
    message: u64,
    /// Whether the peer has closed the queue pair.
    pub is_closed: bool,
}

impl QpFlow {
    /// Posts receive requests for all immediates that may arrive.
    ///
    /// # Errors
    /// The queue pair rejects a receive request.
    pub fn new(index: usize, pair: Pair, shape: &FifoShape) -> io::Result<QpFlow> {
        let (works, room) = queue_sizes(shape);
        for _ in 0..room {
            pair.post_room(Tag::Room(index).encode())?;
        }
        Ok(QpFlow {
            pair,
            index,
            works: works as u64,
            posted: 0,
            completed: 0,
            signaled: 0,
            message: 0,
            is_closed: false,
        })
    }

    pub fn pair(&self) -> &Pair {
        &self.pair
    }

    /// Posts a receive request in place of a request that a write with immediate data has consumed.
    pub fn post_room(&self) -> io::Result<()> {
        self.pair.post_room(Tag::Room(self.index).encode())
    }

    /// Posts writes in order. The last write causes a completion if `signaled` is set, or if a quarter of the
    /// queue was posted without a completion. The queue therefore never fills up without a completion to
    /// come.
    ///
    /// # Safety
    /// As for [`Pair::post`].
    pub unsafe fn post(&mut self, writes: &mut [Write], signaled: bool) -> io::Result<()> {
        for (write, number) in writes.iter_mut().zip(self.posted + 1..) {
            write.id = Tag::Done(self.index, number).encode();
        }
        self.posted += writes.len() as u64;
        if signaled || self.posted - self.signaled >= self.works / 4 {
            self.signaled = self.posted;
            if let Some(last) = writes.last_mut() {
                last.signaled = true;
            }
        }
        // SAFETY: the caller keeps the pieces in registered memory, as `Pair::post` requires.
        unsafe { self.pair.post(writes) }
    }

    /// Notes that the last posted work ends a message.
    pub fn end_message(&mut self) {
        self.message = self.posted;
    }

    /// Notes that all work up to `number` is complete.
    pub fn complete(&mut self, number: u64) {
        self.completed = number;
    }

    /// Returns whether the send queue has room for a message, in addition to credits, probes and
    /// the close.
    pub fn has_room_for_message(&self) -> bool {
        self.free() >= SPARE_WORKS
    }

    /// Returns the number of free entries of the send queue.
    pub fn free(&self) -> u64 {
        self.works - (self.posted - self.completed)
    }

    /// Returns whether all posted work is complete.
    pub fn idle(&self) -> bool {
        self.posted == self.completed
    }

    /// Returns whether all messages are in the peer's memory.
    pub fn drained(&self) -> bool {
        self.completed >= self.message
    }

    /// Returns whether the last message causes a completion.
    pub fn message_is_signaled(&self) -> bool {
        self.message <= self.signaled
    }

    /// Returns whether the last posted work causes a completion.
    pub fn all_is_signaled(&self) -> bool {
        self.posted <= self.signaled
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn immediates_and_tags_survive_encoding() {
        for number in [0, 1, Immediate::NUMBERS] {
            for immediate in [Immediate::Message(number), Immediate::Credit(number)] {
                assert_eq!(Immediate::decode(immediate.encode()), Some(immediate));
            }
        }
        let close = Immediate::Close;
        assert_eq!(Immediate::decode(close.encode()), Some(close));
        for foreign in [close.encode() + 1, 3 << 30, u32::MAX] {
            assert_eq!(Immediate::decode(foreign), None);
        }
        // Only the lower bits of a count travel.
        let credit = Immediate::Credit(Immediate::NUMBERS + 6).encode();
        assert_eq!(Immediate::decode(credit), Some(Immediate::Credit(5)));
        for index in [0, 7] {
            for tag in [Tag::Room(index), Tag::Done(index, (1 << 48) - 1)] {
                assert_eq!(Tag::decode(tag.encode()), tag);
            }
        }
    }
}
