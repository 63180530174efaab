//! Proof that a schedule is right: all ranks run symbolically, over connections of a given depth,
//! with overlapping passes.
//!
//! Proven, for the passes that run:
//! - every output chunk holds each contribution that it should hold exactly once, divided once
//!   where the collective reduces;
//! - ranks that get the same chunk get the same bits under any codec: their outputs are the same
//!   expression, equal in the order of additions and in every encoding on the way;
//! - messages come in the order in which they are expected, and none is left over;
//! - no rank waits for ever;
//! - no step reads input that an earlier step has overwritten where input and output are one.
//!
//! One run proves it for every timing. A rank runs its steps in one order, a connection has one
//! sender and one receiver, and a step that can run stays able to run: so all interleavings lead
//! to the same messages and to the same end.
//!
//! Expressions are 64-bit hashes; two that differ are taken for equal with a probability of
//! 2^-64 for each comparison.

mod run;
mod shape;
mod value;

use super::chunks::Pattern;
use super::ir::Schedule;
use crate::error::Result;

/// Under what conditions to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Slots of each connection.
    pub slots: usize,
    /// Passes. All overlaps that there are have been seen after [`Schedule::stages`] + 2.
    pub passes: usize,
}

/// What a run has shown besides being right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Messages of one pass, over all ranks.
    pub messages: usize,
    /// The longest chain of messages of one pass, each waiting for the one before it.
    pub hops: usize,
}

/// Runs `schedules`, one a rank in rank order, against what `pattern` promises.
///
/// # Errors
/// Internal, naming the rank, the pass, the step and what is wrong with it.
pub fn verify(pattern: &Pattern, schedules: &[Schedule], limits: Limits) -> Result<Proof> {
    shape::check(pattern, schedules)?;
    run::Run::new(pattern, schedules, limits).finish()
}
