//! Version of NCCL that the drop-in reports.

use crate::boundary::CallProgress;
use crate::types::*;
use cinch::Config;
use std::ffi::c_int;

export! {
    /// Stores in `*version` the NCCL version that the drop-in implements. Programs select features by it.
    fn ncclGetVersion | pncclGetVersion(version: *mut c_int) {
        check_out("version", version)?;
        let covered = Config::from_env()?.nccl_version;
        // SAFETY: nccl.h requires of the program that `version` is NULL or writable; `store`
        // refuses NULL.
        unsafe { store("version", version, as_int(covered as usize)?)? };
        Ok(CallProgress::Done)
    }
}

export! {
    /// Has no effect. NCCL deprecates it; logging variables are read once.
    fn ncclResetDebugInit | pncclResetDebugInit() returning () {} else ()
}

/// Has no effect. cinch exports the function because NVIDIA's library exports a function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInitInternal() {}
