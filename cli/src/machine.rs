//! Describes the hardware and kernel of the host on which this process runs, for benchmark records.

use serde::{Deserialize, Serialize};
use std::fs;

/// A summary of the machine that may be published: it has no user names and no environment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineInfo {
    /// Model name of the processor, as /proc/cpuinfo gives it.
    pub cpu: String,
    /// Processors that this process may use. For a rank that `cinch` has started, those of its
    /// launcher.
    pub cores: usize,
    /// Widest instruction set that the library would use.
    pub isa: String,
    /// Release of the Linux kernel.
    pub kernel: String,
    /// Architecture of the processor, such as `x86_64`.
    pub arch: String,
    /// Bytes of memory.
    pub memory_bytes: u64,
}

impl MachineInfo {
    /// Describes this machine. Facts that cannot be read are `unknown` or 0.
    pub fn detect() -> MachineInfo {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpuinfo
            .lines()
            .find_map(|line| line.strip_prefix("model name"))
            .and_then(|rest| rest.split_once(':'))
            .map_or("unknown", |(_, model)| model.trim());
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        MachineInfo {
            cpu: cpu.to_string(),
            cores: launched_on()
                .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
                .unwrap_or(0),
            isa: cinch::cpu::Isa::detect().name().to_string(),
            kernel: match kernel.trim() {
                "" => "unknown".into(),
                kernel => kernel.into(),
            },
            arch: std::env::consts::ARCH.to_string(),
            memory_bytes: meminfo("MemTotal:").unwrap_or(0),
        }
    }
}

/// Returns the number of processors that the launcher may use, as a rank may be bound to one of
/// them.
fn launched_on() -> Option<usize> {
    std::env::var("CINCH_LAUNCH_CORES").ok()?.parse().ok()
}

/// Returns the bytes of available memory, if the kernel reports them.
pub fn available_memory() -> Option<u64> {
    meminfo("MemAvailable:")
}

/// Returns this host's name.
pub fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or("unknown".into(), |name| name.trim().to_string())
}

fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_known() {
        let machine = MachineInfo::detect();
        assert!(
            machine.cores > 0 && machine.memory_bytes > 1 << 20,
            "{machine:?}"
        );
        assert_ne!(machine.kernel, "unknown");
        assert!(available_memory().unwrap() <= machine.memory_bytes);
    }
}
