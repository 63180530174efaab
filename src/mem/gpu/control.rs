//! Control words that the host and all kernels of a rank share: the abort word, and the report of the first
//! failure.

use crate::error::Result;
use crate::gpu::abi::{Control, TROUBLE_COMPLETE, Trouble};
use crate::gpu::{Context, PinnedMemory};
use crate::sync::atomic::{AtomicU32, Ordering};
use std::mem::offset_of;
use std::sync::Arc;

/// A `cinch_control` in pinned memory; all words begin as zero.
#[derive(Debug)]
pub struct ControlWords {
    memory: PinnedMemory,
}

impl ControlWords {
    /// Allocates the words for kernels of `gpu`.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn new(gpu: &Arc<Context>) -> Result<ControlWords> {
        Ok(ControlWords {
            memory: PinnedMemory::new(gpu, size_of::<Control>())?,
        })
    }

    /// Returns the address by which kernels access the words.
    pub fn device_address(&self) -> u64 {
        self.memory.address()
    }

    /// Returns the bytes of pinned memory.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Aborts all present and later waits of this rank's kernels.
    pub fn abort(&self) {
        // Relaxed is enough: the word publishes no other data, kernels only leave their wait loops.
        self.word(offset_of!(Control, abort))
            .store(1, Ordering::Relaxed);
    }

    /// Returns the first failure that a kernel has reported.
    pub fn trouble(&self) -> Option<Trouble> {
        let state = offset_of!(Control, trouble) + offset_of!(Trouble, state);
        // SYNC POINT trouble: pairs with the fence of `report` in kernels/fifo/wait.cuh, before
        // which the report was written.
        if self.word(state).load(Ordering::Acquire) != TROUBLE_COMPLETE {
            return None;
        }
        let place = self.memory.host().as_ptr();
        // SAFETY: the memory holds a `Control`, whose report consists of plain words. Kernels write it no more
        // once `state` is TROUBLE_COMPLETE.
        Some(unsafe {
            place
                .add(offset_of!(Control, trouble))
                .cast::<Trouble>()
                .read_volatile()
        })
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: `at` is the offset of a word in `Control`. The memory holds a `Control` from its
        // first byte, so the word is in bounds and aligned. `self` keeps the memory, and host and
        // devices access the word atomically only.
        unsafe { &*self.memory.host().as_ptr().add(at).cast::<AtomicU32>() }
    }
}
