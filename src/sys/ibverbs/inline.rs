//! What `<infiniband/verbs.h>` has as inline functions: calls through the operations of the
//! context that an object belongs to. They are the data path, and leave out nothing of it: no
//! exported function stands behind them.

use super::types::*;
use std::ffi::c_int;

/// What is returned where a provider lacks an operation that all of them have.
const MISSING: c_int = libc::EOPNOTSUPP;

/// Takes up to `into.len()` completions; how many, or a negative number.
///
/// # Safety
/// The queue is alive.
#[inline]
pub unsafe fn poll_cq(queue: *mut IbvCq, into: &mut [IbvWc]) -> c_int {
    // SAFETY: alive by the caller's word, and so is the context that it belongs to; the provider
    // writes at most as many entries as it is told.
    unsafe {
        match (*(*queue).context).ops.poll_cq {
            Some(poll_cq) => poll_cq(queue, into.len() as c_int, into.as_mut_ptr()),
            None => -MISSING,
        }
    }
}

/// CompletionPoller for an event with the next completion; 0, or an error number.
///
/// # Safety
/// As for [`poll_cq`].
#[inline]
pub unsafe fn req_notify_cq(queue: *mut IbvCq) -> c_int {
    // SAFETY: as in `poll_cq`.
    unsafe {
        match (*(*queue).context).ops.req_notify_cq {
            Some(req_notify_cq) => req_notify_cq(queue, 0),
            None => MISSING,
        }
    }
}

/// Hands a list of work to the device; 0, or an error number.
///
/// # Safety
/// The queue pair is alive, the list ends, and so do its pieces' lifetimes: memory that is not
/// inline stays registered until the work is complete.
#[inline]
pub unsafe fn post_send(pair: *mut IbvQp, work: *mut IbvSendWr) -> c_int {
    let mut bad = std::ptr::null_mut();
    // SAFETY: as in `poll_cq`, and by the caller's word.
    unsafe {
        match (*(*pair).context).ops.post_send {
            Some(post_send) => post_send(pair, work, &mut bad),
            None => MISSING,
        }
    }
}

/// Hands room for what comes to the device; 0, or an error number.
///
/// # Safety
/// As for [`post_send`].
#[inline]
pub unsafe fn post_recv(pair: *mut IbvQp, room: *mut IbvRecvWr) -> c_int {
    let mut bad = std::ptr::null_mut();
    // SAFETY: as in `post_send`.
    unsafe {
        match (*(*pair).context).ops.post_recv {
            Some(post_recv) => post_recv(pair, room, &mut bad),
            None => MISSING,
        }
    }
}
