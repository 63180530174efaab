//! Device memory.

use super::{Context, Stream};
use crate::error::{Error, Result};
use crate::sys::cuda::{CuDevicePtr, CuResult};
use std::sync::Arc;
use std::time::Duration;

/// Memory of one GPU; its contents are undefined until written.
///
/// Dropping what [`DeviceMemory::new`] made makes the driver wait for work that is queued on the
/// GPU: drop it when the kernels that use it have ended, or after they were told to abort. Of what
/// [`DeviceMemory::queued`] made the driver waits for its own stream alone: drop it when all others
/// that use it have ended.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<Context>,
    address: CuDevicePtr,
    bytes: usize,
    origin: Origin,
}

/// Who frees device memory, and how: the driver's two allocators do not mix.
#[derive(Debug)]
enum Origin {
    /// The driver, at once.
    Allocated,
    /// The driver, behind the work of the stream behind which it allocated. The stream is ours, and
    /// lives until then.
    Queued(Arc<Stream>),
    /// Somebody else.
    Lent,
}

impl DeviceMemory {
    /// `bytes` bytes, aligned to 256 or more.
    ///
    /// # Errors
    /// Invalid argument for 0 bytes; system, with the size and what is free, if there is not that
    /// much.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<DeviceMemory> {
        DeviceMemory::allocate(context, bytes, Origin::Allocated)
    }

    /// The same, without waiting for anything that is queued on the GPU, now or when it is dropped.
    /// It is there for what is queued on `stream` from here on; no other stream than that frees it.
    ///
    /// # Errors
    /// As [`DeviceMemory::new`].
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
        let mut address: CuDevicePtr = 0;
        let (name, result) = {
            let _bound = context.bind()?;
            let api = driver.api();
            // SAFETY: writes one address; a live stream.
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

    /// `bytes` bytes at `address`, which somebody else has allocated, and frees.
    ///
    /// # Safety
    /// They are memory of the GPU of `context`, and stay so for as long as the value lives.
    pub unsafe fn lent(context: &Arc<Context>, address: CuDevicePtr, bytes: usize) -> DeviceMemory {
        DeviceMemory {
            context: context.clone(),
            address,
            bytes,
            origin: Origin::Lent,
        }
    }

    /// The same, zero. Waits until it is, at most `deadline`.
    ///
    /// # Errors
    /// As [`DeviceMemory::new`]; timeout.
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

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its first byte, as kernels of its GPU see it.
    pub fn address(&self) -> CuDevicePtr {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Queues the setting of every byte to `value`, on a stream of this GPU or of one that has
    /// access to it.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn fill(&self, value: u8, stream: &Stream) -> Result<()> {
        // The work is the stream's, whosever the memory is.
        let _bound = stream.context().bind()?;
        let driver = self.context.driver();
        // SAFETY: within this allocation, which the driver does not free before queued work ends.
        driver.check("cuMemsetD8Async", unsafe {
            driver
                .api()
                .cuMemsetD8Async(self.address, value, self.bytes, stream.handle())
        })
    }

    /// Queues copies that fill the memory with its first `filled` bytes, again and again.
    ///
    /// # Errors
    /// Invalid argument if there are none, or more than there is memory; those of the driver.
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
        // Each copy doubles what there is: copies of one stream run one after the other.
        while done < self.bytes {
            let bytes = done.min(self.bytes - done);
            let target = self.address + done as u64;
            // SAFETY: both pieces are within this allocation and do not meet.
            driver.check("cuMemcpyAsync", unsafe {
                let api = driver.api();
                api.cuMemcpyAsync(target, self.address, bytes, stream.handle())
            })?;
            done += bytes;
        }
        Ok(())
    }

    /// Copies `source` to byte `at`, behind the work of `stream`, and returns when it is done.
    ///
    /// # Errors
    /// Invalid argument if it reaches past the end; timeout if the work takes longer than
    /// `deadline`; those of the driver.
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

    /// Copies from byte `at` to `target`; otherwise as [`DeviceMemory::write`].
    ///
    /// # Errors
    /// As there.
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

    /// The address of `bytes` bytes at `at`.
    ///
    /// # Errors
    /// Invalid argument if they reach past the end.
    pub fn place(&self, at: usize, bytes: usize) -> Result<CuDevicePtr> {
        if at > self.bytes || bytes > self.bytes - at {
            return Err(Error::invalid_argument(format!(
                "{bytes} bytes at {at} reach past {} bytes of device memory",
                self.bytes
            )));
        }
        Ok(self.address + at as u64)
    }

    fn copy(
        &self,
        target: u64,
        source: u64,
        bytes: usize,
        stream: &Stream,
        deadline: Duration,
    ) -> Result<()> {
        // The driver's copy from or to pageable memory waits by itself, without a deadline: let
        // there be nothing to wait for but the copy.
        stream.wait(deadline)?;
        let _bound = stream.context().bind()?;
        let driver = self.context.driver();
        // SAFETY: both ends are `bytes` long by `place` and by the slices, which live through
        // this call; the copy has ended when it returns.
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
        // SAFETY: allocated by `allocate` in the same manner, freed once; a live stream.
        driver.log(name, unsafe {
            match &self.origin {
                Origin::Queued(stream) => api.cuMemFreeAsync(self.address, stream.handle()),
                _ => api.cuMemFree(self.address),
            }
        });
    }
}
