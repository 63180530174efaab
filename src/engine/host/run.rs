//! [`Run`]: one call while it runs, with a cursor into the schedule for each channel.

use super::super::Report;
use super::engine::HostEngine;
use super::messages::{StepPlace, is_runnable, missing_flushes, missing_of_step};
use super::output_writes::OutputWrites;
use super::state::{self, Arithmetic, Chain, ChannelRun, Chunk, InputStats, ZeroCopyProgress};
use super::step::StepWork;
use crate::codec::TensorScales;
use crate::codec::feedback::{self, Feedback, Residuals, Shape};
use crate::engine::scale_key::ScaleKey;
use crate::error::Result;
use crate::mem::UserBuffers;
use crate::plan::{Plan, Request};
use crate::schedule::{Step, Visit, WalkCursor};
use crate::sys::log::{self, Level};
use crate::transport::{self, Header, Links};
use crate::types::{Collective, SEQUENCE_WORD, SIGNATURE_WORDS, ScaleRule, TransportKind};
use std::sync::Arc;

/// A call with its plan and buffers, before or while it runs.
#[derive(Debug)]
pub struct Run<'a> {
    index: usize,
    pub(super) request: Request,
    pub(super) plan: Arc<Plan>,
    pub(super) buffers: UserBuffers<'a>,
    writes: OutputWrites,
    pub(super) arithmetic: Arc<Arithmetic>,
    pub(super) signature: [u64; SIGNATURE_WORDS],
    pub(super) channels: Vec<ChannelRun>,
    pub(super) wire_bytes: u64,
    pub(super) stats: InputStats,
    /// Scales that live from call to call. The call borrows them from the engine, and returns them
    /// at its end.
    scales: Option<(ScaleKey, TensorScales)>,
    /// Tensor and residuals of error feedback. The call borrows the residuals from the engine, and
    /// returns them at its end.
    feedback: Option<(u64, Residuals)>,
    /// Number of the call in the flight recorder.
    record: Option<u64>,
    /// Empty residuals with memory for this call, which replace those for calls of another shape.
    reserved: Option<Residuals>,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        engine: &mut HostEngine,
        index: usize,
        request: &Request,
        plan: Arc<Plan>,
        buffers: UserBuffers<'a>,
    ) -> Result<Run<'a>> {
        if request.feedback.is_some() && plan.is_coded() {
            feedback::check_codecs(plan.specs)?;
        }
        let passes = plan.geometry.passes();
        let mut channels = std::mem::take(&mut engine.spare_channels);
        channels.clear();
        channels.extend((0..plan.channels).map(|channel| {
            let passes = (passes - channel).div_ceil(plan.channels);
            let mut cursor = WalkCursor::new(&plan.schedule, passes);
            let current = cursor.next(&plan.schedule);
            ChannelRun {
                channel,
                cursor,
                current,
                zero_copy: ZeroCopyProgress::default(),
                chain: Chain::default(),
            }
        }));
        let stats = InputStats::new(plan.is_coded());
        let arithmetic = engine.arithmetic(request, &plan)?;
        let reserved = Self::reserve_residuals(&mut engine.feedback, request, &plan)?;
        Ok(Run {
            index,
            request: plan.decided(request),
            arithmetic,
            plan,
            buffers,
            writes: OutputWrites::plain(),
            signature: [0; SIGNATURE_WORDS],
            channels,
            wire_bytes: 0,
            stats,
            scales: None,
            feedback: None,
            record: None,
            reserved,
        })
    }

    /// Allocates the memory of the residuals, while an error still leaves the communicator as it was. Returns new
    /// residuals if those of the tensor are for calls of another shape.
    fn reserve_residuals(
        feedback: &mut Feedback,
        request: &Request,
        plan: &Plan,
    ) -> Result<Option<Residuals>> {
        let Some(tensor) = request.feedback.filter(|_| plan.is_coded()) else {
            return Ok(None);
        };
        let shape = state::residual_shape(request, plan);
        match feedback.residuals(tensor) {
            Some(known) if known.shape() == shape && !known.is_restored() => Ok(None),
            Some(known) if known.shape() == shape => {
                let mut known = feedback.take(tensor);
                let reserved = known.reserve(&state::residual_chunks(plan));
                feedback.give_back(tensor, known);
                reserved.map(|()| None)
            }
            _ => {
                let mut new = Residuals::new();
                new.begin(shape);
                new.reserve(&state::residual_chunks(plan))?;
                Ok(Some(new))
            }
        }
    }

    /// Gives the call its sequence number, logs its signature, and takes its kept scales and residuals out of
    /// the engine.
    pub(super) fn start(&mut self, engine: &mut HostEngine) {
        let sequence = engine.next_sequence(&self.request);
        self.signature = self
            .request
            .signature(self.plan.algorithm, self.plan.specs.intra, sequence)
            .words();
        self.record = engine.record_begin(self.signature);
        let reduces = self.request.collective.reduces();
        self.writes = engine.outputs.begin(reduces, &self.buffers);
        self.scales = ScaleKey::new(&self.request, &self.plan, self.signature)
            .map(|key| (key.clone(), engine.take_scales(&key)));
        self.feedback = self
            .feedback_tensor()
            .map(|tensor| (tensor, engine.feedback.take(tensor)));
        let shape = state::residual_shape(&self.request, &self.plan);
        self.warn_of_dropped_residuals(shape);
        if let (Some((_, residuals)), Some(reserved)) = (&mut self.feedback, self.reserved.take())
            && residuals.shape() != shape
        {
            *residuals = reserved;
        }
        let scales = self.scales.as_mut().map(|(_, scales)| scales);
        let feedback = self.feedback.as_mut();
        let feedback = feedback.map(|(_, residuals)| (shape, residuals));
        engine.scratch.prepare(&self.plan, scales, feedback);
    }

    /// Logs a warning if imported residuals do not fit this call, which is the first call of their
    /// tensor.
    fn warn_of_dropped_residuals(&self, shape: Shape) {
        let Some((tensor, residuals)) = &self.feedback else {
            return;
        };
        if !residuals.are_lost_to(shape) {
            return;
        }
        let theirs = residuals.shape();
        log::line(
            Level::Warn,
            format_args!(
                "the imported residuals of tensor {tensor} are dropped: they are of {} elements in {} \
                 chunks of {}, and {} has {} in {} of {}, or another operator, type, codec or algorithm",
                theirs.count,
                theirs.chunks,
                theirs.chunk,
                self.request.collective,
                shape.count,
                shape.chunks,
                shape.chunk
            ),
        );
    }

    /// Returns the tensor whose residuals the call reads and updates, if any.
    pub(super) fn feedback_tensor(&self) -> Option<u64> {
        self.request.feedback.filter(|_| self.plan.is_coded())
    }

    /// Returns the caller's buffers.
    pub fn buffers(&self) -> &UserBuffers<'a> {
        &self.buffers
    }

    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn collective(&self) -> Collective {
        self.request.collective
    }

    /// Returns the sender and the receiver of a send or receive call.
    pub(super) fn pair(&self) -> (usize, usize) {
        (self.request.root, self.request.peer)
    }

    /// Runs every step that can run now. Returns whether any step ran, and whether the call is complete.
    pub(super) fn poll(&mut self, engine: &mut HostEngine) -> Result<(bool, bool)> {
        let mut moved = false;
        let mut complete = true;
        for at in 0..self.channels.len() {
            while let Some(visit) = self.channels[at].current {
                if !self.advance(engine, at, visit)? {
                    complete = false;
                    break;
                }
                moved = true;
                let run = &mut self.channels[at];
                run.current = run.cursor.next(&self.plan.schedule);
            }
        }
        if complete {
            complete = engine.has_flushed(&self.plan.schedule.steps, self.channels.len())?;
        }
        Ok((moved, complete))
    }

    /// Runs the current step of channel `at` if it can run now. Returns whether the step is complete.
    fn advance(&mut self, engine: &mut HostEngine, at: usize, visit: Visit) -> Result<bool> {
        let step = self.plan.schedule.steps[visit.step];
        if engine.zero_copy
            && let Some(path) = self.zero_copy_path(&mut engine.links, at, visit)
        {
            return self.advance_zero_copy(engine, at, visit, &step, path);
        }
        let channel = self.channels[at].channel;
        let ready = is_runnable(&mut engine.links, channel, &step);
        if !ready.map_err(|error| engine.explain_break(error, &step))? {
            return Ok(false);
        }
        self.execute(engine, at, visit, &step, true)?;
        Ok(true)
    }

    /// Returns the position and size of a step's chunk.
    pub(super) fn chunk(&self, rank: usize, channel: usize, visit: Visit, step: &Step) -> Chunk {
        Chunk::of(
            &self.plan,
            rank,
            visit.pass * self.plan.channels + channel,
            visit.step,
            step,
        )
    }

    /// Executes a step whose messages have arrived. If `sends` is true, the step writes into send slots,
    /// which the caller has found free. Otherwise the step writes its result to the output, from which a
    /// later zero-copy send reads.
    pub(super) fn execute(
        &mut self,
        engine: &mut HostEngine,
        at: usize,
        visit: Visit,
        step: &Step,
        sends: bool,
    ) -> Result<()> {
        let channel = self.channels[at].channel;
        let chunk = self.chunk(engine.links.rank, channel, visit, step);
        engine.check_messages(&self.signature, channel, step, chunk.taken)?;
        let spec = self.plan.spec_of(step.gives);
        // A call keeps the scales of one codec only. If the codecs inside and between hosts differ, only the
        // codec between hosts may keep scales.
        let is_scaled = matches!(spec.scale, ScaleRule::Tensor { .. });
        let scales = self.scales.as_mut().filter(|_| is_scaled);
        let work = StepWork {
            plan: &self.plan,
            step,
            index: visit.step,
            op: self.request.op,
            arithmetic: &self.arithmetic,
            takes: self.plan.codec_of(step.takes),
            gives: self.plan.codec_of(step.gives),
            buffers: &mut self.buffers,
            writes: &mut self.writes,
            stats: &mut self.stats,
            scratch: &mut engine.scratch,
            scales: scales.map(|(_, scales)| scales),
            residuals: self.feedback.as_mut().map(|(_, residuals)| residuals),
            chunk: &chunk,
            randoms: state::randoms(
                spec,
                &chunk,
                self.signature[SEQUENCE_WORD],
                engine.links.rank,
            ),
            tile: state::TILE,
            nranks: engine.links.nranks,
            isa: engine.isa,
        };
        let chain = &mut self.channels[at].chain;
        let header = Header {
            bytes: chunk.given as u32,
            signature: self.signature,
            crc: 0,
        };
        let header = sends.then_some(header);
        self.wire_bytes += work.execute(&mut engine.links, channel, chain, header);
        Ok(())
    }

    /// Lists the ranks for which the channels wait, each with the missing message.
    pub(super) fn missing(&self, links: &mut Links) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        for run in &self.channels {
            self.missing_of(run, links, &mut found);
        }
        if found.is_empty() {
            // All steps have run, so the call only waits for messages that have not left this
            // process.
            missing_flushes(&self.signature, links, &mut found);
        }
        found
    }

    /// Adds the ranks for which the current step of one channel waits.
    fn missing_of(&self, run: &ChannelRun, links: &mut Links, found: &mut Vec<(usize, String)>) {
        let Some(visit) = run.current else { return };
        let at = StepPlace {
            channel: run.channel,
            pass: visit.pass * self.plan.channels + run.channel,
            step: visit.step,
        };
        let step = &self.plan.schedule.steps[visit.step];
        missing_of_step(step, at, &self.signature, run.zero_copy, links, found);
    }

    /// Ends the call. Returns its report, and gives kept scales, residuals and channels back to the engine.
    pub(super) fn report(&mut self, engine: &mut HostEngine) -> Report {
        let transport = self.transport(engine);
        engine.spare_channels = std::mem::take(&mut self.channels);
        engine.outputs.end(&self.writes);
        if let Some((key, scales)) = self.scales.take() {
            engine.keep_scales(key, scales);
        }
        if let (Some(recorder), Some(number)) = (engine.recorder(), self.record) {
            recorder.end(number);
        }
        let mut residual_norm = None;
        if let Some((tensor, mut residuals)) = self.feedback.take() {
            residuals.commit();
            residual_norm = Some(residuals.sum_squares().sqrt());
            engine.feedback.give_back(tensor, residuals);
        }
        Report {
            codec: self.plan.specs,
            algorithm: self.plan.algorithm,
            transport,
            channels: self.plan.channels,
            wire_bytes: self.wire_bytes,
            raw_bytes: self.plan.raw_bytes,
            input: self
                .stats
                .of_input(self.plan.average_shift(self.request.op)),
            residual_norm,
            fused: 1,
        }
    }

    /// Returns the slowest transport that carried the call's messages.
    fn transport(&self, engine: &HostEngine) -> Option<TransportKind> {
        let steps = &self.plan.schedule.steps;
        if let Some(kind) = engine.common_transport {
            let communicates =
                |step: &Step| !(step.recv_from.is_empty() && step.send_to.is_empty());
            return steps.iter().any(communicates).then_some(kind);
        }
        let is_peer = |rank: usize| {
            let rank = rank as u32;
            let mut steps = steps.iter();
            steps.any(|step| step.recv_from.contains(&rank) || step.send_to.contains(&rank))
        };
        let kinds = engine.links.kinds.iter().enumerate();
        let used = kinds.filter(|(rank, _)| is_peer(*rank));
        transport::slowest(used.filter_map(|(_, kind)| *kind))
    }
}
