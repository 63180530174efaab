//! A call with options of its own: codec, algorithm, tensor; and with a report.

use super::collectives::Request;
use super::error::cinch_result_t;
use super::handle::cinch_comm_t;
use super::report::{ReportTarget, cinch_report_t};
use super::text;
use super::types::{
    NumberedSetting, algorithm, algorithm_number, collective_number, dtype_number, op_number,
};
use super::versioned::{self, Versioned};
use crate::error::{Error, Result};
use crate::types::Algorithm;
use std::ffi::{c_char, c_int, c_void};

/// One call. Fields that the collective does not use are ignored.
///
/// Initialise it with `cinch_call_default(&call)`. New fields are only ever added at the end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_call_t {
    /// Bytes of the struct in the program's header. Set by `cinch_call_default`.
    pub size: usize,
    /// Tells an initialised struct from garbage. Set by `cinch_call_default`.
    pub magic: u32,
    /// Meaning of the fields. Set by `cinch_call_default`.
    pub version: u32,
    /// On whose ranks.
    pub comm: *mut cinch_comm_t,
    /// Input, as the collective's own function takes it.
    pub sendbuf: *const c_void,
    /// Output, as the collective's own function takes it.
    pub recvbuf: *mut c_void,
    /// Elements, as the collective's own function takes them.
    pub count: usize,
    /// What is done.
    pub collective: collective_number,
    /// Of which elements.
    pub dtype: dtype_number,
    /// Combined how.
    pub op: op_number,
    /// Root, where there is one.
    pub root: c_int,
    /// The other rank of a send or receive.
    pub peer: c_int,
    /// Algorithm; unset = the communicator's choice.
    pub algorithm: algorithm_number,
    /// Codec, as `linear8:block=128`; as `auto:linear8`, only where the model of costs says that
    /// it pays; NULL = the communicator's. A codec that does not fit the
    /// call (a lossy one and integers, say) is an error.
    pub codec: *const c_char,
    /// Names the tensor whose scales live from call to call, for codecs with `tensor=K`. 0 = none.
    pub tensor: u64,
    /// The stream on which a call on a GPU is queued; NULL on a communicator of host memory.
    pub stream: *mut c_void,
    /// Turns error feedback on, and names the tensor whose residuals live from call to call: what a
    /// lossy encode drops is added to the next call of the same id. For collectives that reduce. On
    /// a GPU it takes 8 bytes of device memory an element of the input, and a call that is captured
    /// must have been made once before. 0 = none.
    pub feedback: u64,
}

// SAFETY: `repr(C)`, integers and pointers, without padding (asserted below).
unsafe impl Versioned for cinch_call_t {
    const NAME: &'static str = "cinch_call_t";
    const MAGIC: u32 = 0xC1C4_0CA1;
    const FIRST_BYTES: usize = 88;
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<cinch_call_t>() == 104);

/// Sets nothing in `*call`: an all_reduce sum of no i8 elements. `size` and `version` are
/// `sizeof(cinch_call_t)` and `CINCH_API_VERSION` of the program's header: C programs use
/// `cinch_call_default(&call)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_call_init(
    call: *mut cinch_call_t,
    size: usize,
    version: u32,
) -> cinch_result_t {
    guard!("cinch_call_init", {
        // SAFETY: NULL or writable for `size` bytes, by the documented contract.
        unsafe { versioned::initialise(call, size, version) }
    })
}

/// Runs one call, and says what it did in `*report`, which may be NULL and is written on success
/// only. Inside a group, the report is filled by the outermost `cinch_group_end`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_call(
    call: *const cinch_call_t,
    report: *mut cinch_report_t,
) -> cinch_result_t {
    guard!("cinch_call", {
        // SAFETY: NULL or structs with live strings and buffers, by the documented contract.
        unsafe { request(call, report)?.submit() }
    })
}

unsafe fn request(call: *const cinch_call_t, report: *mut cinch_report_t) -> Result<Request> {
    // SAFETY: as the caller's.
    let (call, report) = unsafe { (versioned::read(call)?, ReportTarget::new(report)?) };
    // SAFETY: as the caller's.
    let codec = unsafe { text::read(call.codec, "call.codec") }?;
    Ok(Request {
        collective: call.collective,
        sendbuf: call.sendbuf,
        recvbuf: call.recvbuf,
        count: call.count,
        dtype: call.dtype,
        op: call.op,
        root: call.root,
        peer: call.peer,
        comm: call.comm,
        stream: call.stream,
        codec: codec.map(str::parse).transpose()?,
        algorithm: chosen(call.algorithm)?,
        tensor: (call.tensor != 0).then_some(call.tensor),
        feedback: (call.feedback != 0).then_some(call.feedback),
        report,
    })
}

fn chosen(number: algorithm_number) -> Result<Option<Algorithm>> {
    match algorithm(number)? {
        NumberedSetting::Unset => Ok(None),
        NumberedSetting::One(algorithm) => Ok(Some(algorithm)),
        NumberedSetting::Auto => Err(Error::invalid_argument(
            "CINCH_ALGORITHM_AUTO is for configs; a call leaves its algorithm unset",
        )),
    }
}
