//! The operating system, wrapped: each call returns a `Result` with a sentence.

pub mod cpu;
pub mod cuda;
pub mod fork;
pub mod futex;
pub mod ibverbs;
mod loader;
pub mod log;
pub mod memory;
pub mod nccl;
pub mod process;
pub mod release;
pub mod socket;
pub mod whole;
