//! Queries of NVML that return plain values.

use super::{Api, Loaded, NvmlDevice, NvmlPciInfo, NvmlResult};
use super::{
    NVML_CAPABILITY_P2P, NVML_ENABLED, NVML_MAX_LINKS, NVML_P2P_OK, NVML_P2P_READ, NVML_P2P_WRITE,
    NVML_REMOTE_GPU, NVML_REMOTE_IBM_NPU, NVML_REMOTE_SWITCH, NVML_UUID_BYTES,
};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::pci::{BusId, MAX_DEVICES};
use std::ffi::{CString, c_char, c_uint};
use std::sync::Arc;

/// A GPU that NVML lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlGpu {
    /// PCI address of the GPU.
    pub bus_id: BusId,
    /// Number by which NVML knows the GPU.
    pub index: u32,
    /// UUID, such as `GPU-...`; empty if unknown.
    pub uuid: String,
    /// Compute capability times ten.
    pub sm: Option<u32>,
    /// The fastest PCIe link that both the GPU and the port above it support.
    pub max_link: NvmlPcieLink,
    /// The PCIe link as it is trained now, which may be slow to save power.
    pub current_link: NvmlPcieLink,
    /// Whether the GPU is divided into slices (MIG).
    pub mig: bool,
    /// NVLinks that are up and carry accesses between GPUs.
    pub links: Vec<NvmlLink>,
}

/// Generation and width of a PCIe link; `None` if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NvmlPcieLink {
    /// PCIe generation, from 1.
    pub generation: Option<u32>,
    /// Number of lanes.
    pub width: Option<u32>,
}

/// An NVLink that is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmlLink {
    /// Address of the device at the other end; `None` if the library gives none that can be read.
    pub remote: Option<BusId>,
    /// Kind of the device at the other end.
    pub kind: NvmlRemote,
}

/// Kind of the device at the other end of an NVLink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvmlRemote {
    /// A GPU.
    Gpu,
    /// An NVSwitch.
    Switch,
    /// A processor of IBM's POWER9.
    Processor,
    /// The driver does not report the kind.
    Unknown,
}

/// The initialised library. It is shut down when dropped; NVML counts the users in a process.
pub struct Nvml {
    api: Arc<dyn Api>,
}

impl Nvml {
    /// Opens the system's library.
    ///
    /// # Errors
    /// Unsupported without NVIDIA's driver, or if the driver is too old; system if it cannot be initialised.
    pub fn open() -> Result<Nvml> {
        Nvml::new(Arc::new(Loaded::open(Loaded::LIBRARY)?))
    }

    /// Initialises a library.
    ///
    /// # Errors
    /// Unsupported if the driver is not loaded; system if the library cannot be initialised otherwise.
    pub fn new(api: Arc<dyn Api>) -> Result<Nvml> {
        // SAFETY: the function takes no arguments.
        match unsafe { api.init() } {
            NvmlResult::SUCCESS => Ok(Nvml { api }),
            NvmlResult::DRIVER_NOT_LOADED => {
                let text = format!("{}: NVIDIA's driver is not loaded", api.source());
                Err(Error::new(ErrorKind::Unsupported, text))
            }
            code => Err(failed(&*api, "nvmlInit_v2", code)),
        }
    }

    /// Returns the GPUs in the order of their numbers. GPUs that this process may not use or that have failed
    /// are left out.
    ///
    /// # Errors
    /// System if the library fails.
    pub fn gpus(&self) -> Result<Vec<NvmlGpu>> {
        let mut count = 0;
        // SAFETY: `count` is writable.
        let code = unsafe { self.api.device_count(&mut count) };
        self.check("nvmlDeviceGetCount_v2", code)?;
        let mut gpus = Vec::new();
        for index in 0..count.min(MAX_DEVICES as c_uint) {
            let mut device: NvmlDevice = std::ptr::null_mut();
            // SAFETY: `device` is writable.
            match unsafe { self.api.device_by_index(index, &mut device) } {
                NvmlResult::SUCCESS => gpus.push(self.gpu(index, device)?),
                NvmlResult::NO_PERMISSION | NvmlResult::GPU_IS_LOST => {}
                code => return Err(failed(&*self.api, "nvmlDeviceGetHandleByIndex_v2", code)),
            }
        }
        Ok(gpus)
    }

    /// Returns a single GPU; `None` if the library does not list it. Takes about 14 ms the first time and 5 ms
    /// later on an H200, so a process that needs only its own GPU saves time.
    ///
    /// # Errors
    /// System if the library fails.
    pub fn gpu_at(&self, bus_id: BusId) -> Result<Option<NvmlGpu>> {
        let Some(device) = self.device(bus_id) else {
            return Ok(None);
        };
        let mut index = 0;
        // SAFETY: `Nvml` keeps the library initialised, so the handle is valid, and `index` is writable.
        let code = unsafe { self.api.device_index(device, &mut index) };
        self.check("nvmlDeviceGetIndex", code)?;
        self.gpu(index, device).map(Some)
    }

    /// Returns whether GPU `a` can read and write the memory of GPU `b`; `None` if the library does not know
    /// the GPUs or the answer.
    pub fn can_access_peer(&self, a: BusId, b: BusId) -> Option<bool> {
        let (a, b) = (self.device(a)?, self.device(b)?);
        let status = |capability| {
            // SAFETY: the handles came from this library, which `Nvml` keeps initialised.
            self.number(|status| unsafe { self.api.p2p_status(a, b, capability, status) })
        };
        Some(status(NVML_P2P_READ)? == NVML_P2P_OK && status(NVML_P2P_WRITE)? == NVML_P2P_OK)
    }

    fn device(&self, bus_id: BusId) -> Option<NvmlDevice> {
        let text = CString::new(bus_id.to_string()).ok()?;
        let mut device: NvmlDevice = std::ptr::null_mut();
        // SAFETY: `text` is a C string, and `device` is writable.
        let code = unsafe { self.api.device_by_bus_id(text.as_ptr(), &mut device) };
        (code == NvmlResult::SUCCESS).then_some(device)
    }

    fn gpu(&self, index: c_uint, device: NvmlDevice) -> Result<NvmlGpu> {
        let api = &self.api;
        let mut info = NvmlPciInfo::empty();
        // SAFETY: the handle came from this library, which `Nvml` keeps initialised, and `info` is writable.
        let code = unsafe { api.pci_info(device, &mut info) };
        self.check("nvmlDeviceGetPciInfo_v3", code)?;
        let bus_id = text(&info.bus_id).parse().map_err(|()| {
            let text = format!("{}: GPU {index} has no PCI address", api.source());
            Error::new(ErrorKind::System, text)
        })?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: `Nvml` keeps the library initialised, so the handle is valid. Both numbers are writable.
        let code = unsafe { api.compute_capability(device, &mut major, &mut minor) };
        let sm = u32::try_from(major.saturating_mul(10).saturating_add(minor)).ok();
        let mut pending = 0;
        // SAFETY: the handle is valid while `Nvml` keeps the library initialised. Each closure gets one writable
        // number, `pending` is writable too, and the library writes nothing else.
        let (max_link, current_link, mig) = unsafe {
            (
                NvmlPcieLink {
                    generation: self.number(|to| api.max_link_generation(device, to)),
                    width: self.number(|to| api.max_link_width(device, to)),
                },
                NvmlPcieLink {
                    generation: self.number(|to| api.current_link_generation(device, to)),
                    width: self.number(|to| api.current_link_width(device, to)),
                },
                self.number(|to| api.mig_mode(device, to, &mut pending)),
            )
        };
        Ok(NvmlGpu {
            bus_id,
            index,
            uuid: self.uuid(device),
            sm: sm.filter(|_| code == NvmlResult::SUCCESS),
            max_link,
            current_link,
            mig: mig == Some(NVML_ENABLED),
            links: (0..NVML_MAX_LINKS)
                .filter_map(|link| self.link(device, link))
                .collect(),
        })
    }

    fn uuid(&self, device: NvmlDevice) -> String {
        let mut uuid = [0 as c_char; NVML_UUID_BYTES];
        // SAFETY: the library writes at most as many bytes as it is given.
        let code = unsafe {
            self.api
                .uuid(device, uuid.as_mut_ptr(), uuid.len() as c_uint)
        };
        match code {
            NvmlResult::SUCCESS => text(&uuid),
            _ => String::new(),
        }
    }

    /// Returns an NVLink; `None` if it is down, or if it carries no accesses between GPUs.
    fn link(&self, device: NvmlDevice, link: c_uint) -> Option<NvmlLink> {
        let api = &self.api;
        // The driver trains the link when its capability is first queried, so the capability is queried
        // before the state.
        // SAFETY: the handle is valid while `Nvml` keeps the library initialised, and the closures get one
        // writable number each.
        let is_up = unsafe {
            self.number(|to| api.nvlink_capability(device, link, NVML_CAPABILITY_P2P, to))? != 0
                && self.number(|to| api.nvlink_state(device, link, to))? == NVML_ENABLED
        };
        if !is_up {
            return None;
        }
        let mut info = NvmlPciInfo::empty();
        // SAFETY: as long as `Nvml` keeps the library initialised the handle is valid. The closure gets a
        // writable number, and `info` is writable.
        let (kind, code) = unsafe {
            (
                self.number(|to| api.nvlink_remote_type(device, link, to)),
                api.nvlink_remote_pci_info(device, link, &mut info),
            )
        };
        let remote = match code {
            NvmlResult::SUCCESS => text(&info.bus_id).parse().ok(),
            _ => None,
        };
        let kind = match kind {
            Some(NVML_REMOTE_GPU) => NvmlRemote::Gpu,
            Some(NVML_REMOTE_SWITCH) => NvmlRemote::Switch,
            Some(NVML_REMOTE_IBM_NPU) => NvmlRemote::Processor,
            _ => NvmlRemote::Unknown,
        };
        Some(NvmlLink { remote, kind })
    }

    /// Returns the number that `call` writes; `None` if it fails.
    fn number(&self, call: impl FnOnce(&mut c_uint) -> NvmlResult) -> Option<c_uint> {
        let mut number = 0;
        (call(&mut number) == NvmlResult::SUCCESS).then_some(number)
    }

    fn check(&self, function: &str, code: NvmlResult) -> Result<()> {
        match code {
            NvmlResult::SUCCESS => Ok(()),
            code => Err(failed(&*self.api, function, code)),
        }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: `new` initialised the library, and no handle outlives a call of this type.
        unsafe { self.api.shutdown() };
    }
}

fn failed(api: &dyn Api, function: &str, NvmlResult(code): NvmlResult) -> Error {
    let text = format!("{}: {function} returns error {code}", api.source());
    Error::new(ErrorKind::System, text)
}

/// Returns the text before the first zero.
fn text(bytes: &[c_char]) -> String {
    let bytes = bytes.iter().take_while(|byte| **byte != 0);
    let bytes: Vec<u8> = bytes.map(|byte| *byte as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
