//! The header's numbers and plain types. What comes from C is a plain integer, never a Rust enum:
//! a wrong number must be an error, not undefined behaviour.

use cinch::{DType, Error, Result};
use std::ffi::{c_char, c_int, c_void};

/// `ncclResult_t`.
pub type ncclResult_t = c_int;
/// `ncclDataType_t`.
pub type ncclDataType_t = c_int;
/// `ncclRedOp_t`.
pub type ncclRedOp_t = c_int;
/// `ncclScalarResidence_t`.
pub type ncclScalarResidence_t = c_int;
/// `ncclComm_t`: a ticket.
pub type ncclComm_t = *mut ncclComm;
/// `ncclWindow_t`: always NULL, see `register.rs`.
pub type ncclWindow_t = *mut c_void;
/// `cudaStream_t`, which is a `CUstream`.
pub type cudaStream_t = *mut c_void;
/// `cudaEvent_t`, which is a `CUevent`.
pub type cudaEvent_t = *mut c_void;

/// A communicator. Only pointers to it exist; they are tickets.
pub struct ncclComm {
    _opaque: [u8; 0],
}

/// `ncclUniqueId`, which functions take by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ncclUniqueId {
    /// Opaque.
    pub internal: [c_char; 128],
}

/// The numbers of the header, each once, and [`CONSTANTS`] for the test that compares
/// them with it.
macro_rules! constants {
    ($($name:ident: $type:ty = $value:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`")]
            pub const $name: $type = $value;
        )*
        /// Every number, by name.
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

/// `NCCL_SIM_INFO_INITIALIZER`'s magic, which has no name in the header.
pub const SIM_INFO_MAGIC: u32 = 0x7468_5283;

/// The element type with this number. The numbers of both libraries are the same.
pub(crate) fn dtype(number: ncclDataType_t) -> Result<DType> {
    u32::try_from(number)
        .ok()
        .and_then(DType::from_number)
        .ok_or_else(|| {
            Error::invalid_argument(format!(
                "datatype {number} is none; there are 0 to {}",
                ncclNumTypes - 1
            ))
        })
}

/// A rank, root or peer as an unsigned number. Whether there is such a rank is for `cinch` to say.
pub(crate) fn rank_of(name: &str, rank: c_int) -> Result<usize> {
    usize::try_from(rank).map_err(|_| Error::invalid_argument(format!("{name} {rank} is negative")))
}

/// A number of ranks or the like as C has it.
pub(crate) fn as_int(number: usize) -> Result<c_int> {
    c_int::try_from(number)
        .map_err(|_| Error::internal(format!("{number} does not fit an int of C")))
}

/// Whether there is an out-parameter at all: asked before anything happens.
pub(crate) fn check_out<T>(name: &str, target: *mut T) -> Result<()> {
    match target.is_null() {
        true => Err(Error::invalid_argument(format!(
            "{name}, where the result goes, is NULL"
        ))),
        false => Ok(()),
    }
}

/// Writes `value` to the out-parameter `name`.
///
/// # Safety
/// `target` is NULL or writable.
pub(crate) unsafe fn store<T>(name: &str, target: *mut T, value: T) -> Result<()> {
    check_out(name, target)?;
    // SAFETY: not NULL, so writable; C may have placed it anywhere.
    unsafe { target.write_unaligned(value) };
    Ok(())
}
