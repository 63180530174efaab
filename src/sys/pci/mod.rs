//! PCI functions, network devices and AMD's links between GPUs, read from a directory that looks like /sys.
//!
//! [`PciFiles`] gives access to the files; [`SysDirectory`] implements it for a directory on disk, and the
//! tests' `MemoryFiles` for a tree in memory. The directory may be hostile. Symbolic links that leave the
//! directory are not followed, and the constants of this module limit how much is read. A value that cannot
//! be read counts as unknown.

mod bus_id;
mod files;
mod kfd;
#[cfg(test)]
pub mod memory_files;
mod network;
#[cfg(test)]
mod tests;
mod tree;

pub use bus_id::BusId;
pub use files::{PciFiles, SysDirectory};
pub use kfd::{KfdGpu, KfdLink, kfd_gpus};
pub use network::NetworkPort;
pub use tree::{PciAttributes, PciFunction, PciLinkText, PciTree};

/// Largest number of devices that are read.
pub const MAX_DEVICES: usize = 4096;

/// Largest number of directories above a file.
pub const MAX_LEVELS: usize = 64;

/// Largest size of a file; a longer file counts as unreadable.
pub const MAX_FILE_BYTES: usize = 4096;
