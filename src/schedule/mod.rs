//! Schedules are data: the steps of every rank, chunk by chunk, in one pass.
//!
//! The host interpreter, the GPU interpreter, the proxy and the verifier all walk a schedule with
//! [`walk`], so that no step count and no order is computed twice. [`SchedulePattern`] alone defines
//! chunks: how many a pass has, their places in the buffers, and the ranks that contribute to them. Each
//! algorithm has a file with its generators; [`verify()`] proves that their schedules are right.

mod chunks;
mod cost;
mod direct;
mod fan;
mod generate;
mod hierarchical;
mod hosts;
mod ir;
mod oneshot;
mod ring;
mod ring_count;
mod tree;
mod verify;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod hierarchical_tests;

pub use chunks::{ChunkPlace, SchedulePattern};
pub use cost::{CostCounts, Hops, cost_counts};
pub use generate::{algorithms, generate};
pub use hosts::Hosts;
pub use ir::{MAX_FAN, Op, Own, Schedule, Step, StepPeers, Visit, Walk, WalkCursor, walk};
pub use ring_count::{directions, has_several_rings, ring_steps};
pub use verify::{Proof, VerifyLimits, verify};
