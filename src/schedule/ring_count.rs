//! Counts the rings that a channel carries, their directions, and the slots that they need.

use crate::types::Collective;

/// Returns whether `collective` may have several rings per channel; chains have only one.
pub const fn has_several_rings(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter
    )
}

/// Returns the rings per channel of `collective`: `most` if it may have several, otherwise 1.
pub(super) fn rings(collective: Collective, most: usize) -> usize {
    match has_several_rings(collective) {
        true => most,
        false => 1,
    }
}

/// Returns the number of ring directions that lead to different neighbours.
pub const fn directions(nranks: usize) -> usize {
    if nranks > 2 { 2 } else { 1 }
}

/// Returns the number of slots that each connection needs for freedom from deadlock.
pub(super) fn slots(rings: usize, nranks: usize) -> usize {
    1 + rings.div_ceil(directions(nranks))
}

/// Returns the largest number of steps of one ring in a pass, over all collectives; all_reduce has
/// it.
pub const fn ring_steps(nranks: usize) -> usize {
    2 * nranks - 1
}
