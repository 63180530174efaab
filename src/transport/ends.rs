//! The ends of a connection, and the waiter of a rank.

use super::Header;
use crate::error::Result;
use std::time::Duration;

/// The sender's end of a connection. Exactly one exists.
pub trait SendEnd: Send + std::fmt::Debug {
    /// Returns whether a slot is free. Moves earlier messages along if no other thread or device does.
    ///
    /// # Errors
    /// Remote, naming the peer, if the connection is broken.
    fn ready(&mut self) -> Result<bool>;

    /// Returns the payload of the free slot, 64-byte aligned. Requires that `ready` returned true.
    fn slot(&mut self) -> &mut [u8];

    /// Returns the payload of the free slot for reading back what the caller wrote.
    fn written(&self) -> &[u8];

    /// Hands the slot to the receiver.
    fn publish(&mut self, header: Header);

    /// Returns whether it pays to form a message of this size in other memory, and then to `put` it, rather than in the slot.
    fn prefers_put(&self, _bytes: usize) -> bool {
        false
    }

    /// Copies a complete payload to the free slot, and hands the slot to the receiver. Requires that `ready` returned true.
    fn put(&mut self, header: &Header, payload: &[u8]) {
        self.slot()[..payload.len()].copy_from_slice(payload);
        self.publish(*header);
    }

    /// Sends a message whose payload is complete. Returns false, and does nothing, if no slot is free.
    ///
    /// # Errors
    /// As for `ready`.
    fn send(&mut self, header: &Header, payload: &[u8]) -> Result<bool> {
        if !self.ready()? {
            return Ok(false);
        }
        self.put(header, payload);
        Ok(true)
    }

    /// Returns the zero-copy interface of this end, if the transport has one.
    fn zero_copy(&mut self) -> Option<&mut dyn SendFrom> {
        None
    }

    /// Returns whether all published messages have left this process. A collective call returns only after
    /// that, because nothing sends its messages later.
    ///
    /// # Errors
    /// As for `ready`.
    fn flushed(&mut self) -> Result<bool>;

    /// Returns whether a message has left this process once it is published, so that `flushed` is always true.
    fn is_immediate(&self) -> bool {
        false
    }
}

/// The receiver's end of a connection. Exactly one exists.
pub trait RecvEnd: Send + std::fmt::Debug {
    /// Returns whether a message has arrived.
    ///
    /// # Errors
    /// Remote, naming the peer, if the connection is broken and every message that arrived is read;
    /// mismatch if the peer's header is impossible.
    fn ready(&mut self) -> Result<bool>;

    /// Returns the header of the message. Requires that `ready` returned true.
    fn header(&self) -> Header;

    /// Returns the payload of the message: `header().bytes` bytes, never more than a slot, 64-byte
    /// aligned. A hostile peer may change the contents during the read.
    fn payload(&self) -> &[u8];

    /// Returns header and payload of the message; `None` if none has arrived.
    ///
    /// # Errors
    /// As for `ready`.
    fn message(&mut self) -> Result<Option<(Header, &[u8])>> {
        Ok(match self.ready()? {
            true => Some((self.header(), self.payload())),
            false => None,
        })
    }

    /// Gives the slot back to the sender.
    fn release(&mut self);

    /// Returns the zero-copy interface of this end, if the transport has one.
    fn zero_copy(&mut self) -> Option<&mut dyn RecvInto> {
        None
    }
}

/// Sends messages from the caller's memory instead of a slot. The payload is borrowed for one call at a
/// time, so a caller that gives up in the middle of a message releases nothing.
pub trait SendFrom {
    /// Sends as much of a message as the transport takes now. Returns true once the whole message has left
    /// this process.
    ///
    /// Until then the caller repeats the call with the same header and payload. It calls no other method of
    /// the end but [`SendEnd::ready`], which returns false.
    ///
    /// # Errors
    /// As for [`SendEnd::ready`].
    fn send_from(&mut self, header: Header, payload: &[u8]) -> Result<bool>;
}

/// Receives messages into the caller's memory instead of a slot. The memory is borrowed for one call at
/// a time.
pub trait RecvInto {
    /// Returns the header of the next message once it has arrived, possibly before the payload. Later
    /// messages stay in the transport until [`RecvInto::recv_into`] or [`RecvEnd::ready`].
    ///
    /// # Errors
    /// As for [`RecvEnd::ready`].
    fn expect(&mut self) -> Result<Option<Header>>;

    /// Copies as much of the expected message as has arrived to `place`, whose length is the header's.
    /// Returns true once the whole message is there; the message is then released as well.
    ///
    /// Until then the caller repeats the call with the same memory and calls no other method of the end.
    ///
    /// # Errors
    /// Remote, naming the peer, if the connection broke before the end of the message.
    fn recv_into(&mut self, place: &mut [u8]) -> Result<bool>;
}

/// Waits until something may have changed on one of a rank's connections.
pub trait Waiter: Send + std::fmt::Debug {
    /// Spins, then yields the core, then sleeps until a peer wakes this rank or `limit` has passed.
    /// Also moves along connections that the caller does not scan, such as a socket whose peer waits.
    ///
    /// `scans` counts the scans over the connections that found nothing, from 0 for the first call of a
    /// wait. Going to sleep takes two calls: the first announces the sleep and returns at once, the
    /// second sleeps. The scan between them sees every message that came before the announcement.
    ///
    /// A broken connection is an error of its own ends, not of the waiter. Otherwise a peer that has
    /// left would fail a rank that expects nothing from it.
    ///
    /// # Errors
    /// System if the kernel rejects the wait.
    fn idle(&mut self, scans: u32, limit: Duration) -> Result<()>;

    /// Returns whether [`Waiter::idle`] may let other threads run after this number of scans, rather than spin.
    fn leaves_core(&self, scans: u32) -> bool;

    /// Returns how often the caller may look for a message before its first [`Waiter::idle`]: 0 if `idle` moves messages
    /// along, or if ranks share cores.
    fn spins(&self) -> u32 {
        0
    }
}
