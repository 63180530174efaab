//! A simulated machine with GPUs, for tests without a driver.
//!
//! A [`Machine`] has devices and memory; each [`Process`] on it is an [`super::Api`] of its own,
//! so that one test can play several processes. Device memory is memory of the test; streams run
//! what is queued at once; kernels are closures, registered by name. It is stricter than a driver:
//! what needs a current context and has another one fails, and so does every access that a real
//! GPU would not be able to make.

mod calls;
mod device;
mod memory;
mod state;
mod stream;

use super::types::*;
use state::{Kernel, State};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What [`Process::calls`] counts launches under that ask for an early start.
pub const EARLY_STARTS: &str = "early starts";

/// Devices, and all that is allocated on them.
pub struct Machine {
    state: Mutex<State>,
}

/// What a simulated kernel gets.
pub struct Launch<'a> {
    /// Extents of the grid.
    pub grid: [u32; 3],
    /// Extents of a block.
    pub block: [u32; 3],
    /// Bytes of shared memory.
    pub shared: u32,
    /// The parameter.
    pub args: &'a [u8],
    process: &'a Process,
    context: CuContext,
}

impl Launch<'_> {
    /// The parameter as the struct that the kernel takes.
    ///
    /// # Safety
    /// Every bit pattern is a value of `A`.
    pub unsafe fn args<A: Copy>(&self) -> A {
        assert_eq!(size_of::<A>(), self.args.len(), "the parameter's size");
        // SAFETY: as long as `A`, and a value of it by the caller's word.
        unsafe { self.args.as_ptr().cast::<A>().read_unaligned() }
    }

    /// Memory that the kernel's GPU can reach; `None` where it would fault.
    pub fn reach(&self, address: CuDevicePtr, bytes: usize) -> Option<*mut u8> {
        let state = self.process.machine.lock();
        state
            .reaches(self.process.id, self.context.0, address, bytes)
            .then_some(address as *mut u8)
    }

    /// The 64-bit words at `address`.
    ///
    /// # Safety
    /// Nobody else uses them while they are borrowed.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn words(&self, address: CuDevicePtr, words: u64) -> Option<&mut [u64]> {
        let place = self.reach(address, words as usize * 8)?;
        assert_eq!(address % 8, 0, "alignment");
        // SAFETY: mapped by `reach`, aligned, and not shared by the caller's word.
        Some(unsafe { std::slice::from_raw_parts_mut(place.cast(), words as usize) })
    }
}

impl Machine {
    /// A machine with `devices` GPUs of 1 GiB that all reach one another.
    pub fn new(devices: usize) -> Arc<Machine> {
        Arc::new(Machine {
            state: Mutex::new(State::new(devices)),
        })
    }

    /// Another process on it.
    pub fn process(self: &Arc<Machine>) -> Process {
        let id = self.lock().number();
        Process {
            machine: self.clone(),
            id,
        }
    }

    /// From now on two GPUs do not reach one another.
    pub fn refuse_peers(&self, a: CuDevice, b: CuDevice) {
        self.lock().refused.extend([(a, b), (b, a)]);
    }

    /// From now on drivers are of a version, and code was compiled for the GPUs of a PTX version.
    pub fn be(&self, driver_version: c_int, compiled_for: c_int) {
        let mut state = self.lock();
        (state.driver_version, state.compiled_for) = (driver_version, compiled_for);
    }

    /// Gives every module a kernel `name` whose parameter has `bytes` bytes.
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

/// A process on a machine. Clones are the same process.
#[derive(Clone)]
pub struct Process {
    machine: Arc<Machine>,
    id: usize,
}

impl Process {
    /// The machine.
    pub fn machine(&self) -> &Arc<Machine> {
        &self.machine
    }

    /// Has `function` (a method's name) fail with `result` `times` times, after `skip` more calls
    /// that do not.
    pub fn fail(&self, function: &'static str, skip: usize, times: usize, result: CuResult) {
        let mut state = self.machine.lock();
        state
            .failures
            .insert((self.id, function), (skip, times, result));
    }

    /// Whether work that is queued never ends, as far as streams and events tell.
    pub fn hang(&self, hangs: bool) {
        let mut state = self.machine.lock();
        if hangs {
            state.hanging.insert(self.id);
        } else {
            state.hanging.remove(&self.id);
        }
    }

    /// Makes `stream` one of a green context.
    pub fn make_green(&self, stream: CuStream) {
        self.machine.lock().green_streams.insert(stream.0);
    }

    /// How often `function` was called.
    pub fn calls(&self, function: &'static str) -> usize {
        let state = self.machine.lock();
        state.calls.get(&(self.id, function)).copied().unwrap_or(0)
    }

    /// For each mark in the graphs that it can launch: how much work the graph has, and behind which
    /// pieces the mark is, from 1.
    pub fn marks(&self) -> Vec<(usize, Vec<usize>)> {
        let state = self.machine.lock();
        let graphs = state
            .execs
            .values()
            .filter(|graph| graph.process == self.id);
        let marks = |graph: &state::Graph| {
            let behind = graph.marks.values().map(|(_, behind)| behind.iter());
            let behind = behind.map(|nodes| nodes.map(|node| node.0).collect());
            behind
                .map(|nodes| (graph.work.len(), nodes))
                .collect::<Vec<_>>()
        };
        graphs.flat_map(marks).collect()
    }

    /// What the process has not given back.
    pub fn leftovers(&self) -> Vec<String> {
        self.machine.lock().leftovers(self.id)
    }

    /// The calling thread's current context.
    pub fn current(&self) -> Option<CuContext> {
        self.thread(|thread| thread.contexts.last().copied())
    }

    /// Something of the calling thread's.
    fn thread<R>(&self, use_it: impl FnOnce(&mut Thread) -> R) -> R {
        thread_local! {
            static THREADS: RefCell<HashMap<usize, Thread>> = RefCell::default();
        }
        let place = (Arc::as_ptr(&self.machine).addr()) ^ self.id.rotate_left(48);
        THREADS.with_borrow_mut(|threads| use_it(threads.entry(place).or_default()))
    }
}

/// What a driver keeps for each thread.
#[derive(Default)]
struct Thread {
    contexts: Vec<CuContext>,
    /// The default, 0, is the global mode.
    mode: c_uint,
}
