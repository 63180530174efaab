//! The clock that all processes of a host share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// Returns nanoseconds of the monotonic clock. Processes of one host may compare the values, which
/// [`std::time::Instant`] does not offer.
pub fn monotonic_nanoseconds() -> u64 {
    nanoseconds(libc::CLOCK_MONOTONIC)
}

/// Nanoseconds of the monotonic clock at the last [`tick`]; 0 before.
static LAST_TICK: AtomicU64 = AtomicU64::new(0);

/// Sets the time that [`last_tick`] returns. Control threads call it at every heartbeat.
pub fn tick() {
    LAST_TICK.store(monotonic_nanoseconds(), Ordering::Relaxed);
}

/// Returns nanoseconds of the monotonic clock as of the last heartbeat of any communicator, for a place where reading
/// the clock would take too long.
#[inline]
pub fn last_tick() -> u64 {
    // Relaxed: the value orders nothing.
    match LAST_TICK.load(Ordering::Relaxed) {
        0 => monotonic_nanoseconds(),
        time => time,
    }
}

/// Returns the time of day in the time zone of this process, as `2026-11-27 13:06:53`.
pub fn local_time() -> String {
    // SAFETY: `time` accepts null. `localtime_r` reads `now` and writes only `parts`, which is plain data and valid as
    // zero.
    let parts = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut parts: libc::tm = std::mem::zeroed();
        libc::localtime_r(&now, &mut parts);
        parts
    };
    date_and_time(&parts, ' ')
}

/// Returns a time of the system's clock in UTC by RFC 3339, as `2026-11-27T13:06:53.000123Z`.
pub fn utc(time: SystemTime) -> String {
    let time = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let seconds = time.as_secs() as libc::time_t;
    // SAFETY: `gmtime_r` reads `seconds` and writes only `parts`, which is plain data and valid as zero.
    let parts = unsafe {
        let mut parts: libc::tm = std::mem::zeroed();
        libc::gmtime_r(&seconds, &mut parts);
        parts
    };
    format!(
        "{}.{:06}Z",
        date_and_time(&parts, 'T'),
        time.subsec_micros()
    )
}

fn date_and_time(parts: &libc::tm, between: char) -> String {
    format!(
        "{:04}-{:02}-{:02}{between}{:02}:{:02}:{:02}",
        parts.tm_year + 1900,
        parts.tm_mon + 1,
        parts.tm_mday,
        parts.tm_hour,
        parts.tm_min,
        parts.tm_sec
    )
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
