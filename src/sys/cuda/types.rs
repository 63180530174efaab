//! Handles, codes and plain structs of the CUDA driver API, as far as it is used here.
//!
//! Names and values are those of NVIDIA's documentation of the driver API, without the leading
//! `CU_`/`CUDA_` where a type says so already.

use std::ffi::{c_int, c_uint};

/// What a driver function returns.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CuResult(pub c_uint);

#[allow(missing_docs)]
impl CuResult {
    pub const SUCCESS: CuResult = CuResult(0);
    pub const INVALID_VALUE: CuResult = CuResult(1);
    pub const OUT_OF_MEMORY: CuResult = CuResult(2);
    pub const NOT_INITIALIZED: CuResult = CuResult(3);
    pub const DEINITIALIZED: CuResult = CuResult(4);
    pub const STUB_LIBRARY: CuResult = CuResult(34);
    pub const NO_DEVICE: CuResult = CuResult(100);
    pub const INVALID_DEVICE: CuResult = CuResult(101);
    pub const INVALID_IMAGE: CuResult = CuResult(200);
    pub const INVALID_CONTEXT: CuResult = CuResult(201);
    pub const ALREADY_MAPPED: CuResult = CuResult(208);
    pub const NO_BINARY_FOR_GPU: CuResult = CuResult(209);
    pub const PEER_ACCESS_UNSUPPORTED: CuResult = CuResult(217);
    pub const UNSUPPORTED_PTX_VERSION: CuResult = CuResult(222);
    pub const INVALID_HANDLE: CuResult = CuResult(400);
    pub const NOT_FOUND: CuResult = CuResult(500);
    pub const NOT_READY: CuResult = CuResult(600);
    pub const PEER_ACCESS_ALREADY_ENABLED: CuResult = CuResult(704);
    pub const PEER_ACCESS_NOT_ENABLED: CuResult = CuResult(705);
    pub const CONTEXT_IS_DESTROYED: CuResult = CuResult(709);
    pub const HOST_MEMORY_ALREADY_REGISTERED: CuResult = CuResult(712);
    pub const HOST_MEMORY_NOT_REGISTERED: CuResult = CuResult(713);
    pub const NOT_PERMITTED: CuResult = CuResult(800);
    pub const NOT_SUPPORTED: CuResult = CuResult(801);
    pub const SYSTEM_DRIVER_MISMATCH: CuResult = CuResult(803);
    pub const STREAM_CAPTURE_UNSUPPORTED: CuResult = CuResult(900);
    pub const STREAM_CAPTURE_INVALIDATED: CuResult = CuResult(901);
    pub const STREAM_CAPTURE_WRONG_THREAD: CuResult = CuResult(908);
    pub const UNKNOWN: CuResult = CuResult(999);
    /// Not the driver's: the loaded driver has no such function.
    pub const FUNCTION_MISSING: CuResult = CuResult(c_uint::MAX);
}

/// A device, as the driver numbers them; not an ordinal.
pub type CuDevice = c_int;
/// An address in device memory.
pub type CuDevicePtr = u64;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident,)*) => {$(
        $(#[$doc])*
        ///
        /// An address of the driver's; a number here, so that it can cross threads.
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name(pub usize);
    )*};
}

handles! {
    /// A context.
    CuContext,
    /// A part of a GPU's multiprocessors, as a context.
    CuGreenContext,
    /// A stream; 0 is the legacy default stream, 2 the default stream of the thread.
    CuStream,
    /// An event.
    CuEvent,
    /// A module: code on a device.
    CuModule,
    /// A kernel of a module.
    CuFunction,
    /// A graph.
    CuGraph,
    /// A node of a graph.
    CuGraphNode,
    /// A graph that can be launched.
    CuGraphExec,
    /// A reference-counted object whose destructor a graph can call.
    CuUserObject,
}

impl CuStream {
    /// The default stream of whichever thread uses it.
    pub const PER_THREAD: CuStream = CuStream(2);
}

/// A name of device memory that another process can open.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CuIpcMemHandle(pub [u8; 64]);

/// A device's identity, the same in every process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CuUuid(pub [u8; 16]);

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CuLaunchConfig {
    /// Blocks of the grid, in x, y and z.
    pub grid: [c_uint; 3],
    /// Threads of a block, likewise.
    pub block: [c_uint; 3],
    /// Bytes of shared memory of a block, besides its own.
    pub shared: c_uint,
    /// Where it is queued.
    pub stream: CuStream,
    /// That many attributes.
    pub attributes: *const CuLaunchAttribute,
    /// How many.
    pub attribute_count: c_uint,
}

/// `CUlaunchAttribute`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CuLaunchAttribute {
    id: c_int,
    padding: c_int,
    /// `CUlaunchAttributeValue`, of which the first word is the number of what has one.
    value: [u64; 8],
}

impl CuLaunchAttribute {
    const PROGRAMMATIC_STREAM_SERIALIZATION: c_int = 6;

    /// The kernel may begin before what is ahead of it in the stream has ended.
    pub const EARLY_START: CuLaunchAttribute = CuLaunchAttribute {
        id: CuLaunchAttribute::PROGRAMMATIC_STREAM_SERIALIZATION,
        padding: 0,
        value: [1, 0, 0, 0, 0, 0, 0, 0],
    };
}

const _: () = assert!(size_of::<CuLaunchConfig>() == 56 && size_of::<CuLaunchAttribute>() == 72);

/// `CUdevice_attribute`.
#[allow(missing_docs)]
pub mod device_attribute {
    use super::c_int;
    pub const MAX_SHARED_MEMORY_PER_BLOCK: c_int = 8;
    pub const CLOCK_RATE_KHZ: c_int = 13;
    pub const MULTIPROCESSOR_COUNT: c_int = 16;
    pub const COMPUTE_MODE: c_int = 20;
    pub const UNIFIED_ADDRESSING: c_int = 41;
    pub const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    pub const COMPUTE_CAPABILITY_MINOR: c_int = 76;
    pub const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
    pub const CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: c_int = 91;
}

/// `CUdevice_P2PAttribute`.
#[allow(missing_docs)]
pub mod p2p_attribute {
    use super::c_int;
    pub const PERFORMANCE_RANK: c_int = 1;
    pub const ACCESS_SUPPORTED: c_int = 2;
    pub const NATIVE_ATOMIC_SUPPORTED: c_int = 3;
}

/// `CUfunction_attribute`.
#[allow(missing_docs)]
pub mod function_attribute {
    use super::c_int;
    pub const MAX_THREADS_PER_BLOCK: c_int = 0;
    pub const SHARED_SIZE_BYTES: c_int = 1;
    pub const LOCAL_SIZE_BYTES: c_int = 3;
    pub const NUM_REGS: c_int = 4;
    pub const PTX_VERSION: c_int = 5;
    pub const BINARY_VERSION: c_int = 6;
    pub const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
}

/// `CUpointer_attribute`.
#[allow(missing_docs)]
pub mod pointer_attribute {
    use super::c_uint;
    pub const CONTEXT: c_uint = 1;
    pub const MEMORY_TYPE: c_uint = 2;
    pub const BUFFER_ID: c_uint = 7;
    pub const IS_MANAGED: c_uint = 8;
    pub const DEVICE_ORDINAL: c_uint = 9;
    pub const IS_LEGACY_IPC_CAPABLE: c_uint = 10;
    pub const RANGE_START: c_uint = 11;
    pub const RANGE_SIZE: c_uint = 12;
}

/// `CUmemorytype`.
#[allow(missing_docs)]
pub mod memory_type {
    use super::c_uint;
    pub const HOST: c_uint = 1;
    pub const DEVICE: c_uint = 2;
    pub const UNIFIED: c_uint = 4;
}

/// Flags of several functions.
#[allow(missing_docs)]
pub mod flags {
    use super::c_uint;
    pub const STREAM_NON_BLOCKING: c_uint = 1;
    pub const EVENT_DEFAULT: c_uint = 0;
    pub const EVENT_DISABLE_TIMING: c_uint = 2;
    pub const EVENT_WAIT_EXTERNAL: c_uint = 1;
    /// The same bits for `cuMemHostAlloc` and `cuMemHostRegister`.
    pub const HOST_PORTABLE: c_uint = 1;
    pub const HOST_DEVICE_MAP: c_uint = 2;
    pub const IPC_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
    pub const GRAPH_USER_OBJECT_MOVE: c_uint = 1;
    pub const USER_OBJECT_NO_DESTRUCTOR_SYNC: c_uint = 1;
}

/// `CUlimit`.
#[allow(missing_docs)]
pub mod limit {
    use super::c_uint;
    pub const STACK_SIZE: c_uint = 0;
}

/// `CUstreamCaptureMode`.
#[allow(missing_docs)]
pub mod capture_mode {
    use super::c_uint;
    pub const GLOBAL: c_uint = 0;
    pub const THREAD_LOCAL: c_uint = 1;
    pub const RELAXED: c_uint = 2;
}

/// `CUstreamCaptureStatus`.
#[allow(missing_docs)]
pub mod capture_status {
    use super::c_uint;
    pub const NONE: c_uint = 0;
    pub const ACTIVE: c_uint = 1;
    pub const INVALIDATED: c_uint = 2;
}
