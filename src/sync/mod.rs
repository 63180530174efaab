//! Waiting and failing together: the fault that every wait watches, deadlines, backoff, and the
//! atomics facade (std, or loom under `--cfg loom`).

mod fault;

pub use fault::Fault;
