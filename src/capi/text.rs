//! Conversion of strings between C and Rust.

use crate::error::{Error, Result};
use std::ffi::c_char;

/// Largest length of a string that C passes. Thus a missing NUL is likely an error instead of a
/// crash.
const MAX_TEXT: usize = 4096;

/// Returns the static Rust string `text`, which must end with NUL, as a C string.
pub(super) fn static_text(text: &'static str) -> *const c_char {
    debug_assert!(text.ends_with('\0'));
    text.as_ptr().cast()
}

/// Returns a C string as text, or `None` for NULL. `what` is its name in errors.
///
/// # Errors
/// Invalid argument if it is too long or not UTF-8.
///
/// # Safety
/// `text` is NULL or readable up to its NUL.
pub(super) unsafe fn read<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller passes text that is readable up to its NUL, where `position` stops.
    let length = (0..MAX_TEXT).position(|at| unsafe { *text.add(at) } == 0);
    let Some(length) = length else {
        return Err(Error::invalid_argument(format!(
            "{what} has no terminating NUL within {MAX_TEXT} bytes"
        )));
    };
    // SAFETY: the loop above read these bytes.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
    std::str::from_utf8(bytes)
        .map(Some)
        .map_err(|error| Error::invalid_argument(format!("{what} is not UTF-8: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_is_endless_or_not_utf8_is_refused() {
        // SAFETY: each string of this test is NULL, ends with NUL, or is longer than `MAX_TEXT`.
        unsafe {
            assert_eq!(read(std::ptr::null(), "codec").unwrap(), None);
            assert_eq!(read(c"raw".as_ptr(), "codec").unwrap(), Some("raw"));
            let error = read(c"\xff\xfe".as_ptr(), "codec").unwrap_err();
            assert!(error.message().contains("codec is not UTF-8"), "{error}");
            let endless = vec![b'a'; MAX_TEXT];
            let error = read(endless.as_ptr().cast(), "codec").unwrap_err();
            assert!(error.message().contains("4096"), "{error}");
        }
    }
}
