//! The clock source, and the difference between the clocks of hosts.

use super::Scope;
use super::check_result::CheckResult;
use std::fs;
use std::time::Duration;

const AREA: &str = "clock";

/// Clock sources that are read without a system call.
const FAST: [&str; 4] = [
    "tsc",
    "kvm-clock",
    "arch_sys_counter",
    "hyperv_clocksource_tsc_page",
];

/// Difference between clocks beyond which log lines of hosts are not in order.
const NOTABLE: Duration = Duration::from_millis(100);

/// Checks the clock source. Waiting ranks read the clock often.
pub fn check(scope: &Scope) -> CheckResult {
    let path = "sys/devices/system/clocksource/clocksource0/current_clocksource";
    let text = fs::read_to_string(scope.root.join(path)).unwrap_or_default();
    match text.trim() {
        "" => CheckResult::ok(AREA, "source", "unknown"),
        source if FAST.contains(&source) => CheckResult::ok(AREA, "source", source),
        source => CheckResult::warning(
            AREA,
            "source",
            format!("{source}, which costs a system call or a device access each time it is read"),
            "boot with clocksource=tsc if the processor's counter is reliable; see the kernel's log",
        ),
    }
    .with("source", text.trim())
}

/// Time of another host's clock minus that of this host, in nanoseconds, and how wrong that may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockDifference {
    pub nanoseconds: i128,
    pub bound: i128,
}

impl ClockDifference {
    /// Computes the difference from the other clock's `time`, which was read between `before` and `after`, each in
    /// nanoseconds since 1970.
    pub fn new(before: i128, time: i128, after: i128) -> ClockDifference {
        ClockDifference {
            nanoseconds: time - (before + after) / 2,
            bound: (after - before + 1) / 2,
        }
    }
}

/// Judges the clock of a host.
pub fn judge(host: &str, difference: ClockDifference) -> CheckResult {
    let ms = |nanoseconds: i128| nanoseconds as f64 / 1e6;
    let found = format!(
        "the clock of {host} differs by {:.1} ms from this host's, up to {:.1} ms more or less",
        ms(difference.nanoseconds),
        ms(difference.bound)
    );
    let certain = difference.nanoseconds.abs() - difference.bound;
    let result = match certain > NOTABLE.as_nanos() as i128 {
        true => CheckResult::warning(
            AREA,
            host,
            found,
            "calls do not depend on it, but log lines and metrics of hosts do: run chrony or another NTP client",
        ),
        false => CheckResult::ok(AREA, host, found),
    };
    result
        .with("difference_ms", ms(difference.nanoseconds))
        .with("bound_ms", ms(difference.bound))
}

#[cfg(test)]
mod tests {
    use super::super::check_result::Severity;
    use super::super::tests::FakeRoot;
    use super::*;

    #[test]
    fn slow_clock_source_is_a_warning() {
        let root = FakeRoot::new("clock");
        let path = "sys/devices/system/clocksource/clocksource0/current_clocksource";
        assert_eq!(check(&root.scope()).level, Severity::Ok);
        root.write(path, "tsc\n");
        assert_eq!(check(&root.scope()).level, Severity::Ok);
        root.write(path, "hpet\n");
        assert_eq!(check(&root.scope()).level, Severity::Warning);
    }

    #[test]
    fn clocks_differ_only_beyond_the_time_of_the_question() {
        const MS: i128 = 1_000_000;
        let difference = ClockDifference::new(1000 * MS, 1350 * MS, 1100 * MS);
        assert_eq!(
            (difference.nanoseconds, difference.bound),
            (300 * MS, 50 * MS)
        );
        assert_eq!(judge("b", difference).level, Severity::Warning);
        // A slow question proves nothing.
        let slow = ClockDifference::new(1000 * MS, 1350 * MS, 1600 * MS);
        assert_eq!(judge("b", slow).level, Severity::Ok);
        let behind = ClockDifference::new(1000 * MS, 500 * MS, 1002 * MS);
        assert_eq!(behind.nanoseconds, -501 * MS);
        assert_eq!(judge("b", behind).level, Severity::Warning);
    }
}
