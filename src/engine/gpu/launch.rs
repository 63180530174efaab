//! Turns a plan into kernel arguments and a launch, and checks the caller's stream.

use super::GpuCall;
use super::connections::Connections;
use super::kernels::{self, BlockShape, Kernels};
use super::pack::{self, Addresses, PackedSchedule, WorkBuffer};
use super::residuals::ResidualPlace;
use crate::codec;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::abi::{self, CommView, OneshotArgs, ScheduleArgs};
use crate::gpu::{Context, DeviceMemory, Function, Launch, Stream};
use crate::plan::{EncodedTiles, Plan, Request};
use crate::sys::cuda::{CUcontext, CUgreenCtx, CuResult};
use crate::types::{
    Algorithm, Collective, Kernel, KernelProtocol, Level, Protocol, ReduceOp, SEQUENCE_WORD,
    SIGNATURE_WORDS,
};
use std::sync::Arc;
use std::time::Duration;

/// Number of packets that a warp stores together.
const WARP_PACKETS: usize = 32;

/// A plan with its packed schedules and kernel.
#[derive(Debug)]
pub(super) struct PreparedPlan {
    pub plan: Arc<Plan>,
    /// The schedules of the launches of a call, one after the other.
    pub packed: Vec<PackedSchedule>,
    pub function: Function,
    /// Block size of the kernel.
    pub shape: BlockShape,
    /// Payload bytes that this rank sends.
    pub wire_bytes: u64,
    round: FusedRound,
}

/// Memory that a call keeps from call to call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeptMemory<'a> {
    pub residuals: Option<&'a ResidualPlace>,
    pub scales: Option<&'a Arc<DeviceMemory>>,
    /// Whether the launch is the last of its call.
    pub ends: bool,
}

/// Sizes of one round of a fused kernel. In a round, every rank sends every other rank one message.
#[derive(Clone, Copy, Debug, Default)]
struct FusedRound {
    /// Number of 8-byte words of a message; with a codec, number of elements.
    words: usize,
    /// Number of ll packets (one word each), tiles of four ll128 lines, or encoded tiles that each thread
    /// block handles.
    share: usize,
    /// Number of lines that an encoded tile fills; 0 without a codec.
    lines: usize,
    /// Bits `SENDS_PARTS` to `SENDS_SUMS`; 0 without a codec.
    phases: u8,
}

impl PreparedPlan {
    pub fn new(plan: Arc<Plan>, kernels: &Kernels) -> Result<PreparedPlan> {
        let packed = PackedSchedule::launches(&plan.schedule, &plan.pattern)?;
        let function = kernels.find(&kernels::name_for(&plan))?.clone();
        Ok(PreparedPlan {
            round: FusedRound::new(&plan),
            shape: kernels::shape(&function),
            function,
            wire_bytes: wire_bytes(&plan, &packed),
            packed,
            plan,
        })
    }

    /// Returns the protocol whose FIFOs the kernel uses; fused kernels have areas of their own.
    pub fn fifo(&self) -> Protocol {
        match self.plan.kernel.kernel {
            Kernel::Schedule => self.plan.kernel.protocol,
            Kernel::Fused => Protocol::Simple,
        }
    }

    /// Returns whether the call only copies on this GPU: a single rank's call does, unless it has a factor.
    pub fn only_copies(&self, op: ReduceOp) -> bool {
        let multiplies = self.plan.collective.reduces() && matches!(op, ReduceOp::PreMulSum(_));
        self.plan.pattern.nranks == 1 && !multiplies
    }

    /// Returns whether the call's kernel takes the verdict of the output and writes the call's statistics. A call without
    /// steps on this rank has no kernel.
    pub fn writes_statistics(&self, op: ReduceOp) -> bool {
        let has_steps = self.packed.iter().any(|packed| !packed.steps.is_empty());
        has_steps && !self.only_copies(op) && kernels::takes_verdict(&self.plan)
    }

    /// Returns the number beyond which finite elements of the input saturate in the codec; infinity if none do.
    ///
    /// # Errors
    /// See [`pack::arithmetic`].
    pub fn largest(&self, op: ReduceOp) -> Result<f32> {
        const SCALES: u8 = abi::AVERAGE | abi::PREMULTIPLY;
        // Messages inside groups may be cast to a type with a smaller range.
        let codecs = [&self.plan.codec, &self.plan.intra].into_iter().flatten();
        let largest = codecs.map(|codec| codec.description().errors.largest as f32);
        let largest = largest.fold(f32::INFINITY, f32::min);
        // Averages encode contributions times a power of two.
        let (_, factor, flags) = pack::arithmetic(&self.plan, op)?;
        Ok(match flags & SCALES == SCALES {
            true => largest / f32::from_bits(factor as u32),
            false => largest,
        })
    }

    /// Returns the tensor whose residuals a call reads and updates, if any.
    pub fn feedback_tensor(&self, request: &Request) -> Option<u64> {
        let moves = request.count > 0 && self.plan.is_coded() && !self.only_copies(request.op);
        request.feedback.filter(|_| moves)
    }

    /// Adds a call's steps of one launch to its work buffer, for the channels from `first_channel` on. `captured` states that a graph may replay the launch.
    pub fn add_to(
        &self,
        (work_buffer, packed): (&mut WorkBuffer, &PackedSchedule),
        call: &GpuCall<'_>,
        (signature, first_channel): ([u64; SIGNATURE_WORDS], usize),
        kept: KeptMemory<'_>,
        captured: bool,
        begin: Launch,
    ) -> Result<()> {
        let mut work = pack::work(&self.plan, call.request.op, call.addresses())?;
        (work.signature, work.signature_hash) = (signature, signature_hash(signature));
        if let Some(place) = kept.residuals {
            (work.residuals, work.span) = (place.address, place.span);
        }
        work.scales = kept.scales.map_or(0, |memory| memory.address());
        work.ends = u8::from(kept.ends);
        if let Some(address) = call
            .buffers
            .statistics()
            .filter(|_| self.writes_statistics(call.request.op))
        {
            work.statistics = address;
            if call.buffers.takes_input_statistics() {
                work.flags |= abi::HAS_INPUT;
            }
        }
        // A GPU has fewer channels than 2^16.
        work.first_channel = first_channel as u16;
        work.codec = codec_words(&self.plan, signature[SEQUENCE_WORD]);
        // All replays carry the sequence number of the captured call, so the kernel itself must
        // vary the codec's keys.
        if captured && self.plan.specs.inter.is_stochastic() {
            work.flags |= abi::REDRAW;
        }
        work.flags |= launch_flag(begin);
        work_buffer.add(packed, work)
    }

    /// Returns the arguments of the fused kernel, if the plan uses one.
    pub fn fused(
        &self,
        call: &GpuCall<'_>,
        signature: [u64; SIGNATURE_WORDS],
        residuals: Option<&ResidualPlace>,
    ) -> Result<Option<FusedLaunch>> {
        if !self.plan.kernel.is_fused() {
            return Ok(None);
        }
        let (combine, factor, flags) = pack::arithmetic(&self.plan, call.request.op)?;
        Ok(Some(FusedLaunch {
            at: call.addresses(),
            combine: combine as u8,
            flags: flags | pack::aligned(call.addresses()),
            factor,
            codec: codec_words(&self.plan, signature[SEQUENCE_WORD]),
            residuals: residuals.map_or((0, 0), |place| (place.address, place.span)),
            signature,
        }))
    }
}

/// Returns the flag by which a kernel lets the next programmatic launch start early; 0 for a serialized
/// launch.
fn launch_flag(begin: Launch) -> u8 {
    match begin {
        Launch::Programmatic => abi::LAUNCH_DEPENDENTS,
        Launch::Serialized => 0,
    }
}

/// A call of a fused kernel.
pub(super) struct FusedLaunch {
    at: Addresses,
    combine: u8,
    flags: u8,
    factor: u64,
    codec: abi::CodecWords,
    /// Device address of the residuals, and the number of elements in one array of them.
    residuals: (u64, u64),
    signature: [u64; SIGNATURE_WORDS],
}

impl FusedLaunch {
    pub fn launch(
        &self,
        run: &PreparedPlan,
        connections: &dyn Connections,
        timeout: Duration,
        stream: &Stream,
        begin: Launch,
    ) -> Result<()> {
        let [packets, lines] = connections.epochs();
        let ((area, half), epoch) = match run.plan.kernel {
            KernelProtocol::FUSED_LL128 => (connections.shape().lines_area(), lines),
            _ => (connections.shape().oneshot_area(), packets),
        };
        let args = OneshotArgs {
            comm: CommView {
                protocol: run.plan.kernel.number(),
                ..connections.view(&run.packed[0].ranks, Protocol::Simple, timeout)
            },
            area,
            half,
            epoch,
            input: self.at.input,
            output: self.at.output,
            count: run.plan.count as u64,
            factor: self.factor,
            signature_hash: signature_hash(self.signature),
            signature: self.signature,
            words: run.round.words as u32,
            share: run.round.share as u32,
            combine: self.combine,
            flags: self.flags | launch_flag(begin),
            element_bytes: run.plan.dtype.size() as u8,
            root: run.plan.pattern.root as u8,
            phases: run.round.phases,
            tile_lines: run.round.lines as u8,
            unused: [0; 2],
            codec: self.codec,
            residuals: self.residuals.0,
            span: self.residuals.1,
        };
        let blocks = run.plan.channels as u32;
        let BlockShape { threads, shared } = run.shape;
        // SAFETY: the fused kernel takes `cinch_oneshot_args`, and waits for its predecessor before it
        // touches memory. `GpuEngine::end` and `keep` hold the connections until no kernel uses them;
        // the contract of `DeviceBuffers` covers the caller's buffers.
        unsafe {
            let function = &run.function;
            function.launch_with(begin, blocks, threads, shared, stream, &args)
        }
    }
}

impl FusedRound {
    /// Returns the sizes for a plan that a fused kernel runs, and zeros for any other plan.
    fn new(plan: &Plan) -> FusedRound {
        let elements = match plan.pattern.parts() {
            1 => plan.count,
            // The first part is as large as any: only the last parts may be shorter.
            _ => plan.geometry.chunk(),
        };
        let words = (elements * plan.dtype.size()).div_ceil(8);
        let share = |all: usize| all.div_ceil(plan.channels);
        match (plan.kernel, &plan.codec) {
            (kernel, Some(codec)) if kernel.is_fused() => {
                let tiles = EncodedTiles::new(&**codec, elements, kernel.protocol);
                FusedRound {
                    words: elements,
                    share: share(tiles.count),
                    lines: tiles.lines,
                    phases: phases(plan),
                }
            }
            (KernelProtocol::FUSED_LL128, None) => FusedRound {
                words,
                share: share(words.div_ceil(abi::TILE_WORDS)),
                ..FusedRound::default()
            },
            (KernelProtocol::FUSED_LL, _) => FusedRound {
                words,
                // A warp stores whole lines, so each block handles whole warps of packets.
                share: share(words).next_multiple_of(WARP_PACKETS),
                ..FusedRound::default()
            },
            _ => FusedRound::default(),
        }
    }
}

/// Returns the bits of [`abi::OneshotArgs::phases`] for a fused kernel with a codec.
fn phases(plan: &Plan) -> u8 {
    match (plan.collective, plan.algorithm) {
        (Collective::AllReduce, Algorithm::Direct) => {
            abi::SENDS_PARTS | abi::SUMS | abi::SENDS_SUMS
        }
        (Collective::AllReduce, _) => abi::SUMS,
        (Collective::ReduceScatter, _) => abi::SENDS_PARTS | abi::SUMS,
        _ => 0,
    }
}

/// Returns a hash of a signature, for the flags and headers of messages that have no room for the signature. A rank
/// that makes another call does not accept them. The hash leaves out the sequence number, because a graph's replay
/// repeats the number of its capture.
///
/// Flags have only its upper bits, so all bits of the signature must reach them: the finalizer is that of MurmurHash3.
pub fn signature_hash(signature: [u64; SIGNATURE_WORDS]) -> u64 {
    let [a, b, c, _, d] = signature;
    [a, b, c, d].into_iter().fold(0, |mixed: u64, word| {
        let mut mixed = (mixed ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
            mixed = (mixed ^ (mixed >> 33)).wrapping_mul(factor);
        }
        mixed ^ (mixed >> 33)
    })
}

/// Returns the arguments of a schedule kernel, without the contents of `work_buffer`.
pub(super) fn args(comm: CommView, work_buffer: &WorkBuffer) -> ScheduleArgs {
    let [nworks, nsteps, npeers] = work_buffer.counts();
    ScheduleArgs {
        comm,
        overflow: 0,
        nworks,
        nsteps,
        npeers,
        unused: 0,
        work_buffer: [0; abi::WORK_BUFFER_BYTES],
    }
}

/// Returns the codec's parameters for the call with sequence number `operation`. Without a codec, returns the
/// size of an element in bytes.
fn codec_words(plan: &Plan, operation: u64) -> abi::CodecWords {
    let mut word = [0; 8];
    match plan.codec {
        Some(ref codec) => {
            let limit = codec.element_limit().unwrap_or(0.0);
            let draws = Plan::draws(plan.specs.inter, operation, plan.schedule.rank);
            word = codec::kernel_params(plan.specs.inter, limit, draws);
        }
        None => word[0] = plan.dtype.size() as u32,
    }
    abi::CodecWords { word }
}

/// Returns the payload bytes that this rank sends in all passes.
fn wire_bytes(plan: &Plan, packed: &[PackedSchedule]) -> u64 {
    let mut sends = vec![[0u64; Level::ALL.len()]; plan.pattern.parts()];
    for step in packed.iter().flat_map(|packed| &packed.steps) {
        let level = match step.intra_send {
            0 => Level::Inter,
            _ => Level::Intra,
        };
        sends[usize::from(step.part)][level as usize] += u64::from(step.nsend);
    }
    let mut bytes = 0;
    for (part, by_level) in sends.iter().enumerate() {
        for level in Level::ALL
            .into_iter()
            .filter(|&level| by_level[level as usize] > 0)
        {
            for pass in 0..plan.geometry.passes() {
                let elements = plan.geometry.range(pass, part).len();
                bytes += by_level[level as usize] * plan.bytes_for(level, elements) as u64;
            }
        }
    }
    bytes
}

/// Queues a copy on this GPU, unless input and output are the same.
pub(super) fn copy(stream: &Stream, at: Addresses, bytes: usize) -> Result<()> {
    if at.input == at.output || bytes == 0 {
        return Ok(());
    }
    let context = stream.context();
    let _bound = context.bind()?;
    // SAFETY: the contract of `DeviceBuffers` keeps the stream valid and covers both buffers.
    let queued = unsafe {
        let api = context.driver().api();
        api.cuMemcpyAsync(at.output, at.input, bytes, stream.handle())
    };
    context.driver().check("cuMemcpyAsync", queued)
}

/// Rejects a stream of another context than the communicator's. A green context of the GPU is allowed,
/// although it has only a part of the multiprocessors. Blocks that do not fit there start when resident
/// blocks have ended, and a resident block never waits for another block of this rank.
pub(super) fn own_context(context: &Arc<Context>, stream: &Stream) -> Result<()> {
    // Handles 0, 1 and 2 are the default streams of the current context.
    if stream.handle().addr() <= 2 {
        return Ok(());
    }
    let _bound = context.bind()?;
    let mut found: CUcontext = std::ptr::null_mut();
    // SAFETY: the contract of `DeviceBuffers` keeps the stream valid; the driver writes one local handle.
    let queried = unsafe {
        let api = context.driver().api();
        api.cuStreamGetCtx(stream.handle(), &mut found)
    };
    context
        .driver()
        .check("cuStreamGetCtx", queried)
        .map_err(|error| error.context("the stream of a call"))?;
    if found == context.handle() {
        return Ok(());
    }
    // For a stream of a green context, `cuStreamGetCtx` does not return the communicator's context.
    let mut green: CUgreenCtx = std::ptr::null_mut();
    // SAFETY: the contract of `DeviceBuffers` keeps the stream valid; the driver writes two local handles.
    let queried = unsafe {
        let api = context.driver().api();
        api.cuStreamGetBothCtx(stream.handle(), &mut found, &mut green)
    };
    if queried == CuResult::SUCCESS && found == context.handle() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidUsage,
        format!(
            "the stream belongs to another context than the communicator's, which is the primary \
             context of {}: use a stream of that GPU",
            context.device()
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{
        Algorithm, CallTuning, CodecSetting, CodecSpec, Collective, DType, Fused as Together,
        ReduceOp,
    };
    use std::collections::HashMap;

    /// Flags of packets have 12 bits of the hash, those of lines 24 at least, and a packet of each call has all
    /// of it.
    #[test]
    fn signature_hashes_of_small_calls_collide_no_more_than_by_chance() {
        let mut calls = HashMap::new();
        let mut all = 0;
        for collective in Collective::ALL {
            for (count, root) in (1..=512).flat_map(|count| [0, 1, 5].map(|root| (count, root))) {
                let request = Request {
                    collective,
                    dtype: DType::F32,
                    op: ReduceOp::Sum,
                    count,
                    root,
                    peer: 0,
                    codec: CodecSetting::RAW,
                    algorithm: None,
                    tuning: CallTuning::AUTO,
                    tensor: None,
                    feedback: None,
                    fused: Together::ALONE,
                };
                let words = request
                    .signature(Algorithm::OneShot, CodecSpec::RAW, 0)
                    .words();
                *calls.entry(words).or_insert(0) = signature_hash(words);
                all += 1;
            }
        }
        let number = calls.len() as u64;
        for (bits, most) in [(12, 5.0 / 4.0), (24, 3.0), (64, 0.0)] {
            let mut marks = HashMap::new();
            for hash in calls.values() {
                *marks.entry(hash >> (64 - bits)).or_insert(0) += 1;
            }
            let pairs: u64 = marks
                .values()
                .map(|&number: &u64| number * (number - 1) / 2)
                .sum();
            let expected = (number * (number - 1) / 2) as f64 / f64::from(bits).exp2();
            assert!(
                all > 4096 && pairs as f64 <= expected * most,
                "{bits} bits: {pairs} of {expected} expected"
            );
        }
    }
}
