//! Messages between two ranks.

use crate::collectives::Request;
use crate::types::*;
use cinch::Collective;
use std::ffi::{c_int, c_void};
use std::ptr::null;

export! {
    /// Sends to `peer`, which receives as much. Messages that need one another go into a group.
    counted fn ncclSend | pncclSend(sendbuff: *const c_void, count: usize, datatype: ncclDataType_t,
        peer: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        let request = Request {
            sendbuff,
            count,
            datatype,
            peer,
            sends: true,
            ..Request::new(Collective::SendRecv, comm, stream)
        };
        // SAFETY: the caller's arguments are as the header says.
        unsafe { request.submit(null()) }
    }
}

export! {
    /// Receives from `peer`, which sends as much.
    counted fn ncclRecv | pncclRecv(recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        peer: c_int, comm: ncclComm_t, stream: cudaStream_t) {
        let request = Request {
            recvbuff,
            count,
            datatype,
            peer,
            sends: false,
            ..Request::new(Collective::SendRecv, comm, stream)
        };
        // SAFETY: the caller's arguments are as the header says.
        unsafe { request.submit(null()) }
    }
}
