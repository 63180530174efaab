//! Sleeping on a word of memory, which processes may share.

use std::time::Duration;

/// Sleeps until another thread wakes `word`, at most `limit`. Returns immediately if `word` differs
/// from `expected`, and may return early for no reason, so callers check their condition again.
///
/// # Safety
/// `word` is mapped and 4-byte aligned during the call.
pub unsafe fn wait(word: *const u32, expected: u32, limit: Duration) {
    let timeout = libc::timespec {
        tv_sec: limit.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: libc::c_long::from(limit.subsec_nanos() as i32),
    };
    // SAFETY: the caller keeps `word` mapped, and `timeout` outlives the call. FUTEX_WAIT without
    // the private flag also serves wakers in other processes. Callers check their condition after
    // any result.
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

/// Wakes all threads that sleep on `word`.
///
/// # Safety
/// `word` is mapped and 4-byte aligned during the call.
pub unsafe fn wake(word: *const u32) {
    // SAFETY: the caller keeps `word` mapped.
    unsafe {
        libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn wait_returns_on_a_changed_word_and_on_a_wake() {
        let word = AtomicU32::new(1);
        std::thread::scope(|scope| {
            // SAFETY: `word` outlives the scope.
            unsafe { wait(word.as_ptr(), 0, Duration::from_secs(1000)) };
            let sleeper = scope.spawn(|| {
                while word.load(Ordering::Acquire) == 1 {
                    // SAFETY: `word` outlives the scope.
                    unsafe { wait(word.as_ptr(), 1, Duration::from_secs(1000)) };
                }
            });
            word.store(2, Ordering::Release);
            // SAFETY: `word` outlives the scope.
            unsafe { wake(word.as_ptr()) };
            sleeper.join().unwrap();
        });
    }
}
