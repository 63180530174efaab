//! Functions that query a communicator.

use crate::boundary::CallProgress;
use crate::types::*;
use crate::{comm, error};
use cinch::Error;
use std::ffi::c_int;

export! {
    /// Stores the number of ranks in `*count`.
    fn ncclCommCount | pncclCommCount(comm: ncclComm_t, count: *mut c_int) {
        check_out("count", count)?;
        let nranks = comm::lookup(comm)?.connection()?.nranks();
        // SAFETY: nccl.h requires of the program that `count` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("count", count, as_int(nranks)?)? };
        Ok(CallProgress::Done)
    }
}

export! {
    /// Stores this rank in `*rank`.
    fn ncclCommUserRank | pncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) {
        check_out("rank", rank)?;
        let own = comm::lookup(comm)?.connection()?.rank();
        // SAFETY: nccl.h requires of the program that `rank` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("rank", rank, as_int(own)?)? };
        Ok(CallProgress::Done)
    }
}

export! {
    /// Stores the number of the communicator's GPU in `*device`.
    fn ncclCommCuDevice | pncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) {
        check_out("device", device)?;
        let communicator = comm::lookup(comm)?.connection()?;
        let context = communicator.gpu().ok_or_else(|| {
            Error::invalid_usage("the communicator works on host memory (CINCH_DEVICE=host)")
        })?;
        let ordinal = as_int(context.device().ordinal() as usize)?;
        // SAFETY: nccl.h requires of the program that `device` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("device", device, ordinal)? };
        Ok(CallProgress::Done)
    }
}

export! {
    /// Stores the state of the communicator in `*asyncError`: its failure, or `ncclInProgress` while a call
    /// runs that returned `ncclInProgress`. Does not wait.
    fn ncclCommGetAsyncError | pncclCommGetAsyncError(comm: ncclComm_t,
        asyncError: *mut ncclResult_t) {
        check_out("asyncError", asyncError)?;
        let comm = comm::lookup(comm)?;
        let found = if comm.is_in_progress() {
            ncclInProgress
        } else {
            // Another thread may have received the error first. remember() makes the error the last error of
            // this thread as well.
            comm.failure().map_or(ncclSuccess, |error| error::remember(&error))
        };
        // SAFETY: nccl.h requires of the program that `asyncError` is NULL or writable; `store`
        // refuses NULL.
        unsafe { store("asyncError", asyncError, found)? };
        Ok(CallProgress::Done)
    }
}

export! {
    /// Stores the bytes of GPU memory that the communicator holds in `*value`. They cannot be suspended.
    fn ncclCommMemStats | pncclCommMemStats(comm: ncclComm_t, stat: c_int, value: *mut u64) {
        check_out("value", value)?;
        let held = comm::lookup(comm)?.connection()?.info().buffer_bytes as u64;
        let found = match stat {
            ncclStatGpuMemSuspend | ncclStatGpuMemSuspended => 0,
            ncclStatGpuMemPersist | ncclStatGpuMemTotal => held,
            _ => {
                return Err(Error::invalid_argument(format!(
                    "stat {stat} is unknown; valid: 0 (ncclStatGpuMemSuspend) to \
                     {ncclStatGpuMemTotal} (ncclStatGpuMemTotal)"
                )));
            }
        };
        // SAFETY: nccl.h requires of the program that `value` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("value", value, found)? };
        Ok(CallProgress::Done)
    }
}
