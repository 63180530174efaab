//! Result codes, and the sentence of each thread's last error.

use super::text::static_text;
use crate::error::{Error, ErrorKind};
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};

/// Result of every function. Numbers are never reused; 0 to 7 equal those of `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum cinch_result_t {
    /// Success.
    CINCH_SUCCESS = 0,
    /// A call of the operating system or the CUDA driver failed.
    CINCH_ERROR_SYSTEM = 2,
    /// Internal error: a defect of the library.
    CINCH_ERROR_INTERNAL = 3,
    /// An argument is outside its documented range. The call had no effect.
    CINCH_ERROR_INVALID_ARGUMENT = 4,
    /// The call is not allowed in this state, or with this combination of arguments.
    CINCH_ERROR_INVALID_USAGE = 5,
    /// A peer exited, died or is unreachable. The communicator has failed.
    CINCH_ERROR_REMOTE = 6,
    /// Reserved; no function returns it.
    #[allow(dead_code)]
    CINCH_IN_PROGRESS = 7,
    /// Ranks disagree about a call or a setting. The communicator has failed.
    CINCH_ERROR_MISMATCH = 8,
    /// A timeout expired. The communicator has failed.
    CINCH_ERROR_TIMEOUT = 9,
    /// The communicator was aborted.
    CINCH_ERROR_ABORTED = 10,
    /// This build or this machine lacks a feature that the call needs.
    CINCH_ERROR_UNSUPPORTED = 11,
}

/// A `cinch_result_t` as C passes it; the number may be no valid code.
pub(super) type result_number = u32;

use cinch_result_t::*;

impl From<ErrorKind> for cinch_result_t {
    fn from(kind: ErrorKind) -> cinch_result_t {
        match kind {
            ErrorKind::InvalidArgument => CINCH_ERROR_INVALID_ARGUMENT,
            ErrorKind::InvalidUsage => CINCH_ERROR_INVALID_USAGE,
            ErrorKind::System => CINCH_ERROR_SYSTEM,
            ErrorKind::Remote => CINCH_ERROR_REMOTE,
            ErrorKind::Mismatch => CINCH_ERROR_MISMATCH,
            ErrorKind::Timeout => CINCH_ERROR_TIMEOUT,
            ErrorKind::Aborted => CINCH_ERROR_ABORTED,
            ErrorKind::Unsupported => CINCH_ERROR_UNSUPPORTED,
            ErrorKind::Internal => CINCH_ERROR_INTERNAL,
        }
    }
}

/// Stores the version of the loaded library; any of the pointers may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_version(
    major: *mut c_int,
    minor: *mut c_int,
    patch: *mut c_int,
) -> cinch_result_t {
    guard!("cinch_version", {
        let mut numbers = crate::VERSION
            .split(['.', '-', '+'])
            .map(|number| number.parse().unwrap_or(0));
        for target in [major, minor, patch] {
            let number = numbers.next().unwrap_or(0);
            if !target.is_null() {
                // SAFETY: `target` is not NULL, and cinch.h requires of the program that it is
                // writable then.
                unsafe { target.write_unaligned(number) };
            }
        }
        Ok(())
    })
}

/// Returns the version of the loaded library as static text, `major.minor.patch`.
#[unsafe(no_mangle)]
pub extern "C" fn cinch_version_string() -> *const c_char {
    guard!("cinch_version_string", text {
        const TEXT: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
        static_text(TEXT)
    })
}

/// Returns a code in words as static text; never NULL, not even for unknown codes.
#[unsafe(no_mangle)]
pub extern "C" fn cinch_error_string(code: result_number) -> *const c_char {
    guard!("cinch_error_string", text {
        static_text(match code {
            0 => "success\0",
            2 => "system error\0",
            3 => "internal error\0",
            4 => "invalid argument\0",
            5 => "invalid usage\0",
            6 => "remote error\0",
            7 => "in progress\0",
            8 => "mismatch between ranks\0",
            9 => "timeout\0",
            10 => "aborted\0",
            11 => "unsupported\0",
            _ => "not a result code\0",
        })
    })
}

/// Returns a sentence about this thread's last failed call: function, ranks, hosts, numbers, and the
/// next step.
///
/// Never NULL; empty if no call has failed. Successful calls keep the text, except that
/// `cinch_comm_async_error` stores the reason that it finds. The text stays valid until this thread's
/// next failed call, or until the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn cinch_last_error() -> *const c_char {
    guard!("cinch_last_error", text {
        LAST.try_with(|last| last.borrow().text.as_ptr())
            // The thread is ending and its storage is gone, so no text is left.
            .unwrap_or(c"".as_ptr())
    })
}

thread_local! {
    static LAST: RefCell<LastError> = RefCell::default();
}

/// The sentence of a thread's last error.
#[derive(Default)]
struct LastError {
    text: CString,
    /// Earlier sentences that successful calls replaced, without duplicates: the program may still read them.
    /// Duplicates would pile up, because programs query one communicator's error many times.
    earlier: Vec<CString>,
}

/// Makes `error` the thread's last error, for a failed call, and returns its code. Frees all earlier
/// sentences.
pub(super) fn remember(error: &Error) -> cinch_result_t {
    let text = sentence(error);
    let _ = LAST.try_with(|last| {
        *last.borrow_mut() = LastError {
            text,
            earlier: Vec::new(),
        };
    });
    error.kind().into()
}

/// Makes `error` the thread's last error, for a successful call, and returns its code. Keeps earlier
/// sentences, to which the program may hold pointers.
pub(super) fn report(error: &Error) -> cinch_result_t {
    let text = sentence(error);
    let _ = LAST.try_with(|last| {
        let last = &mut *last.borrow_mut();
        if last.text == text {
            return;
        }
        let known = last.earlier.iter().position(|earlier| *earlier == text);
        let text = known.map_or(text, |at| last.earlier.swap_remove(at));
        last.earlier.push(std::mem::replace(&mut last.text, text));
    });
    error.kind().into()
}

fn sentence(error: &Error) -> CString {
    CString::new(error.to_string().replace('\0', "\\0")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    #[test]
    fn error_kind_has_its_own_code_and_words() {
        let kinds = [
            ErrorKind::InvalidArgument,
            ErrorKind::InvalidUsage,
            ErrorKind::System,
            ErrorKind::Remote,
            ErrorKind::Mismatch,
            ErrorKind::Timeout,
            ErrorKind::Aborted,
            ErrorKind::Unsupported,
            ErrorKind::Internal,
        ];
        let mut codes = Vec::new();
        for kind in kinds {
            let code = cinch_result_t::from(kind) as u32;
            // SAFETY: `cinch_error_string` returns static, terminated text.
            let words = unsafe { CStr::from_ptr(cinch_error_string(code)) };
            assert_eq!(words.to_str().unwrap(), kind.name());
            assert!(code != 0 && code != CINCH_IN_PROGRESS as u32);
            codes.push(code);
        }
        codes.sort();
        codes.dedup();
        assert_eq!(codes.len(), kinds.len());
        // SAFETY: `cinch_error_string` returns static, terminated text.
        let words = unsafe { CStr::from_ptr(cinch_error_string(u32::MAX)) };
        assert_eq!(words, c"not a result code");
    }

    #[test]
    fn sentence_stays_valid_until_next_failed_call() {
        let read = || {
            let text = cinch_last_error();
            // SAFETY: `LAST` keeps the terminated text until a call fails.
            (text, unsafe { CStr::from_ptr(text) }.to_str().unwrap())
        };
        let [first, second, third] = ["first", "second", "third"].map(Error::invalid_usage);
        remember(&first);
        let (at_first, said) = read();
        let mut addresses = vec![at_first];
        for _ in 0..3 {
            for error in [&second, &third, &third] {
                assert_eq!(report(error), CINCH_ERROR_INVALID_USAGE);
                let (address, text) = read();
                assert!(text.ends_with(error.message()), "{text}");
                addresses.push(address);
            }
        }
        // Storing a sentence again must take no more memory.
        addresses.sort();
        addresses.dedup();
        assert_eq!(addresses.len(), 3);
        assert!(said.ends_with("first"), "{said}");
        remember(&second);
        LAST.with(|last| assert!(last.borrow().earlier.is_empty()));
    }

    #[test]
    fn version_equals_that_of_the_crate() {
        let (mut major, mut minor, mut patch) = (-1, -1, -1);
        // SAFETY: the pointers are to three local integers.
        unsafe { cinch_version(&mut major, &mut minor, &mut patch) };
        assert_eq!(format!("{major}.{minor}.{patch}"), crate::VERSION);
        use crate::capi::types::{CINCH_VERSION_MAJOR, CINCH_VERSION_MINOR, CINCH_VERSION_PATCH};
        let header = format!("{CINCH_VERSION_MAJOR}.{CINCH_VERSION_MINOR}.{CINCH_VERSION_PATCH}");
        assert_eq!(header, crate::VERSION);
        // SAFETY: the function allows NULL.
        let code = unsafe {
            cinch_version(
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        assert_eq!(code, CINCH_SUCCESS);
    }
}
