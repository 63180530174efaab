//! A simulated machine with GPUs, for tests without a driver.
//!
//! A [`MockMachine`] has devices and memory. Each [`Process`] on it implements [`super::Api`], so one test can
//! run several processes. Device memory is host memory, streams execute work immediately, and kernels are
//! closures that a test registers by name. The mock is stricter than a driver. Calls with a wrong current
//! context fail, and so do accesses that a real GPU could not make.

mod calls;
mod device;
mod memory;
mod state;
mod stream;

use super::types::*;
use state::{Kernel, State};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Name under which [`Process::calls`] counts programmatic dependent launches.
pub const PROGRAMMATIC_LAUNCHES: &str = "programmatic launches";

/// Returns a handle that the mock made from a number.
pub(super) fn opaque<T>(number: usize) -> *mut T {
    std::ptr::without_provenance_mut(number)
}

/// A machine: its devices, and the state of all drivers on it.
pub struct MockMachine {
    state: Mutex<State>,
}

/// A launch, as a simulated kernel receives it.
pub struct Launch<'a> {
    /// Extents of the grid.
    pub grid: [u32; 3],
    /// Extents of a block.
    pub block: [u32; 3],
    /// Bytes of shared memory.
    pub shared: u32,
    /// Bytes of the kernel's only parameter, which is a struct.
    pub args: &'a [u8],
    process: &'a Process,
    context: CUcontext,
}

impl Launch<'_> {
    /// Returns the parameter as the struct that the kernel takes.
    ///
    /// # Safety
    /// Every bit pattern is a value of `A`.
    pub unsafe fn args<A: Copy>(&self) -> A {
        assert_eq!(size_of::<A>(), self.args.len(), "the parameter's size");
        // SAFETY: the bytes are as long as `A`, and the caller guarantees that they are a value of it.
        unsafe { self.args.as_ptr().cast::<A>().read_unaligned() }
    }

    /// Returns memory that the kernel's GPU can reach; `None` where the kernel would fault.
    pub fn reach(&self, address: CUdeviceptr, bytes: usize) -> Option<*mut u8> {
        let state = self.process.machine.lock();
        state
            .can_reach(self.process.id, self.context.addr(), address, bytes)
            .then_some(address as *mut u8)
    }

    /// Returns the 64-bit words at `address`; `None` where the kernel would fault.
    ///
    /// # Safety
    /// No other code uses the words while they are borrowed.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn words(&self, address: CUdeviceptr, words: u64) -> Option<&mut [u64]> {
        let place = self.reach(address, words as usize * 8)?;
        assert_eq!(address % 8, 0, "alignment");
        // SAFETY: `reach` found the words mapped, they are aligned, and the caller has them alone.
        Some(unsafe { std::slice::from_raw_parts_mut(place.cast(), words as usize) })
    }
}

impl MockMachine {
    /// Returns a machine with `devices` GPUs of 1 GiB, each with peer access to all others.
    pub fn new(devices: usize) -> Arc<MockMachine> {
        Arc::new(MockMachine {
            state: Mutex::new(State::new(devices)),
        })
    }

    /// Starts another process on the machine.
    pub fn process(self: &Arc<MockMachine>) -> Process {
        let id = self.lock().next_id();
        Process {
            machine: self.clone(),
            id,
        }
    }

    /// Refuses peer access between two GPUs from now on.
    pub fn refuse_peers(&self, a: CUdevice, b: CUdevice) {
        self.lock().refused.extend([(a, b), (b, a)]);
    }

    /// Sets the version of all drivers, and the PTX version for which kernels count as compiled.
    pub fn set_versions(&self, driver_version: c_int, compiled_for: c_int) {
        let mut state = self.lock();
        (state.driver_version, state.compiled_for) = (driver_version, compiled_for);
    }

    /// Adds a kernel `name`, whose parameter has `bytes` bytes, to every module.
    pub fn kernel(
        &self,
        name: &str,
        bytes: usize,
        run: impl Fn(&Launch<'_>) -> CuResult + Send + Sync + 'static,
    ) {
        let kernel = Kernel {
            bytes,
            run: Arc::new(run),
        };
        self.lock().kernels.insert(name.into(), kernel);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process on a machine. A clone is another reference to one process.
#[derive(Clone)]
pub struct Process {
    machine: Arc<MockMachine>,
    id: usize,
}

impl Process {
    /// Returns the machine of the process.
    pub fn machine(&self) -> &Arc<MockMachine> {
        &self.machine
    }

    /// Lets the next `skip` calls of the method `function` pass, and fails the `times` calls after them with
    /// `result`.
    pub fn fail(&self, function: &'static str, skip: usize, times: usize, result: CuResult) {
        let mut state = self.machine.lock();
        state
            .failures
            .insert((self.id, function), (skip, times, result));
    }

    /// Sets whether streams and events report all their work as unfinished.
    pub fn hang(&self, hangs: bool) {
        let mut state = self.machine.lock();
        if hangs {
            state.hanging.insert(self.id);
        } else {
            state.hanging.remove(&self.id);
        }
    }

    /// Makes `stream` belong to a green context.
    pub fn make_green(&self, stream: CUstream) {
        self.machine.lock().green_streams.insert(stream.addr());
    }

    /// Returns how often the method `function` was called.
    pub fn calls(&self, function: &'static str) -> usize {
        let state = self.machine.lock();
        state.calls.get(&(self.id, function)).copied().unwrap_or(0)
    }

    /// Describes each event-record node of the executable graphs: the number of work nodes in its graph, and
    /// the nodes on which it depends. Node numbers count from 1.
    pub fn marks(&self) -> Vec<(usize, Vec<usize>)> {
        let state = self.machine.lock();
        let graphs = state
            .execs
            .values()
            .filter(|graph| graph.process == self.id);
        let marks = |graph: &state::Graph| {
            let behind = graph.marks.values().map(|(_, behind)| behind.iter());
            let behind = behind.map(|nodes| nodes.copied().collect());
            behind
                .map(|nodes| (graph.work.len(), nodes))
                .collect::<Vec<_>>()
        };
        graphs.flat_map(marks).collect()
    }

    /// Describes the objects that the process has created and not destroyed.
    pub fn leftovers(&self) -> Vec<String> {
        self.machine.lock().leftovers(self.id)
    }

    /// Returns the calling thread's current context.
    pub fn current(&self) -> Option<CUcontext> {
        self.thread(|thread| thread.contexts.last().copied())
    }

    /// Calls `use_it` with the driver's state of the calling thread.
    fn thread<R>(&self, use_it: impl FnOnce(&mut Thread) -> R) -> R {
        thread_local! {
            static THREADS: RefCell<HashMap<usize, Thread>> = RefCell::default();
        }
        let place = (Arc::as_ptr(&self.machine).addr()) ^ self.id.rotate_left(48);
        THREADS.with_borrow_mut(|threads| use_it(threads.entry(place).or_default()))
    }
}

/// State that a driver keeps for each thread.
struct Thread {
    contexts: Vec<CUcontext>,
    mode: CUstreamCaptureMode,
}

impl Default for Thread {
    fn default() -> Thread {
        Thread {
            contexts: Vec::new(),
            mode: CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        }
    }
}
