//! Wrappers of the operating system's interfaces and of system libraries. Error messages are
//! sentences that name the failed operation.

pub mod cgroup;
pub mod clock;
pub mod cpu;
pub mod cuda;
pub mod deferred_drop;
pub mod file;
pub mod fork;
pub mod fork_safe;
pub mod futex;
pub mod ibverbs;
pub mod json_string;
mod loader;
pub mod log;
pub mod memory;
pub mod numa;
pub mod nvml;
pub mod nvtx;
pub mod pci;
pub mod plugin;
pub mod process;
pub mod socket;
mod socket_address;
mod stderr;
pub mod user_signal;
