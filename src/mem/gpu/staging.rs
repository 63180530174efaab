//! The boxes of a pair of ranks on different hosts, as the host sees them: both in pinned memory of
//! the own host, one written by kernels and one read by them.
//!
//! The host stands in for the peer. What kernels publish in the outbox it takes away, and gives
//! back the slot in the inbox, where a peer's `head` is polled; what has come it puts into a slot
//! of the inbox, and it looks for the credit in the outbox.
//!
//! | | slots | `tail` | `head` |
//! | --- | --- | --- | --- |
//! | to the peer | outbox, by kernels | outbox, by kernels | inbox, by the host |
//! | from the peer | inbox, by the host | inbox, by the host | outbox, by kernels |
//!
//! Counters are 64-bit, begin at 0 and are never reset, on either side: a launch that a graph
//! replays goes on where the last one ended.

use super::peer_buffer::PeerBufferLayout;
use crate::error::{Error, Result};
use crate::gpu::PinnedMemory;
use crate::gpu::abi::{Counters, Fifo, LINE_BYTES, Protocol, SIGNATURE_WORDS};
use crate::sync::atomic::{AtomicU64, Ordering};
use std::mem::offset_of;
use std::sync::Arc;

/// Both boxes. Only the FIFOs of [`Protocol::Simple`] are used.
#[derive(Debug)]
pub struct Staging {
    inbox: PinnedMemory,
    outbox: PinnedMemory,
    fifo: Fifo,
}

impl Staging {
    /// Two boxes of `shape`, zero, which nobody else uses.
    ///
    /// # Errors
    /// Internal if the memory is too small.
    pub fn new(
        inbox: PinnedMemory,
        outbox: PinnedMemory,
        shape: &PeerBufferLayout,
    ) -> Result<Staging> {
        let least = inbox.bytes().min(outbox.bytes());
        if least < shape.bytes() {
            return Err(Error::internal(format!(
                "a box of {} bytes in {least} bytes of memory",
                shape.bytes()
            )));
        }
        Ok(Staging {
            inbox,
            outbox,
            fifo: shape.fifo(Protocol::Simple),
        })
    }

    /// The inbox and the outbox, as kernels address them.
    pub fn addresses(&self) -> (u64, u64) {
        (self.inbox.address(), self.outbox.address())
    }

    /// The host's ends of `channel`.
    ///
    /// # Safety
    /// Called once for each channel.
    ///
    /// # Panics
    /// If there is no such channel.
    pub unsafe fn ends(self: &Arc<Staging>, channel: u32) -> (StagedSend, StagedRecv) {
        assert!(
            channel < self.fifo.channels,
            "channel {channel} of {}",
            self.fifo.channels
        );
        let (boxes, taken, arrived) = (self.clone(), 0, 0);
        let send = StagedSend {
            boxes,
            channel,
            taken,
        };
        let boxes = self.clone();
        let recv = StagedRecv {
            boxes,
            channel,
            arrived,
        };
        (send, recv)
    }

    /// A counter of `channel` in one of the boxes.
    fn counter(&self, memory: &PinnedMemory, channel: u32, offset: usize) -> &AtomicU64 {
        let at = self.fifo.counters as usize + channel as usize * LINE_BYTES + offset;
        // SAFETY: inside the box, which `new` found to be inside the memory, and a multiple of 8;
        // mapped while `self` lives. Host and devices access counters only atomically.
        unsafe { &*memory.host().as_ptr().add(at).cast::<AtomicU64>() }
    }

    /// The payload of message `number` of `channel` in one of the boxes.
    fn payload(&self, memory: &PinnedMemory, channel: u32, number: u64) -> *mut u8 {
        let place = (number % u64::from(self.fifo.depth)) as usize;
        let slot = channel as usize * self.fifo.depth as usize + place;
        let at = self.fifo.slots as usize + slot * self.fifo.stride as usize;
        // SAFETY: as above; a slot of a channel that there is.
        unsafe { memory.host().as_ptr().add(at) }
    }
}

/// What kernels of this rank send on one channel, taken by the host.
#[derive(Debug)]
pub struct StagedSend {
    boxes: Arc<Staging>,
    channel: u32,
    /// Messages taken since the beginning.
    taken: u64,
}

impl StagedSend {
    /// Whether a message is there that was not taken yet.
    ///
    /// # Errors
    /// Internal if the counter is where no kernel can have moved it.
    #[inline]
    pub fn ready(&self) -> Result<bool> {
        let boxes = &*self.boxes;
        let tail = boxes.counter(&boxes.outbox, self.channel, offset_of!(Counters, tail));
        // SYNC POINT slot.tail: pairs with the release of the kernel's publisher
        // (kernels/fifo/fifo.cuh); header and payload were written before.
        let waiting = tail.load(Ordering::Acquire).wrapping_sub(self.taken);
        if waiting > u64::from(boxes.fifo.depth) {
            return Err(self.impossible(waiting));
        }
        Ok(waiting > 0)
    }

    /// Signature in the header of the message, after `ready` returned true: that of the call if it
    /// is the first on this channel in a launch, otherwise of some earlier one.
    pub fn signature(&self) -> [u64; SIGNATURE_WORDS] {
        let payload = self
            .boxes
            .payload(&self.boxes.outbox, self.channel, self.taken);
        // SAFETY: the header precedes the payload, in the same slot; kernels write it before they
        // publish the message, and again only when the slot was given back.
        unsafe {
            payload
                .sub(LINE_BYTES)
                .cast::<[u64; SIGNATURE_WORDS]>()
                .read()
        }
    }

    /// The first `bytes` bytes of the message, after `ready` returned true.
    ///
    /// # Panics
    /// If a slot has fewer.
    #[inline]
    pub fn payload(&self, bytes: usize) -> &[u8] {
        assert!(bytes <= self.boxes.fifo.slot_bytes as usize);
        let payload = self
            .boxes
            .payload(&self.boxes.outbox, self.channel, self.taken);
        // SAFETY: inside the slot; no kernel writes it before `release`, which takes `&mut self`.
        unsafe { std::slice::from_raw_parts(payload, bytes) }
    }

    /// Gives the slot of the message back to the kernels.
    #[inline]
    pub fn release(&mut self) {
        self.taken += 1;
        let boxes = &*self.boxes;
        // SYNC POINT slot.head: the payload was read before; a kernel that sees the credit writes
        // later. Kernels poll it relaxed, as they do a peer's.
        boxes
            .counter(&boxes.inbox, self.channel, offset_of!(Counters, head))
            .store(self.taken, Ordering::Release);
    }

    /// Payload bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.boxes.fifo.slot_bytes as usize
    }

    #[cold]
    fn impossible(&self, waiting: u64) -> Error {
        Error::internal(format!(
            "channel {}: kernels have published {waiting} messages more than the {} that were taken, \
             in {} slots",
            self.channel, self.taken, self.boxes.fifo.depth
        ))
    }
}

/// What kernels of this rank receive on one channel, brought by the host.
#[derive(Debug)]
pub struct StagedRecv {
    boxes: Arc<Staging>,
    channel: u32,
    /// Messages brought since the beginning.
    arrived: u64,
}

impl StagedRecv {
    /// Whether a slot is free for another message.
    ///
    /// # Errors
    /// Internal if the counter is where no kernel can have moved it.
    #[inline]
    pub fn ready(&self) -> Result<bool> {
        let boxes = &*self.boxes;
        let head = boxes.counter(&boxes.outbox, self.channel, offset_of!(Counters, head));
        // SYNC POINT slot.head: pairs with the kernel's publisher, which stores it behind a barrier
        // that all reads of the slot precede.
        let held = self.arrived.wrapping_sub(head.load(Ordering::Acquire));
        if held > u64::from(boxes.fifo.depth) {
            return Err(self.impossible(held));
        }
        Ok(held < u64::from(boxes.fifo.depth))
    }

    /// The first `bytes` bytes of the free slot, after `ready` returned true.
    ///
    /// # Panics
    /// If a slot has fewer.
    #[inline]
    pub fn slot(&mut self, bytes: usize) -> &mut [u8] {
        assert!(bytes <= self.boxes.fifo.slot_bytes as usize);
        let payload = self
            .boxes
            .payload(&self.boxes.inbox, self.channel, self.arrived);
        // SAFETY: inside the slot; no kernel reads it before `publish`, which takes `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(payload, bytes) }
    }

    /// Hands the slot to the kernels, with the signature that the sender gave the message: a
    /// kernel checks that of the first message of a launch.
    #[inline]
    pub fn publish(&mut self, signature: [u64; SIGNATURE_WORDS]) {
        let boxes = &*self.boxes;
        let payload = boxes.payload(&boxes.inbox, self.channel, self.arrived);
        // SAFETY: the header precedes the payload, in the same slot, which is this end's until the
        // counter moves.
        unsafe {
            payload
                .sub(LINE_BYTES)
                .cast::<[u64; SIGNATURE_WORDS]>()
                .write(signature);
        }
        self.arrived += 1;
        // SYNC POINT slot.tail: publishes header and payload to the kernel's waiter, which
        // acquires (kernels/fifo/fifo.cuh).
        boxes
            .counter(&boxes.inbox, self.channel, offset_of!(Counters, tail))
            .store(self.arrived, Ordering::Release);
    }

    /// Payload bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.boxes.fifo.slot_bytes as usize
    }

    #[cold]
    fn impossible(&self, held: u64) -> Error {
        Error::internal(format!(
            "channel {}: kernels have taken messages until {held} are left of the {} that came, in {} \
             slots",
            self.channel, self.arrived, self.boxes.fifo.depth
        ))
    }
}
