//! Functions that return errors as text.

use crate::comm;
use crate::error::{ErrorText, remember, with_last, words};
use crate::types::*;
use std::ffi::c_char;

export! {
    /// Returns a description of a code as static text; never NULL, not even for unknown codes.
    fn ncclGetErrorString | pncclGetErrorString(result: ncclResult_t) returning *const c_char {
        words(result).as_ptr()
    } else c"internal error".as_ptr()
}

export! {
    /// Returns a sentence about this thread's last failed call; if no call failed, about the failure of
    /// `comm`, which may be NULL. Never NULL. The pointer stays valid until the process ends. A later failure
    /// replaces the text, and after this thread has ended another thread may reuse it.
    fn ncclGetLastError | pncclGetLastError(comm: ncclComm_t) returning *const c_char {
        let none = with_last(|last| last.is_empty()).unwrap_or(false);
        if none
            && let Ok(comm) = comm::lookup(comm)
            && let Some(error) = comm.failure()
        {
            remember(&error);
        }
        with_last(ErrorText::as_ptr)
            // The thread is ending and its storage is gone, so no text is left.
            .unwrap_or(c"".as_ptr())
    } else c"".as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::ffi::CStr;

    fn text(result: ncclResult_t) -> *const c_char {
        // SAFETY: the function takes any number.
        unsafe { ncclGetErrorString(result) }
    }

    #[test]
    fn error_string_of_a_code_is_static_and_unique() {
        let mut seen = HashSet::new();
        for code in ncclSuccess..ncclNumResults {
            assert_eq!(text(code), text(code));
            // SAFETY: the function returns static text.
            let words = unsafe { CStr::from_ptr(text(code)) };
            assert!(!words.is_empty() && seen.insert(words), "{code} {words:?}");
        }
        for code in [-1, ncclNumResults, i32::MAX] {
            // SAFETY: the function returns static text.
            assert_eq!(unsafe { CStr::from_ptr(text(code)) }, c"not a result code");
        }
    }

    #[test]
    fn last_error_without_communicator_is_that_of_the_thread() {
        remember(&cinch::Error::invalid_argument("7 is odd"));
        for get in [ncclGetLastError, pncclGetLastError] {
            // SAFETY: the function accepts NULL as no communicator, and its text is never freed.
            let text = unsafe { CStr::from_ptr(get(std::ptr::null_mut())) };
            assert_eq!(text.to_str().unwrap(), "invalid argument: 7 is odd");
        }
    }
}
