//! Result codes, and the text of each thread's last error.

use crate::types::*;
use cinch::sys::fork_safe::ForkSafe;
use cinch::{Error, ErrorKind};
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU8, Ordering};

/// Largest number of bytes of an error sentence.
const MAX_TEXT_BYTES: usize = 4095;

/// A C string that is never freed, as programs keep pointers to it. Its last byte stays zero, so that a
/// concurrent reader finds an end.
pub(crate) struct ErrorText([AtomicU8; MAX_TEXT_BYTES + 1]);

impl ErrorText {
    fn set(&self, text: &str) {
        let most = text.len().min(MAX_TEXT_BYTES);
        let whole = (0..=most).rev().find(|&end| text.is_char_boundary(end));
        let text = text.bytes().take(whole.unwrap_or(0));
        for (place, byte) in self.0.iter().zip(text.chain([0])) {
            place.store(byte, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0[0].load(Ordering::Relaxed) == 0
    }

    pub(crate) fn as_ptr(&self) -> *const c_char {
        self.0.as_ptr().cast()
    }
}

/// Error texts of threads that have ended, which new threads reuse.
static SPARE_TEXTS: ForkSafe<Vec<&'static ErrorText>> = ForkSafe::new(Vec::new());

/// The error text of one thread.
struct ErrorTextSlot(&'static ErrorText);

impl ErrorTextSlot {
    fn new() -> ErrorTextSlot {
        let known = SPARE_TEXTS.with(Vec::pop);
        let sentence = known.unwrap_or_else(|| {
            Box::leak(Box::new(ErrorText(
                [const { AtomicU8::new(0) }; MAX_TEXT_BYTES + 1],
            )))
        });
        sentence.set("");
        ErrorTextSlot(sentence)
    }
}

impl Drop for ErrorTextSlot {
    fn drop(&mut self) {
        SPARE_TEXTS.with(|spare| spare.push(self.0));
    }
}

thread_local! {
    static LAST: ErrorTextSlot = ErrorTextSlot::new();
}

/// Runs `body` on this thread's text; `None` if the thread ends and its storage is gone.
pub(crate) fn with_last<T>(body: impl FnOnce(&'static ErrorText) -> T) -> Option<T> {
    LAST.try_with(|last| body(last.0)).ok()
}

/// Makes `error` the thread's last error, and returns its code.
pub(crate) fn remember(error: &Error) -> ncclResult_t {
    let sentence = error.to_string().replace('\0', "\\0");
    let _ = with_last(|last| last.set(&sentence));
    code(error)
}

/// Returns the `ncclResult_t` of `error`.
pub(crate) fn code(error: &Error) -> ncclResult_t {
    match error.kind() {
        ErrorKind::InvalidArgument => ncclInvalidArgument,
        // NCCL reports missing features and disagreement between ranks as invalid usage.
        ErrorKind::InvalidUsage | ErrorKind::Unsupported | ErrorKind::Mismatch => ncclInvalidUsage,
        ErrorKind::System => ncclSystemError,
        // Most programs do not know the newer `ncclTimeout`, and treat unknown codes as a defect. Since a
        // missing peer causes most timeouts and aborts, both become `ncclRemoteError`.
        ErrorKind::Remote | ErrorKind::Timeout | ErrorKind::Aborted => ncclRemoteError,
        _ => ncclInternalError,
    }
}

/// Returns a description of the code `result`.
pub(crate) fn words(result: ncclResult_t) -> &'static CStr {
    match result {
        ncclSuccess => c"no error",
        ncclUnhandledCudaError => c"CUDA failed; ncclGetLastError returns the reason",
        ncclSystemError => c"the system or the driver failed; ncclGetLastError returns the reason",
        ncclInternalError => c"internal error: a defect of cinch, please report it",
        ncclInvalidArgument => c"invalid argument; ncclGetLastError names it",
        ncclInvalidUsage => c"invalid usage; ncclGetLastError returns the reason",
        ncclRemoteError => c"remote error: a peer died, left, aborted or did not come in time",
        ncclInProgress => c"in progress",
        ncclTimeout => c"timeout",
        _ => c"not a result code",
    }
}

#[cfg(test)]
pub(crate) fn sentence() -> String {
    // SAFETY: an `ErrorText` is never freed, and its last byte stays NUL.
    let text = |last: &ErrorText| unsafe { CStr::from_ptr(last.as_ptr()) };
    with_last(|last| text(last).to_str().unwrap().to_string()).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn last_error_belongs_to_its_thread() {
        remember(&Error::invalid_argument("7 is \0 odd"));
        assert_eq!(sentence(), "invalid argument: 7 is \\0 odd");
        let other = std::thread::spawn(sentence).join().unwrap();
        assert_eq!(other, "");
    }

    #[test]
    fn last_error_keeps_its_address() {
        let last = || with_last(|last| last.as_ptr().addr()).unwrap();
        remember(&Error::invalid_argument("first"));
        let place = last();
        // Tests a sentence that is cut at the maximal length, between characters, and then a short
        // one.
        let long = format!(
            "{}\u{e9}",
            "x".repeat(MAX_TEXT_BYTES - "invalid argument: ".len() - 1)
        );
        remember(&Error::invalid_argument(long));
        assert_eq!((last(), sentence().len()), (place, MAX_TEXT_BYTES - 1));
        remember(&Error::invalid_argument("second"));
        assert_eq!(
            (last(), sentence()),
            (place, "invalid argument: second".into())
        );
        // Later threads reuse the texts of threads that have ended.
        let places: HashSet<usize> = (0..1000)
            .map(|_| std::thread::spawn(last).join().unwrap())
            .collect();
        assert!(!places.contains(&place));
        assert!(places.len() < 500, "{} of 1000 threads", places.len());
    }
}
