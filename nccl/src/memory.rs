//! Functions that allocate and free memory for programs.
//!
//! It is device memory that other processes of the host can map. With `CINCH_DEVICE=host` it is host memory.

use crate::boundary::CallProgress;
use crate::settings;
use crate::types::*;
use cinch::gpu::DeviceMemory;
use cinch::gpu::select;
use cinch::sys::fork_safe::ForkSafe;
use cinch::types::DeviceChoice;
use cinch::{Error, Result};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::null_mut;

export! {
    /// Allocates `size` bytes on this thread's GPU, and stores the address in `*ptr`; NULL for 0
    /// bytes.
    fn ncclMemAlloc | pncclMemAlloc(ptr: *mut *mut c_void, size: usize) {
        // SAFETY: nccl.h requires of the program that `ptr` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("ptr", ptr, null_mut())? };
        if size > 0 {
            let place = allocate(size)?;
            // SAFETY: nccl.h requires of the program that `ptr` is NULL or writable; `store`
            // refuses NULL.
            unsafe { store("ptr", ptr, place)? };
        }
        Ok(CallProgress::Done)
    }
}

export! {
    /// Frees memory that `ncclMemAlloc` allocated. NULL is ignored.
    fn ncclMemFree | pncclMemFree(ptr: *mut c_void) {
        if ptr.is_null() {
            return Ok(CallProgress::Done);
        }
        let freed = ALLOCATED.with(|allocated| allocated.remove(&ptr.addr()));
        // Drops the memory outside of the lock, because the driver waits for work that uses the
        // memory.
        match freed {
            Some(_) => Ok(CallProgress::Done),
            None => Err(Error::invalid_argument(format!(
                "ptr {ptr:?} is not the beginning of memory that ncclMemAlloc returned"
            ))),
        }
    }
}

/// An allocation of device or host memory, which is freed when dropped.
#[allow(dead_code)]
enum Allocation {
    Gpu(DeviceMemory),
    Host(Box<[AlignedLine]>),
}

/// Unit of host allocations, which have the alignment of device memory.
#[derive(Clone)]
#[repr(align(256))]
struct AlignedLine(#[allow(dead_code)] [u8; 256]);

/// The allocations that programs have not freed, by address.
static ALLOCATED: ForkSafe<BTreeMap<usize, Allocation>> = ForkSafe::new(BTreeMap::new());

/// Allocates `size` bytes, and returns their address.
fn allocate(size: usize) -> Result<*mut c_void> {
    let (address, memory) = match settings::process()?.device {
        DeviceChoice::Host => {
            let mut lines = Vec::new();
            let count = size.div_ceil(size_of::<AlignedLine>());
            lines.try_reserve_exact(count).map_err(|_| {
                Error::system(
                    format!("allocating {size} bytes of host memory"),
                    std::io::Error::from(std::io::ErrorKind::OutOfMemory),
                )
            })?;
            lines.resize(count, AlignedLine([0; 256]));
            let lines = lines.into_boxed_slice();
            (lines.as_ptr().expose_provenance(), Allocation::Host(lines))
        }
        choice => {
            let memory = DeviceMemory::new(&select::open(choice)?, size)?;
            (memory.address() as usize, Allocation::Gpu(memory))
        }
    };
    ALLOCATED.with(|allocated| allocated.insert(address, memory));
    Ok(std::ptr::with_exposed_provenance_mut(address))
}
