//! Proves that a schedule is right: all ranks run symbolically, over connections of a given depth,
//! with overlapping passes.
//!
//! The run proves of its passes:
//! - every output chunk holds each contribution that it should hold exactly once, divided once
//!   where the collective reduces;
//! - ranks that receive the same chunk end with the same bits under any codec: their outputs are the same
//!   expression, equal in the order of additions and in every encoding;
//! - messages come in the order in which they are expected, and none is left over;
//! - no rank waits without end;
//! - no step reads input that an earlier step has overwritten, if the call is in place.
//!
//! A single run covers every timing. Each rank runs its steps in one order, each connection has one sender
//! and one receiver, and a step that can run stays able to run. So all interleavings exchange the same
//! messages and end in the same state.
//!
//! Expressions are 64-bit hashes; two that differ are taken for equal with a probability of
//! 2^-64 for each comparison.

mod run;
mod shape;
mod value;

use super::chunks::SchedulePattern;
use super::ir::Schedule;
use crate::error::Result;

/// Conditions of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyLimits {
    /// Slots of each connection.
    pub slots: usize,
    /// Passes. [`Schedule::stages`] + 2 passes cover all overlaps.
    pub passes: usize,
}

/// Counts of a run that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Messages of one pass, over all ranks.
    pub messages: usize,
    /// Longest chain of messages of one pass that wait for one another.
    pub hops: usize,
}

/// Runs `schedules`, one per rank in rank order, against the contributors of `pattern`.
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
