//! Loads a library with NCCL's interface at run time, for comparison with cinch.

use cinch::{Error, ErrorKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;

/// Defines a struct of C function pointers. Its `find` looks all of them up in a library.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident {
        $($name:ident = $symbol:literal: fn($($type:ty),*) -> $result:ty;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $table {
            $(pub $name: unsafe extern "C" fn($($type),*) -> $result,)*
        }

        impl $table {
            /// Looks up every function; `Err` lists the missing names.
            ///
            /// # Safety
            /// The caller never closes `library`. Each listed symbol of it must be a C function of
            /// the listed type.
            unsafe fn find(library: &Library) -> std::result::Result<$table, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the caller of `find` guarantees the symbol's type.
                    let $name = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                    if $name.is_err() {
                        missing.push($symbol);
                    }
                )*
                match ($($name,)*) {
                    ($(Ok($name),)*) => Ok($table { $($name: *$name,)* }),
                    _ => Err(missing),
                }
            }
        }
    };
}

/// Unique id of an NCCL communicator, with the layout of `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NcclId(pub [u8; 128]);

/// Handle of an NCCL communicator: the pointer `ncclComm_t` as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct NcclComm(pub usize);

/// `ncclResult_t`; 0 is success.
pub type NcclResult = c_int;

functions! {
    /// Functions that every NCCL version has, with NCCL's types. Streams are `CUstream`; buffer
    /// addresses are device addresses.
    Functions {
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
}

functions! {
    /// Functions of symmetric windows, from NCCL 2.27 on. A window handle is a pointer.
    WindowFunctions {
        mem_alloc = "ncclMemAlloc": fn(*mut u64, usize) -> NcclResult;
        mem_free = "ncclMemFree": fn(u64) -> NcclResult;
        register = "ncclCommWindowRegister": fn(NcclComm, u64, usize, *mut usize, c_int) -> NcclResult;
        deregister = "ncclCommWindowDeregister": fn(NcclComm, usize) -> NcclResult;
    }
}

/// `NCCL_WIN_COLL_SYMMETRIC`: all ranks use the buffer at the same offset in each call.
pub const WINDOW_SYMMETRIC: c_int = 1;

/// A loaded NCCL library. It is never closed, because it runs threads of its own.
pub struct Nccl {
    functions: Functions,
    windows: std::result::Result<WindowFunctions, Vec<&'static str>>,
    path: String,
    version: u32,
}

impl Nccl {
    /// Loads the library at `path` with `RTLD_LOCAL`, so that its symbols do not replace others.
    ///
    /// # Errors
    /// Returns an unsupported error if the library cannot be opened or lacks a function.
    pub fn open(path: &Path) -> Result<Nccl> {
        let shown = path.display().to_string();
        let unsupported = |why: String| Error::new(ErrorKind::Unsupported, why);
        // SAFETY: the user chose the file; its initialisers run as those of any loaded library.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|why| unsupported(format!("cannot open {shown}: {why}")))?;
        let library = ManuallyDrop::new(library);
        // SAFETY: `ManuallyDrop` keeps the library open; the names are NCCL's, with NCCL's types.
        let functions = unsafe { Functions::find(&library) }.map_err(|missing| {
            let missing = missing.join(", ");
            unsupported(format!("{shown} has no {missing}: it is no libnccl.so.2"))
        })?;
        // SAFETY: `ManuallyDrop` keeps the library open; the names are NCCL's, with NCCL's types.
        let windows = unsafe { WindowFunctions::find(&library) };
        let mut version: c_int = 0;
        // SAFETY: `version` is a local that outlives the call, and `ncclGetVersion` writes only
        // this integer.
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

    /// Returns the function table. Callers keep NCCL's contract of each function.
    pub fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Returns the functions of symmetric windows. Callers keep NCCL's contract of each function.
    ///
    /// # Errors
    /// Returns an unsupported error that names the missing functions if the library is older.
    pub fn windows(&self) -> Result<&WindowFunctions> {
        self.windows.as_ref().map_err(|missing| {
            let missing = missing.join(", ");
            let text = format!("{self:?} has no {missing}: its version has no symmetric windows");
            Error::new(ErrorKind::Unsupported, text)
        })
    }

    /// Returns the version as `major.minor.patch`.
    pub fn version(&self) -> String {
        written(self.version)
    }

    /// Turns a failed result of `function` into an error with NCCL's own error text.
    ///
    /// # Errors
    /// Returns a system error.
    pub fn check(&self, function: &str, result: NcclResult) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        // SAFETY: `ncclGetErrorString` takes any code and returns NULL or a static C string.
        let text = unsafe { (self.functions.error_string)(result) };
        let text = if text.is_null() {
            "no description".into()
        } else {
            // SAFETY: a pointer other than NULL is a static C string of the library.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(Error::new(
            ErrorKind::System,
            format!(
                "{function} of {}: {text} ({result}); NCCL_DEBUG=INFO shows more",
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

/// Formats NCCL's version code as `major.minor.patch`.
fn written(code: u32) -> String {
    // Up to NCCL 2.8 the version code had one digit less for the minor version.
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
    fn versions_are_formatted_with_dots() {
        for (code, text) in [(22809, "2.28.9"), (21805, "2.18.5"), (2708, "2.7.8")] {
            assert_eq!(written(code), text);
        }
    }

    #[test]
    fn files_that_are_no_nccl_library_are_refused() {
        let error = Nccl::open(Path::new("/no/such/libnccl.so.2")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("/no/such/libnccl.so.2"), "{error}");
        let error = Nccl::open(Path::new("libc.so.6")).unwrap_err();
        assert!(error.message().contains("ncclGetVersion"), "{error}");
    }
}
