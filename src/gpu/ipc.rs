//! Device memory across processes.
//!
//! A process has each foreign allocation mapped once, however many of its communicators use it:
//! the driver's own count of openings was unreliable for years, and a mapping that nobody closes
//! keeps the owner's memory from being freed.

use super::{Context, Driver};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::cuda::{CuDevicePtr, CuIpcMemHandle, CuResult, flags};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of [`IpcHandle::to_bytes`].
pub const IPC_HANDLE_BYTES: usize = 96;

/// What another process needs to map a piece of device memory. Plain data; whoever holds it and
/// runs as the same user can open it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpcHandle {
    /// The driver's name of the allocation.
    handle: CuIpcMemHandle,
    /// The owner, and the allocation's number there: the driver may name a later allocation at
    /// the same address alike.
    process: u64,
    buffer_id: u64,
    /// Where in the allocation the piece begins, and its size.
    offset: u64,
    bytes: u64,
}

impl IpcHandle {
    /// A handle of `bytes` bytes at `address`, which need not be the start of an allocation.
    ///
    /// # Errors
    /// Invalid argument if it is not memory of `context`'s GPU or reaches past its allocation;
    /// unsupported if it is from a pool or otherwise not for sharing.
    pub fn export(context: &Context, address: CuDevicePtr, bytes: usize) -> Result<IpcHandle> {
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
        let mut handle = CuIpcMemHandle([0; 64]);
        // SAFETY: device memory that is allocated; writes one handle.
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

    /// The size of the piece.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The handle as bytes, for a message to a process of the same host.
    pub fn to_bytes(self) -> [u8; IPC_HANDLE_BYTES] {
        let mut bytes = [0; IPC_HANDLE_BYTES];
        bytes[..64].copy_from_slice(&self.handle.0);
        let numbers = [self.process, self.buffer_id, self.offset, self.bytes];
        for (place, number) in bytes[64..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// What [`IpcHandle::to_bytes`] wrote. Any bytes are accepted: what they name is checked when
    /// it is opened.
    pub fn from_bytes(bytes: &[u8; IPC_HANDLE_BYTES]) -> IpcHandle {
        let mut handle = [0; 64];
        handle.copy_from_slice(&bytes[..64]);
        let mut numbers = bytes[64..].chunks_exact(8).map(|place| {
            let mut number = [0; 8];
            number.copy_from_slice(place);
            u64::from_le_bytes(number)
        });
        let mut number = || numbers.next().unwrap_or_default();
        IpcHandle {
            handle: CuIpcMemHandle(handle),
            process: number(),
            buffer_id: number(),
            offset: number(),
            bytes: number(),
        }
    }
}

/// Another process's device memory, mapped into this one.
#[derive(Debug)]
pub struct IpcMemory {
    context: Arc<Context>,
    key: Key,
    address: CuDevicePtr,
    bytes: usize,
}

impl IpcMemory {
    /// Maps the piece that `handle` names into `context`, whose GPU then reaches it over NVLink or
    /// PCIe. The allocation stays mapped until the last value of it is dropped.
    ///
    /// # Errors
    /// Mismatch if the handle's numbers do not fit the memory it names; invalid usage if it is
    /// this process's own; those of the driver, such as peer access that is not supported.
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
        // In the table before it is checked: then a refusal gives it back like any other use.
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

    /// Its first byte, as kernels of the context's GPU see it.
    pub fn address(&self) -> CuDevicePtr {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The context that it is mapped in.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

/// Has the driver map an allocation; nobody uses it yet.
fn map(context: &Arc<Context>, handle: &IpcHandle) -> Result<Entry> {
    let driver = context.driver();
    let _bound = context.bind()?;
    let (mut start, mut bytes) = (0, 0);
    // SAFETY: the driver checks the handle; writes one address.
    let result = unsafe {
        driver.api().cuIpcOpenMemHandle(
            &mut start,
            handle.handle,
            flags::IPC_LAZY_ENABLE_PEER_ACCESS,
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
    // SAFETY: just mapped; writes an address and a size.
    let result = unsafe {
        driver
            .api()
            .cuMemGetAddressRange(&mut base, &mut bytes, start)
    };
    if let Err(error) = driver.check("cuMemGetAddressRange", result) {
        // SAFETY: just mapped, and nobody has the address.
        driver.log("cuIpcCloseMemHandle", unsafe {
            driver.api().cuIpcCloseMemHandle(start)
        });
        return Err(error);
    }
    Ok(Entry {
        start,
        // Small allocations share a block, which is what is mapped: the range may begin earlier.
        bytes: bytes.saturating_sub(start.saturating_sub(base) as usize),
        users: 0,
    })
}

impl Drop for IpcMemory {
    fn drop(&mut self) {
        let driver = self.context.driver();
        // Held while the driver unmaps, so that nobody opens what is just going.
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
            // SAFETY: mapped by `map` in this context; its last user goes.
            Ok(_bound) => driver.log("cuIpcCloseMemHandle", unsafe {
                driver.api().cuIpcCloseMemHandle(start)
            }),
            Err(_) => driver.log("cuIpcCloseMemHandle", CuResult::CONTEXT_IS_DESTROYED),
        }
    }
}

/// The foreign allocations that a process has mapped; one table beside each driver.
#[derive(Debug, Default)]
pub(super) struct Registry(Mutex<HashMap<Key, Entry>>);

impl Registry {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Entry>> {
        // A panic elsewhere leaves the table whole: every change is one insertion or removal.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An allocation, and the GPU that reaches it: mapping it into two costs two mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    handle: CuIpcMemHandle,
    process: u64,
    buffer_id: u64,
    ordinal: u32,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    start: CuDevicePtr,
    bytes: usize,
    users: usize,
}

impl Driver {
    /// How many foreign allocations are mapped.
    pub fn ipc_mappings(&self) -> usize {
        self.ipc.lock().len()
    }
}
