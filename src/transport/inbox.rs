//! The region of one rank, into which its peers on the same host write, and the ends of the
//! connections through it. The same for threads (by reference) and processes (by descriptor).
//!
//! ```text
//! 0            doorbell of the rank
//! 4096         heads of its outgoing FIFOs, by channel and receiver
//! next page    slots of its incoming FIFOs, by channel and sender
//! ```
//! Senders write into the receiver's memory: one trip over the bus. Places of ranks that are
//! connected otherwise are holes, which cost address space only.

use super::{Header, RecvEnd, SendEnd};
use crate::error::Result;
use crate::mem::{
    COUNTER_BYTES, Consumer, DOORBELL_BYTES, FifoPlaces, FifoShape, Place, Producer, Region, Ringer,
};
use std::sync::Arc;

const DOORBELL_AT: usize = 0;
const PAGE: usize = 4096;
const _: () = assert!(DOORBELL_BYTES <= PAGE);

/// Where everything is; the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct InboxLayout {
    pub nranks: usize,
    pub channels: usize,
    pub shape: FifoShape,
}

impl InboxLayout {
    /// Bytes of one rank's region.
    pub fn bytes(&self) -> usize {
        self.slots_at(self.fifos())
    }

    /// Both ends' halves of the pair: what `me` sends to `peer` on `channel`, and what it
    /// receives. `crowded`: ranks share cores, so that they sleep often.
    ///
    /// # Safety
    /// Called once for each rank, peer and channel.
    pub unsafe fn join(
        &self,
        (me, own): (usize, &Arc<Region>),
        (peer, their): (usize, &Arc<Region>),
        channel: usize,
        who: &str,
        crowded: bool,
    ) -> (InboxSend, InboxRecv) {
        // A rank with a core of its own seldom sleeps, and then not for long.
        let ringer = Ringer::new(their.clone(), DOORBELL_AT, crowded);
        let outgoing = self.places((me, own), (peer, their), channel);
        let incoming = self.places((peer, their), (me, own), channel);
        // SAFETY: the caller calls once, and these places are this pair's and channel's alone.
        unsafe {
            (
                InboxSend {
                    producer: Producer::new(self.shape, outgoing),
                    ringer: ringer.clone(),
                    who: who.into(),
                },
                InboxRecv {
                    consumer: Consumer::new(self.shape, incoming),
                    ringer,
                    who: who.into(),
                },
            )
        }
    }

    fn places(
        &self,
        (from, sender): (usize, &Arc<Region>),
        (to, receiver): (usize, &Arc<Region>),
        channel: usize,
    ) -> FifoPlaces {
        let (incoming, outgoing) = (channel * self.nranks + from, channel * self.nranks + to);
        let place = |region: &Arc<Region>, at| Place {
            region: region.clone(),
            at,
        };
        FifoPlaces {
            slots: place(receiver, self.slots_at(incoming)),
            head: place(sender, PAGE + outgoing * COUNTER_BYTES),
        }
    }

    fn fifos(&self) -> usize {
        self.nranks * self.channels
    }

    fn slots_at(&self, fifo: usize) -> usize {
        (PAGE + self.fifos() * COUNTER_BYTES).next_multiple_of(PAGE) + fifo * self.shape.bytes()
    }
}

/// Sends into a peer's inbox.
#[derive(Debug)]
pub(super) struct InboxSend {
    producer: Producer,
    ringer: Ringer,
    who: Box<str>,
}

impl SendEnd for InboxSend {
    #[inline]
    fn ready(&mut self) -> Result<bool> {
        self.producer
            .ready()
            .map_err(|error| error.context(&self.who))
    }

    #[inline]
    fn slot(&mut self) -> &mut [u8] {
        self.producer.slot(0)
    }

    #[inline]
    fn written(&self) -> &[u8] {
        self.producer.written()
    }

    #[inline]
    fn publish(&mut self, header: Header) {
        self.producer.publish(header);
        self.ringer.ring();
    }

    #[inline]
    fn flushed(&mut self) -> Result<bool> {
        Ok(true)
    }
}

/// Receives from a peer through the own inbox.
#[derive(Debug)]
pub(super) struct InboxRecv {
    consumer: Consumer,
    ringer: Ringer,
    who: Box<str>,
}

impl RecvEnd for InboxRecv {
    #[inline]
    fn ready(&mut self) -> Result<bool> {
        self.consumer
            .ready()
            .map_err(|error| error.context(&self.who))
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
        self.consumer.release();
        self.ringer.ring();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn no_two_places_overlap() {
        let layout = InboxLayout {
            nranks: 3,
            channels: 2,
            shape: FifoShape {
                depth: 2,
                slot_bytes: 64,
            },
        };
        let regions: Vec<_> = (0..3)
            .map(|_| Region::heap(layout.bytes()).unwrap())
            .collect();
        let mut spans = vec![[Vec::new(), Vec::new(), Vec::new()]].remove(0);
        for spans in &mut spans {
            spans.push((0, DOORBELL_BYTES));
        }
        for (from, to) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)] {
            for channel in 0..2 {
                let places = layout.places((from, &regions[from]), (to, &regions[to]), channel);
                assert!(Arc::ptr_eq(&places.head.region, &regions[from]));
                assert!(Arc::ptr_eq(&places.slots.region, &regions[to]));
                spans[from].push((places.head.at, COUNTER_BYTES));
                spans[to].push((places.slots.at, layout.shape.bytes()));
            }
        }
        for spans in &mut spans {
            spans.sort_unstable();
            assert!(
                spans
                    .windows(2)
                    .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0)
            );
            let (at, bytes) = spans[spans.len() - 1];
            assert!(at + bytes <= layout.bytes());
        }
    }
}
