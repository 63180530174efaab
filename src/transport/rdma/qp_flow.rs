//! A queue pair of a connection: how much was handed to it, how much of that is known to be done, and
//! what the numbers say that travel with work and messages.

use super::verbs::{Pair, Write};
use crate::mem::FifoShape;
use std::io;

/// Works that a queue pair has at least: a message takes two, and a credit, a probe and a farewell
/// must find places.
const FEWEST_WORKS: usize = 16;

/// What a sender leaves free for those.
const SPARE_WORKS: u64 = 6;

/// How many works and how much room for immediates a queue pair needs. The peer has at most one
/// message in each of its slots, and at most one credit for each of ours, that this side has not
/// looked at; and it may leave.
pub(super) fn queue_sizes(shape: &FifoShape) -> (usize, usize) {
    ((4 * shape.depth).max(FEWEST_WORKS) + 8, 2 * shape.depth + 2)
}

/// Completions that may be waiting at once.
pub(super) fn completions(shape: &FifoShape, pairs: usize) -> usize {
    let (works, room) = queue_sizes(shape);
    pairs * (works + room)
}

/// What 32 bits say that come with a write: a kind in the upper two, a number below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Immediate {
    /// This message is there, all of it.
    Message(u64),
    /// So many messages were taken, and their slots are free.
    Credit(u64),
    /// The peer leaves, and sends no more this way.
    Farewell,
}

impl Immediate {
    const KIND_AT: u32 = 30;
    /// Numbers count on beyond this; the rest follows from where the receiver is.
    pub const NUMBERS: u64 = (1 << Immediate::KIND_AT) - 1;

    pub fn encode(self) -> u32 {
        let (kind, number) = match self {
            Immediate::Message(number) => (0, number),
            Immediate::Credit(number) => (1, number),
            Immediate::Farewell => (2, 0),
        };
        kind << Immediate::KIND_AT | (number & Immediate::NUMBERS) as u32
    }

    /// `None`: no peer that keeps the rules says this.
    pub fn decode(word: u32) -> Option<Immediate> {
        let number = u64::from(word) & Immediate::NUMBERS;
        match word >> Immediate::KIND_AT {
            0 => Some(Immediate::Message(number)),
            1 => Some(Immediate::Credit(number)),
            2 if number == 0 => Some(Immediate::Farewell),
            _ => None,
        }
    }
}

/// What a completion is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// Room of the queue pair with this index was taken by an immediate.
    Room(usize),
    /// Works of the queue pair with this index are done, up to this one, counted from 1.
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

/// A queue pair and how far it is.
#[derive(Debug)]
pub(super) struct QpFlow {
    pair: Pair,
    index: usize,
    works: u64,
    posted: u64,
    completed: u64,
    /// The last work that will complete even if all goes well.
    signaled: u64,
    /// The last work of a message.
    message: u64,
    /// Whether the peer said farewell over it.
    pub farewell: bool,
}

impl QpFlow {
    /// With room for all that may come.
    ///
    /// # Errors
    /// The queue pair takes no room.
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
            farewell: false,
        })
    }

    pub fn pair(&self) -> &Pair {
        &self.pair
    }

    /// Makes room again after an immediate has come.
    pub fn post_room(&self) -> io::Result<()> {
        self.pair.post_room(Tag::Room(self.index).encode())
    }

    /// Hands writes to the device, in order; the last has a completion if `signaled`, or if it is
    /// time for one: often enough that places come back before the last is taken.
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
        // SAFETY: by the caller's word.
        unsafe { self.pair.post(writes) }
    }

    /// What was posted last ends a message.
    pub fn message_ends(&mut self) {
        self.message = self.posted;
    }

    /// All works up to this are done.
    pub fn complete(&mut self, number: u64) {
        self.completed = number;
    }

    /// Whether there are places for a message, and for what is no message.
    pub fn has_places_for_message(&self) -> bool {
        self.free() >= SPARE_WORKS
    }

    /// Places that no work holds.
    pub fn free(&self) -> u64 {
        self.works - (self.posted - self.completed)
    }

    /// Whether all that was posted is done.
    pub fn idle(&self) -> bool {
        self.posted == self.completed
    }

    /// Whether all messages are in the peer's memory.
    pub fn drained(&self) -> bool {
        self.completed >= self.message
    }

    /// Whether the end of the last message will show by itself.
    pub fn message_is_signaled(&self) -> bool {
        self.message <= self.signaled
    }

    /// Whether the end of all that was posted will show by itself.
    pub fn all_is_signaled(&self) -> bool {
        self.posted <= self.signaled
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn immediates_and_tags_come_back_as_they_went() {
        for number in [0, 1, Immediate::NUMBERS] {
            for immediate in [Immediate::Message(number), Immediate::Credit(number)] {
                assert_eq!(Immediate::decode(immediate.encode()), Some(immediate));
            }
        }
        let farewell = Immediate::Farewell;
        assert_eq!(Immediate::decode(farewell.encode()), Some(farewell));
        for foreign in [farewell.encode() + 1, 3 << 30, u32::MAX] {
            assert_eq!(Immediate::decode(foreign), None);
        }
        // Counts go on; what travels is their end.
        let credit = Immediate::Credit(Immediate::NUMBERS + 6).encode();
        assert_eq!(Immediate::decode(credit), Some(Immediate::Credit(5)));
        for index in [0, 7] {
            for tag in [Tag::Room(index), Tag::Done(index, (1 << 48) - 1)] {
                assert_eq!(Tag::decode(tag.encode()), tag);
            }
        }
    }
}
