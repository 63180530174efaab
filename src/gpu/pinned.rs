//! Host memory that GPUs reach.

use super::{Context, Driver};
use crate::error::{Error, Result};
use crate::sys::cuda::{CuDevicePtr, CuResult, flags};
use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Host memory that cannot be paged out and that kernels of every GPU of the process read and
/// write at [`PinnedMemory::address`].
pub struct PinnedMemory {
    context: Arc<Context>,
    host: NonNull<u8>,
    bytes: usize,
    address: CuDevicePtr,
    origin: Origin,
}

/// Whose the memory is.
enum Origin {
    /// The driver's.
    Allocated,
    /// Somebody else's, kept alive here and made known to the driver.
    Registered(#[allow(dead_code)] Arc<dyn Any + Send + Sync>),
}

// SAFETY: the memory belongs to no thread; who may touch what in it when is the business of those
// who take pointers into it.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above; the methods return addresses and sizes.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// `bytes` new bytes, zero.
    ///
    /// # Errors
    /// Invalid argument for 0 bytes; system, with the size, if the driver refuses them.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<PinnedMemory> {
        if bytes == 0 {
            return Err(Error::invalid_argument(
                "0 bytes of pinned memory were asked for",
            ));
        }
        let _bound = context.bind()?;
        let driver = context.driver();
        let mut host: *mut c_void = std::ptr::null_mut();
        // SAFETY: writes one address.
        let result = unsafe {
            driver.api().cuMemHostAlloc(
                &mut host,
                bytes,
                flags::HOST_PORTABLE | flags::HOST_DEVICE_MAP,
            )
        };
        driver
            .check("cuMemHostAlloc", result)
            .map_err(|error| error.context(format!("pinning {bytes} bytes of host memory")))?;
        let host = NonNull::new(host.cast::<u8>())
            .ok_or_else(|| Error::internal("the driver pinned memory at address 0"))?;
        // SAFETY: just allocated, `bytes` long, and nobody else has it.
        unsafe { host.write_bytes(0, bytes) };
        PinnedMemory::mapped(context, host, bytes, Origin::Allocated)
    }

    /// Memory that is there already, such as a shared mapping, at `host`, pinned for as long as
    /// this lives; `owner` is what keeps it mapped. Its contents stay.
    ///
    /// # Errors
    /// Invalid argument for 0 bytes; invalid usage if it is registered already; system if the
    /// driver refuses it (the limit of locked memory may be too low: `ulimit -l`).
    ///
    /// # Safety
    /// `bytes` bytes at `host` are mapped, readable and writable while `owner` lives.
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
        let driver = context.driver();
        // SAFETY: mapped, by the caller's word, until `owner` goes, which this value outlives.
        let result = unsafe {
            driver.api().cuMemHostRegister(
                host.as_ptr().cast(),
                bytes,
                flags::HOST_PORTABLE | flags::HOST_DEVICE_MAP,
            )
        };
        driver
            .check("cuMemHostRegister", result)
            .map_err(|error| error.context(format!("pinning {bytes} mapped bytes")))?;
        PinnedMemory::mapped(context, host, bytes, Origin::Registered(owner))
    }

    /// CompletionPoller where GPUs see it; gives it back if they do not.
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
        // SAFETY: pinned and mapped; writes one address. On an error, dropping `memory` unpins.
        let result = unsafe {
            driver
                .api()
                .cuMemHostGetDevicePointer(&mut memory.address, host.as_ptr().cast(), 0)
        };
        driver.check("cuMemHostGetDevicePointer", result)?;
        Ok(memory)
    }

    /// Its first byte, as this process sees it.
    pub fn host(&self) -> NonNull<u8> {
        self.host
    }

    /// Its first byte, as kernels see it.
    pub fn address(&self) -> CuDevicePtr {
        self.address
    }

    /// Its size.
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
        // SAFETY: pinned by `new` or `register`, given back once.
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
