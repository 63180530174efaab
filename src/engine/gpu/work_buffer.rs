//! Pinned memory for work buffers that are too large for a launch's arguments.

use super::pack::WorkBuffer;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, Event, PinnedMemory, Stream};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a buffer of the pool, which limits the work buffer of a launch.
const BUFFER_BYTES: usize = 64 << 10;

/// Number of buffers that the pool allocates in advance.
const BUFFERS: usize = 4;

/// Granularity of memory for captured launches, so that later graphs can reuse it.
const CAPTURED_BYTES: usize = 4 << 10;

/// Pool of pinned buffers. A buffer is free again once the launch that reads it has ended.
#[derive(Debug)]
pub(super) struct WorkBufferPool {
    context: Arc<Context>,
    buffers: Vec<PooledBuffer>,
    spare: Spare,
}

/// Memory of destroyed graphs, which later graphs reuse. Freeing it would wait for all kernels of the GPU and
/// block launches meanwhile.
type Spare = Arc<Mutex<Vec<PinnedMemory>>>;

/// The work buffer of a captured launch. A graph reads it at every replay.
pub(super) struct CapturedWork {
    memory: Option<PinnedMemory>,
    spare: Spare,
}

/// Names the memory to which a work buffer was written.
pub(super) enum Placed {
    /// The pool's buffer with this index.
    Pooled(usize),
    /// Memory for one captured launch.
    Own(CapturedWork),
}

#[derive(Debug)]
struct PooledBuffer {
    memory: PinnedMemory,
    /// Event behind the launch that reads the buffer.
    read: Event,
    used: bool,
}

impl WorkBufferPool {
    /// Makes a pool with [`BUFFERS`] buffers. Pinning memory later may wait for running kernels.
    pub(super) fn new(context: &Arc<Context>) -> Result<WorkBufferPool> {
        let mut pool = WorkBufferPool {
            context: context.clone(),
            buffers: Vec::new(),
            spare: Spare::default(),
        };
        for _ in 0..BUFFERS {
            pool.grow()?;
        }
        Ok(pool)
    }

    fn grow(&mut self) -> Result<()> {
        self.buffers.push(PooledBuffer {
            memory: PinnedMemory::new(&self.context, BUFFER_BYTES)?,
            read: Event::new(&self.context)?,
            used: false,
        });
        Ok(())
    }

    /// Writes `work_buffer` into memory for the next launch; returns its device address and the memory. A
    /// captured launch gets memory of its own, since a graph reads it at every replay.
    pub(super) fn place(
        &mut self,
        work_buffer: &WorkBuffer,
        captured: bool,
    ) -> Result<(u64, Placed)> {
        if work_buffer.len() > BUFFER_BYTES {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "a launch of {} bytes of schedule is more than the {BUFFER_BYTES} that there \
                     is room for; split the group",
                    work_buffer.len()
                ),
            ));
        }
        if captured {
            let memory = self.spared(work_buffer.len().next_multiple_of(CAPTURED_BYTES))?;
            write(&memory, work_buffer);
            let (address, spare) = (memory.address(), self.spare.clone());
            let memory = Some(memory);
            return Ok((address, Placed::Own(CapturedWork { memory, spare })));
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
        write(&buffer.memory, work_buffer);
        buffer.used = true;
        Ok((buffer.memory.address(), Placed::Pooled(index)))
    }

    /// Returns memory of this size, if possible from a destroyed graph.
    fn spared(&self, bytes: usize) -> Result<PinnedMemory> {
        {
            let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(found) = spare.iter().position(|memory| memory.bytes() == bytes) {
                return Ok(spare.swap_remove(found));
            }
        }
        PinnedMemory::new(&self.context, bytes)
    }

    /// Removes and returns all memory, for teardown while a kernel may still read it.
    pub(super) fn take(&mut self) -> impl Send + use<> {
        (std::mem::take(&mut self.buffers), self.spare.clone())
    }

    /// Records that the launch that reads buffer `index` was queued on `stream`.
    pub(super) fn launched(&self, index: usize, stream: &Stream) -> Result<()> {
        self.buffers[index].read.record(stream)
    }
}

impl Drop for CapturedWork {
    fn drop(&mut self) {
        // The driver drops this value only when the graph is destroyed and no replay runs, so later
        // graphs may reuse the memory.
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.extend(self.memory.take());
    }
}

impl fmt::Debug for CapturedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a captured work buffer of {:?}", self.memory)
    }
}

fn write(memory: &PinnedMemory, work_buffer: &WorkBuffer) {
    // SAFETY: the slice covers the pinned memory. No kernel reads it: it is new, or `place` found that the
    // launch that read it has ended.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.host().as_ptr(), memory.bytes()) };
    work_buffer.write(bytes);
}

#[cfg(test)]
mod tests {
    use super::super::tests::Bench;
    use super::*;
    use crate::gpu::abi;

    fn work_buffer(works: usize) -> WorkBuffer {
        WorkBuffer {
            works: vec![abi::KernelWork::default(); works],
            ..WorkBuffer::default()
        }
    }

    /// Places the work buffer of a captured launch with `works` work items. Returns the number of driver
    /// allocations that the placement made, and the memory.
    fn place(bench: &Bench, pool: &mut WorkBufferPool, works: usize) -> (usize, Placed) {
        let before = bench.process.calls("cuMemHostAlloc");
        let (address, placed) = pool.place(&work_buffer(works), true).unwrap();
        let Placed::Own(captured) = &placed else {
            panic!("a captured work buffer in the pool");
        };
        assert_eq!(captured.memory.as_ref().unwrap().address(), address);
        (bench.process.calls("cuMemHostAlloc") - before, placed)
    }

    #[test]
    fn captured_work_of_a_destroyed_graph_is_reused() {
        let bench = Bench::new();
        let mut pool = WorkBufferPool::new(&bench.context).unwrap();
        let large = 2 * CAPTURED_BYTES / size_of::<abi::KernelWork>();
        let (one, first) = place(&bench, &mut pool, 1);
        let (two, second) = place(&bench, &mut pool, 2);
        let (three, third) = place(&bench, &mut pool, large);
        assert_eq!([one, two, three], [1, 1, 1]);
        drop((first, third));
        assert_eq!(bench.process.calls("cuMemFreeHost"), 0);
        let (again, first) = place(&bench, &mut pool, 3);
        let (more, third) = place(&bench, &mut pool, 3);
        assert_eq!([again, more], [0, 1], "a page, and no other of that size");
        // A kernel that does not end may read any of the buffers, and a graph may outlive the
        // communicator.
        let rest = pool.take();
        drop((pool, first, third));
        assert_eq!(bench.process.calls("cuMemFreeHost"), 0);
        drop(rest);
        let freed = bench.process.calls("cuMemFreeHost");
        drop(second);
        assert_eq!(bench.process.calls("cuMemFreeHost"), freed + 4);
    }
}
