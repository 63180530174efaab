//! Words that the ranks of an emulation share: when links are free, and when messages arrive.

use super::routes::RouteLink;
use crate::mem::Region;
use crate::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// Bytes of a word.
pub(super) const WORD_BYTES: usize = size_of::<u64>();

/// For each link, the nanosecond of the monotonic clock at which it has carried all messages so far.
#[derive(Clone, Debug)]
pub(super) struct LinkClocks {
    region: Arc<Region>,
    at: usize,
}

impl LinkClocks {
    /// Creates a view of the words from byte `at` of `region`.
    pub fn new(region: Arc<Region>, at: usize) -> LinkClocks {
        LinkClocks { region, at }
    }

    /// Occupies all links of `route` with a message of `bytes` bytes that is published at `now`. Returns the time at
    /// which the last link has carried it. Each link carries messages in the order of their publication.
    pub fn reserve(&self, route: &[RouteLink], bytes: u32, now: u64) -> u64 {
        let ends = route.iter().map(|link| {
            let word = self.region.counter(self.at + link.link * WORD_BYTES);
            reserve(word, now, link.nanoseconds(bytes))
        });
        ends.max().unwrap_or(now)
    }
}

/// Occupies a link from `now`, or from the time at which it is free, for `nanoseconds`. Returns the end.
fn reserve(free: &AtomicU64, now: u64, nanoseconds: u64) -> u64 {
    // The word publishes no other data, and the read-modify-write loses no reservation, so relaxed is enough.
    let end = |free: u64| free.max(now).saturating_add(nanoseconds);
    let reserved = free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| Some(end(free)));
    reserved.map_or(now, end)
}

/// The arrival time of the message in each slot of a FIFO.
#[derive(Debug)]
pub(super) struct ArrivalTimes {
    region: Arc<Region>,
    at: usize,
    depth: usize,
}

impl ArrivalTimes {
    /// Creates a view of `depth` words, a power of two, from byte `at` of the receiver's inbox.
    pub fn new(region: Arc<Region>, at: usize, depth: usize) -> ArrivalTimes {
        ArrivalTimes { region, at, depth }
    }

    /// Stores the arrival time of message `number`. The sender calls it before it publishes the message.
    pub fn set(&self, number: u64, time: u64) {
        // SYNC POINT slot-number: the message's publication, a release store, publishes this word as well.
        self.word(number).store(time, Ordering::Relaxed);
    }

    /// Returns the arrival time of message `number`, which the receiver knows to be published.
    pub fn get(&self, number: u64) -> u64 {
        // SYNC POINT slot-number: the acquire load that found the message precedes this load.
        self.word(number).load(Ordering::Relaxed)
    }

    fn word(&self, number: u64) -> &AtomicU64 {
        let slot = number as usize & (self.depth - 1);
        self.region.counter(self.at + slot * WORD_BYTES)
    }
}
