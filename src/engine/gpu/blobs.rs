//! Memory for blobs that do not fit a launch's arguments.

use super::pack::Blob;
use crate::error::{Error, ErrorKind, Result};
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
}

/// Where a blob was written.
pub(super) enum Placed {
    /// In a buffer of the pool.
    Pooled(usize),
    /// In memory of its own, for whoever keeps what the launch needs.
    Own(PinnedMemory),
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

    /// Writes `blob` into memory for the launch that follows: its device address, and whose it is.
    /// A captured launch gets memory of its own, which a graph reads at every replay.
    pub(super) fn place(&mut self, blob: &Blob, captured: bool) -> Result<(u64, Placed)> {
        if blob.len() > BUFFER_BYTES {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "a launch of {} bytes of schedule is more than the {BUFFER_BYTES} that there \
                     is room for; split the group",
                    blob.len()
                ),
            ));
        }
        if captured {
            let memory = PinnedMemory::new(&self.context, blob.len())?;
            write(&memory, blob);
            return Ok((memory.address(), Placed::Own(memory)));
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
        Ok((buffer.memory.address(), Placed::Pooled(index)))
    }

    /// The memory, which a kernel may still read.
    pub(super) fn take(&mut self) -> impl Send + use<> {
        std::mem::take(&mut self.buffers)
    }

    /// The launch that reads buffer `index` was queued on `stream`.
    pub(super) fn launched(&self, index: usize, stream: &Stream) -> Result<()> {
        self.buffers[index].read.record(stream)
    }
}

fn write(memory: &PinnedMemory, blob: &Blob) {
    // SAFETY: as many bytes of pinned memory, which no kernel reads: it is new, or the launch that
    // read it has ended.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.host().as_ptr(), memory.bytes()) };
    blob.write(bytes);
}
