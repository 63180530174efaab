//! Opening the driver's library.

use super::OLDEST_DRIVER;
use super::api::Functions;
use super::types::CuResult;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::loader::last_error;
use std::ffi::{CStr, c_int, c_void};

/// The driver's library, with the functions that are used. It is never closed: the driver keeps
/// threads of its own.
pub struct Loaded {
    functions: Functions,
    library: String,
}

impl Loaded {
    /// Opens `library`, which on Linux is `libcuda.so.1`.
    ///
    /// # Errors
    /// Unsupported if there is no such library, or if it lacks functions: the driver is too old.
    pub fn open(library: &CStr) -> Result<Loaded> {
        let name = library.to_string_lossy().into_owned();
        // SAFETY: the name is a C string; the driver's initialisers are the system's to vouch for.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "no {name}: {}; GPU buffers need NVIDIA's driver",
                    last_error()
                ),
            ));
        }
        let symbol = |name: &CStr| -> *mut c_void {
            // SAFETY: the handle is open and stays so; the name is a C string.
            unsafe { libc::dlsym(handle, name.as_ptr()) }
        };
        // SAFETY: the names in the list are those of the driver API, with its types.
        let functions = unsafe { Functions::find(symbol) }.map_err(|missing| {
            let version = version(symbol(c"cuDriverGetVersion"));
            Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{name} ({version}) is too old for {}; cinch needs the driver of CUDA \
                     {OLDEST_DRIVER} or newer",
                    list(&missing)
                ),
            )
        })?;
        Ok(Loaded {
            functions,
            library: name,
        })
    }

    /// Whether somebody in this process has opened `library` already.
    pub fn is_open(library: &CStr) -> bool {
        let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD;
        // SAFETY: the name is a C string; nothing is loaded, only counted, and given back.
        unsafe {
            let handle = libc::dlopen(library.as_ptr(), flags);
            !handle.is_null() && libc::dlclose(handle) == 0
        }
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(super) fn library(&self) -> &str {
        &self.library
    }
}

/// The version that a driver with missing functions says it has.
fn version(address: *mut c_void) -> String {
    let mut version: c_int = 0;
    if address.is_null() {
        return "of no CUDA version".into();
    }
    // SAFETY: `cuDriverGetVersion` has had this type since CUDA 2.2 and may be called before
    // `cuInit`; it writes one integer.
    let result = unsafe {
        let function: unsafe extern "C" fn(*mut c_int) -> CuResult = std::mem::transmute(address);
        function(&mut version)
    };
    match result {
        CuResult::SUCCESS => format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
        CuResult(code) => format!("whose version is hidden by error {code}"),
    }
}

/// The first few of many names.
fn list(names: &[&str]) -> String {
    const SHOWN: usize = 4;
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more functions", names[..SHOWN].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_is_an_error_that_names_the_library() {
        let error = Loaded::open(c"libcinch-no-such.so.7").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(
            error.message().contains("no libcinch-no-such.so.7"),
            "{error}"
        );
    }

    #[test]
    fn a_library_without_the_functions_is_named_with_them() {
        let error = Loaded::open(c"libc.so.6").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        for word in ["libc.so.6", "cuInit", "more functions", OLDEST_DRIVER] {
            assert!(error.message().contains(word), "{word}: {error}");
        }
    }
}
