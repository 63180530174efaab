//! Simulated devices, contexts, modules and launches.

use super::super::types::*;
use super::calls::{Done, write_out, write_text};
use super::state::*;
use super::{PROGRAMMATIC_LAUNCHES, Process, opaque};
use std::collections::HashSet;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

#[allow(non_snake_case, clippy::too_many_arguments)]
impl Process {
    pub(super) fn cuInit(&self, _flags: c_uint) -> Done {
        self.enter("cuInit").and_then(|state| match state.devices {
            0 => Err(CuResult::NO_DEVICE),
            _ => Ok(()),
        })
    }

    pub(super) fn cuDriverGetVersion(&self, version: *mut c_int) -> Done {
        write_out(version, self.machine.lock().driver_version);
        Ok(())
    }

    pub(super) fn cuGetErrorName(&self, result: CuResult, name: *mut *const c_char) -> Done {
        let text = match result {
            CuResult::INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
            CuResult::OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            CuResult::NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
            CuResult::INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
            CuResult::INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
            _ => c"CUDA_ERROR_SIMULATED",
        };
        write_out(name, text.as_ptr());
        Ok(())
    }

    pub(super) fn cuGetErrorString(&self, _result: CuResult, text: *mut *const c_char) -> Done {
        write_out(text, c"simulated".as_ptr());
        Ok(())
    }

    pub(super) fn cuDeviceGet(&self, device: *mut CUdevice, ordinal: c_int) -> Done {
        self.enter("cuDeviceGet").and_then(|state| {
            if usize::try_from(ordinal).is_ok_and(|ordinal| ordinal < state.devices) {
                write_out(device, ordinal);
                Ok(())
            } else {
                Err(CuResult::INVALID_DEVICE)
            }
        })
    }

    pub(super) fn cuDeviceGetCount(&self, count: *mut c_int) -> Done {
        self.enter("cuDeviceGetCount").map(|state| {
            write_out(count, state.devices as c_int);
        })
    }

    pub(super) fn cuDeviceGetName(&self, name: *mut c_char, bytes: c_int, _: CUdevice) -> Done {
        write_text(name, bytes, "Simulated GPU");
        Ok(())
    }

    pub(super) fn cuDeviceGetUuid(&self, uuid: *mut CUuuid, device: CUdevice) -> Done {
        write_out(
            uuid,
            CUuuid {
                bytes: [device as c_char + 1; 16],
            },
        );
        Ok(())
    }

    pub(super) fn cuDeviceGetPCIBusId(&self, n: *mut c_char, b: c_int, device: CUdevice) -> Done {
        write_text(n, b, &format!("0000:{device:02x}:00.0"));
        Ok(())
    }

    pub(super) fn cuDeviceGetAttribute(
        &self,
        value: *mut c_int,
        attribute: CUdevice_attribute,
        _: CUdevice,
    ) -> Done {
        write_out(
            value,
            match attribute {
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 132,
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => 0,
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE => 1_980_000,
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => {
                    232_448
                }
                _ => 1,
            },
        );
        Ok(())
    }

    pub(super) fn cuDeviceTotalMem(&self, bytes: *mut usize, _: CUdevice) -> Done {
        write_out(bytes, DEVICE_BYTES);
        Ok(())
    }

    pub(super) fn cuDeviceCanAccessPeer(&self, can: *mut c_int, a: CUdevice, b: CUdevice) -> Done {
        self.enter("cuDeviceCanAccessPeer").map(|state| {
            write_out(can, c_int::from(!state.refused.contains(&(a, b))));
        })
    }

    pub(super) fn cuDeviceGetP2PAttribute(
        &self,
        value: *mut c_int,
        _attribute: CUdevice_P2PAttribute,
        _: CUdevice,
        _: CUdevice,
    ) -> Done {
        write_out(value, 1);
        Ok(())
    }

    pub(super) fn cuDevicePrimaryCtxRetain(&self, c: *mut CUcontext, device: CUdevice) -> Done {
        self.enter("cuDevicePrimaryCtxRetain").map(|mut state| {
            let found = state
                .contexts
                .iter()
                .find(|(_, context)| context.process == self.id && context.device == device)
                .map(|(handle, _)| *handle);
            let handle = found.unwrap_or_else(|| {
                let handle = state.next_id();
                let context = Context {
                    process: self.id,
                    device,
                    retained: 0,
                    peers: HashSet::new(),
                    stack: 1024,
                };
                state.contexts.insert(handle, context);
                handle
            });
            if let Some(context) = state.contexts.get_mut(&handle) {
                context.retained += 1;
            }
            write_out(c, opaque(handle));
        })
    }

    pub(super) fn cuDevicePrimaryCtxRelease(&self, device: CUdevice) -> Done {
        self.enter("cuDevicePrimaryCtxRelease").and_then(|mut s| {
            let mut contexts = s.contexts.values_mut();
            let context = contexts.find(|c| c.process == self.id && c.device == device);
            match context {
                Some(context) if context.retained > 0 => {
                    context.retained -= 1;
                    Ok(())
                }
                _ => Err(CuResult::INVALID_CONTEXT),
            }
        })
    }

    pub(super) fn cuCtxGetCurrent(&self, context: *mut CUcontext) -> Done {
        write_out(context, self.current().unwrap_or(std::ptr::null_mut()));
        Ok(())
    }

    pub(super) fn cuCtxPushCurrent(&self, context: CUcontext) -> Done {
        self.enter("cuCtxPushCurrent")
            .and_then(|state| match state.contexts.get(&context.addr()) {
                Some(found) if found.process == self.id && found.retained > 0 => {
                    self.thread(|thread| thread.contexts.push(context));
                    Ok(())
                }
                _ => Err(CuResult::INVALID_CONTEXT),
            })
    }

    pub(super) fn cuCtxPopCurrent(&self, context: *mut CUcontext) -> Done {
        let popped = self.thread(|thread| thread.contexts.pop());
        write_out(context, popped.ok_or(CuResult::INVALID_CONTEXT)?);
        Ok(())
    }

    pub(super) fn cuCtxGetDevice(&self, device: *mut CUdevice) -> Done {
        self.enter_context("cuCtxGetDevice")
            .map(|(state, context)| {
                write_out(device, state.contexts[&context].device);
            })
    }

    pub(super) fn cuCtxGetLimit(&self, value: *mut usize, _limit: CUlimit) -> Done {
        self.enter_context("cuCtxGetLimit").map(|(state, context)| {
            write_out(value, state.contexts[&context].stack);
        })
    }

    pub(super) fn cuCtxSetLimit(&self, _limit: CUlimit, value: usize) -> Done {
        self.enter_context("cuCtxSetLimit").map(|(mut state, at)| {
            if let Some(context) = state.contexts.get_mut(&at) {
                context.stack = value;
            }
        })
    }

    pub(super) fn cuCtxEnablePeerAccess(&self, peer: CUcontext, _flags: c_uint) -> Done {
        let (mut state, context) = self.enter_context("cuCtxEnablePeerAccess")?;
        let ours = state.contexts[&context].device;
        let theirs = match state.contexts.get(&peer.addr()) {
            Some(found) if found.process == self.id => found.device,
            _ => return Err(CuResult::INVALID_CONTEXT),
        };
        if ours == theirs {
            return Err(CuResult::INVALID_DEVICE);
        }
        if state.refused.contains(&(ours, theirs)) {
            return Err(CuResult::PEER_ACCESS_UNSUPPORTED);
        }
        let context = state.contexts.get_mut(&context);
        match context.is_some_and(|context| context.peers.insert(peer.addr())) {
            true => Ok(()),
            false => Err(CuResult::PEER_ACCESS_ALREADY_ENABLED),
        }
    }

    pub(super) fn cuModuleLoadDataEx(
        &self,
        module: *mut CUmodule,
        image: *const c_void,
        _options: c_uint,
        _names: *mut CUjit_option,
        _values: *mut *mut c_void,
    ) -> Done {
        let (mut state, context) = self.enter_uncaptured("cuModuleLoadDataEx")?;
        if image.is_null() {
            return Err(CuResult::INVALID_VALUE);
        }
        let handle = state.next_id();
        state.modules.insert(handle, context);
        write_out(module, opaque(handle));
        Ok(())
    }

    pub(super) fn cuModuleUnload(&self, module: CUmodule) -> Done {
        let (mut state, context) = self.enter_uncaptured("cuModuleUnload")?;
        if state.modules.get(&module.addr()) != Some(&context) {
            return Err(CuResult::INVALID_HANDLE);
        }
        state.modules.remove(&module.addr());
        state
            .functions
            .retain(|_, (owner, _)| *owner != module.addr());
        Ok(())
    }

    pub(super) fn cuModuleGetFunction(
        &self,
        function: *mut CUfunction,
        module: CUmodule,
        name: *const c_char,
    ) -> Done {
        // SAFETY: the contract of `cuModuleGetFunction` makes the name a C string.
        let name = unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned();
        self.enter("cuModuleGetFunction").and_then(|mut state| {
            if !state.modules.contains_key(&module.addr()) {
                return Err(CuResult::INVALID_HANDLE);
            }
            if !state.kernels.contains_key(&name) {
                return Err(CuResult::NOT_FOUND);
            }
            let handle = state.next_id();
            state.functions.insert(handle, (module.addr(), name));
            write_out(function, opaque(handle));
            Ok(())
        })
    }

    pub(super) fn cuModuleGetFunctionCount(&self, count: *mut c_uint, _: CUmodule) -> Done {
        self.enter("cuModuleGetFunctionCount").map(|state| {
            write_out(count, state.kernels.len() as c_uint);
        })
    }

    pub(super) fn cuModuleEnumerateFunctions(
        &self,
        functions: *mut CUfunction,
        count: c_uint,
        module: CUmodule,
    ) -> Done {
        self.enter("cuModuleEnumerateFunctions").map(|mut state| {
            let names: Vec<String> = state.kernels.keys().cloned().collect();
            for (at, name) in names.into_iter().take(count as usize).enumerate() {
                let handle = state.next_id();
                state.functions.insert(handle, (module.addr(), name));
                // SAFETY: the contract of `cuModuleEnumerateFunctions` gives room for `count` handles.
                unsafe { functions.add(at).write(opaque(handle)) };
            }
        })
    }

    pub(super) fn cuFuncLoad(&self, function: CUfunction) -> Done {
        self.enter("cuFuncLoad").and_then(|state| {
            let known = state.functions.contains_key(&function.addr());
            known.then_some(()).ok_or(CuResult::INVALID_HANDLE)
        })
    }

    pub(super) fn cuFuncGetAttribute(
        &self,
        value: *mut c_int,
        attribute: CUfunction_attribute,
        function: CUfunction,
    ) -> Done {
        self.enter("cuFuncGetAttribute").and_then(|state| {
            if !state.functions.contains_key(&function.addr()) {
                return Err(CuResult::INVALID_HANDLE);
            }
            write_out(
                value,
                match attribute {
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS => 32,
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION => state.compiled_for,
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION => 90,
                    _ => 0,
                },
            );
            Ok(())
        })
    }

    pub(super) fn cuFuncSetAttribute(
        &self,
        _: CUfunction,
        _: CUfunction_attribute,
        _: c_int,
    ) -> Done {
        self.enter_context("cuFuncSetAttribute").map(drop)
    }

    pub(super) fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        &self,
        blocks: *mut c_int,
        _function: CUfunction,
        threads: c_int,
        _shared: usize,
    ) -> Done {
        write_out(blocks, 2048 / threads.max(1));
        Ok(())
    }

    pub(super) fn cuLaunchKernel(
        &self,
        config: *const CUlaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) -> Done {
        // SAFETY: the contract of `cuLaunchKernelEx` makes the configuration and its `numAttrs` attributes
        // readable.
        let (config, attributes) = unsafe {
            let config = &*config;
            let count = config.numAttrs as usize;
            let all = (count > 0).then(|| std::slice::from_raw_parts(config.attrs, count));
            (config, all.unwrap_or_default())
        };
        let grid = [config.gridDimX, config.gridDimY, config.gridDimZ];
        let block = [config.blockDimX, config.blockDimY, config.blockDimZ];
        let programmatic =
            CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        let is_programmatic = attributes
            .iter()
            .any(|attribute| attribute.id == programmatic);
        let prepared = (|| {
            let state = self.machine.lock();
            let current = self.current().ok_or(CuResult::INVALID_CONTEXT)?.addr();
            let (module, kernel) = state
                .functions
                .get(&function.addr())
                .ok_or(CuResult::INVALID_HANDLE)?
                .clone();
            if state.modules.get(&module) != Some(&current) {
                return Err(CuResult::INVALID_HANDLE);
            }
            let threads = block.iter().map(|&n| u64::from(n)).product::<u64>();
            if grid.contains(&0) || threads == 0 || threads > 1024 {
                return Err(CuResult::INVALID_VALUE);
            }
            let bytes = state.kernels[&kernel].bytes;
            // SAFETY: the caller passes one parameter, of the size with which the test registered the kernel.
            let args = unsafe { std::slice::from_raw_parts((*parameters).cast::<u8>(), bytes) };
            Ok(Work::Launch {
                kernel,
                grid,
                block,
                shared: config.sharedMemBytes,
                args: args.to_vec(),
            })
        })();
        if is_programmatic {
            let mut state = self.machine.lock();
            *state
                .calls
                .entry((self.id, PROGRAMMATIC_LAUNCHES))
                .or_default() += 1;
        }
        prepared.and_then(|work| self.queue("cuLaunchKernel", config.hStream, work))
    }
}
