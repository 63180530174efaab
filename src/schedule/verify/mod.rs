//! Proves that a schedule is right: all ranks run symbolically, over connections of a given depth,
//! with overlapping passes.
//!
//! The run proves, for each of its passes, that:
//! - every output chunk holds each contribution that it should hold exactly once, divided once
//!   where the collective reduces;
//! - ranks that receive the same chunk end with the same bits under any codec: their outputs are the same
//!   expression, equal in the order of additions and in every encoding;
//! - messages arrive in the order in which they are expected, and every message is received;
//! - no rank waits forever;
//! - no step reads input that an earlier step has overwritten, if the call is in place.
//!
//! A single run covers every timing. Each rank runs its steps in one order, each connection has one
//! sender and one receiver. A step that can run stays able to run. So all interleavings exchange
//! the same messages and end in the same state.
//!
//! Expressions are 64-bit hashes; two that differ are taken for equal with a probability of
//! 2^-64 for each comparison.

mod run;
mod shape;
mod value;

use super::chunks::SchedulePattern;
use super::ir::Schedule;
use crate::error::Result;

/// The connections and passes of a verifying run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyLimits {
    /// Number of slots of each connection.
    pub slots: usize,
    /// Number of passes. [`Schedule::stages`] + 2 passes cover every overlap of passes.
    pub passes: usize,
}

/// Counts from a run that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Number of messages of one pass, over all ranks.
    pub messages: usize,
    /// Length of the longest chain of messages in one pass, each of which waits for the message
    /// before it.
    pub hops: usize,
}

/// Runs `schedules`, one per rank in rank order, and compares every output with the contributors
/// that `pattern` requires.
///
/// # Errors
/// Internal, naming the rank, the pass, the step and what is wrong with it.
pub fn verify(
    pattern: &SchedulePattern,
    schedules: &[Schedule],
    limits: VerifyLimits,
) -> Result<Proof> {
    shape::check(pattern, schedules)?;
    run::SymbolicRun::new(pattern, schedules, limits).finish()
}
