//! Runs the calls of one communicator that were submitted together.

use super::super::Report;
use super::engine::HostEngine;
use super::run::Run;
use super::wait::{MAX_SLEEP, WaitClock};
use crate::error::Result;
use crate::mem::UserBuffers;
use crate::plan::Request;
use crate::types::Collective;
use std::collections::VecDeque;
use std::time::Duration;

/// Longest sleep in one wait of a thread that drives several batches.
const SHARED_MAX_SLEEP: Duration = Duration::from_micros(50);

/// Result of one [`Batch::poll`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Whether at least one step ran.
    pub moved: bool,
    /// Whether every call is complete.
    pub done: bool,
}

/// Observes the calls of a batch, each identified by the index that the caller gave it.
pub trait Caller {
    /// Called when a call is about to read its buffers. All earlier calls have ended, except sends and
    /// receives that run at the same time.
    ///
    /// # Errors
    /// An error stops the batch.
    fn starts(&mut self, index: usize, buffers: &mut UserBuffers<'_>) -> Result<()>;

    /// Called after a call has ended, with its report.
    fn ends(&mut self, index: usize, buffers: &UserBuffers<'_>, report: Report);
}

/// Calls of one communicator, in order. Collectives run one after the other. The sends and receives between
/// two collectives run at the same time, except that messages of one pair and direction run in order.
#[derive(Debug)]
pub struct Batch<'a> {
    waiting: VecDeque<Run<'a>>,
    active: Vec<Run<'a>>,
    clock: WaitClock,
}

impl<'a> Batch<'a> {
    /// Plans `calls`; each carries the index by which its caller identifies it.
    ///
    /// # Errors
    /// See [`HostEngine::prepare`]. Nothing has moved.
    pub fn new(
        engine: &mut HostEngine,
        calls: Vec<(usize, Request, UserBuffers<'a>)>,
    ) -> Result<Batch<'a>> {
        // All calls are planned first: an impossible call fails before an earlier call is numbered.
        let mut plans = Vec::with_capacity(calls.len());
        for (_, request, _) in &calls {
            plans.push(engine.planner.plan(request)?);
        }
        let waiting: VecDeque<Run<'a>> = calls
            .into_iter()
            .zip(plans)
            .map(|((index, request, buffers), plan)| {
                Run::new(engine, index, &request, plan, buffers)
            })
            .collect::<Result<_>>()?;
        engine
            .feedback
            .admit(waiting.iter().filter_map(Run::feedback_tensor))?;
        Ok(Batch {
            waiting,
            active: Vec::new(),
            clock: WaitClock::default(),
        })
    }

    /// Runs every step that can run now, and reports to `caller` which calls start and end.
    ///
    /// # Errors
    /// The failure that stopped a call.
    pub fn poll(&mut self, engine: &mut HostEngine, caller: &mut impl Caller) -> Result<Progress> {
        let mut moved = false;
        let mut has_ended = false;
        loop {
            self.admit(engine, caller)?;
            let mut finished = false;
            let mut at = 0;
            while at < self.active.len() {
                let (stepped, complete) = self.active[at].poll(engine)?;
                moved |= stepped;
                if complete {
                    let mut run = self.active.remove(at);
                    let report = run.report(engine);
                    caller.ends(run.index(), &run.buffers, report);
                    finished = true;
                } else {
                    at += 1;
                }
            }
            has_ended |= finished;
            if !finished || self.waiting.is_empty() {
                break;
            }
        }
        if moved || has_ended {
            engine.end_wait(&mut self.clock);
        }
        Ok(Progress {
            moved,
            done: self.active.is_empty() && self.waiting.is_empty(),
        })
    }

    /// Waits for progress after `scans` polls in a row without progress. `batches` is the number of batches
    /// that this thread drives: with several, the sleep is short.
    ///
    /// # Errors
    /// Timeout or remote, naming the peers and messages that are missing; the communicator's fault.
    pub fn idle(&mut self, engine: &mut HostEngine, scans: u32, batches: usize) -> Result<()> {
        if self.active.is_empty() {
            // This batch is complete; the thread still drives other batches of its group.
            return Ok(());
        }
        let limit = if batches == 1 {
            MAX_SLEEP
        } else {
            SHARED_MAX_SLEEP
        };
        let active = &self.active;
        engine.wait(scans, limit, &mut self.clock, |links| {
            active.iter().flat_map(|run| run.missing(links)).collect()
        })
    }

    /// Starts the waiting calls that may run at the same time as the active calls.
    fn admit(&mut self, engine: &mut HostEngine, caller: &mut impl Caller) -> Result<()> {
        while let Some(next) = self.waiting.front() {
            let message = next.collective() == Collective::SendRecv;
            let all_messages = self
                .active
                .iter()
                .all(|run| run.collective() == Collective::SendRecv);
            if !(self.active.is_empty() || (message && all_messages)) {
                return Ok(());
            }
            if message && self.active.iter().any(|run| run.pair() == next.pair()) {
                // Messages of one pair and direction share a connection, so the next message of an
                // active pair must wait.
                return self.admit_other_pairs(engine, caller);
            }
            if let Some(run) = self.waiting.pop_front() {
                self.start(run, engine, caller)?;
            }
        }
        Ok(())
    }

    /// Starts messages of pairs that are not active, up to the next collective, while the first waiting
    /// message's pair is active.
    fn admit_other_pairs(
        &mut self,
        engine: &mut HostEngine,
        caller: &mut impl Caller,
    ) -> Result<()> {
        let mut busy: Vec<_> = self.active.iter().map(Run::pair).collect();
        let mut at = 0;
        while at < self.waiting.len() && self.waiting[at].collective() == Collective::SendRecv {
            let pair = self.waiting[at].pair();
            if busy.contains(&pair) {
                at += 1;
                continue;
            }
            busy.push(pair);
            if let Some(run) = self.waiting.remove(at) {
                self.start(run, engine, caller)?;
            }
        }
        Ok(())
    }

    fn start(
        &mut self,
        mut run: Run<'a>,
        engine: &mut HostEngine,
        caller: &mut impl Caller,
    ) -> Result<()> {
        caller.starts(run.index(), &mut run.buffers)?;
        run.start(engine);
        self.active.push(run);
        Ok(())
    }
}
