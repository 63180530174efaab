//! Limits of processes, memory and shared memory.

use super::check_result::CheckResult;
use super::{Scope, bytes};
use cinch::config::Config;
use cinch::sys::cgroup::group_memory_below;
use cinch::types::TransportKind;
use std::fs;

const AREA: &str = "limits";

/// Descriptors that a process needs besides its connections: files, libraries, a device per GPU.
const OTHER_DESCRIPTORS: u64 = 64;

/// Number of ranks of a large job, whose connections the limit of descriptors should carry.
const MANY_RANKS: u64 = 256;

/// Number of processes and threads below which a limit is low for a host full of ranks.
const FEW_THREADS: u64 = 2048;

/// A limit of a process: its number, or none.
type SoftLimit = Option<u64>;

/// Checks the limits of the process, and memory.
pub fn check(scope: &Scope, config: &Config) -> Vec<CheckResult> {
    let limits = fs::read_to_string(scope.process_file("limits")).unwrap_or_default();
    let mut results = Vec::new();
    for (check, line) in [
        (
            memlock as fn(&Scope, &Config, SoftLimit) -> CheckResult,
            "Max locked memory",
        ),
        (nofile, "Max open files"),
        (nproc, "Max processes"),
    ] {
        match soft_limit(&limits, line) {
            Some(limit) => results.push(check(scope, config, limit)),
            None => results.push(CheckResult::warning(
                AREA,
                "unknown",
                format!(
                    "{} has no line \"{line}\"",
                    scope.process_file("limits").display()
                ),
                "mount /proc",
            )),
        }
    }
    results.push(shared_memory(scope));
    results.push(memory(scope, config));
    results
}

/// Returns the soft limit in the line that begins with `name`; `None` without such a line, and a limit of `None` if it
/// is unlimited.
fn soft_limit(limits: &str, name: &str) -> Option<SoftLimit> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    }
}

/// RDMA devices lock the slots of a communicator in memory.
fn memlock(scope: &Scope, config: &Config, limit: SoftLimit) -> CheckResult {
    let need = config.buffer_bytes as u64;
    let Some(limit) = limit else {
        return CheckResult::ok(AREA, "memlock", "any amount of memory may be locked");
    };
    let found = format!("{} may be locked", bytes(limit));
    let result = match (limit < need, scope.has_rdma() && !config.ib_disable) {
        (true, true) => CheckResult::error(
            AREA,
            "memlock",
            format!(
                "{found}, and RDMA locks up to {} for a communicator",
                bytes(need)
            ),
            "raise `ulimit -l`: memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity for services of systemd, \
             --ulimit memlock=-1 for docker; or lower CINCH_BUFFER_BYTES",
        ),
        (true, false) => {
            CheckResult::ok(AREA, "memlock", format!("{found}; without RDMA nothing is"))
        }
        (false, _) => CheckResult::ok(AREA, "memlock", found),
    };
    result.with("memlock_bytes", limit)
}

/// Each TCP connection takes descriptors.
fn nofile(_: &Scope, config: &Config, limit: SoftLimit) -> CheckResult {
    let limit = limit.unwrap_or(u64::MAX >> 1);
    let each = cinch::transport::descriptors_per_peer(TransportKind::Tcp, config).max(1) as u64;
    let peers = limit.saturating_sub(OTHER_DESCRIPTORS) / each;
    let found = format!("{limit} descriptors: a rank can have about {peers} peers by TCP");
    let result = match peers < MANY_RANKS {
        true => CheckResult::warning(
            AREA,
            "nofile",
            found,
            "raise `ulimit -n` for larger jobs: nofile in /etc/security/limits.conf, LimitNOFILE= for services of \
             systemd, --ulimit nofile=65536 for docker",
        ),
        false => CheckResult::ok(AREA, "nofile", found),
    };
    result
        .with("nofile", limit)
        .with("tcp_peers", peers)
        .with("descriptors_per_peer", each)
}

fn nproc(_: &Scope, _: &Config, limit: SoftLimit) -> CheckResult {
    match limit {
        None => CheckResult::ok(AREA, "nproc", "any number of processes and threads"),
        Some(limit) if limit < FEW_THREADS => CheckResult::warning(
            AREA,
            "nproc",
            format!("this user may have {limit} processes and threads, those of all programs counted"),
            "raise `ulimit -u`: nproc in /etc/security/limits.conf, TasksMax= for services of systemd, --pids-limit \
             for docker",
        )
        .with("nproc", limit),
        Some(limit) => {
            CheckResult::ok(AREA, "nproc", format!("{limit} processes and threads")).with("nproc", limit)
        }
    }
}

/// cinch keeps slots in sealed memory files, which need no room in /dev/shm.
fn shared_memory(scope: &Scope) -> CheckResult {
    let mounts = fs::read_to_string(scope.process_file("mounts")).unwrap_or_default();
    let mut mounts = mounts.lines().map(|line| line.split(' '));
    let options =
        mounts.find_map(|mut words| (words.nth(1)? == "/dev/shm").then(|| words.nth(1))?);
    let Some(options) = options else {
        return CheckResult::warning(
            AREA,
            "shm",
            "no file system is mounted at /dev/shm",
            "containers of one host need a common /dev/shm to share memory (docker run --ipc=host), and other \
             libraries need it too",
        );
    };
    let size = options
        .split(',')
        .find_map(|option| option.strip_prefix("size="))
        .and_then(size_option);
    let note = "cinch needs no room in it: its slots are memory files";
    match size {
        Some(size) => CheckResult::ok(AREA, "shm", format!("/dev/shm has {}; {note}", bytes(size)))
            .with("shm_bytes", size),
        None => CheckResult::ok(
            AREA,
            "shm",
            format!("/dev/shm has the default size; {note}"),
        ),
    }
}

/// Parses the size of a tmpfs, such as `65536k`; `None` for a percentage.
fn size_option(text: &str) -> Option<u64> {
    let (number, shift) = match text.strip_suffix(['k', 'm', 'g']) {
        Some(number) if text.ends_with('k') => (number, 10),
        Some(number) if text.ends_with('m') => (number, 20),
        Some(number) => (number, 30),
        None => (text, 0),
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Slots cost memory of the control group as soon as they are touched.
fn memory(scope: &Scope, config: &Config) -> CheckResult {
    let need = config.buffer_bytes as u64;
    let Some(group) = group_memory_below(&scope.root, &scope.process) else {
        return CheckResult::ok(AREA, "memory", "no control group limits the memory");
    };
    let found = format!(
        "{} of the control group's {} are free; a rank takes up to {} for a communicator",
        bytes(group.free),
        bytes(group.limit),
        bytes(need)
    );
    let advice = "raise the limit (docker run --memory, resources.limits.memory of a pod, --mem of Slurm), or lower \
                  CINCH_BUFFER_BYTES";
    let result = match group.free {
        free if free < need => CheckResult::error(AREA, "memory", found, advice),
        free if free < need.saturating_mul(scope.cores as u64) => CheckResult::warning(
            AREA,
            "memory",
            format!("{found}, too much for one on each of {} cores", scope.cores),
            advice,
        ),
        _ => CheckResult::ok(AREA, "memory", found),
    };
    result
        .with("free_bytes", group.free)
        .with("limit_bytes", group.limit)
}

#[cfg(test)]
mod tests {
    use super::super::check_result::Severity;
    use super::super::tests::FakeRoot;
    use super::*;

    const LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units     
Max processes             500                  63704                processes 
Max open files            1024                 524288               files     
Max locked memory         8388608              unlimited            bytes     
";

    fn level(results: &[CheckResult], check: &str) -> Severity {
        results.iter().find(|it| it.check == check).unwrap().level
    }

    #[test]
    fn low_limits_are_found_and_judged_by_what_uses_them() {
        let root = FakeRoot::new("limits");
        root.write("proc/self/limits", LIMITS);
        root.write(
            "proc/self/mounts",
            "shm /dev/shm tmpfs rw,nosuid,size=65536k 0 0\n",
        );
        let config = Config::default();
        let results = check(&root.scope(), &config);
        // 8 MiB are too few for RDMA, but there is no RDMA device.
        assert_eq!(level(&results, "memlock"), Severity::Ok);
        assert_eq!(level(&results, "nproc"), Severity::Warning);
        assert_eq!(level(&results, "shm"), Severity::Ok);
        let shm = results.iter().find(|it| it.check == "shm").unwrap();
        assert_eq!(shm.values["shm_bytes"], 64 << 20);
        let nofile = results.iter().find(|it| it.check == "nofile").unwrap();
        // Two channels with one socket each by default.
        assert_eq!(
            (nofile.level, &nofile.values["tcp_peers"]),
            (Severity::Ok, &480.into())
        );
        root.write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
        assert_eq!(
            level(&check(&root.scope(), &config), "memlock"),
            Severity::Error
        );
        let small = Config {
            buffer_bytes: 8 << 20,
            ..config
        };
        assert_eq!(
            level(&check(&root.scope(), &small), "memlock"),
            Severity::Ok
        );
    }

    #[test]
    fn memory_of_the_control_group_is_compared_with_the_slots_of_ranks() {
        let root = FakeRoot::new("memory");
        root.write("proc/self/limits", LIMITS);
        root.write("proc/self/cgroup", "0::/job\n");
        root.write("sys/fs/cgroup/job/memory.current", "1000\n");
        let judged = |limit: u64| {
            root.write("sys/fs/cgroup/job/memory.max", &format!("{limit}\n"));
            level(&check(&root.scope(), &Config::default()), "memory")
        };
        assert_eq!(judged(1 << 40), Severity::Ok);
        // The scope of the test has 4 cores, and a rank takes 64 MiB.
        assert_eq!(judged(255 << 20), Severity::Warning);
        assert_eq!(judged(60 << 20), Severity::Error);
        assert_eq!(
            level(&check(&root.scope(), &Config::default()), "shm"),
            Severity::Warning
        );
    }

    #[test]
    fn missing_limits_are_a_warning_instead_of_a_pass() {
        let root = FakeRoot::new("no-limits");
        let results = check(&root.scope(), &Config::default());
        let unknown = results.iter().filter(|it| it.check == "unknown");
        assert_eq!(unknown.count(), 3);
    }

    #[test]
    fn sizes_of_tmpfs_are_parsed() {
        assert_eq!(size_option("65536k"), Some(64 << 20));
        assert_eq!(size_option("4g"), Some(4 << 30));
        assert_eq!(size_option("4096"), Some(4096));
        assert_eq!(size_option("50%"), None);
    }
}
