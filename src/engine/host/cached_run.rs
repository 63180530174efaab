//! Runs cached calls, which plan and build nothing.
//!
//! Planning, checks and logging take most of the time of a call of a few bytes. A cached call has no codec, has one
//! pass on one channel, and sends through slots, so its steps run one after the other. It sends the messages that a
//! [`Run`] sends, so ranks need not agree which calls they have cached.
//!
//! [`Run`]: super::Run

use super::super::Report;
use super::MAX_SLEEP;
use super::call_cache::{BufferExtents, CachedCall, CachedStep};
use super::engine::HostEngine;
use super::messages::{StepPlace, is_runnable, missing_flushes, missing_of_step};
use super::output_writes::{LEAST_OUTPUT, OutputWrites, add_through_caches};
use super::state::{Chain, Chunk, InputStats, TILE, ZeroCopyProgress};
use super::step::{StepPath, StepWork};
use super::wait::WaitClock;
use crate::codec::RoundingRandom;
use crate::error::{Error, Result};
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
        let extents = BufferExtents::of(call, self.links.rank, self.links.nranks);
        let Some(extents) = extents.filter(|extents| extents.output < LEAST_OUTPUT) else {
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
        let mut ends = self.links.sends.iter().flatten();
        let flushes = !ends.all(|end| end.is_immediate());
        let mut chained = false;
        let steps = walk(&plan.schedule, 1)
            .map(|visit| {
                let step = &plan.schedule.steps[visit.step];
                let chunk = Chunk::of(&plan, rank, 0, visit.step, step);
                let path = StepPath::of(&plan, step, &chunk, (request.op, &arithmetic, chained));
                chained = step.more;
                CachedStep {
                    index: visit.step,
                    chunk,
                    path,
                }
            })
            .collect();
        self.cache.insert(CachedCall {
            call: *call,
            counts: counts(),
            request: decided,
            plan: plan.clone(),
            arithmetic,
            header: Header {
                signature,
                ..Header::default()
            },
            flushes,
            extents,
            steps,
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

    /// Returns whether the cached call at `at` is a message that this rank can send or receive now.
    pub fn is_ready_message(&mut self, at: usize) -> bool {
        let Some(cached) = self.cache.get(at) else {
            return false;
        };
        let [CachedStep { index, path, .. }] = &*cached.steps else {
            return false;
        };
        let step = &cached.plan.schedule.steps[*index];
        let moves = match path {
            StepPath::SendInput { .. } | StepPath::StoreMessage { .. } => true,
            StepPath::AddPair { .. } | StepPath::General => false,
        };
        cached.call.collective.is_message()
            && moves
            && !cached.flushes
            && matches!(is_runnable(&mut self.links, 0, step), Ok(true))
    }

    /// Returns how often it is worth looking for messages before a wait.
    pub fn looks(&self) -> u32 {
        self.links.waiter.spins().max(1)
    }

    /// Runs the cached call at `at`, of [`HostEngine::find_cached`], until it ends, and counts it, with the time since
    /// `begun`.
    ///
    /// # Errors
    /// See [`HostEngine::run`].
    #[inline]
    pub fn run_cached(
        &mut self,
        at: usize,
        buffers: &mut UserBuffers<'_>,
        begun: Option<Instant>,
    ) -> Result<Report> {
        let mut cached = self.cache.take(at);
        let ran = self.run_steps(&mut cached, buffers);
        if ran.is_ok() && self.recorder().is_some() {
            cached.counts.add(begun.map(|begun| begun.elapsed()));
        }
        let report = cached.report;
        self.cache.put_back(at, cached);
        ran.map(|()| report)
    }

    fn run_steps(&mut self, cached: &mut CachedCall, buffers: &mut UserBuffers<'_>) -> Result<()> {
        let CachedCall {
            plan,
            arithmetic,
            header,
            chain,
            ..
        } = cached;
        header.signature[SEQUENCE_WORD] = self.next_sequence(&cached.request);
        // A first message that can be sent at once travels while the call is recorded.
        let mut record = RunRecord::default();
        // Whether a step of this loop has sent since one of them last looked for a message.
        let mut has_sent = false;
        for cached_step in &cached.steps {
            let &CachedStep { index, path, .. } = cached_step;
            let chunk = &cached_step.chunk;
            let step = &plan.schedule.steps[index];
            header.bytes = chunk.given as u32;
            match path {
                StepPath::SendInput { from, bytes } => {
                    let input = buffers.input(from, bytes);
                    // All messages of a step need room before the first leaves: while this rank waited with a part of
                    // them sent, a receiver of that part could wait for a receiver of the rest.
                    if step.send_to.len() > 1 && !matches!(self.is_ready(step), Ok(true)) {
                        record.begin(self, header);
                        self.await_step(index, step, &header.signature)?;
                    }
                    for &to in step.send_to.iter() {
                        self.send(to as usize, (index, step), header, input, &mut record)?;
                    }
                    has_sent = true;
                }
                StepPath::AddPair { from, to, bytes } => {
                    let reducer = &arithmetic.received;
                    record.begin(self, header);
                    let sent = std::mem::take(&mut has_sent);
                    self.take_message((index, step), header, (bytes, sent), |payload| {
                        add_through_caches(buffers, (from, to), (payload, reducer));
                    })?;
                }
                StepPath::StoreMessage { to, bytes } => {
                    record.begin(self, header);
                    let store = |payload: &[u8]| buffers.write_output(to, payload);
                    let sent = std::mem::take(&mut has_sent);
                    self.take_message((index, step), header, (bytes, sent), store)?;
                }
                StepPath::General => {
                    record.begin(self, header);
                    self.await_step(index, step, &header.signature)?;
                    self.check_messages(&header.signature, 0, step, chunk.taken)?;
                    let work = StepWork {
                        plan,
                        step,
                        index,
                        op: cached.request.op,
                        arithmetic,
                        takes: None,
                        gives: None,
                        buffers,
                        writes: &mut OutputWrites::plain(),
                        stats: &mut InputStats::new(false),
                        scratch: &mut self.scratch,
                        scales: None,
                        residuals: None,
                        chunk,
                        randoms: [RoundingRandom::NONE; 2],
                        tile: TILE,
                        nranks: self.links.nranks,
                        isa: self.isa,
                    };
                    work.execute(&mut self.links, 0, chain, Some(*header));
                }
            }
        }
        record.begin(self, header);
        if cached.flushes {
            self.await_flush(&plan.schedule.steps, &header.signature)?;
        }
        record.end(self);
        Ok(())
    }

    /// Sends a part of the input to rank `to`, the only receiver of the step or one of several that have room.
    #[inline]
    fn send(
        &mut self,
        to: usize,
        (index, step): (usize, &Step),
        header: &Header,
        input: &[u8],
        record: &mut RunRecord,
    ) -> Result<()> {
        loop {
            let Some(end) = &mut self.links.sends[to] else {
                return Err(Error::internal("a step sends to its own rank"));
            };
            let sent = end.send(header, input);
            if !matches!(sent, Ok(true)) {
                record.begin(self, header);
            }
            if sent.map_err(|error| self.explain_break(error, step))? {
                return Ok(());
            }
            self.await_step(index, step, &header.signature)?;
        }
    }

    /// Waits for the step's only message, checks that it belongs to the call with this header and has `bytes`, hands its
    /// payload to `work`, and releases it. The first look may come later if this rank has just sent a message.
    #[inline]
    fn take_message(
        &mut self,
        (index, step): (usize, &Step),
        header: &Header,
        (bytes, has_sent): (usize, bool),
        work: impl FnOnce(&[u8]),
    ) -> Result<()> {
        let from = step.recv_from[0] as usize;
        // Most messages arrive within these looks, each of which takes less time than a wait.
        let mut looks = self.links.waiter.spins();
        let mut measured = match has_sent && looks > 0 {
            true => self.first_looks[from].wait(),
            false => None,
        };
        loop {
            let Some(end) = &mut self.links.recvs[from] else {
                return Err(Error::internal("a step receives from its own rank"));
            };
            match end.message() {
                Ok(Some((found, payload))) => {
                    if found.signature != header.signature || found.bytes as usize != bytes {
                        return self.check_header(from, &found, &header.signature, step, bytes);
                    }
                    if let Some(begun) = measured {
                        self.first_looks[from].count(begun);
                    }
                    work(payload);
                    end.release();
                    return Ok(());
                }
                Ok(None) if looks > 0 => {
                    looks -= 1;
                    measured = None;
                    std::hint::spin_loop();
                }
                Ok(None) => self.await_step(index, step, &header.signature)?,
                Err(error) => return Err(self.explain_break(error, step)),
            }
        }
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
    #[inline(never)]
    fn wait_until(
        &mut self,
        mut is_ready: impl FnMut(&mut HostEngine) -> Result<bool>,
        missing: impl Fn(&mut Links) -> Vec<(usize, String)>,
    ) -> Result<()> {
        let mut clock = WaitClock::default();
        let mut scans = 0;
        while !is_ready(self)? {
            self.wait(scans, MAX_SLEEP, &mut clock, &missing)?;
            scans += 1;
        }
        self.end_wait(&mut clock);
        Ok(())
    }
}

/// Whether a run of a cached call is recorded yet, and its number in the flight recorder.
#[derive(Default)]
struct RunRecord {
    has_begun: bool,
    number: Option<u64>,
}

impl RunRecord {
    /// Records the begin of the call, once.
    #[inline]
    fn begin(&mut self, engine: &mut HostEngine, header: &Header) {
        if !self.has_begun {
            self.has_begun = true;
            self.number = engine.record_begin(header.signature);
        }
    }

    #[inline]
    fn end(self, engine: &HostEngine) {
        if let (Some(recorder), Some(number)) = (engine.recorder(), self.number) {
            recorder.end(number);
        }
    }
}
