//! Selects the set of rings with which a call may use links that no single ring uses.

use super::Request;
use super::candidate::ChannelRings;
use super::gpu::KEPT_STEPS;
use super::limits::Limits;
use crate::schedule;
use crate::types::{Algorithm, Protocol};

/// Returns the fastest set of rings that `request` can use; `None` if there is none.
pub(super) fn ring_set(request: &Request, limits: &Limits) -> Option<ChannelRings> {
    let mut sets = sets(request, limits);
    sets.find(|&set| refusal(request, limits, set).is_none())
}

/// Returns why faster sets than [`ring_set`] cannot be used, a sentence for each.
pub(super) fn no_ring_set(request: &Request, limits: &Limits) -> Vec<String> {
    sets(request, limits)
        .map_while(|set| refusal(request, limits, set))
        .collect()
}

/// Returns the sets of rings of the topology, the fastest first; none if the call has one ring or one chain. A coded
/// call has one ring, so that GPUs and hosts divide messages alike and give equal bits.
fn sets(request: &Request, limits: &Limits) -> impl Iterator<Item = ChannelRings> + use<> {
    let is_open = schedule::has_several_rings(request.collective)
        && !request.codec.inter.is_lossy()
        && !request.crosses(&limits.hosts);
    let sets = if is_open { limits.ring_sets() } else { &[] };
    let pairs: Vec<usize> = sets.iter().map(|set| set.pairs()).collect();
    let set = |pairs| ChannelRings::Set { pairs };
    pairs.into_iter().rev().map(set)
}

/// Returns why a set of rings cannot be used, as a sentence: a kernel would read its steps from
/// global memory in each pass, or it needs more slots than connections have.
fn refusal(request: &Request, limits: &Limits, set: ChannelRings) -> Option<String> {
    let name = format!("{} rings in {} orders", set.count(), set.count() / 2);
    let steps = set.count() * schedule::ring_steps(limits.nranks);
    if limits.gpu.is_some() && steps > KEPT_STEPS {
        return Some(format!(
            "{name} have {steps} steps a pass, and a kernel keeps {KEPT_STEPS}"
        ));
    }
    let algorithm = (Algorithm::Ring, Algorithm::Direct);
    let needed = super::pattern(request, limits, algorithm, set).slots();
    let (slots, setting) = match &limits.gpu {
        Some(gpu) => (gpu.depths[Protocol::Simple as usize], "CINCH_BUFFER_BYTES"),
        None => (limits.slots, "CINCH_SLOTS"),
    };
    (needed > slots).then(|| {
        format!(
            "{name} need {needed} slots for each connection, which has {slots}; raise {setting}"
        )
    })
}
