//! The inline functions of `<infiniband/verbs.h>`, which call through the operation table of an
//! object's context. libibverbs does not export them, and the data path uses no other functions.

use super::types::*;
use std::ffi::c_int;

/// Error number that is returned if a provider lacks an operation. In practice every provider has
/// all of them.
const MISSING: c_int = libc::EOPNOTSUPP;

/// Polls up to `into.len()` completions. Returns their number, or a negative number.
///
/// # Safety
/// The completion queue has not been destroyed.
#[inline]
pub unsafe fn poll_cq(queue: *mut IbvCq, into: &mut [IbvWc]) -> c_int {
    // SAFETY: the caller keeps the queue, which keeps its context. The provider writes at most the
    // given number of entries.
    unsafe {
        match (*(*queue).context).ops.poll_cq {
            Some(poll_cq) => poll_cq(queue, into.len() as c_int, into.as_mut_ptr()),
            None => -MISSING,
        }
    }
}

/// Requests an event for the next completion. Returns 0 or an error number.
///
/// # Safety
/// The completion queue has not been destroyed.
#[inline]
pub unsafe fn req_notify_cq(queue: *mut IbvCq) -> c_int {
    // SAFETY: the caller keeps the queue, which keeps its context.
    unsafe {
        match (*(*queue).context).ops.req_notify_cq {
            Some(req_notify_cq) => req_notify_cq(queue, 0),
            None => MISSING,
        }
    }
}

/// Posts a list of send work requests. Returns 0 or an error number.
///
/// # Safety
/// The queue pair has not been destroyed, and the list ends with a null pointer. Its requests and
/// their pieces are readable; memory that is not inline stays registered until the work is
/// complete.
#[inline]
pub unsafe fn post_send(pair: *mut IbvQp, work: *mut IbvSendWr) -> c_int {
    let mut bad = std::ptr::null_mut();
    // SAFETY: the caller keeps the queue pair, which keeps its context, and the list.
    unsafe {
        match (*(*pair).context).ops.post_send {
            Some(post_send) => post_send(pair, work, &mut bad),
            None => MISSING,
        }
    }
}

/// Posts a list of receive work requests. Returns 0 or an error number.
///
/// # Safety
/// See [`post_send`].
#[inline]
pub unsafe fn post_recv(pair: *mut IbvQp, work: *mut IbvRecvWr) -> c_int {
    let mut bad = std::ptr::null_mut();
    // SAFETY: the caller keeps the queue pair, which keeps its context, and the list.
    unsafe {
        match (*(*pair).context).ops.post_recv {
            Some(post_recv) => post_recv(pair, work, &mut bad),
            None => MISSING,
        }
    }
}
