//! Plans a call: selects a schedule, a codec, and a division of the message into chunks.
//!
//! Selection is a pure function of the request and of facts that all ranks share, so that all ranks
//! select alike without messages. [`Planner::explain`] prints the candidates.

mod algorithms;
mod average;
mod busiest;
mod call_times;
mod candidate;
mod cost;
mod encoded_tiles;
mod explain;
mod fused_blocks;
mod geometry;
mod gpu;
mod gpu_costs;
mod level_messages;
mod limits;
mod link_time;
mod measured;
mod ring_set;
mod sample_window;
mod select;
mod shared_launch;
mod tuning;
mod work;

pub use crate::types::ResolvedCall as Request;
pub use call_times::{TIMED_BYTES, TIMED_DTYPES, TimedCall};
pub use candidate::{Candidate, ChannelRings};
pub use cost::{MachineFacts, seconds};
pub use encoded_tiles::EncodedTiles;
pub use explain::explain;
pub use geometry::Geometry;
pub use gpu::{FUSED128_DTYPES, KEPT_STEPS};
pub use limits::{GpuLimits, Limits, Resident};
pub use measured::{Affine, MeasuredCosts};
pub use sample_window::{SAMPLE_WINDOW_ELEMENTS, SampleWindow};
pub use select::candidates;
pub use shared_launch::LaunchPlace;
pub use tuning::{
    AppliedEntry, Choice, KernelVariant, Site, TableEntry, TableHeader, Tuning, TuningTable,
    WireClass, links,
};
pub use work::CandidateWork;

use crate::codec::{self, Codec, RoundingRandom};
use crate::cpu::Isa;
use crate::error::{Error, Result};
use crate::schedule::{ChunkPlace, Groups, Schedule, SchedulePattern};
use crate::topology::RankTopology;
use crate::types::{
    Algorithm, CallTuning, CodecSetting, CodecSpec, Collective, DType, KernelProtocol, Level,
    ScaleRule,
};
use call_times::CallRatios;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

impl Request {
    /// Returns whether ranks of different hosts take part.
    pub fn crosses(&self, hosts: &Groups) -> bool {
        hosts.count() > 1 && !(self.collective.is_message() && hosts.share(self.root, self.peer))
    }
}

/// A request with one rank's schedule, the codecs, and the division of the message into chunks. Requests that
/// differ only in tensor slot and operator share a plan.
#[derive(Debug)]
pub struct Plan {
    /// Collective that the plan executes.
    pub collective: Collective,
    /// Type of the elements in the caller's buffers.
    pub dtype: DType,
    /// Algorithm that the planner selected, or that the request named.
    pub algorithm: Algorithm,
    /// Steps of this rank in one pass.
    pub schedule: Arc<Schedule>,
    /// Division of the message into passes and chunks.
    pub geometry: Geometry,
    /// The codec of messages for [`Level::Inter`]; `None` if they are raw.
    pub codec: Option<Arc<dyn Codec>>,
    /// The codec of messages for [`Level::Intra`]; `None` if they are raw.
    pub intra: Option<Arc<dyn Codec>>,
    /// Specifications of the codecs inside and between hosts. Both are equal unless the schedule is
    /// hierarchical.
    pub specs: CodecSetting,
    /// Number of elements of the message, or of one rank's block.
    pub count: usize,
    /// The pattern of the schedule, which gives each chunk's position in the buffers.
    pub pattern: SchedulePattern,
    /// For each step, whether it is the first step of this rank that reads its chunk of the input. Such a
    /// step takes the statistics of the chunk for the report.
    pub notes_input: Vec<bool>,
    /// Channels that have at least one pass.
    pub channels: usize,
    /// The kernel and its protocol; [`KernelProtocol::SIMPLE`] on host memory.
    pub kernel: KernelProtocol,
    /// Payload bytes that the rank would send if no message were encoded.
    pub raw_bytes: u64,
}

impl Plan {
    /// Returns `request` with the codecs of this plan in place of `auto`. The plan must come from
    /// `request`.
    pub fn decided(&self, request: &Request) -> Request {
        Request {
            codec: self.specs,
            ..*request
        }
    }

    /// Returns the codec of messages for `level`; `None` if they are raw.
    #[inline]
    pub fn codec_of(&self, level: Level) -> Option<&dyn Codec> {
        match level {
            Level::Intra => self.intra.as_deref(),
            Level::Inter => self.codec.as_deref(),
        }
    }

    /// Returns the specification of the codec for `level`.
    #[inline]
    pub fn spec_of(&self, level: Level) -> CodecSpec {
        self.specs.at(level)
    }

    /// Returns whether any message is encoded.
    pub fn is_coded(&self) -> bool {
        self.codec.is_some() || self.intra.is_some()
    }

    /// Returns the wire bytes of a chunk of `n` elements for `level`.
    #[inline]
    pub fn bytes_for(&self, level: Level, n: usize) -> usize {
        match self.codec_of(level) {
            None => n * self.dtype.size(),
            Some(codec) => codec.wire_bytes(n),
        }
    }

    /// Returns the random numbers that `rank` draws in an operation when it encodes by `spec`:
    /// first for its contributions, then for its sums. They depend on the position of an element in
    /// the message, not on chunks: an encoder moves to the position by [`RoundingRandom::from`].
    pub fn draws(spec: CodecSpec, operation: u64, rank: usize) -> [RoundingRandom; 2] {
        if !spec.is_stochastic() {
            return [RoundingRandom::NONE; 2];
        }
        [0, 1].map(|sum| {
            let hop = 2 * rank as u64 + sum;
            RoundingRandom::new(spec.seed.into(), operation, hop)
        })
    }

    /// Returns the wire bytes of a chunk of `n` elements for [`Level::Inter`], the only level of schedules
    /// that are not hierarchical.
    #[inline]
    pub fn wire_bytes(&self, n: usize) -> usize {
        self.bytes_for(Level::Inter, n)
    }

    /// Returns the buffer index of the first element of the chunk at `place`.
    #[inline]
    pub fn start(&self, place: ChunkPlace, pass: usize) -> usize {
        let block = place.block.unwrap_or(0);
        block * self.count + self.geometry.range(pass, place.part).start
    }

    /// Returns the number of elements of `chunk` in pass `pass`.
    #[inline]
    pub fn elements(&self, chunk: usize, pass: usize) -> usize {
        self.geometry.range(pass, self.pattern.part(chunk)).len()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PlanKey {
    collective: Collective,
    dtype: DType,
    count: usize,
    root: usize,
    peer: usize,
    codec: CodecSetting,
    algorithm: Option<Algorithm>,
    tuning: CallTuning,
}

/// The codecs of [`Level::Intra`] and [`Level::Inter`], in this order; `None` for raw.
type BuiltCodecs = [Option<Arc<dyn Codec>>; 2];

/// Makes plans, and caches them by the shape of the call.
#[derive(Debug)]
pub struct Planner {
    limits: Limits,
    /// Number of connected channels. Limits that were copied from another communicator may exceed
    /// it.
    channels: usize,
    rank: usize,
    isa: Isa,
    tuning: Tuning,
    /// By which calls with an `auto:` codec decide on GPUs.
    ratios: CallRatios,
    plans: HashMap<PlanKey, Arc<Plan>>,
    /// Plans of the latest calls, newest first, because loops repeat a few shapes.
    latest: VecDeque<(PlanKey, Arc<Plan>)>,
}

/// Number of latest plans that are searched without hashing.
const LATEST: usize = 4;

/// Largest number of cached plans. A program with more shapes of calls makes some plans again.
const CACHED: usize = 1024;

impl Planner {
    /// Creates a planner for `rank` under `limits`, without a tuning table.
    pub fn new(limits: Limits, rank: usize, isa: Isa) -> Planner {
        Planner {
            limits,
            channels: usize::MAX,
            rank,
            isa,
            tuning: Tuning::Model("no table was looked for".into()),
            ratios: CallRatios::default(),
            plans: HashMap::new(),
            latest: VecDeque::new(),
        }
    }

    /// Replaces the tuning for all further calls. All ranks must do so before the same call;
    /// otherwise they plan differently.
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuning = tuning;
        self.plans.clear();
        self.latest.clear();
    }

    /// Returns whether kernels can run `request` by `variant`.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn supports(&self, request: &Request, variant: KernelVariant) -> Result<bool> {
        let [_, codec] = self.codecs(request)?;
        let found = gpu::tuned(request, &self.limits, codec.as_deref(), variant)?;
        Ok(found.is_some())
    }

    /// Returns the tuning table, cost model or forced variant by which the planner selects kernels.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Returns the kernel variants for `request` that are worth a measurement; none on host memory.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn variants(&self, request: &Request) -> Result<Vec<KernelVariant>> {
        let [_, codec] = self.codecs(request)?;
        gpu::variants(request, &self.limits, codec.as_deref())
    }

    /// Plans all further calls by the limits of another communicator with as many ranks, but on no more
    /// channels than this communicator has. Tests need it to compare the bits of two engines, which must
    /// divide messages alike.
    pub fn copy_limits(&mut self, limits: Limits) {
        self.channels = self.limits.channels;
        self.limits = limits;
        self.plans.clear();
        self.latest.clear();
    }

    /// Replaces the measured costs for all further calls. All ranks must do so before the same call;
    /// otherwise they plan differently.
    pub fn set_costs(&mut self, costs: MeasuredCosts) {
        self.limits.machine.measured = Some(costs);
        self.plans.clear();
        self.latest.clear();
    }

    /// Replaces the topology for all further calls. All ranks must do so before the same call; otherwise they plan
    /// differently.
    pub fn set_topology(&mut self, topology: Arc<RankTopology>) {
        self.limits.topology = Some(topology);
        self.plans.clear();
        self.latest.clear();
    }

    /// Returns the facts by which the planner selects.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the plan for `request`.
    ///
    /// # Errors
    /// Unsupported if the request asks for an algorithm that its collective does not have.
    pub fn plan(&mut self, request: &Request) -> Result<Arc<Plan>> {
        let key = PlanKey {
            collective: request.collective,
            dtype: request.dtype,
            count: request.count,
            root: request.root,
            peer: request.peer,
            codec: request.codec,
            algorithm: request.algorithm,
            tuning: request.tuning,
        };
        if let Some((_, plan)) = self.latest.iter().find(|(known, _)| *known == key) {
            return Ok(plan.clone());
        }
        let plan = match self.plans.get(&key) {
            Some(plan) => plan.clone(),
            None => {
                let plan = Arc::new(self.make(request)?);
                if self.plans.len() >= CACHED {
                    self.plans.clear();
                }
                self.plans.insert(key, plan.clone());
                plan
            }
        };
        self.latest.truncate(LATEST - 1);
        self.latest.push_front((key, plan.clone()));
        Ok(plan)
    }

    fn make(&self, request: &Request) -> Result<Plan> {
        let coded = self.best(request)?;
        let best = match request.codec.auto {
            false => coded,
            // At equal costs the call runs without a codec, because it is exact.
            true => {
                let raw = self.best(&request.without_codec())?;
                let predicted = [coded.0.seconds, raw.0.seconds];
                match self.auto_choice(request, predicted)?.pays {
                    true => coded,
                    false => raw,
                }
            }
        };
        let (best, [intra, codec]) = best;
        let pattern = pattern(
            request,
            &self.limits,
            (best.algorithm, best.between),
            best.rings,
        );
        let intra = match best.algorithm {
            Algorithm::Hierarchical => intra,
            _ => codec.clone(),
        };
        let schedule = pattern.schedule(self.rank)?;
        let mut seen = HashSet::new();
        let notes_input = schedule
            .steps
            .iter()
            .map(|step| step.reads() && seen.insert(step.chunk))
            .collect();
        let raw_bytes =
            sent_elements(&schedule, &pattern, &best.geometry) * request.dtype.size() as u64;
        Ok(Plan {
            collective: request.collective,
            dtype: request.dtype,
            algorithm: best.algorithm,
            schedule: Arc::new(schedule),
            geometry: best.geometry,
            specs: CodecSetting {
                intra: spec(intra.as_deref()),
                inter: spec(codec.as_deref()),
                auto: false,
            },
            codec,
            intra,
            count: request.count,
            pattern,
            notes_input,
            channels: best.channels.min(self.channels),
            kernel: best.kernel,
            raw_bytes,
        })
    }

    /// Returns the candidate that the tuning selects, or else the cheapest candidate, with the codecs of
    /// `request`.
    fn best(&self, request: &Request) -> Result<(Candidate, BuiltCodecs)> {
        let codecs = self.codecs(request)?;
        let by_level = [codecs[0].as_deref(), codecs[1].as_deref()];
        if let Ok((measured, _)) = self.measured(request, by_level[1])? {
            return Ok((measured, codecs));
        }
        let best = candidates(request, &self.limits, by_level)?
            .into_iter()
            .min_by(|a, b| a.seconds.total_cmp(&b.seconds))
            .ok_or_else(|| Error::internal("no candidate for a checked call"))?;
        Ok((best, codecs))
    }

    /// Returns the candidate that the tuning selects for `request`, with its line number in the table. There
    /// is no number for a variant that `cinch tune` is measuring. If the cost model must select instead,
    /// returns the reason as a phrase.
    fn measured(
        &self,
        request: &Request,
        codec: Option<&dyn Codec>,
    ) -> Result<std::result::Result<(Candidate, Option<usize>), String>> {
        let Some(gpu) = &self.limits.gpu else {
            return Ok(Err("buffers are in host memory".into()));
        };
        if request.algorithm.is_some() {
            return Ok(Err("the call asks for an algorithm".into()));
        }
        if request.tuning.protocol.is_some() || request.tuning.kernel.is_some() {
            return Ok(Err("the call asks for a kernel or protocol".into()));
        }
        if self.limits.algorithm.is_some() || gpu.is_forced() {
            return Ok(Err("CINCH_ALGO, CINCH_KERNEL or CINCH_PROTO is set".into()));
        }
        if self.limits.hosts.count() > 1 {
            return Ok(Err("tables are for one host".into()));
        }
        if self.limits.groups().count() > 1 {
            return Ok(Err(
                "tables are for GPUs that stand beside each other".into()
            ));
        }
        let bytes = gpu::bytes(request, self.limits.nranks);
        let Some(choice) = self.tuning.choice(request, bytes) else {
            return Ok(Err(match &self.tuning {
                Tuning::Model(why) => why.clone(),
                _ => format!(
                    "no {} of {} and this size in the table",
                    request.collective,
                    WireClass::of(request)
                ),
            }));
        };
        let found = gpu::tuned(request, &self.limits, codec, choice.variant)?;
        Ok(match (found, choice.line) {
            (Some(candidate), None) => Ok((candidate, None)),
            (Some(candidate), Some(AppliedEntry { number, seconds })) => Ok((
                Candidate {
                    seconds,
                    ..candidate
                },
                Some(number),
            )),
            (None, line) => {
                let of = line.map_or(String::new(), |line| format!(" of line {}", line.number));
                let KernelVariant {
                    algorithm, kernel, ..
                } = choice.variant;
                Err(format!("{algorithm} {kernel}{of} cannot be here"))
            }
        })
    }

    /// Returns the predicted seconds of `request`, by the tuning table or else by the cost model.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn predict(&self, request: &Request) -> Result<f64> {
        Ok(self.best(request)?.0.seconds)
    }

    /// Returns the candidates for `request`; the first of them runs.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn candidates(&self, request: &Request) -> Result<Vec<Candidate>> {
        let (best, codecs) = self.best(request)?;
        let mut all = vec![best];
        let others = candidates(
            request,
            &self.limits,
            codecs.each_ref().map(Option::as_deref),
        )?;
        all.extend(others.into_iter().filter(|candidate| *candidate != best));
        Ok(all)
    }

    /// Builds the codecs inside and between hosts.
    fn codecs(&self, request: &Request) -> Result<BuiltCodecs> {
        let build = |spec| codec::build_for(spec, request.dtype, self.isa);
        let inter = build(request.codec.inter)?;
        let intra = match request.codec.intra == request.codec.inter {
            true => inter.clone(),
            false => build(request.codec.intra)?,
        };
        Ok([intra, inter])
    }
}

/// Returns the specification of a codec; [`CodecSpec::RAW`] for `None`.
fn spec(codec: Option<&dyn Codec>) -> CodecSpec {
    codec.map_or(CodecSpec::RAW, |codec| codec.spec())
}

/// Returns the schedule pattern of `request` for an algorithm. A hierarchical schedule uses the second
/// algorithm between hosts.
fn pattern(
    request: &Request,
    limits: &Limits,
    (algorithm, between): (Algorithm, Algorithm),
    rings: ChannelRings,
) -> SchedulePattern {
    SchedulePattern {
        collective: request.collective,
        algorithm,
        nranks: limits.nranks,
        root: request.root,
        peer: request.peer,
        groups: limits.groups().clone(),
        between,
        rings: rings.count(),
        orders: limits.orders(rings),
    }
}

/// Returns the number of elements that a rank sends in all passes, over all its messages.
fn sent_elements(schedule: &Schedule, pattern: &SchedulePattern, geometry: &Geometry) -> u64 {
    let mut sends = vec![0; pattern.parts()];
    for step in &schedule.steps {
        sends[pattern.part(step.chunk as usize)] += step.send_to.len();
    }
    let passes = |part| (0..geometry.passes()).map(move |pass| geometry.range(pass, part).len());
    let sent = sends.into_iter().enumerate();
    sent.filter(|(_, sends)| *sends > 0)
        .map(|(part, sends)| (sends * passes(part).sum::<usize>()) as u64)
        .sum()
}

/// Chunks of raw elements begin at multiples of this many bytes: a cache line.
pub const GRANULE_BYTES: usize = 64;

/// Returns the number of elements at whose multiples chunks may begin. It covers whole scale blocks
/// and whole cache lines.
pub fn granule(dtype: DType, codec: Option<&dyn Codec>) -> usize {
    let line = GRANULE_BYTES / dtype.size();
    match codec {
        None => line,
        Some(codec) => codec.granule().max(line),
    }
}

/// Returns the largest multiple of [`granule`] whose encoding fits `slot_bytes`, in elements.
///
/// # Errors
/// Invalid argument if not even one granule fits.
pub fn chunk_max(
    slot_bytes: usize,
    dtype: DType,
    spec: CodecSpec,
    codec: Option<&dyn Codec>,
) -> Result<usize> {
    let granule = granule(dtype, codec);
    let fits = |elements: usize| match codec {
        None => elements * dtype.size() <= slot_bytes,
        Some(codec) => codec.wire_bytes(elements) <= slot_bytes,
    };
    // Encodings never shrink with more elements, so bisection finds the largest multiple that fits.
    let (mut low, mut high) = (0, slot_bytes / granule + 1);
    while low + 1 < high {
        let middle = (low + high) / 2;
        if fits(middle * granule) {
            low = middle
        } else {
            high = middle
        }
    }
    // Computing a tensor scale needs the accumulators of a whole chunk, and the chunk must be small enough
    // that they fit the second-level cache.
    if matches!(spec.scale, ScaleRule::Tensor { .. }) {
        low = low.min((64 << 10) / granule).max(1);
    }
    if low == 0 || !fits(low * granule) {
        return Err(Error::invalid_argument(format!(
            "a slot of {slot_bytes} bytes cannot hold one block of {granule} elements in codec \
             {spec}; raise CINCH_SLOT_BYTES or CINCH_BUFFER_BYTES"
        )));
    }
    Ok(low * granule)
}

#[cfg(test)]
mod cliff_tests;
#[cfg(test)]
mod gpu_tests;
#[cfg(test)]
mod pinned_tests;
#[cfg(test)]
mod ring_set_tests;
