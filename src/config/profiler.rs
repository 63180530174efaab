//! The profiler that reads NVTX ranges of this process.

use std::ffi::OsString;

/// Variable by which a profiler names the library that it injects.
pub const NVTX_VARIABLE: &str = "NVTX_INJECTION64_PATH";

/// Returns the path of the library that a profiler injects, if there is a profiler.
pub fn nvtx_library() -> Option<OsString> {
    std::env::var_os(NVTX_VARIABLE)
}
