//! What the simulated functions have in common, and the trait, whose methods are in the files
//! beside this one.

use super::super::api::Api;
use super::super::types::*;
use super::state::{State, Work};
use super::{Launch, Process};
use std::ffi::{c_char, c_float, c_int, c_uint, c_void};
use std::sync::MutexGuard;

/// What a function does, with `?` for codes.
pub(super) type Done = Result<(), CuResult>;

fn code(done: Done) -> CuResult {
    match done {
        Ok(()) => CuResult::SUCCESS,
        Err(code) => code,
    }
}

impl Process {
    /// Counts the call, fails it if a test asked for that, and hands out the machine.
    pub(super) fn enter(&self, function: &'static str) -> Result<MutexGuard<'_, State>, CuResult> {
        let mut state = self.machine.lock();
        *state.calls.entry((self.id, function)).or_default() += 1;
        if let Some((skip, times, result)) = state.failures.get_mut(&(self.id, function)) {
            if *skip > 0 {
                *skip -= 1;
            } else if *times > 0 {
                *times -= 1;
                return Err(*result);
            }
        }
        Ok(state)
    }

    /// The same, with the current context.
    pub(super) fn enter_context(
        &self,
        function: &'static str,
    ) -> Result<(MutexGuard<'_, State>, usize), CuResult> {
        let state = self.enter(function)?;
        match self.current() {
            Some(context) if state.contexts.contains_key(&context.0) => Ok((state, context.0)),
            _ => Err(CuResult::INVALID_CONTEXT),
        }
    }

    /// The same for what must not happen while a graph is recorded.
    pub(super) fn enter_ordered(
        &self,
        function: &'static str,
    ) -> Result<(MutexGuard<'_, State>, usize), CuResult> {
        let (mut state, context) = self.enter_context(function)?;
        let mode = self.thread(|thread| thread.mode);
        if mode != capture_mode::RELAXED && state.captured_globally(self.id) {
            for stream in state.streams.values_mut() {
                if let Some((_, 0, whole)) = &mut stream.capture {
                    *whole = false;
                }
            }
            return Err(CuResult::STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok((state, context))
    }

    /// The context of a stream, which must be the current one.
    pub(super) fn stream_context(
        &self,
        state: &State,
        current: usize,
        stream: CuStream,
    ) -> Result<usize, CuResult> {
        match state.streams.get(&stream.0) {
            Some(found) if found.context == current => Ok(current),
            Some(_) => Err(CuResult::INVALID_HANDLE),
            None if stream.0 == 0 || stream.0 == 2 => Ok(current),
            None => Err(CuResult::INVALID_HANDLE),
        }
    }

    /// Records work if the stream is being captured, else does it now.
    pub(super) fn queue(&self, function: &'static str, stream: CuStream, work: Work) -> Done {
        let (mut state, current) = self.enter_context(function)?;
        let context = self.stream_context(&state, current, stream)?;
        let capture = state.streams.get(&stream.0).and_then(|s| s.capture);
        match capture {
            Some((_, _, false)) => Err(CuResult::STREAM_CAPTURE_INVALIDATED),
            Some((graph, _, true)) => {
                if let Some(graph) = state.graphs.get_mut(&graph) {
                    graph.context = context;
                    graph.push(work);
                }
                Ok(())
            }
            None => {
                drop(state);
                self.work(context, &work)
            }
        }
    }

    pub(super) fn work(&self, context: usize, work: &Work) -> Done {
        let state = self.machine.lock();
        match work {
            Work::Wait(event) => {
                let known = state.events.contains_key(&event.0);
                return known.then_some(()).ok_or(CuResult::INVALID_HANDLE);
            }
            Work::Set(address, value, bytes) => {
                if !state.reaches(self.id, context, *address, *bytes) {
                    return Err(CuResult::INVALID_VALUE);
                }
                // SAFETY: inside an area that is mapped.
                unsafe { (*address as *mut u8).write_bytes(*value, *bytes) };
            }
            Work::Copy(target, source, bytes) => {
                for end in [target, source] {
                    if !state.copies(self.id, context, *end, *bytes) {
                        return Err(CuResult::INVALID_VALUE);
                    }
                }
                // SAFETY: inside areas that are mapped, or the caller's memory by its word.
                unsafe { std::ptr::copy(*source as *const u8, *target as *mut u8, *bytes) };
            }
            Work::Launch {
                kernel,
                grid,
                block,
                shared,
                args,
            } => {
                let run = state.kernels[kernel].run.clone();
                drop(state);
                let launch = Launch {
                    grid: *grid,
                    block: *block,
                    shared: *shared,
                    args,
                    process: self,
                    context: CuContext(context),
                };
                return match run(&launch) {
                    CuResult::SUCCESS => Ok(()),
                    failed => Err(failed),
                };
            }
        }
        Ok(())
    }

    pub(super) fn hangs(&self, state: &State) -> Done {
        if state.hanging.contains(&self.id) {
            return Err(CuResult::NOT_READY);
        }
        Ok(())
    }

    /// Takes references off user objects and destroys those without any.
    pub(super) fn release(&self, mut state: MutexGuard<'_, State>, users: &[usize], count: u32) {
        let mut gone = Vec::new();
        for user in users {
            if let Some(found) = state.users.get_mut(user) {
                found.references -= count;
                if found.references == 0 {
                    gone.extend(state.users.remove(user));
                }
            }
        }
        drop(state);
        for user in gone {
            // SAFETY: the creator's function on the creator's data, once.
            unsafe { (user.destroy)(user.data as *mut c_void) };
        }
    }
}

/// Writes through a pointer that the caller of the simulated function handed over.
pub(super) fn put<T>(place: *mut T, value: T) {
    // SAFETY: valid for writing by the contract of every driver function.
    unsafe { place.write(value) }
}

pub(super) fn put_text(place: *mut c_char, bytes: c_int, text: &str) {
    let text = &text.as_bytes()[..text.len().min(bytes as usize - 1)];
    // SAFETY: `bytes` bytes are valid for writing by the contract of the driver function.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), place.cast(), text.len());
        place.add(text.len()).write(0);
    }
}

/// Has each function of the trait do what the method of its name does.
macro_rules! forward {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {$(
        unsafe fn $name(&self, $($arg: $type),*) -> CuResult {
            code(Process::$name(self, $($arg),*))
        }
    )*};
}

#[allow(non_snake_case)]
impl Api for Process {
    fn source(&self) -> String {
        "the simulated driver".into()
    }

    forward! {
        cuInit(a0: c_uint);
        cuDriverGetVersion(a0: *mut c_int);
        cuGetErrorName(a0: CuResult, a1: *mut *const c_char);
        cuGetErrorString(a0: CuResult, a1: *mut *const c_char);
        cuDeviceGet(a0: *mut CuDevice, a1: c_int);
        cuDeviceGetCount(a0: *mut c_int);
        cuDeviceGetName(a0: *mut c_char, a1: c_int, a2: CuDevice);
        cuDeviceGetUuid(a0: *mut CuUuid, a1: CuDevice);
        cuDeviceGetPCIBusId(a0: *mut c_char, a1: c_int, a2: CuDevice);
        cuDeviceGetAttribute(a0: *mut c_int, a1: c_int, a2: CuDevice);
        cuDeviceTotalMem(a0: *mut usize, a1: CuDevice);
        cuDeviceCanAccessPeer(a0: *mut c_int, a1: CuDevice, a2: CuDevice);
        cuDevicePrimaryCtxRetain(a0: *mut CuContext, a1: CuDevice);
        cuDevicePrimaryCtxRelease(a0: CuDevice);
        cuCtxGetCurrent(a0: *mut CuContext);
        cuCtxPushCurrent(a0: CuContext);
        cuCtxPopCurrent(a0: *mut CuContext);
        cuCtxGetLimit(a0: *mut usize, a1: c_uint);
        cuCtxSetLimit(a0: c_uint, a1: usize);
        cuCtxEnablePeerAccess(a0: CuContext, a1: c_uint);
        cuModuleLoadDataEx(
            a0: *mut CuModule, a1: *const c_void, a2: c_uint, a3: *mut c_int, a4: *mut *mut c_void
        );
        cuModuleUnload(a0: CuModule);
        cuModuleGetFunction(a0: *mut CuFunction, a1: CuModule, a2: *const c_char);
        cuModuleGetFunctionCount(a0: *mut c_uint, a1: CuModule);
        cuModuleEnumerateFunctions(a0: *mut CuFunction, a1: c_uint, a2: CuModule);
        cuFuncLoad(a0: CuFunction);
        cuFuncGetAttribute(a0: *mut c_int, a1: c_int, a2: CuFunction);
        cuFuncSetAttribute(a0: CuFunction, a1: c_int, a2: c_int);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(
            a0: *mut c_int, a1: CuFunction, a2: c_int, a3: usize
        );
        cuLaunchKernel(
            a0: *const CuLaunchConfig, a1: CuFunction, a2: *mut *mut c_void, a3: *mut *mut c_void
        );
        cuMemAlloc(a0: *mut CuDevicePtr, a1: usize);
        cuMemAllocAsync(a0: *mut CuDevicePtr, a1: usize, a2: CuStream);
        cuMemFree(a0: CuDevicePtr);
        cuMemFreeAsync(a0: CuDevicePtr, a1: CuStream);
        cuMemGetInfo(a0: *mut usize, a1: *mut usize);
        cuMemGetAddressRange(a0: *mut CuDevicePtr, a1: *mut usize, a2: CuDevicePtr);
        cuMemsetD8Async(a0: CuDevicePtr, a1: u8, a2: usize, a3: CuStream);
        cuMemcpyAsync(a0: CuDevicePtr, a1: CuDevicePtr, a2: usize, a3: CuStream);
        cuMemHostAlloc(a0: *mut *mut c_void, a1: usize, a2: c_uint);
        cuMemFreeHost(a0: *mut c_void);
        cuMemHostRegister(a0: *mut c_void, a1: usize, a2: c_uint);
        cuMemHostUnregister(a0: *mut c_void);
        cuMemHostGetDevicePointer(a0: *mut CuDevicePtr, a1: *mut c_void, a2: c_uint);
        cuPointerGetAttributes(a0: c_uint, a1: *mut c_uint, a2: *mut *mut c_void, a3: CuDevicePtr);
        cuStreamCreateWithPriority(a0: *mut CuStream, a1: c_uint, a2: c_int);
        cuStreamDestroy(a0: CuStream);
        cuStreamQuery(a0: CuStream);
        cuStreamSynchronize(a0: CuStream);
        cuStreamWaitEvent(a0: CuStream, a1: CuEvent, a2: c_uint);
        cuStreamGetCtx(a0: CuStream, a1: *mut CuContext);
        cuStreamGetBothCtx(a0: CuStream, a1: *mut CuContext, a2: *mut CuGreenContext);
        cuStreamGetId(a0: CuStream, a1: *mut u64);
        cuStreamGetCaptureInfo(
            a0: CuStream, a1: *mut c_uint, a2: *mut u64, a3: *mut CuGraph,
            a4: *mut *const CuGraphNode, a5: *mut usize
        );
        cuStreamBeginCapture(a0: CuStream, a1: c_uint);
        cuStreamEndCapture(a0: CuStream, a1: *mut CuGraph);
        cuThreadExchangeStreamCaptureMode(a0: *mut c_uint);
        cuEventCreate(a0: *mut CuEvent, a1: c_uint);
        cuEventDestroy(a0: CuEvent);
        cuEventRecord(a0: CuEvent, a1: CuStream);
        cuEventQuery(a0: CuEvent);
        cuEventElapsedTime(a0: *mut c_float, a1: CuEvent, a2: CuEvent);
        cuIpcGetMemHandle(a0: *mut CuIpcMemHandle, a1: CuDevicePtr);
        cuIpcOpenMemHandle(a0: *mut CuDevicePtr, a1: CuIpcMemHandle, a2: c_uint);
        cuIpcCloseMemHandle(a0: CuDevicePtr);
        cuGraphInstantiate(a0: *mut CuGraphExec, a1: CuGraph, a2: u64);
        cuGraphAddEventRecordNode(
            a0: *mut CuGraphNode, a1: CuGraph, a2: *const CuGraphNode, a3: usize, a4: CuEvent
        );
        cuGraphAddDependencies(
            a0: CuGraph, a1: *const CuGraphNode, a2: *const CuGraphNode, a3: usize
        );
        cuGraphRemoveDependencies(
            a0: CuGraph, a1: *const CuGraphNode, a2: *const CuGraphNode, a3: usize
        );
        cuGraphLaunch(a0: CuGraphExec, a1: CuStream);
        cuGraphExecDestroy(a0: CuGraphExec);
        cuGraphDestroy(a0: CuGraph);
        cuUserObjectCreate(
            a0: *mut CuUserObject, a1: *mut c_void, a2: unsafe extern "C" fn(*mut c_void),
            a3: c_uint, a4: c_uint
        );
        cuUserObjectRelease(a0: CuUserObject, a1: c_uint);
        cuGraphRetainUserObject(a0: CuGraph, a1: CuUserObject, a2: c_uint, a3: c_uint);
    }
}
