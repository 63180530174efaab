//! Opens the management library of the driver.

use super::api::Functions;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::loader::Library;
use std::ffi::CStr;

/// The management library, with the functions that this library calls.
pub struct Loaded {
    functions: Functions,
    library: Library,
}

impl Loaded {
    /// File name of the library on Linux.
    pub const LIBRARY: &CStr = c"libnvidia-ml.so.1";

    /// Opens `library`.
    ///
    /// # Errors
    /// Unsupported if the library is missing, or if it lacks functions because the driver is too old.
    pub fn open(library: &CStr) -> Result<Loaded> {
        let unsupported = |text| Error::new(ErrorKind::Unsupported, text);
        let library = Library::open(library).map_err(|why| {
            let name = library.to_string_lossy();
            unsupported(format!("no {name}: {why}; NVLinks are unknown without it"))
        })?;
        // SAFETY: the list in `api` has names and types of `nvml.h`.
        let functions = unsafe { Functions::find(&library) }.map_err(|missing| {
            let (name, missing) = (library.name(), missing.join(", "));
            unsupported(format!(
                "{name} lacks {missing}; NVLinks are unknown without a newer driver"
            ))
        })?;
        Ok(Loaded { functions, library })
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(super) fn library(&self) -> &Library {
        &self.library
    }
}
