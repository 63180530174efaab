//! Staging memory of packed copies.

use super::PIECE;
use crate::cpu::Tile;
use crate::error::{Error, Result};
use crate::gpu::{Context, DeviceMemory, Event, PinnedMemory, Stream};
use std::sync::Arc;

/// Bytes of a piece's staging memory. The largest encoding has 3 bytes per element; a code of 1 byte with two
/// fp32 numbers per 32 elements also fits.
pub const STAGING: usize = 3 * PIECE + 256;

/// Number of slots beyond one slot per thread, for pieces that are being copied.
pub const IN_FLIGHT: usize = 6;

/// Number of streams over which pieces alternate, so that the copy of one piece overlaps the kernel
/// of another piece.
pub const STREAMS: usize = 3;

/// Streams and memory that the copies of a GPU use in turn.
#[derive(Debug)]
pub struct CopyResources {
    /// Streams, each with an event that is recorded behind a copy's work on the stream.
    pub streams: Vec<(Stream, Event)>,
    pub slots: Vec<StagingSlot>,
    /// Scratch memory of each thread, for elements as fp32.
    pub tiles: Vec<Tile>,
}

/// Staging memory of one piece.
#[derive(Debug)]
pub struct StagingSlot {
    /// Index of the stream on which all uses of the slot are queued.
    pub stream: usize,
    /// This field is dropped before `pinned`. Freeing device memory waits for copies between both.
    pub device: DeviceMemory,
    pub pinned: PinnedMemory,
    /// Event behind the driver's last use of `pinned`.
    pub used: Event,
}

impl CopyResources {
    /// Allocates slots in place of those that a failed thread has dropped.
    pub fn replace_lost_slots(&mut self, context: &Arc<Context>, wanted: usize) -> Result<()> {
        let missing = wanted.saturating_sub(self.slots.len());
        let made = (0..missing).map(|number| StagingSlot::new(context, number % STREAMS, STAGING));
        self.slots.extend(made.collect::<Result<Vec<_>>>()?);
        Ok(())
    }
}

impl StagingSlot {
    /// Allocates `bytes` bytes of pinned memory, and as many on the GPU.
    pub fn new(context: &Arc<Context>, stream: usize, bytes: usize) -> Result<StagingSlot> {
        Ok(StagingSlot {
            stream,
            pinned: PinnedMemory::new(context, bytes)?,
            device: DeviceMemory::new(context, bytes)?,
            used: Event::new(context)?,
        })
    }

    /// Returns the pinned memory of a slot whose event `used` has happened.
    pub fn staging(&mut self, bytes: usize) -> Result<&mut [u8]> {
        if bytes > self.pinned.bytes() {
            return Err(Error::internal(format!(
                "a piece of {bytes} bytes does not fit the staging of {}",
                self.pinned.bytes()
            )));
        }
        // SAFETY: `pinned` owns at least `bytes` bytes. The thread that passed the slot on has seen `used`
        // happen, so the driver does not access them.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.pinned.host().as_ptr(), bytes) })
    }
}

/// Queues a copy.
///
/// # Safety
/// `to` and `from` are addresses of `bytes` bytes that the stream's GPU can access until the copy has run.
pub unsafe fn memcpy(stream: &Stream, to: u64, from: u64, bytes: usize) -> Result<()> {
    let context = stream.context();
    let _bound = context.bind()?;
    // SAFETY: the caller guarantees both ranges, and `stream` is open.
    let queued = unsafe {
        let api = context.driver().api();
        api.cuMemcpyAsync(to, from, bytes, stream.handle())
    };
    context.driver().check("cuMemcpyAsync", queued)
}
