//! Code that the simulated functions share, and the implementation of the trait [`Api`], whose methods call
//! the functions in the sibling files.

use super::super::api::{Api, driver_functions};
use super::super::types::*;
use super::state::{Capture, State, Work};
use super::{Launch, Process, opaque};
use std::ffi::{c_char, c_float, c_int, c_uint, c_void};
use std::sync::MutexGuard;

/// Outcome of a simulated function, as a `Result` so that `?` works with result codes.
pub(super) type Done = Result<(), CuResult>;

fn code(done: Done) -> CuResult {
    match done {
        Ok(()) => CuResult::SUCCESS,
        Err(code) => code,
    }
}

impl Process {
    /// Counts the call and locks the machine. Returns an error if a test has requested a failure of
    /// this call.
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

    /// Does what `enter` does for a function that needs a current context. Also returns that
    /// context.
    pub(super) fn enter_context(
        &self,
        function: &'static str,
    ) -> Result<(MutexGuard<'_, State>, usize), CuResult> {
        let state = self.enter(function)?;
        match self.current() {
            Some(context) if state.contexts.contains_key(&context.addr()) => {
                Ok((state, context.addr()))
            }
            _ => Err(CuResult::INVALID_CONTEXT),
        }
    }

    /// Does what `enter_context` does for a function that a driver forbids during a stream capture in global
    /// mode. As with a driver, the attempt invalidates such captures.
    pub(super) fn enter_uncaptured(
        &self,
        function: &'static str,
    ) -> Result<(MutexGuard<'_, State>, usize), CuResult> {
        let (mut state, context) = self.enter_context(function)?;
        let mode = self.thread(|thread| thread.mode);
        if mode != CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED
            && state.captured_globally(self.id)
        {
            for stream in state.streams.values_mut() {
                if let Some(capture) = stream
                    .capture
                    .as_mut()
                    .filter(|capture| capture.is_global())
                {
                    capture.is_valid = false;
                }
            }
            return Err(CuResult::STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok((state, context))
    }

    /// Returns the context of a stream, or an error if the stream belongs to another context than the current
    /// one.
    pub(super) fn stream_context(
        &self,
        state: &State,
        current: usize,
        stream: CUstream,
    ) -> Result<usize, CuResult> {
        match state.streams.get(&stream.addr()) {
            Some(found) if found.context == current => Ok(current),
            Some(_) => Err(CuResult::INVALID_HANDLE),
            None if stream.addr() == 0 || stream.addr() == 2 => Ok(current),
            None => Err(CuResult::INVALID_HANDLE),
        }
    }

    /// Records work into the stream's capture. Outside captures, executes the work immediately.
    pub(super) fn queue(&self, function: &'static str, stream: CUstream, work: Work) -> Done {
        let (mut state, current) = self.enter_context(function)?;
        let context = self.stream_context(&state, current, stream)?;
        let capture = state.streams.get(&stream.addr()).and_then(|s| s.capture);
        match capture {
            Some(Capture {
                is_valid: false, ..
            }) => Err(CuResult::STREAM_CAPTURE_INVALIDATED),
            Some(Capture { graph, .. }) => {
                if let Some(graph) = state.graphs.get_mut(&graph) {
                    graph.context = context;
                    graph.push(work);
                }
                Ok(())
            }
            None => {
                drop(state);
                self.execute(context, &work)
            }
        }
    }

    /// Executes queued work, if the GPU of `context` can reach all of its memory.
    pub(super) fn execute(&self, context: usize, work: &Work) -> Done {
        let state = self.machine.lock();
        match work {
            Work::Wait(event) => {
                let known = state.events.contains_key(event);
                return known.then_some(()).ok_or(CuResult::INVALID_HANDLE);
            }
            Work::Set(address, value, bytes) => {
                if !state.can_reach(self.id, context, *address, *bytes) {
                    return Err(CuResult::INVALID_VALUE);
                }
                // SAFETY: `can_reach` found the bytes inside a mapped area.
                unsafe { (*address as *mut u8).write_bytes(*value, *bytes) };
            }
            Work::Copy(target, source, bytes) => {
                for end in [target, source] {
                    if !state.can_copy(self.id, context, *end, *bytes) {
                        return Err(CuResult::INVALID_VALUE);
                    }
                }
                // SAFETY: `can_copy` found mapped areas; other host memory is valid by the contract of
                // `cuMemcpyAsync`.
                unsafe { std::ptr::copy(*source as *const u8, *target as *mut u8, *bytes) };
            }
            Work::Call(function, data) => {
                drop(state);
                // SAFETY: the contract of `cuLaunchHostFunc` makes the function take this data now.
                unsafe { function(*data as *mut c_void) };
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
                    context: opaque(context),
                };
                return match run(&launch) {
                    CuResult::SUCCESS => Ok(()),
                    failed => Err(failed),
                };
            }
        }
        Ok(())
    }

    /// Returns "not ready" while a test keeps this process's work from ending.
    pub(super) fn check_finished(&self, state: &State) -> Done {
        if state.hanging.contains(&self.id) {
            return Err(CuResult::NOT_READY);
        }
        Ok(())
    }

    /// Removes `count` references to user objects, and destroys each object that has no reference
    /// left.
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
            // SAFETY: the creator passed this function for this data. The table no longer has the object, so
            // `destroy` runs once.
            unsafe { (user.destroy)(user.data as *mut c_void) };
        }
    }
}

/// Writes a result to the caller's variable.
pub(super) fn write_out<T>(place: *mut T, value: T) {
    // SAFETY: the contract of every driver function makes its output pointers writable.
    unsafe { place.write(value) }
}

/// Writes a C string of at most `bytes` bytes to the caller's buffer.
pub(super) fn write_text(place: *mut c_char, bytes: c_int, text: &str) {
    let text = &text.as_bytes()[..text.len().min(bytes as usize - 1)];
    // SAFETY: the contract of the driver function makes `bytes` bytes writable.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), place.cast(), text.len());
        place.add(text.len()).write(0);
    }
}

/// Implements each method of the trait by a call of the method of the same name in the sibling files.
macro_rules! forward {
    (
        required { $($name:ident = $symbol:ident ($($arg:ident: $type:ty),* $(,)?)
            $(as ($($cudarc:ty),*))?;)* }
        optional { $($late:ident = $late_symbol:ident since $since:literal
            ($($late_arg:ident: $late_type:ty),* $(,)?);)* }
    ) => {
        #[allow(non_snake_case)]
        impl Api for Process {
            fn source(&self) -> String {
                "the simulated driver".into()
            }
            $(
                unsafe fn $name(&self, $($arg: $type),*) -> CuResult {
                    code(Process::$name(self, $($arg),*))
                }
            )*
            $(
                unsafe fn $late(&self, $($late_arg: $late_type),*) -> CuResult {
                    code(Process::$late(self, $($late_arg),*))
                }
            )*
        }
    };
}

driver_functions!(forward);
