//! Staging buffers for a peer on another host: an outbox, which kernels write, and an inbox, which kernels
//! read. Both buffers lie in pinned memory of this host.
//!
//! The host takes the peer's place. It takes messages from the outbox and frees their slots through `head` in
//! the inbox, which kernels poll. It puts arrived messages into slots of the inbox, and reads the kernels'
//! credit in the outbox. The table shows where slots and counters lie, and who writes them:
//!
//! | | slots | `tail` | `head` |
//! | --- | --- | --- | --- |
//! | to the peer | outbox, by kernels | outbox, by kernels | inbox, by the host |
//! | from the peer | inbox, by the host | inbox, by the host | outbox, by kernels |
//!
//! Counters are 64-bit, begin at 0 and are never reset on either side, so that a graph's replay continues
//! where the last launch ended.

use super::peer_buffer::PeerBufferLayout;
use crate::error::{Error, Result};
use crate::gpu::PinnedMemory;
use crate::gpu::abi::{Counters, Fifo, LINE_BYTES, Protocol, SIGNATURE_WORDS};
use crate::sync::atomic::{AtomicU64, Ordering};
use std::mem::offset_of;
use std::sync::Arc;

/// Inbox and outbox of a pair of ranks on different hosts, in pinned memory of this host. Only the FIFOs of
/// [`Protocol::Simple`] are used.
#[derive(Debug)]
pub struct Staging {
    inbox: PinnedMemory,
    outbox: PinnedMemory,
    fifo: Fifo,
}

impl Staging {
    /// Makes the staging from two zeroed pieces of memory with the layout `shape`.
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
                "a peer buffer of {} bytes in {least} bytes of memory",
                shape.bytes()
            )));
        }
        Ok(Staging {
            inbox,
            outbox,
            fifo: shape.fifo(Protocol::Simple),
        })
    }

    /// Returns the device addresses of inbox and outbox.
    pub fn addresses(&self) -> (u64, u64) {
        (self.inbox.address(), self.outbox.address())
    }

    /// Returns the host's ends of `channel`.
    ///
    /// # Safety
    /// The caller calls this once for each channel: two ends would share counters.
    ///
    /// # Panics
    /// If there is no such channel.
    pub unsafe fn ends(self: &Arc<Staging>, channel: u32) -> (StagedSend, StagedRecv) {
        assert!(
            channel < self.fifo.channels,
            "channel {channel} of {}",
            self.fifo.channels
        );
        let send = StagedSend {
            staging: self.clone(),
            channel,
            taken: 0,
        };
        let recv = StagedRecv {
            staging: self.clone(),
            channel,
            arrived: 0,
        };
        (send, recv)
    }

    /// Returns a counter of `channel` in one of the peer buffers.
    fn counter(&self, memory: &PinnedMemory, channel: u32, offset: usize) -> &AtomicU64 {
        let at = self.fifo.counters as usize + channel as usize * LINE_BYTES + offset;
        // SAFETY: the offset is a multiple of 8 inside the peer buffer, and `new` checked that the memory
        // holds it; `self` keeps the memory. Host and devices access counters atomically only.
        unsafe { &*memory.host().as_ptr().add(at).cast::<AtomicU64>() }
    }

    /// Returns the payload of message `number` of `channel` in one of the peer buffers.
    fn payload(&self, memory: &PinnedMemory, channel: u32, number: u64) -> *mut u8 {
        let index = (number % u64::from(self.fifo.depth)) as usize;
        let slot = channel as usize * self.fifo.depth as usize + index;
        let at = self.fifo.slots as usize + slot * self.fifo.stride as usize;
        // SAFETY: `ends` checked the channel, so the slot lies inside the peer buffer. `new` checked that the
        // memory holds the peer buffer, and `self` keeps the memory.
        unsafe { memory.host().as_ptr().add(at) }
    }
}

/// The host's end of one channel's outgoing FIFO: it takes messages that kernels send.
#[derive(Debug)]
pub struct StagedSend {
    staging: Arc<Staging>,
    channel: u32,
    /// Number of messages taken since the communicator was made.
    taken: u64,
}

impl StagedSend {
    /// Returns whether a message waits to be taken.
    ///
    /// # Errors
    /// Internal if the counter has a value that no kernel can have written.
    #[inline]
    pub fn ready(&self) -> Result<bool> {
        let staging = &*self.staging;
        let tail = staging.counter(&staging.outbox, self.channel, offset_of!(Counters, tail));
        // SYNC POINT slot.tail: pairs with the release of the kernel's publisher
        // (kernels/fifo/fifo.cuh); header and payload were written before.
        let waiting = tail.load(Ordering::Acquire).wrapping_sub(self.taken);
        if waiting > u64::from(staging.fifo.depth) {
            return Err(self.impossible(waiting));
        }
        Ok(waiting > 0)
    }

    /// Returns the signature in the message's header, after `ready` returned true. Kernels write the header of
    /// the first message of a launch on this channel; other messages have an earlier call's signature.
    pub fn signature(&self) -> [u64; SIGNATURE_WORDS] {
        let payload = self
            .staging
            .payload(&self.staging.outbox, self.channel, self.taken);
        // SAFETY: the header precedes the payload in the same slot. Kernels write it before they publish the
        // message, and not again before `release`.
        unsafe {
            payload
                .sub(LINE_BYTES)
                .cast::<[u64; SIGNATURE_WORDS]>()
                .read()
        }
    }

    /// Returns the first `bytes` bytes of the message, after `ready` returned true.
    ///
    /// # Panics
    /// If a slot has fewer bytes.
    #[inline]
    pub fn payload(&self, bytes: usize) -> &[u8] {
        assert!(bytes <= self.staging.fifo.slot_bytes as usize);
        let payload = self
            .staging
            .payload(&self.staging.outbox, self.channel, self.taken);
        // SAFETY: the assertion keeps the slice inside the slot. No kernel writes the slot before `release`,
        // which takes `&mut self`.
        unsafe { std::slice::from_raw_parts(payload, bytes) }
    }

    /// Returns the message's slot to the kernels.
    #[inline]
    pub fn release(&mut self) {
        self.taken += 1;
        let staging = &*self.staging;
        // SYNC POINT slot.head: the payload was read before, and a kernel that sees the credit writes later.
        // Kernels poll it relaxed, like a peer's head.
        staging
            .counter(&staging.inbox, self.channel, offset_of!(Counters, head))
            .store(self.taken, Ordering::Release);
    }

    /// Returns the payload bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.staging.fifo.slot_bytes as usize
    }

    #[cold]
    fn impossible(&self, waiting: u64) -> Error {
        Error::internal(format!(
            "channel {}: kernels have published {waiting} messages more than the {} that were taken, \
             in {} slots",
            self.channel, self.taken, self.staging.fifo.depth
        ))
    }
}

/// The host's end of one channel's incoming FIFO: it delivers messages to kernels.
#[derive(Debug)]
pub struct StagedRecv {
    staging: Arc<Staging>,
    channel: u32,
    /// Number of messages delivered since the communicator was made.
    arrived: u64,
}

impl StagedRecv {
    /// Returns whether a slot is free for another message.
    ///
    /// # Errors
    /// Internal if the counter has a value that no kernel can have written.
    #[inline]
    pub fn ready(&self) -> Result<bool> {
        let staging = &*self.staging;
        let head = staging.counter(&staging.outbox, self.channel, offset_of!(Counters, head));
        // SYNC POINT slot.head: pairs with the kernel's publisher, which stores it behind a barrier. All reads
        // of the slot precede that barrier.
        let held = self.arrived.wrapping_sub(head.load(Ordering::Acquire));
        if held > u64::from(staging.fifo.depth) {
            return Err(self.impossible(held));
        }
        Ok(held < u64::from(staging.fifo.depth))
    }

    /// Returns the first `bytes` bytes of the free slot, after `ready` returned true.
    ///
    /// # Panics
    /// If a slot has fewer bytes.
    #[inline]
    pub fn slot(&mut self, bytes: usize) -> &mut [u8] {
        assert!(bytes <= self.staging.fifo.slot_bytes as usize);
        let payload = self
            .staging
            .payload(&self.staging.inbox, self.channel, self.arrived);
        // SAFETY: the assertion keeps the slice inside the slot. No kernel reads the slot before `publish`,
        // which takes `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(payload, bytes) }
    }

    /// Publishes the slot to the kernels with the sender's signature. A kernel checks the signature of the first
    /// message of a launch.
    #[inline]
    pub fn publish(&mut self, signature: [u64; SIGNATURE_WORDS]) {
        let staging = &*self.staging;
        let payload = staging.payload(&staging.inbox, self.channel, self.arrived);
        // SAFETY: the header precedes the payload in the same slot, which belongs to this end until the store
        // to the counter below.
        unsafe {
            payload
                .sub(LINE_BYTES)
                .cast::<[u64; SIGNATURE_WORDS]>()
                .write(signature);
        }
        self.arrived += 1;
        // SYNC POINT slot.tail: publishes header and payload to the kernel's waiter, which
        // acquires (kernels/fifo/fifo.cuh).
        staging
            .counter(&staging.inbox, self.channel, offset_of!(Counters, tail))
            .store(self.arrived, Ordering::Release);
    }

    /// Returns the payload bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.staging.fifo.slot_bytes as usize
    }

    #[cold]
    fn impossible(&self, held: u64) -> Error {
        Error::internal(format!(
            "channel {}: kernels have taken messages until {held} are left of the {} that came, in {} \
             slots",
            self.channel, self.arrived, self.staging.fifo.depth
        ))
    }
}
