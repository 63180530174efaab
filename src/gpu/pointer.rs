//! Attributes of the memory behind an address.

use super::Driver;
use crate::error::{Error, Result};
use crate::sys::cuda::{CUcontext, CUdeviceptr, CUmemorytype, CUpointer_attribute};
use std::ffi::{c_int, c_uint, c_void};

/// The kind of memory behind an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Host memory that is neither allocated by nor registered with the driver.
    Pageable,
    /// Pinned host memory: the driver has allocated or registered it.
    Pinned,
    /// Memory of a GPU.
    Device,
    /// Managed memory, which moves between host and GPUs.
    Managed,
}

/// Attributes of an address, from the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// Kind of the memory behind the address.
    pub space: Space,
    /// The GPU that has the memory; for pinned and managed memory the GPU of its allocation.
    pub ordinal: Option<u32>,
    /// The context of the allocation; `None` for pageable memory and for pools.
    pub context: Option<CUcontext>,
    /// First address and size of the allocation; 0 and 0 for pageable memory.
    pub range: (CUdeviceptr, usize),
    /// Number of the allocation, which this process never uses again.
    pub buffer_id: u64,
    /// Whether the driver can export an IPC handle of the memory.
    pub shareable: bool,
}

impl Driver {
    /// Returns the attributes of `address`.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn pointer(&self, address: u64) -> Result<Pointer> {
        let mut kind: c_uint = 0;
        let mut managed: c_uint = 0;
        let mut ordinal: c_int = -2;
        let mut context: CUcontext = std::ptr::null_mut();
        let mut start: CUdeviceptr = 0;
        let mut bytes: usize = 0;
        let mut buffer_id: u64 = 0;
        let mut shareable: c_uint = 0;
        let mut queries = [
            (
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                pointer(&mut kind),
            ),
            (
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
                pointer(&mut managed),
            ),
            (
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                pointer(&mut ordinal),
            ),
            (
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT,
                pointer(&mut context),
            ),
            (
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                pointer(&mut start),
            ),
            (
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                pointer(&mut bytes),
            ),
            (
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
                pointer(&mut buffer_id),
            ),
            (
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                pointer(&mut shareable),
            ),
        ];
        let mut names = queries.map(|(name, _)| name);
        let mut places = queries.each_mut().map(|(_, place)| *place);
        // SAFETY: each attribute has an output pointer to a local variable of its type. The driver writes
        // zeros for unknown memory.
        let result = unsafe {
            self.api().cuPointerGetAttributes(
                names.len() as c_uint,
                names.as_mut_ptr(),
                places.as_mut_ptr(),
                address,
            )
        };
        self.check("cuPointerGetAttributes", result)?;
        const HOST: c_uint = CUmemorytype::CU_MEMORYTYPE_HOST as c_uint;
        const DEVICE: c_uint = CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;
        let space = match kind {
            0 => Space::Pageable,
            _ if managed != 0 => Space::Managed,
            HOST => Space::Pinned,
            DEVICE => Space::Device,
            other => {
                return Err(Error::internal(format!(
                    "the driver calls memory at {address:#x} type {other}, which is unknown here"
                )));
            }
        };
        Ok(Pointer {
            space,
            ordinal: u32::try_from(ordinal)
                .ok()
                .filter(|_| space != Space::Pageable),
            context: Some(context).filter(|context| !context.is_null()),
            range: (start, bytes),
            buffer_id,
            shareable: shareable != 0,
        })
    }
}

/// Returns the untyped output pointer to a variable.
fn pointer<T>(place: &mut T) -> *mut c_void {
    std::ptr::from_mut(place).cast()
}
