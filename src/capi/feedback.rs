//! Functions that export, import, rescale and forget the residuals of error feedback.

use super::core::arguments::{check_out, copy_out, store};
use super::error::cinch_result_t;
use super::handle::{self, cinch_comm_t};
use crate::error::Error;
use std::ffi::c_void;

/// Copies this rank's residuals of error feedback (`cinch_call_t.feedback`) to `buffer`, for a
/// checkpoint, and stores their size in `*bytes`.
///
/// With `buffer` NULL only the size is stored. If `capacity` is smaller than the size, the call fails
/// and copies nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_feedback_export(
    comm: *mut cinch_comm_t,
    buffer: *mut c_void,
    capacity: usize,
    bytes: *mut usize,
) -> cinch_result_t {
    guard!("cinch_feedback_export", {
        let entry = handle::lookup(comm)?;
        check_out("bytes", bytes)?;
        let exported = entry.comm.export_residuals()?;
        // SAFETY: cinch.h requires of the program that `bytes` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("bytes", bytes, exported.len())? };
        // SAFETY: cinch.h requires of the program that `buffer` is NULL or writable for `capacity`
        // bytes.
        unsafe { copy_out("residuals", &exported, buffer, capacity) }
    })
}

/// Replaces all residuals of this rank by those that `cinch_feedback_export` returned on the same rank
/// of a communicator with as many ranks.
///
/// The first call of a tensor drops residuals that do not fit its count, chunks, operator, type, codec or
/// algorithm; the log reports them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_feedback_import(
    comm: *mut cinch_comm_t,
    buffer: *const c_void,
    bytes: usize,
) -> cinch_result_t {
    guard!("cinch_feedback_import", {
        let entry = handle::lookup(comm)?;
        if buffer.is_null() || isize::try_from(bytes).is_err() {
            return Err(Error::invalid_argument(format!(
                "{bytes} bytes at {buffer:?} are no buffer of residuals"
            )));
        }
        // SAFETY: cinch.h requires of the program that `buffer` is readable for `bytes` bytes.
        let stored = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), bytes) };
        entry.comm.import_residuals(stored)
    })
}

/// Multiplies this rank's residuals by `factor`.
///
/// Call it when the scale of a scaled loss changes; `factor` is the new scale divided by the old one
/// (`cinch_loss_scaler_t.rescale`).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_feedback_rescale(
    comm: *mut cinch_comm_t,
    factor: f64,
) -> cinch_result_t {
    guard!("cinch_feedback_rescale", {
        handle::lookup(comm)?.comm.rescale_residuals(factor as f32)
    })
}

/// Forgets this rank's residuals of the tensor with the id `feedback`, or of all tensors if it is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_feedback_forget(
    comm: *mut cinch_comm_t,
    feedback: u64,
) -> cinch_result_t {
    guard!("cinch_feedback_forget", {
        let tensor = (feedback != 0).then_some(feedback);
        handle::lookup(comm)?.comm.forget_residuals(tensor)
    })
}
