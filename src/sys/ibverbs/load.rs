//! Opens the system's libibverbs and finds its functions.

use super::OLDEST_LIBRARY;
use super::api::Functions;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::loader::Library;
use std::ffi::CStr;

/// The system's library with its functions.
pub struct Loaded {
    functions: Functions,
    library: Library,
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Loaded").field(&self.library.name()).finish()
    }
}

impl Loaded {
    /// File name of the library in all distributions.
    pub const LIBRARY: &CStr = c"libibverbs.so.1";

    /// Opens `library`.
    ///
    /// # Errors
    /// Unsupported if there is no such library, or if it is too old and lacks functions.
    pub fn open(library: &CStr) -> Result<Loaded> {
        let unsupported = |text| Error::new(ErrorKind::Unsupported, text);
        let library = Library::open(library).map_err(|why| {
            let name = library.to_string_lossy();
            unsupported(format!(
                "no {name}: {why}; RDMA needs rdma-core (packages libibverbs1 and \
                 ibverbs-providers, or rdma-core)"
            ))
        })?;
        // SAFETY: the names and types in the table are libibverbs'. Of functions with several
        // versions `dlsym` returns the default, which is IBVERBS_1.1 for the oldest.
        let functions = unsafe { Functions::find(&library) }.map_err(|missing| {
            unsupported(format!(
                "{} lacks {}; RDMA needs the library of rdma-core {OLDEST_LIBRARY} or newer",
                library.name(),
                missing.join(", ")
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

#[cfg(test)]
mod tests {
    use super::super::Api;
    use super::*;

    #[test]
    fn missing_library_is_an_error_that_names_it() {
        let error = Loaded::open(c"libcinch-no-such.so.7").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        for word in ["no libcinch-no-such.so.7", "rdma-core"] {
            assert!(error.message().contains(word), "{word}: {error}");
        }
    }

    #[test]
    fn library_without_functions_is_an_error_that_names_them() {
        let error = Loaded::open(c"libc.so.6").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        for word in ["libc.so.6", "ibv_open_device", OLDEST_LIBRARY] {
            assert!(error.message().contains(word), "{word}: {error}");
        }
    }

    #[test]
    fn system_library_has_every_function_and_lists_devices() {
        let loaded = match Loaded::open(Loaded::LIBRARY) {
            Ok(loaded) => loaded,
            Err(error) => return println!("SKIPPED: {error}"),
        };
        let mut count = -1;
        // SAFETY: `count` is writable, and the list is not used after it is freed.
        unsafe {
            let list = loaded.get_device_list(&mut count);
            if list.is_null() {
                return println!("SKIPPED: the kernel has no verbs");
            }
            for index in 0..count as usize {
                assert!(!(**list.add(index)).name().is_empty());
            }
            loaded.free_device_list(list);
        }
        println!("{count} devices");
    }
}
