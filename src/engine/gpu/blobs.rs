//! Memory for blobs that do not fit a launch's arguments.

use super::pack::Blob;
use crate::error::Result;
use crate::gpu::{Context, Event, PinnedMemory, Stream};
use std::sync::Arc;

/// Bytes of a buffer: more than any group of one launch takes.
const BUFFER_BYTES: usize = 64 << 10;

/// Buffers that are in use at once before another is made.
const BUFFERS: usize = 4;

/// Pinned buffers, each free again once the launch that reads it has ended.
#[derive(Debug)]
pub(super) struct BlobPool {
    context: Arc<Context>,
    buffers: Vec<Buffer>,
    /// Buffers of captured launches, which may be replayed for as long as the communicator lives.
    kept: Vec<PinnedMemory>,
}

#[derive(Debug)]
struct Buffer {
    memory: PinnedMemory,
    /// Behind the launch that reads it.
    read: Event,
    used: bool,
}

impl BlobPool {
    /// A pool with some buffers, made now: pinning memory while kernels wait for each other may
    /// wait for them.
    pub(super) fn new(context: &Arc<Context>) -> Result<BlobPool> {
        let mut pool = BlobPool {
            context: context.clone(),
            buffers: Vec::new(),
            kept: Vec::new(),
        };
        for _ in 0..BUFFERS {
            pool.grow()?;
        }
        Ok(pool)
    }

    fn grow(&mut self) -> Result<()> {
        self.buffers.push(Buffer {
            memory: PinnedMemory::new(&self.context, BUFFER_BYTES)?,
            read: Event::new(&self.context)?,
            used: false,
        });
        Ok(())
    }

    /// Writes `blob` into a buffer for the launch that follows: its device address, and what
    /// [`BlobPool::launched`] is to be told.
    pub(super) fn place(&mut self, blob: &Blob, captured: bool) -> Result<(u64, Option<usize>)> {
        if captured || blob.len() > BUFFER_BYTES {
            // A graph reads it at every replay; nobody says when the last one was.
            let memory = PinnedMemory::new(&self.context, blob.len())?;
            write(&memory, blob);
            let address = memory.address();
            self.kept.push(memory);
            return Ok((address, None));
        }
        let mut free = None;
        for (index, buffer) in self.buffers.iter().enumerate() {
            if !buffer.used || buffer.read.has_happened()? {
                free = Some(index);
                break;
            }
        }
        let index = match free {
            Some(index) => index,
            None => {
                self.grow()?;
                self.buffers.len() - 1
            }
        };
        let buffer = &mut self.buffers[index];
        write(&buffer.memory, blob);
        buffer.used = true;
        Ok((buffer.memory.address(), Some(index)))
    }

    /// Gives up the memory: a kernel may still read it.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.buffers));
        std::mem::forget(std::mem::take(&mut self.kept));
    }

    /// The launch that reads the buffer was queued on `stream`.
    pub(super) fn launched(&mut self, buffer: Option<usize>, stream: &Stream) -> Result<()> {
        match buffer {
            Some(index) => self.buffers[index].read.record(stream),
            None => Ok(()),
        }
    }
}

fn write(memory: &PinnedMemory, blob: &Blob) {
    // SAFETY: as many bytes of pinned memory, which no kernel reads: it is new, or the launch that
    // read it has ended.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.host().as_ptr(), memory.bytes()) };
    blob.write(bytes);
}
