//! Waiting and failing together: the fault that every wait watches, deadlines, backoff, and the
//! atomics facade (std, or loom under `--cfg loom`).

pub mod atomic;
mod backoff;
mod fault;

pub use backoff::{Backoff, Pause};
pub use fault::Fault;
