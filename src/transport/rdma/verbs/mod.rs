//! Objects of libibverbs that give themselves back. A child holds its parent, so that they are
//! destroyed in the order that devices demand.

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

/// Objects of the library may be used from any thread; what may not be used by two at once is
/// behind `&mut` or a lock, or safe by libibverbs' own (all but rdma-core's documented exceptions).
macro_rules! may_cross_threads {
    ($($name:ident)*) => {$(
        // SAFETY: verbs are thread-safe by specification (IBA 11.1, ibv_* manual pages).
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

may_cross_threads!(Device Domain Registered Channel Queue Pair);

/// What a function that returns a pointer said.
fn made<T>(raw: *mut T, what: impl FnOnce() -> String) -> Result<*mut T> {
    match raw.is_null() {
        false => Ok(raw),
        true => Err(Error::system(what(), io::Error::last_os_error())),
    }
}

/// What a function that returns a number said: an error number, or -1 with the thread's.
fn done(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        code => Err(io::Error::from_raw_os_error(code.abs())),
    }
}

/// A destructor must not fail; that it does is said.
fn gone(what: &str, code: c_int) {
    if let Err(error) = done(code) {
        log::line(
            Level::Warn,
            format_args!("an RDMA {what} cannot be given back: {error}"),
        );
    }
}

/// Whether a descriptor can be read without waiting.
fn readable(fd: RawFd) -> bool {
    let mut interest = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry.
    unsafe { libc::poll(&mut interest, 1, 0) == 1 && interest.revents & libc::POLLIN != 0 }
}
