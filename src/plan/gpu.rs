//! Candidates for GPU kernels: kernel, protocol, channels and chunk size of a call.
//!
//! Everything here follows from the request and from facts that all ranks share, so that all ranks
//! launch the same grid.
//!
//! "Why the planner's constants are what they are" in benches/FIGURES.md has the measurements.

use super::algorithms::{algorithms, keeps};
use super::busiest::{busiest, leaving};
use super::candidate::{Candidate, ChannelRings};
use super::encoded_tiles::TILE as CODED_TILE;
use super::fused_blocks::{FUSED_SHARE, MOVER_WARPS, coded_share};
use super::gpu_costs::{ClassBytes, network_seconds, seconds};
use super::level_messages::{message_bytes, most_inside};
use super::limits::{GpuLimits, Limits};
use super::link_time::LinkWork;
use super::tuning::KernelVariant;
use super::{EncodedTiles, Geometry, Request, chunk_max, granule};
use crate::codec::{Codec, FUSED_CODECS};
use crate::error::{Error, Result};
use crate::gpu::abi::{LINE_BYTES, MAX_PEERS};
use crate::schedule::{self, CostCounts, SchedulePattern};
use crate::types::{
    Algorithm, Collective, DType, Kernel, KernelProtocol, Level, Protocol, ScaleRule,
};

/// Largest number of channels of a raw (not encoded) call below [`LARGE_BYTES`]. Larger calls may
/// use all channels.
const RAW_CHANNELS: usize = 64;
/// Message size in bytes from which a raw call may use all channels.
const LARGE_BYTES: usize = 8 << 20;
/// Collectives and algorithms that have a fused kernel in which each rank sends to each other rank.
/// All but the last also have fused kernels with a codec, over ll packets and ll128 lines.
const FUSED: [(Collective, Algorithm); 5] = [
    (Collective::AllReduce, Algorithm::OneShot),
    (Collective::AllReduce, Algorithm::Direct),
    (Collective::AllGather, Algorithm::Direct),
    (Collective::ReduceScatter, Algorithm::Direct),
    (Collective::AllToAll, Algorithm::Direct),
];
/// Collectives and algorithms that have a fused kernel with ll128 only. Ranks that have no data for
/// each other send an empty line.
const FUSED128: [(Collective, Algorithm); 2] = [
    (Collective::Broadcast, Algorithm::OneShot),
    (Collective::Reduce, Algorithm::OneShot),
];
/// Types that fused kernels with ll128 can reduce: the types of gradients. Collectives that only
/// move data use ll128 for every type.
pub const FUSED128_DTYPES: [DType; 3] = [DType::F16, DType::F32, DType::BF16];
/// Largest number of thread blocks of a fused kernel.
const FUSED_BLOCKS: usize = 64;
/// A send/recv message gets one channel for each of this many bytes, within limits.
const MESSAGE_SHARE: usize = 256 << 10;
/// Largest number of rings per channel in one direction. Several rings share a channel so that
/// their hops overlap; the number of slots limits how many can.
const RING_ABREAST: usize = 2;
/// Largest number of steps of a pass that a kernel keeps in shared memory. Further steps would be
/// read from global memory in each pass.
pub const KEPT_STEPS: usize = 96;
/// Fused kernels divide a rank's data at multiples of this many bytes.
const WORD_BYTES: usize = 8;
/// Smallest size in bytes to which chunks are cut, because each message has a fixed cost.
const SMALLEST_CHUNK: usize = 512;
/// Bytes of raw elements that a warp processes at a time. With a codec, a warp processes an encoded
/// tile at a time.
const RAW_TILE_BYTES: usize = 2 << 10;
/// Largest number of bytes of an encoded chunk, however large slots are: 64 Ki elements of 8 bits
/// and their scales. Chunks of several passes travel at once, and smaller chunks overlap better.
const CODED_BYTES: usize = 66 << 10;
/// Largest message, in bytes, for which the schedule kernel with [`Protocol::Ll`] is a candidate.
const LL_BYTES: usize = 64 << 10;
/// Largest message, in bytes, for which the schedule kernel with [`Protocol::Ll128`] is a
/// candidate.
const LL128_BYTES: usize = 1 << 20;

impl GpuLimits {
    /// Returns the largest number of channels of a call. Both ends of a message compute equal
    /// numbers.
    fn channels(&self, request: &Request, protocol: Protocol, nranks: usize) -> usize {
        // Encoding is bound by instructions, so coded calls of every size use all channels, and
        // with them more multiprocessors.
        let all = request.codec.inter.is_lossy() || bytes(request, nranks) >= LARGE_BYTES;
        let cap = if all { usize::MAX } else { RAW_CHANNELS };
        let resident = match request.collective {
            Collective::SendRecv => self.message_channels(bytes(request, nranks), nranks),
            _ => self.resident.channels,
        };
        let channels = self.fifos[protocol as usize].1;
        let bound = self.most_channels(request);
        cap.min(bound).min(channels).min(resident).max(1)
    }

    /// Returns the rings per channel; 1 for algorithms other than ring. Several rings need a free
    /// slot for the next message, and shared memory for their steps. A single ring added in the
    /// other direction costs more than it gains.
    ///
    /// A coded call has one ring, as on the host, so that both give equal bits. A call between
    /// hosts has one ring as well, because its proxy has its own slots.
    pub(super) fn rings(
        &self,
        request: &Request,
        limits: &Limits,
        variant: KernelVariant,
    ) -> ChannelRings {
        let is_simple_ring = (variant.algorithm, variant.kernel)
            == (Algorithm::Ring, KernelProtocol::SIMPLE)
            && schedule::has_several_rings(request.collective);
        let is_open = !request.codec.inter.is_lossy() && !request.crosses(&limits.hosts);
        if !is_simple_ring || !is_open || self.depths[Protocol::Simple as usize] <= RING_ABREAST {
            return ChannelRings::ONE;
        }
        let most = KEPT_STEPS / schedule::ring_steps(limits.nranks);
        let abreast = schedule::directions(limits.nranks) * RING_ABREAST;
        ChannelRings::OneOrder(abreast.min(most.max(1)))
    }

    /// Returns the channels that a send/recv message of `bytes` may have in each direction. With
    /// the smallest number, messages to all peers fit the resident blocks together. A larger
    /// message gets more channels, so that it has enough blocks to fill a link.
    fn message_channels(&self, bytes: usize, nranks: usize) -> usize {
        let each_way = (self.resident.channels / 2).max(1);
        let everybody = nranks.saturating_sub(1).clamp(1, each_way);
        bytes
            .div_ceil(MESSAGE_SHARE)
            .clamp(each_way / everybody, each_way)
    }

    /// Returns the number of peers with which a rank may exchange messages of `bytes` in one
    /// launch, such that all their channels are resident. Sender and receiver compute equal
    /// numbers.
    pub fn peers_at_once(&self, nranks: usize, bytes: usize) -> usize {
        let each_way = (self.resident.channels / 2).max(1);
        let everybody = match nranks > MAX_PEERS {
            // The ranks to which a rank sends and those from which it receives differ.
            true => MAX_PEERS / 2,
            false => nranks.saturating_sub(1).max(1),
        };
        let room = (each_way / self.message_channels(bytes, nranks)).min(everybody);
        // Messages of a group share a launch only if this number is equal for them. Rounding it
        // down to a power of two makes more messages share one.
        match room == everybody {
            true => room,
            false => 1 << room.ilog2(),
        }
    }
}

/// Returns the kernels and protocols that may run `request` by `algorithm`. If the call or the settings
/// ask for a kernel or protocol that can, it returns only matching ones. Otherwise it returns all for
/// which the message is not too large.
pub(super) fn kernels(
    request: &Request,
    limits: &Limits,
    gpu: &GpuLimits,
    codec: Option<&dyn Codec>,
    algorithm: Algorithm,
) -> Vec<KernelProtocol> {
    let bytes = bytes(request, limits.nranks);
    let mut found: Vec<KernelProtocol> = KernelProtocol::ALL
        .into_iter()
        .filter(|&kernel| possible(request, limits, gpu, codec, (algorithm, kernel)))
        .collect();
    // Where ll128 works, it sends the same encoded tiles in little more than half of the bytes.
    let asked = request.tuning.protocol.or(gpu.protocol);
    if request.codec.inter.is_lossy() && gpu.ll128 && asked != Some(Protocol::Ll) {
        found.retain(|&kernel| kernel != KernelProtocol::FUSED_LL);
    }
    if found.iter().any(|&kernel| gpu.asks_for(request, kernel)) {
        found.retain(|&kernel| gpu.asks_for(request, kernel));
        return found;
    }
    found.retain(|&kernel| match kernel {
        KernelProtocol::LL => bytes <= LL_BYTES,
        KernelProtocol::LL128 => bytes <= LL128_BYTES,
        _ => true,
    });
    found
}

/// Returns whether `kernel` can run `request` by `algorithm`.
fn possible(
    request: &Request,
    limits: &Limits,
    gpu: &GpuLimits,
    codec: Option<&dyn Codec>,
    (algorithm, kernel): (Algorithm, KernelProtocol),
) -> bool {
    if limits.nranks > MAX_PEERS && kernel.kernel == Kernel::Fused {
        return false;
    }
    // A single rank sends no messages. Messages between hosts pass through a proxy, which polls
    // counters but cannot see flags among the data.
    if limits.nranks == 1 || request.crosses(&limits.hosts) {
        return kernel == KernelProtocol::SIMPLE;
    }
    if let Some(codec) = codec.filter(|_| request.codec.inter.is_lossy()) {
        // Encoded chunks travel in slots, or as encoded tiles of a fused kernel.
        return match kernel {
            KernelProtocol::SIMPLE => true,
            KernelProtocol::FUSED_LL | KernelProtocol::FUSED_LL128 => {
                (gpu.ll128 || kernel == KernelProtocol::FUSED_LL)
                    && !keeps(request, Some(codec))
                    && fits_coded(request, limits, gpu, codec, (algorithm, kernel.protocol))
            }
            _ => false,
        };
    }
    match (kernel.kernel, kernel.protocol) {
        // The planner offers no hierarchical schedule that needs more slots than this protocol has.
        (Kernel::Schedule, Protocol::Simple) => true,
        (Kernel::Schedule, Protocol::Ll) => has_slots(request, limits, gpu, (algorithm, kernel)),
        (Kernel::Schedule, Protocol::Ll128) => {
            has_slots(request, limits, gpu, (algorithm, kernel))
                && (gpu.ll128 || keeps_lines_whole(request, limits, gpu, algorithm))
        }
        (Kernel::Fused, Protocol::Simple) => false,
        (Kernel::Fused, Protocol::Ll) => {
            FUSED.contains(&(request.collective, algorithm))
                && fits_fused(request, limits, algorithm, gpu.oneshot_bytes)
        }
        (Kernel::Fused, Protocol::Ll128) => {
            let call = (request.collective, algorithm);
            let is_known = FUSED.contains(&call) || FUSED128.contains(&call);
            let is_added =
                !request.collective.reduces() || FUSED128_DTYPES.contains(&request.dtype);
            gpu.ll128
                && is_known
                && is_added
                && fits_fused(request, limits, algorithm, gpu.lines_bytes)
        }
    }
}

/// Returns whether connections have enough slots for the schedules of `algorithm`. Groups of different sizes need more
/// than ll and ll128 have.
fn has_slots(
    request: &Request,
    limits: &Limits,
    gpu: &GpuLimits,
    (algorithm, kernel): (Algorithm, KernelProtocol),
) -> bool {
    let slots = |&between: &Algorithm| {
        super::pattern(request, limits, (algorithm, between), ChannelRings::ONE).slots()
    };
    let most = betweens(request, algorithm).iter().map(slots).max();
    most.unwrap_or(0) <= gpu.depths[kernel.protocol as usize]
}

/// Returns the algorithms between groups that schedules of `algorithm` may have; any one for flat algorithms.
fn betweens(request: &Request, algorithm: Algorithm) -> &'static [Algorithm] {
    match algorithm {
        Algorithm::Hierarchical => SchedulePattern::between_groups(request.collective),
        _ => &[Algorithm::Direct],
    }
}

/// Returns whether lines arrive whole between all ranks that exchange messages by `algorithm`, whatever the algorithm
/// between groups is. All ranks get the same answer, because each looks at the schedules of all ranks.
fn keeps_lines_whole(
    request: &Request,
    limits: &Limits,
    gpu: &GpuLimits,
    algorithm: Algorithm,
) -> bool {
    let pairs = &gpu.pairs;
    if pairs.splits_all_lines() {
        return false;
    }
    betweens(request, algorithm).iter().all(|&between| {
        let pattern = super::pattern(request, limits, (algorithm, between), ChannelRings::ONE);
        (0..limits.nranks).all(|rank| {
            let is_whole = |peer: &u32| !pairs.splits_lines(rank, *peer as usize);
            let schedule = pattern.schedule(rank);
            schedule.is_ok_and(|schedule| {
                let mut peers = schedule.steps.iter().flat_map(|step| step.send_to.iter());
                peers.all(is_whole)
            })
        })
    })
}

/// Returns whether a rank sends at most `most` bytes to each other rank, over all phases of a fused
/// kernel.
fn fits_fused(request: &Request, limits: &Limits, algorithm: Algorithm, most: usize) -> bool {
    // The phases divide the receive area among them.
    let trips = trips(request.collective, algorithm);
    let parts = if trips == 1 { 1 } else { limits.nranks };
    let words = (request.count * request.dtype.size()).div_ceil(WORD_BYTES);
    words.div_ceil(parts) * WORD_BYTES <= most / trips
}

/// Returns how many phases of messages a fused kernel has. A two-shot has 2: parts travel to their
/// owner, and the sums to all ranks. Others have 1.
fn trips(collective: Collective, algorithm: Algorithm) -> usize {
    match (collective, algorithm) {
        (Collective::AllReduce, Algorithm::Direct) => 2,
        _ => 1,
    }
}

/// Returns whether a fused kernel with a codec can run `request`, and its encoded tiles fit the
/// receive area. Such kernels have no random numbers, and scale blocks must lie within a tile. They
/// always support residuals of error feedback: a rank cannot know whether other ranks keep
/// residuals, so residuals must not select the kernel.
fn fits_coded(
    request: &Request,
    limits: &Limits,
    gpu: &GpuLimits,
    codec: &dyn Codec,
    (algorithm, protocol): (Algorithm, Protocol),
) -> bool {
    let (spec, trips) = (request.codec.inter, trips(request.collective, algorithm));
    let is_known = FUSED.contains(&(request.collective, algorithm))
        && request.collective != Collective::AllToAll
        && FUSED_CODECS.contains(&spec.kind)
        && FUSED128_DTYPES.contains(&request.dtype)
        && matches!(spec.scale, ScaleRule::Block(block) if block as usize <= CODED_TILE)
        && spec.seed == 0;
    let elements = match trips {
        1 => request.count,
        _ => request.count.div_ceil(limits.nranks),
    };
    let room = match protocol {
        Protocol::Ll128 => gpu.lines_bytes,
        _ => gpu.oneshot_bytes,
    };
    is_known && EncodedTiles::new(codec, elements, protocol).room() <= room / trips
}

/// Returns the bytes of the call's largest buffer.
pub(super) fn bytes(request: &Request, nranks: usize) -> usize {
    let blocks = if request.collective.has_blocks() {
        nranks
    } else {
        1
    };
    request.count * request.dtype.size() * blocks
}

/// Divides the message among as many channels as the call may use, each with an equal number of
/// chunks. A chunk fits a slot and is large enough to be worth a message.
pub(super) fn cut(
    request: &Request,
    limits: &Limits,
    gpu: &GpuLimits,
    codec: Option<&dyn Codec>,
    variant: KernelVariant,
    parts: usize,
) -> Result<(Geometry, usize)> {
    // Partial tiles take a slower path, so only the last tile of a message may be partial.
    let granule = match request.codec.inter.is_lossy() {
        true => granule(request.dtype, codec).max(CODED_TILE),
        false => granule(request.dtype, codec),
    };
    let (size, protocol) = (request.dtype.size(), variant.kernel.protocol);
    if variant.kernel.is_fused() {
        let part = request.count.div_ceil(parts).max(1);
        let whole = part.next_multiple_of(granule);
        let geometry = Geometry::new(request.count, parts, granule, whole);
        let blocks = match codec.filter(|_| request.codec.inter.is_lossy()) {
            Some(codec) => {
                let images = EncodedTiles::new(codec, part, protocol).count;
                images.div_ceil(coded_share(variant.algorithm, limits.nranks))
            }
            None => (part * size).div_ceil(FUSED_SHARE),
        };
        let most = FUSED_BLOCKS
            .min(gpu.resident.fused)
            .min(gpu.most_channels(request))
            .min(variant.channels);
        return Ok((geometry, blocks.clamp(1, most.max(1))));
    }
    let slot_bytes = gpu.fifos[protocol as usize].0;
    let slot = match request.codec.inter.is_lossy() {
        true => slot_bytes.min(CODED_BYTES),
        false => slot_bytes,
    };
    let most = chunk_max(slot, request.dtype, request.codec.inter, codec)?;
    let most = match variant.algorithm {
        Algorithm::Hierarchical => most.min(most_inside(request, slot_bytes)),
        _ => most,
    };
    let (granule, least, most) = match request.codec.inter.is_lossy() {
        true => (granule, granule, most / granule * granule),
        // Chunks are whole 128-byte lines, so that stores are not split.
        false => {
            let granule = granule.max(LINE_BYTES / size);
            (granule, SMALLEST_CHUNK / size, most / granule * granule)
        }
    };
    if most == 0 {
        return Err(Error::invalid_argument(format!(
            "a slot of {slot_bytes} bytes cannot hold {granule} elements of {}; raise CINCH_BUFFER_BYTES",
            request.dtype
        )));
    }
    let even_load = even_load(request, protocol);
    let most = match variant.chunk / size / granule {
        0 => most,
        granules => most.min(granules * granule),
    };
    let most = match most / even_load {
        0 => most,
        loads => loads * even_load,
    };
    let channels = gpu.channels(request, protocol, limits.nranks);
    let channels = channels.min(variant.channels).max(1);
    let chunks_at_once = parts * channels;
    let rounds = request.count.div_ceil(chunks_at_once * most).max(1);
    let even = request.count.div_ceil(chunks_at_once * rounds);
    // Rounds the chunk up to a full load of all warps, which is faster even if some channels then
    // end one pass earlier.
    let even = match even > even_load {
        true => even.next_multiple_of(even_load),
        false => even,
    };
    let chunk = even.max(least).next_multiple_of(granule).min(most);
    let geometry = Geometry::new(request.count, parts, granule, chunk);
    Ok((geometry, channels.min(geometry.passes())))
}

/// Returns the number of elements with which each warp of a thread block gets one tile. Chunks are
/// multiples of it, so that no warp idles.
fn even_load(request: &Request, protocol: Protocol) -> usize {
    let tile = match (protocol, request.codec.inter.is_lossy()) {
        (Protocol::Simple, true) => CODED_TILE,
        (Protocol::Simple, false) => RAW_TILE_BYTES / request.dtype.size(),
        // Messages of ll and ll128 are too small for full tiles.
        _ => 1,
    };
    MOVER_WARPS * tile
}

/// Returns the candidate for `request` by one kernel variant, with its predicted time.
pub(super) fn candidate(
    request: &Request,
    limits: &Limits,
    gpu: &GpuLimits,
    codec: Option<&dyn Codec>,
    (variant, between, rings): (KernelVariant, Algorithm, ChannelRings),
) -> Result<Candidate> {
    let algorithm = variant.algorithm;
    let pattern = super::pattern(request, limits, (algorithm, between), rings);
    let leaving = leaving(&pattern, limits)?;
    let (geometry, channels) = cut(request, limits, gpu, codec, variant, pattern.parts())?;
    let chunk = geometry.chunk();
    let wire_bytes = Level::ALL.map(|level| message_bytes(request, codec, level, chunk));
    let mut candidate = Candidate {
        algorithm,
        between,
        rings,
        geometry,
        channels,
        counts: CostCounts::default(),
        hops: pattern.hops(),
        seconds: 0.0,
        kernel: variant.kernel,
    };
    for rank in busiest(request, limits) {
        let schedule = pattern.schedule(rank)?;
        let counts = schedule::cost_counts(&schedule, &limits.hosts);
        let between = wire_bytes[Level::Inter as usize];
        let network = network_seconds(limits, &candidate, &counts, leaving, between);
        let seconds = seconds(
            (gpu, limits.nranks),
            request,
            &candidate,
            (&counts, ClassBytes::new(&schedule, gpu, wire_bytes)),
            between,
            network,
        );
        if seconds >= candidate.seconds {
            (candidate.seconds, candidate.counts) = (seconds, counts);
        }
    }
    if let Some(links) = LinkWork::new(limits, &pattern)? {
        let bytes = |level, elements| message_bytes(request, codec, level, elements);
        let seconds = links.seconds(&candidate.geometry, bytes);
        candidate.seconds = candidate.seconds.max(seconds);
    }
    Ok(candidate)
}

/// Returns the candidate for a kernel variant of a tuning table, whose rings all have one order.
fn in_one_order(
    request: &Request,
    limits: &Limits,
    gpu: &GpuLimits,
    codec: Option<&dyn Codec>,
    variant: KernelVariant,
) -> Result<Candidate> {
    let rings = gpu.rings(request, limits, variant);
    candidate(
        request,
        limits,
        gpu,
        codec,
        (variant, Algorithm::Direct, rings),
    )
}

/// Returns the candidate for a kernel variant that the tuning selected; `None` if the variant
/// cannot run the request on this communicator.
pub(super) fn tuned(
    request: &Request,
    limits: &Limits,
    codec: Option<&dyn Codec>,
    variant: KernelVariant,
) -> Result<Option<Candidate>> {
    let Some(gpu) = &limits.gpu else {
        return Ok(None);
    };
    let known = algorithms(request, limits, codec).contains(&variant.algorithm);
    if !known
        || !possible(
            request,
            limits,
            gpu,
            codec,
            (variant.algorithm, variant.kernel),
        )
    {
        return Ok(None);
    }
    in_one_order(request, limits, gpu, codec, variant).map(Some)
}

/// `cinch tune` measures a variant if its predicted time is at most this many times the smallest
/// prediction.
const TRIED: f64 = 3.0;
/// Largest messages, in bytes, for which `cinch tune` measures schedule kernels with ll and with
/// ll128.
const TRIED_LL: usize = 256 << 10;
const TRIED_LL128: usize = 8 << 20;
/// Smallest message, in bytes, for which `cinch tune` also measures chunks smaller than a slot.
const TRIED_CHUNKS: usize = 4 << 20;

/// Returns the kernel variants that are worth a measurement. No two of them lead to equal plans.
pub(super) fn variants(
    request: &Request,
    limits: &Limits,
    codec: Option<&dyn Codec>,
) -> Result<Vec<KernelVariant>> {
    let Some(gpu) = &limits.gpu else {
        return Ok(Vec::new());
    };
    let bytes = bytes(request, limits.nranks);
    let mut found: Vec<(KernelVariant, Candidate)> = Vec::new();
    for algorithm in algorithms(request, limits, codec) {
        for kernel in KernelProtocol::ALL {
            let most = match kernel {
                KernelProtocol::LL => TRIED_LL,
                KernelProtocol::LL128 => TRIED_LL128,
                _ => usize::MAX,
            };
            if bytes > most || !possible(request, limits, gpu, codec, (algorithm, kernel)) {
                continue;
            }
            let chunks: &[usize] = match kernel {
                KernelProtocol::SIMPLE if bytes >= TRIED_CHUNKS => &[0, 128 << 10, 32 << 10],
                _ => &[0],
            };
            let halves = (0..8).map(|half| gpu.channels >> half);
            for channels in halves.filter(|&channels| channels >= 4.min(gpu.channels)) {
                for &chunk in chunks {
                    let variant = KernelVariant {
                        algorithm,
                        kernel,
                        channels,
                        chunk,
                    };
                    found.push((variant, in_one_order(request, limits, gpu, codec, variant)?));
                }
            }
        }
    }
    let times = found.iter().map(|(_, candidate)| candidate.seconds);
    let least = times.fold(f64::INFINITY, f64::min);
    let mut variants: Vec<(KernelVariant, Candidate)> = Vec::new();
    for (variant, candidate) in found {
        let same = |(other, known): &(KernelVariant, Candidate)| {
            (other.algorithm, other.kernel) == (variant.algorithm, variant.kernel)
                && (known.channels, known.geometry) == (candidate.channels, candidate.geometry)
        };
        match variants.iter().position(same) {
            // The variant with the fewest blocks is kept where plans are equal.
            Some(at) if variants[at].0.chunk == variant.chunk => variants[at].0 = variant,
            Some(_) => {}
            None if candidate.seconds <= TRIED * least => variants.push((variant, candidate)),
            None => {}
        }
    }
    Ok(variants.into_iter().map(|(variant, _)| variant).collect())
}
