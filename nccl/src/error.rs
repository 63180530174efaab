//! Result codes, and the sentence of a thread's last error.

use crate::comm;
use crate::types::*;
use cinch::{Error, ErrorKind};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

export! {
    /// A code in words; never NULL, also for numbers that are no code. Static.
    fn ncclGetErrorString | pncclGetErrorString(result: ncclResult_t) returning *const c_char {
        words(result).as_ptr()
    } else c"internal error".as_ptr()
}

export! {
    /// What went wrong in this thread's last call that failed; if none has, why `comm`, which may
    /// be NULL, has failed. Never NULL. Lives until the thread's next failure or question.
    fn ncclGetLastError | pncclGetLastError(comm: ncclComm_t) returning *const c_char {
        let none = LAST.try_with(|last| last.borrow().is_empty()).unwrap_or(false);
        if none
            && let Ok(comm) = comm::lookup(comm)
            && let Some(error) = comm.failure()
        {
            remember(&error);
        }
        LAST.try_with(|last| last.borrow().as_ptr())
            // The thread is ending and its storage is gone.
            .unwrap_or(c"".as_ptr())
    } else c"".as_ptr()
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Makes `error` the thread's last one, and returns its code.
pub(crate) fn remember(error: &Error) -> ncclResult_t {
    let sentence = CString::new(error.to_string().replace('\0', "\\0")).unwrap_or_default();
    let _ = LAST.try_with(|last| *last.borrow_mut() = sentence);
    code(error)
}

/// The code of an error.
pub(crate) fn code(error: &Error) -> ncclResult_t {
    match error.kind() {
        ErrorKind::InvalidArgument => ncclInvalidArgument,
        // What a call asks for and this build or machine lacks, and what ranks disagree about, is
        // wrong usage in NCCL's words.
        ErrorKind::InvalidUsage | ErrorKind::Unsupported | ErrorKind::Mismatch => ncclInvalidUsage,
        ErrorKind::System => ncclSystemError,
        // `ncclTimeout` is newer than most programs, which take an unknown code for a defect. A
        // deadline passes where a peer does not come, and an abort is a peer's, or one's own.
        ErrorKind::Remote | ErrorKind::Timeout | ErrorKind::Aborted => ncclRemoteError,
        _ => ncclInternalError,
    }
}

fn words(result: ncclResult_t) -> &'static CStr {
    match result {
        ncclSuccess => c"no error",
        ncclUnhandledCudaError => c"CUDA failed; ncclGetLastError says how",
        ncclSystemError => c"the system or the driver failed; ncclGetLastError says how",
        ncclInternalError => c"internal error: a defect of cinch, please report it",
        ncclInvalidArgument => c"invalid argument; ncclGetLastError says which",
        ncclInvalidUsage => c"invalid usage; ncclGetLastError says why",
        ncclRemoteError => c"remote error: a peer died, left, aborted or did not come in time",
        ncclInProgress => c"in progress",
        ncclTimeout => c"timeout",
        _ => c"not a result code",
    }
}

#[cfg(test)]
pub(crate) fn sentence() -> String {
    LAST.with(|last| last.borrow().to_str().unwrap().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(result: ncclResult_t) -> *const c_char {
        // SAFETY: takes any number.
        unsafe { ncclGetErrorString(result) }
    }

    #[test]
    fn every_code_has_words_that_stay() {
        let mut seen = std::collections::HashSet::new();
        for code in ncclSuccess..ncclNumResults {
            assert_eq!(text(code), text(code));
            // SAFETY: a static string.
            let words = unsafe { CStr::from_ptr(text(code)) };
            assert!(!words.is_empty() && seen.insert(words), "{code} {words:?}");
        }
        for code in [-1, ncclNumResults, i32::MAX] {
            // SAFETY: a static string.
            assert_eq!(unsafe { CStr::from_ptr(text(code)) }, c"not a result code");
        }
    }

    #[test]
    fn a_thread_has_its_own_last_error() {
        remember(&Error::invalid_argument("7 is \0 odd"));
        // SAFETY: NULL is no communicator; a string of this thread.
        let said = unsafe { CStr::from_ptr(ncclGetLastError(std::ptr::null_mut())) };
        assert_eq!(said.to_str().unwrap(), "invalid argument: 7 is \\0 odd");
        std::thread::spawn(|| {
            // SAFETY: as above.
            let said = unsafe { CStr::from_ptr(pncclGetLastError(std::ptr::null_mut())) };
            assert!(said.is_empty());
        })
        .join()
        .unwrap();
    }
}
