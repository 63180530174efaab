//! The list of the driver's functions that this library calls. The list generates the trait [`Api`], the
//! table that [`Loaded`](super::Loaded) fills from the driver's library, and the tests' mock.
//!
//! The compiler compares each signature with cudarc's. The result type differs on purpose, see [`CuResult`].

use super::types::*;
use crate::sys::loader::function_table;
use cudarc::driver::sys;
use std::ffi::{c_char, c_float, c_int, c_uint, c_void};

/// Passes the list of functions to the macro `$then`.
///
/// An entry is `method = symbol (arguments)`. A function that the oldest supported driver lacks is optional,
/// with the CUDA version that introduced it. `as` gives cudarc's argument types where this library uses other
/// types.
macro_rules! driver_functions {
    ($then:ident) => {
        $then! {
            required {
                cuInit = cuInit (flags: c_uint);
                cuDriverGetVersion = cuDriverGetVersion (version: *mut c_int);
                cuGetErrorName = cuGetErrorName (result: CuResult, name: *mut *const c_char)
                    as (sys::CUresult, *mut *const c_char);
                cuGetErrorString = cuGetErrorString (result: CuResult, text: *mut *const c_char)
                    as (sys::CUresult, *mut *const c_char);

                cuDeviceGet = cuDeviceGet (device: *mut CUdevice, ordinal: c_int);
                cuDeviceGetCount = cuDeviceGetCount (count: *mut c_int);
                cuDeviceGetName = cuDeviceGetName (name: *mut c_char, bytes: c_int, device: CUdevice);
                cuDeviceGetUuid = cuDeviceGetUuid_v2 (uuid: *mut CUuuid, device: CUdevice);
                cuDeviceGetPCIBusId = cuDeviceGetPCIBusId
                    (name: *mut c_char, bytes: c_int, device: CUdevice);
                cuDeviceGetAttribute = cuDeviceGetAttribute
                    (value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
                cuDeviceTotalMem = cuDeviceTotalMem_v2 (bytes: *mut usize, device: CUdevice);
                cuDeviceCanAccessPeer = cuDeviceCanAccessPeer
                    (can: *mut c_int, device: CUdevice, peer: CUdevice);
                cuDeviceGetP2PAttribute = cuDeviceGetP2PAttribute
                    (value: *mut c_int, attribute: CUdevice_P2PAttribute, device: CUdevice, peer: CUdevice);

                cuDevicePrimaryCtxRetain = cuDevicePrimaryCtxRetain
                    (context: *mut CUcontext, device: CUdevice);
                cuDevicePrimaryCtxRelease = cuDevicePrimaryCtxRelease_v2 (device: CUdevice);
                cuCtxGetCurrent = cuCtxGetCurrent (context: *mut CUcontext);
                cuCtxPushCurrent = cuCtxPushCurrent_v2 (context: CUcontext);
                cuCtxPopCurrent = cuCtxPopCurrent_v2 (context: *mut CUcontext);
                cuCtxGetDevice = cuCtxGetDevice (device: *mut CUdevice);
                cuCtxGetLimit = cuCtxGetLimit (value: *mut usize, limit: CUlimit);
                cuCtxSetLimit = cuCtxSetLimit (limit: CUlimit, value: usize);
                cuCtxEnablePeerAccess = cuCtxEnablePeerAccess (peer: CUcontext, flags: c_uint);

                cuModuleLoadDataEx = cuModuleLoadDataEx (
                    module: *mut CUmodule, image: *const c_void, options: c_uint,
                    names: *mut CUjit_option, values: *mut *mut c_void,
                );
                cuModuleUnload = cuModuleUnload (module: CUmodule);
                cuModuleGetFunction = cuModuleGetFunction
                    (function: *mut CUfunction, module: CUmodule, name: *const c_char);
                cuFuncGetAttribute = cuFuncGetAttribute
                    (value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction);
                cuFuncSetAttribute = cuFuncSetAttribute
                    (function: CUfunction, attribute: CUfunction_attribute, value: c_int);
                cuOccupancyMaxActiveBlocksPerMultiprocessor =
                    cuOccupancyMaxActiveBlocksPerMultiprocessor
                    (blocks: *mut c_int, function: CUfunction, threads: c_int, shared: usize);
                cuLaunchKernel = cuLaunchKernelEx (
                    config: *const CUlaunchConfig, function: CUfunction,
                    parameters: *mut *mut c_void, extra: *mut *mut c_void,
                );

                cuMemAlloc = cuMemAlloc_v2 (address: *mut CUdeviceptr, bytes: usize);
                cuMemAllocAsync = cuMemAllocAsync
                    (address: *mut CUdeviceptr, bytes: usize, stream: CUstream);
                cuMemFree = cuMemFree_v2 (address: CUdeviceptr);
                cuMemFreeAsync = cuMemFreeAsync (address: CUdeviceptr, stream: CUstream);
                cuMemGetInfo = cuMemGetInfo_v2 (free: *mut usize, total: *mut usize);
                cuMemGetAddressRange = cuMemGetAddressRange_v2
                    (base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr);
                cuMemsetD8Async = cuMemsetD8Async
                    (address: CUdeviceptr, value: u8, bytes: usize, stream: CUstream);
                cuMemcpyAsync = cuMemcpyAsync
                    (target: CUdeviceptr, source: CUdeviceptr, bytes: usize, stream: CUstream);
                cuMemHostAlloc = cuMemHostAlloc
                    (address: *mut *mut c_void, bytes: usize, flags: c_uint);
                cuMemFreeHost = cuMemFreeHost (address: *mut c_void);
                cuMemHostRegister = cuMemHostRegister_v2
                    (address: *mut c_void, bytes: usize, flags: c_uint);
                cuMemHostUnregister = cuMemHostUnregister (address: *mut c_void);
                cuMemHostGetDevicePointer = cuMemHostGetDevicePointer_v2
                    (device: *mut CUdeviceptr, address: *mut c_void, flags: c_uint);
                cuPointerGetAttributes = cuPointerGetAttributes (
                    count: c_uint, attributes: *mut CUpointer_attribute, data: *mut *mut c_void, address: CUdeviceptr,
                );

                cuLaunchHostFunc = cuLaunchHostFunc (stream: CUstream, function: CUhostFn, data: *mut c_void);
                cuStreamCreateWithPriority = cuStreamCreateWithPriority
                    (stream: *mut CUstream, flags: c_uint, priority: c_int);
                cuStreamDestroy = cuStreamDestroy_v2 (stream: CUstream);
                cuStreamQuery = cuStreamQuery (stream: CUstream);
                cuStreamSynchronize = cuStreamSynchronize (stream: CUstream);
                cuStreamWaitEvent = cuStreamWaitEvent
                    (stream: CUstream, event: CUevent, flags: c_uint);
                cuStreamGetCtx = cuStreamGetCtx (stream: CUstream, context: *mut CUcontext);
                cuStreamGetCaptureInfo = cuStreamGetCaptureInfo_v2 (
                    stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut u64, graph: *mut CUgraph,
                    dependencies: *mut *const CUgraphNode, count: *mut usize,
                );
                cuStreamBeginCapture = cuStreamBeginCapture_v2 (stream: CUstream, mode: CUstreamCaptureMode);
                cuStreamEndCapture = cuStreamEndCapture (stream: CUstream, graph: *mut CUgraph);
                cuThreadExchangeStreamCaptureMode = cuThreadExchangeStreamCaptureMode
                    (mode: *mut CUstreamCaptureMode);

                cuEventCreate = cuEventCreate (event: *mut CUevent, flags: c_uint);
                cuEventDestroy = cuEventDestroy_v2 (event: CUevent);
                cuEventRecord = cuEventRecord (event: CUevent, stream: CUstream);
                cuEventQuery = cuEventQuery (event: CUevent);
                cuEventElapsedTime = cuEventElapsedTime
                    (milliseconds: *mut c_float, begin: CUevent, end: CUevent);

                cuIpcGetMemHandle = cuIpcGetMemHandle
                    (handle: *mut CUipcMemHandle, address: CUdeviceptr);
                cuIpcOpenMemHandle = cuIpcOpenMemHandle_v2
                    (address: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
                cuIpcCloseMemHandle = cuIpcCloseMemHandle (address: CUdeviceptr);

                cuGraphInstantiate = cuGraphInstantiateWithFlags
                    (exec: *mut CUgraphExec, graph: CUgraph, flags: u64);
                cuGraphAddEventRecordNode = cuGraphAddEventRecordNode (
                    node: *mut CUgraphNode, graph: CUgraph,
                    dependencies: *const CUgraphNode, count: usize, event: CUevent,
                );
                cuGraphAddDependencies = cuGraphAddDependencies (
                    graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, count: usize,
                );
                cuGraphRemoveDependencies = cuGraphRemoveDependencies (
                    graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, count: usize,
                );
                cuGraphLaunch = cuGraphLaunch (exec: CUgraphExec, stream: CUstream);
                cuGraphExecDestroy = cuGraphExecDestroy (exec: CUgraphExec);
                cuGraphDestroy = cuGraphDestroy (graph: CUgraph);
                cuUserObjectCreate = cuUserObjectCreate (
                    object: *mut CUuserObject, data: *mut c_void,
                    destroy: CUhostFn, references: c_uint, flags: c_uint,
                );
                cuUserObjectRelease = cuUserObjectRelease (object: CUuserObject, count: c_uint);
                cuGraphRetainUserObject = cuGraphRetainUserObject
                    (graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint);
            }
            optional {
                cuStreamGetId = cuStreamGetId since "12.0" (stream: CUstream, id: *mut u64);
                cuStreamGetBothCtx = cuStreamGetCtx_v2 since "12.5"
                    (stream: CUstream, context: *mut CUcontext, green: *mut CUgreenCtx);
                cuFuncLoad = cuFuncLoad since "12.4" (function: CUfunction);
                cuModuleGetFunctionCount = cuModuleGetFunctionCount since "12.4"
                    (count: *mut c_uint, module: CUmodule);
                cuModuleEnumerateFunctions = cuModuleEnumerateFunctions since "12.4"
                    (functions: *mut CUfunction, count: c_uint, module: CUmodule);
            }
        }
    };
}

#[cfg(test)]
pub(super) use driver_functions;

/// Generates from the list the trait [`Api`], whose methods a simulation may leave out, and the table of
/// loaded functions. Also generates the versions for error messages.
macro_rules! make_api {
    (
        required { $($name:ident = $symbol:ident ($($arg:ident: $type:ty),* $(,)?)
            $(as ($($cudarc:ty),*))?;)* }
        optional { $($late:ident = $late_symbol:ident since $since:literal
            ($($late_arg:ident: $late_type:ty),* $(,)?);)* }
    ) => {
        /// The driver API. Methods have the C functions' names, arguments and contracts.
        ///
        /// # Safety of the methods
        /// Every pointer is valid for what the function reads or writes. Every handle came from this driver, and
        /// its object still exists.
        #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
        pub trait Api: Send + Sync {
            /// Returns the name of the driver's library, or of its simulation, for messages.
            fn source(&self) -> String;
            $(
                #[doc = concat!("Calls `", stringify!($symbol), "`.")]
                unsafe fn $name(&self, $($arg: $type),*) -> CuResult {
                    $(let _ = $arg;)*
                    CuResult::FUNCTION_MISSING
                }
            )*
            $(
                #[doc = concat!("Calls `", stringify!($late_symbol), "`, which CUDA ", $since, " introduced.")]
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

        // A signature that differs from cudarc's does not compile. The constants are never evaluated into
        // code, so no reference to cudarc's loader remains.
        $(const _: signature!([$($type),*] $([$($cudarc),*])?) = sys::$symbol;)*
        $(const _: signature!([$($late_type),*]) = sys::$late_symbol;)*

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
                        // SAFETY: the caller keeps the C function's contract.
                        Some(function) => unsafe { function($($late_arg),*) },
                        None => CuResult::FUNCTION_MISSING,
                    }
                }
            )*
        }

        /// Returns the CUDA version whose driver introduced the function behind a method.
        pub fn available_since(method: &str) -> &'static str {
            match method {
                $(stringify!($late) => $since,)*
                _ => super::OLDEST_DRIVER,
            }
        }
    };
}

/// Expands to the type of a cudarc function. Its arguments are cudarc's types if given, otherwise
/// this library's.
macro_rules! signature {
    ([$($type:ty),*]) => { unsafe fn($($type),*) -> sys::CUresult };
    ([$($ours:ty),*] [$($type:ty),*]) => { unsafe fn($($type),*) -> sys::CUresult };
}

driver_functions!(make_api);
