//! Texts about a communicator and about how a call would run.

use super::call::{self, cinch_call_t};
use super::core::arguments::{check_out, copy_out, store};
use super::error::cinch_result_t;
use super::handle::{self, cinch_comm_t};
use crate::error::Result;
use std::ffi::c_char;

/// Copies the name of `comm` to `buffer` with a NUL behind it, and stores its size with the NUL in `*bytes`. The
/// name is that of `cinch_config_t.name`; empty if it has none.
///
/// With `buffer` NULL only the size is stored. If `capacity` is smaller than the size, the call fails and copies
/// nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_name(
    comm: *const cinch_comm_t,
    buffer: *mut c_char,
    capacity: usize,
    bytes: *mut usize,
) -> cinch_result_t {
    guard!("cinch_comm_name", {
        check_out("bytes", bytes)?;
        let entry = handle::lookup(comm)?;
        // SAFETY: cinch.h requires of the program that `bytes` is NULL or writable, and `buffer` NULL or writable for
        // `capacity` bytes.
        unsafe {
            copy_text(
                "characters of the name",
                entry.comm.name(),
                (buffer, capacity),
                bytes,
            )
        }
    })
}

/// Copies a sentence to `buffer`, with a NUL behind it, that names the codecs of calls on `comm` that set none, the
/// calls that they are for, and the setting that decided it. Stores its size with the NUL in `*bytes`.
///
/// With `buffer` NULL only the size is stored. If `capacity` is smaller than the size, the call fails and copies
/// nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_comm_codec_policy(
    comm: *const cinch_comm_t,
    buffer: *mut c_char,
    capacity: usize,
    bytes: *mut usize,
) -> cinch_result_t {
    guard!("cinch_comm_codec_policy", {
        check_out("bytes", bytes)?;
        let policy = handle::lookup(comm)?.comm.codec_policy().to_string();
        // SAFETY: cinch.h requires of the program that `bytes` is NULL or writable, and `buffer` NULL or writable for
        // `capacity` bytes.
        unsafe {
            copy_text(
                "characters of the policy",
                &policy,
                (buffer, capacity),
                bytes,
            )
        }
    })
}

/// Copies a table to `buffer`, with a NUL behind it, of the ways in which `call` could run, with the predicted time of
/// each and the one that is chosen. Stores its size with the NUL in `*bytes`. Runs nothing and moves nothing: the
/// call's buffers and stream are ignored.
///
/// With `buffer` NULL only the size is stored. If `capacity` is smaller than the size, the call fails and copies
/// nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_call_explain(
    call: *const cinch_call_t,
    buffer: *mut c_char,
    capacity: usize,
    bytes: *mut usize,
) -> cinch_result_t {
    guard!("cinch_call_explain", {
        check_out("bytes", bytes)?;
        // SAFETY: cinch.h requires of the program that `call` is NULL or a struct with valid strings.
        let (entry, call) = unsafe { call::describe(call)? };
        let text = entry.comm.explain(&call)?;
        // SAFETY: cinch.h requires of the program that `bytes` is NULL or writable, and `buffer` NULL or writable for
        // `capacity` bytes.
        unsafe {
            copy_text(
                "characters of the explanation",
                &text,
                (buffer, capacity),
                bytes,
            )
        }
    })
}

/// Copies `text` with a NUL behind it, and stores its size. `what` names its bytes in errors.
///
/// # Errors
/// Invalid argument if `bytes` is NULL or the buffer is too small.
///
/// # Safety
/// `bytes` is NULL or writable, and the buffer NULL or writable for its capacity.
pub(super) unsafe fn copy_text(
    what: &str,
    text: &str,
    (buffer, capacity): (*mut c_char, usize),
    bytes: *mut usize,
) -> Result<()> {
    let text = [text.as_bytes(), &[0]].concat();
    // SAFETY: the caller passes `bytes` and `buffer` as NULL or writable.
    unsafe {
        store("bytes", bytes, text.len())?;
        copy_out(what, &text, buffer.cast(), capacity)
    }
}
