//! The kernel ABI: the structs and constants of `kernels/abi.h`, in Rust, with the same sizes and offsets.
//!
//! `memory` has the structs in memory that outlives a launch, and `launch` the kernel arguments.
//! Both languages assert every size and offset, so that neither side can change alone. Device addresses
//! are plain `u64`: the host never dereferences them.

mod launch;
mod memory;
#[cfg(test)]
mod tests;

pub use launch::*;
pub use memory::*;
