//! The functions of the simulated NVML.

use super::super::Api;
use super::super::types::*;
use super::{MockGpu, MockLink, MockNvml};
use crate::sys::pci::BusId;
use std::ffi::{CStr, c_char, c_int, c_uint};

/// Writes a C string into `to`, cut to its size.
fn write_text(to: &mut [c_char], text: &str) {
    let most = to.len() - 1;
    for (to, byte) in to.iter_mut().zip(text.bytes().take(most).chain([0])) {
        *to = byte as c_char;
    }
}

/// Writes an address as NVML does, in upper case with a domain of eight digits.
fn write_bus_id(info: *mut NvmlPciInfo, text: &str) {
    let text = match text.parse::<BusId>() {
        Ok(bus_id) => format!("{:0>16}", bus_id.to_string().to_uppercase()),
        Err(()) => text.into(),
    };
    let mut written = NvmlPciInfo::empty();
    write_text(&mut written.bus_id, &text);
    // SAFETY: the caller of the function passes a writable struct.
    unsafe { *info = written };
}

impl MockNvml {
    /// Calls `answer` with the GPU unless a failure is injected, and writes the number that it returns.
    fn answer(
        &self,
        function: &'static str,
        device: NvmlDevice,
        to: *mut c_uint,
        answer: impl FnOnce(&MockGpu) -> Result<c_uint, NvmlResult>,
    ) -> NvmlResult {
        let index = self.index(device);
        match self.failure(function, index) {
            NvmlResult::SUCCESS => {}
            failure => return failure,
        }
        match answer(&self.gpus[index]) {
            Ok(number) => {
                // SAFETY: the caller of the function passes a writable number.
                unsafe { *to = number };
                NvmlResult::SUCCESS
            }
            Err(failure) => failure,
        }
    }

    fn link(gpu: &MockGpu, link: c_uint) -> Result<&MockLink, NvmlResult> {
        let found = gpu.links.get(link as usize);
        found.ok_or(NvmlResult::INVALID_ARGUMENT)
    }
}

impl Api for MockNvml {
    fn source(&self) -> String {
        "simulated NVML".into()
    }

    unsafe fn init(&self) -> NvmlResult {
        self.lock().users += 1;
        match self.failure("init", 0) {
            NvmlResult::SUCCESS => NvmlResult::SUCCESS,
            failure => {
                self.lock().users -= 1;
                failure
            }
        }
    }

    unsafe fn shutdown(&self) -> NvmlResult {
        let mut state = self.lock();
        state.users = state.users.checked_sub(1).expect("shutdown before init");
        NvmlResult::SUCCESS
    }

    unsafe fn device_count(&self, count: *mut c_uint) -> NvmlResult {
        // SAFETY: the caller passes a writable number.
        unsafe { *count = self.gpus.len() as c_uint };
        self.failure("device_count", 0)
    }

    unsafe fn device_by_index(&self, index: c_uint, device: *mut NvmlDevice) -> NvmlResult {
        assert!(
            (index as usize) < self.gpus.len(),
            "GPU {index} does not exist"
        );
        // SAFETY: the caller passes a writable handle.
        unsafe { *device = std::ptr::without_provenance_mut(index as usize + 1) };
        self.failure("device_by_index", index as usize)
    }

    unsafe fn device_by_bus_id(
        &self,
        bus_id: *const c_char,
        device: *mut NvmlDevice,
    ) -> NvmlResult {
        // SAFETY: the caller passes a C string.
        let text = unsafe { CStr::from_ptr(bus_id) }.to_string_lossy();
        let found = self
            .gpus
            .iter()
            .position(|gpu| Ok(gpu.bus_id) == text.parse());
        match found {
            // SAFETY: the caller passes a writable handle.
            Some(index) => unsafe { self.device_by_index(index as c_uint, device) },
            None => NvmlResult::NOT_FOUND,
        }
    }

    unsafe fn device_index(&self, device: NvmlDevice, to: *mut c_uint) -> NvmlResult {
        let index = self.index(device) as c_uint;
        self.answer("device_index", device, to, |_| Ok(index))
    }

    unsafe fn pci_info(&self, device: NvmlDevice, info: *mut NvmlPciInfo) -> NvmlResult {
        let index = self.index(device);
        write_bus_id(info, &self.gpus[index].bus_id.to_string());
        self.failure("pci_info", index)
    }

    unsafe fn uuid(&self, device: NvmlDevice, text: *mut c_char, bytes: c_uint) -> NvmlResult {
        let index = self.index(device);
        // SAFETY: the caller passes as many writable bytes as it states.
        let to = unsafe { std::slice::from_raw_parts_mut(text, bytes as usize) };
        write_text(to, &format!("GPU-{index:08x}"));
        self.failure("uuid", index)
    }

    unsafe fn compute_capability(
        &self,
        device: NvmlDevice,
        major: *mut c_int,
        minor: *mut c_int,
    ) -> NvmlResult {
        let index = self.index(device);
        let sm = self.gpus[index].sm as c_int;
        // SAFETY: the caller passes writable numbers.
        unsafe { (*major, *minor) = (sm / 10, sm % 10) };
        self.failure("compute_capability", index)
    }

    unsafe fn max_link_generation(&self, device: NvmlDevice, to: *mut c_uint) -> NvmlResult {
        self.answer("max_link_generation", device, to, |gpu| {
            Ok(gpu.pcie.ok_or(NvmlResult::NOT_SUPPORTED)?.0)
        })
    }

    unsafe fn max_link_width(&self, device: NvmlDevice, to: *mut c_uint) -> NvmlResult {
        self.answer("max_link_width", device, to, |gpu| {
            Ok(gpu.pcie.ok_or(NvmlResult::NOT_SUPPORTED)?.1)
        })
    }

    /// An idle GPU trains its link to generation 1.
    unsafe fn current_link_generation(&self, device: NvmlDevice, to: *mut c_uint) -> NvmlResult {
        self.answer("current_link_generation", device, to, |gpu| {
            gpu.pcie.ok_or(NvmlResult::NOT_SUPPORTED).map(|_| 1)
        })
    }

    unsafe fn current_link_width(&self, device: NvmlDevice, to: *mut c_uint) -> NvmlResult {
        self.answer("current_link_width", device, to, |gpu| {
            Ok(gpu.pcie.ok_or(NvmlResult::NOT_SUPPORTED)?.1)
        })
    }

    unsafe fn nvlink_state(&self, device: NvmlDevice, link: c_uint, to: *mut c_uint) -> NvmlResult {
        self.answer("nvlink_state", device, to, |gpu| {
            Ok(MockNvml::link(gpu, link)?.is_up.into())
        })
    }

    unsafe fn nvlink_capability(
        &self,
        device: NvmlDevice,
        link: c_uint,
        capability: c_uint,
        to: *mut c_uint,
    ) -> NvmlResult {
        assert_eq!(capability, NVML_CAPABILITY_P2P);
        self.answer("nvlink_capability", device, to, |gpu| {
            Ok(MockNvml::link(gpu, link)?.p2p.into())
        })
    }

    unsafe fn nvlink_remote_pci_info(
        &self,
        device: NvmlDevice,
        link: c_uint,
        info: *mut NvmlPciInfo,
    ) -> NvmlResult {
        let index = self.index(device);
        match MockNvml::link(&self.gpus[index], link) {
            Ok(link) => write_bus_id(info, &link.remote),
            Err(failure) => return failure,
        }
        self.failure("nvlink_remote_pci_info", index)
    }

    unsafe fn nvlink_remote_type(
        &self,
        device: NvmlDevice,
        link: c_uint,
        to: *mut c_uint,
    ) -> NvmlResult {
        self.answer("nvlink_remote_type", device, to, |gpu| {
            Ok(MockNvml::link(gpu, link)?.kind)
        })
    }

    unsafe fn mig_mode(
        &self,
        device: NvmlDevice,
        current: *mut c_uint,
        pending: *mut c_uint,
    ) -> NvmlResult {
        // SAFETY: the caller passes a writable number.
        unsafe { *pending = 0 };
        self.answer("mig_mode", device, current, |gpu| Ok(gpu.mig.into()))
    }

    unsafe fn p2p_status(
        &self,
        a: NvmlDevice,
        b: NvmlDevice,
        _capability: c_uint,
        to: *mut c_uint,
    ) -> NvmlResult {
        const NOT_SUPPORTED_BY_CHIPSET: c_uint = 1;
        let pair = (self.index(a), self.index(b));
        let refused = self.lock().refused.contains(&pair);
        self.answer("p2p_status", a, to, |_| {
            Ok(if refused {
                NOT_SUPPORTED_BY_CHIPSET
            } else {
                NVML_P2P_OK
            })
        })
    }
}
