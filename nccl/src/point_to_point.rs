//! Sends and receives between two ranks.

use crate::collectives::submit;
use crate::types::*;
use cinch::Collective;
use cinch::capi::core::collective_request::CollectiveRequest;
use std::ffi::{c_int, c_void};
use std::ptr::null;

export! {
    /// Sends `count` elements to `peer`, which must receive as many. Sends and receives that wait for each
    /// other belong in one group.
    counted fn ncclSend | pncclSend(sendbuff: *const c_void, count: usize, datatype: ncclDataType_t,
        peer: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        let request = CollectiveRequest {
            sendbuf: sendbuff,
            count,
            dtype: datatype.into(),
            peer,
            stream,
            ..CollectiveRequest::new(Collective::SendRecv, true)
        };
        // SAFETY: the program passes pointers that are valid as nccl.h documents for this function.
        unsafe { submit(comm, &request, null()) }
    }
}

export! {
    /// Receives `count` elements from `peer`, which must send as many.
    counted fn ncclRecv | pncclRecv(recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        peer: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        let request = CollectiveRequest {
            recvbuf: recvbuff,
            count,
            dtype: datatype.into(),
            peer,
            stream,
            ..CollectiveRequest::new(Collective::SendRecv, false)
        };
        // SAFETY: the program passes pointers that are valid as nccl.h documents for this function.
        unsafe { submit(comm, &request, null()) }
    }
}
