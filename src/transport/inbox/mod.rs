//! The inbox of a rank: memory into which its peers on the same host write, and the ends of the
//! connections through it. Threads share it through a registry, processes through a descriptor.
//!
//! ```text
//! 0            doorbell of the rank
//! 4096         heads of its outgoing FIFOs, by channel and receiver
//! next page    slots of its incoming FIFOs, by channel and sender
//! end          memory of emulated links, if there are any
//! ```
//! Senders write into the receiver's memory, so that a byte crosses the bus once. FIFOs of ranks with
//! another transport stay untouched and take address space only.

mod ends;
mod store_choice;

pub(super) use ends::{InboxRecv, InboxSend};

use crate::error::Result;
use crate::mem::{COUNTER_BYTES, DOORBELL_BYTES, FifoPlaces, FifoShape, Place, Region, Ringer};
use std::os::fd::OwnedFd;
use std::sync::Arc;

const DOORBELL_AT: usize = 0;
const PAGE: usize = 4096;
const _: () = assert!(DOORBELL_BYTES <= PAGE);

/// The memory in which peers write the incoming slots of a rank. Loopback and shared memory use one
/// inbox per rank, so that a single doorbell ends a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InboxMemory {
    /// The transport has memory of its own.
    None,
    /// Memory of this process.
    Private,
    /// Memory that other processes map.
    Shareable,
}

/// The inbox of this rank.
pub(crate) struct Inbox {
    layout: InboxLayout,
    region: Arc<Region>,
    /// The descriptor of the region, if other processes map it.
    memory: Option<OwnedFd>,
}

impl Inbox {
    /// Allocates an inbox; `None` if no transport needs one.
    ///
    /// # Errors
    /// System if memory is short.
    pub fn new(layout: InboxLayout, memory: InboxMemory) -> Result<Option<Inbox>> {
        let (region, memory) = match memory {
            InboxMemory::None => return Ok(None),
            InboxMemory::Private => (Region::heap(layout.bytes())?, None),
            InboxMemory::Shareable => {
                let (region, memory) = Region::shareable(layout.bytes())?;
                (region, Some(memory))
            }
        };
        Ok(Some(Inbox {
            layout,
            region,
            memory,
        }))
    }

    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the descriptor of the region, if other processes map it.
    pub fn memory(&self) -> Option<&OwnedFd> {
        self.memory.as_ref()
    }

    /// Returns the layout, which is equal on all ranks.
    pub fn layout(&self) -> &InboxLayout {
        &self.layout
    }

    /// Returns the bytes of one inbox, which are equal on all ranks.
    pub fn bytes(&self) -> usize {
        self.layout.bytes()
    }

    /// Returns the ends of rank `me` to and from `peer` on `channel`; `region` is the inbox of
    /// `peer`. If ranks are `crowded`, they share cores and sleep often.
    ///
    /// # Safety
    /// Each rank calls it once for each peer and channel.
    pub unsafe fn join(
        &self,
        (me, (peer, region)): (usize, (usize, &Arc<Region>)),
        channel: usize,
        who: &str,
        crowded: bool,
    ) -> (InboxSend, InboxRecv) {
        let (own, their) = ((me, &self.region), (peer, region));
        // SAFETY: the caller calls this once for each peer and channel.
        unsafe { self.layout.join(own, their, channel, who, crowded) }
    }
}

/// Layout of an inbox, equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InboxLayout {
    pub nranks: usize,
    pub channels: usize,
    pub shape: FifoShape,
    /// Bytes behind the slots, for emulated links.
    pub tail_bytes: usize,
}

impl InboxLayout {
    /// Returns the bytes of an inbox.
    pub fn bytes(&self) -> usize {
        self.tail_at() + self.tail_bytes
    }

    /// Returns the place of the memory for emulated links.
    pub fn tail_at(&self) -> usize {
        self.slots_at(self.fifos())
    }

    /// Returns the number of incoming FIFOs, and of outgoing ones.
    pub fn fifos(&self) -> usize {
        self.nranks * self.channels
    }

    /// Returns the index of the FIFO with `peer` on `channel`, among the incoming and among the outgoing ones.
    pub fn fifo(&self, channel: usize, peer: usize) -> usize {
        channel * self.nranks + peer
    }

    /// Returns the ends of `me` to and from `peer` on `channel`. If ranks are `crowded`, they share cores
    /// and sleep often.
    ///
    /// # Safety
    /// Each rank calls it once for each peer and channel.
    unsafe fn join(
        &self,
        (me, own): (usize, &Arc<Region>),
        (peer, their): (usize, &Arc<Region>),
        channel: usize,
        who: &str,
        crowded: bool,
    ) -> (InboxSend, InboxRecv) {
        // The peer rings without a fence if ranks have cores of their own, because they rarely
        // sleep, and never for long.
        let ringer = Ringer::new(their.clone(), DOORBELL_AT, crowded);
        let outgoing = self.places((me, own), (peer, their), channel);
        let incoming = self.places((peer, their), (me, own), channel);
        // SAFETY: the caller calls this once for each peer and channel, and `places` gives each call places
        // of its own.
        unsafe {
            (
                InboxSend::new(self.shape, outgoing, ringer.clone(), who),
                InboxRecv::new(self.shape, incoming, ringer, who),
            )
        }
    }

    fn places(
        &self,
        (from, sender): (usize, &Arc<Region>),
        (to, receiver): (usize, &Arc<Region>),
        channel: usize,
    ) -> FifoPlaces {
        let (incoming, outgoing) = (self.fifo(channel, from), self.fifo(channel, to));
        let place = |region: &Arc<Region>, at| Place {
            region: region.clone(),
            at,
        };
        FifoPlaces {
            slots: place(receiver, self.slots_at(incoming)),
            head: place(sender, PAGE + outgoing * COUNTER_BYTES),
        }
    }

    fn slots_at(&self, fifo: usize) -> usize {
        (PAGE + self.fifos() * COUNTER_BYTES).next_multiple_of(PAGE) + fifo * self.shape.bytes()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn places_of_an_inbox_do_not_overlap() {
        let layout = InboxLayout {
            nranks: 3,
            channels: 2,
            shape: FifoShape {
                depth: 2,
                slot_bytes: 64,
            },
            tail_bytes: 0,
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
