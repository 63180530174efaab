//! From a plan to the arguments of a launch, and what the driver is asked about streams.

use super::GpuCall;
use super::abi::{self, Args, OneshotArgs};
use super::connections::Connections;
use super::kernels::{self, Kernels, Shape};
use super::pack::{self, Addresses, PackedSchedule, WorkBuffer};
use super::residuals::Place;
use crate::codec;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, Function, Launch, Stream};
use crate::mem::abi::CommView;
use crate::plan::{EncodedTiles, Plan, Request};
use crate::sys::cuda::{CuContext, CuGreenContext, CuResult};
use crate::types::{
    Algorithm, Collective, Kernel, KernelProtocol, Protocol, ReduceOp, SIGNATURE_WORDS,
};
use std::sync::Arc;
use std::time::Duration;

/// Words of payload of a tile of lines.
pub(super) const TILE_WORDS: usize = 60;
/// Packets that a warp stores together.
const PACKETS_TOGETHER: usize = 32;

/// A plan, ready to be launched.
#[derive(Debug)]
pub(super) struct Prepared {
    pub plan: Arc<Plan>,
    pub packed: PackedSchedule,
    pub function: Function,
    /// Its blocks.
    pub shape: Shape,
    /// Payload bytes that this rank sends.
    pub wire_bytes: u64,
    exchange: Exchange,
}

/// What goes from a rank to another on a trip of a fused kernel.
#[derive(Clone, Copy, Debug, Default)]
struct Exchange {
    /// Words of 8 bytes; with a codec elements.
    words: usize,
    /// What a block has of them: packets of a word each, tiles of four lines, or images.
    share: usize,
    /// Lines of an image, and what is done with it: flags. Of a codec alone.
    lines: usize,
    phases: u8,
}

impl Prepared {
    pub fn new(plan: Arc<Plan>, kernels: &Kernels) -> Result<Prepared> {
        let packed = PackedSchedule::new(&plan.schedule, &plan.pattern)?;
        let function = kernels.find(&kernels::name_for(&plan))?.clone();
        Ok(Prepared {
            exchange: Exchange::of(&plan),
            shape: kernels::shape(&function),
            function,
            wire_bytes: wire_bytes(&plan, &packed),
            packed,
            plan,
        })
    }

    /// Which FIFOs the kernel uses; fused kernels have areas of their own.
    pub fn fifo(&self) -> Protocol {
        match self.plan.kernel.kernel {
            Kernel::Schedule => self.plan.kernel.protocol,
            Kernel::Fused => Protocol::Simple,
        }
    }

    /// Whether the call is a copy on one GPU: a single rank's is, unless it multiplies.
    pub fn only_copies(&self, op: ReduceOp) -> bool {
        let multiplies = self.plan.collective.reduces() && matches!(op, ReduceOp::PreMulSum(_));
        self.plan.pattern.nranks == 1 && !multiplies
    }

    /// The tensor whose residuals a call reads and leaves, if it does.
    pub fn feeds(&self, request: &Request) -> Option<u64> {
        let moves = request.count > 0 && self.plan.is_coded() && !self.only_copies(request.op);
        request.feedback.filter(|_| moves)
    }

    /// Adds a call to the works of a launch, which a graph may replay if it is captured.
    pub fn add_to(
        &self,
        work_buffer: &mut WorkBuffer,
        call: &GpuCall<'_>,
        signature: [u64; SIGNATURE_WORDS],
        residuals: Option<&Place>,
        captured: bool,
        begin: Launch,
    ) -> Result<()> {
        let mut work = pack::work(&self.plan, call.request.op, call.at())?;
        (work.signature, work.mark) = (signature, mark(signature));
        if let Some(place) = residuals {
            (work.residuals, work.span) = (place.address, place.span);
        }
        work.codec = codec_words(&self.plan, signature[3]);
        // All replays have the numbers of one operation.
        if captured && self.plan.spec.kind.has_seed() {
            work.flags |= abi::REDRAW;
        }
        work.flags |= lets_next_begin(begin);
        work_buffer.add(&self.packed, work)
    }

    /// The arguments of the fused kernel, if the plan is for it.
    pub fn fused(
        &self,
        call: &GpuCall<'_>,
        signature: [u64; SIGNATURE_WORDS],
        residuals: Option<&Place>,
    ) -> Result<Option<Fused>> {
        if !self.plan.kernel.is_fused() {
            return Ok(None);
        }
        let (combine, factor, flags) = pack::arithmetic(&self.plan, call.request.op)?;
        Ok(Some(Fused {
            at: call.at(),
            combine: combine as u8,
            flags: flags | pack::aligned(call.at()),
            factor,
            codec: codec_words(&self.plan, signature[3]),
            residuals: residuals.map_or((0, 0), |place| (place.address, place.span)),
            signature,
        }))
    }
}

/// What kernels that begin early themselves let the next one do.
fn lets_next_begin(begin: Launch) -> u8 {
    match begin {
        Launch::Programmatic => abi::LETS_NEXT_BEGIN,
        Launch::Serialized => 0,
    }
}

/// What one fused exchange has of its own.
pub(super) struct Fused {
    at: Addresses,
    combine: u8,
    flags: u8,
    factor: u64,
    codec: abi::CodecWords,
    /// Their address, and the elements of an array of them.
    residuals: (u64, u64),
    signature: [u64; SIGNATURE_WORDS],
}

impl Fused {
    pub fn launch(
        &self,
        run: &Prepared,
        wiring: &dyn Connections,
        timeout: Duration,
        stream: &Stream,
        begin: Launch,
    ) -> Result<()> {
        let [packets, lines] = wiring.epochs();
        let ((area, half), epoch) = match run.plan.kernel {
            KernelProtocol::FUSED_LL128 => (wiring.shape().lines_area(), lines),
            _ => (wiring.shape().oneshot_area(), packets),
        };
        let args = OneshotArgs {
            comm: CommView {
                protocol: run.plan.kernel.number(),
                ..wiring.view(Protocol::Simple, timeout)
            },
            area,
            half,
            epoch,
            input: self.at.input,
            output: self.at.output,
            count: run.plan.count as u64,
            factor: self.factor,
            mark: u64::from(mark(self.signature)) << 48,
            signature: self.signature,
            words: run.exchange.words as u32,
            share: run.exchange.share as u32,
            combine: self.combine,
            flags: self.flags | lets_next_begin(begin),
            element_bytes: run.plan.dtype.size() as u8,
            root: run.plan.pattern.root as u8,
            phases: run.exchange.phases,
            image_lines: run.exchange.lines as u8,
            unused: [0; 2],
            codec: self.codec,
            residuals: self.residuals.0,
            span: self.residuals.1,
        };
        let blocks = run.plan.channels as u32;
        let Shape { threads, shared } = run.shape;
        // SAFETY: the fused kernel takes `cinch_oneshot_args`, and waits before it touches memory;
        // the addresses are of the wiring, which outlives the kernel, and of the caller's buffers,
        // which he vouches for.
        unsafe {
            let function = &run.function;
            function.launch_with(begin, blocks, threads, shared, stream, &args)
        }
    }
}

impl Exchange {
    /// That of a plan; nothing if an interpreter runs it.
    fn of(plan: &Plan) -> Exchange {
        let elements = match plan.pattern.parts() {
            1 => plan.count,
            // Parts are of one size, of which the last ones may have less.
            _ => plan.geometry.chunk(),
        };
        let words = (elements * plan.dtype.size()).div_ceil(8);
        let share = |all: usize| all.div_ceil(plan.channels);
        match (plan.kernel, &plan.codec) {
            (KernelProtocol::FUSED_LL128, Some(codec)) => {
                let images = EncodedTiles::new(&**codec, elements);
                Exchange {
                    words: elements,
                    share: share(images.count),
                    lines: images.lines,
                    phases: phases(plan),
                }
            }
            (KernelProtocol::FUSED_LL128, None) => Exchange {
                words,
                share: share(words.div_ceil(TILE_WORDS)),
                ..Exchange::default()
            },
            (KernelProtocol::FUSED_LL, _) => Exchange {
                words,
                // Whole lines of the buffers.
                share: share(words).next_multiple_of(PACKETS_TOGETHER),
                ..Exchange::default()
            },
            _ => Exchange::default(),
        }
    }
}

/// What a fused kernel of a codec does, as flags.
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

/// What flags have of a call besides a number: 16 bits of its signature (packets have room for 12), so
/// that a rank never, or hardly ever, understands one that makes another call. Not of how many calls there
/// have been: a graph is replayed with what was counted when it was captured.
fn mark(signature: [u64; SIGNATURE_WORDS]) -> u16 {
    let [a, b, c, _, d] = signature;
    let mixed = [a, b, c, d].into_iter().fold(0, |mixed: u64, word| {
        (mixed ^ word)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(31)
    });
    mixed as u16
}

/// The arguments of an interpreter whose work_buffer is still to be written.
pub(super) fn args(comm: CommView, work_buffer: &WorkBuffer) -> Args {
    let [nworks, nsteps, npeers] = work_buffer.counts();
    Args {
        comm,
        far: 0,
        nworks,
        nsteps,
        npeers,
        unused: 0,
        work_buffer: [0; abi::BLOB_BYTES],
    }
}

/// What a kernel needs to know of a plan's codec, in this operation; of no codec, the bytes of an
/// element.
fn codec_words(plan: &Plan, operation: u64) -> abi::CodecWords {
    let mut word = [0; 8];
    match plan.codec {
        // Scales are of blocks: tensor scales were refused.
        Some(_) => {
            let draws = Plan::draws(plan.spec, operation, plan.schedule.rank);
            word = codec::kernel_params(plan.spec, 0.0, draws);
        }
        None => word[0] = plan.dtype.size() as u32,
    }
    abi::CodecWords { word }
}

/// Payload bytes that a rank sends in all passes.
fn wire_bytes(plan: &Plan, packed: &PackedSchedule) -> u64 {
    let mut sends = vec![0u64; plan.pattern.parts()];
    for step in &packed.steps {
        sends[usize::from(step.part)] += u64::from(step.nsend);
    }
    let mut bytes = 0;
    for (part, sends) in sends.iter().enumerate().filter(|(_, sends)| **sends > 0) {
        for pass in 0..plan.geometry.passes() {
            bytes += sends * plan.wire_bytes(plan.geometry.range(pass, part).len()) as u64;
        }
    }
    bytes
}

/// Queues a copy on this GPU; of a buffer onto itself, nothing.
pub(super) fn copy(stream: &Stream, at: Addresses, bytes: usize) -> Result<()> {
    if at.input == at.output || bytes == 0 {
        return Ok(());
    }
    let context = stream.context();
    let _bound = context.bind()?;
    // SAFETY: a live stream; buffers of that many bytes, by the caller's word.
    let queued = unsafe {
        let api = context.driver().api();
        api.cuMemcpyAsync(at.output, at.input, bytes, stream.handle())
    };
    context.driver().check("cuMemcpyAsync", queued)
}

/// Refuses a stream of another context than the communicator's. One of a green context of its GPU is of a
/// part of the multiprocessors: blocks that have no room there wait for others that need none of them.
pub(super) fn own_context(context: &Arc<Context>, stream: &Stream) -> Result<()> {
    // 0, 1 and 2 are the default streams of whatever context is current.
    if stream.handle().0 <= 2 {
        return Ok(());
    }
    let _bound = context.bind()?;
    let mut found = CuContext::default();
    // SAFETY: a live stream; writes one handle.
    let asked = unsafe {
        let api = context.driver().api();
        api.cuStreamGetCtx(stream.handle(), &mut found)
    };
    context
        .driver()
        .check("cuStreamGetCtx", asked)
        .map_err(|error| error.context("the stream of a call"))?;
    if found == context.handle() {
        return Ok(());
    }
    // A green context counted as one of its own there.
    let mut green = CuGreenContext::default();
    // SAFETY: as above; writes two handles.
    let asked = unsafe {
        let api = context.driver().api();
        api.cuStreamGetBothCtx(stream.handle(), &mut found, &mut green)
    };
    if asked == CuResult::SUCCESS && found == context.handle() {
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
    use crate::types::{Algorithm, CodecSpec, Collective, DType, Fused as Together, ReduceOp};
    use std::collections::HashMap;

    /// Packets have 12 bits of a mark: of so many small calls each has about one in 4,096 for a namesake
    /// by chance, and no more.
    #[test]
    fn calls_seldom_have_the_mark_of_another() {
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
                    codec: CodecSpec::RAW,
                    auto: false,
                    intra: CodecSpec::RAW,
                    algorithm: None,
                    tensor: None,
                    feedback: None,
                    fused: Together::ALONE,
                };
                let words = request
                    .signature(Algorithm::OneShot, CodecSpec::RAW, 0)
                    .words();
                *calls.entry(words).or_insert(0) = mark(words) >> 4;
                all += 1;
            }
        }
        let mut marks = HashMap::new();
        for mark in calls.values() {
            *marks.entry(mark).or_insert(0) += 1;
        }
        let pairs: u64 = marks
            .values()
            .map(|&number: &u64| number * (number - 1) / 2)
            .sum();
        let number = calls.len() as u64;
        let expected = number * (number - 1) / 2 / 4096;
        assert!(
            all > 4096 && pairs < expected * 5 / 4,
            "{pairs} of {expected} expected"
        );
    }
}
