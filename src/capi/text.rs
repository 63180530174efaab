//! Strings that cross the boundary.

use crate::error::{Error, Result};
use std::ffi::c_char;

/// Longest string that is read from C, so that one without an end is an error.
const MAX_TEXT: usize = 4096;

/// A static Rust string that ends with NUL, as a C string.
pub(super) fn static_text(text: &'static str) -> *const c_char {
    debug_assert!(text.ends_with('\0'));
    text.as_ptr().cast()
}

/// A C string, `None` for NULL. `what` names it in errors.
///
/// # Safety
/// `text` is NULL or readable up to its NUL.
pub(super) unsafe fn read<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: `position` stops at the NUL, up to which the caller vouches.
    let length = (0..MAX_TEXT).position(|at| unsafe { *text.add(at) } == 0);
    let Some(length) = length else {
        return Err(Error::invalid_argument(format!(
            "{what} has no terminating NUL within {MAX_TEXT} bytes"
        )));
    };
    // SAFETY: just read.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
    std::str::from_utf8(bytes)
        .map(Some)
        .map_err(|error| Error::invalid_argument(format!("{what} is not UTF-8: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_bounded_and_utf8() {
        // SAFETY: each is NULL, terminated, or longer than what is read.
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
