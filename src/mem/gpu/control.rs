//! The words that the host and the kernels of a rank share: abort, and the report of the first
//! thing that went wrong.

use crate::error::Result;
use crate::gpu::abi::{Control, TROUBLE_COMPLETE, Trouble};
use crate::gpu::{Context, PinnedMemory};
use crate::sync::atomic::{AtomicU32, Ordering};
use std::mem::offset_of;
use std::sync::Arc;

/// A `cinch_control` in pinned memory, zero at first.
#[derive(Debug)]
pub struct ControlWords {
    memory: PinnedMemory,
}

impl ControlWords {
    /// Words for the kernels of `gpu`.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(gpu: &Arc<Context>) -> Result<ControlWords> {
        Ok(ControlWords {
            memory: PinnedMemory::new(gpu, size_of::<Control>())?,
        })
    }

    /// Where kernels see them.
    pub fn device_address(&self) -> u64 {
        self.memory.address()
    }

    /// Bytes of pinned memory.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Ends every wait of this rank's kernels, now and later.
    pub fn abort(&self) {
        // Nothing is published with it: kernels only leave their loops.
        self.word(offset_of!(Control, abort))
            .store(1, Ordering::Relaxed);
    }

    /// What went wrong first, once a kernel has said so.
    pub fn trouble(&self) -> Option<Trouble> {
        let state = offset_of!(Control, trouble) + offset_of!(Trouble, state);
        // SYNC POINT trouble: pairs with the fence of `report` in kernels/fifo/wait.cuh, before
        // which the report was written.
        if self.word(state).load(Ordering::Acquire) != TROUBLE_COMPLETE {
            return None;
        }
        let place = self.memory.host().as_ptr();
        // SAFETY: in bounds; plain words, so that any bits are a value, and nobody writes them
        // once `state` says that they are complete.
        Some(unsafe {
            place
                .add(offset_of!(Control, trouble))
                .cast::<Trouble>()
                .read_volatile()
        })
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: in bounds and aligned, as `at` is the place of a word in `Control`, which the
        // memory holds from its first byte; mapped while `self` lives. Host and devices access
        // these words only atomically.
        unsafe { &*self.memory.host().as_ptr().add(at).cast::<AtomicU32>() }
    }
}
