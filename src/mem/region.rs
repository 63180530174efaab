//! Memory that ranks share: by reference between threads, by descriptor between processes.

use crate::error::Result;
use crate::sync::atomic::{AtomicU32, AtomicU64};
use crate::sys::memory::{Mapping, sealed_memfd};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A piece of memory in which ranks keep counters and slots. Zero at first; pages cost memory
/// only once they are touched.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
}

impl Region {
    /// Memory for the threads of this process.
    ///
    /// # Errors
    /// System if there is not that much.
    pub fn heap(bytes: usize) -> Result<Arc<Region>> {
        let mapping = Mapping::private(bytes)?;
        Ok(Arc::new(Region { mapping }))
    }

    /// Memory that other processes can map, and the descriptor to hand them.
    ///
    /// # Errors
    /// System if there is not that much.
    pub fn shareable(bytes: usize) -> Result<(Arc<Region>, OwnedFd)> {
        let memory = sealed_memfd(bytes)?;
        Ok((Region::of(&memory, bytes)?, memory))
    }

    /// The memory behind a descriptor of another process.
    ///
    /// # Errors
    /// Mismatch if it is not of that size or not sealed; system if it cannot be mapped.
    pub fn of(memory: &OwnedFd, bytes: usize) -> Result<Arc<Region>> {
        let mapping = Mapping::shared(memory, bytes)?;
        Ok(Arc::new(Region { mapping }))
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.mapping.len()
    }

    /// The 64-bit word at byte `at`.
    ///
    /// # Panics
    /// If it is misaligned or outside: offsets come from our own geometry, never from a peer.
    pub fn counter(&self, at: usize) -> &AtomicU64 {
        let place = self.place(at, 8, 8);
        // SAFETY: in bounds and aligned by `place`; mapped as long as `self`; every access to
        // this word is atomic, and every bit pattern is a value.
        unsafe { &*place.cast() }
    }

    /// The 32-bit word at byte `at`.
    ///
    /// # Panics
    /// As for [`Region::counter`].
    pub fn word(&self, at: usize) -> &AtomicU32 {
        let place = self.place(at, 4, 4);
        // SAFETY: as for `counter`.
        unsafe { &*place.cast() }
    }

    /// Address of `bytes` bytes at `at`, which must be a multiple of `align` (at most a page).
    ///
    /// # Panics
    /// As for [`Region::counter`].
    pub fn place(&self, at: usize, bytes: usize, align: usize) -> *mut u8 {
        assert!(
            at.is_multiple_of(align) && at <= self.bytes() && bytes <= self.bytes() - at,
            "{bytes} bytes at {at} are outside a region of {} or misaligned",
            self.bytes()
        );
        // SAFETY: in bounds by the assertion.
        unsafe { self.mapping.base().as_ptr().add(at) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::atomic::Ordering;

    #[test]
    fn processes_see_the_same_words() {
        let (here, memory) = Region::shareable(10_000).unwrap();
        let there = Region::of(&memory, 10_000).unwrap();
        drop(memory);
        here.counter(9_992).store(u64::MAX - 1, Ordering::Release);
        assert_eq!(there.counter(9_992).load(Ordering::Acquire), u64::MAX - 1);
        assert_eq!(there.word(0).load(Ordering::Acquire), 0);
    }

    #[test]
    #[should_panic(expected = "outside a region")]
    fn the_end_is_the_end() {
        Region::heap(4096).unwrap().counter(4096);
    }
}
