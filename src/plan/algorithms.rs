//! Lists the algorithms that may run a request. The request's codec rules some of them out.

use super::Request;
use super::candidate::ChannelRings;
use super::limits::Limits;
use crate::codec::{Codec, Reencode};
use crate::gpu::abi::MAX_PEERS;
use crate::schedule::{self, SchedulePattern};
use crate::types::{Algorithm, Collective, KernelIntra, Level, ScaleRule};
use std::collections::BTreeSet;

/// The codecs of [`Level::Intra`] and [`Level::Inter`], in this order; `None` for raw.
pub type Codecs<'a> = [Option<&'a dyn Codec>; 2];

/// Returns whether the call reuses `tensor=` scales of earlier calls. One-shot cannot run such
/// calls. It needs each rank to decode its own contribution as its peers do, and reused scales do
/// not guarantee this.
pub(super) fn keeps(request: &Request, codec: Option<&dyn Codec>) -> bool {
    matches!(request.codec.inter.scale, ScaleRule::Tensor { .. }) && codec.is_some()
}

/// Returns the flat (not hierarchical) algorithms that can run `request`.
pub(super) fn flat(
    request: &Request,
    limits: &Limits,
    codec: Option<&dyn Codec>,
) -> Vec<Algorithm> {
    let kept = keeps(request, codec);
    let all = schedule::algorithms(request.collective).iter().copied();
    all.filter(|algorithm| !(kept && *algorithm == Algorithm::OneShot))
        .filter(|&algorithm| fits_launches(request, limits, (algorithm, Algorithm::Direct)))
        .collect()
}

/// Returns whether kernels can run an algorithm: a launch exchanges messages with at most [`MAX_PEERS`] ranks, and only
/// independent messages are divided among launches. All ranks get the same answer.
fn fits_launches(
    request: &Request,
    limits: &Limits,
    (algorithm, between): (Algorithm, Algorithm),
) -> bool {
    if limits.gpu.is_none() || limits.nranks - 1 <= MAX_PEERS {
        return true;
    }
    match algorithm {
        Algorithm::Ring | Algorithm::Tree => true,
        Algorithm::Direct | Algorithm::OneShot | Algorithm::FlatTree => matches!(
            request.collective,
            Collective::AllToAll | Collective::Gather | Collective::Scatter | Collective::SendRecv
        ),
        Algorithm::Hierarchical => {
            let pattern = super::pattern(request, limits, (algorithm, between), ChannelRings::ONE);
            (0..limits.nranks).all(|rank| {
                let peers = |schedule: schedule::Schedule| {
                    let steps = schedule.steps.iter();
                    let all =
                        steps.flat_map(|step| step.recv_from.iter().chain(step.send_to.iter()));
                    all.copied().collect::<BTreeSet<u32>>().len()
                };
                (pattern.schedule(rank)).is_ok_and(|schedule| peers(schedule) <= MAX_PEERS)
            })
        }
    }
}

/// Returns whether a ring loses no more precision than other algorithms. A ring rounds a partial
/// sum at every hop if the codec is lossy on partial sums. Direct then rounds twice, and a tree
/// once for each of its levels, for equal bytes.
fn ring_is_gentle(request: &Request, limits: &Limits, codec: Option<&dyn Codec>) -> bool {
    let loses = codec.is_some_and(|codec| codec.reencode() == Reencode::Lossy);
    !loses || !request.collective.reduces() || limits.nranks <= 2
}

/// Returns the flat (not hierarchical) algorithms among which the planner selects for `request`.
pub(super) fn algorithms(
    request: &Request,
    limits: &Limits,
    codec: Option<&dyn Codec>,
) -> Vec<Algorithm> {
    let mut all = flat(request, limits, codec);
    drop_unsuited(&mut all, request, limits, codec);
    all
}

/// Removes the ring from `all` if others lose less precision, and the flat tree unless ranks share cores: where each rank
/// has a core, one-shot takes fewer hops, and direct divides the work.
pub(super) fn drop_unsuited(
    all: &mut Vec<Algorithm>,
    request: &Request,
    limits: &Limits,
    codec: Option<&dyn Codec>,
) {
    if all.len() > 1 && !ring_is_gentle(request, limits, codec) {
        all.retain(|&algorithm| algorithm != Algorithm::Ring);
    }
    if limits.gpu.is_some() || !limits.machine.load.is_crowded() {
        all.retain(|&algorithm| algorithm != Algorithm::FlatTree);
    }
}

/// Returns why no hierarchical schedule can run `request`, as a sentence; `None` if one can.
pub(super) fn no_hierarchy(request: &Request, limits: &Limits) -> Option<String> {
    SchedulePattern::no_hierarchy(request.collective, limits.groups()).or_else(|| {
        // The most slots that any hierarchical schedule of the collective needs on these groups.
        let slots = SchedulePattern {
            groups: limits.groups().clone(),
            between: Algorithm::Direct,
            ..SchedulePattern::flat(request.collective, Algorithm::Hierarchical, limits.nranks)
        }
        .slots();
        if slots > limits.slots {
            return Some(format!(
                "{} by hierarchical on {} needs {slots} slots for each connection, which has {}; raise \
                 CINCH_SLOTS",
                request.collective,
                limits.groups(),
                limits.slots
            ));
        }
        (limits.gpu.is_some() && KernelIntra::of(request.codec).is_none()).then(|| {
            format!(
                "{} by hierarchical with codecs intra={},inter={} is for host buffers: a kernel has \
                 one codec for all of a call, so inside groups it sends in that codec, raw, or by cast16, \
                 cast_bf16 or linear8 (blocks of up to 512, no seed)",
                request.collective, request.codec.intra, request.codec.inter
            )
        })
    })
}

/// Returns the algorithms that a hierarchical schedule may use between groups. A ring between hosts
/// rounds a partial sum at every hop. It is left out if the codec is lossy on partial sums, because
/// direct sends as few bytes. Inside a host, direct may send more bytes over a link between sockets, and a
/// tree is a path, which rounds as often as a ring.
pub(super) fn between(request: &Request, limits: &Limits, codecs: Codecs<'_>) -> Vec<Algorithm> {
    let codec = codecs[Level::Inter as usize];
    let loses = codec.is_some_and(|codec| codec.reencode() == Reencode::Lossy);
    let groups = limits.groups();
    let rings = !loses || groups.count() <= 2 || groups.are_inside_host();
    SchedulePattern::between_groups(request.collective)
        .iter()
        .copied()
        .filter(|&between| rings || between != Algorithm::Ring)
        .filter(|&between| fits_launches(request, limits, (Algorithm::Hierarchical, between)))
        .collect()
}
