//! One call on its way: its channels, and where each of them stands.

use super::Report;
use super::host::{HostEngine, ScaleKey};
use super::state::{self, Arithmetic, Chain, Chunk, Stats};
use super::step::{self, Job};
use super::zero_copy::ZeroCopyProgress;
use crate::adapt::{Residuals, Shape};
use crate::codec::TensorScales;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::UserBuffers;
use crate::plan::{Plan, Request};
use crate::schedule::{Cursor, Step, Visit};
use crate::sys::log::{self, Level};
use crate::transport::{Header, Links};
use crate::types::{CallSignature, Collective, SIGNATURE_WORDS};
use std::sync::Arc;

/// One call, bound to a plan and perhaps on its way.
#[derive(Debug)]
pub struct Run<'a> {
    index: usize,
    pub(super) request: Request,
    pub(super) plan: Arc<Plan>,
    pub(super) buffers: UserBuffers<'a>,
    arithmetic: Arc<Arithmetic>,
    pub(super) signature: [u64; SIGNATURE_WORDS],
    pub(super) channels: Vec<ChannelRun>,
    pub(super) wire_bytes: u64,
    pub(super) stats: Stats,
    /// Scales that live from call to call, for the time of this one.
    kept: Option<(ScaleKey, TensorScales)>,
    /// Residuals of error feedback, for the time of this call.
    fed: Option<(u64, Residuals)>,
}

/// One lane: every `channels`-th pass, over its own connections.
#[derive(Debug)]
pub(super) struct ChannelRun {
    pub channel: usize,
    cursor: Cursor,
    /// The step that waits for its peers.
    current: Option<Visit>,
    /// How far that has come, if it goes without slots.
    pub zero_copy: ZeroCopyProgress,
    /// A sum that its next step continues.
    pub chain: Chain,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        engine: &mut HostEngine,
        index: usize,
        request: &Request,
        plan: Arc<Plan>,
        buffers: UserBuffers<'a>,
    ) -> Result<Run<'a>> {
        let passes = plan.geometry.passes();
        let mut channels = std::mem::take(&mut engine.spare_channels);
        channels.clear();
        channels.extend((0..plan.channels).map(|channel| {
            let passes = (passes - channel).div_ceil(plan.channels);
            let mut cursor = Cursor::new(&plan.schedule, passes);
            let current = cursor.next(&plan.schedule);
            ChannelRun {
                channel,
                cursor,
                current,
                zero_copy: ZeroCopyProgress::default(),
                chain: Chain::default(),
            }
        }));
        let stats = Stats::new(plan.is_coded());
        let arithmetic = engine.arithmetic(request)?;
        Ok(Run {
            index,
            request: plan.decided(request),
            arithmetic,
            plan,
            buffers,
            signature: [0; SIGNATURE_WORDS],
            channels,
            wire_bytes: 0,
            stats,
            kept: None,
            fed: None,
        })
    }

    /// Takes the call's place in the order of calls.
    pub(super) fn start(&mut self, engine: &mut HostEngine) {
        let sequence = engine.next_sequence(&self.request);
        self.signature = self
            .request
            .signature(self.plan.algorithm, self.plan.specs.intra, sequence)
            .words();
        engine.log_call(self.signature);
        self.kept = state::scale_key(&self.request, &self.plan, self.signature)
            .map(|key| (key.clone(), engine.take_scales(&key)));
        self.fed = self
            .feeds()
            .map(|tensor| (tensor, engine.feedback.take(tensor)));
        let shape = state::shape(&self.request, &self.plan);
        self.report_lost(shape);
        let residuals = self.fed.as_mut().map(|(_, residuals)| (shape, residuals));
        state::begin(engine, &self.plan, self.kept.as_mut(), residuals);
    }

    /// Says that residuals that the program has imported are of no use to this call, their first one.
    fn report_lost(&self, shape: Shape) {
        let Some((tensor, residuals)) = &self.fed else {
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
                 chunks of {}, and {} has {} in {} of {}, or another operator or type",
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

    /// The tensor whose residuals the call reads and leaves, if it does.
    pub(super) fn feeds(&self) -> Option<u64> {
        self.request.feedback.filter(|_| self.plan.is_coded())
    }

    /// The caller's buffers.
    pub fn buffers(&self) -> &UserBuffers<'a> {
        &self.buffers
    }

    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn collective(&self) -> Collective {
        self.request.collective
    }

    /// Sender and receiver of a message.
    pub(super) fn pair(&self) -> (usize, usize) {
        (self.request.root, self.request.peer)
    }

    /// Runs every step that can run. Returns whether one did, and whether the call is complete.
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
                let lane = &mut self.channels[at];
                lane.current = lane.cursor.next(&self.plan.schedule);
            }
        }
        if complete {
            complete = self.flushed(engine)?;
        }
        Ok((moved, complete))
    }

    /// Runs the step that a lane is at, if that is possible now.
    fn advance(&mut self, engine: &mut HostEngine, at: usize, visit: Visit) -> Result<bool> {
        let step = self.plan.schedule.steps[visit.step];
        if engine.zero_copy
            && let Some(way) = self.way(&mut engine.links, at, visit)
        {
            return self.advance_zero_copy(engine, at, visit, &step, way);
        }
        let channel = self.channels[at].channel;
        let ready = arrived(&mut engine.links, channel, &step)
            .and_then(|arrived| Ok(arrived && has_room(&mut engine.links, channel, &step)?));
        if !ready.map_err(|error| engine.explain_break(error, &step))? {
            return Ok(false);
        }
        self.execute(engine, at, visit, &step, false)?;
        Ok(true)
    }

    /// Where the chunk of a step lies.
    pub(super) fn chunk(&self, rank: usize, channel: usize, visit: Visit, step: &Step) -> Chunk {
        let plan = &*self.plan;
        let pass = visit.pass * plan.channels + channel;
        let input = plan.pattern.input(rank, step.chunk as usize);
        let output = plan.pattern.output(rank, step.chunk as usize);
        let elements = plan.elements(step.chunk as usize, pass);
        Chunk {
            elements,
            input: input.map(|place| plan.start(place, pass)),
            output: output.map(|place| plan.start(place, pass)),
            taken: plan.bytes_for(step.takes, elements),
            given: plan.bytes_for(step.gives, elements),
            site: pass * plan.schedule.steps.len() + visit.step,
            number: pass * plan.schedule.chunks + step.chunk as usize,
        }
    }

    /// Runs a step whose messages are there, and whose slots are free unless it `sends_later`.
    pub(super) fn execute(
        &mut self,
        engine: &mut HostEngine,
        lane: usize,
        visit: Visit,
        step: &Step,
        sends_later: bool,
    ) -> Result<()> {
        let channel = self.channels[lane].channel;
        let chunk = self.chunk(engine.links.rank, channel, visit, step);
        self.check_headers(engine, channel, step, &chunk)?;
        self.wire_bytes += step::execute(
            engine,
            Job {
                plan: &self.plan,
                request: &self.request,
                arithmetic: &self.arithmetic,
                buffers: &mut self.buffers,
                stats: &mut self.stats,
                chain: &mut self.channels[lane].chain,
                scales: self.kept.as_mut().map(|(_, scales)| scales),
                residuals: self.fed.as_mut().map(|(_, residuals)| residuals),
                signature: self.signature,
                channel,
                step: visit.step,
                chunk: &chunk,
                sends_later,
            },
        );
        Ok(())
    }

    /// Every message of a step is of this call, and of the length that this call's cut gives.
    fn check_headers(
        &self,
        engine: &HostEngine,
        channel: usize,
        step: &Step,
        chunk: &Chunk,
    ) -> Result<()> {
        let links = &engine.links;
        for &from in step.recv_from.iter() {
            let Some(end) = &links.recvs[channel * links.nranks + from as usize] else {
                continue;
            };
            self.check_header(engine, from as usize, &end.header(), step, chunk)?;
        }
        Ok(())
    }

    /// As above, for one of the messages.
    pub(super) fn check_header(
        &self,
        engine: &HostEngine,
        from: usize,
        header: &Header,
        step: &Step,
        chunk: &Chunk,
    ) -> Result<()> {
        if header.signature != self.signature {
            return Err(engine.disagreement(from, &header.signature, &self.signature));
        }
        if header.bytes as usize == chunk.taken {
            return Ok(());
        }
        let peers = engine.exchange.peers();
        let what = format!(
            "{} sent {} bytes for chunk {} of {}, and {} expected {}",
            peers[from],
            header.bytes,
            step.chunk,
            CallSignature::describe(&self.signature),
            peers[engine.links.rank],
            chunk.taken
        );
        Err(Error::new(ErrorKind::Mismatch, what))
    }

    /// Whether everything that was published has left this process.
    fn flushed(&self, engine: &mut HostEngine) -> Result<bool> {
        let nranks = engine.links.nranks;
        for channel in 0..self.channels.len() {
            for step in &self.plan.schedule.steps {
                for &to in step.send_to.iter() {
                    if let Some(end) = &mut engine.links.sends[channel * nranks + to as usize] {
                        let flushed = end.flushed();
                        if !flushed.map_err(|error| engine.explain_break(error, step))? {
                            return Ok(false);
                        }
                    }
                }
            }
        }
        Ok(true)
    }

    /// For whom the channels wait, and what for.
    pub(super) fn waits_for(&self, links: &mut Links) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        for lane in &self.channels {
            let Some(visit) = lane.current else { continue };
            let step = &self.plan.schedule.steps[visit.step];
            let what = |verb: &str| {
                format!(
                    "{verb} chunk {} in step {} of pass {} on channel {} of {}",
                    step.chunk,
                    visit.step,
                    visit.pass * self.plan.channels + lane.channel,
                    lane.channel,
                    CallSignature::describe(&self.signature)
                )
            };
            let base = lane.channel * links.nranks;
            let (arrived, sent) = (lane.zero_copy.arrived, lane.zero_copy.sent);
            for &from in step.recv_from.iter().filter(|_| !arrived) {
                let end = links.recvs[base + from as usize].as_mut();
                if end.is_some_and(|end| !end.ready().unwrap_or(false)) {
                    found.push((from as usize, what("to send")));
                }
            }
            for (index, &to) in step.send_to.iter().enumerate() {
                let end = links.sends[base + to as usize].as_mut();
                let full = arrived && sent & 1 << index == 0;
                if full || end.is_some_and(|end| !end.ready().unwrap_or(false)) {
                    found.push((to as usize, what("to take")));
                }
            }
        }
        if found.is_empty() {
            // All steps ran; what they sent is still on its way.
            let nranks = links.nranks;
            for (index, end) in links.sends.iter_mut().enumerate() {
                if end
                    .as_mut()
                    .is_some_and(|end| !end.flushed().unwrap_or(false))
                {
                    let what = CallSignature::describe(&self.signature);
                    found.push((index % nranks, format!("to take what was sent in {what}")));
                }
            }
        }
        found
    }

    /// What the call did; it is over.
    pub(super) fn report(&mut self, engine: &mut HostEngine) -> Report {
        let steps = &self.plan.schedule.steps;
        let transport = match engine.common_transport {
            Some(kind) => {
                let talks = |step: &Step| !(step.recv_from.is_empty() && step.send_to.is_empty());
                steps.iter().any(talks).then_some(kind)
            }
            None => {
                let used = |rank: usize| {
                    let rank = rank as u32;
                    let talks = |step: &Step| {
                        step.recv_from.contains(&rank) || step.send_to.contains(&rank)
                    };
                    steps.iter().any(talks)
                };
                let kinds = engine.links.kinds.iter().enumerate();
                let kinds = kinds
                    .filter(|(rank, _)| used(*rank))
                    .filter_map(|(_, kind)| *kind);
                kinds.max_by_key(|kind| *kind as u8)
            }
        };
        engine.spare_channels = std::mem::take(&mut self.channels);
        if let Some((key, scales)) = self.kept.take() {
            engine.keep_scales(key, scales);
        }
        if let Some((tensor, mut residuals)) = self.fed.take() {
            residuals.commit();
            engine.feedback.give_back(tensor, residuals);
        }
        Report {
            codec: self.plan.specs,
            algorithm: self.plan.algorithm,
            transport,
            channels: self.plan.channels,
            wire_bytes: self.wire_bytes,
            raw_bytes: self.plan.raw_bytes,
            input: self.stats.of_input(),
            fused: 1,
        }
    }
}

/// Whether every message that the step needs is there.
pub(super) fn arrived(links: &mut Links, channel: usize, step: &Step) -> Result<bool> {
    let base = channel * links.nranks;
    for &from in step.recv_from.iter() {
        if let Some(end) = &mut links.recvs[base + from as usize]
            && !end.ready()?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether every slot that the step fills is free.
fn has_room(links: &mut Links, channel: usize, step: &Step) -> Result<bool> {
    let base = channel * links.nranks;
    for &to in step.send_to.iter() {
        if let Some(end) = &mut links.sends[base + to as usize]
            && !end.ready()?
        {
            return Ok(false);
        }
    }
    Ok(true)
}
