//! Runs cached calls, which plan and build nothing.
//!
//! Planning, checks and logging take most of the time of a call of a few bytes. A cached call has no codec, has one
//! pass on one channel, and sends through slots, so its steps run one after the other. It sends the messages that a
//! [`Run`] sends, so ranks need not agree which calls they have cached.
//!
//! [`Run`]: super::Run

use super::super::Report;
use super::MAX_SLEEP;
use super::call_cache::{BufferExtents, CachedCall};
use super::engine::HostEngine;
use super::messages::{StepPlace, is_runnable, missing_flushes, missing_of_step};
use super::state::{Chain, Chunk, InputStats, TILE, ZeroCopyProgress};
use super::step::StepWork;
use super::wait::WaitClock;
use crate::codec::RoundingRandom;
use crate::error::Result;
use crate::mem::UserBuffers;
use crate::plan::Request;
use crate::recorder::RepeatedCall;
use crate::schedule::{Step, walk};
use crate::transport::{Header, Links};
use crate::types::{Call, Collective, SEQUENCE_WORD, SIGNATURE_WORDS};
use std::sync::Arc;
use std::time::Instant;

impl HostEngine {
    /// Caches a call that has run without a codec, if it ran before and equal calls can repeat it. `request` is the
    /// resolved call, and `report` the report of its run. `counts` makes the counters of its repeats.
    pub fn cache_call(
        &mut self,
        call: &Call,
        request: &Request,
        report: &Report,
        counts: impl FnOnce() -> Arc<RepeatedCall>,
    ) {
        let is_to_itself = call.collective == Collective::SendRecv && call.root == call.peer;
        if self.zero_copy || self.links.checks_data || report.channels != 1 || is_to_itself {
            return;
        }
        if self.cache.find(call).is_some() || !self.cache.wants(call) {
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
        self.cache.insert(CachedCall {
            call: *call,
            counts: counts(),
            request: decided,
            plan: plan.clone(),
            arithmetic,
            signature,
            extents,
            order,
            chain: Chain::default(),
            report: *report,
        });
    }

    /// Returns the place of the cached call that equals `call`, if these buffers fit it.
    #[inline]
    pub fn find_cached(&self, call: &Call, buffers: &UserBuffers<'_>) -> Option<usize> {
        let at = self.cache.find(call)?;
        let cached = self.cache.get(at)?;
        cached.extents.fit(buffers).then_some(at)
    }

    /// Runs the cached call at `at` until it ends, and counts it, with the time since `begun`. Returns its report;
    /// `None` if there is no call.
    ///
    /// # Errors
    /// See [`HostEngine::run`].
    pub fn run_cached(
        &mut self,
        at: usize,
        buffers: &mut UserBuffers<'_>,
        begun: Option<Instant>,
    ) -> Option<Result<Report>> {
        let mut cached = self.cache.take(at)?;
        let ran = self.run_steps(&mut cached, buffers);
        let ran = ran.map(|()| {
            if self.recorder().is_some() {
                cached.counts.add(begun.map(|begun| begun.elapsed()));
            }
            cached.report
        });
        self.cache.put_back(at, cached);
        Some(ran)
    }

    fn run_steps(&mut self, cached: &mut CachedCall, buffers: &mut UserBuffers<'_>) -> Result<()> {
        let mut signature = cached.signature;
        signature[SEQUENCE_WORD] = self.next_sequence(&cached.request);
        let mut record = None;
        let steps = &cached.plan.schedule.steps;
        for &(index, chunk) in &cached.order {
            let step = &steps[index];
            // A first message that can be sent at once travels while the call is logged.
            let waits = step.op.receives() || !matches!(self.is_ready(step), Ok(true));
            if waits && record.is_none() {
                record = Some(self.record_begin(signature));
            }
            if waits {
                self.await_step(index, step, &signature)?;
                self.check_messages(&signature, 0, step, chunk.taken)?;
            }
            let work = StepWork {
                plan: &cached.plan,
                step,
                index,
                op: cached.request.op,
                arithmetic: &cached.arithmetic,
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
            work.execute(&mut self.links, 0, &mut cached.chain, Some(header));
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
