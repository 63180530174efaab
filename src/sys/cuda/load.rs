//! Opens the driver's library.

use super::OLDEST_DRIVER;
use super::api::Functions;
use super::types::CuResult;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::loader::Library;
use std::ffi::{CStr, c_int, c_void};

/// The driver's library, with the functions that this library calls.
pub struct Loaded {
    functions: Functions,
    library: Library,
}

impl Loaded {
    /// Opens `library`, which on Linux is `libcuda.so.1`.
    ///
    /// # Errors
    /// Unsupported if the library is missing, or if it lacks functions because the driver is too old.
    pub fn open(library: &CStr) -> Result<Loaded> {
        let unsupported = |text| Error::new(ErrorKind::Unsupported, text);
        let library = Library::open(library).map_err(|why| {
            let name = library.to_string_lossy();
            unsupported(format!(
                "no {name}: {why}; GPU buffers need NVIDIA's driver"
            ))
        })?;
        // SAFETY: the list in `api` names functions of the driver API, and the compiler compares its types
        // with cudarc's.
        let functions = unsafe { Functions::find(&library) }.map_err(|missing| {
            unsupported(format!(
                "{} ({}) is too old for {}; cinch needs the driver of CUDA {OLDEST_DRIVER} or newer",
                library.name(),
                version(library.symbol(c"cuDriverGetVersion")),
                list(&missing)
            ))
        })?;
        Ok(Loaded { functions, library })
    }

    /// Returns whether this process has opened `library` already.
    pub fn is_open(library: &CStr) -> bool {
        Library::is_open(library)
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(super) fn library(&self) -> &Library {
        &self.library
    }
}

/// Returns the version that a driver with missing functions reports.
fn version(address: Option<*mut c_void>) -> String {
    let mut version: c_int = 0;
    let Some(address) = address else {
        return "of no CUDA version".into();
    };
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

/// Lists the first few of many names.
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
    fn missing_library_is_an_error_that_names_it() {
        let error = Loaded::open(c"libcinch-no-such.so.7").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(
            error.message().contains("no libcinch-no-such.so.7"),
            "{error}"
        );
    }

    #[test]
    fn library_without_functions_is_an_error_that_names_them() {
        let error = Loaded::open(c"libc.so.6").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        for word in ["libc.so.6", "cuInit", "more functions", OLDEST_DRIVER] {
            assert!(error.message().contains(word), "{word}: {error}");
        }
    }
}
