//! Device memory of other processes, by CUDA IPC.
//!
//! A process maps each foreign allocation once, however many of its communicators use it. The driver's own
//! count of openings was unreliable for years, and a mapping that stays open keeps the owner's memory from
//! being freed.

use super::{Context, Driver};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::cuda::{CUdeviceptr, CUipcMem_flags, CUipcMemHandle, CuResult};
use std::collections::HashMap;
use std::ffi::{c_char, c_uint};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of bytes that [`IpcHandle::to_bytes`] returns.
pub const IPC_HANDLE_BYTES: usize = 96;

/// Handle by which another process maps a range of device memory. It is plain data, and every process of this
/// user that has the data can open it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpcHandle {
    /// The driver's handle of the allocation.
    handle: CUipcMemHandle,
    /// The owner's [`Driver`] identity, and its number of the allocation. The driver's handle does not tell
    /// apart successive allocations at one address.
    process: u64,
    buffer_id: u64,
    /// Offset of the range in the allocation, and its size.
    offset: u64,
    bytes: u64,
}

impl IpcHandle {
    /// Creates a handle of `bytes` bytes at `address`, which need not be the start of an allocation.
    ///
    /// # Errors
    /// Invalid argument if the range is not inside one allocation of `context`'s GPU. Unsupported if the
    /// driver does not share such memory, for example of pools.
    pub fn export(context: &Context, address: CUdeviceptr, bytes: usize) -> Result<IpcHandle> {
        let driver = context.driver();
        let known = driver.pointer(address)?;
        let (start, size) = known.range;
        let inside = known.space == super::Space::Device
            && known.ordinal == Some(context.device().ordinal())
            && address
                .checked_sub(start)
                .and_then(|offset| size.checked_sub(usize::try_from(offset).ok()?))
                .is_some_and(|room| bytes <= room);
        if !inside {
            return Err(Error::invalid_argument(format!(
                "{bytes} bytes at {address:#x} are not inside an allocation of {}, they are \
                 {:?} memory in a range of {size} bytes at {start:#x}",
                context.device(),
                known.space
            )));
        }
        let _bound = context.bind()?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the driver reported an allocation at `start`, and writes one handle to a local variable.
        let result = unsafe { driver.api().cuIpcGetMemHandle(&mut handle, start) };
        driver.check("cuIpcGetMemHandle", result).map_err(|error| {
            Error::new(
                ErrorKind::Unsupported,
                format!(
                    "device memory at {address:#x} cannot be shared with other processes \
                     (memory of pools and of expandable segments cannot): {}",
                    error.message()
                ),
            )
        })?;
        Ok(IpcHandle {
            handle,
            process: driver.identity(),
            buffer_id: known.buffer_id,
            offset: address - start,
            bytes: bytes as u64,
        })
    }

    /// Returns the number of bytes of the range.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Encodes the handle for a message to a process of the same host.
    pub fn to_bytes(self) -> [u8; IPC_HANDLE_BYTES] {
        let mut bytes = [0; IPC_HANDLE_BYTES];
        bytes[..64].copy_from_slice(&self.handle.reserved.map(|byte| byte as u8));
        let numbers = [self.process, self.buffer_id, self.offset, self.bytes];
        for (place, number) in bytes[64..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Decodes a handle of [`IpcHandle::to_bytes`]. All bytes are accepted here; opening checks the memory
    /// that they denote.
    pub fn from_bytes(bytes: &[u8; IPC_HANDLE_BYTES]) -> IpcHandle {
        let reserved = std::array::from_fn(|at| bytes[at] as c_char);
        let mut numbers = bytes[64..].chunks_exact(8).map(|place| {
            let mut number = [0; 8];
            number.copy_from_slice(place);
            u64::from_le_bytes(number)
        });
        let mut number = || numbers.next().unwrap_or_default();
        IpcHandle {
            handle: CUipcMemHandle { reserved },
            process: number(),
            buffer_id: number(),
            offset: number(),
            bytes: number(),
        }
    }
}

/// A mapping of another process's device memory.
#[derive(Debug)]
pub struct IpcMemory {
    context: Arc<Context>,
    key: Key,
    address: CUdeviceptr,
    bytes: usize,
}

impl IpcMemory {
    /// Maps the range of `handle` into `context`, whose GPU then accesses it over NVLink or PCIe. The
    /// allocation stays mapped until the last value of it is dropped.
    ///
    /// # Errors
    /// Mismatch if the handle's range is not inside the mapped memory. Invalid usage if the memory is this
    /// process's own. The driver's errors, such as missing peer access.
    pub fn open(context: &Arc<Context>, handle: &IpcHandle) -> Result<IpcMemory> {
        if handle.process == context.driver().identity() {
            return Err(Error::invalid_usage(
                "an IPC handle was opened by the process that made it, which has the address",
            ));
        }
        let key = Key {
            handle: handle.handle,
            process: handle.process,
            buffer_id: handle.buffer_id,
            ordinal: context.device().ordinal(),
        };
        let driver = context.driver();
        let mut mapped = driver.ipc.lock();
        let entry = match mapped.get(&key) {
            Some(entry) => *entry,
            None => map(context, handle)?,
        };
        let entry = Entry {
            users: entry.users + 1,
            ..entry
        };
        // The value exists before the check, so that a failed check unmaps by its destructor.
        mapped.insert(key, entry);
        drop(mapped);
        let memory = IpcMemory {
            context: context.clone(),
            key,
            address: entry.start.wrapping_add(handle.offset),
            bytes: handle.bytes as usize,
        };
        let end = handle.offset.checked_add(handle.bytes);
        if end.is_none_or(|end| end > entry.bytes as u64) {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "a peer's IPC handle names {} bytes at {} of an allocation that has {}",
                    handle.bytes, handle.offset, entry.bytes
                ),
            ));
        }
        Ok(memory)
    }

    /// Returns the address of the first byte, for kernels of the context's GPU.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the context of the mapping.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

/// Maps an allocation. The returned entry has no users yet.
fn map(context: &Arc<Context>, handle: &IpcHandle) -> Result<Entry> {
    let driver = context.driver();
    let _bound = context.bind()?;
    let (mut start, mut bytes) = (0, 0);
    // SAFETY: the driver checks the handle, and writes one address to a local variable.
    let result = unsafe {
        driver.api().cuIpcOpenMemHandle(
            &mut start,
            handle.handle,
            CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint,
        )
    };
    driver
        .check("cuIpcOpenMemHandle", result)
        .map_err(|error| {
            error.context(format!(
                "mapping {} bytes of another process's device memory into {}",
                handle.bytes,
                context.device()
            ))
        })?;
    let mut base = 0;
    // SAFETY: the address was mapped above; the driver writes an address and a size to local variables.
    let result = unsafe {
        driver
            .api()
            .cuMemGetAddressRange(&mut base, &mut bytes, start)
    };
    if let Err(error) = driver.check("cuMemGetAddressRange", result) {
        // SAFETY: the address was mapped above, and no other code has it.
        driver.log("cuIpcCloseMemHandle", unsafe {
            driver.api().cuIpcCloseMemHandle(start)
        });
        return Err(error);
    }
    Ok(Entry {
        start,
        // Small allocations share a block, and the driver maps the whole block, which may begin earlier.
        bytes: bytes.saturating_sub(start.saturating_sub(base) as usize),
        users: 0,
    })
}

impl Drop for IpcMemory {
    fn drop(&mut self) {
        let driver = self.context.driver();
        // The lock is held during the unmapping, so that no thread maps the allocation meanwhile.
        let mut mapped = driver.ipc.lock();
        let Some(entry) = mapped.get_mut(&self.key) else {
            return;
        };
        entry.users -= 1;
        if entry.users > 0 {
            return;
        }
        let start = entry.start;
        mapped.remove(&self.key);
        match self.context.bind() {
            // SAFETY: `map` mapped the address in this context, and this was its last user.
            Ok(_bound) => driver.log("cuIpcCloseMemHandle", unsafe {
                driver.api().cuIpcCloseMemHandle(start)
            }),
            Err(_) => driver.log("cuIpcCloseMemHandle", CuResult::CONTEXT_IS_DESTROYED),
        }
    }
}

/// Foreign allocations that a process has mapped. Each [`Driver`] has one registry.
#[derive(Debug, Default)]
pub(super) struct Registry(Mutex<HashMap<Key, Entry>>);

impl Registry {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Entry>> {
        // A panic of another thread cannot leave a partial change: each is one insertion or removal.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An allocation and the GPU into whose context it is mapped: two GPUs need two mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    handle: CUipcMemHandle,
    process: u64,
    buffer_id: u64,
    ordinal: u32,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    start: CUdeviceptr,
    bytes: usize,
    users: usize,
}

impl Driver {
    /// Returns the number of mapped foreign allocations.
    pub fn ipc_mappings(&self) -> usize {
        self.ipc.lock().len()
    }
}
