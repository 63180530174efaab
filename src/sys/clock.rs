//! The clock that all processes of a host share.

/// Returns nanoseconds of the monotonic clock. Processes of one host may compare the values, which
/// [`std::time::Instant`] does not offer.
pub fn monotonic_nanoseconds() -> u64 {
    nanoseconds(libc::CLOCK_MONOTONIC)
}

/// Returns nanoseconds of the monotonic clock as of the kernel's last tick, 1 to 10 ms ago. Reading it takes a few
/// nanoseconds.
pub fn coarse_nanoseconds() -> u64 {
    nanoseconds(libc::CLOCK_MONOTONIC_COARSE)
}

fn nanoseconds(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `clock_gettime` writes only `time`. The clock exists on every Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn clock_advances_with_time() {
        let (start, begin) = (Instant::now(), monotonic_nanoseconds());
        std::thread::sleep(Duration::from_millis(5));
        let passed = monotonic_nanoseconds() - begin;
        assert!(passed >= 5_000_000);
        assert!(u128::from(passed) <= start.elapsed().as_nanos());
    }
}
