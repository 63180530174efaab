//! Predicted time of a candidate on host memory, a pure function of the call and the communicator.

use super::measured::{Link, MeasuredCosts};
use super::work::{CandidateWork, moves_beside};
use crate::codec::info;
use crate::transport::{self, Caps, HostLoad};
use crate::types::{CodecKind, TransportKind};

/// Facts about the machine, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineFacts {
    /// The slowest transport between any two ranks.
    pub transport: TransportKind,
    /// The slowest transport between any two ranks of the same host.
    pub inside: TransportKind,
    /// The ranks and cores of the host with the most ranks for a core; [`HostLoad::LIGHT`] if no host has more ranks
    /// than cores.
    pub load: HostLoad,
    /// Costs that the communicator measured; if `None`, the model uses built-in constants.
    pub measured: Option<MeasuredCosts>,
}

/// Costs of one link and one core, in seconds or seconds per byte.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Constants {
    /// Seconds from a published message to the peer's next action.
    hop: f64,
    /// Seconds of work per message on each side.
    message: f64,
    /// Seconds to move a byte of wire data, on each side.
    wire_byte: f64,
    /// Seconds to load, add or store a byte of elements in cache.
    element_byte: f64,
}

/// Seconds of the turn of a rank that looks for its messages, finds none and yields its core.
const TURN: f64 = 4e-6;

/// Factor of the costs of messages in memory between ranks that share cores. Fitted, with [`TURN`], to all_reduces of 4 to
/// 128 ranks on 2 cores (benches/FIGURES.md, Host memory and network).
const EVICTED: f64 = 3.0;

/// Seconds to load, add or store a byte of elements in cache.
const ELEMENT_BYTE: f64 = 0.01e-9;

impl Constants {
    /// Returns the constants of a transport, from its [`Caps`].
    fn of(kind: TransportKind, machine: MachineFacts) -> Constants {
        // Transports between GPUs have no [`Caps`] and cost 0 here, because GPU memory has a cost
        // model of its own.
        let link = |of: fn(&Caps) -> f64| transport::caps(kind).map_or(0.0, of);
        let mut constants = Constants {
            hop: link(|caps| caps.hop_seconds),
            message: link(|caps| caps.message_seconds),
            wire_byte: link(|caps| caps.byte_seconds),
            element_byte: ELEMENT_BYTE,
        };
        // With more ranks than cores, a hop also waits until the scheduler runs the peer, after others of its core, which
        // evict its slots from the core's caches.
        if machine.load.is_crowded() {
            constants.hop += TURN * machine.load.ranks_per_core();
            if transport::caps(kind).is_some_and(Caps::shares_memory) {
                constants.message *= EVICTED;
                constants.wire_byte *= EVICTED;
            }
        }
        constants
    }
}

/// Seconds for each byte that leaves a host: 10 Gbit/s, shared by all ranks of the host. The real
/// bandwidth is unknown here. The constant favours algorithms that send a byte once over algorithms
/// that send it for each rank.
const HOST_BYTE: f64 = 0.8e-9;

/// Costs of a message between hosts, in seconds.
pub(super) struct BetweenHosts {
    /// Seconds from a published message to the peer's next action.
    pub hop: f64,
    /// Seconds of work per message on each side.
    pub message: f64,
    /// Seconds to move a byte of the message, on each side.
    pub byte: f64,
    /// Seconds for each byte that leaves a host; the link is shared by all ranks of the host.
    pub host_byte: f64,
}

/// Returns the costs between hosts, for the GPU cost model, which has other costs inside a host.
pub(super) fn between_hosts(machine: MachineFacts) -> BetweenHosts {
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

/// Bytes in use in a rank's slots beyond which the slots no longer fit its second-level cache. Each
/// byte then costs more.
const CACHE: usize = 1 << 20;

/// Returns the seconds to encode, and to decode, one element on one core.
fn codec_seconds(kind: CodecKind) -> (f64, f64) {
    info(kind).map_or((0.0, 0.0), |info| {
        (info.encode_seconds, info.decode_seconds)
    })
}

/// Returns the predicted seconds of a call, of which `works` is the work of some ranks: of the root, or of rank 0, and of
/// others that are taken as like the rest. Passes overlap, so the latency of the hops counts once.
/// Measured costs contain the load of a host, since all of its ranks measured at the same time.
/// A rank's work overlaps with the transfers on its host's network link, so the longer of the two
/// counts.
pub fn seconds(works: &[CandidateWork], machine: MachineFacts) -> f64 {
    let longest = |times: &mut dyn Iterator<Item = f64>| times.fold(0.0, f64::max);
    if let Some(measured) = &machine.measured {
        let far = measured.link(machine.transport);
        let time = |work| measured.seconds(work, near(work, machine, far), far);
        return longest(&mut works.iter().map(time));
    }
    let Some(first) = works.first() else {
        return 0.0;
    };
    let pass = |work: &CandidateWork| pass_seconds(work, machine);
    let root = pass(first);
    let others = longest(&mut works[1..].iter().map(pass));
    // Ranks that share cores work one after another. What the root does beyond others is done while they wait.
    let core = match machine.load.is_crowded() {
        true => others * machine.load.ranks_per_core() + (root - others).max(0.0),
        false => root.max(others),
    };
    let [_, far_bytes] = first.wire_bytes.map(|bytes| bytes as f64);
    let link = first.leaving as f64 * far_bytes * HOST_BYTE;
    let [inside, between] =
        [machine.inside, machine.transport].map(|kind| Constants::of(kind, machine).hop);
    first.hops.between as f64 * between
        + first.hops.inside as f64 * inside
        + first.passes as f64 * core.max(link)
}

/// Returns the predicted seconds in which a rank works in one pass.
fn pass_seconds(work: &CandidateWork, machine: MachineFacts) -> f64 {
    let between = Constants::of(machine.transport, machine);
    let inside = Constants::of(machine.inside, machine);
    let counts = &work.counts;
    let [near_bytes, far_bytes] = work.wire_bytes.map(|bytes| bytes as f64);
    let crossing = (counts.crossing[0] + counts.crossing[1]) as f64;
    let intra = (counts.intra[0] + counts.intra[1]) as f64;
    let messages = (counts.sends + counts.recvs) as f64;
    // Without a codec, no rank encodes and decodes its own contribution.
    let coded = if work.codecs[1].is_raw() {
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
    cost(between, crossing, far_bytes)
        + cost(inside, intra, near_bytes)
        + cost(inside, messages - crossing - intra, far_bytes)
        + touched * chunk_bytes * inside.element_byte
        + coding(0, near_encodes, near_decodes)
        + coding(
            1,
            counts.encodes - near_encodes,
            counts.decodes - near_decodes,
        )
}

/// Returns the link between ranks of one host, for a communicator with measured costs. On several
/// hosts the measured link connects hosts, so the link inside hosts takes the built-in constants.
fn near(work: &CandidateWork, machine: MachineFacts, measured: Link) -> Link {
    if work.hosts == 1 {
        return measured;
    }
    let inside = Constants::of(machine.inside, machine);
    Link {
        latency: inside.hop,
        work: inside.message,
        byte: 2.0 * inside.wire_byte,
        beside: moves_beside(machine.inside),
    }
}
