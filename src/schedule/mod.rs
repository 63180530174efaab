//! Schedules are data: what every rank does, chunk by chunk, in one pass.
//!
//! The host interpreter, the GPU interpreter, the proxy and the verifier all walk a schedule with
//! [`walk`], so that no step count and no order is computed twice.

mod ir;

pub use ir::{MAX_FAN, Op, Peers, Schedule, Step, Visit, walk};
