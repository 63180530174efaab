//! Devices, contexts, modules and launches.

use super::super::types::*;
use super::calls::{Done, put, put_text};
use super::state::*;
use super::{EARLY_STARTS, Process};
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
        put(version, self.machine.lock().driver_version);
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
        put(name, text.as_ptr());
        Ok(())
    }

    pub(super) fn cuGetErrorString(&self, _result: CuResult, text: *mut *const c_char) -> Done {
        put(text, c"simulated".as_ptr());
        Ok(())
    }

    pub(super) fn cuDeviceGet(&self, device: *mut CuDevice, ordinal: c_int) -> Done {
        self.enter("cuDeviceGet").and_then(|state| {
            if usize::try_from(ordinal).is_ok_and(|ordinal| ordinal < state.devices) {
                put(device, ordinal);
                Ok(())
            } else {
                Err(CuResult::INVALID_DEVICE)
            }
        })
    }

    pub(super) fn cuDeviceGetCount(&self, count: *mut c_int) -> Done {
        self.enter("cuDeviceGetCount").map(|state| {
            put(count, state.devices as c_int);
        })
    }

    pub(super) fn cuDeviceGetName(&self, name: *mut c_char, bytes: c_int, _: CuDevice) -> Done {
        put_text(name, bytes, "Simulated GPU");
        Ok(())
    }

    pub(super) fn cuDeviceGetUuid(&self, uuid: *mut CuUuid, device: CuDevice) -> Done {
        put(uuid, CuUuid([device as u8 + 1; 16]));
        Ok(())
    }

    pub(super) fn cuDeviceGetPCIBusId(&self, n: *mut c_char, b: c_int, device: CuDevice) -> Done {
        put_text(n, b, &format!("0000:{device:02x}:00.0"));
        Ok(())
    }

    pub(super) fn cuDeviceGetAttribute(
        &self,
        v: *mut c_int,
        attribute: c_int,
        _: CuDevice,
    ) -> Done {
        put(
            v,
            match attribute {
                device_attribute::MULTIPROCESSOR_COUNT => 132,
                device_attribute::COMPUTE_CAPABILITY_MAJOR => 9,
                device_attribute::COMPUTE_CAPABILITY_MINOR => 0,
                device_attribute::CLOCK_RATE_KHZ => 1_980_000,
                device_attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => 232_448,
                _ => 1,
            },
        );
        Ok(())
    }

    pub(super) fn cuDeviceTotalMem(&self, bytes: *mut usize, _: CuDevice) -> Done {
        put(bytes, DEVICE_BYTES);
        Ok(())
    }

    pub(super) fn cuDeviceCanAccessPeer(&self, can: *mut c_int, a: CuDevice, b: CuDevice) -> Done {
        self.enter("cuDeviceCanAccessPeer").map(|state| {
            put(can, c_int::from(!state.refused.contains(&(a, b))));
        })
    }

    pub(super) fn cuDevicePrimaryCtxRetain(&self, c: *mut CuContext, device: CuDevice) -> Done {
        self.enter("cuDevicePrimaryCtxRetain").map(|mut state| {
            let found = state
                .contexts
                .iter()
                .find(|(_, context)| context.process == self.id && context.device == device)
                .map(|(handle, _)| *handle);
            let handle = found.unwrap_or_else(|| {
                let handle = state.number();
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
            put(c, CuContext(handle));
        })
    }

    pub(super) fn cuDevicePrimaryCtxRelease(&self, device: CuDevice) -> Done {
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

    pub(super) fn cuCtxGetCurrent(&self, context: *mut CuContext) -> Done {
        put(context, self.current().unwrap_or_default());
        Ok(())
    }

    pub(super) fn cuCtxPushCurrent(&self, context: CuContext) -> Done {
        self.enter("cuCtxPushCurrent")
            .and_then(|state| match state.contexts.get(&context.0) {
                Some(found) if found.process == self.id && found.retained > 0 => {
                    self.thread(|thread| thread.contexts.push(context));
                    Ok(())
                }
                _ => Err(CuResult::INVALID_CONTEXT),
            })
    }

    pub(super) fn cuCtxPopCurrent(&self, context: *mut CuContext) -> Done {
        let popped = self.thread(|thread| thread.contexts.pop());
        put(context, popped.ok_or(CuResult::INVALID_CONTEXT)?);
        Ok(())
    }

    pub(super) fn cuCtxGetLimit(&self, value: *mut usize, _limit: c_uint) -> Done {
        self.enter_context("cuCtxGetLimit").map(|(state, context)| {
            put(value, state.contexts[&context].stack);
        })
    }

    pub(super) fn cuCtxSetLimit(&self, _limit: c_uint, value: usize) -> Done {
        self.enter_context("cuCtxSetLimit").map(|(mut state, at)| {
            if let Some(context) = state.contexts.get_mut(&at) {
                context.stack = value;
            }
        })
    }

    pub(super) fn cuCtxEnablePeerAccess(&self, peer: CuContext, _flags: c_uint) -> Done {
        let (mut state, context) = self.enter_context("cuCtxEnablePeerAccess")?;
        let ours = state.contexts[&context].device;
        let theirs = match state.contexts.get(&peer.0) {
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
        match context.is_some_and(|context| context.peers.insert(peer.0)) {
            true => Ok(()),
            false => Err(CuResult::PEER_ACCESS_ALREADY_ENABLED),
        }
    }

    pub(super) fn cuModuleLoadDataEx(
        &self,
        module: *mut CuModule,
        image: *const c_void,
        _options: c_uint,
        _names: *mut c_int,
        _values: *mut *mut c_void,
    ) -> Done {
        let (mut state, context) = self.enter_ordered("cuModuleLoadDataEx")?;
        if image.is_null() {
            return Err(CuResult::INVALID_VALUE);
        }
        let handle = state.number();
        state.modules.insert(handle, context);
        put(module, CuModule(handle));
        Ok(())
    }

    pub(super) fn cuModuleUnload(&self, module: CuModule) -> Done {
        let (mut state, context) = self.enter_ordered("cuModuleUnload")?;
        if state.modules.get(&module.0) != Some(&context) {
            return Err(CuResult::INVALID_HANDLE);
        }
        state.modules.remove(&module.0);
        state.functions.retain(|_, (owner, _)| *owner != module.0);
        Ok(())
    }

    pub(super) fn cuModuleGetFunction(
        &self,
        function: *mut CuFunction,
        module: CuModule,
        name: *const c_char,
    ) -> Done {
        // SAFETY: a C string by contract.
        let name = unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned();
        self.enter("cuModuleGetFunction").and_then(|mut state| {
            if !state.modules.contains_key(&module.0) {
                return Err(CuResult::INVALID_HANDLE);
            }
            if !state.kernels.contains_key(&name) {
                return Err(CuResult::NOT_FOUND);
            }
            let handle = state.number();
            state.functions.insert(handle, (module.0, name));
            put(function, CuFunction(handle));
            Ok(())
        })
    }

    pub(super) fn cuModuleGetFunctionCount(&self, count: *mut c_uint, _: CuModule) -> Done {
        self.enter("cuModuleGetFunctionCount").map(|state| {
            put(count, state.kernels.len() as c_uint);
        })
    }

    pub(super) fn cuModuleEnumerateFunctions(
        &self,
        functions: *mut CuFunction,
        count: c_uint,
        module: CuModule,
    ) -> Done {
        self.enter("cuModuleEnumerateFunctions").map(|mut state| {
            let names: Vec<String> = state.kernels.keys().cloned().collect();
            for (at, name) in names.into_iter().take(count as usize).enumerate() {
                let handle = state.number();
                state.functions.insert(handle, (module.0, name));
                // SAFETY: `count` places by contract.
                unsafe { functions.add(at).write(CuFunction(handle)) };
            }
        })
    }

    pub(super) fn cuFuncLoad(&self, function: CuFunction) -> Done {
        self.enter("cuFuncLoad").and_then(|state| {
            let known = state.functions.contains_key(&function.0);
            known.then_some(()).ok_or(CuResult::INVALID_HANDLE)
        })
    }

    pub(super) fn cuFuncGetAttribute(&self, v: *mut c_int, a: c_int, function: CuFunction) -> Done {
        self.enter("cuFuncGetAttribute").and_then(|state| {
            if !state.functions.contains_key(&function.0) {
                return Err(CuResult::INVALID_HANDLE);
            }
            put(
                v,
                match a {
                    function_attribute::MAX_THREADS_PER_BLOCK => 1024,
                    function_attribute::NUM_REGS => 32,
                    function_attribute::PTX_VERSION => state.compiled_for,
                    function_attribute::BINARY_VERSION => 90,
                    _ => 0,
                },
            );
            Ok(())
        })
    }

    pub(super) fn cuFuncSetAttribute(&self, _: CuFunction, _: c_int, _: c_int) -> Done {
        self.enter_context("cuFuncSetAttribute").map(drop)
    }

    pub(super) fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        &self,
        blocks: *mut c_int,
        _function: CuFunction,
        threads: c_int,
        _shared: usize,
    ) -> Done {
        put(blocks, 2048 / threads.max(1));
        Ok(())
    }

    pub(super) fn cuLaunchKernel(
        &self,
        config: *const CuLaunchConfig,
        function: CuFunction,
        parameters: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) -> Done {
        // SAFETY: a live configuration, with as many attributes as it says.
        let (config, attributes) = unsafe {
            let config = &*config;
            let count = config.attribute_count as usize;
            let all = (count > 0).then(|| std::slice::from_raw_parts(config.attributes, count));
            (config, all.unwrap_or_default())
        };
        let (grid, block) = (config.grid, config.block);
        let is_early = !attributes.is_empty();
        let prepared = (|| {
            let state = self.machine.lock();
            let current = self.current().ok_or(CuResult::INVALID_CONTEXT)?.0;
            let (module, kernel) = state
                .functions
                .get(&function.0)
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
            // SAFETY: one parameter of the size that the kernel was registered with.
            let args = unsafe { std::slice::from_raw_parts((*parameters).cast::<u8>(), bytes) };
            Ok(Work::Launch {
                kernel,
                grid,
                block,
                shared: config.shared,
                args: args.to_vec(),
            })
        })();
        if is_early {
            let mut state = self.machine.lock();
            *state.calls.entry((self.id, EARLY_STARTS)).or_default() += 1;
        }
        prepared.and_then(|work| self.queue("cuLaunchKernel", config.stream, work))
    }
}
