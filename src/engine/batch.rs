//! The calls of one communicator that were submitted together.

use super::Report;
use super::host::{HostEngine, SLEEP, WaitClock};
use super::run::Run;
use crate::error::Result;
use crate::mem::UserBuffers;
use crate::plan::Request;
use crate::types::Collective;
use std::collections::VecDeque;
use std::time::Duration;

/// What one turn of a batch brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// At least one step ran.
    pub moved: bool,
    /// Every call is complete.
    pub done: bool,
}

/// Whose calls a batch runs, each named by its index.
pub trait Caller {
    /// A call is about to read its buffers. Those before it, but for messages that run beside it,
    /// have ended.
    ///
    /// # Errors
    /// What stops it.
    fn starts(&mut self, index: usize, buffers: &mut UserBuffers<'_>) -> Result<()>;

    /// A call is over.
    fn ends(&mut self, index: usize, buffers: &UserBuffers<'_>, report: Report);
}

/// Calls of one communicator in order. Collectives run one after the other; sends and receives
/// that stand between two collectives run at once, those of one pair and direction in order.
#[derive(Debug)]
pub struct Batch<'a> {
    waiting: VecDeque<Run<'a>>,
    active: Vec<Run<'a>>,
    clock: WaitClock,
}

impl<'a> Batch<'a> {
    /// Plans `calls`, each with the index that its caller knows it by.
    ///
    /// # Errors
    /// As for [`HostEngine::prepare`]. Nothing has moved.
    pub fn new(
        engine: &mut HostEngine,
        calls: Vec<(usize, Request, UserBuffers<'a>)>,
    ) -> Result<Batch<'a>> {
        // Plans come first, so that an impossible call is found before the first one counts.
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
            .admit(waiting.iter().filter_map(Run::feeds))?;
        Ok(Batch {
            waiting,
            active: Vec::new(),
            clock: WaitClock::default(),
        })
    }

    /// Runs every step that can run now, and tells `caller` which calls start and end.
    ///
    /// # Errors
    /// What stopped a call.
    pub fn poll(&mut self, engine: &mut HostEngine, caller: &mut impl Caller) -> Result<Progress> {
        let mut moved = false;
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
            if !finished || self.waiting.is_empty() {
                break;
            }
        }
        if moved {
            self.clock = WaitClock::default();
        }
        Ok(Progress {
            moved,
            done: self.active.is_empty() && self.waiting.is_empty(),
        })
    }

    /// Waits for something to change, after `scans` turns in a row without a step. `turns` is the
    /// number of batches that one thread drives: with more than one, none of them sleeps long.
    ///
    /// # Errors
    /// Timeout or remote, saying for whom and what this rank waits; the communicator's fault.
    pub fn idle(&mut self, engine: &mut HostEngine, scans: u32, turns: usize) -> Result<()> {
        if self.active.is_empty() {
            // Done, and only waiting for the other batches of its group.
            return Ok(());
        }
        let limit = if turns == 1 {
            SLEEP
        } else {
            Duration::from_micros(50)
        };
        let active = &self.active;
        engine.wait(scans, limit, &mut self.clock, |links| {
            active.iter().flat_map(|run| run.waits_for(links)).collect()
        })
    }

    /// Starts the calls that may run beside those that do.
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
            if message {
                // Messages of one pair and direction share a connection: one at a time.
                let busy = self.active.iter().any(|run| run.pair() == next.pair());
                if busy {
                    return self.admit_other_pairs(engine, caller);
                }
            }
            if let Some(run) = self.waiting.pop_front() {
                self.start(run, engine, caller)?;
            }
        }
        Ok(())
    }

    /// Behind a message whose connection is busy, messages of other pairs may still start, up to
    /// the next collective.
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
