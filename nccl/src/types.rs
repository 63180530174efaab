//! Constants and plain types of nccl.h. C passes plain integers, never Rust enums: an unknown
//! number must be an error, not undefined behaviour.

use cinch::DType;
use cinch::capi::core::collective_request::ArgumentNames;
use std::ffi::{c_char, c_int, c_void};

pub(crate) use cinch::capi::core::arguments::{as_int, check_out, rank_of, store};

/// `ncclResult_t`.
pub type ncclResult_t = c_int;
/// `ncclDataType_t`.
pub type ncclDataType_t = c_int;
/// `ncclRedOp_t`.
pub type ncclRedOp_t = c_int;
/// `ncclScalarResidence_t`.
pub type ncclScalarResidence_t = c_int;
/// `ncclComm_t`: a handle, which is never dereferenced.
pub type ncclComm_t = *mut ncclComm;
/// `ncclWindow_t`: always NULL, see `register.rs`.
pub type ncclWindow_t = *mut c_void;
/// `cudaStream_t`, which is a `CUstream`.
pub type cudaStream_t = *mut c_void;
/// `cudaEvent_t`, which is a `CUevent`.
pub type cudaEvent_t = *mut c_void;

/// Type to which handles of communicators point; it has no value.
pub struct ncclComm {
    _opaque: [u8; 0],
}

/// `ncclUniqueId`, which functions take by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ncclUniqueId {
    /// Opaque bytes.
    pub internal: [c_char; 128],
}

/// Defines the constants of nccl.h, and [`CONSTANTS`] for the test that compares them with the
/// header.
macro_rules! constants {
    ($($name:ident: $type:ty = $value:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`")]
            pub const $name: $type = $value;
        )*
        /// Names and values of all constants.
        pub const CONSTANTS: &[(&str, i64)] = &[$((stringify!($name), $name as i64)),*];
    };
}

constants! {
    ncclSuccess: ncclResult_t = 0;
    ncclUnhandledCudaError: ncclResult_t = 1;
    ncclSystemError: ncclResult_t = 2;
    ncclInternalError: ncclResult_t = 3;
    ncclInvalidArgument: ncclResult_t = 4;
    ncclInvalidUsage: ncclResult_t = 5;
    ncclRemoteError: ncclResult_t = 6;
    ncclInProgress: ncclResult_t = 7;
    ncclTimeout: ncclResult_t = 8;
    ncclNumResults: ncclResult_t = 9;

    ncclInt8: ncclDataType_t = 0;
    ncclChar: ncclDataType_t = 0;
    ncclUint8: ncclDataType_t = 1;
    ncclInt32: ncclDataType_t = 2;
    ncclInt: ncclDataType_t = 2;
    ncclUint32: ncclDataType_t = 3;
    ncclInt64: ncclDataType_t = 4;
    ncclUint64: ncclDataType_t = 5;
    ncclFloat16: ncclDataType_t = 6;
    ncclHalf: ncclDataType_t = 6;
    ncclFloat32: ncclDataType_t = 7;
    ncclFloat: ncclDataType_t = 7;
    ncclFloat64: ncclDataType_t = 8;
    ncclDouble: ncclDataType_t = 8;
    ncclBfloat16: ncclDataType_t = 9;
    ncclFloat8e4m3: ncclDataType_t = 10;
    ncclFloat8e5m2: ncclDataType_t = 11;
    ncclNumTypes: ncclDataType_t = 12;

    ncclSum: ncclRedOp_t = 0;
    ncclProd: ncclRedOp_t = 1;
    ncclMax: ncclRedOp_t = 2;
    ncclMin: ncclRedOp_t = 3;
    ncclAvg: ncclRedOp_t = 4;
    ncclNumOps: ncclRedOp_t = 5;
    ncclMaxRedOp: ncclRedOp_t = 0x7fff_ffff;

    ncclScalarDevice: ncclScalarResidence_t = 0;
    ncclScalarHostImmediate: ncclScalarResidence_t = 1;

    NCCL_UNIQUE_ID_BYTES: usize = 128;
    NCCL_API_MAGIC: u32 = 0xcafe_beef;
    NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;
    NCCL_SPLIT_NOCOLOR: c_int = -1;
    NCCL_SHRINK_DEFAULT: c_int = 0;
    NCCL_SHRINK_ABORT: c_int = 1;
    NCCL_REVOKE_DEFAULT: c_int = 0;
    NCCL_WIN_DEFAULT: c_int = 0;
    NCCL_WIN_COLL_SYMMETRIC: c_int = 1;
    NCCL_WIN_STRICT_ORDERING: c_int = 2;
    NCCL_WIN_GIN_ONLY: c_int = 4;
    NCCL_WIN_CFT_COUNTED: c_int = 8;
    NCCL_WIN_REQUIRED_ALIGNMENT: usize = 4096;
    NCCL_CTA_POLICY_DEFAULT: c_int = 0;
    NCCL_CTA_POLICY_EFFICIENCY: c_int = 1;
    NCCL_CTA_POLICY_ZERO: c_int = 2;
    NCCL_SUSPEND_MEM: c_int = 1;
    ncclStatGpuMemSuspend: c_int = 0;
    ncclStatGpuMemSuspended: c_int = 1;
    ncclStatGpuMemPersist: c_int = 2;
    ncclStatGpuMemTotal: c_int = 3;
    NCCL_ENCRYPTION_MODE_NONE: c_int = 0;
    NCCL_ENCRYPTION_MODE_PSK: c_int = 1;
    ncclHostCftDefault: c_int = c_int::MIN;
    ncclHostCftEnable: c_int = 1;
    ncclHostCftDisable: c_int = 2;
    ncclHostCftFallback: c_int = 3;
    ncclNvlsHostModeDefault: c_int = c_int::MIN;
    ncclNvlsHostModeEnable: c_int = 0;
    ncclNvlsHostModeDisableTransport: c_int = 1;
    ncclNvlsHostModeDisableSymmetricMultimem: c_int = 2;
    ncclNvlsHostModeDisable: c_int = c_int::MAX;
}

/// Magic of `NCCL_SIM_INFO_INITIALIZER`, which has no name in the header.
pub const SIM_INFO_MAGIC: u32 = 0x7468_5283;

/// Names of nccl.h for error sentences about a collective's arguments.
pub(crate) const ARGUMENT_NAMES: ArgumentNames = ArgumentNames {
    sendbuf: "sendbuff",
    recvbuf: "recvbuff",
    dtype: "datatype",
    dtypes: [
        (DType::I8, "ncclInt8"),
        (DType::LAST_OF_NCCL, "ncclFloat8e5m2"),
    ],
    host_stream: "pass NULL, or unset CINCH_DEVICE=host",
};
