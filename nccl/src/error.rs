//! Result codes, and the sentence of a thread's last error.

use crate::comm;
use crate::types::*;
use cinch::sys::fork_safe::ForkSafe;
use cinch::{Error, ErrorKind};
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU8, Ordering};

export! {
    /// A code in words; never NULL, also for numbers that are no code. Static.
    fn ncclGetErrorString | pncclGetErrorString(result: ncclResult_t) returning *const c_char {
        words(result).as_ptr()
    } else c"internal error".as_ptr()
}

export! {
    /// What went wrong in this thread's last call that failed; if none has, why `comm`, which may
    /// be NULL, has failed. Never NULL. Lives as long as the process; a later failure, or that of
    /// another thread when this one has ended, puts its own sentence there.
    fn ncclGetLastError | pncclGetLastError(comm: ncclComm_t) returning *const c_char {
        let none = with_last(|last| last.is_empty()).unwrap_or(false);
        if none
            && let Ok(comm) = comm::lookup(comm)
            && let Some(error) = comm.failure()
        {
            remember(&error);
        }
        with_last(ErrorText::as_ptr)
            // The thread is ending and its storage is gone.
            .unwrap_or(c"".as_ptr())
    } else c"".as_ptr()
}

/// Most bytes of a sentence that a program gets.
const MAX_TEXT_BYTES: usize = 4095;

/// A C string that is never freed: programs keep pointers to it. Its last byte stays zero, so that
/// who reads while a thread writes finds an end.
struct ErrorText([AtomicU8; MAX_TEXT_BYTES + 1]);

impl ErrorText {
    fn set(&self, text: &str) {
        let most = text.len().min(MAX_TEXT_BYTES);
        let whole = (0..=most).rev().find(|&end| text.is_char_boundary(end));
        let text = text.bytes().take(whole.unwrap_or(0));
        for (place, byte) in self.0.iter().zip(text.chain([0])) {
            place.store(byte, Ordering::Relaxed);
        }
    }

    fn is_empty(&self) -> bool {
        self.0[0].load(Ordering::Relaxed) == 0
    }

    fn as_ptr(&self) -> *const c_char {
        self.0.as_ptr().cast()
    }
}

/// Sentences of threads that have ended, for those to come.
static SPARE_TEXTS: ForkSafe<Vec<&'static ErrorText>> = ForkSafe::new(Vec::new());

/// A sentence in the hands of one thread.
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

fn with_last<T>(body: impl FnOnce(&'static ErrorText) -> T) -> Option<T> {
    LAST.try_with(|last| body(last.0)).ok()
}

/// Makes `error` the thread's last one, and returns its code.
pub(crate) fn remember(error: &Error) -> ncclResult_t {
    let sentence = error.to_string().replace('\0', "\\0");
    let _ = with_last(|last| last.set(&sentence));
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
    // SAFETY: NULL is no communicator; a string that stays.
    let said = unsafe { CStr::from_ptr(ncclGetLastError(std::ptr::null_mut())) };
    said.to_str().unwrap().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn text(result: ncclResult_t) -> *const c_char {
        // SAFETY: takes any number.
        unsafe { ncclGetErrorString(result) }
    }

    #[test]
    fn every_code_has_words_that_stay() {
        let mut seen = HashSet::new();
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

    #[test]
    fn a_sentence_stays_where_it_was_told() {
        fn last() -> usize {
            // SAFETY: NULL is no communicator.
            unsafe { ncclGetLastError(std::ptr::null_mut()) }.addr()
        }
        remember(&Error::invalid_argument("first"));
        let place = last();
        // As long as a sentence may be, cut between characters, and one that is short again.
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
        // Threads that come and go use the same ones.
        let places: HashSet<usize> = (0..1000)
            .map(|_| std::thread::spawn(last).join().unwrap())
            .collect();
        assert!(!places.contains(&place));
        assert!(places.len() < 500, "{} of 1000 threads", places.len());
    }
}
