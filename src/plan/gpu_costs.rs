//! Predicted times of GPU kernels, from which the planner selects.

use super::Request;
use super::candidate::Candidate;
use super::encoded_tiles::TILE;
use super::fused_blocks::{FUSED_SHARE, coded_share};
use super::limits::{GpuLimits, Limits};
use crate::codec::info;
use crate::gpu_links::LinkClass;
use crate::schedule::{CostCounts, Op, Schedule, StepPeers};
use crate::types::{Algorithm, CodecKind, Kernel, KernelIntra, Level, Protocol};

/// Bytes of the busiest rank's messages in one pass: the larger of those sent and received.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClassBytes {
    /// Over all links.
    pub all: usize,
    /// Over PCIe.
    pub pcie: usize,
    /// Through pinned host memory.
    pub pinned: usize,
}

impl ClassBytes {
    /// Counts the bytes of a rank in one pass. `wire_bytes` has the bytes of a message for each level.
    pub fn new(schedule: &Schedule, gpu: &GpuLimits, wire_bytes: [usize; 2]) -> ClassBytes {
        let mut of_class = [[0, 0]; 3];
        let mut count = |peers: &StepPeers, level: Level, direction: usize| {
            let bytes = wire_bytes[level as usize];
            for &peer in peers.iter() {
                of_class[0][direction] += bytes;
                match gpu.pairs.class(schedule.rank, peer as usize) {
                    LinkClass::SameDevice | LinkClass::NvLink => {}
                    LinkClass::Pcie => of_class[1][direction] += bytes,
                    LinkClass::Host => of_class[2][direction] += bytes,
                }
            }
        };
        for (at, step) in schedule.steps.iter().enumerate() {
            count(&step.send_to, step.gives, 0);
            // All steps of a forwarding chain receive one message.
            let is_again = step.op == Op::RecvCopySend && at > 0 && schedule.steps[at - 1].more;
            if !is_again {
                count(&step.recv_from, step.takes, 1);
            }
        }
        // A link carries both directions at once, so the larger of both matters. A root receives more than it sends.
        let [all, pcie, pinned] = of_class.map(|[sent, received]: [usize; 2]| sent.max(received));
        ClassBytes { all, pcie, pinned }
    }
}

/// Costs on H200 GPUs, with NVLink where no other link is named. "Why the planner's constants are what they are" in
/// benches/FIGURES.md has the measurements behind them; refit them when these rows change.
mod costs {
    /// Seconds from the launch to the first message, for a schedule kernel and for a fused kernel.
    pub const LAUNCH: [f64; 2] = [4e-6, 2e-6];
    /// Seconds from the launch to the first message of a schedule kernel with a codec.
    pub const LAUNCH_CODED: f64 = 8e-6;
    /// Seconds from a published message to the peer's next action in a schedule kernel: with
    /// simple, in a ring with simple, with ll, with ll128. In a ring the peer already waits for the
    /// message.
    pub const HOP: f64 = 2.5e-6;
    pub const HOP_RING: f64 = 1.35e-6;
    pub const HOP_LL: f64 = 1e-6;
    pub const HOP_LL128: f64 = 1.3e-6;
    /// Seconds of a hop of a fused kernel with ll.
    pub const HOP_FUSED: f64 = 1.5e-6;
    /// Seconds of a hop of a fused kernel with ll128: first with several peers, then with a single
    /// peer.
    pub const HOP_FUSED128: [f64; 2] = [1.8e-6, 1e-6];
    /// Seconds that a codec adds to a hop of a fused kernel.
    pub const HOP_FUSED_CODED: f64 = 1.2e-6;
    /// Seconds that a thread block of a fused kernel takes to encode or decode an element. Messages
    /// travel meanwhile, so only the longer of both times counts.
    pub const FUSED_CODED_ELEMENT: f64 = 160e-12;
    /// Seconds that each peer beyond [`FEW_PEERS`] adds to a hop of a schedule kernel.
    pub const HOP_PEER: f64 = 0.65e-6;
    pub const FEW_PEERS: usize = 3;
    /// Bytes per second that a rank sends. `WIRE` is to all other ranks, with an NVLink switch and
    /// without. `WIRE_RING` is to its neighbour, with one ring per channel and with several.
    pub const WIRE: [f64; 2] = [330e9, 165e9];
    pub const WIRE_RING: [f64; 2] = [300e9, 345e9];
    /// Bytes per second that a rank sends over PCIe to the memory of other GPUs.
    pub const WIRE_PCIE: f64 = 24e9;
    /// Bytes per second that the ranks of a GPU together send through pinned host memory: each to one rank at a time,
    /// as in a ring, and each to all others.
    pub const WIRE_PINNED: [f64; 2] = [38e9, 32e9];
    /// Seconds that PCIe adds to a hop.
    pub const HOP_PCIE: f64 = 1e-6;
    /// Seconds that pinned host memory adds to a hop: with ll or ll128, and with simple, where stores to a peer must
    /// have arrived before its counter changes.
    pub const HOP_PINNED: f64 = 0.6e-6;
    pub const HOP_PINNED_SIMPLE: f64 = 8.5e-6;
    /// Seconds by which pinned host memory delays at least a call with simple, and those for each peer: the counters
    /// of peers change one after the other.
    pub const FIRST_PINNED: f64 = 6e-6;
    pub const PEER_PINNED: f64 = 6e-6;
    /// Seconds that pinned host memory adds to the launch of a schedule kernel with ll, beside a fused kernel.
    pub const LAUNCH_PINNED: f64 = 2e-6;
    /// Bytes per second that one channel sends.
    pub const WIRE_CHANNEL: f64 = 12e9;
    /// Bytes per second that one thread block of a fused kernel sends.
    pub const WIRE_FUSED: f64 = 40e9;
    /// Seconds for each byte of elements that is loaded or stored.
    pub const ELEMENT_BYTE: f64 = 0.1e-12;
    /// Seconds that a proxy adds to a hop between hosts: two polls, and two copies of a small
    /// message.
    pub const HOP_PROXY: f64 = 8e-6;
    /// Seconds for each byte that a proxy copies to or from the slots of a transport.
    pub const PROXY_BYTE: f64 = 0.1e-9;
}

/// Returns the seconds to encode, and to decode, one element when all channels of a GPU work
/// together.
fn codec_seconds(kind: CodecKind) -> (f64, f64) {
    // A codec without kernels costs 0 here; the engine rejects it.
    let kernels = info(kind).and_then(|info| info.kernels);
    kernels.map_or((0.0, 0.0), |kernels| {
        (kernels.encode_seconds, kernels.decode_seconds)
    })
}

/// Returns the predicted seconds of a candidate whose busiest rank has the work `counts` and sends or receives `bytes` in
/// each pass. A message for [`Level::Inter`] has `wire_bytes` bytes.
pub(super) fn seconds(
    (gpu, nranks): (&GpuLimits, usize),
    request: &Request,
    candidate: &Candidate,
    (counts, bytes): (&CostCounts, ClassBytes),
    wire_bytes: usize,
    network: f64,
) -> f64 {
    use costs::*;
    let ring = candidate.algorithm == Algorithm::Ring;
    let is_fused = candidate.kernel.is_fused();
    let is_coded = request.codec.inter.is_lossy();
    let (launch, hop, share) = match (candidate.kernel.kernel, candidate.kernel.protocol) {
        (Kernel::Schedule, Protocol::Simple) => (
            [LAUNCH[0], LAUNCH_CODED][usize::from(is_coded)],
            if ring { HOP_RING } else { HOP },
            1.0,
        ),
        (Kernel::Schedule, Protocol::Ll) => (LAUNCH[0], HOP_LL, 0.5),
        (Kernel::Schedule, Protocol::Ll128) => (LAUNCH[0], HOP_LL128, 0.9),
        (Kernel::Fused, Protocol::Simple | Protocol::Ll) => (LAUNCH[1], HOP_FUSED, 0.5),
        (Kernel::Fused, Protocol::Ll128) => {
            (LAUNCH[1], HOP_FUSED128[usize::from(nranks == 2)], 0.9)
        }
    };
    // The lines of an encoded tile are partly empty: about four of five lines are full, or eight of nine that are packets.
    let share = match (is_fused && is_coded, candidate.kernel.protocol) {
        (false, _) => share,
        (true, Protocol::Ll128) => 0.8,
        (true, _) => 0.45,
    };
    let hop = match (is_fused, is_coded) {
        (true, true) => hop + HOP_FUSED_CODED,
        (true, false) => hop,
        (false, _) => hop + HOP_PEER * (counts.connections / 2).saturating_sub(FEW_PEERS) as f64,
    };
    let fastest = match (ring, gpu.ll128) {
        (true, _) => WIRE_RING[usize::from(candidate.rings.count() > 1)],
        (false, true) => WIRE[0],
        (false, false) => WIRE[1],
    };
    let images = coded_share(candidate.algorithm, nranks);
    let blocks = match is_fused {
        // A small message does not fill all blocks, so the last block counts only by its share of
        // bytes.
        true => {
            let share = FUSED_SHARE * if is_coded { images } else { 1 };
            let shares = wire_bytes as f64 / share as f64;
            shares.clamp(1.0, candidate.channels as f64) * WIRE_FUSED
        }
        false => candidate.channels as f64 * WIRE_CHANNEL,
    };
    let wire = share * fastest.min(blocks);
    let passes = candidate.geometry.passes() as f64;
    let chunk = candidate.geometry.chunk() as f64;
    let touched = (counts.encodes + counts.decodes + counts.reduces) as f64;
    let slower_links = slower_link_latency(candidate, counts, bytes);
    let waits = launch + candidate.hops.total() as f64 * hop + slower_links;
    // Links of different classes work at once, and algorithms use each as evenly as NVLink.
    let travels_of = |bytes: usize, wire: f64| passes * bytes as f64 / wire;
    let near = bytes.all.saturating_sub(bytes.pcie.max(bytes.pinned));
    let of_pinned = WIRE_PINNED[usize::from(sends_to_all(candidate.algorithm))];
    let [pcie, pinned] = [
        WIRE_PCIE * fastest / WIRE[0],
        of_pinned / gpu.pairs.ranks_per_gpu as f64,
    ]
    .map(|rate| wire.min(share * rate));
    let travels = travels_of(near, wire)
        .max(travels_of(bytes.pcie, pcie))
        .max(travels_of(bytes.pinned, pinned));
    if is_fused && is_coded {
        // The first encoded tiles of a block run at once, each on its own warps; only further tiles
        // add time.
        let many = chunk / candidate.channels as f64 - (images * TILE) as f64;
        // A one-shot keeps its own contribution and does not decode it again.
        let again = usize::from(candidate.algorithm == Algorithm::OneShot);
        let coded = (counts.encodes + counts.decodes).saturating_sub(again) as f64;
        let coded = many.max(0.0) * coded * FUSED_CODED_ELEMENT;
        return waits + travels.max(coded) + network;
    }
    waits
        + travels
        + passes * chunk * touched * request.dtype.size() as f64 * ELEMENT_BYTE
        + passes * chunk * coding_seconds(request, counts)
        + network
}

/// Returns the seconds for each element of a chunk in the encodes and decodes of a pass. Messages inside groups take none
/// where they are raw or cast; a schedule that is not hierarchical has none.
fn coding_seconds(request: &Request, counts: &CostCounts) -> f64 {
    let of = |kind, [encodes, decodes]: [usize; 2]| {
        let (encode, decode) = codec_seconds(kind);
        encodes as f64 * encode + decodes as f64 * decode
    };
    let kind = request.codec.inter.kind;
    let [encodes, decodes] = counts.intra_coded;
    let between = [
        counts.encodes.saturating_sub(encodes),
        counts.decodes.saturating_sub(decodes),
    ];
    match KernelIntra::of(request.codec) {
        Some(KernelIntra::Coded) => of(kind, [counts.encodes, counts.decodes]),
        Some(KernelIntra::Linear8) => {
            of(kind, between) + of(request.codec.intra.kind, counts.intra_coded)
        }
        _ => of(kind, between),
    }
}

/// Returns whether ranks send to all others at once.
fn sends_to_all(algorithm: Algorithm) -> bool {
    matches!(
        algorithm,
        Algorithm::Direct | Algorithm::OneShot | Algorithm::Tree | Algorithm::FlatTree
    )
}

/// Returns the seconds by which links slower than NVLink delay a call, beside the time of its bytes.
fn slower_link_latency(candidate: &Candidate, counts: &CostCounts, bytes: ClassBytes) -> f64 {
    use costs::*;
    // Groups are such that slower links are between them.
    let hops = match candidate.algorithm {
        Algorithm::Hierarchical => candidate.hops.between,
        _ => candidate.hops.total(),
    } as f64;
    match (bytes, candidate.kernel.protocol) {
        (ClassBytes { pinned: 1.., .. }, Protocol::Simple) => {
            let peers = (counts.connections / 2).max(1) as f64;
            (FIRST_PINNED + PEER_PINNED * peers).max(hops * HOP_PINNED_SIMPLE)
        }
        (ClassBytes { pinned: 1.., .. }, _) if candidate.kernel.is_fused() => hops * HOP_PINNED,
        (ClassBytes { pinned: 1.., .. }, _) => LAUNCH_PINNED + hops * HOP_PINNED,
        (ClassBytes { pcie: 1.., .. }, _) => hops * HOP_PCIE,
        _ => 0.0,
    }
}

/// Returns the predicted seconds that proxies and the network add to a candidate. In each pass its
/// busiest rank has the work `counts`, and its host sends `leaving` messages to other hosts. Zero
/// on one host.
pub(super) fn network_seconds(
    limits: &Limits,
    candidate: &Candidate,
    counts: &CostCounts,
    leaving: usize,
    wire_bytes: usize,
) -> f64 {
    if leaving == 0 && counts.crossing == [0, 0] {
        return 0.0;
    }
    let bytes = wire_bytes as f64;
    let messages = (counts.crossing[0] + counts.crossing[1]) as f64;
    let link = super::cost::between_hosts(limits.machine);
    // A single thread sends and receives all messages of a rank from and to other hosts.
    let proxy = messages * (link.message + (link.byte + costs::PROXY_BYTE) * bytes);
    candidate.hops.between as f64 * (link.hop + costs::HOP_PROXY)
        + candidate.geometry.passes() as f64 * proxy.max(leaving as f64 * bytes * link.host_byte)
}
