//! Atomics of lock-free code: those of loom while its models run (`RUSTFLAGS="--cfg loom" cargo
//! test --lib loom_`), otherwise those of the standard library.
//!
//! A loom atomic is no plain word of memory, so code that maps memory does not run under loom. The
//! models run the protocols of `mem` on counters of their own.

#[cfg(all(loom, test))]
pub use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(all(loom, test)))]
pub use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
