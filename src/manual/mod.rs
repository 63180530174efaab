//! Essays: layers, one allreduce, memory ordering, numbers, failures, which calls compress, how ways
//! are chosen on GPUs, the drop-in for NCCL, adding things, dependencies.

pub mod adding;
pub mod codec_rules;
pub mod dependencies;
pub mod failures;
pub mod layers;
pub mod memory_ordering;
pub mod nccl;
pub mod numerics;
pub mod one_allreduce;
pub mod tuning;

/// The Rust of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
