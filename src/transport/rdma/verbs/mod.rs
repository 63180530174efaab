//! Owners of libibverbs objects. A child holds an `Arc` of its parent, so drop order is the order that
//! devices demand.

mod device;
mod memory;
mod pair;
mod queue;

pub(super) use device::Device;
pub(super) use memory::{Domain, Registered};
pub(super) use pair::{Pair, Route, Write};
pub(super) use queue::{Channel, Queue};

use crate::error::{Error, Result};
use crate::sys::log::{self, Level};
use std::ffi::c_int;
use std::io;
use std::os::fd::RawFd;

/// Implements `Send` and `Sync`. libibverbs is thread-safe but for rdma-core's documented exceptions, which
/// are behind `&mut` or a lock.
macro_rules! may_cross_threads {
    ($($name:ident)*) => {$(
        // SAFETY: verbs are thread-safe by specification (IBA 11.1, ibv_* manual pages).
        unsafe impl Send for $name {}
        // SAFETY: verbs are thread-safe by specification (IBA 11.1, ibv_* manual pages).
        unsafe impl Sync for $name {}
    )*};
}

may_cross_threads!(Device Domain Registered Channel Queue Pair);

/// Returns the result of a function that returns a pointer: null is an error.
fn made<T>(raw: *mut T, what: impl FnOnce() -> String) -> Result<*mut T> {
    match raw.is_null() {
        false => Ok(raw),
        true => Err(Error::system(what(), io::Error::last_os_error())),
    }
}

/// Returns the result of a function that returns an error number, or -1 with `errno`.
fn done(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        code => Err(io::Error::from_raw_os_error(code.abs())),
    }
}

/// Logs the failure of a destructor.
fn destroyed(what: &str, code: c_int) {
    if let Err(error) = done(code) {
        log::line(
            Level::Warn,
            format_args!("an RDMA {what} cannot be given back: {error}"),
        );
    }
}

/// Returns whether a descriptor can be read without waiting.
fn readable(fd: RawFd) -> bool {
    let mut interest = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the pointer is to one entry, a local variable.
    unsafe { libc::poll(&mut interest, 1, 0) == 1 && interest.revents & libc::POLLIN != 0 }
}
