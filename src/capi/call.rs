//! The function `cinch_call`, which takes options (codec, algorithm, tensor) and returns a report.

use super::collectives::{self, CallOutputs};
use super::core::collective_request::CollectiveRequest;
use super::error::cinch_result_t;
use super::handle::{CommEntry, cinch_comm_t};
use super::report::{ReportTarget, cinch_report_t};
use super::statistics::{self, cinch_statistics_t};
use super::text;
use super::types::{self, NumberedSetting, algorithm_number, collective_number};
use super::types::{dtype_number, op_number};
use super::versioned;
use crate::comm::Call;
use crate::error::{Error, Result};
use crate::mem::{Buffers, UserBuffers};
use crate::types::{Algorithm, CodecSetting};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

/// Call of a collective. The library ignores fields that the collective does not use.
///
/// Initialise it with `cinch_call_default(&call)`. New fields are only ever added at the end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_call_t {
    /// Bytes of the struct in the program's header. Set by `cinch_call_default`.
    pub size: usize,
    /// Constant by which the library detects an uninitialised struct. Set by `cinch_call_default`.
    pub magic: u32,
    /// Version of the program's header. Set by `cinch_call_default`.
    pub version: u32,
    /// Communicator on which the call runs.
    pub comm: *mut cinch_comm_t,
    /// Input; see the collective's own function.
    pub sendbuf: *const c_void,
    /// Output; see the collective's own function.
    pub recvbuf: *mut c_void,
    /// Number of elements; see the collective's own function.
    pub count: usize,
    /// Collective that the call runs, such as `CINCH_ALL_REDUCE`.
    pub collective: collective_number,
    /// Element type.
    pub dtype: dtype_number,
    /// Reduction operator.
    pub op: op_number,
    /// Root of a broadcast, reduce, gather or scatter.
    pub root: c_int,
    /// Other rank of a send or receive.
    pub peer: c_int,
    /// Algorithm; unset = the communicator's choice.
    pub algorithm: algorithm_number,
    /// Codec and its parameters, such as `linear8:block=128`; NULL = the communicator's codec.
    /// `auto:linear8` uses the codec only if the cost model predicts that the call gets faster. On a GPU it runs only on
    /// a communicator whose own codec is `auto:` too, because that one has timed calls.
    /// A codec that cannot carry the call, such as a lossy one for integers, is an error.
    pub codec: *const c_char,
    /// Id of the tensor whose scales a codec with `tensor=K` keeps between calls; 0 = none. On a GPU
    /// a captured call must have run once before with the same id.
    pub tensor: u64,
    /// Stream on which a call on a GPU is queued; NULL on a communicator of host memory.
    pub stream: *mut c_void,
    /// Id of the tensor whose residuals are kept between calls, which turns error feedback on;
    /// 0 = none. What a lossy codec loses is added to the next call with the same id. For collectives
    /// that reduce. `minmax1` with a seed is an error, since its residuals would grow without bound.
    /// On a GPU the residuals take 8 bytes of device memory per input element; a captured call must
    /// have run once before with the same id.
    pub feedback: u64,
    /// Statistics that a collective on a GPU writes; NULL = none. For types of floats, with and without a codec. They
    /// are in memory of the GPU or in pinned host memory, aligned to 8 bytes, apart from the call's buffers, and are
    /// complete when the call has ended in its stream; a graph writes them again at each launch.
    /// `cinch_statistics_read` reads them. On host memory `cinch_report_t` has those of calls with a codec.
    pub statistics: *mut cinch_statistics_t,
    /// 1: `statistics` get the verdict of the output alone, and 0 in the fields of the contribution. The kernels of large
    /// calls that reduce or encode take it from what they store; for others another kernel reads the output. The
    /// contribution's fields cost another kernel that reads the input.
    pub verdict_only: c_int,
}

cinch_struct!(cinch_call_t, magic 0xC1C4_0CA1, first 88, now 120);

/// Initialises `*call` with zeros: an all_reduce (sum) of 0 elements of `CINCH_I8`.
///
/// C programs use `cinch_call_default(&call)`, which passes `sizeof(cinch_call_t)` and
/// `CINCH_API_VERSION` of the program's header as `size` and `version`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_call_init(
    call: *mut cinch_call_t,
    size: usize,
    version: u32,
) -> cinch_result_t {
    guard!("cinch_call_init", {
        // SAFETY: cinch.h requires of the program that `call` is NULL or writable for `size` bytes.
        unsafe { versioned::initialise(call, size, version) }
    })
}

/// Runs one call and describes it in `*report`, which may be NULL and is written on success only.
/// In a group, the outermost `cinch_group_end` writes the report.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_call(
    call: *const cinch_call_t,
    report: *mut cinch_report_t,
) -> cinch_result_t {
    guard!("cinch_call", {
        // SAFETY: cinch.h requires of the program that both are NULL or structs with valid strings
        // and buffers.
        unsafe { submit(call, report) }
    })
}

/// # Safety
/// Both are NULL or structs for the size that they give, with valid strings; buffers and stream are
/// as [`CollectiveRequest::bind`] needs them.
unsafe fn submit(call: *const cinch_call_t, report: *mut cinch_report_t) -> Result<()> {
    // SAFETY: the caller passes both as NULL or structs for the size that they give.
    let (call, target) = unsafe { (versioned::read(call)?, ReportTarget::new(report)?) };
    let outputs = CallOutputs {
        report: target,
        statistics: call.statistics,
        verdict_only: is_verdict_only(&call)?,
    };
    let (request, options) = (request_of(&call)?, options_of(&call)?);
    // SAFETY: the caller passes buffers and a stream that are valid for the call until it has run.
    unsafe { collectives::submit(call.comm, &request, |made| options.set(made), outputs) }
}

/// Returns whether the call takes the verdict of its output alone.
///
/// # Errors
/// Invalid argument for another number than 0 and 1, or without statistics.
fn is_verdict_only(call: &cinch_call_t) -> Result<bool> {
    match call.verdict_only {
        0 => Ok(false),
        1 if !call.statistics.is_null() => Ok(true),
        1 => Err(Error::invalid_argument(
            "call.verdict_only is 1, but call.statistics are NULL: the verdict needs a place",
        )),
        other => Err(Error::invalid_argument(format!(
            "call.verdict_only is {other}; it is 0 or 1"
        ))),
    }
}

/// Returns the communicator, the call and its buffers in host memory.
///
/// # Errors
/// Invalid argument, naming the field; invalid usage on a communicator of a GPU.
///
/// # Safety
/// `call` is NULL or a struct for the size that it gives, with valid strings; its buffers stay valid until the call
/// has run.
pub(super) unsafe fn bind(
    call: *const cinch_call_t,
) -> Result<(Arc<CommEntry>, Call, UserBuffers<'static>)> {
    // SAFETY: the caller passes NULL or a struct for the size that it gives.
    let call = unsafe { versioned::read(call)? };
    let (request, options) = (request_of(&call)?, options_of(&call)?);
    // SAFETY: the caller passes buffers that stay valid until the call has run.
    let (entry, mut made, buffers) = unsafe { collectives::bind(call.comm, &request)? };
    options.set(&mut made);
    is_verdict_only(&call)?;
    match buffers {
        Buffers::Host(_) if !call.statistics.is_null() => Err(statistics::refused_on_host()),
        Buffers::Host(buffers) => Ok((entry, made, buffers)),
        Buffers::Gpu(_) => Err(Error::invalid_usage(
            "calls on a GPU are queued on a stream and return at once: use cinch_call and an event",
        )),
    }
}

/// Returns the communicator and the call without its buffers.
///
/// # Errors
/// Invalid argument, naming the field.
///
/// # Safety
/// `call` is NULL or a struct for the size that it gives, with valid strings.
pub(super) unsafe fn describe(call: *const cinch_call_t) -> Result<(Arc<CommEntry>, Call)> {
    // SAFETY: the caller passes NULL or a struct for the size that it gives.
    let call = unsafe { versioned::read(call)? };
    let (request, options) = (request_of(&call)?, options_of(&call)?);
    is_verdict_only(&call)?;
    let (entry, mut made) = collectives::describe(call.comm, &request)?;
    options.set(&mut made);
    Ok((entry, made))
}

/// Returns the arguments that all collectives have.
fn request_of(call: &cinch_call_t) -> Result<CollectiveRequest> {
    let (collective, sends) = types::collective(call.collective)?;
    Ok(CollectiveRequest {
        collective,
        sends,
        sendbuf: call.sendbuf,
        recvbuf: call.recvbuf,
        count: call.count,
        dtype: call.dtype.into(),
        op: call.op.into(),
        root: call.root,
        peer: call.peer,
        stream: call.stream,
    })
}

/// Options of a call beyond the arguments of a collective's own function.
struct OptionsOfCall {
    codec: Option<CodecSetting>,
    algorithm: Option<Algorithm>,
    tensor: Option<u64>,
    feedback: Option<u64>,
}

impl OptionsOfCall {
    fn set(&self, call: &mut Call) {
        call.codec = self.codec;
        call.algorithm = self.algorithm;
        call.tensor = self.tensor;
        call.feedback = self.feedback;
    }
}

fn options_of(call: &cinch_call_t) -> Result<OptionsOfCall> {
    // SAFETY: cinch.h requires of the program that strings of the struct are NULL or end with NUL.
    let codec = unsafe { text::read(call.codec, "call.codec") }?;
    let id = |id: u64| (id != 0).then_some(id);
    Ok(OptionsOfCall {
        codec: codec.map(str::parse::<CodecSetting>).transpose()?,
        algorithm: algorithm_of_call(call.algorithm)?,
        tensor: id(call.tensor),
        feedback: id(call.feedback),
    })
}

fn algorithm_of_call(number: algorithm_number) -> Result<Option<Algorithm>> {
    match types::algorithm(number)? {
        NumberedSetting::Unset => Ok(None),
        NumberedSetting::One(algorithm) => Ok(Some(algorithm)),
        NumberedSetting::Auto => Err(Error::invalid_argument(
            "CINCH_ALGORITHM_AUTO is for configs; leave the algorithm of a call unset",
        )),
    }
}
