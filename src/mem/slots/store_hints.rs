//! Requests of the receiver: how the sender stores its payloads.

use super::{COUNTER_BYTES, FifoPlaces, Place};
use crate::sync::atomic::{AtomicU64, Ordering};

/// Offset from the head: the second of its two cache lines.
const HINTS_AT: usize = COUNTER_BYTES / 2;

/// A word beside a FIFO's head, in the sender's memory, which the receiver writes. It begins with 0; the bits are the
/// caller's. The sender may read an old value at any time.
#[derive(Debug)]
pub struct StoreHints {
    head: Place,
}

impl StoreHints {
    /// Makes one end's view of the word.
    pub fn new(places: &FifoPlaces) -> StoreHints {
        StoreHints {
            head: places.head.clone(),
        }
    }

    fn word(&self) -> &AtomicU64 {
        self.head.region.counter(self.head.at + HINTS_AT)
    }

    /// Requests that the sender stores payloads as these bits state.
    pub fn set(&self, hints: u64) {
        self.word().store(hints, Ordering::Relaxed);
    }

    /// Returns what the receiver requests.
    #[inline]
    pub fn get(&self) -> u64 {
        self.word().load(Ordering::Relaxed)
    }
}
