//! Allocations of device memory: synchronous, in the order of a stream, or borrowed from the caller.

use super::{Context, Stream};
use crate::error::{Error, Result};
use crate::sys::cuda::{CUdeviceptr, CuResult};
use std::sync::Arc;
use std::time::Duration;

/// Memory of one GPU, whose contents are undefined until written.
///
/// Dropping memory of [`DeviceMemory::new`] waits for all work that is queued on the GPU. Drop it when the
/// kernels that use it have ended, or after their abort. Dropping memory of [`DeviceMemory::queued`] waits
/// for its own stream alone. Drop it when work of all other streams that use it has ended.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<Context>,
    address: CUdeviceptr,
    bytes: usize,
    origin: Origin,
}

/// How device memory was allocated, which decides how it is freed.
#[derive(Debug)]
enum Origin {
    /// Allocated by `cuMemAlloc`.
    Allocated,
    /// Allocated by `cuMemAllocAsync` on this stream, on which it is also freed.
    Queued(Arc<Stream>),
    /// Allocated by the caller, who also frees it.
    Lent,
}

impl DeviceMemory {
    /// Allocates `bytes` bytes, aligned to 256 or more.
    ///
    /// # Errors
    /// Invalid argument for 0 bytes; system, with the requested and the free size, if memory is short.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<DeviceMemory> {
        DeviceMemory::allocate(context, bytes, Origin::Allocated)
    }

    /// Allocates `bytes` bytes in the order of `stream`, for its later work. Neither the allocation nor
    /// dropping the value waits for work of other streams.
    ///
    /// # Errors
    /// The errors of [`DeviceMemory::new`].
    pub fn queued(stream: &Arc<Stream>, bytes: usize) -> Result<DeviceMemory> {
        DeviceMemory::allocate(stream.context(), bytes, Origin::Queued(stream.clone()))
    }

    fn allocate(context: &Arc<Context>, bytes: usize, origin: Origin) -> Result<DeviceMemory> {
        if bytes == 0 {
            return Err(Error::invalid_argument(
                "0 bytes of device memory were asked for",
            ));
        }
        let driver = context.driver();
        let mut address: CUdeviceptr = 0;
        let (name, result) = {
            let _bound = context.bind()?;
            let api = driver.api();
            // SAFETY: the driver writes one address to a local variable; `origin` keeps the stream.
            unsafe {
                match &origin {
                    Origin::Queued(stream) => {
                        let stream = stream.handle();
                        let result = api.cuMemAllocAsync(&mut address, bytes, stream);
                        ("cuMemAllocAsync", result)
                    }
                    _ => ("cuMemAlloc", api.cuMemAlloc(&mut address, bytes)),
                }
            }
        };
        driver.check(name, result).map_err(|error| {
            let free = match context.memory() {
                Ok((free, total)) => format!(", which has {free} of {total} bytes free"),
                Err(_) => String::new(),
            };
            error.context(format!(
                "allocating {bytes} bytes on {}{free}",
                context.device()
            ))
        })?;
        Ok(DeviceMemory {
            context: context.clone(),
            address,
            bytes,
            origin,
        })
    }

    /// Wraps `bytes` bytes at `address`, which the caller has allocated and frees.
    ///
    /// # Safety
    /// Until the value is dropped, the bytes are memory of the GPU of `context`.
    pub unsafe fn lent(context: &Arc<Context>, address: CUdeviceptr, bytes: usize) -> DeviceMemory {
        DeviceMemory {
            context: context.clone(),
            address,
            bytes,
            origin: Origin::Lent,
        }
    }

    /// Allocates `bytes` bytes, and waits at most `deadline` until they are zero.
    ///
    /// # Errors
    /// The errors of [`DeviceMemory::new`]; timeout.
    pub fn zeroed(
        context: &Arc<Context>,
        bytes: usize,
        deadline: Duration,
    ) -> Result<DeviceMemory> {
        let memory = DeviceMemory::new(context, bytes)?;
        let stream = Stream::new(context)?;
        memory.fill(0, &stream)?;
        stream.wait(deadline)?;
        Ok(memory)
    }

    /// Returns the context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns the address of the first byte, for kernels of its GPU.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Queues work that sets every byte to `value`. The stream belongs to this GPU or to one with peer access
    /// to it.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn fill(&self, value: u8, stream: &Stream) -> Result<()> {
        // The driver wants the stream's context to be current, not the memory's.
        let _bound = stream.context().bind()?;
        let driver = self.context.driver();
        // SAFETY: the bytes are this allocation's, which the driver does not free before queued work ends.
        driver.check("cuMemsetD8Async", unsafe {
            driver
                .api()
                .cuMemsetD8Async(self.address, value, self.bytes, stream.handle())
        })
    }

    /// Queues copies that repeat the first `filled` bytes until the end of the memory.
    ///
    /// # Errors
    /// Invalid argument if `filled` is 0 or exceeds the memory; the driver's errors.
    pub fn repeat(&self, filled: usize, stream: &Stream) -> Result<()> {
        if filled == 0 || filled > self.bytes {
            return Err(Error::invalid_argument(format!(
                "{filled} of {} bytes of device memory cannot be repeated",
                self.bytes
            )));
        }
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        let mut done = filled;
        // Copies of one stream run in order, so each copy doubles the filled part.
        while done < self.bytes {
            let bytes = done.min(self.bytes - done);
            let target = self.address + done as u64;
            // SAFETY: both ranges are within this allocation and do not overlap.
            driver.check("cuMemcpyAsync", unsafe {
                let api = driver.api();
                api.cuMemcpyAsync(target, self.address, bytes, stream.handle())
            })?;
            done += bytes;
        }
        Ok(())
    }

    /// Copies `source` to byte `at` behind the work of `stream`, and waits for the copy.
    ///
    /// # Errors
    /// Invalid argument if the bytes reach past the end; timeout if the stream's work takes longer than
    /// `deadline`; the driver's errors.
    pub fn write(
        &self,
        at: usize,
        source: &[u8],
        stream: &Stream,
        deadline: Duration,
    ) -> Result<()> {
        let place = self.place(at, source.len())?;
        self.copy(
            place,
            source.as_ptr() as u64,
            source.len(),
            stream,
            deadline,
        )
    }

    /// Copies from byte `at` to `target` behind the work of `stream`, and waits for the copy.
    ///
    /// # Errors
    /// The errors of [`DeviceMemory::write`].
    pub fn read(
        &self,
        at: usize,
        target: &mut [u8],
        stream: &Stream,
        deadline: Duration,
    ) -> Result<()> {
        let place = self.place(at, target.len())?;
        let bytes = target.len();
        self.copy(target.as_mut_ptr() as u64, place, bytes, stream, deadline)
    }

    /// Returns the address of byte `at`, if the memory has `bytes` bytes from there on.
    ///
    /// # Errors
    /// Invalid argument if the bytes reach past the end.
    pub fn place(&self, at: usize, bytes: usize) -> Result<CUdeviceptr> {
        if at > self.bytes || bytes > self.bytes - at {
            return Err(Error::invalid_argument(format!(
                "{bytes} bytes at {at} reach past {} bytes of device memory",
                self.bytes
            )));
        }
        Ok(self.address + at as u64)
    }

    /// Copies between device memory and host memory, and waits for the copy.
    fn copy(
        &self,
        target: u64,
        source: u64,
        bytes: usize,
        stream: &Stream,
        deadline: Duration,
    ) -> Result<()> {
        // A copy from or to pageable memory waits without a deadline. So the deadline applies to the work
        // before it.
        stream.wait(deadline)?;
        let _bound = stream.context().bind()?;
        let driver = self.context.driver();
        // SAFETY: `place` checked the device range, and the caller's slice is the host range. The copy has
        // ended when the borrow ends.
        let (queued, ended) = unsafe {
            let api = driver.api();
            let queued = api.cuMemcpyAsync(target, source, bytes, stream.handle());
            (queued, api.cuStreamSynchronize(stream.handle()))
        };
        driver.check("cuMemcpyAsync", queued)?;
        driver.check("cuStreamSynchronize", ended)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let driver = self.context.driver();
        let name = match self.origin {
            Origin::Allocated => "cuMemFree",
            Origin::Queued(_) => "cuMemFreeAsync",
            Origin::Lent => return,
        };
        let Ok(_bound) = self.context.bind() else {
            driver.log(name, CuResult::CONTEXT_IS_DESTROYED);
            return;
        };
        let api = driver.api();
        // SAFETY: `allocate` allocated the memory by the matching function, and this destructor runs once.
        // `origin` keeps the stream.
        driver.log(name, unsafe {
            match &self.origin {
                Origin::Queued(stream) => api.cuMemFreeAsync(self.address, stream.handle()),
                _ => api.cuMemFree(self.address),
            }
        });
    }
}
