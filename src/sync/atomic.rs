//! Atomics of the lock-free code: the standard ones, or loom's when its models run
//! (`RUSTFLAGS="--cfg loom" cargo test --lib loom_`).
//!
//! Under loom an atomic is not a plain word of memory, so nothing that maps memory runs there:
//! the models drive the protocols of `mem` on counters of their own.

#[cfg(all(loom, test))]
pub use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(all(loom, test)))]
pub use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
