//! Candidates for kernels: protocol, channels and cut of a call whose buffers are on GPUs.
//!
//! Everything here follows from the request and from what all ranks know, so that all ranks
//! launch alike.

use super::encoded_tiles::TILE as CODED_TILE;
use super::gpu_costs::{network_seconds, seconds};
use super::select::{Candidate, Limits};
use super::tuning::KernelVariant;
use super::{EncodedTiles, Geometry, Request, chunk_max, granule};
use crate::codec::{Codec, FUSED_CODECS};
use crate::error::Result;
use crate::mem::{PeerBufferLayout, abi, abi::LINE_BYTES};
use crate::schedule::{self, CostCounts};
use crate::types::{Algorithm, Collective, DType, Kernel, KernelProtocol, Protocol, ScaleRule};

/// Channels of calls without a codec: what small messages can use. Large ones take all there are.
const RAW_CHANNELS: usize = 64;
/// From this many bytes on a message is large.
const LARGE_BYTES: usize = 8 << 20;
/// What the fused kernels do, in which everybody sends something to everybody, and the schedule that does
/// the same. Through codecs all but the last, in lines.
const FUSED: [(Collective, Algorithm); 5] = [
    (Collective::AllReduce, Algorithm::OneShot),
    (Collective::AllReduce, Algorithm::Direct),
    (Collective::AllGather, Algorithm::Direct),
    (Collective::ReduceScatter, Algorithm::Direct),
    (Collective::AllToAll, Algorithm::Direct),
];
/// What they do besides in lines, of which those who have nothing for each other send an empty one.
const FUSED128: [(Collective, Algorithm); 2] = [
    (Collective::Broadcast, Algorithm::OneShot),
    (Collective::Reduce, Algorithm::OneShot),
];
/// The types that fused kernels add up in lines: those of gradients. Whatever is only moved goes in lines,
/// too.
pub const FUSED128_DTYPES: [DType; 3] = [DType::F16, DType::F32, DType::BF16];
/// Blocks of a fused kernel.
const FUSED_BLOCKS: usize = 64;
/// Bytes of what a peer gets that each of them has at least: a multiprocessor stores some 44 GB/s into
/// peers' memory, and to each of seven peers go twice these bytes in packets.
pub(super) const FUSED_SHARE: usize = 512;
/// EncodedTiles of a block of one that goes through a codec, at most: 64 KiB of fp32 between two ranks of an H100 take
/// 4.8 us with four and 4.6 with one, on a quarter of the multiprocessors.
const CODED_SHARE: usize = 4;
/// Bytes of a message between two ranks for which it should have one more channel.
const MESSAGE_SHARE: usize = 256 << 10;
/// Strands of a ring in a direction, at most. 8 ranks on 2 H200, every hop over NVLink, 64 blocks a GPU,
/// slots of 33 KiB: an all-reduce carries 255 GB/s a GPU on one strand, 238 on two (one in each
/// direction), 348 on four; with slots of 66 KiB 322, 291, 357, and 346 on six.
const RING_ABREAST: usize = 2;
/// Steps of a pass that a kernel keeps in shared memory: more are read from afar in each pass.
pub const KEPT_STEPS: usize = 96;
/// Bytes of elements in which fused kernels cut what goes to a rank.
const WORD_BYTES: usize = 8;
/// Bytes of elements below which a chunk is not cut further: a message costs more than it brings.
const SMALLEST_CHUNK: usize = 512;
/// Warps of a block that move data, and bytes of raw elements that each takes at a time; of encoded ones it
/// takes a tile.
const MOVER_WARPS: usize = 16;
const RAW_TILE_BYTES: usize = 2 << 10;
/// Bytes of an encoded chunk, at most, however large slots are: 64 Ki elements of 8 bits and their
/// scales. Chunks of several passes are on their way at once, and more of them overlap better: 256 MiB
/// of fp32 over 2 H200 in `linear8` take 297 us with this, 315 us with twice and 329 us with half as
/// many elements.
const CODED_BYTES: usize = 66 << 10;
/// Message bytes up to which packets of 8 and 8 bytes are considered.
const LL_BYTES: usize = 64 << 10;
/// Message bytes up to which lines of 120 and 8 bytes are.
const LL128_BYTES: usize = 1 << 20;

/// Blocks that one rank may launch so that those of all ranks on its GPU are resident at once: the
/// least of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Of an interpreter: its channels.
    pub channels: usize,
    /// Of a fused kernel.
    pub fused: usize,
}

#[cfg(test)]
impl Resident {
    /// As many blocks of either.
    pub fn both(blocks: usize) -> Resident {
        Resident {
            channels: blocks,
            fused: blocks,
        }
    }
}

/// What selection goes by on GPUs; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuLimits {
    /// Payload bytes of a slot, and channels, of simple, ll and ll128.
    pub fifos: [(usize, usize); abi::PROTOCOLS],
    /// Slots of a connection, of simple.
    pub depth: usize,
    /// Payload bytes from a rank to another in a fused kernel, of both trips together, at most.
    pub oneshot_bytes: usize,
    /// The same of one that sends lines.
    pub lines_bytes: usize,
    /// What may be launched at once.
    pub resident: Resident,
    /// `CINCH_GPU_CHANNELS`.
    pub channels: usize,
    /// Whether lines arrive whole between all pairs.
    pub ll128: bool,
    /// `CINCH_PROTO`, where it is not auto.
    pub protocol: Option<Protocol>,
    /// `CINCH_KERNEL`, where it is not auto.
    pub kernel: Option<Kernel>,
}

impl GpuLimits {
    /// The limits of boxes of this shape.
    pub fn new(shape: &PeerBufferLayout, resident: Resident, channels: usize) -> GpuLimits {
        let fifo = |protocol| {
            let fifo = shape.fifo(protocol);
            (fifo.slot_bytes as usize, fifo.channels as usize)
        };
        GpuLimits {
            fifos: Protocol::ALL.map(fifo),
            depth: shape.fifo(Protocol::Simple).depth as usize,
            oneshot_bytes: shape.oneshot_bytes(),
            lines_bytes: shape.lines_bytes(),
            resident,
            channels,
            ll128: false,
            protocol: None,
            kernel: None,
        }
    }

    /// Whether the settings ask for a kernel or a protocol, and `kernel` has both.
    pub(super) fn asks_for(&self, kernel: KernelProtocol) -> bool {
        self.is_forced()
            && self.protocol.is_none_or(|asked| asked == kernel.protocol)
            && self.kernel.is_none_or(|asked| asked == kernel.kernel)
    }

    /// Returns these limits with settings that ask for `kernel`.
    pub fn forced(self, kernel: KernelProtocol) -> GpuLimits {
        GpuLimits {
            protocol: Some(kernel.protocol),
            kernel: Some(kernel.kernel),
            ..self
        }
    }

    /// Whether the settings ask for a kernel or a protocol.
    pub(super) fn is_forced(&self) -> bool {
        self.protocol.is_some() || self.kernel.is_some()
    }

    /// Most channels of a call. Both ends of a message must arrive at one number.
    fn channels(&self, request: &Request, protocol: Protocol, nranks: usize) -> usize {
        // Encoding takes instructions, and so multiprocessors, whatever the size.
        let all = request.codec.is_lossy() || bytes(request, nranks) >= LARGE_BYTES;
        let cap = if all { usize::MAX } else { RAW_CHANNELS };
        let resident = match request.collective {
            Collective::SendRecv => self.message_channels(bytes(request, nranks), nranks),
            _ => self.resident.channels,
        };
        let channels = self.fifos[protocol as usize].1;
        cap.min(self.channels).min(channels).min(resident).max(1)
    }

    /// Strands of a ring, 1 of other algorithms: as many as bring anything in both directions, where they
    /// lead to different ranks, if that leaves a slot to the next message, and if a kernel has room for
    /// their steps. A second direction alone costs more than it brings.
    ///
    /// A coded ring has one strand, as on the host, that both give the same bits; so has one between
    /// hosts, whose proxies have slots of their own.
    fn strands(&self, request: &Request, limits: &Limits, way: KernelVariant) -> usize {
        let is_simple_ring = (way.algorithm, way.kernel)
            == (Algorithm::Ring, KernelProtocol::SIMPLE)
            && schedule::has_strands(request.collective);
        let is_open = !request.codec.is_lossy() && !request.crosses(&limits.hosts);
        if !is_simple_ring || !is_open || self.depth <= RING_ABREAST {
            return 1;
        }
        let most = KEPT_STEPS / schedule::strand_steps(limits.nranks);
        (schedule::directions(limits.nranks) * RING_ABREAST).min(most.max(1))
    }

    /// Channels that a message of `bytes` between two ranks may have: as many as there is room for if
    /// all peers have them, each way, and more the larger it is, so that it has the blocks to fill a
    /// link: 512 MiB to the next of 8 H200 took 9.5 ms over 4 of them.
    fn message_channels(&self, bytes: usize, nranks: usize) -> usize {
        let each_way = (self.resident.channels / 2).max(1);
        let everybody = nranks.saturating_sub(1).clamp(1, each_way);
        bytes
            .div_ceil(MESSAGE_SHARE)
            .clamp(each_way / everybody, each_way)
    }

    /// With how many peers a rank may exchange messages of `bytes` in one launch: those whose channels
    /// there is room for. Sender and receiver come to the same.
    pub fn peers_at_once(&self, nranks: usize, bytes: usize) -> usize {
        let each_way = (self.resident.channels / 2).max(1);
        let everybody = nranks.saturating_sub(1).max(1);
        let room = (each_way / self.message_channels(bytes, nranks)).min(everybody);
        // Messages of a group share launches where they come to the same: a few numbers, then.
        match room == everybody {
            true => room,
            false => 1 << room.ilog2(),
        }
    }
}

/// Returns the kernels and protocols that may run `request` by `algorithm`: those that the settings ask
/// for, if any of them can, else all that can and are worth a prediction.
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
    if found.iter().any(|&kernel| gpu.asks_for(kernel)) {
        found.retain(|&kernel| gpu.asks_for(kernel));
        return found;
    }
    found.retain(|&kernel| match kernel {
        KernelProtocol::LL => bytes <= LL_BYTES,
        KernelProtocol::LL128 => bytes <= LL128_BYTES,
        _ => true,
    });
    found
}

/// Whether messages of `request` can be carried so.
fn possible(
    request: &Request,
    limits: &Limits,
    gpu: &GpuLimits,
    codec: Option<&dyn Codec>,
    (algorithm, kernel): (Algorithm, KernelProtocol),
) -> bool {
    // A single rank has no messages; what goes between hosts has to be seen by a proxy, as counters are and
    // flags among the data are not.
    if limits.nranks == 1 || request.crosses(&limits.hosts) {
        return kernel == KernelProtocol::SIMPLE;
    }
    if let Some(codec) = codec.filter(|_| request.codec.is_lossy()) {
        // A codec's chunks travel in slots, or as the images of a fused kernel.
        return match kernel {
            KernelProtocol::SIMPLE => true,
            KernelProtocol::FUSED_LL128 => {
                gpu.ll128 && fits_coded(request, limits, gpu, codec, algorithm)
            }
            _ => false,
        };
    }
    match (kernel.kernel, kernel.protocol) {
        (Kernel::Schedule, Protocol::Simple | Protocol::Ll) => true,
        (Kernel::Schedule, Protocol::Ll128) => gpu.ll128,
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

/// Whether what a rank sends to another in a fused kernel is at most `most` bytes in all.
fn fits_fused(request: &Request, limits: &Limits, algorithm: Algorithm, most: usize) -> bool {
    // Two trips share the area.
    let trips = trips(request.collective, algorithm);
    let parts = if trips == 1 { 1 } else { limits.nranks };
    let words = (request.count * request.dtype.size()).div_ceil(WORD_BYTES);
    words.div_ceil(parts) * WORD_BYTES <= most / trips
}

/// Trips of a fused kernel: one, or to the owner of a part and back to all.
fn trips(collective: Collective, algorithm: Algorithm) -> usize {
    match (collective, algorithm) {
        (Collective::AllReduce, Algorithm::Direct) => 2,
        _ => 1,
    }
}

/// Whether there is a fused kernel that does `request` through its codec, and room for it: one that knows
/// of nothing that is drawn, and of blocks within a tile only. Of residuals it knows: whether a rank keeps
/// some, the others cannot tell.
fn fits_coded(
    request: &Request,
    limits: &Limits,
    gpu: &GpuLimits,
    codec: &dyn Codec,
    algorithm: Algorithm,
) -> bool {
    let (spec, trips) = (request.codec, trips(request.collective, algorithm));
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
    is_known && EncodedTiles::new(codec, elements).room() <= gpu.lines_bytes / trips
}

/// Bytes of the largest buffer.
pub(super) fn bytes(request: &Request, nranks: usize) -> usize {
    let blocks = match request.collective {
        Collective::AllReduce | Collective::Broadcast | Collective::Reduce => 1,
        Collective::SendRecv => 1,
        _ => nranks,
    };
    request.count * request.dtype.size() * blocks
}

/// Channels and cut: as many channels as there may be, each with the same number of chunks, none
/// larger than a slot, and none smaller than is worth a message.
pub(super) fn cut(
    request: &Request,
    limits: &Limits,
    gpu: &GpuLimits,
    codec: Option<&dyn Codec>,
    way: KernelVariant,
    parts: usize,
) -> Result<(Geometry, usize)> {
    // A tile that is not whole goes by a slower way: only the message's last one may be such.
    let granule = match request.codec.is_lossy() {
        true => granule(request.dtype, codec).max(CODED_TILE),
        false => granule(request.dtype, codec),
    };
    let (size, protocol) = (request.dtype.size(), way.kernel.protocol);
    if way.kernel.is_fused() {
        let part = request.count.div_ceil(parts).max(1);
        let whole = part.next_multiple_of(granule);
        let geometry = Geometry::new(request.count, parts, granule, whole);
        let blocks = match codec.filter(|_| request.codec.is_lossy()) {
            Some(codec) => {
                let images = EncodedTiles::new(codec, part).count;
                images.div_ceil(coded_share(way.algorithm, limits.nranks))
            }
            None => (part * size).div_ceil(FUSED_SHARE),
        };
        let most = FUSED_BLOCKS
            .min(gpu.resident.fused)
            .min(gpu.channels)
            .min(way.channels);
        return Ok((geometry, blocks.clamp(1, most.max(1))));
    }
    let slot = match (gpu.fifos[protocol as usize].0, request.codec.is_lossy()) {
        (slot, true) => slot.min(CODED_BYTES),
        (slot, false) => slot,
    };
    let most = chunk_max(slot, request.dtype, request.codec, codec)?;
    let (granule, least, most) = match request.codec.is_lossy() {
        true => (granule, granule, most / granule * granule),
        // Whole lines: 2 MB of an all_to_all over 4 H200 took 15.3 us in chunks of 8,128 bytes, and 12.9
        // in chunks of 8,192.
        false => {
            let granule = granule.max(LINE_BYTES / size);
            (granule, SMALLEST_CHUNK / size, most / granule * granule)
        }
    };
    let even_load = even_load(request, protocol);
    let most = match way.chunk / size / granule {
        0 => most,
        granules => most.min(granules * granule),
    };
    let most = match most / even_load {
        0 => most,
        loads => loads * even_load,
    };
    let channels = gpu.channels(request, protocol, limits.nranks);
    let channels = channels.min(way.channels).max(1);
    let chunks_at_once = parts * channels;
    let rounds = request.count.div_ceil(chunks_at_once * most).max(1);
    let even = request.count.div_ceil(chunks_at_once * rounds);
    // A large chunk is worth some channels that end early.
    let even = match even > even_load {
        true => even.next_multiple_of(even_load),
        false => even,
    };
    let chunk = even.max(least).next_multiple_of(granule).min(most);
    let geometry = Geometry::new(request.count, parts, granule, chunk);
    Ok((geometry, channels.min(geometry.passes())))
}

/// EncodedTiles of a block of a fused kernel that goes through a codec: few, and where each of them is a message of
/// its own for, or from, every peer, no more messages than warps.
pub(super) fn coded_share(algorithm: Algorithm, nranks: usize) -> usize {
    match algorithm {
        Algorithm::OneShot => CODED_SHARE,
        _ => (MOVER_WARPS / (nranks - 1).max(1)).clamp(1, CODED_SHARE),
    }
}

/// Elements of a chunk in multiples of which the warps of a block have as many tiles each: with 12
/// tiles for 16 warps 64 MiB raw over 4 H200 take 5 % longer than with 16.
fn even_load(request: &Request, protocol: Protocol) -> usize {
    let tile = match (protocol, request.codec.is_lossy()) {
        (Protocol::Simple, true) => CODED_TILE,
        (Protocol::Simple, false) => RAW_TILE_BYTES / request.dtype.size(),
        // Messages of the others are small.
        _ => 1,
    };
    MOVER_WARPS * tile
}

/// One way to serve `request` with kernels.
pub(super) fn candidate(
    request: &Request,
    limits: &Limits,
    gpu: &GpuLimits,
    codec: Option<&dyn Codec>,
    (way, between): (KernelVariant, Algorithm),
) -> Result<Candidate> {
    let algorithm = way.algorithm;
    let strands = gpu.strands(request, limits, way);
    let pattern = super::pattern(request, limits, (algorithm, between), strands);
    let leaving = super::select::leaving(&pattern, limits)?;
    let (geometry, channels) = cut(request, limits, gpu, codec, way, pattern.parts())?;
    let chunk = geometry.chunk();
    let wire_bytes = codec.map_or(chunk * request.dtype.size(), |codec| {
        codec.wire_bytes(chunk)
    });
    let mut candidate = Candidate {
        algorithm,
        between,
        strands,
        geometry,
        channels,
        counts: CostCounts::default(),
        hops: pattern.hops(),
        seconds: 0.0,
        kernel: way.kernel,
    };
    for rank in super::select::busiest(request, limits) {
        let counts = schedule::cost_counts(&pattern.schedule(rank)?, &limits.hosts);
        let network = network_seconds(limits, &candidate, &counts, leaving, wire_bytes);
        let seconds = seconds(
            (gpu, limits.nranks),
            request,
            &candidate,
            &counts,
            wire_bytes,
            network,
        );
        if seconds >= candidate.seconds {
            (candidate.seconds, candidate.counts) = (seconds, counts);
        }
    }
    Ok(candidate)
}

/// The way that a table says, if it can be taken here.
pub(super) fn tuned(
    request: &Request,
    limits: &Limits,
    codec: Option<&dyn Codec>,
    way: KernelVariant,
) -> Result<Option<Candidate>> {
    let Some(gpu) = &limits.gpu else {
        return Ok(None);
    };
    let known = super::select::algorithms(request, limits, codec).contains(&way.algorithm);
    if !known || !possible(request, limits, gpu, codec, (way.algorithm, way.kernel)) {
        return Ok(None);
    }
    candidate(request, limits, gpu, codec, (way, Algorithm::Direct)).map(Some)
}

/// How many times slower than the cheapest the model may expect a way to be that is tried all the
/// same: so far it is not trusted.
const TRIED: f64 = 3.0;
/// Message bytes up to which packets and lines are tried.
const TRIED_LL: usize = 256 << 10;
const TRIED_LL128: usize = 8 << 20;
/// From this many bytes on smaller chunks than fit a slot are tried.
const TRIED_CHUNKS: usize = 4 << 20;

/// The ways that are worth a measurement, each with another plan.
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
    for algorithm in super::select::algorithms(request, limits, codec) {
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
                    let way = KernelVariant {
                        algorithm,
                        kernel,
                        channels,
                        chunk,
                    };
                    found.push((
                        way,
                        candidate(request, limits, gpu, codec, (way, Algorithm::Direct))?,
                    ));
                }
            }
        }
    }
    let times = found.iter().map(|(_, candidate)| candidate.seconds);
    let least = times.fold(f64::INFINITY, f64::min);
    let mut ways: Vec<(KernelVariant, Candidate)> = Vec::new();
    for (way, candidate) in found {
        let same = |(other, known): &(KernelVariant, Candidate)| {
            (other.algorithm, other.kernel) == (way.algorithm, way.kernel)
                && (known.channels, known.geometry) == (candidate.channels, candidate.geometry)
        };
        match ways.iter().position(same) {
            // The least number of blocks that comes to the same.
            Some(at) if ways[at].0.chunk == way.chunk => ways[at].0 = way,
            Some(_) => {}
            None if candidate.seconds <= TRIED * least => ways.push((way, candidate)),
            None => {}
        }
    }
    Ok(ways.into_iter().map(|(way, _)| way).collect())
}
