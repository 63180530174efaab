//! The collectives of cinch.h. [`CollectiveRequest::bind`] checks the arguments; `group` runs or records the
//! call.
//!
//! `stream` is a `cudaStream_t` or `CUstream` of the communicator's GPU, on which the call is queued. It is
//! NULL on a communicator of host memory, where the call has run when it returns.

use super::core::collective_request::CollectiveRequest;
use super::error::cinch_result_t;
use super::group;
use super::handle::{self, CommEntry, cinch_comm_t};
use super::report::ReportTarget;
use super::statistics::{self, cinch_statistics_t};
use super::types::cinch_collective_t::*;
use super::types::{self, ARGUMENT_NAMES, collective_number, dtype_number, op_number};
use crate::comm::Call;
use crate::error::Result;
use crate::mem::Buffers;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// Submits the collective `$number` with those arguments of the exported function that have these
/// names.
macro_rules! collective {
    ($number:ident($comm:ident, $stream:ident): $($argument:ident)*) => {{
        let (collective, sends) = types::collective($number as collective_number)?;
        let request = CollectiveRequest {
            $($argument: $argument.into(),)*
            stream: $stream,
            ..CollectiveRequest::new(collective, sends)
        };
        // SAFETY: cinch.h requires of the program that buffers and stream stay valid until the call
        // has run.
        unsafe { submit($comm, &request, |_| {}, CallOutputs::NONE) }
    }};
}

/// Reduces all ranks' inputs and returns the result on every rank: `count` elements in, `count` out.
/// In place if `sendbuf == recvbuf`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_all_reduce(
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: usize,
    dtype: dtype_number,
    op: op_number,
    comm: *mut cinch_comm_t,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_all_reduce", {
        collective! { CINCH_ALL_REDUCE(comm, stream): sendbuf recvbuf count dtype op }
    })
}

/// Gathers all ranks' inputs on every rank, in rank order: `count` elements in, `count` per rank out.
/// In place if `sendbuf` is this rank's block of `recvbuf`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_all_gather(
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: usize,
    dtype: dtype_number,
    comm: *mut cinch_comm_t,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_all_gather", {
        collective! { CINCH_ALL_GATHER(comm, stream): sendbuf recvbuf count dtype }
    })
}

/// Reduces all ranks' inputs and returns block r of the result on rank r: `count` elements per rank in,
/// `count` out. In place if `recvbuf` is this rank's block of `sendbuf`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_reduce_scatter(
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: usize,
    dtype: dtype_number,
    op: op_number,
    comm: *mut cinch_comm_t,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_reduce_scatter", {
        collective! { CINCH_REDUCE_SCATTER(comm, stream): sendbuf recvbuf count dtype op }
    })
}

/// Copies the root's `count` elements to every rank. Only the root's `sendbuf` is read; it may be NULL
/// on other ranks. In place if `sendbuf == recvbuf`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_broadcast(
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: usize,
    dtype: dtype_number,
    root: c_int,
    comm: *mut cinch_comm_t,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_broadcast", {
        collective! { CINCH_BROADCAST(comm, stream): sendbuf recvbuf count dtype root }
    })
}

/// Reduces all ranks' inputs and returns the result on the root: `count` elements in, `count` out.
/// Only the root's `recvbuf` is written; it may be NULL on other ranks. In place if
/// `sendbuf == recvbuf`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_reduce(
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: usize,
    dtype: dtype_number,
    op: op_number,
    root: c_int,
    comm: *mut cinch_comm_t,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_reduce", {
        collective! { CINCH_REDUCE(comm, stream): sendbuf recvbuf count dtype op root }
    })
}

/// Gathers all ranks' inputs on the root, in rank order: `count` elements in, `count` per rank out.
/// Only the root's `recvbuf` is written; it may be NULL on other ranks. In place if `sendbuf` is the
/// root's block of `recvbuf`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_gather(
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: usize,
    dtype: dtype_number,
    root: c_int,
    comm: *mut cinch_comm_t,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_gather", {
        collective! { CINCH_GATHER(comm, stream): sendbuf recvbuf count dtype root }
    })
}

/// Sends block r of the root's input to rank r: `count` elements per rank in, `count` out. Only the
/// root's `sendbuf` is read; it may be NULL on other ranks. In place if `recvbuf` is the root's block
/// of `sendbuf`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_scatter(
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: usize,
    dtype: dtype_number,
    root: c_int,
    comm: *mut cinch_comm_t,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_scatter", {
        collective! { CINCH_SCATTER(comm, stream): sendbuf recvbuf count dtype root }
    })
}

/// Sends block r of every rank's input to rank r, which receives the blocks in rank order: `count`
/// elements per rank in, `count` per rank out. In place if `sendbuf == recvbuf`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_all_to_all(
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: usize,
    dtype: dtype_number,
    comm: *mut cinch_comm_t,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_all_to_all", {
        collective! { CINCH_ALL_TO_ALL(comm, stream): sendbuf recvbuf count dtype }
    })
}

/// Sends `count` elements to `peer`, which must receive as many. Sends and receives that wait for each
/// other belong in one group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_send(
    sendbuf: *const c_void,
    count: usize,
    dtype: dtype_number,
    peer: c_int,
    comm: *mut cinch_comm_t,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_send", {
        collective! { CINCH_SEND(comm, stream): sendbuf count dtype peer }
    })
}

/// Receives `count` elements from `peer`, which must send as many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_recv(
    recvbuf: *mut c_void,
    count: usize,
    dtype: dtype_number,
    peer: c_int,
    comm: *mut cinch_comm_t,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_recv", {
        collective! { CINCH_RECV(comm, stream): recvbuf count dtype peer }
    })
}

/// Checks the call on `comm`, and runs it or records it in this thread's open group.
///
/// `set_options` sets codec and algorithm of the call.
///
/// # Safety
/// See [`CollectiveRequest::bind`]; statistics are NULL or stay writable until the call has run.
pub(super) unsafe fn submit(
    comm: *const cinch_comm_t,
    request: &CollectiveRequest,
    set_options: impl FnOnce(&mut Call),
    outputs: CallOutputs,
) -> Result<()> {
    // SAFETY: the caller passes buffers and a stream that stay valid until the call has run.
    let (entry, mut call, buffers) = unsafe { bind(comm, request)? };
    set_options(&mut call);
    // SAFETY: the caller passes statistics that are NULL or stay writable until the call has run.
    let buffers = unsafe { outputs.with_statistics(buffers)? };
    group::submit(&entry.comm, &call, buffers, outputs.report)
}

/// Places that a call writes beside its output.
pub(super) struct CallOutputs {
    pub report: ReportTarget,
    /// Statistics of the call; NULL for none.
    pub statistics: *mut cinch_statistics_t,
    /// Whether the call takes the verdict of its output alone.
    pub verdict_only: bool,
}

impl CallOutputs {
    const NONE: CallOutputs = CallOutputs {
        report: ReportTarget::NONE,
        statistics: std::ptr::null_mut(),
        verdict_only: false,
    };

    /// Returns the buffers of a call that writes the statistics.
    ///
    /// # Safety
    /// The statistics are NULL or stay writable until the call has run.
    unsafe fn with_statistics(&self, buffers: Buffers<'static>) -> Result<Buffers<'static>> {
        match buffers {
            buffers if self.statistics.is_null() => Ok(buffers),
            Buffers::Gpu(buffers) => {
                let address = self.statistics.addr() as u64;
                // SAFETY: the caller keeps the statistics writable; `comm` checks where they are.
                Ok(Buffers::Gpu(unsafe {
                    match self.verdict_only {
                        false => buffers.with_statistics(address),
                        true => buffers.with_verdict(address),
                    }
                }))
            }
            Buffers::Host(_) => Err(statistics::refused_on_host()),
        }
    }
}

/// Returns the communicator behind `comm`, and the call that `request` describes with its buffers.
///
/// # Safety
/// See [`CollectiveRequest::bind`].
pub(super) unsafe fn bind(
    comm: *const cinch_comm_t,
    request: &CollectiveRequest,
) -> Result<(Arc<CommEntry>, Call, Buffers<'static>)> {
    let entry = handle::lookup(comm)?;
    let on_gpu = entry.comm.gpu().is_some();
    // SAFETY: `cinch_op_create_premulsum` creates no factor by address.
    let find_op = |op, dtype| unsafe { entry.ops.find(op, dtype, on_gpu) };
    // SAFETY: the caller passes buffers and a stream that stay valid until the call has run.
    let (call, buffers) = unsafe { request.bind(&ARGUMENT_NAMES, &entry.comm, find_op)? };
    Ok((entry, call, buffers))
}

/// Returns the communicator behind `comm`, and the call that `request` describes without its buffers.
///
/// # Errors
/// Invalid argument, naming the argument.
pub(super) fn describe(
    comm: *const cinch_comm_t,
    request: &CollectiveRequest,
) -> Result<(Arc<CommEntry>, Call)> {
    let entry = handle::lookup(comm)?;
    let on_gpu = entry.comm.gpu().is_some();
    // SAFETY: `cinch_op_create_premulsum` creates no factor by address.
    let find_op = |op, dtype| unsafe { entry.ops.find(op, dtype, on_gpu) };
    let (call, _) = request.call(&ARGUMENT_NAMES, entry.comm.rank(), find_op)?;
    Ok((entry, call))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::DeviceBuffers;
    use crate::types::CallStatistics;

    #[test]
    fn verdict_only_selects_the_statistics() {
        let mut place = std::mem::MaybeUninit::<CallStatistics>::uninit();
        for verdict_only in [false, true] {
            let outputs = CallOutputs {
                report: ReportTarget::NONE,
                statistics: place.as_mut_ptr().cast(),
                verdict_only,
            };
            // SAFETY: nothing uses the buffers, the stream or the statistics.
            let made = unsafe {
                let buffers = DeviceBuffers::new((0, 0), (0, 0), 0);
                outputs.with_statistics(Buffers::Gpu(buffers))
            };
            let Ok(Buffers::Gpu(buffers)) = made else {
                panic!("not on a GPU");
            };
            assert_eq!(buffers.statistics(), Some(place.as_ptr().addr() as u64));
            assert_eq!(buffers.takes_input_statistics(), !verdict_only);
        }
    }
}
