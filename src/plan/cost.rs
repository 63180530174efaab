//! Predicted time of a candidate: a pure function of the call and the communicator.

use super::measured::{Link, MeasuredCosts};
use crate::codec::info;
use crate::schedule::{CostCounts, Hops};
use crate::types::{CodecKind, TransportKind};

/// What the model knows about the machine, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// The slowest transport between any two ranks.
    pub transport: TransportKind,
    /// The slowest transport between two ranks of one host.
    pub inside: TransportKind,
    /// Whether some host has more ranks than cores for them.
    pub oversubscribed: bool,
    /// What the communicator measured, if it did; constants otherwise.
    pub measured: Option<MeasuredCosts>,
}

/// Costs of one link and one core, in seconds and seconds per byte.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Constants {
    /// From a published message to the peer's next action.
    hop: f64,
    /// Work per message on either side.
    message: f64,
    /// Moving a byte of wire data, per side.
    wire_byte: f64,
    /// Loading, adding or storing a byte of elements in cache.
    element_byte: f64,
}

impl Constants {
    /// Fitted to `benches/baselines/host-allreduce-vs-openmpi.jsonl`; only their proportions
    /// matter.
    fn of(transport: TransportKind, machine: Machine) -> Constants {
        let mut constants = match transport {
            TransportKind::Loopback | TransportKind::Shm => Constants {
                hop: 0.25e-6,
                message: 0.1e-6,
                wire_byte: 0.02e-9,
                element_byte: 0.01e-9,
            },
            // To be fitted on hardware; what is known is that posting a write costs less than a system
            // call, and that the device moves the bytes.
            TransportKind::Rdma => Constants {
                hop: 3e-6,
                message: 1e-6,
                wire_byte: 0.04e-9,
                element_byte: 0.01e-9,
            },
            // GPUs have a model of their own; between host buffers this kind carries nothing.
            TransportKind::Cuda | TransportKind::Tcp => Constants {
                hop: 12e-6,
                message: 4e-6,
                wire_byte: 0.4e-9,
                element_byte: 0.01e-9,
            },
        };
        if machine.oversubscribed {
            // A hop now waits for the scheduler to run the peer.
            constants.hop += 3e-6;
        }
        constants
    }
}

/// Seconds for a byte that leaves a host: 10 Gbit/s for all its ranks together. What a machine
/// really has is not known; this keeps algorithms apart that send a byte once or for each rank.
const HOST_BYTE: f64 = 0.8e-9;

/// What a message between hosts costs, in seconds.
pub(super) struct BetweenHosts {
    /// From a published message to the peer's next action.
    pub hop: f64,
    /// Work per message on either side.
    pub message: f64,
    /// Moving a byte of it, per side.
    pub byte: f64,
    /// A byte that leaves a host, for all its ranks together.
    pub host_byte: f64,
}

/// The same costs for those who know what else there is: GPUs have a model of their own.
pub(super) fn between_hosts(machine: Machine) -> BetweenHosts {
    let Constants {
        hop,
        message,
        wire_byte,
        ..
    } = Constants::of(machine.transport, machine);
    BetweenHosts {
        hop,
        message,
        byte: wire_byte,
        host_byte: HOST_BYTE,
    }
}

/// Slots that a rank has in use beyond this no longer fit its second-level cache, and each byte
/// of them comes from further away.
const CACHE: usize = 1 << 20;

/// Returns the seconds per element of encode and decode on one core.
fn codec_seconds(kind: CodecKind) -> (f64, f64) {
    info(kind).map_or((0.0, 0.0), |info| {
        (info.encode_seconds, info.decode_seconds)
    })
}

/// One candidate's share of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Steps of one pass of the busiest rank.
    pub counts: CostCounts,
    /// Messages that follow one another in a pass.
    pub hops: Hops,
    /// Passes.
    pub passes: usize,
    /// Slots of a connection.
    pub slots: usize,
    /// Elements of a full chunk.
    pub chunk: usize,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// Wire bytes of a full chunk: inside a host by a codec for that, and everywhere else.
    pub wire_bytes: [usize; 2],
    /// The codecs of both.
    pub codecs: [CodecKind; 2],
    /// Messages of one pass by which a host's ranks send to other hosts.
    pub leaving: usize,
    /// Hosts of the communicator.
    pub hosts: usize,
}

/// Predicted seconds. Hops are paid once: passes overlap. So do a rank's work and what its host's
/// link carries.
pub fn seconds(work: &Work, machine: Machine) -> f64 {
    if let Some(measured) = &machine.measured {
        let far = measured.link(machine.transport);
        return measured.seconds(work, near(work, machine, far), far);
    }
    let between = Constants::of(machine.transport, machine);
    let inside = Constants::of(machine.inside, machine);
    let counts = &work.counts;
    let [near_bytes, far_bytes] = work.wire_bytes.map(|bytes| bytes as f64);
    let crossing = (counts.crossing[0] + counts.crossing[1]) as f64;
    let intra = (counts.intra[0] + counts.intra[1]) as f64;
    let messages = (counts.sends + counts.recvs) as f64;
    // Without a codec nobody looks at the own contribution as peers see it.
    let coded = if work.codecs[1] == CodecKind::Raw {
        2 * counts.coded
    } else {
        0
    };
    let touched = (counts.encodes + counts.decodes + counts.reduces - coded) as f64;
    let chunk_bytes = (work.chunk * work.element_bytes) as f64;
    let footprint = counts.connections * work.slots.min(work.passes) * work.wire_bytes[1];
    let distance = if footprint > CACHE { 2.0 } else { 1.0 };
    let cost = |link: Constants, messages: f64, bytes: f64| {
        messages * (link.message + distance * link.wire_byte * bytes)
    };
    let coding = |level: usize, encodes: usize, decodes: usize| {
        let (encode, decode) = codec_seconds(work.codecs[level]);
        work.chunk as f64 * (encodes as f64 * encode + decodes as f64 * decode)
    };
    let [near_encodes, near_decodes] = counts.intra_coded;
    let per_pass = cost(between, crossing, far_bytes)
        + cost(inside, intra, near_bytes)
        + cost(inside, messages - crossing - intra, far_bytes)
        + touched * chunk_bytes * inside.element_byte
        + coding(0, near_encodes, near_decodes)
        + coding(
            1,
            counts.encodes - near_encodes,
            counts.decodes - near_decodes,
        );
    let link = work.leaving as f64 * far_bytes * HOST_BYTE;
    work.hops.between as f64 * between.hop
        + work.hops.inside as f64 * inside.hop
        + work.passes as f64 * per_pass.max(link)
}

/// The link inside hosts beside measured costs. Where there are several, it is one between them
/// that was measured: inside, the constants know better.
fn near(work: &Work, machine: Machine, measured: Link) -> Link {
    if work.hosts == 1 {
        return measured;
    }
    let inside = Constants::of(machine.inside, machine);
    Link {
        latency: inside.hop,
        work: inside.message,
        byte: 2.0 * inside.wire_byte,
        beside: Link::moves_beside(machine.inside),
    }
}
