//! Registration of buffers and windows.
//!
//! Both are hints in NCCL and have no effect here: kernels read and write any memory of their GPU. A
//! window is NULL, which NCCL documents as an unsupported window.

use crate::boundary::CallProgress;
use crate::comm;
use crate::types::*;
use cinch::capi::core::handle_table::HandleTable;
use cinch::{Error, Result};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// Handles of registrations, with the address of their communicator.
static REGISTERED: HandleTable<usize> = HandleTable::new("handle", "registration", 0xACC2);

export! {
    /// Registers a buffer, and stores a handle for `ncclCommDeregister` in `*handle`.
    fn ncclCommRegister | pncclCommRegister(comm: ncclComm_t, buff: *mut c_void, size: usize,
        handle: *mut *mut c_void) {
        // SAFETY: nccl.h requires of the program that `handle` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("handle", handle, null_mut())? };
        comm::lookup(comm)?.ready()?;
        check_buffer(buff, size)?;
        let registered = REGISTERED.register(Arc::new(comm.addr()))?;
        // SAFETY: nccl.h requires of the program that `handle` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("handle", handle, registered)? };
        Ok(CallProgress::Done)
    }
}

export! {
    /// Ends the registration `handle`. NULL is ignored.
    fn ncclCommDeregister | pncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) {
        comm::lookup(comm)?;
        if handle.is_null() {
            return Ok(CallProgress::Done);
        }
        if *REGISTERED.lookup(handle)? != comm.addr() {
            return Err(Error::invalid_argument(format!(
                "handle {handle:?} is a registration of another communicator"
            )));
        }
        REGISTERED.remove(handle)?;
        Ok(CallProgress::Done)
    }
}

export! {
    /// Registers a buffer on all ranks. `*win` becomes NULL: calls use the buffer like any other.
    fn ncclCommWindowRegister | pncclCommWindowRegister(comm: ncclComm_t, buff: *mut c_void,
        size: usize, win: *mut ncclWindow_t, winFlags: c_int) {
        // SAFETY: nccl.h requires of the program that `win` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("win", win, null_mut())? };
        comm::lookup(comm)?.ready()?;
        check_buffer(buff, size)?;
        let known = NCCL_WIN_COLL_SYMMETRIC
            | NCCL_WIN_STRICT_ORDERING
            | NCCL_WIN_GIN_ONLY
            | NCCL_WIN_CFT_COUNTED;
        if winFlags & !known != 0 {
            return Err(Error::invalid_argument(format!(
                "winFlags {winFlags:#x} has unknown bits; valid: {known:#x}"
            )));
        }
        Ok(CallProgress::Done)
    }
}

export! {
    /// Ends the registration of a window, which must be NULL.
    fn ncclCommWindowDeregister | pncclCommWindowDeregister(comm: ncclComm_t, win: ncclWindow_t) {
        comm::lookup(comm)?;
        if !win.is_null() {
            return Err(Error::invalid_argument(format!(
                "win {win:?} is no window of ncclCommWindowRegister, which returns NULL"
            )));
        }
        Ok(CallProgress::Done)
    }
}

fn check_buffer(buff: *mut c_void, size: usize) -> Result<()> {
    if buff.is_null() || size == 0 || buff.addr().checked_add(size).is_none() {
        return Err(Error::invalid_argument(format!(
            "{size} bytes at {buff:?} are no buffer"
        )));
    }
    Ok(())
}
