//! Sleeping on a word of memory, which may be shared between processes.

use std::time::Duration;

/// Sleeps until `word` is woken, unless it differs from `expected`; at most `limit`. Returns
/// early at will: callers look again.
///
/// # Safety
/// `word` is mapped and 4-byte aligned for the length of the call.
pub unsafe fn wait(word: *const u32, expected: u32, limit: Duration) {
    let timeout = libc::timespec {
        tv_sec: limit.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: libc::c_long::from(limit.subsec_nanos() as i32),
    };
    // SAFETY: the caller keeps `word` mapped; `timeout` lives through the call. Not the private
    // operation: the waker may be another process. Every outcome means "look again".
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word,
            libc::FUTEX_WAIT,
            expected,
            &raw const timeout,
        );
    }
}

/// Wakes all that sleep on `word`.
///
/// # Safety
/// `word` is mapped and 4-byte aligned for the length of the call.
pub unsafe fn wake(word: *const u32) {
    // SAFETY: as above.
    unsafe {
        libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_changed_word_does_not_sleep_and_a_wake_ends_sleep() {
        let word = AtomicU32::new(1);
        std::thread::scope(|scope| {
            // SAFETY: `word` outlives the scope.
            unsafe { wait(word.as_ptr(), 0, Duration::from_secs(1000)) };
            let sleeper = scope.spawn(|| {
                while word.load(Ordering::Acquire) == 1 {
                    // SAFETY: as above.
                    unsafe { wait(word.as_ptr(), 1, Duration::from_secs(1000)) };
                }
            });
            word.store(2, Ordering::Release);
            // SAFETY: as above.
            unsafe { wake(word.as_ptr()) };
            sleeper.join().unwrap();
        });
    }
}
