//! Predicted time of a candidate: a pure function of the call and the communicator.

use super::measured::MeasuredCosts;
use crate::schedule::CostCounts;
use crate::types::{CodecKind, TransportKind};

/// What the model knows about the machine, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// The slowest transport between any two ranks.
    pub transport: TransportKind,
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
    fn of(machine: Machine) -> Constants {
        let mut constants = match machine.transport {
            TransportKind::Loopback | TransportKind::Shm => Constants {
                hop: 0.25e-6,
                message: 0.1e-6,
                wire_byte: 0.02e-9,
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

/// Slots that a rank has in use beyond this no longer fit its second-level cache, and each byte
/// of them comes from further away.
const CACHE: usize = 1 << 20;

/// Seconds per element of encode and decode on one core, from `benches/codec.rs`.
fn codec_seconds(kind: CodecKind) -> (f64, f64) {
    match kind {
        CodecKind::Raw => (0.0, 0.0),
        CodecKind::Linear8 => (0.13e-9, 0.05e-9),
        CodecKind::CastBf16
        | CodecKind::Cast16
        | CodecKind::Trunc8
        | CodecKind::Trunc16
        | CodecKind::Trunc24 => (0.06e-9, 0.05e-9),
        CodecKind::Dynamic8 => (0.36e-9, 0.08e-9),
        CodecKind::MinMax1 | CodecKind::MinMax2 | CodecKind::MinMax4 => (0.3e-9, 0.15e-9),
        CodecKind::Fp8E4M3 | CodecKind::Fp8E5M2 => (0.16e-9, 0.07e-9),
        CodecKind::TernGrad => (0.4e-9, 0.15e-9),
        CodecKind::OneBit => (0.3e-9, 0.15e-9),
        CodecKind::Threshold2 => (0.15e-9, 0.15e-9),
        CodecKind::MinMax8 => (0.2e-9, 0.08e-9),
        CodecKind::Static8 | CodecKind::Mantissa8 => (0.5e-9, 0.1e-9),
    }
}

/// One candidate's share of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Steps of one pass of the busiest rank.
    pub counts: CostCounts,
    /// Messages that follow one another in a pass.
    pub hops: usize,
    /// Passes.
    pub passes: usize,
    /// Slots of a connection.
    pub slots: usize,
    /// Elements of a full chunk.
    pub chunk: usize,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// Wire bytes of a full chunk.
    pub wire_bytes: usize,
    /// The codec.
    pub codec: CodecKind,
}

/// Predicted seconds. Hops are paid once: passes overlap.
pub fn seconds(work: &Work, machine: Machine) -> f64 {
    if let Some(measured) = &machine.measured {
        return measured.seconds(work, machine.transport);
    }
    let constants = Constants::of(machine);
    let (encode, decode) = codec_seconds(work.codec);
    let counts = &work.counts;
    let messages = (counts.sends + counts.recvs) as f64;
    let coded = if work.codec == CodecKind::Raw {
        2 * counts.coded
    } else {
        0
    };
    let touched = (counts.encodes + counts.decodes + counts.reduces - coded) as f64;
    let chunk_bytes = (work.chunk * work.element_bytes) as f64;
    let footprint = counts.connections * work.slots.min(work.passes) * work.wire_bytes;
    let distance = if footprint > CACHE { 2.0 } else { 1.0 };
    let wire = distance * constants.wire_byte * work.wire_bytes as f64;
    let per_pass = messages * (constants.message + wire)
        + touched * chunk_bytes * constants.element_byte
        + work.chunk as f64 * (counts.encodes as f64 * encode + counts.decodes as f64 * decode);
    work.hops as f64 * constants.hop + work.passes as f64 * per_pass
}
