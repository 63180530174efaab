//! The boundary: no panic and no error leaves an export other than as a code.

use super::error::{cinch_result_t, remember};
use super::group;
use crate::cpu::FloatEnvironment;
use crate::error::{Error, Result};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the body of the export `$name`.
///
/// The first form is for functions that return a code: the body is a `Result<()>`. The second is
/// for the few that return text: the body is a pointer to a static or thread-local string.
macro_rules! guard {
    ($name:literal, $body:block) => {
        $crate::capi::guard::enter($name, || -> $crate::error::Result<()> { $body })
    };
    ($name:literal, text $body:block) => {
        $crate::capi::guard::enter_text($name, || $body)
    };
}

pub(super) fn enter(name: &str, body: impl FnOnce() -> Result<()>) -> cinch_result_t {
    match caught(name, body) {
        Ok(()) => cinch_result_t::CINCH_SUCCESS,
        Err(error) => {
            group::poison(&error);
            remember(&error)
        }
    }
}

/// What `body`, the body of the export `name`, returns; a panic is an internal error. For every
/// library whose functions C calls.
///
/// # Errors
/// Those of `body`, with the name in front; internal if it panics.
pub fn caught<T>(name: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let _environment = FloatEnvironment::standard();
    // A panic leaves shared state whole: locks are taken for single inserts and removals, and the
    // thread's open group, which may have been interrupted, is poisoned by every error.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result.map_err(|error| error.context(name)),
        Err(payload) => Err(panicked(name, payload)),
    }
}

pub(super) fn enter_text(
    name: &str,
    body: impl FnOnce() -> *const std::ffi::c_char,
) -> *const std::ffi::c_char {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        remember(&panicked(name, payload));
        c"".as_ptr()
    })
}

fn panicked(name: &str, payload: Box<dyn Any + Send>) -> Error {
    let said = payload
        .downcast_ref::<&str>()
        .map(|text| text.to_string())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into());
    // Dropping a foreign payload may panic again, outside the guard.
    std::mem::forget(payload);
    Error::internal(format!(
        "{name} panicked: {said}; this is a defect of cinch {}, please report it",
        crate::VERSION
    ))
}

#[cfg(test)]
mod tests {
    use super::super::error::cinch_last_error;
    use super::*;
    use crate::cpu;
    use std::ffi::CStr;

    fn last_error() -> String {
        // SAFETY: the pointer is to a string of this thread that lives until its next error.
        unsafe { CStr::from_ptr(cinch_last_error()) }
            .to_str()
            .unwrap()
            .to_string()
    }

    #[test]
    fn errors_become_codes_and_sentences() {
        assert_eq!(guard!("cinch_f", { Ok(()) }), cinch_result_t::CINCH_SUCCESS);
        let code = guard!("cinch_f", {
            Err(Error::invalid_argument("7 is too \0 odd"))
        });
        assert_eq!(code, cinch_result_t::CINCH_ERROR_INVALID_ARGUMENT);
        assert_eq!(last_error(), "invalid argument: cinch_f: 7 is too \\0 odd");
        // Success leaves the sentence in place, as errno does.
        guard!("cinch_g", { Ok(()) });
        assert!(last_error().contains("cinch_f"));
        std::thread::spawn(|| assert_eq!(last_error(), ""))
            .join()
            .unwrap();
    }

    #[test]
    fn arithmetic_is_the_standard_one() {
        cpu::under(cpu::STRANGE[0], || {
            let body = || Ok(cpu::is_standard());
            assert!(caught("cinch_f", body).unwrap());
        });
    }

    #[test]
    fn panics_become_internal_errors() {
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
        // SAFETY: a static empty string.
        assert!(unsafe { CStr::from_ptr(text) }.is_empty());
        assert!(last_error().contains("formatted"));
    }
}
