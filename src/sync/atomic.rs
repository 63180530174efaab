//! Atomics of lock-free code: of the standard library, or of loom when its models run
//! (`RUSTFLAGS="--cfg loom" cargo test --lib loom_`).
//!
//! A loom atomic is no plain word of memory, so code that maps memory does not run under loom. The
//! models run the protocols of `mem` on counters of their own.

#[cfg(all(loom, test))]
pub use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(all(loom, test)))]
pub use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
