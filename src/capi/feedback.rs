//! Residuals of error feedback: storing, restoring, rescaling, forgetting.

use super::error::cinch_result_t;
use super::handle::{self, check_out, cinch_comm_t};
use crate::error::{Error, Result};
use std::ffi::c_void;

/// Copies this rank's residuals of error feedback (`cinch_call_t.feedback`) to `buffer`, to be
/// stored with a checkpoint. `*bytes` becomes their size; with `buffer` NULL that is all that
/// happens. A `capacity` below it is an error, and nothing is copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_feedback_export(
    comm: *mut cinch_comm_t,
    buffer: *mut c_void,
    capacity: usize,
    bytes: *mut usize,
) -> cinch_result_t {
    guard!("cinch_feedback_export", {
        let handle = handle::lookup(comm)?;
        check_out("bytes", bytes)?;
        let exported = handle.comm.export_residuals()?;
        // SAFETY: not NULL, so writable by the documented contract.
        unsafe { bytes.write_unaligned(exported.len()) };
        // SAFETY: NULL or writable for `capacity` bytes, by the documented contract.
        unsafe { copy_out(&exported, buffer, capacity) }
    })
}

/// Puts residuals that `cinch_feedback_export` gave in the place of all that this rank has. They
/// must be of the same rank of as many ranks. Those that the first call of their tensor has no use
/// for, as it has another count, cut, operator or type, are dropped then; the log says so.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_feedback_import(
    comm: *mut cinch_comm_t,
    buffer: *const c_void,
    bytes: usize,
) -> cinch_result_t {
    guard!("cinch_feedback_import", {
        let handle = handle::lookup(comm)?;
        if buffer.is_null() || isize::try_from(bytes).is_err() {
            return Err(Error::invalid_argument(format!(
                "residuals of {bytes} bytes at {buffer:?}"
            )));
        }
        // SAFETY: readable for `bytes` bytes, by the documented contract.
        let stored = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), bytes) };
        handle.comm.import_residuals(stored)
    })
}

/// Multiplies this rank's residuals by `factor`: new over old scale of the loss, where gradients
/// of a scaled loss are summed (`cinch_loss_scaler_t.rescale`).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_feedback_rescale(
    comm: *mut cinch_comm_t,
    factor: f64,
) -> cinch_result_t {
    guard!("cinch_feedback_rescale", {
        handle::lookup(comm)?.comm.rescale_residuals(factor as f32)
    })
}

/// Forgets this rank's residuals of the tensor `feedback`, or of all tensors if it is 0.
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

/// # Safety
/// `buffer` is NULL or writable for `capacity` bytes.
unsafe fn copy_out(exported: &[u8], buffer: *mut c_void, capacity: usize) -> Result<()> {
    if buffer.is_null() {
        return Ok(());
    }
    if capacity < exported.len() {
        return Err(Error::invalid_argument(format!(
            "the residuals have {} bytes, the buffer {capacity}; ask with a NULL buffer first",
            exported.len()
        )));
    }
    // SAFETY: as ours, and the capacity was compared.
    unsafe {
        std::ptr::copy_nonoverlapping(exported.as_ptr(), buffer.cast::<u8>(), exported.len());
    }
    Ok(())
}
