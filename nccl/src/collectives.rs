//! The collectives. Each function fills a [`Request`]; [`Request::submit`] checks what only C can
//! get wrong, and hands the call to the communicator or to the open group.

use crate::boundary::CallProgress;
use crate::coll_config::{CallOptions, ncclCollConfig_t};
use crate::comm;
use crate::group;
use crate::op;
use crate::types::*;
use cinch::comm::Call;
use cinch::mem::{Buffers, DeviceBuffers, UserBuffers};
use cinch::{Collective, Error, Result};
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

/// Defines a collective and its variant with a config: the arguments before `comm`, and what they
/// fill of a request.
macro_rules! collective {
    (
        $(#[doc = $doc:literal])*
        $name:ident | $twin:ident, $config:ident | $config_twin:ident = $collective:ident
        ($($arg:ident: $type:ty),*) { $($field:ident $(: $value:expr)?),* $(,)? }
    ) => {
        export! {
            $(#[doc = $doc])*
            counted fn $name | $twin($($arg: $type,)* comm: ncclComm_t, stream: cudaStream_t) {
                let request = Request {
                    $($field $(: $value)?,)*
                    ..Request::new(Collective::$collective, comm, stream)
                };
                // SAFETY: the caller's arguments are as the header says.
                unsafe { request.submit(null()) }
            }
        }
        export! {
            /// The same, with a config, which may be NULL.
            counted fn $config | $config_twin($($arg: $type,)* comm: ncclComm_t, stream: cudaStream_t,
                config: *const ncclCollConfig_t) {
                let request = Request {
                    $($field $(: $value)?,)*
                    ..Request::new(Collective::$collective, comm, stream)
                };
                // SAFETY: the caller's arguments are as the header says.
                unsafe { request.submit(config) }
            }
        }
    };
}

collective! {
    /// Every rank gets the reduction of all inputs.
    ncclAllReduce | pncclAllReduce, ncclAllReduceConfig | pncclAllReduceConfig = AllReduce
    (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
     op: ncclRedOp_t) { sendbuff, recvbuff, count, datatype, op }
}

collective! {
    /// Every rank gets `root`'s data.
    ncclBroadcast | pncclBroadcast, ncclBroadcastConfig | pncclBroadcastConfig = Broadcast
    (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
     root: c_int) { sendbuff, recvbuff, count, datatype, root }
}

collective! {
    /// `root` gets the reduction of all inputs.
    ncclReduce | pncclReduce, ncclReduceConfig | pncclReduceConfig = Reduce
    (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
     op: ncclRedOp_t, root: c_int) { sendbuff, recvbuff, count, datatype, op, root }
}

collective! {
    /// Every rank gets all inputs, in rank order.
    ncclAllGather | pncclAllGather, ncclAllGatherConfig | pncclAllGatherConfig = AllGather
    (sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t)
    { sendbuff, recvbuff, count: sendcount, datatype }
}

collective! {
    /// Rank r gets block r of the reduction.
    ncclReduceScatter | pncclReduceScatter, ncclReduceScatterConfig | pncclReduceScatterConfig
        = ReduceScatter
    (sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t,
     op: ncclRedOp_t) { sendbuff, recvbuff, count: recvcount, datatype, op }
}

collective! {
    /// Rank r gets block r of every rank's input, in rank order.
    ncclAlltoAll | pncclAlltoAll, ncclAlltoAllConfig | pncclAlltoAllConfig = AllToAll
    (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t)
    { sendbuff, recvbuff, count, datatype }
}

collective! {
    /// `root` gets all inputs, in rank order.
    ncclGather | pncclGather, ncclGatherConfig | pncclGatherConfig = Gather
    (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
     root: c_int) { sendbuff, recvbuff, count, datatype, root }
}

collective! {
    /// Rank r gets block r of `root`'s input.
    ncclScatter | pncclScatter, ncclScatterConfig | pncclScatterConfig = Scatter
    (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
     root: c_int) { sendbuff, recvbuff, count, datatype, root }
}

export! {
    /// Every rank gets `root`'s data, in place.
    counted fn ncclBcast | pncclBcast(buff: *mut c_void, count: usize, datatype: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        let request = Request {
            sendbuff: buff.cast_const(),
            recvbuff: buff,
            count,
            datatype,
            root,
            ..Request::new(Collective::Broadcast, comm, stream)
        };
        // SAFETY: the caller's arguments are as the header says.
        unsafe { request.submit(null()) }
    }
}

/// A call as C makes it.
pub(crate) struct Request {
    pub(crate) collective: Collective,
    pub(crate) sendbuff: *const c_void,
    pub(crate) recvbuff: *mut c_void,
    pub(crate) count: usize,
    pub(crate) datatype: ncclDataType_t,
    pub(crate) op: ncclRedOp_t,
    pub(crate) root: c_int,
    /// Of a send/recv: the other rank.
    pub(crate) peer: c_int,
    /// Of a send/recv: whether this is the sending side.
    pub(crate) sends: bool,
    pub(crate) comm: ncclComm_t,
    pub(crate) stream: cudaStream_t,
}

impl Request {
    pub(crate) fn new(collective: Collective, comm: ncclComm_t, stream: cudaStream_t) -> Request {
        Request {
            collective,
            sendbuff: null(),
            recvbuff: null_mut(),
            count: 0,
            datatype: 0,
            op: ncclSum,
            root: 0,
            peer: 0,
            sends: false,
            comm,
            stream,
        }
    }

    /// Checks the call and runs it, or records it in the thread's open group.
    ///
    /// # Safety
    /// Buffers that are not NULL are readable or writable for what the call implies, until it has
    /// run, on the communicator's GPU, and the stream is live; `config` is NULL or as the header
    /// says.
    pub(crate) unsafe fn submit(self, config: *const ncclCollConfig_t) -> Result<CallProgress> {
        let comm = comm::lookup(self.comm)?;
        let communicator = comm.ready()?;
        let (rank, nranks) = (communicator.rank(), communicator.nranks());
        let dtype = dtype(self.datatype)?;
        // SAFETY: as the caller's.
        let choice = unsafe { CallOptions::read(config)? };
        let mut call = Call {
            codec: choice.codec.map(Into::into),
            algorithm: choice.algorithm,
            ..Call::new(self.collective, dtype, self.count)
        };
        if self.collective.reduces() {
            call.op = op::find(&comm, &communicator, self.op, dtype)?;
        }
        if self.collective.has_root() {
            call.root = rank_of("root", self.root)?;
        }
        let is_root = if self.collective == Collective::SendRecv {
            let peer = rank_of("peer", self.peer)?;
            (call.root, call.peer) = if self.sends {
                (rank, peer)
            } else {
                (peer, rank)
            };
            // A rank that sends to itself is the root of both sides.
            self.sends
        } else {
            call.root == rank
        };
        let input = self.collective.input_extent(is_root);
        let output = self.collective.output_extent(is_root);
        let input_bytes = call.buffer_bytes("sendbuff", self.sendbuff.addr(), input, nranks)?;
        let output_bytes = call.buffer_bytes("recvbuff", self.recvbuff.addr(), output, nranks)?;
        // A buffer that is not used may be anything; it must not look like an overlap.
        let sendbuff = if input_bytes == 0 {
            null()
        } else {
            self.sendbuff
        };
        let recvbuff = if output_bytes == 0 {
            null_mut()
        } else {
            self.recvbuff
        };
        let buffers = if communicator.gpu().is_some() {
            let input = (sendbuff.addr() as u64, input_bytes);
            let output = (recvbuff.addr() as u64, output_bytes);
            // SAFETY: memory of the communicator's GPU, for what the call implies, and a stream of
            // it, by the header; which GPU is checked.
            Buffers::Gpu(unsafe { DeviceBuffers::new(input, output, self.stream.addr()) })
        } else {
            if !self.stream.is_null() {
                return Err(Error::invalid_usage(format!(
                    "stream {:?} on a communicator of host memory (CINCH_DEVICE=host), which has \
                     none: pass NULL",
                    self.stream
                )));
            }
            // SAFETY: readable and writable for what the call implies; both are 0 bytes where NULL.
            Buffers::Host(unsafe {
                UserBuffers::from_raw(sendbuff.cast(), input_bytes, recvbuff.cast(), output_bytes)
            })
        };
        group::submit(communicator, &call, buffers)
    }
}
