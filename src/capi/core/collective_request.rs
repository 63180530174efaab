//! The arguments of a collective, as the C program passed them, and their checks.

use super::arguments::rank_of;
use crate::comm::{Call, Communicator};
use crate::error::{Error, Result};
use crate::mem::{Buffers, DeviceBuffers, UserBuffers};
use crate::types::{Collective, DType, ReduceOp};
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

/// Names that the error sentences of one C API use for a collective's arguments.
#[derive(Debug)]
pub struct ArgumentNames {
    /// Name of the argument with the input buffer.
    pub sendbuf: &'static str,
    /// Name of the argument with the output buffer.
    pub recvbuf: &'static str,
    /// Name of the argument with the element type.
    pub dtype: &'static str,
    /// First and last element type of the API, each with its constant in C.
    pub dtypes: [(DType, &'static str); 2],
    /// Advice to a program that passes a stream on a communicator of host memory.
    pub host_stream: &'static str,
}

impl ArgumentNames {
    /// Returns the element type with this number, which both APIs share.
    ///
    /// # Errors
    /// Invalid argument if there is none.
    pub fn dtype(&self, number: i64) -> Result<DType> {
        let [(first, first_name), (last, last_name)] = self.dtypes;
        let [first, last] = [first as u32, last as u32];
        let number_in_api = u32::try_from(number).ok();
        let dtype = number_in_api
            .filter(|number| (first..=last).contains(number))
            .and_then(DType::from_number);
        dtype.ok_or_else(|| {
            Error::invalid_argument(format!(
                "{} {number} is unknown; valid: {first} ({first_name}) to {last} ({last_name})",
                self.dtype,
            ))
        })
    }
}

/// Arguments of a collective as the C program passed them, unchecked: numbers and addresses may be
/// anything.
#[derive(Debug)]
pub struct CollectiveRequest {
    /// The collective to run.
    pub collective: Collective,
    /// For a send/recv: whether this rank sends.
    pub sends: bool,
    /// Address of the input.
    pub sendbuf: *const c_void,
    /// Address of the output.
    pub recvbuf: *mut c_void,
    /// Number of elements, as the collective counts them.
    pub count: usize,
    /// Number of the element type.
    pub dtype: i64,
    /// Number of the reduction operator.
    pub op: i64,
    /// Root of the collective, if it has one.
    pub root: c_int,
    /// For a send/recv: the other rank.
    pub peer: c_int,
    /// Stream of the communicator's GPU; NULL is its default stream.
    pub stream: *mut c_void,
}

impl CollectiveRequest {
    /// Returns a request whose arguments are zero.
    pub fn new(collective: Collective, sends: bool) -> CollectiveRequest {
        CollectiveRequest {
            collective,
            sends,
            sendbuf: null(),
            recvbuf: null_mut(),
            count: 0,
            dtype: 0,
            op: 0,
            root: 0,
            peer: 0,
            stream: null_mut(),
        }
    }

    /// Returns the call without its buffers, and whether rank `rank` is its root or, for a send/recv, the sender.
    ///
    /// # Errors
    /// Invalid argument, naming the argument by `names`.
    pub fn call(
        &self,
        names: &ArgumentNames,
        rank: usize,
        find_op: impl FnOnce(i64, DType) -> Result<ReduceOp>,
    ) -> Result<(Call, bool)> {
        let dtype = names.dtype(self.dtype)?;
        let mut call = Call::new(self.collective, dtype, self.count);
        if self.collective.reduces() {
            call.op = find_op(self.op, dtype)?;
        }
        if self.collective.has_root() {
            call.root = rank_of("root", self.root)?;
        }
        if !self.collective.is_message() {
            let is_root = call.root == rank;
            return Ok((call, is_root));
        }
        let peer = rank_of("peer", self.peer)?;
        (call.root, call.peer) = if self.sends {
            (rank, peer)
        } else {
            (peer, rank)
        };
        // A rank may send to itself. On the sending side it is the root, which alone has an input.
        Ok((call, self.sends))
    }

    /// Checks the arguments that only C programs can get wrong, and returns the call with its
    /// buffers.
    ///
    /// `comm` checks what Rust callers can get wrong too: overlap, bounds of roots, codecs.
    ///
    /// # Errors
    /// Invalid argument or invalid usage, naming the argument by `names`.
    ///
    /// # Safety
    /// Until the call has run, buffers that are not NULL are readable or writable for what it
    /// implies, in host memory or on the communicator's GPU, and the stream exists on that GPU.
    pub unsafe fn bind(
        &self,
        names: &ArgumentNames,
        comm: &Communicator,
        find_op: impl FnOnce(i64, DType) -> Result<ReduceOp>,
    ) -> Result<(Call, Buffers<'static>)> {
        let (call, is_root) = self.call(names, comm.rank(), find_op)?;
        let (input, output) = (
            self.collective.input_extent(is_root),
            self.collective.output_extent(is_root),
        );
        let nranks = comm.nranks();
        let input_bytes = call.buffer_bytes(names.sendbuf, self.sendbuf.addr(), input, nranks)?;
        let output_bytes = call.buffer_bytes(names.recvbuf, self.recvbuf.addr(), output, nranks)?;
        // The address of an unused buffer may be anything. NULL replaces it, so that it cannot seem
        // to overlap the other buffer.
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
        if comm.gpu().is_some() {
            let input = (sendbuf.addr() as u64, input_bytes);
            let output = (recvbuf.addr() as u64, output_bytes);
            // SAFETY: the caller keeps the buffers valid until the call has run; `comm` checks
            // which GPU they are on.
            let buffers = unsafe { DeviceBuffers::new(input, output, self.stream.addr()) };
            return Ok((call, Buffers::Gpu(buffers)));
        }
        if !self.stream.is_null() {
            return Err(Error::invalid_usage(format!(
                "{}: stream {:?} on a communicator of host memory, which has none: {}",
                call.collective, self.stream, names.host_stream
            )));
        }
        // SAFETY: the caller keeps the buffers valid until the call has run; a buffer that is NULL
        // has 0 bytes.
        let buffers = unsafe {
            UserBuffers::from_raw(sendbuf.cast(), input_bytes, recvbuf.cast(), output_bytes)
        };
        Ok((call, Buffers::Host(buffers)))
    }
}
