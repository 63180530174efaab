//! Failing and waiting: the fault that every wait checks, backoff, and the facade of atomics and
//! locks (std, or loom under `--cfg loom`).

pub mod atomic;
mod backoff;
mod fault;
mod locks;

pub use backoff::{Backoff, Pause};
pub use fault::{CAUSE_TIMEOUT, Fault};
