//! A GPU, and its properties that need no context.

use super::Driver;
use crate::error::{Error, Result};
use crate::sys::cuda::{CUdevice, CUdevice_attribute, CUuuid};
use crate::sys::numa;
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// A GPU that the driver lists, with its properties.
#[derive(Clone)]
pub struct Device {
    driver: Arc<Driver>,
    handle: CUdevice,
    ordinal: u32,
    /// Product name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Identity of the GPU, equal in all processes.
    pub uuid: [u8; 16],
    /// PCI address, `domain:bus:device.function`.
    pub pci_bus_id: String,
    /// NUMA node that the GPU is near; `None` if the system does not know it.
    pub numa_node: Option<usize>,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Compute capability, (9, 0) for sm_90.
    pub compute_capability: (u32, u32),
    /// Highest clock of the multiprocessors, in kHz.
    pub clock_khz: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Largest number of bytes of shared memory that a block may request.
    pub shared_bytes_per_block: u32,
}

impl Device {
    /// Returns the GPU with the driver's number `ordinal`.
    ///
    /// # Errors
    /// Invalid argument, with the number of GPUs, if there is no such GPU; the driver's errors.
    pub fn at(driver: &Arc<Driver>, ordinal: u32) -> Result<Device> {
        let count = driver.device_count()?;
        if ordinal >= count {
            return Err(Error::invalid_argument(format!(
                "GPU {ordinal} was asked for, but there are {count} (counted from 0; \
                 CUDA_VISIBLE_DEVICES may hide some)"
            )));
        }
        let api = driver.api();
        let mut handle: CUdevice = 0;
        // SAFETY: the driver writes one handle to a local variable.
        driver.check("cuDeviceGet", unsafe {
            api.cuDeviceGet(&mut handle, ordinal as c_int)
        })?;
        let number = |attribute: CUdevice_attribute| -> Result<u32> {
            let mut value: c_int = 0;
            // SAFETY: the driver writes one integer to a local variable.
            driver.check("cuDeviceGetAttribute", unsafe {
                api.cuDeviceGetAttribute(&mut value, attribute, handle)
            })?;
            Ok(value.unsigned_abs())
        };
        let mut memory_bytes: usize = 0;
        // SAFETY: the driver writes one integer to a local variable.
        driver.check("cuDeviceTotalMem", unsafe {
            api.cuDeviceTotalMem(&mut memory_bytes, handle)
        })?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the driver writes 16 bytes to a local variable.
        driver.check("cuDeviceGetUuid", unsafe {
            api.cuDeviceGetUuid(&mut uuid, handle)
        })?;
        let name = text(|buffer, bytes| {
            // SAFETY: the driver writes a C string of at most `bytes` bytes, and `text` passes a buffer of
            // that size.
            driver.check("cuDeviceGetName", unsafe {
                api.cuDeviceGetName(buffer, bytes, handle)
            })
        })?;
        let pci_bus_id = text(|buffer, bytes| {
            // SAFETY: the driver writes a C string of at most `bytes` bytes, and `text` passes a buffer of
            // that size.
            driver.check("cuDeviceGetPCIBusId", unsafe {
                api.cuDeviceGetPCIBusId(buffer, bytes, handle)
            })
        })?;
        Ok(Device {
            driver: driver.clone(),
            handle,
            ordinal,
            name,
            uuid: uuid.bytes.map(|byte| byte as u8),
            numa_node: numa::node_of_pci(Path::new(numa::SYS), &pci_bus_id),
            pci_bus_id,
            multiprocessors: number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            compute_capability: (
                number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            clock_khz: number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
            memory_bytes: memory_bytes as u64,
            shared_bytes_per_block: number(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
        })
    }

    /// Returns the CUDA driver that lists this GPU.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Returns the driver's number of the GPU in this process.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Returns the driver's handle.
    pub(crate) fn handle(&self) -> CUdevice {
        self.handle
    }

    /// Returns whether the driver supports access of this GPU to `peer`'s memory.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn can_access(&self, peer: &Device) -> Result<bool> {
        if self.handle == peer.handle {
            return Ok(true);
        }
        let mut can: c_int = 0;
        // SAFETY: the driver writes one integer to a local variable.
        self.driver.check("cuDeviceCanAccessPeer", unsafe {
            self.driver
                .api()
                .cuDeviceCanAccessPeer(&mut can, self.handle, peer.handle)
        })?;
        Ok(can != 0)
    }
}

/// Returns a text that the driver writes into a buffer.
fn text(write: impl FnOnce(*mut c_char, c_int) -> Result<()>) -> Result<String> {
    let mut buffer = [0u8; 256];
    write(buffer.as_mut_ptr().cast(), buffer.len() as c_int)?;
    let text = CStr::from_bytes_until_nul(&buffer)
        .map_err(|_| Error::internal("the driver wrote a text without an end"))?;
    Ok(text.to_string_lossy().into_owned())
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "GPU {} ({} at {})",
            self.ordinal, self.name, self.pci_bus_id
        )
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
