//! The collectives of nccl.h. [`CollectiveRequest::bind`] checks the arguments; `group` runs or records the
//! call.

use crate::boundary::CallProgress;
use crate::coll_config::{CallOptions, ncclCollConfig_t};
use crate::comm;
use crate::group;
use crate::plugins;
use crate::types::*;
use cinch::capi::core::collective_request::CollectiveRequest;
use cinch::{Collective, Result};
use std::ffi::{c_int, c_void};
use std::ptr::null;

/// Sets the field of a [`CollectiveRequest`] that corresponds to the argument `$name` of nccl.h.
macro_rules! set {
    ($request:ident sendbuff $value:ident) => {
        $request.sendbuf = $value
    };
    ($request:ident recvbuff $value:ident) => {
        $request.recvbuf = $value
    };
    ($request:ident count $value:ident) => {
        $request.count = $value
    };
    ($request:ident sendcount $value:ident) => {
        $request.count = $value
    };
    ($request:ident recvcount $value:ident) => {
        $request.count = $value
    };
    ($request:ident datatype $value:ident) => {
        $request.dtype = $value.into()
    };
    ($request:ident op $value:ident) => {
        $request.op = $value.into()
    };
    ($request:ident root $value:ident) => {
        $request.root = $value
    };
}

/// Defines a collective and its variant with a config; the macro takes the arguments that precede
/// `comm`.
macro_rules! collective {
    (
        $(#[doc = $doc:literal])*
        $name:ident | $twin:ident, $config:ident | $config_twin:ident = $collective:ident
        ($($arg:ident: $type:ty),*)
    ) => {
        export! {
            $(#[doc = $doc])*
            counted fn $name | $twin($($arg: $type,)* comm: ncclComm_t, stream: cudaStream_t) {
                let mut request = CollectiveRequest::new(Collective::$collective, false);
                $(set!(request $arg $arg);)*
                request.stream = stream;
                // SAFETY: the program passes pointers that are valid as nccl.h documents for this
                // function.
                unsafe { submit(comm, &request, null()) }
            }
        }
        export! {
            $(#[doc = $doc])*
            /// `config` sets options of the call and may be NULL.
            counted fn $config | $config_twin($($arg: $type,)* comm: ncclComm_t, stream: cudaStream_t,
                config: *const ncclCollConfig_t) {
                let mut request = CollectiveRequest::new(Collective::$collective, false);
                $(set!(request $arg $arg);)*
                request.stream = stream;
                // SAFETY: the program passes pointers that are valid as nccl.h documents for this
                // function.
                unsafe { submit(comm, &request, config) }
            }
        }
    };
}

collective! {
    /// Reduces all ranks' inputs and returns the result on every rank.
    ncclAllReduce | pncclAllReduce, ncclAllReduceConfig | pncclAllReduceConfig = AllReduce
    (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
     op: ncclRedOp_t)
}

collective! {
    /// Copies `root`'s data to every rank.
    ncclBroadcast | pncclBroadcast, ncclBroadcastConfig | pncclBroadcastConfig = Broadcast
    (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
     root: c_int)
}

collective! {
    /// Reduces all ranks' inputs and returns the result on `root`.
    ncclReduce | pncclReduce, ncclReduceConfig | pncclReduceConfig = Reduce
    (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
     op: ncclRedOp_t, root: c_int)
}

collective! {
    /// Gathers all ranks' inputs on every rank, in rank order.
    ncclAllGather | pncclAllGather, ncclAllGatherConfig | pncclAllGatherConfig = AllGather
    (sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t)
}

collective! {
    /// Reduces all ranks' inputs and returns block r of the result on rank r.
    ncclReduceScatter | pncclReduceScatter, ncclReduceScatterConfig | pncclReduceScatterConfig
        = ReduceScatter
    (sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t,
     op: ncclRedOp_t)
}

collective! {
    /// Sends block r of every rank's input to rank r, which receives the blocks in rank order.
    ncclAlltoAll | pncclAlltoAll, ncclAlltoAllConfig | pncclAlltoAllConfig = AllToAll
    (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t)
}

collective! {
    /// Gathers all ranks' inputs on `root`, in rank order.
    ncclGather | pncclGather, ncclGatherConfig | pncclGatherConfig = Gather
    (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
     root: c_int)
}

collective! {
    /// Sends block r of `root`'s input to rank r.
    ncclScatter | pncclScatter, ncclScatterConfig | pncclScatterConfig = Scatter
    (sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
     root: c_int)
}

export! {
    /// Copies `root`'s data to every rank, in place.
    counted fn ncclBcast | pncclBcast(buff: *mut c_void, count: usize, datatype: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        let mut request = CollectiveRequest::new(Collective::Broadcast, false);
        (request.sendbuf, request.recvbuf) = (buff.cast_const(), buff);
        (request.count, request.dtype) = (count, datatype.into());
        (request.root, request.stream) = (root, stream);
        // SAFETY: the program passes pointers that are valid as nccl.h documents for this function.
        unsafe { submit(comm, &request, null()) }
    }
}

/// Checks the call on `comm`, and runs it or records it in this thread's open group.
///
/// # Safety
/// See [`CollectiveRequest::bind`]; `config` is NULL or as the header documents, and a factor by address is
/// readable as the header documents.
pub(crate) unsafe fn submit(
    comm: ncclComm_t,
    request: &CollectiveRequest,
    config: *const ncclCollConfig_t,
) -> Result<CallProgress> {
    let comm = comm::lookup(comm)?;
    let communicator = comm.ready()?;
    // SAFETY: the caller passes `config` as NULL or as nccl.h documents.
    let options = unsafe { CallOptions::read(config)? };
    let on_gpu = communicator.gpu().is_some();
    // SAFETY: the caller keeps a factor by address readable as nccl.h documents.
    let find_op = |op: i64, dtype| unsafe { comm.ops.find(op, dtype, on_gpu) };
    // SAFETY: the caller passes buffers and a stream that stay valid until the call has run.
    let (mut call, buffers) = unsafe { request.bind(&ARGUMENT_NAMES, &communicator, find_op)? };
    call.codec = options.codec.map(Into::into);
    call.algorithm = options.algorithm;
    // NCCL divides the wrapped sum of integers, and its users compare bits.
    call.wrapping_average = true;
    if let Some(plugins) = comm.plugins() {
        plugins.tune(&communicator, &mut call);
        if plugins.is_profiling() {
            let is_captured = plugins::is_captured(&communicator, &buffers);
            let record = || plugins::record(plugins, &communicator, request, &call, is_captured);
            return group::submit_profiled(&communicator, &call, buffers, record);
        }
    }
    group::submit(&communicator, &call, buffers)
}
