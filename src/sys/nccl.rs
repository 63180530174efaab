//! Another collective library with NCCL's interface, opened at run time to be compared with. Never
//! part of a communicator of our own.

use crate::error::{Error, ErrorKind, Result};
use crate::sys::loader::{Library, function_table};
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NcclId(pub [u8; 128]);

/// `ncclComm_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct NcclComm(pub usize);

/// `ncclResult_t`; 0 is success.
pub type NcclResult = c_int;

function_table! {
    /// The functions that every version has, with NCCL's types; streams are `CUstream`, addresses device
    /// addresses.
    pub struct Functions;
    required {
        version = "ncclGetVersion": fn(*mut c_int) -> NcclResult;
        error_string = "ncclGetErrorString": fn(NcclResult) -> *const c_char;
        unique_id = "ncclGetUniqueId": fn(*mut NcclId) -> NcclResult;
        init_rank = "ncclCommInitRank": fn(*mut NcclComm, c_int, NcclId, c_int) -> NcclResult;
        destroy = "ncclCommDestroy": fn(NcclComm) -> NcclResult;
        all_reduce = "ncclAllReduce": fn(u64, u64, usize, c_int, c_int, NcclComm, usize) -> NcclResult;
        all_gather = "ncclAllGather": fn(u64, u64, usize, c_int, NcclComm, usize) -> NcclResult;
        reduce_scatter = "ncclReduceScatter": fn(u64, u64, usize, c_int, c_int, NcclComm, usize) -> NcclResult;
        broadcast = "ncclBroadcast": fn(u64, u64, usize, c_int, c_int, NcclComm, usize) -> NcclResult;
        reduce = "ncclReduce": fn(u64, u64, usize, c_int, c_int, c_int, NcclComm, usize) -> NcclResult;
        send = "ncclSend": fn(u64, usize, c_int, c_int, NcclComm, usize) -> NcclResult;
        recv = "ncclRecv": fn(u64, usize, c_int, c_int, NcclComm, usize) -> NcclResult;
        group_start = "ncclGroupStart": fn() -> NcclResult;
        group_end = "ncclGroupEnd": fn() -> NcclResult;
    }
    optional {}
}

function_table! {
    /// Those of symmetric windows, from version 2.27 on; a window is a pointer.
    #[derive(Clone, Copy)]
    pub struct WindowFunctions;
    required {
        mem_alloc = "ncclMemAlloc": fn(*mut u64, usize) -> NcclResult;
        mem_free = "ncclMemFree": fn(u64) -> NcclResult;
        register = "ncclCommWindowRegister": fn(NcclComm, u64, usize, *mut usize, c_int) -> NcclResult;
        deregister = "ncclCommWindowDeregister": fn(NcclComm, usize) -> NcclResult;
    }
    optional {}
}

/// `NCCL_WIN_COLL_SYMMETRIC`: all ranks use the buffer at the same offset in each call.
pub const WINDOW_SYMMETRIC: c_int = 1;

/// The library. It is never closed: it keeps threads of its own.
pub struct Nccl {
    functions: Functions,
    windows: std::result::Result<WindowFunctions, Vec<&'static str>>,
    path: String,
    version: u32,
}

impl Nccl {
    /// Opens the library at `path`. Its names stay its own.
    ///
    /// # Errors
    /// Unsupported if it cannot be opened or lacks a function.
    pub fn open(path: &Path) -> Result<Nccl> {
        let shown = path.display().to_string();
        let unsupported = |why: String| Error::new(ErrorKind::Unsupported, why);
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| Error::invalid_argument(format!("{shown}: a zero byte in a path")))?;
        let library = Library::open(&name)
            .map_err(|why| unsupported(format!("cannot open {shown}: {why}")))?;
        // SAFETY: the names are those of NCCL's interface, with its types.
        let functions = unsafe { Functions::find(&library) }.map_err(|missing| {
            let missing = missing.join(", ");
            unsupported(format!("{shown} has no {missing}: it is no libnccl.so.2"))
        })?;
        // SAFETY: as above.
        let windows = unsafe { WindowFunctions::find(&library) };
        let mut version: c_int = 0;
        // SAFETY: writes one integer.
        let asked = unsafe { (functions.version)(&mut version) };
        let nccl = Nccl {
            functions,
            windows,
            path: shown,
            version: version.unsigned_abs(),
        };
        nccl.check("ncclGetVersion", asked)?;
        Ok(nccl)
    }

    /// The functions, for whoever keeps their contracts.
    pub fn functions(&self) -> &Functions {
        &self.functions
    }

    /// The functions of symmetric windows, for whoever keeps their contracts.
    ///
    /// # Errors
    /// Unsupported, naming what is missing, if the library is older.
    pub fn windows(&self) -> Result<&WindowFunctions> {
        self.windows.as_ref().map_err(|missing| {
            let missing = missing.join(", ");
            let text = format!("{self:?} has no {missing}: its version has no symmetric windows");
            Error::new(ErrorKind::Unsupported, text)
        })
    }

    /// Its version, as people write it.
    pub fn version(&self) -> String {
        written(self.version)
    }

    /// `Ok` for success, otherwise the error of `function` in the library's words.
    ///
    /// # Errors
    /// System.
    pub fn check(&self, function: &str, result: NcclResult) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        // SAFETY: takes any code; returns NULL or a text that lasts.
        let text = unsafe { (self.functions.error_string)(result) };
        let text = if text.is_null() {
            "no words for it".into()
        } else {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(Error::new(
            ErrorKind::System,
            format!(
                "{function} of {}: {text} ({result}); NCCL_DEBUG=INFO says more",
                self.path
            ),
        ))
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} at {}", self.version(), self.path)
    }
}

/// A version's number as people write it.
fn written(code: u32) -> String {
    // Until 2.8 the number had a digit less for the minor version.
    let (major, minor) = match code {
        0..10000 => (code / 1000, code / 100 % 10),
        _ => (code / 10000, code / 100 % 100),
    };
    format!("{major}.{minor}.{}", code % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_written_as_people_do() {
        for (code, text) in [(22809, "2.28.9"), (21805, "2.18.5"), (2708, "2.7.8")] {
            assert_eq!(written(code), text);
        }
    }

    #[test]
    fn what_is_no_such_library_is_refused() {
        let error = Nccl::open(Path::new("/no/such/libnccl.so.2")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("/no/such/libnccl.so.2"), "{error}");
        let error = Nccl::open(Path::new("libc.so.6")).unwrap_err();
        assert!(error.message().contains("ncclGetVersion"), "{error}");
    }
}
