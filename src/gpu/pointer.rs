//! What an address that the caller handed over points to.

use super::Driver;
use crate::error::{Error, Result};
use crate::sys::cuda::{CuContext, CuDevicePtr, memory_type, pointer_attribute};
use std::ffi::{c_int, c_uint, c_void};

/// The kind of memory behind an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Host memory that the driver knows nothing of.
    Pageable,
    /// Host memory that is pinned: allocated by the driver or registered with it.
    Pinned,
    /// Memory of a GPU.
    Device,
    /// Memory that moves between host and GPUs.
    Managed,
}

/// What the driver knows about an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// Where it points.
    pub space: Space,
    /// The GPU whose memory it is; for pinned and managed memory the one that it was made for.
    pub ordinal: Option<u32>,
    /// The context that it was made in; none for pageable memory and for pools.
    pub context: Option<CuContext>,
    /// First byte of the allocation, and its size; 0 and 0 for pageable memory.
    pub range: (CuDevicePtr, usize),
    /// Identifies the allocation in this process: never used twice.
    pub buffer_id: u64,
    /// Whether other processes can open it by an IPC handle.
    pub shareable: bool,
}

impl Driver {
    /// What is behind `address`.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn pointer(&self, address: u64) -> Result<Pointer> {
        let mut kind: c_uint = 0;
        let mut managed: c_uint = 0;
        let mut ordinal: c_int = -2;
        let mut context = CuContext::default();
        let mut start: CuDevicePtr = 0;
        let mut bytes: usize = 0;
        let mut buffer_id: u64 = 0;
        let mut shareable: c_uint = 0;
        let mut asked = [
            (pointer_attribute::MEMORY_TYPE, pointer(&mut kind)),
            (pointer_attribute::IS_MANAGED, pointer(&mut managed)),
            (pointer_attribute::DEVICE_ORDINAL, pointer(&mut ordinal)),
            (pointer_attribute::CONTEXT, pointer(&mut context)),
            (pointer_attribute::RANGE_START, pointer(&mut start)),
            (pointer_attribute::RANGE_SIZE, pointer(&mut bytes)),
            (pointer_attribute::BUFFER_ID, pointer(&mut buffer_id)),
            (
                pointer_attribute::IS_LEGACY_IPC_CAPABLE,
                pointer(&mut shareable),
            ),
        ];
        let mut names = asked.map(|(name, _)| name);
        let mut places = asked.each_mut().map(|(_, place)| *place);
        // SAFETY: as many places as names, each of its attribute's type; the driver writes zeros
        // for what it does not know.
        let result = unsafe {
            self.api().cuPointerGetAttributes(
                names.len() as c_uint,
                names.as_mut_ptr(),
                places.as_mut_ptr(),
                address,
            )
        };
        self.check("cuPointerGetAttributes", result)?;
        let space = match kind {
            0 => Space::Pageable,
            _ if managed != 0 => Space::Managed,
            memory_type::HOST => Space::Pinned,
            memory_type::DEVICE => Space::Device,
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
            context: Some(context).filter(|context| context.0 != 0),
            range: (start, bytes),
            buffer_id,
            shareable: shareable != 0,
        })
    }
}

fn pointer<T>(place: &mut T) -> *mut c_void {
    std::ptr::from_mut(place).cast()
}
