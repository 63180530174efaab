//! The collectives. Each function fills a [`Request`]; [`Request::submit`] checks what only C can
//! get wrong, and hands the call to the communicator or to the open group.
//!
//! `stream` is a `cudaStream_t` or `CUstream` of the communicator's GPU, on which the call is
//! queued; on a communicator of host memory it is NULL, and the call has run when it returns.

use super::error::cinch_result_t;
use super::group;
use super::handle::{self, cinch_comm_t, rank_of};
use super::op;
use super::report::ReportTarget;
use super::types::cinch_collective_t::{self, *};
use super::types::{self, collective_number, dtype_number, op_number};
use crate::comm::Call;
use crate::error::{Error, Result};
use crate::mem::{Buffers, DeviceBuffers, UserBuffers};
use crate::types::{Algorithm, CodecSetting, Collective};
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

/// Every rank gets the reduction of all inputs: `count` elements in, `count` out.
/// In place where `sendbuf == recvbuf`.
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
        let request = Request {
            op,
            ..Request::new(
                CINCH_ALL_REDUCE,
                sendbuf,
                recvbuf,
                count,
                dtype,
                comm,
                stream,
            )
        };
        // SAFETY: buffers as the call implies, by the documented contract.
        unsafe { request.submit() }
    })
}

/// Every rank gets all inputs, in rank order: `count` elements in, `count` for each rank out.
/// In place where `sendbuf` is this rank's block of `recvbuf`.
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
        let request = Request::new(
            CINCH_ALL_GATHER,
            sendbuf,
            recvbuf,
            count,
            dtype,
            comm,
            stream,
        );
        // SAFETY: buffers as the call implies, by the documented contract.
        unsafe { request.submit() }
    })
}

/// Rank r gets block r of the reduction: `count` elements for each rank in, `count` out.
/// In place where `recvbuf` is this rank's block of `sendbuf`.
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
        let request = Request {
            op,
            ..Request::new(
                CINCH_REDUCE_SCATTER,
                sendbuf,
                recvbuf,
                count,
                dtype,
                comm,
                stream,
            )
        };
        // SAFETY: buffers as the call implies, by the documented contract.
        unsafe { request.submit() }
    })
}

/// Every rank gets the root's `count` elements. `sendbuf` is read on the root only, and may be
/// NULL elsewhere. In place where `sendbuf == recvbuf`.
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
        let request = Request {
            root,
            ..Request::new(
                CINCH_BROADCAST,
                sendbuf,
                recvbuf,
                count,
                dtype,
                comm,
                stream,
            )
        };
        // SAFETY: buffers as the call implies, by the documented contract.
        unsafe { request.submit() }
    })
}

/// The root gets the reduction of all inputs: `count` elements in, `count` out. `recvbuf` is
/// written on the root only, and may be NULL elsewhere. In place where `sendbuf == recvbuf`.
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
        let request = Request {
            op,
            root,
            ..Request::new(CINCH_REDUCE, sendbuf, recvbuf, count, dtype, comm, stream)
        };
        // SAFETY: buffers as the call implies, by the documented contract.
        unsafe { request.submit() }
    })
}

/// The root gets all inputs, in rank order: `count` elements in, `count` for each rank out.
/// `recvbuf` is written on the root only, and may be NULL elsewhere. In place where `sendbuf` is
/// the root's block of `recvbuf`.
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
        let request = Request {
            root,
            ..Request::new(CINCH_GATHER, sendbuf, recvbuf, count, dtype, comm, stream)
        };
        // SAFETY: buffers as the call implies, by the documented contract.
        unsafe { request.submit() }
    })
}

/// Rank r gets block r of the root's input: `count` elements for each rank in, `count` out.
/// `sendbuf` is read on the root only, and may be NULL elsewhere. In place where `recvbuf` is the
/// root's block of `sendbuf`.
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
        let request = Request {
            root,
            ..Request::new(CINCH_SCATTER, sendbuf, recvbuf, count, dtype, comm, stream)
        };
        // SAFETY: buffers as the call implies, by the documented contract.
        unsafe { request.submit() }
    })
}

/// Rank r gets block r of every rank's input, in rank order: `count` elements for each rank in,
/// and as many out. In place where `sendbuf == recvbuf`.
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
        let request = Request::new(
            CINCH_ALL_TO_ALL,
            sendbuf,
            recvbuf,
            count,
            dtype,
            comm,
            stream,
        );
        // SAFETY: buffers as the call implies, by the documented contract.
        unsafe { request.submit() }
    })
}

/// Sends `count` elements to `peer`, which receives as many. Sends and receives that depend on
/// each other belong in one group.
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
        let request = Request {
            peer,
            ..Request::new(CINCH_SEND, sendbuf, null_mut(), count, dtype, comm, stream)
        };
        // SAFETY: buffers as the call implies, by the documented contract.
        unsafe { request.submit() }
    })
}

/// Receives `count` elements from `peer`, which sends as many.
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
        let request = Request {
            peer,
            ..Request::new(CINCH_RECV, null(), recvbuf, count, dtype, comm, stream)
        };
        // SAFETY: buffers as the call implies, by the documented contract.
        unsafe { request.submit() }
    })
}

/// A call as C makes it: numbers and addresses that may be anything.
pub(super) struct Request {
    pub(super) collective: collective_number,
    pub(super) sendbuf: *const c_void,
    pub(super) recvbuf: *mut c_void,
    pub(super) count: usize,
    pub(super) dtype: dtype_number,
    pub(super) op: op_number,
    pub(super) root: c_int,
    pub(super) peer: c_int,
    pub(super) comm: *mut cinch_comm_t,
    pub(super) stream: *mut c_void,
    pub(super) codec: Option<CodecSetting>,
    pub(super) algorithm: Option<Algorithm>,
    pub(super) tensor: Option<u64>,
    pub(super) feedback: Option<u64>,
    pub(super) report: ReportTarget,
}

impl Request {
    fn new(
        collective: cinch_collective_t,
        sendbuf: *const c_void,
        recvbuf: *mut c_void,
        count: usize,
        dtype: dtype_number,
        comm: *mut cinch_comm_t,
        stream: *mut c_void,
    ) -> Request {
        Request {
            collective: collective as collective_number,
            sendbuf,
            recvbuf,
            count,
            dtype,
            op: 0,
            root: 0,
            peer: 0,
            comm,
            stream,
            codec: None,
            algorithm: None,
            tensor: None,
            feedback: None,
            report: ReportTarget::NONE,
        }
    }

    /// Checks the call and runs it, or records it in the thread's open group.
    ///
    /// # Safety
    /// Buffers that are not NULL are readable or writable for what the call implies, until it has
    /// run; of a communicator on a GPU, on that GPU, and the stream is live.
    pub(super) unsafe fn submit(self) -> Result<()> {
        let handle = handle::lookup(self.comm)?;
        let (rank, nranks) = (handle.comm.rank(), handle.comm.nranks());
        let dtype = types::dtype(self.dtype)?;
        let (collective, sends) = types::collective(self.collective)?;
        let mut call = Call {
            codec: self.codec,
            algorithm: self.algorithm,
            tensor: self.tensor,
            feedback: self.feedback,
            ..Call::new(collective, dtype, self.count)
        };
        if collective.reduces() {
            call.op = op::find(&handle, self.op, dtype)?;
        }
        if collective.has_root() {
            call.root = rank_of("root", self.root)?;
        }
        if collective == Collective::SendRecv {
            let peer = rank_of("peer", self.peer)?;
            (call.root, call.peer) = if sends { (rank, peer) } else { (peer, rank) };
        }
        // A rank that sends to itself is the root of both sides.
        let (input, output) = match collective {
            Collective::SendRecv => (
                collective.input_extent(sends),
                collective.output_extent(sends),
            ),
            _ => {
                let is_root = call.root == rank;
                (
                    collective.input_extent(is_root),
                    collective.output_extent(is_root),
                )
            }
        };
        let input_bytes = call.buffer_bytes("sendbuf", self.sendbuf.addr(), input, nranks)?;
        let output_bytes = call.buffer_bytes("recvbuf", self.recvbuf.addr(), output, nranks)?;
        // A buffer that is not used may be anything; it must not look like an overlap.
        let sendbuf = if input_bytes == 0 {
            null()
        } else {
            self.sendbuf
        };
        let recvbuf = if output_bytes == 0 {
            null_mut()
        } else {
            self.recvbuf
        };
        let buffers = if handle.comm.gpu().is_some() {
            let input = (sendbuf.addr() as u64, input_bytes);
            let output = (recvbuf.addr() as u64, output_bytes);
            // SAFETY: memory of the communicator's GPU, for what the call implies, and a stream of
            // it, by the documented contract; which GPU is checked.
            Buffers::Gpu(unsafe { DeviceBuffers::new(input, output, self.stream.addr()) })
        } else {
            if !self.stream.is_null() {
                return Err(Error::invalid_usage(format!(
                    "{}: stream {:?} on a communicator of host memory, which has none: pass NULL, \
                     or join with the device set",
                    call.collective, self.stream
                )));
            }
            // SAFETY: readable and writable for what the call implies; both are 0 bytes where NULL.
            Buffers::Host(unsafe {
                UserBuffers::from_raw(sendbuf.cast(), input_bytes, recvbuf.cast(), output_bytes)
            })
        };
        group::submit(&handle, &call, buffers, self.report)
    }
}
