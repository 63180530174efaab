//! Memory that programs get from the library: an allocation of the driver that other processes of
//! the host can map. In host memory with `CINCH_DEVICE=host`.

use crate::boundary::Progress;
use crate::settings;
use crate::types::*;
use cinch::engine::gpu::device;
use cinch::gpu::DeviceMemory;
use cinch::types::DeviceChoice;
use cinch::{Error, Result};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

export! {
    /// `size` bytes on this thread's GPU; NULL for 0.
    fn ncclMemAlloc | pncclMemAlloc(ptr: *mut *mut c_void, size: usize) {
        // SAFETY: NULL or writable, by the header.
        unsafe { store("ptr", ptr, null_mut())? };
        if size > 0 {
            let place = allocate(size)?;
            // SAFETY: not NULL, so writable.
            unsafe { store("ptr", ptr, place)? };
        }
        Ok(Progress::Done)
    }
}

export! {
    /// Frees what `ncclMemAlloc` gave. NULL is nothing to free.
    fn ncclMemFree | pncclMemFree(ptr: *mut c_void) {
        if ptr.is_null() {
            return Ok(Progress::Done);
        }
        let freed = table().remove(&ptr.addr());
        // Dropped outside the lock: the driver waits for what uses it.
        match freed {
            Some(_) => Ok(Progress::Done),
            None => Err(Error::invalid_argument(format!(
                "ptr {ptr:?} is not the beginning of memory that ncclMemAlloc gave"
            ))),
        }
    }
}

/// Memory by its address; it is freed when dropped.
#[allow(dead_code)]
enum Memory {
    Gpu(DeviceMemory),
    Host(Box<[Line]>),
}

/// As strictly aligned as the driver's.
#[derive(Clone)]
#[repr(align(256))]
struct Line(#[allow(dead_code)] [u8; 256]);

static ALLOCATED: Mutex<BTreeMap<usize, Memory>> = Mutex::new(BTreeMap::new());

fn table() -> std::sync::MutexGuard<'static, BTreeMap<usize, Memory>> {
    ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn allocate(size: usize) -> Result<*mut c_void> {
    let (address, memory) = match settings::process()?.device {
        DeviceChoice::Host => {
            let mut lines = Vec::new();
            let count = size.div_ceil(size_of::<Line>());
            lines.try_reserve_exact(count).map_err(|_| {
                Error::system(
                    format!("allocating {size} bytes of host memory"),
                    std::io::Error::from(std::io::ErrorKind::OutOfMemory),
                )
            })?;
            lines.resize(count, Line([0; 256]));
            let lines = lines.into_boxed_slice();
            (lines.as_ptr().expose_provenance(), Memory::Host(lines))
        }
        choice => {
            let memory = DeviceMemory::new(&device::open(choice)?, size)?;
            (memory.address() as usize, Memory::Gpu(memory))
        }
    };
    table().insert(address, memory);
    Ok(std::ptr::with_exposed_provenance_mut(address))
}
