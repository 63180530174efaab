//! Plans: a call bound to a schedule, a codec and a cut of the message.
//!
//! Selection is a pure function of the request and of facts that all ranks share, so that all
//! ranks choose alike without talking; `explain` shows its candidates.

mod cost;
mod encoded_tiles;
mod explain;
mod geometry;
mod gpu;
mod gpu_costs;
mod measured;
mod sample_window;
mod select;
mod tuning;

pub use crate::types::ResolvedCall as Request;
pub use cost::{Machine, Work, seconds};
pub use encoded_tiles::EncodedTiles;
pub use explain::explain;
pub use geometry::Geometry;
pub use gpu::{FUSED128_DTYPES, GpuLimits, KEPT_STEPS, Resident};
pub use measured::{Affine, MeasuredCosts};
pub use sample_window::{SAMPLE_WINDOW_ELEMENTS, SampleWindow};
pub use select::{Candidate, Limits, candidates};
pub use tuning::{
    Choice, Entry, Header, KernelVariant, Line, Site, Table, Tuning, WireClass, links,
};

use crate::codec::{self, Codec, Random};
use crate::cpu::Isa;
use crate::error::{Error, Result};
use crate::schedule::{Hosts, Pattern, Place, Schedule};
use crate::types::{
    Algorithm, CodecSetting, CodecSpec, Collective, DType, KernelProtocol, Level, ScaleRule,
};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

impl Request {
    /// Returns whether ranks of different hosts take part.
    pub fn crosses(&self, hosts: &Hosts) -> bool {
        hosts.count() > 1 && !(self.collective.is_message() && hosts.share(self.root, self.peer))
    }
}

/// What one rank does for one request.
#[derive(Debug)]
pub struct Plan {
    /// The request, without its tensor and operator: those do not shape a plan.
    pub collective: Collective,
    /// Elements.
    pub dtype: DType,
    /// Which algorithm won.
    pub algorithm: Algorithm,
    /// The steps.
    pub schedule: Arc<Schedule>,
    /// The cut.
    pub geometry: Geometry,
    /// The codec; `None` = raw.
    pub codec: Option<Arc<dyn Codec>>,
    /// The codec of messages for [`Level::Intra`]; `None` = raw.
    pub intra: Option<Arc<dyn Codec>>,
    /// The names of both codecs, equal where the schedule has one level.
    pub specs: CodecSetting,
    /// Elements of the message or of one rank's block.
    pub count: usize,
    /// Where chunks lie.
    pub pattern: Pattern,
    /// For each step, whether it is the first that reads its chunk of the input: that one takes
    /// note of it for the report.
    pub notes_input: Vec<bool>,
    /// Channels that have work.
    pub channels: usize,
    /// The kernel that runs it, and how messages travel; on host memory [`KernelProtocol::SIMPLE`].
    pub kernel: KernelProtocol,
    /// Payload bytes that the rank would send with no codec on either level.
    pub raw_bytes: u64,
}

impl Plan {
    /// `request`, of which this is a plan, with the codec that was decided for.
    pub fn decided(&self, request: &Request) -> Request {
        Request {
            codec: self.specs,
            ..*request
        }
    }

    /// The codec of messages for `level`; `None` = raw.
    #[inline]
    pub fn codec_of(&self, level: Level) -> Option<&dyn Codec> {
        match level {
            Level::Intra => self.intra.as_deref(),
            Level::Inter => self.codec.as_deref(),
        }
    }

    /// The name of that codec.
    #[inline]
    pub fn spec_of(&self, level: Level) -> CodecSpec {
        self.specs.at(level)
    }

    /// Whether any message is encoded.
    pub fn is_coded(&self) -> bool {
        self.codec.is_some() || self.intra.is_some()
    }

    /// Wire bytes of a chunk of `n` elements for `level`.
    #[inline]
    pub fn bytes_for(&self, level: Level, n: usize) -> usize {
        match self.codec_of(level) {
            None => n * self.dtype.size(),
            Some(codec) => codec.wire_bytes(n),
        }
    }

    /// What the encodes of `rank` through `spec` draw in an operation: those of its contributions, and
    /// those of sums. The numbers hang on the place of an element in the message, not on how it is
    /// cut: an encoder moves them there by [`Random::from`].
    pub fn draws(spec: CodecSpec, operation: u64, rank: usize) -> [Random; 2] {
        if !spec.kind.has_seed() {
            return [Random::NONE; 2];
        }
        [0, 1].map(|sum| {
            let hop = 2 * rank as u64 + sum;
            Random::new(spec.seed.into(), operation, hop)
        })
    }

    /// Wire bytes of a chunk of `n` elements where there is one level, or between hosts.
    #[inline]
    pub fn wire_bytes(&self, n: usize) -> usize {
        self.bytes_for(Level::Inter, n)
    }

    /// First element, in its buffer, of a chunk that lies at `place`.
    #[inline]
    pub fn start(&self, place: Place, pass: usize) -> usize {
        let block = place.block.unwrap_or(0);
        block * self.count + self.geometry.range(pass, place.part).start
    }

    /// Elements of `chunk` in pass `pass`.
    #[inline]
    pub fn elements(&self, chunk: usize, pass: usize) -> usize {
        self.geometry.range(pass, self.pattern.part(chunk)).len()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    collective: Collective,
    dtype: DType,
    count: usize,
    root: usize,
    peer: usize,
    codec: CodecSetting,
    algorithm: Option<Algorithm>,
}

/// Built codecs of both levels, where the level has one.
type Codecs = [Option<Arc<dyn Codec>>; 2];

/// Makes plans and keeps them.
#[derive(Debug)]
pub struct Planner {
    limits: Limits,
    /// Channels that there are, whatever the limits say.
    channels: usize,
    rank: usize,
    isa: Isa,
    tuning: Tuning,
    plans: HashMap<Key, Arc<Plan>>,
    /// Plans of the latest calls, newest first: loops repeat a few shapes.
    latest: VecDeque<(Key, Arc<Plan>)>,
}

/// Plans that are found without hashing.
const LATEST: usize = 4;

/// Plans kept at once; a program with more shapes than this pays for planning again.
const CACHED: usize = 1024;

impl Planner {
    /// A planner for `rank` under `limits`.
    pub fn new(limits: Limits, rank: usize, isa: Isa) -> Planner {
        Planner {
            limits,
            channels: usize::MAX,
            rank,
            isa,
            tuning: Tuning::Model("no table was looked for".into()),
            plans: HashMap::new(),
            latest: VecDeque::new(),
        }
    }

    /// Goes by this tuning from now on; all ranks do so at the same point.
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuning = tuning;
        self.plans.clear();
        self.latest.clear();
    }

    /// Whether kernels can run `request` this way.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn supports(&self, request: &Request, way: KernelVariant) -> Result<bool> {
        let [_, codec] = self.codecs(request)?;
        let found = gpu::tuned(request, &self.limits, codec.as_deref(), way)?;
        Ok(found.is_some())
    }

    /// What calls are tuned by.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// The ways of kernels to run `request` that are worth a measurement; none on host memory.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn variants(&self, request: &Request) -> Result<Vec<KernelVariant>> {
        let [_, codec] = self.codecs(request)?;
        gpu::variants(request, &self.limits, codec.as_deref())
    }

    /// Plans from now on as another communicator of as many ranks would, in the channels of this
    /// one: for tests that compare the bits of two engines, which follow from the cut.
    pub fn copy_limits(&mut self, limits: Limits) {
        self.channels = self.limits.channels;
        self.limits = limits;
        self.plans.clear();
        self.latest.clear();
    }

    /// Goes by these costs from now on; all ranks do so at the same point.
    pub fn set_costs(&mut self, costs: MeasuredCosts) {
        self.limits.machine.measured = Some(costs);
        self.plans.clear();
        self.latest.clear();
    }

    /// What selection goes by.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The plan for `request`.
    ///
    /// # Errors
    /// Unsupported if the algorithm asked for does not exist for the collective.
    pub fn plan(&mut self, request: &Request) -> Result<Arc<Plan>> {
        let key = Key {
            collective: request.collective,
            dtype: request.dtype,
            count: request.count,
            root: request.root,
            peer: request.peer,
            codec: request.codec,
            algorithm: request.algorithm,
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
            // At equal costs nothing is lost by being exact.
            true => {
                let raw = self.best(&request.without_codec())?;
                if coded.0.seconds < raw.0.seconds {
                    coded
                } else {
                    raw
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

    /// The cheapest candidate for `request` with its codecs, and the codecs.
    fn best(&self, request: &Request) -> Result<(Candidate, Codecs)> {
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

    /// The candidate that the table chooses for `request`, and the number of its line, which a way
    /// that is being measured has not; or why the model decides, as a phrase.
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
        if self.limits.algorithm.is_some() || gpu.is_forced() {
            return Ok(Err("CINCH_ALGO, CINCH_KERNEL or CINCH_PROTO is set".into()));
        }
        if self.limits.hosts.count() > 1 {
            return Ok(Err("tables are for one host".into()));
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
        let found = gpu::tuned(request, &self.limits, codec, choice.way)?;
        Ok(match (found, choice.line) {
            (Some(candidate), None) => Ok((candidate, None)),
            (Some(candidate), Some(Line { number, seconds })) => Ok((
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
                } = choice.way;
                Err(format!("{algorithm} {kernel}{of} cannot be here"))
            }
        })
    }

    /// Seconds that `request` is predicted to take, or was measured to.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn predict(&self, request: &Request) -> Result<f64> {
        Ok(self.best(request)?.0.seconds)
    }

    /// The codecs of both levels, in the order of [`Level`].
    fn codecs(&self, request: &Request) -> Result<[Option<Arc<dyn Codec>>; 2]> {
        let inter = codec::build(request.codec.inter, self.isa)?;
        let intra = match request.codec.intra == request.codec.inter {
            true => inter.clone(),
            false => codec::build(request.codec.intra, self.isa)?,
        };
        Ok([intra, inter])
    }
}

/// Returns the name of a built codec.
fn spec(codec: Option<&dyn Codec>) -> CodecSpec {
    codec.map_or(CodecSpec::RAW, |codec| codec.spec())
}

/// The schedules of a request by an algorithm, and of a hierarchical one between hosts, for all
/// ranks.
fn pattern(
    request: &Request,
    limits: &Limits,
    (algorithm, between): (Algorithm, Algorithm),
    rings: usize,
) -> Pattern {
    Pattern {
        collective: request.collective,
        algorithm,
        nranks: limits.nranks,
        root: request.root,
        peer: request.peer,
        hosts: limits.hosts.clone(),
        between,
        rings,
    }
}

/// Elements of all messages that a rank sends in all passes.
fn sent_elements(schedule: &Schedule, pattern: &Pattern, geometry: &Geometry) -> u64 {
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

/// Bytes of raw elements at which chunks may be cut: a cache line.
pub const GRANULE_BYTES: usize = 64;

/// Elements at which chunks may be cut: whole scale blocks, whole cache lines.
pub fn granule(dtype: DType, codec: Option<&dyn Codec>) -> usize {
    let line = GRANULE_BYTES / dtype.size();
    match codec {
        None => line,
        Some(codec) => codec.granule().max(line),
    }
}

/// Largest number of elements whose encoding fits `slot_bytes`, a multiple of `granule`.
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
    // Encodings are monotone in length; the largest fitting multiple by bisection.
    let (mut low, mut high) = (0, slot_bytes / granule + 1);
    while low + 1 < high {
        let middle = (low + high) / 2;
        if fits(middle * granule) {
            low = middle
        } else {
            high = middle
        }
    }
    // A tensor scale holds a whole chunk of accumulators at once; keep that in the second-level
    // cache.
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
