//! The functions of the driver that are used: one list, from which come the trait that `gpu`
//! calls and the table that [`Loaded`] fills from the driver's library.

use super::types::*;
use crate::sys::loader::function_table;
use std::ffi::{c_char, c_float, c_int, c_uint, c_void};

/// Makes from the list: the trait [`Api`], whose methods a simulation may leave out; the table of
/// the loaded functions; and the names, for messages.
macro_rules! driver_functions {
    (
        required { $($name:ident = $symbol:literal ($($arg:ident: $type:ty),* $(,)?);)* }
        optional { $($late:ident = $late_symbol:literal since $since:literal
            ($($late_arg:ident: $late_type:ty),* $(,)?);)* }
    ) => {
        /// The driver API. Methods have the C functions' names, arguments and contracts.
        ///
        /// # Safety of the methods
        /// That of the C functions: pointers are valid for what the function reads or writes,
        /// handles came from it and are not destroyed.
        #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
        pub trait Api: Send + Sync {
            /// For messages: the driver's library, or what stands in for it.
            fn source(&self) -> String;
            $(
                #[doc = concat!("`", $symbol, "`")]
                unsafe fn $name(&self, $($arg: $type),*) -> CuResult {
                    $(let _ = $arg;)*
                    CuResult::FUNCTION_MISSING
                }
            )*
            $(
                #[doc = concat!("`", $late_symbol, "`, since CUDA ", $since)]
                unsafe fn $late(&self, $($late_arg: $late_type),*) -> CuResult {
                    $(let _ = $late_arg;)*
                    CuResult::FUNCTION_MISSING
                }
            )*
        }

        function_table! {
            /// Functions of the driver's library.
            pub(super) struct Functions;
            required { $($name = $symbol: fn($($type),*) -> CuResult;)* }
            optional { $($late = $late_symbol: fn($($late_type),*) -> CuResult;)* }
        }

        #[allow(non_snake_case)]
        impl Api for super::Loaded {
            fn source(&self) -> String {
                self.library().name().to_string()
            }
            $(
                unsafe fn $name(&self, $($arg: $type),*) -> CuResult {
                    // SAFETY: the caller keeps the C function's contract.
                    unsafe { (self.functions().$name)($($arg),*) }
                }
            )*
            $(
                unsafe fn $late(&self, $($late_arg: $late_type),*) -> CuResult {
                    match self.functions().$late {
                        // SAFETY: as above.
                        Some(function) => unsafe { function($($late_arg),*) },
                        None => CuResult::FUNCTION_MISSING,
                    }
                }
            )*
        }

        /// The CUDA version since which drivers have the function that a method stands for.
        pub fn available_since(method: &str) -> &'static str {
            match method {
                $(stringify!($late) => $since,)*
                _ => super::OLDEST_DRIVER,
            }
        }
    };
}

driver_functions! {
    required {
        cuInit = "cuInit" (flags: c_uint);
        cuDriverGetVersion = "cuDriverGetVersion" (version: *mut c_int);
        cuGetErrorName = "cuGetErrorName" (result: CuResult, name: *mut *const c_char);
        cuGetErrorString = "cuGetErrorString" (result: CuResult, text: *mut *const c_char);

        cuDeviceGet = "cuDeviceGet" (device: *mut CuDevice, ordinal: c_int);
        cuDeviceGetCount = "cuDeviceGetCount" (count: *mut c_int);
        cuDeviceGetName = "cuDeviceGetName" (name: *mut c_char, bytes: c_int, device: CuDevice);
        cuDeviceGetUuid = "cuDeviceGetUuid_v2" (uuid: *mut CuUuid, device: CuDevice);
        cuDeviceGetPCIBusId = "cuDeviceGetPCIBusId"
            (name: *mut c_char, bytes: c_int, device: CuDevice);
        cuDeviceGetAttribute = "cuDeviceGetAttribute"
            (value: *mut c_int, attribute: c_int, device: CuDevice);
        cuDeviceTotalMem = "cuDeviceTotalMem_v2" (bytes: *mut usize, device: CuDevice);
        cuDeviceCanAccessPeer = "cuDeviceCanAccessPeer"
            (can: *mut c_int, device: CuDevice, peer: CuDevice);
        cuDeviceGetP2PAttribute = "cuDeviceGetP2PAttribute"
            (value: *mut c_int, attribute: c_int, device: CuDevice, peer: CuDevice);

        cuDevicePrimaryCtxRetain = "cuDevicePrimaryCtxRetain"
            (context: *mut CuContext, device: CuDevice);
        cuDevicePrimaryCtxRelease = "cuDevicePrimaryCtxRelease_v2" (device: CuDevice);
        cuCtxGetCurrent = "cuCtxGetCurrent" (context: *mut CuContext);
        cuCtxPushCurrent = "cuCtxPushCurrent_v2" (context: CuContext);
        cuCtxPopCurrent = "cuCtxPopCurrent_v2" (context: *mut CuContext);
        cuCtxGetDevice = "cuCtxGetDevice" (device: *mut CuDevice);
        cuCtxGetLimit = "cuCtxGetLimit" (value: *mut usize, limit: c_uint);
        cuCtxSetLimit = "cuCtxSetLimit" (limit: c_uint, value: usize);
        cuCtxGetStreamPriorityRange = "cuCtxGetStreamPriorityRange"
            (least: *mut c_int, greatest: *mut c_int);
        cuCtxEnablePeerAccess = "cuCtxEnablePeerAccess" (peer: CuContext, flags: c_uint);

        cuModuleLoadDataEx = "cuModuleLoadDataEx" (
            module: *mut CuModule, image: *const c_void, options: c_uint,
            names: *mut c_int, values: *mut *mut c_void,
        );
        cuModuleUnload = "cuModuleUnload" (module: CuModule);
        cuModuleGetFunction = "cuModuleGetFunction"
            (function: *mut CuFunction, module: CuModule, name: *const c_char);
        cuFuncGetAttribute = "cuFuncGetAttribute"
            (value: *mut c_int, attribute: c_int, function: CuFunction);
        cuFuncSetAttribute = "cuFuncSetAttribute"
            (function: CuFunction, attribute: c_int, value: c_int);
        cuOccupancyMaxActiveBlocksPerMultiprocessor =
            "cuOccupancyMaxActiveBlocksPerMultiprocessor"
            (blocks: *mut c_int, function: CuFunction, threads: c_int, shared: usize);
        cuLaunchKernel = "cuLaunchKernelEx" (
            config: *const CuLaunchConfig, function: CuFunction,
            parameters: *mut *mut c_void, extra: *mut *mut c_void,
        );
        cuLaunchHostFunc = "cuLaunchHostFunc"
            (stream: CuStream, function: unsafe extern "C" fn(*mut c_void), data: *mut c_void);

        cuMemAlloc = "cuMemAlloc_v2" (address: *mut CuDevicePtr, bytes: usize);
        cuMemAllocAsync = "cuMemAllocAsync"
            (address: *mut CuDevicePtr, bytes: usize, stream: CuStream);
        cuMemFree = "cuMemFree_v2" (address: CuDevicePtr);
        cuMemFreeAsync = "cuMemFreeAsync" (address: CuDevicePtr, stream: CuStream);
        cuMemGetInfo = "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize);
        cuMemGetAddressRange = "cuMemGetAddressRange_v2"
            (base: *mut CuDevicePtr, bytes: *mut usize, address: CuDevicePtr);
        cuMemsetD8Async = "cuMemsetD8Async"
            (address: CuDevicePtr, value: u8, bytes: usize, stream: CuStream);
        cuMemcpyAsync = "cuMemcpyAsync"
            (target: CuDevicePtr, source: CuDevicePtr, bytes: usize, stream: CuStream);
        cuMemcpyPeerAsync = "cuMemcpyPeerAsync" (
            target: CuDevicePtr, target_context: CuContext,
            source: CuDevicePtr, source_context: CuContext, bytes: usize, stream: CuStream,
        );
        cuMemHostAlloc = "cuMemHostAlloc"
            (address: *mut *mut c_void, bytes: usize, flags: c_uint);
        cuMemFreeHost = "cuMemFreeHost" (address: *mut c_void);
        cuMemHostRegister = "cuMemHostRegister_v2"
            (address: *mut c_void, bytes: usize, flags: c_uint);
        cuMemHostUnregister = "cuMemHostUnregister" (address: *mut c_void);
        cuMemHostGetDevicePointer = "cuMemHostGetDevicePointer_v2"
            (device: *mut CuDevicePtr, address: *mut c_void, flags: c_uint);
        cuPointerGetAttributes = "cuPointerGetAttributes" (
            count: c_uint, attributes: *mut c_uint, data: *mut *mut c_void, address: CuDevicePtr,
        );

        cuStreamCreateWithPriority = "cuStreamCreateWithPriority"
            (stream: *mut CuStream, flags: c_uint, priority: c_int);
        cuStreamDestroy = "cuStreamDestroy_v2" (stream: CuStream);
        cuStreamQuery = "cuStreamQuery" (stream: CuStream);
        cuStreamSynchronize = "cuStreamSynchronize" (stream: CuStream);
        cuStreamWaitEvent = "cuStreamWaitEvent"
            (stream: CuStream, event: CuEvent, flags: c_uint);
        cuStreamGetCtx = "cuStreamGetCtx" (stream: CuStream, context: *mut CuContext);
        cuStreamGetCaptureInfo = "cuStreamGetCaptureInfo_v2" (
            stream: CuStream, status: *mut c_uint, id: *mut u64, graph: *mut CuGraph,
            dependencies: *mut *const CuGraphNode, count: *mut usize,
        );
        cuStreamBeginCapture = "cuStreamBeginCapture_v2" (stream: CuStream, mode: c_uint);
        cuStreamEndCapture = "cuStreamEndCapture" (stream: CuStream, graph: *mut CuGraph);
        cuThreadExchangeStreamCaptureMode = "cuThreadExchangeStreamCaptureMode"
            (mode: *mut c_uint);

        cuEventCreate = "cuEventCreate" (event: *mut CuEvent, flags: c_uint);
        cuEventDestroy = "cuEventDestroy_v2" (event: CuEvent);
        cuEventRecord = "cuEventRecord" (event: CuEvent, stream: CuStream);
        cuEventQuery = "cuEventQuery" (event: CuEvent);
        cuEventSynchronize = "cuEventSynchronize" (event: CuEvent);
        cuEventElapsedTime = "cuEventElapsedTime"
            (milliseconds: *mut c_float, begin: CuEvent, end: CuEvent);

        cuIpcGetMemHandle = "cuIpcGetMemHandle"
            (handle: *mut CuIpcMemHandle, address: CuDevicePtr);
        cuIpcOpenMemHandle = "cuIpcOpenMemHandle_v2"
            (address: *mut CuDevicePtr, handle: CuIpcMemHandle, flags: c_uint);
        cuIpcCloseMemHandle = "cuIpcCloseMemHandle" (address: CuDevicePtr);

        cuGraphInstantiate = "cuGraphInstantiateWithFlags"
            (exec: *mut CuGraphExec, graph: CuGraph, flags: u64);
        cuGraphAddEventRecordNode = "cuGraphAddEventRecordNode" (
            node: *mut CuGraphNode, graph: CuGraph,
            dependencies: *const CuGraphNode, count: usize, event: CuEvent,
        );
        cuGraphAddDependencies = "cuGraphAddDependencies" (
            graph: CuGraph, from: *const CuGraphNode, to: *const CuGraphNode, count: usize,
        );
        cuGraphRemoveDependencies = "cuGraphRemoveDependencies" (
            graph: CuGraph, from: *const CuGraphNode, to: *const CuGraphNode, count: usize,
        );
        cuGraphLaunch = "cuGraphLaunch" (exec: CuGraphExec, stream: CuStream);
        cuGraphExecDestroy = "cuGraphExecDestroy" (exec: CuGraphExec);
        cuGraphDestroy = "cuGraphDestroy" (graph: CuGraph);
        cuUserObjectCreate = "cuUserObjectCreate" (
            object: *mut CuUserObject, data: *mut c_void,
            destroy: unsafe extern "C" fn(*mut c_void), references: c_uint, flags: c_uint,
        );
        cuUserObjectRelease = "cuUserObjectRelease" (object: CuUserObject, count: c_uint);
        cuGraphRetainUserObject = "cuGraphRetainUserObject"
            (graph: CuGraph, object: CuUserObject, count: c_uint, flags: c_uint);
    }
    optional {
        cuStreamGetId = "cuStreamGetId" since "12.0" (stream: CuStream, id: *mut u64);
        cuStreamGetBothCtx = "cuStreamGetCtx_v2" since "12.5"
            (stream: CuStream, context: *mut CuContext, green: *mut CuGreenContext);
        cuFuncLoad = "cuFuncLoad" since "12.4" (function: CuFunction);
        cuModuleGetFunctionCount = "cuModuleGetFunctionCount" since "12.4"
            (count: *mut c_uint, module: CuModule);
        cuModuleEnumerateFunctions = "cuModuleEnumerateFunctions" since "12.4"
            (functions: *mut CuFunction, count: c_uint, module: CuModule);
    }
}
