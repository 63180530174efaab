//! Repeated calls: the latest calls without a codec are kept with their plan, so that an equal call builds nothing.
//!
//! A call of a few bytes takes as long as the instructions around it. A kept call has one pass on one channel and
//! sends through slots, so its steps run one after the other. It sends the same messages as a [`Run`], so ranks need
//! not agree whether they keep a call.
//!
//! [`Run`]: super::Run

use super::super::Report;
use super::MAX_SLEEP;
use super::engine::HostEngine;
use super::kept_call::{BufferExtents, KeptCall};
use super::messages::{StepPlace, is_runnable, missing_flushes, missing_of_step};
use super::state::{Chain, Chunk, InputStats, TILE, ZeroCopyProgress};
use super::step::StepWork;
use super::wait::WaitClock;
use crate::codec::RoundingRandom;
use crate::error::Result;
use crate::mem::UserBuffers;
use crate::plan::Request;
use crate::schedule::{Step, walk};
use crate::transport::{Header, Links};
use crate::types::{Call, Collective, RawReason, SIGNATURE_WORDS};

/// Number of calls that are kept. A new call replaces the oldest.
const KEPT_CALLS: usize = 8;

/// Index of the sequence number in the words of a signature.
const SEQUENCE: usize = 3;

impl HostEngine {
    /// Keeps a call that has run without a codec because of `raw_reason`, if an equal call can repeat it. `request` is
    /// the resolved call, and `report` the report of its run.
    pub fn keep_call(
        &mut self,
        call: &Call,
        raw_reason: RawReason,
        request: &Request,
        report: &Report,
    ) {
        let is_to_itself = call.collective == Collective::SendRecv && call.root == call.peer;
        if self.zero_copy || self.links.checks_data || report.channels != 1 || is_to_itself {
            return;
        }
        if self.repeated.iter().any(|kept| kept.call == *call) {
            return;
        }
        let Some(extents) = BufferExtents::of(call, self.links.rank, self.links.nranks) else {
            return;
        };
        // The call has run, so that its plan and reducers exist.
        let Ok(plan) = self.planner.plan(request) else {
            return;
        };
        if plan.is_coded() || plan.geometry.passes() != 1 {
            return;
        }
        let Ok(arithmetic) = self.arithmetic(request, &plan) else {
            return;
        };
        let decided = plan.decided(request);
        let signature = decided
            .signature(plan.algorithm, plan.specs.intra, 0)
            .words();
        let rank = self.links.rank;
        let order = walk(&plan.schedule, 1)
            .map(|visit| {
                let step = &plan.schedule.steps[visit.step];
                (visit.step, Chunk::of(&plan, rank, 0, visit.step, step))
            })
            .collect();
        if self.repeated.len() == KEPT_CALLS {
            self.repeated.remove(0);
        }
        let kept = KeptCall {
            call: *call,
            raw_reason,
            request: decided,
            plan: plan.clone(),
            arithmetic,
            signature,
            extents,
            order,
            chain: Chain::default(),
            report: *report,
        };
        self.repeated.push(kept);
    }

    /// Returns the place of the kept call that equals `call`, if it can run with these buffers.
    #[inline]
    pub fn find_repeated(&self, call: &Call, buffers: &UserBuffers<'_>) -> Option<usize> {
        let mut kept = self.repeated.iter();
        let at = kept.rposition(|kept| kept.call == *call)?;
        self.repeated[at].extents.admit(buffers).then_some(at)
    }

    /// Runs the kept call at `at` until it ends. Returns its report, and why it runs without a codec.
    ///
    /// # Errors
    /// See [`HostEngine::run`].
    pub fn run_repeated(
        &mut self,
        at: usize,
        buffers: &mut UserBuffers<'_>,
    ) -> Result<(Report, RawReason)> {
        // After a call that fails none is kept; the communicator cannot continue.
        let mut all = std::mem::take(&mut self.repeated);
        let kept = &mut all[at];
        self.repeat(kept, buffers)?;
        let ran = (kept.report, kept.raw_reason);
        self.repeated = all;
        Ok(ran)
    }

    fn repeat(&mut self, kept: &mut KeptCall, buffers: &mut UserBuffers<'_>) -> Result<()> {
        let mut signature = kept.signature;
        signature[SEQUENCE] = self.next_sequence(&kept.request);
        let mut record = None;
        let steps = &kept.plan.schedule.steps;
        for &(index, chunk) in &kept.order {
            let step = &steps[index];
            // A first message that can be sent at once travels while the call is logged.
            let waits = step.op.receives() || !self.is_ready(step)?;
            if waits && record.is_none() {
                record = Some(self.record_begin(signature));
            }
            if waits {
                self.await_step(index, step, &signature)?;
                self.check_messages(&signature, 0, step, chunk.taken)?;
            }
            let work = StepWork {
                plan: &kept.plan,
                step,
                index,
                op: kept.request.op,
                arithmetic: &kept.arithmetic,
                takes: None,
                gives: None,
                buffers,
                stats: &mut InputStats::new(false),
                scratch: &mut self.scratch,
                scales: None,
                residuals: None,
                chunk: &chunk,
                randoms: [RoundingRandom::NONE; 2],
                tile: TILE,
                nranks: self.links.nranks,
                isa: self.isa,
            };
            let header = Header {
                bytes: chunk.given as u32,
                signature,
                crc: 0,
            };
            work.execute(&mut self.links, 0, &mut kept.chain, Some(header));
        }
        let record = record.unwrap_or_else(|| self.record_begin(signature));
        self.await_flush(steps, &signature)?;
        if let (Some(recorder), Some(number)) = (self.recorder(), record) {
            recorder.end(number);
        }
        Ok(())
    }

    #[inline]
    fn is_ready(&mut self, step: &Step) -> Result<bool> {
        let ready = is_runnable(&mut self.links, 0, step);
        ready.map_err(|error| self.explain_break(error, step))
    }

    /// Waits until a step can run.
    #[inline]
    fn await_step(
        &mut self,
        index: usize,
        step: &Step,
        signature: &[u64; SIGNATURE_WORDS],
    ) -> Result<()> {
        self.wait_until(
            |engine| engine.is_ready(step),
            |links| {
                let mut found = Vec::new();
                let at = StepPlace {
                    channel: 0,
                    pass: 0,
                    step: index,
                };
                let progress = ZeroCopyProgress::default();
                missing_of_step(step, at, signature, progress, links, &mut found);
                found
            },
        )
    }

    /// Waits until all messages of these steps have left this process.
    #[inline]
    fn await_flush(&mut self, steps: &[Step], signature: &[u64; SIGNATURE_WORDS]) -> Result<()> {
        self.wait_until(
            |engine| engine.has_flushed(steps, 1),
            |links| {
                let mut found = Vec::new();
                missing_flushes(signature, links, &mut found);
                found
            },
        )
    }

    /// Waits until `is_ready` returns true. `missing` lists the ranks and messages that are waited for.
    #[inline]
    fn wait_until(
        &mut self,
        mut is_ready: impl FnMut(&mut HostEngine) -> Result<bool>,
        missing: impl Fn(&mut Links) -> Vec<(usize, String)>,
    ) -> Result<()> {
        match is_ready(self)? {
            true => Ok(()),
            false => self.wait_for_peers(is_ready, missing),
        }
    }

    /// Waits until `is_ready`, which has returned false, returns true.
    #[inline(never)]
    fn wait_for_peers(
        &mut self,
        mut is_ready: impl FnMut(&mut HostEngine) -> Result<bool>,
        missing: impl Fn(&mut Links) -> Vec<(usize, String)>,
    ) -> Result<()> {
        let mut clock = WaitClock::default();
        let mut scans = 0;
        loop {
            self.wait(scans, MAX_SLEEP, &mut clock, &missing)?;
            scans += 1;
            if is_ready(self)? {
                self.end_wait(&mut clock);
                return Ok(());
            }
        }
    }
}
