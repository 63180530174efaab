//! A simulated NVML, for tests without a driver. Handles count from 1. The mock is stricter than the library:
//! calls before `init` or after the last `shutdown`, and calls with other handles, panic.

mod calls;

use super::types::*;
use crate::sys::pci::BusId;
use std::collections::HashMap;
use std::ffi::c_uint;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A simulated GPU.
#[derive(Clone, Debug)]
pub struct MockGpu {
    /// PCI address of the GPU.
    pub bus_id: BusId,
    /// Compute capability times ten.
    pub sm: u32,
    /// Generation and width of the PCIe link; `None` makes the functions fail.
    pub pcie: Option<(u32, u32)>,
    /// Whether the GPU is divided into slices (MIG).
    pub mig: bool,
    /// The GPU's NVLinks, in the order of their numbers.
    pub links: Vec<MockLink>,
}

/// A simulated NVLink.
#[derive(Clone, Debug)]
pub struct MockLink {
    /// Address at the other end, as text.
    pub remote: String,
    /// Kind of the device at the other end, such as [`NVML_REMOTE_GPU`].
    pub kind: c_uint,
    /// Whether the link is up.
    pub is_up: bool,
    /// Whether the link carries accesses between GPUs.
    pub p2p: bool,
}

struct MockState {
    users: usize,
    failures: HashMap<(&'static str, usize), NvmlResult>,
    refused: Vec<(usize, usize)>,
}

/// A simulated NVML with GPUs, injected failures, and a count of users.
pub struct MockNvml {
    gpus: Vec<MockGpu>,
    state: Mutex<MockState>,
}

impl MockNvml {
    /// Creates a library that lists `gpus`.
    pub fn new(gpus: Vec<MockGpu>) -> Arc<MockNvml> {
        Arc::new(MockNvml {
            gpus,
            state: Mutex::new(MockState {
                users: 0,
                failures: HashMap::new(),
                refused: Vec::new(),
            }),
        })
    }

    /// Makes the method `function` fail for the GPU `gpu` from now on. Functions without a GPU take 0.
    pub fn fail(&self, function: &'static str, gpu: usize, result: NvmlResult) {
        self.lock().failures.insert((function, gpu), result);
    }

    /// Refuses accesses of GPU `a` to GPU `b`.
    pub fn refuse_peers(&self, a: usize, b: usize) {
        self.lock().refused.push((a, b));
    }

    /// Returns how often the library was initialised and not yet shut down.
    pub fn users(&self) -> usize {
        self.lock().users
    }

    fn lock(&self) -> MutexGuard<'_, MockState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the injected failure of a call.
    fn failure(&self, function: &'static str, gpu: usize) -> NvmlResult {
        let state = self.lock();
        assert!(state.users > 0, "{function} before init or after shutdown");
        let failure = state.failures.get(&(function, gpu));
        failure.copied().unwrap_or(NvmlResult::SUCCESS)
    }

    fn index(&self, device: NvmlDevice) -> usize {
        let index = device.addr().wrapping_sub(1);
        assert!(
            index < self.gpus.len(),
            "a handle that the mock did not make"
        );
        index
    }
}
