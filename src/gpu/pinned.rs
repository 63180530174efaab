//! Pinned host memory, which GPUs access.

use super::{Context, Driver};
use crate::error::{Error, Result};
use crate::sys::cuda::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP,
    CU_MEMHOSTREGISTER_PORTABLE, CUdeviceptr, CuResult,
};
use crate::sys::numa::PreferredNode;
use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Pinned host memory. Kernels of every GPU of the process read and write it at [`PinnedMemory::address`].
pub struct PinnedMemory {
    context: Arc<Context>,
    host: NonNull<u8>,
    bytes: usize,
    address: CUdeviceptr,
    origin: Origin,
}

/// How the memory was pinned, which decides how it is given back.
enum Origin {
    /// Allocated by `cuMemHostAlloc`.
    Allocated,
    /// Mapped by the value inside, and pinned by `cuMemHostRegister`.
    Registered(#[allow(dead_code)] Arc<dyn Any + Send + Sync>),
}

// SAFETY: the memory belongs to no thread. Code that takes pointers into it orders its own accesses.
unsafe impl Send for PinnedMemory {}
// SAFETY: the methods only return addresses and sizes.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates `bytes` bytes and sets them to zero.
    ///
    /// # Errors
    /// Invalid argument for 0 bytes; system, with the size, if the driver refuses.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<PinnedMemory> {
        PinnedMemory::near(context, bytes, context.device().numa_node)
    }

    /// Allocates `bytes` bytes as [`PinnedMemory::new`] does, on a NUMA node while it has any.
    ///
    /// # Errors
    /// The errors of [`PinnedMemory::new`].
    pub fn near(
        context: &Arc<Context>,
        bytes: usize,
        numa_node: Option<usize>,
    ) -> Result<PinnedMemory> {
        if bytes == 0 {
            return Err(Error::invalid_argument(
                "0 bytes of pinned memory were asked for",
            ));
        }
        let _bound = context.bind()?;
        let _near = PreferredNode::new(numa_node);
        let driver = context.driver();
        let mut host: *mut c_void = std::ptr::null_mut();
        // SAFETY: the driver writes one address to a local variable.
        let result = unsafe {
            driver.api().cuMemHostAlloc(
                &mut host,
                bytes,
                CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP,
            )
        };
        driver
            .check("cuMemHostAlloc", result)
            .map_err(|error| error.context(format!("pinning {bytes} bytes of host memory")))?;
        let host = NonNull::new(host.cast::<u8>())
            .ok_or_else(|| Error::internal("the driver pinned memory at address 0"))?;
        // SAFETY: the driver allocated `bytes` bytes, and no other code has the address.
        unsafe { host.write_bytes(0, bytes) };
        PinnedMemory::mapped(context, host, bytes, Origin::Allocated)
    }

    /// Pins existing memory at `host`, such as a shared mapping, until the value is dropped. `owner` keeps
    /// the memory mapped. Its contents stay.
    ///
    /// # Errors
    /// Invalid argument for 0 bytes; invalid usage if the memory is registered already. System if the driver
    /// refuses, such as for a low limit of locked memory (`ulimit -l`).
    ///
    /// # Safety
    /// `bytes` bytes at `host` are mapped, readable and writable until `owner` is dropped.
    pub unsafe fn register(
        context: &Arc<Context>,
        host: NonNull<u8>,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<PinnedMemory> {
        if bytes == 0 {
            return Err(Error::invalid_argument("0 bytes were to be pinned"));
        }
        let _bound = context.bind()?;
        // Pages that nobody has touched are allocated while they are pinned.
        let _near = PreferredNode::new(context.device().numa_node);
        let driver = context.driver();
        // SAFETY: the caller guarantees that `owner` keeps the bytes mapped, and the returned value keeps
        // `owner`.
        let result = unsafe {
            driver.api().cuMemHostRegister(
                host.as_ptr().cast(),
                bytes,
                CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP,
            )
        };
        driver
            .check("cuMemHostRegister", result)
            .map_err(|error| error.context(format!("pinning {bytes} mapped bytes")))?;
        PinnedMemory::mapped(context, host, bytes, Origin::Registered(owner))
    }

    /// Queries the address for kernels. On an error, dropping the value gives the memory back.
    fn mapped(
        context: &Arc<Context>,
        host: NonNull<u8>,
        bytes: usize,
        origin: Origin,
    ) -> Result<PinnedMemory> {
        let mut memory = PinnedMemory {
            context: context.clone(),
            host,
            bytes,
            address: 0,
            origin,
        };
        let driver = context.driver();
        // SAFETY: the caller pinned the memory with a device mapping; the driver writes one address to
        // `memory`.
        let result = unsafe {
            driver
                .api()
                .cuMemHostGetDevicePointer(&mut memory.address, host.as_ptr().cast(), 0)
        };
        driver.check("cuMemHostGetDevicePointer", result)?;
        Ok(memory)
    }

    /// Returns the address of the first byte in this process.
    pub fn host(&self) -> NonNull<u8> {
        self.host
    }

    /// Returns the address of the first byte for kernels.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let driver: &Driver = self.context.driver();
        let Ok(_bound) = self.context.bind() else {
            return driver.log("cuMemFreeHost", CuResult::CONTEXT_IS_DESTROYED);
        };
        let host = self.host.as_ptr().cast();
        // SAFETY: `new` or `register` pinned the memory by the matching function, and this destructor runs
        // once.
        unsafe {
            match self.origin {
                Origin::Allocated => driver.log("cuMemFreeHost", driver.api().cuMemFreeHost(host)),
                Origin::Registered(_) => driver.log(
                    "cuMemHostUnregister",
                    driver.api().cuMemHostUnregister(host),
                ),
            }
        }
    }
}

impl fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pinned bytes", self.bytes)
    }
}
