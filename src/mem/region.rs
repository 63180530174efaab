//! Memory that ranks share: threads share an `Arc`, processes a file descriptor.

use crate::error::Result;
use crate::sync::atomic::{AtomicU32, AtomicU64};
use crate::sys::memory::{Mapping, sealed_memfd};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A piece of memory for counters and slots. It begins as zeros; a page takes memory from its first access.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
}

impl Region {
    /// Allocates memory for the threads of this process.
    ///
    /// # Errors
    /// System if memory is short.
    pub fn heap(bytes: usize) -> Result<Arc<Region>> {
        let mapping = Mapping::private(bytes)?;
        Ok(Arc::new(Region { mapping }))
    }

    /// Allocates memory that other processes can map, and returns it with its descriptor.
    ///
    /// # Errors
    /// System if memory is short.
    pub fn shareable(bytes: usize) -> Result<(Arc<Region>, OwnedFd)> {
        let memory = sealed_memfd(bytes)?;
        Ok((Region::of(&memory, bytes)?, memory))
    }

    /// Maps the memory behind a descriptor of another process.
    ///
    /// # Errors
    /// Mismatch if the memory has another size or is not sealed; system if it cannot be mapped.
    pub fn of(memory: &OwnedFd, bytes: usize) -> Result<Arc<Region>> {
        let mapping = Mapping::shared(memory, bytes)?;
        Ok(Arc::new(Region { mapping }))
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.mapping.len()
    }

    /// Returns the 64-bit word at byte `at`.
    ///
    /// # Panics
    /// If the word is misaligned or outside. Offsets come from local geometry, never from a peer.
    pub fn counter(&self, at: usize) -> &AtomicU64 {
        let place = self.place(at, 8, 8);
        // SAFETY: `place` checks bounds and alignment; `self` keeps the mapping. Every access to this word is
        // atomic, and every bit pattern is a value.
        unsafe { &*place.cast() }
    }

    /// Returns the 32-bit word at byte `at`.
    ///
    /// # Panics
    /// See [`Region::counter`].
    pub fn word(&self, at: usize) -> &AtomicU32 {
        let place = self.place(at, 4, 4);
        // SAFETY: `place` checks bounds and alignment; `self` keeps the mapping. Every access to this word is
        // atomic, and every bit pattern is a value.
        unsafe { &*place.cast() }
    }

    /// Returns the address of `bytes` bytes at `at`, a multiple of `align` (at most a page).
    ///
    /// # Panics
    /// See [`Region::counter`].
    pub fn place(&self, at: usize, bytes: usize, align: usize) -> *mut u8 {
        assert!(
            at.is_multiple_of(align) && at <= self.bytes() && bytes <= self.bytes() - at,
            "{bytes} bytes at {at} are outside a region of {} or misaligned",
            self.bytes()
        );
        // SAFETY: the assertion keeps the address inside the mapping.
        unsafe { self.mapping.base().as_ptr().add(at) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::atomic::Ordering;

    #[test]
    fn region_mapped_twice_shares_words() {
        let (here, memory) = Region::shareable(10_000).unwrap();
        let there = Region::of(&memory, 10_000).unwrap();
        drop(memory);
        here.counter(9_992).store(u64::MAX - 1, Ordering::Release);
        assert_eq!(there.counter(9_992).load(Ordering::Acquire), u64::MAX - 1);
        assert_eq!(there.word(0).load(Ordering::Acquire), 0);
    }

    #[test]
    #[should_panic(expected = "outside a region")]
    fn counter_beyond_the_end_panics() {
        Region::heap(4096).unwrap().counter(4096);
    }
}
