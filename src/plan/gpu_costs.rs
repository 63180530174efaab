//! What kernels take, for the choice between ways to serve a call.

use super::Request;
use super::encoded_tiles::TILE;
use super::gpu::{FUSED_SHARE, GpuLimits, coded_share};
use super::select::{Candidate, Limits};
use crate::schedule::CostCounts;
use crate::types::{Algorithm, CodecKind, Kernel, Protocol};

/// Costs on the H200 with NVLink; to be refitted where rows of `benches/baselines` say so.
mod costs {
    /// From the launch to the first message, for the interpreter and for a fused kernel. Why all but one
    /// schedule are interpreted: `benches/baselines/gpu-h200x8-interpreter-vs-fused.jsonl`.
    pub const LAUNCH: [f64; 2] = [4e-6, 2e-6];
    /// The same of an interpreter with a codec: sums of 8 KiB over 2 H200 take 10.0 us in `linear8`, of 32 KiB
    /// over 4 and 8 of them 11.8 and 13.8.
    pub const LAUNCH_CODED: f64 = 8e-6;
    /// From a published message to the peer's next action; along a ring the peer already waits.
    pub const HOP: f64 = 2.5e-6;
    pub const HOP_RING: f64 = 1.35e-6;
    pub const HOP_LL: f64 = 1e-6;
    pub const HOP_LL128: f64 = 1.3e-6;
    /// Of a fused kernel: 3.2 to 3.4 us in one trip over 4 and 8 H200, and 5.4 us and the wire's in two.
    pub const HOP_FUSED: f64 = 1.5e-6;
    /// The same in lines, with several peers and with one: 8 B over 2 H200 take 2.25 us, and 2.75 in packets;
    /// with 8 ranks on them 3.8 and 3.4 us.
    pub const HOP_FUSED128: [f64; 2] = [1.8e-6, 1e-6];
    /// What a codec adds to a hop of a fused kernel: 4 KiB of fp32 between two ranks on one H100 take 4.4 us in
    /// `linear8` and 4.1 in `minmax4`, and 2.4 raw.
    pub const HOP_FUSED_CODED: f64 = 1.2e-6;
    /// Seconds of a block of a fused kernel for each element that it encodes or decodes, beside which its
    /// lines travel: a one-shot of 4 MiB of fp32 between two ranks over 33 blocks of an H100 took 13.6 us longer than
    /// one of 4 KiB.
    pub const FUSED_CODED_ELEMENT: f64 = 160e-12;
    /// What each peer beyond a few adds to a hop of an interpreter. Without it, an all-reduce over 8 H200
    /// was expected to take 5.2 us of 32 bytes by one-shot in `ll`, and 9.9 us of 512 KiB by direct in
    /// `ll128`: it took 7.7 and 15.5 us.
    pub const HOP_PEER: f64 = 0.65e-6;
    pub const FEW_PEERS: usize = 3;
    /// Bytes a second that a rank sends to all others, through a switch and without one, and to
    /// its neighbour, on one strand of a ring and on several.
    pub const WIRE: [f64; 2] = [330e9, 165e9];
    pub const WIRE_RING: [f64; 2] = [300e9, 345e9];
    /// Bytes a second that one channel sends.
    pub const WIRE_CHANNEL: f64 = 12e9;
    /// The same of a block of a fused kernel: 2 KiB by one block over 8 H200, 28 KiB of packets, took 0.7 us
    /// longer than 8 bytes.
    pub const WIRE_FUSED: f64 = 40e9;
    /// Seconds for each byte of elements that is loaded or stored.
    pub const ELEMENT_BYTE: f64 = 0.1e-12;
    /// What a proxy adds to a hop between hosts: two looks, and two copies of a small message.
    pub const HOP_PROXY: f64 = 8e-6;
    /// Seconds for each byte that a proxy copies, to or from the slots of a transport.
    pub const PROXY_BYTE: f64 = 0.1e-9;
}

/// Seconds per element of encode and decode of all channels together.
fn codec_seconds(kind: CodecKind) -> (f64, f64) {
    match kind {
        CodecKind::Raw => (0.0, 0.0),
        CodecKind::CastBf16 | CodecKind::Cast16 => (0.3e-12, 0.2e-12),
        CodecKind::Linear8 => (0.6e-12, 0.3e-12),
        CodecKind::Static8 | CodecKind::Mantissa8 => (0.7e-12, 0.4e-12),
        // Dynamic8; the engine refuses those that no kernel has.
        _ => (0.9e-12, 0.4e-12),
    }
}

/// Predicted seconds of a candidate, in which the busiest rank does `counts` in a pass.
pub(super) fn seconds(
    (gpu, nranks): (&GpuLimits, usize),
    request: &Request,
    candidate: &Candidate,
    counts: &CostCounts,
    wire_bytes: usize,
    network: f64,
) -> f64 {
    use costs::*;
    let ring = candidate.algorithm == Algorithm::Ring;
    let is_fused = candidate.kernel.is_fused();
    let is_coded = request.codec.is_lossy();
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
    // Of five lines some four are full.
    let share = if is_fused && is_coded { 0.8 } else { share };
    let hop = match (is_fused, is_coded) {
        (true, true) => hop + HOP_FUSED_CODED,
        (true, false) => hop,
        (false, _) => hop + HOP_PEER * (counts.connections / 2).saturating_sub(FEW_PEERS) as f64,
    };
    let fastest = match (ring, gpu.ll128) {
        (true, _) => WIRE_RING[usize::from(candidate.strands > 1)],
        (false, true) => WIRE[0],
        (false, false) => WIRE[1],
    };
    let images = coded_share(candidate.algorithm, nranks);
    let blocks = match is_fused {
        // The last block brings what it has elements for.
        true => {
            let share = FUSED_SHARE * if is_coded { images } else { 1 };
            let shares = wire_bytes as f64 / share as f64;
            shares.clamp(1.0, candidate.channels as f64) * WIRE_FUSED
        }
        false => candidate.channels as f64 * WIRE_CHANNEL,
    };
    let wire = share * fastest.min(blocks);
    // A link carries as much both ways; of a root more comes in than leaves.
    let messages = counts.sends.max(counts.recvs);
    let passes = candidate.geometry.passes() as f64;
    let chunk = candidate.geometry.chunk() as f64;
    let (encode, decode) = codec_seconds(request.codec.kind);
    let touched = (counts.encodes + counts.decodes + counts.reduces) as f64;
    let waits = launch + candidate.hops.total() as f64 * hop;
    let travels = passes * messages as f64 * wire_bytes as f64 / wire;
    if is_fused && is_coded {
        // The first few images of a block have warps of their own.
        let many = chunk / candidate.channels as f64 - (images * TILE) as f64;
        // What a one-shot sent it still has when it adds it.
        let again = usize::from(candidate.algorithm == Algorithm::OneShot);
        let coded = (counts.encodes + counts.decodes).saturating_sub(again) as f64;
        let coded = many.max(0.0) * coded * FUSED_CODED_ELEMENT;
        return waits + travels.max(coded) + network;
    }
    waits
        + travels
        + passes * chunk * touched * request.dtype.size() as f64 * ELEMENT_BYTE
        + passes * chunk * (counts.encodes as f64 * encode + counts.decodes as f64 * decode)
        + network
}

/// Predicted seconds of what proxies and the network do for a candidate whose busiest rank does
/// `counts` in a pass, and whose host sends `leaving` messages to others: nothing on one host.
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
    // One thread carries all that a rank sends to other hosts and receives from them.
    let proxy = messages * (link.message + (link.byte + costs::PROXY_BYTE) * bytes);
    candidate.hops.between as f64 * (link.hop + costs::HOP_PROXY)
        + candidate.geometry.passes() as f64 * proxy.max(leaving as f64 * bytes * link.host_byte)
}
