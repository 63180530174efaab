//! What version the drop-in says it is.

use crate::boundary::CallProgress;
use crate::types::*;
use cinch::Config;
use std::ffi::c_int;

export! {
    /// The NCCL version whose behaviour is covered, to `*version`. Programs choose features by it.
    fn ncclGetVersion | pncclGetVersion(version: *mut c_int) {
        check_out("version", version)?;
        let covered = Config::from_env()?.nccl_version;
        // SAFETY: not NULL, so writable.
        unsafe { store("version", version, as_int(covered as usize)?)? };
        Ok(CallProgress::Done)
    }
}

export! {
    /// Reads logging variables again. Deprecated, and without effect: they are read once.
    fn ncclResetDebugInit | pncclResetDebugInit() returning () {} else ()
}

/// A name that NVIDIA's library exports beside the above. Without effect.
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInitInternal() {}
