//! Counts the rings that a channel carries, their directions and the slots that they need.

use crate::types::Collective;

/// Whether `collective` may have several rings per channel; chains have one.
pub const fn has_several_rings(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter
    )
}

/// Returns the rings per channel of `collective`, of which a pattern allows `most`.
pub(super) fn rings(collective: Collective, most: usize) -> usize {
    match has_several_rings(collective) {
        true => most,
        false => 1,
    }
}

/// Returns the directions that lead to different ranks.
pub const fn directions(nranks: usize) -> usize {
    if nranks > 2 { 2 } else { 1 }
}

/// Returns the slots that each connection needs to be free of deadlock.
pub(super) fn slots(rings: usize, nranks: usize) -> usize {
    1 + rings.div_ceil(directions(nranks))
}

/// Returns the most steps of one ring in a pass, which an all_reduce has.
pub const fn ring_steps(nranks: usize) -> usize {
    2 * nranks - 1
}
