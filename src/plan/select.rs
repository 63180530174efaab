//! Candidates and their costs.

use super::cost::{Machine, Work, seconds};
use super::gpu::{self, GpuLimits};
use super::{Geometry, Request, chunk_max, granule};
use crate::codec::{Codec, Reencode};
use crate::error::{Error, ErrorKind, Result};
use crate::schedule::{self, CostCounts, Pattern};
use crate::types::{Algorithm, Protocol, ScaleRule, TransportKind};
use std::fmt::Write;

/// What selection goes by besides the request; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Ranks.
    pub nranks: usize,
    /// Payload bytes of a slot.
    pub slot_bytes: usize,
    /// Slots of a connection.
    pub slots: usize,
    /// Lanes that are connected.
    pub channels: usize,
    /// Algorithm preferred by the communicator's settings.
    pub algorithm: Option<Algorithm>,
    /// The machine.
    pub machine: Machine,
    /// Where the buffers are on GPUs: what counts there.
    pub gpu: Option<GpuLimits>,
}

/// One way to serve a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Its cut of the message.
    pub geometry: Geometry,
    /// Lanes that would have work.
    pub channels: usize,
    /// What the busiest rank does in a pass.
    pub counts: CostCounts,
    /// Messages that follow one another.
    pub hops: usize,
    /// Predicted time.
    pub seconds: f64,
    /// How messages are carried.
    pub protocol: Protocol,
}

/// Every way to serve `request`, or the one that was asked for.
///
/// # Errors
/// Unsupported if the request asks for an algorithm that its collective does not have.
pub fn candidates(
    request: &Request,
    limits: &Limits,
    codec: Option<&dyn Codec>,
) -> Result<Vec<Candidate>> {
    // In the one-shot form every rank must see its own part as the others do, which a scale that
    // is refreshed now and then does not guarantee.
    let kept = matches!(request.codec.scale, ScaleRule::Tensor { .. }) && codec.is_some();
    let all: Vec<Algorithm> = schedule::algorithms(request.collective)
        .iter()
        .copied()
        .filter(|algorithm| !(kept && *algorithm == Algorithm::OneShot))
        .collect();
    if let Some(asked) = request.algorithm {
        if kept && asked == Algorithm::OneShot {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} by oneshot with codec {}: a tensor scale needs an owner for each \
                         chunk; use ring, tree or direct",
                    request.collective, request.codec
                ),
            ));
        }
        return ways(request, limits, codec, &[asked]);
    }
    if let Some(preferred) = limits.algorithm
        && all.contains(&preferred)
    {
        return ways(request, limits, codec, &[preferred]);
    }
    // A ring rounds a partial sum at every hop; with a codec that loses each time, the others
    // have the same bytes and at most two roundings (a tree: one a level).
    let loses = codec.is_some_and(|codec| codec.reencode() == Reencode::Lossy)
        && request.collective.reduces()
        && limits.nranks > 2;
    let gentler: Vec<Algorithm> = all
        .iter()
        .copied()
        .filter(|&algorithm| !(loses && algorithm == Algorithm::Ring))
        .collect();
    ways(request, limits, codec, &gentler)
}

/// Every way to serve `request` by one of `algorithms`.
fn ways(
    request: &Request,
    limits: &Limits,
    codec: Option<&dyn Codec>,
    algorithms: &[Algorithm],
) -> Result<Vec<Candidate>> {
    let Some(gpu) = &limits.gpu else {
        let mut found = Vec::new();
        for &algorithm in algorithms {
            found.push(cheapest_cut(request, limits, codec, algorithm)?);
        }
        return Ok(found);
    };
    let mut found = Vec::new();
    for &algorithm in algorithms {
        for protocol in gpu::protocols(request, limits, gpu, algorithm) {
            found.push(gpu::candidate(
                request, limits, gpu, codec, algorithm, protocol,
            )?);
        }
    }
    // Asked for the fused kernel where one algorithm has it: the others are not what was asked.
    if gpu
        .protocol
        .is_some_and(|asked| found.iter().any(|one| one.protocol == asked))
    {
        found.retain(|one| Some(one.protocol) == gpu.protocol);
    }
    Ok(found)
}

/// The busiest of a few ranks stands for all: the same few on every rank, so that all ranks
/// arrive at the same number.
pub(super) fn busiest(request: &Request, nranks: usize) -> [usize; 3] {
    [request.root, (request.root + 1) % nranks, nranks / 2]
}

/// Most times that a message is cut finer than slots make necessary, each time in two.
const FINER: usize = 6;

/// Bytes of a chunk's elements below which it is not cut further.
const SMALLEST_CHUNK: usize = 4 << 10;

/// The candidate of one algorithm with the cut that the model likes best. The constants know of
/// no gain by more chunks than slots make necessary; measured costs may.
fn cheapest_cut(
    request: &Request,
    limits: &Limits,
    codec: Option<&dyn Codec>,
    algorithm: Algorithm,
) -> Result<Candidate> {
    let pattern = super::pattern(request, algorithm, limits.nranks);
    let granule = granule(request.dtype, codec);
    let most = chunk_max(limits.slot_bytes, request.dtype, request.codec, codec)?;
    let cut = |most| Geometry::new(request.count, pattern.parts(), granule, most);
    let mut best = candidate(request, limits, codec, &pattern, cut(most))?;
    if limits.machine.measured.is_none() {
        return Ok(best);
    }
    let mut geometry = best.geometry;
    for _ in 0..FINER {
        let half = (geometry.chunk() / 2).next_multiple_of(granule);
        if half >= geometry.chunk() || half * request.dtype.size() < SMALLEST_CHUNK {
            break;
        }
        geometry = cut(half);
        let finer = candidate(request, limits, codec, &pattern, geometry)?;
        if finer.seconds < best.seconds {
            best = finer;
        }
    }
    Ok(best)
}

fn candidate(
    request: &Request,
    limits: &Limits,
    codec: Option<&dyn Codec>,
    pattern: &Pattern,
    geometry: Geometry,
) -> Result<Candidate> {
    let algorithm = pattern.algorithm;
    let hops = schedule::hops(request.collective, algorithm, limits.nranks);
    // One thread drives all lanes, so lanes only pay where the wire works while the core does
    // something else; in shared memory they would only spread the slots over more cache.
    let channels = match limits.machine.transport {
        TransportKind::Loopback | TransportKind::Shm | TransportKind::Cuda => 1,
        TransportKind::Tcp => limits.channels.min(geometry.passes()),
    };
    let chunk = geometry.chunk();
    let wire_bytes = codec.map_or(chunk * request.dtype.size(), |codec| {
        codec.wire_bytes(chunk)
    });
    let mut busiest = (0.0, CostCounts::default());
    for rank in self::busiest(request, limits.nranks) {
        let counts = schedule::cost_counts(&pattern.schedule(rank)?);
        let work = Work {
            counts,
            hops,
            passes: geometry.passes(),
            slots: limits.slots,
            chunk,
            element_bytes: request.dtype.size(),
            wire_bytes,
            codec: request.codec.kind,
        };
        let seconds = seconds(&work, limits.machine);
        if seconds >= busiest.0 {
            busiest = (seconds, counts);
        }
    }
    let (seconds, counts) = busiest;
    Ok(Candidate {
        algorithm,
        geometry,
        channels,
        counts,
        hops,
        seconds,
        protocol: Protocol::Simple,
    })
}

/// The candidates as a table, the cheapest marked.
pub fn explain(request: &Request, limits: &Limits, candidates: &[Candidate]) -> String {
    let best = candidates
        .iter()
        .map(|candidate| candidate.seconds)
        .min_by(f64::total_cmp)
        .unwrap_or_default();
    let mut text = format!(
        "{} of {} {}, codec {}, {} ranks over {}{}\n",
        request.collective,
        request.count,
        request.dtype,
        request.codec,
        limits.nranks,
        limits.machine.transport,
        if limits.machine.oversubscribed {
            ", more ranks than cores"
        } else {
            ""
        },
    );
    let protocol = |name: &str| match limits.gpu {
        Some(_) => format!("  {name:<8}"),
        None => String::new(),
    };
    text += "  algorithm";
    text += &protocol("protocol");
    text += "  chunk(elements)  passes  lanes  hops  sends  predicted(us)\n";
    for candidate in candidates {
        let mark = if candidate.seconds == best {
            " <- cheapest"
        } else {
            ""
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {:<9}{}  {:>15}  {:>6}  {:>5}  {:>4}  {:>5}  {:>13.2}{mark}",
            candidate.algorithm.name(),
            protocol(candidate.protocol.name()),
            candidate.geometry.chunk(),
            candidate.geometry.passes(),
            candidate.channels,
            candidate.hops,
            candidate.counts.sends,
            candidate.seconds * 1e6,
        );
    }
    text
}
