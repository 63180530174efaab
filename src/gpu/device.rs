//! A GPU and what is known about it without a context.

use super::Driver;
use crate::error::{Error, Result};
use crate::sys::cuda::{CuDevice, CuUuid, device_attribute};
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::sync::Arc;

/// A GPU.
#[derive(Clone)]
pub struct Device {
    driver: Arc<Driver>,
    handle: CuDevice,
    ordinal: u32,
    /// The maker's name of it.
    pub name: String,
    /// Its identity, the same in every process.
    pub uuid: [u8; 16],
    /// Where it is plugged in, `domain:bus:device.function`.
    pub pci_bus_id: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Compute capability, (9, 0) for sm_90.
    pub compute_capability: (u32, u32),
    /// Clock of the multiprocessors at most, in kHz.
    pub clock_khz: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Bytes of shared memory that a block may ask for.
    pub shared_bytes_per_block: u32,
}

impl Device {
    /// The GPU that the driver counts as `ordinal`.
    ///
    /// # Errors
    /// Invalid argument, with the number of GPUs, if there is none; those of the driver.
    pub fn at(driver: &Arc<Driver>, ordinal: u32) -> Result<Device> {
        let count = driver.device_count()?;
        if ordinal >= count {
            return Err(Error::invalid_argument(format!(
                "GPU {ordinal} was asked for, but there are {count} (counted from 0; \
                 CUDA_VISIBLE_DEVICES may hide some)"
            )));
        }
        let api = driver.api();
        let mut handle: CuDevice = 0;
        // SAFETY: writes one handle.
        driver.check("cuDeviceGet", unsafe {
            api.cuDeviceGet(&mut handle, ordinal as c_int)
        })?;
        let number = |attribute: c_int| -> Result<u32> {
            let mut value: c_int = 0;
            // SAFETY: writes one integer.
            driver.check("cuDeviceGetAttribute", unsafe {
                api.cuDeviceGetAttribute(&mut value, attribute, handle)
            })?;
            Ok(value.unsigned_abs())
        };
        let mut memory_bytes: usize = 0;
        // SAFETY: writes one integer.
        driver.check("cuDeviceTotalMem", unsafe {
            api.cuDeviceTotalMem(&mut memory_bytes, handle)
        })?;
        let mut uuid = CuUuid::default();
        // SAFETY: writes 16 bytes.
        driver.check("cuDeviceGetUuid", unsafe {
            api.cuDeviceGetUuid(&mut uuid, handle)
        })?;
        let name = text(|buffer, bytes| {
            // SAFETY: writes at most `bytes` bytes, a zero behind the text among them.
            driver.check("cuDeviceGetName", unsafe {
                api.cuDeviceGetName(buffer, bytes, handle)
            })
        })?;
        let pci_bus_id = text(|buffer, bytes| {
            // SAFETY: as above.
            driver.check("cuDeviceGetPCIBusId", unsafe {
                api.cuDeviceGetPCIBusId(buffer, bytes, handle)
            })
        })?;
        Ok(Device {
            driver: driver.clone(),
            handle,
            ordinal,
            name,
            uuid: uuid.0,
            pci_bus_id,
            multiprocessors: number(device_attribute::MULTIPROCESSOR_COUNT)?,
            compute_capability: (
                number(device_attribute::COMPUTE_CAPABILITY_MAJOR)?,
                number(device_attribute::COMPUTE_CAPABILITY_MINOR)?,
            ),
            clock_khz: number(device_attribute::CLOCK_RATE_KHZ)?,
            memory_bytes: memory_bytes as u64,
            shared_bytes_per_block: number(device_attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        })
    }

    /// The driver that has it.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Its number in this process.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The driver's handle of it.
    pub(crate) fn handle(&self) -> CuDevice {
        self.handle
    }

    /// Whether the hardware and the system let this GPU read and write `peer`'s memory.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn can_access(&self, peer: &Device) -> Result<bool> {
        if self.handle == peer.handle {
            return Ok(true);
        }
        let mut can: c_int = 0;
        // SAFETY: writes one integer.
        self.driver.check("cuDeviceCanAccessPeer", unsafe {
            self.driver
                .api()
                .cuDeviceCanAccessPeer(&mut can, self.handle, peer.handle)
        })?;
        Ok(can != 0)
    }
}

/// A text that the driver writes into a buffer.
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
