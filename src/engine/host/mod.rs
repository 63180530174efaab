//! The host engine: runs the calls of one communicator on host memory, on the caller's thread.
//!
//! ```text
//! Batch            calls of a group, in order; messages side by side
//!   Run            one call: a cursor into the schedule for each channel
//!     StepWork     one step: encode, decode, reduce, copy, tile by tile
//!     messages     whether the messages of a step have arrived, and belong to the call
//!     zero_copy    the steps that send from, or receive into, the caller's buffers
//! CallCache        calls without a codec that have run, for equal calls (`cached_run`)
//! HostEngine       what calls share: connections, planner, scratch memory, kept scales and residuals
//! ```
//! `Run::poll` executes each step whose messages have arrived and whose slots are free. It never blocks, so
//! that one thread can drive several communicators. Cached calls bypass it: they run alone and block; the
//! messages of a group run as cached calls while none of them has to wait. Nothing on these paths allocates or
//! locks per step.

mod batch;
mod cached_run;
mod call_cache;
mod engine;
mod first_look;
mod messages;
mod output_writes;
mod run;
mod state;
mod step;
mod wait;
mod zero_copy;

pub use batch::{Batch, Caller, Progress};
pub use engine::HostEngine;
pub use run::Run;

use super::Report;
use crate::error::Result;
use crate::mem::UserBuffers;
use crate::plan::Request;
use wait::{MAX_SLEEP, WaitClock};

impl HostEngine {
    /// Makes a [`Run`] from a request, its plan and its buffers. No data moves yet.
    ///
    /// # Errors
    /// See [`Planner::plan`](crate::plan::Planner::plan) and
    /// [`Feedback::admit`](crate::codec::feedback::Feedback::admit).
    pub fn prepare<'a>(&mut self, request: Request, buffers: UserBuffers<'a>) -> Result<Run<'a>> {
        let plan = self.planner.plan(&request)?;
        let run = Run::new(self, 0, &request, plan, buffers)?;
        self.feedback.admit(run.feedback_tensor())?;
        Ok(run)
    }

    /// Runs one call until it ends.
    ///
    /// # Errors
    /// The failure that stopped the call; the communicator cannot continue after it.
    pub fn run(&mut self, mut run: Run<'_>) -> Result<Report> {
        self.drive(&mut run)
    }

    /// Runs one call until it ends; the caller keeps `run` and its buffers.
    ///
    /// # Errors
    /// See [`HostEngine::run`].
    pub fn drive(&mut self, run: &mut Run<'_>) -> Result<Report> {
        run.start(self);
        let mut clock = WaitClock::default();
        let mut scans = 0;
        loop {
            let (moved, complete) = run.poll(self)?;
            if moved || complete {
                scans = 0;
                self.end_wait(&mut clock);
            }
            if complete {
                return Ok(run.report(self));
            }
            if !moved {
                self.wait(scans, MAX_SLEEP, &mut clock, |links| run.missing(links))?;
                scans += 1;
            }
        }
    }
}
