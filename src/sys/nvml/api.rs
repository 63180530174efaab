//! The functions of NVML that this library calls. A list defines the trait [`Api`], the table that
//! [`Loaded`](super::Loaded) fills from the driver's library, and what a missing optional function returns.

use super::types::*;
use crate::sys::loader::function_table;
use std::ffi::{c_char, c_int, c_uint};

/// Defines the trait [`Api`] and the table of loaded functions from the list.
macro_rules! nvml_functions {
    (
        required { $($name:ident = $symbol:ident ($($arg:ident: $type:ty),* $(,)?);)* }
        optional { $($late:ident = $late_symbol:ident ($($late_arg:ident: $late_type:ty),* $(,)?);)* }
    ) => {
        /// The functions of NVML, with the arguments and contracts of the C functions.
        ///
        /// # Safety of the methods
        /// Every pointer is valid for what the function reads or writes. Handles came from this library after
        /// `init`, and `shutdown` was not called since.
        #[allow(clippy::missing_safety_doc)]
        pub trait Api: Send + Sync {
            /// Returns the name of the library, or of its simulation, for messages.
            fn source(&self) -> String;
            $(
                #[doc = concat!("Calls `", stringify!($symbol), "`.")]
                unsafe fn $name(&self, $($arg: $type),*) -> NvmlResult;
            )*
            $(
                #[doc = concat!("Calls `", stringify!($late_symbol), "`, which old drivers lack.")]
                unsafe fn $late(&self, $($late_arg: $late_type),*) -> NvmlResult;
            )*
        }

        function_table! {
            /// Functions of the driver's library.
            pub(super) struct Functions;
            required { $($name = $symbol: fn($($type),*) -> NvmlResult;)* }
            optional { $($late = $late_symbol: fn($($late_type),*) -> NvmlResult;)* }
        }

        impl Api for super::Loaded {
            fn source(&self) -> String {
                self.library().name().to_string()
            }
            $(
                unsafe fn $name(&self, $($arg: $type),*) -> NvmlResult {
                    // SAFETY: the caller keeps the C function's contract.
                    unsafe { (self.functions().$name)($($arg),*) }
                }
            )*
            $(
                unsafe fn $late(&self, $($late_arg: $late_type),*) -> NvmlResult {
                    match self.functions().$late {
                        // SAFETY: the caller keeps the C function's contract.
                        Some(function) => unsafe { function($($late_arg),*) },
                        None => NvmlResult::FUNCTION_NOT_FOUND,
                    }
                }
            )*
        }
    };
}

nvml_functions! {
    required {
        init = nvmlInit_v2 ();
        shutdown = nvmlShutdown ();
        device_count = nvmlDeviceGetCount_v2 (count: *mut c_uint);
        device_by_index = nvmlDeviceGetHandleByIndex_v2 (index: c_uint, device: *mut NvmlDevice);
        device_by_bus_id = nvmlDeviceGetHandleByPciBusId_v2
            (bus_id: *const c_char, device: *mut NvmlDevice);
        device_index = nvmlDeviceGetIndex (device: NvmlDevice, index: *mut c_uint);
        pci_info = nvmlDeviceGetPciInfo_v3 (device: NvmlDevice, info: *mut NvmlPciInfo);
        uuid = nvmlDeviceGetUUID (device: NvmlDevice, text: *mut c_char, bytes: c_uint);
        compute_capability = nvmlDeviceGetCudaComputeCapability
            (device: NvmlDevice, major: *mut c_int, minor: *mut c_int);
        max_link_generation = nvmlDeviceGetMaxPcieLinkGeneration
            (device: NvmlDevice, generation: *mut c_uint);
        max_link_width = nvmlDeviceGetMaxPcieLinkWidth (device: NvmlDevice, width: *mut c_uint);
        current_link_generation = nvmlDeviceGetCurrPcieLinkGeneration
            (device: NvmlDevice, generation: *mut c_uint);
        current_link_width = nvmlDeviceGetCurrPcieLinkWidth
            (device: NvmlDevice, width: *mut c_uint);
        nvlink_state = nvmlDeviceGetNvLinkState
            (device: NvmlDevice, link: c_uint, state: *mut c_uint);
        nvlink_capability = nvmlDeviceGetNvLinkCapability
            (device: NvmlDevice, link: c_uint, capability: c_uint, value: *mut c_uint);
        nvlink_remote_pci_info = nvmlDeviceGetNvLinkRemotePciInfo_v2
            (device: NvmlDevice, link: c_uint, info: *mut NvmlPciInfo);
        p2p_status = nvmlDeviceGetP2PStatus
            (a: NvmlDevice, b: NvmlDevice, capability: c_uint, status: *mut c_uint);
    }
    optional {
        mig_mode = nvmlDeviceGetMigMode
            (device: NvmlDevice, current: *mut c_uint, pending: *mut c_uint);
        nvlink_remote_type = nvmlDeviceGetNvLinkRemoteDeviceType
            (device: NvmlDevice, link: c_uint, kind: *mut c_uint);
    }
}
