//! The ends of a connection through inboxes.

use super::way_choice::{LEAST_BYTES, WayChoice, is_streamed, is_timed};
use crate::cpu::{Tile, copy_streaming};
use crate::error::Result;
use crate::mem::{Consumer, FifoPlaces, FifoShape, Fill, Header, Producer, Ringer, Wishes};
use crate::sys::clock::monotonic_nanoseconds;
use crate::transport::{RecvEnd, SendEnd};

/// The message that the caller fills.
#[derive(Clone, Copy, Debug, Default)]
struct Filling {
    /// Whether the caller fills the stage, whose bytes then go to the slot past the caches.
    is_staged: bool,
    /// Time of the begin, if the write is measured.
    begun: Option<u64>,
}

impl Filling {
    /// Returns how to write a message of `bytes`.
    #[inline]
    fn new(wishes: &Wishes, bytes: usize) -> Filling {
        if bytes < LEAST_BYTES {
            return Filling::default();
        }
        let wishes = wishes.get();
        Filling {
            is_staged: is_streamed(wishes, bytes),
            begun: is_timed(wishes, bytes).then(monotonic_nanoseconds),
        }
    }

    /// Returns the note for the receiver.
    #[inline]
    fn note(&self) -> Fill {
        let taken = |begun| {
            let taken = monotonic_nanoseconds().saturating_sub(begun);
            taken.clamp(1, u64::from(u32::MAX))
        };
        Fill {
            nanoseconds: self.begun.map_or(0, |begun| taken(begun) as u32),
            streamed: u32::from(self.is_staged),
        }
    }
}

/// Sends into the inbox of a peer.
#[derive(Debug)]
pub(in crate::transport) struct InboxSend {
    producer: Producer,
    ringer: Ringer,
    wishes: Wishes,
    filling: Filling,
    /// A slot's bytes in this rank's memory, in which the caller fills messages that then go past the caches. It is
    /// empty until the first of them.
    stage: Tile,
    slot_bytes: usize,
    who: Box<str>,
}

impl InboxSend {
    /// Makes the end to the peer `who`.
    ///
    /// # Safety
    /// As for [`Producer::new`].
    pub unsafe fn new(
        shape: FifoShape,
        places: FifoPlaces,
        ringer: Ringer,
        who: &str,
    ) -> InboxSend {
        let wishes = Wishes::new(&places);
        InboxSend {
            // SAFETY: the caller's promise.
            producer: unsafe { Producer::new(shape, places) },
            ringer,
            wishes,
            filling: Filling::default(),
            stage: Tile::new(0),
            slot_bytes: shape.slot_bytes,
            who: who.into(),
        }
    }
}

impl SendEnd for InboxSend {
    #[inline]
    fn ready(&mut self) -> Result<bool> {
        self.producer
            .ready()
            .map_err(|error| error.context(&self.who))
    }

    #[inline]
    fn begin(&mut self, bytes: usize) {
        self.filling = Filling::new(&self.wishes, bytes);
    }

    #[inline]
    fn slot(&mut self) -> &mut [u8] {
        match self.filling.is_staged {
            false => self.producer.slot(0),
            true => {
                if self.stage.capacity() == 0 {
                    self.stage = Tile::new(self.slot_bytes / size_of::<u64>());
                }
                self.stage.bytes_mut(self.slot_bytes)
            }
        }
    }

    #[inline]
    fn written(&self) -> &[u8] {
        match self.filling.is_staged {
            false => self.producer.written(),
            true => self.stage.bytes(self.slot_bytes),
        }
    }

    #[inline]
    fn publish(&mut self, header: Header) {
        let filling = std::mem::take(&mut self.filling);
        if filling.is_staged {
            let bytes = header.bytes as usize;
            let slot = &mut self.producer.slot(0)[..bytes];
            copy_streaming(slot, self.stage.bytes(bytes));
        }
        self.producer.publish_filled(header, filling.note());
        self.ringer.ring();
    }

    #[inline]
    fn put(&mut self, header: &Header, payload: &[u8]) {
        let filling = Filling::new(&self.wishes, payload.len());
        let slot = &mut self.producer.slot(0)[..payload.len()];
        match filling.is_staged {
            false => slot.copy_from_slice(payload),
            true => copy_streaming(slot, payload),
        }
        self.producer.publish_filled(*header, filling.note());
        self.ringer.ring();
    }

    #[inline]
    fn flushed(&mut self) -> Result<bool> {
        Ok(true)
    }

    fn is_immediate(&self) -> bool {
        true
    }
}

/// Receives from a peer through this rank's inbox.
#[derive(Debug)]
pub(in crate::transport) struct InboxRecv {
    consumer: Consumer,
    ringer: Ringer,
    wishes: Wishes,
    choice: WayChoice,
    /// Time at which the next message was first seen, if its write was measured.
    seen: Option<u64>,
    who: Box<str>,
}

impl InboxRecv {
    /// Makes the end from the peer `who`.
    ///
    /// # Safety
    /// As for [`Consumer::new`].
    pub unsafe fn new(
        shape: FifoShape,
        places: FifoPlaces,
        ringer: Ringer,
        who: &str,
    ) -> InboxRecv {
        let (wishes, choice) = (Wishes::new(&places), WayChoice::new());
        wishes.set(choice.wishes());
        InboxRecv {
            // SAFETY: the caller's promise.
            consumer: unsafe { Consumer::new(shape, places) },
            ringer,
            wishes,
            choice,
            seen: None,
            who: who.into(),
        }
    }

    /// Counts the message that is released, and sends the sender new wishes if they change.
    #[inline]
    fn count(&mut self) {
        let bytes = self.consumer.header().bytes as usize;
        if bytes < LEAST_BYTES {
            return;
        }
        let fill = self.consumer.fill();
        let seen = self.seen.take();
        let taken = seen.map(|seen| {
            let read = monotonic_nanoseconds().saturating_sub(seen);
            u64::from(fill.nanoseconds) + read
        });
        if let Some(wishes) = self.choice.count(bytes, fill.streamed != 0, taken) {
            self.wishes.set(wishes);
        }
    }
}

impl RecvEnd for InboxRecv {
    #[inline]
    fn ready(&mut self) -> Result<bool> {
        let ready = self.consumer.ready();
        let ready = ready.map_err(|error| error.context(&self.who))?;
        if ready && self.consumer.fill().nanoseconds != 0 && self.seen.is_none() {
            self.seen = Some(monotonic_nanoseconds());
        }
        Ok(ready)
    }

    #[inline]
    fn header(&self) -> Header {
        self.consumer.header()
    }

    #[inline]
    fn payload(&self) -> &[u8] {
        self.consumer.payload()
    }

    #[inline]
    fn release(&mut self) {
        self.count();
        self.consumer.release();
        self.ringer.ring();
    }
}
