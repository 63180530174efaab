//! The C ABI boundary of cinch.h: turns errors and panics of an exported function into a code and a
//! sentence.

use super::core::guard::caught;
use super::core::open_group;
use super::error::{cinch_result_t, remember};
use crate::error::Result;
use std::ffi::c_char;

/// Runs the body of the exported function `$name`.
///
/// The first form serves functions that return a code; the body is a `Result<()>`. The second form
/// serves functions that return text; the body is a pointer to a static or thread-local string.
macro_rules! guard {
    ($name:literal, $body:block) => {
        $crate::capi::guard::enter($name, || -> $crate::error::Result<()> { $body })
    };
    ($name:literal, text $body:block) => {
        $crate::capi::guard::enter_text($name, || $body)
    };
}

/// Runs `body` and returns its code; any error fails the thread's open group.
pub(super) fn enter(name: &str, body: impl FnOnce() -> Result<()>) -> cinch_result_t {
    match caught(name, body) {
        Ok(()) => cinch_result_t::CINCH_SUCCESS,
        Err(error) => {
            open_group::fail(&error);
            remember(&error)
        }
    }
}

/// Runs `body` and returns its text, which is empty if `body` panics.
pub(super) fn enter_text(name: &str, body: impl FnOnce() -> *const c_char) -> *const c_char {
    caught(name, || Ok(body())).unwrap_or_else(|error| {
        remember(&error);
        c"".as_ptr()
    })
}

#[cfg(test)]
mod tests {
    use super::super::error::cinch_last_error;
    use super::*;
    use crate::error::Error;
    use std::ffi::CStr;

    fn last_error() -> String {
        // SAFETY: `cinch_last_error` returns a string that this thread keeps until its next error.
        unsafe { CStr::from_ptr(cinch_last_error()) }
            .to_str()
            .unwrap()
            .to_string()
    }

    #[test]
    fn error_of_an_export_becomes_code_and_sentence() {
        assert_eq!(guard!("cinch_f", { Ok(()) }), cinch_result_t::CINCH_SUCCESS);
        let code = guard!("cinch_f", {
            Err(Error::invalid_argument("7 is too \0 odd"))
        });
        assert_eq!(code, cinch_result_t::CINCH_ERROR_INVALID_ARGUMENT);
        assert_eq!(last_error(), "invalid argument: cinch_f: 7 is too \\0 odd");
        // A successful call leaves the last error's sentence in place, as errno does.
        guard!("cinch_g", { Ok(()) });
        assert!(last_error().contains("cinch_f"));
        std::thread::spawn(|| assert_eq!(last_error(), ""))
            .join()
            .unwrap();
    }

    #[test]
    fn panic_of_an_export_becomes_internal_error() {
        let index = std::hint::black_box(9);
        let code = guard!("cinch_f", {
            let _ = [0u8; 4][index];
            Ok(())
        });
        assert_eq!(code, cinch_result_t::CINCH_ERROR_INTERNAL);
        let text = last_error();
        assert!(
            text.contains("cinch_f panicked") && text.contains("index is 9"),
            "{text}"
        );
        let code = guard!("cinch_g", { std::panic::panic_any(5u8) });
        assert_eq!(code, cinch_result_t::CINCH_ERROR_INTERNAL);
        assert!(last_error().contains("no message"));
        let text = guard!("cinch_h", text { panic!("{}", "formatted") });
        // SAFETY: the fallback is a static string.
        assert!(unsafe { CStr::from_ptr(text) }.is_empty());
        assert!(last_error().contains("formatted"));
    }
}
