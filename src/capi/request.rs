//! Requests: calls on host memory, and inits, that return before they have ended.

use super::call::{self, cinch_call_t};
use super::config::{self, cinch_config_t};
use super::core::arguments::{check_out, rank_of, store};
use super::core::handle_table::HandleTable;
use super::error::cinch_result_t;
use super::group;
use super::handle::{self, cinch_comm_t};
use super::id::{self, cinch_unique_id_t};
use super::report::{ReportTarget, cinch_report_t};
use crate::comm::{CallRequest, Communicator, PendingCall, Report, wait_any};
use crate::error::{Error, Result};
use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// A started call that may still run.
///
/// Programs hold pointers to it as opaque handles; they must not be dereferenced.
pub struct cinch_request_t {
    _opaque: [u8; 0],
}

/// A started call, and where its result goes when the program waits for it.
enum StartedCall {
    Collective(CallRequest<Report>, ResultPlace<ReportTarget>),
    Init(
        CallRequest<Communicator>,
        ResultPlace<*mut *mut cinch_comm_t>,
    ),
}

/// An address of the program to which `cinch_request_wait` writes, and nothing else of the library.
struct ResultPlace<T>(T);

// SAFETY: cinch.h requires of the program that the address is writable for the thread that waits, whichever it is.
unsafe impl<T> Send for ResultPlace<T> {}
// SAFETY: threads that share the value do not use the address: the one that waits has removed the request from the
// table, and later lookups fail.
unsafe impl<T> Sync for ResultPlace<T> {}

impl StartedCall {
    fn pending(&self) -> &dyn PendingCall {
        match self {
            StartedCall::Collective(request, _) => request,
            StartedCall::Init(request, _) => request,
        }
    }

    fn is_done(&self) -> Result<bool> {
        match self {
            StartedCall::Collective(request, _) => request.is_done(),
            StartedCall::Init(request, _) => request.is_done(),
        }
    }
}

static REQUESTS: HandleTable<StartedCall> = HandleTable::new("request", "request", 0xC1C5);

/// Starts a call on host memory and returns at once; a thread of the library runs it.
///
/// Buffers must stay valid, and outputs unread, until `cinch_request_wait` has returned. It writes the report to
/// `*report`, which may be NULL. Arguments are checked before this function returns; if it fails, `*request` is
/// NULL and nothing was started.
///
/// The started calls of a communicator run in the order in which they were started. Calls that do not return at
/// once wait for them first, so all ranks may mix both kinds if they make all calls in the same order. A group
/// cannot hold started calls. On a GPU calls return before they have ended by themselves, so there it is
/// `CINCH_ERROR_INVALID_USAGE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_call_start(
    call: *const cinch_call_t,
    report: *mut cinch_report_t,
    request: *mut *mut cinch_request_t,
) -> cinch_result_t {
    guard!("cinch_call_start", {
        // SAFETY: cinch.h requires of the program that `call` and `report` are NULL or structs with valid strings
        // and buffers that stay valid until the request has been waited for, and `request` NULL or writable.
        unsafe {
            store("request", request, std::ptr::null_mut())?;
            group::refuse("a call cannot be started")?;
            let target = ReportTarget::new(report)?;
            let (entry, call, buffers) = call::bind(call)?;
            let started = entry.comm.start(&call, buffers)?;
            let handle = REQUESTS.register(Arc::new(StartedCall::Collective(
                started,
                ResultPlace(target),
            )))?;
            store("request", request, handle)
        }
    })
}

/// Starts to create a communicator, as `cinch_comm_init` does, and returns at once.
///
/// `cinch_request_wait` stores the communicator in `*comm`, which is NULL until then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_init_start(
    id: *const cinch_unique_id_t,
    rank: c_int,
    nranks: c_int,
    config: *const cinch_config_t,
    comm: *mut *mut cinch_comm_t,
    request: *mut *mut cinch_request_t,
) -> cinch_result_t {
    guard!("cinch_comm_init_start", {
        // SAFETY: cinch.h requires of the program that inputs are NULL or readable, and outputs NULL or writable;
        // `comm` until the request has been waited for.
        unsafe {
            store("request", request, std::ptr::null_mut())?;
            store("comm", comm, std::ptr::null_mut())?;
            group::refuse("a communicator cannot be created")?;
            let id = id::read(id)?;
            let config = config::read(config)?;
            let (rank, nranks) = (rank_of("rank", rank)?, rank_of("nranks", nranks)?);
            let started = Communicator::init_start(&id, rank, nranks, config)?;
            let handle =
                REQUESTS.register(Arc::new(StartedCall::Init(started, ResultPlace(comm))))?;
            store("request", request, handle)
        }
    })
}

/// Stores 1 in `*done` if the call has ended, else 0. Does not wait. The request stays valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_request_test(
    request: *const cinch_request_t,
    done: *mut c_int,
) -> cinch_result_t {
    guard!("cinch_request_test", {
        check_out("done", done)?;
        let is_done = REQUESTS.lookup(request)?.is_done()?;
        // SAFETY: cinch.h requires of the program that `done` is NULL or writable; `store` refuses NULL.
        unsafe { store("done", done, c_int::from(is_done)) }
    })
}

/// Waits until the call has ended, and returns its result. The request is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_request_wait(request: *mut cinch_request_t) -> cinch_result_t {
    guard!("cinch_request_wait", {
        REQUESTS.lookup(request)?.is_done()?;
        match &*REQUESTS.remove(request)? {
            StartedCall::Collective(request, target) => target.0.fill(&request.take()?),
            StartedCall::Init(request, comm) => {
                let handle = handle::register(request.take()?)?;
                // SAFETY: `cinch_comm_init_start` checked `comm`, which its caller keeps writable until now.
                unsafe { store("comm", comm.0, handle)? }
            }
        }
        Ok(())
    })
}

/// Waits until one of `count` calls has ended, and stores its index in `*index`; if several have, it is the first.
///
/// The list may contain NULL, which is passed over, but must contain a request. All requests stay valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_request_wait_any(
    requests: *const *mut cinch_request_t,
    count: c_int,
    index: *mut c_int,
) -> cinch_result_t {
    guard!("cinch_request_wait_any", {
        check_out("index", index)?;
        if count < 0 || (count > 0 && requests.is_null()) {
            return Err(Error::invalid_argument(format!(
                "requests has {count} requests at {requests:?}: a list has 1 or more requests at an address"
            )));
        }
        let mut calls = Vec::new();
        for at in 0..count {
            // SAFETY: cinch.h requires of the program that `requests` has `count` pointers.
            let request = unsafe { requests.add(at as usize).read_unaligned() };
            if !request.is_null() {
                calls.push((at, REQUESTS.lookup(request)?));
            }
        }
        let pending: Vec<&dyn PendingCall> = calls.iter().map(|(_, call)| call.pending()).collect();
        let (first, _) = calls[wait_any(&pending)?];
        // SAFETY: cinch.h requires of the program that `index` is NULL or writable; `store` refuses NULL.
        unsafe { store("index", index, first) }
    })
}

/// Stores a descriptor in `*descriptor` that is readable once the call has ended, for `poll` and its like.
///
/// The program must neither read nor close it; `cinch_request_wait` closes it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_request_descriptor(
    request: *mut cinch_request_t,
    descriptor: *mut c_int,
) -> cinch_result_t {
    guard!("cinch_request_descriptor", {
        check_out("descriptor", descriptor)?;
        let entry = REQUESTS.lookup(request)?;
        let number = match &*entry {
            StartedCall::Collective(request, _) => request.descriptor()?.as_raw_fd(),
            StartedCall::Init(request, _) => request.descriptor()?.as_raw_fd(),
        };
        // SAFETY: cinch.h requires of the program that `descriptor` is NULL or writable; `store` refuses NULL.
        unsafe { store("descriptor", descriptor, number) }
    })
}
