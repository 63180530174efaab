//! Types and constants of NVML, as `nvml.h` of CUDA 11 and newer has them. Enums that the library writes are
//! integers here, because a newer library may return numbers that this list lacks.

use std::ffi::{c_char, c_uint, c_void};

/// Result code of an NVML function (`nvmlReturn_t`).
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NvmlResult(pub c_uint);

#[allow(missing_docs)]
impl NvmlResult {
    pub const SUCCESS: NvmlResult = NvmlResult(0);
    pub const UNINITIALIZED: NvmlResult = NvmlResult(1);
    pub const INVALID_ARGUMENT: NvmlResult = NvmlResult(2);
    pub const NOT_SUPPORTED: NvmlResult = NvmlResult(3);
    pub const NO_PERMISSION: NvmlResult = NvmlResult(4);
    pub const NOT_FOUND: NvmlResult = NvmlResult(6);
    pub const INSUFFICIENT_SIZE: NvmlResult = NvmlResult(7);
    pub const DRIVER_NOT_LOADED: NvmlResult = NvmlResult(9);
    pub const FUNCTION_NOT_FOUND: NvmlResult = NvmlResult(13);
    pub const GPU_IS_LOST: NvmlResult = NvmlResult(15);
}

/// Handle of a GPU (`nvmlDevice_t`).
pub type NvmlDevice = *mut c_void;

/// Bytes of a PCI address as text, with the zero at its end.
pub const NVML_BUS_ID_BYTES: usize = 32;

/// Bytes of a UUID as text, with the zero at its end.
pub const NVML_UUID_BYTES: usize = 96;

/// Largest number of NVLinks of a GPU.
pub const NVML_MAX_LINKS: c_uint = 18;

/// A feature is on (`NVML_FEATURE_ENABLED`).
pub const NVML_ENABLED: c_uint = 1;

/// The capability of an NVLink to carry accesses between GPUs (`NVML_NVLINK_CAP_P2P_SUPPORTED`).
pub const NVML_CAPABILITY_P2P: c_uint = 0;

/// A GPU is at the other end of an NVLink (`NVML_NVLINK_DEVICE_TYPE_GPU`).
pub const NVML_REMOTE_GPU: c_uint = 0;

/// An IBM processor is at the other end of an NVLink.
pub const NVML_REMOTE_IBM_NPU: c_uint = 1;

/// An NVSwitch is at the other end of an NVLink.
pub const NVML_REMOTE_SWITCH: c_uint = 2;

/// Reads between two GPUs (`NVML_P2P_CAPS_INDEX_READ`).
pub const NVML_P2P_READ: c_uint = 0;

/// Writes between two GPUs (`NVML_P2P_CAPS_INDEX_WRITE`).
pub const NVML_P2P_WRITE: c_uint = 1;

/// Two GPUs can access each other (`NVML_P2P_STATUS_OK`).
pub const NVML_P2P_OK: c_uint = 0;

/// PCI address and identifiers of a device (`nvmlPciInfo_t`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct NvmlPciInfo {
    pub bus_id_legacy: [c_char; 16],
    pub domain: c_uint,
    pub bus: c_uint,
    pub device: c_uint,
    pub pci_device_id: c_uint,
    pub pci_subsystem_id: c_uint,
    pub bus_id: [c_char; NVML_BUS_ID_BYTES],
}

impl NvmlPciInfo {
    /// Returns a value without an address, for the library to overwrite.
    pub const fn empty() -> NvmlPciInfo {
        NvmlPciInfo {
            bus_id_legacy: [0; 16],
            domain: 0,
            bus: 0,
            device: 0,
            pci_device_id: 0,
            pci_subsystem_id: 0,
            bus_id: [0; NVML_BUS_ID_BYTES],
        }
    }
}

// NVML writes this many bytes into the struct.
const _: () = assert!(size_of::<NvmlPciInfo>() == 68);
const _: () = assert!(std::mem::offset_of!(NvmlPciInfo, bus_id) == 36);
