//! Types of the CUDA driver API: cudarc's, and two that cudarc does not have.
//!
//! This library defines [`CuResult`] and [`Handle`]. cudarc makes every C enum a Rust enum, which must not
//! hold a number that it does not list. A newer driver may return such numbers. So enums that the driver
//! writes are integers here: result codes, capture states and modes, memory types. Enums that are only
//! passed to the driver, such as attributes, are cudarc's.

use cudarc::driver::sys;
use std::ffi::c_uint;

pub use sys::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP,
    CU_MEMHOSTREGISTER_PORTABLE, CUcontext, CUctx_st, CUdevice, CUdevice_P2PAttribute,
    CUdevice_attribute, CUdeviceptr, CUevent, CUevent_flags, CUevent_st, CUevent_wait_flags,
    CUfunc_st, CUfunction, CUfunction_attribute, CUgraph, CUgraphExec, CUgraphExec_st,
    CUgraphInstantiate_flags, CUgraphNode, CUgraphNode_st, CUgreenCtx, CUhostFn, CUipcMem_flags,
    CUipcMemHandle, CUjit_option, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchConfig, CUlimit, CUmemorytype, CUmod_st, CUmodule, CUpointer_attribute, CUstream,
    CUstream_flags, CUstream_st, CUstreamCaptureMode, CUstreamCaptureStatus, CUuserObject,
    CUuserObject_flags, CUuserObjectRetain_flags, CUuuid,
};

/// Result code of a driver function, as an integer: a newer driver returns codes that `CUresult` lacks.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CuResult(pub c_uint);

/// Defines named constants for the codes of `CUresult` that this library matches.
macro_rules! codes {
    ($($name:ident = $code:ident,)*) => {
        #[allow(missing_docs)]
        impl CuResult {
            $(pub const $name: CuResult = CuResult(sys::CUresult::$code as c_uint);)*
        }
    };
}

codes! {
    SUCCESS = CUDA_SUCCESS,
    INVALID_VALUE = CUDA_ERROR_INVALID_VALUE,
    OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY,
    DEINITIALIZED = CUDA_ERROR_DEINITIALIZED,
    STUB_LIBRARY = CUDA_ERROR_STUB_LIBRARY,
    NO_DEVICE = CUDA_ERROR_NO_DEVICE,
    INVALID_DEVICE = CUDA_ERROR_INVALID_DEVICE,
    INVALID_CONTEXT = CUDA_ERROR_INVALID_CONTEXT,
    ALREADY_MAPPED = CUDA_ERROR_ALREADY_MAPPED,
    NO_BINARY_FOR_GPU = CUDA_ERROR_NO_BINARY_FOR_GPU,
    PEER_ACCESS_UNSUPPORTED = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
    UNSUPPORTED_PTX_VERSION = CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    INVALID_HANDLE = CUDA_ERROR_INVALID_HANDLE,
    NOT_FOUND = CUDA_ERROR_NOT_FOUND,
    NOT_READY = CUDA_ERROR_NOT_READY,
    ILLEGAL_ADDRESS = CUDA_ERROR_ILLEGAL_ADDRESS,
    PEER_ACCESS_ALREADY_ENABLED = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
    CONTEXT_IS_DESTROYED = CUDA_ERROR_CONTEXT_IS_DESTROYED,
    HOST_MEMORY_ALREADY_REGISTERED = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    HOST_MEMORY_NOT_REGISTERED = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED,
    SYSTEM_DRIVER_MISMATCH = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
    STREAM_CAPTURE_UNSUPPORTED = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    STREAM_CAPTURE_INVALIDATED = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    UNKNOWN = CUDA_ERROR_UNKNOWN,
}

impl CuResult {
    /// Code that no driver returns: the loaded driver lacks the function.
    pub const FUNCTION_MISSING: CuResult = CuResult(c_uint::MAX);

    /// Returns whether the code is one of the errors of stream captures.
    pub fn is_capture_error(self) -> bool {
        const FIRST: c_uint = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as c_uint;
        const LAST: c_uint = sys::CUresult::CUDA_ERROR_TIMEOUT as c_uint;
        (FIRST..=LAST).contains(&self.0)
    }
}

/// A handle of a driver object, such as a [`CUstream`], that threads may share.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Handle<T>(pub *mut T);

// SAFETY: only the driver follows the pointer, and its functions accept every handle on every thread.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: a shared handle is read, and only the driver follows the pointer.
unsafe impl<T> Sync for Handle<T> {}

/// Handle of the default stream of whichever thread passes it.
pub const PER_THREAD_STREAM: CUstream = std::ptr::without_provenance_mut(2);

/// Returns the launch attribute of programmatic dependent launch: the kernel may start before the work
/// ahead of it in its stream has ended.
pub fn programmatic_launch() -> CUlaunchAttribute {
    // The driver may read more of the union than the field, so all of it is initialised.
    let mut value = CUlaunchAttributeValue { pad: [0; 64] };
    value.programmaticStreamSerializationAllowed = 1;
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value,
    }
}
