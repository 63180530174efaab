//! Divides the data of a fused kernel among its blocks.

use crate::types::Algorithm;

/// Warps of a block that move data.
pub(super) const MOVER_WARPS: usize = 16;
/// Fewest bytes that a block of a fused kernel sends to each peer. Smaller shares would cost more
/// launches of blocks than the store bandwidth of a multiprocessor is worth.
pub(super) const FUSED_SHARE: usize = 512;
/// Most encoded tiles of a block of a fused kernel with a codec. Four need a quarter of the
/// multiprocessors that one needs, for a few percent of the time.
const CODED_SHARE: usize = 4;

/// Returns the encoded tiles of a block of a fused kernel with a codec: at most [`CODED_SHARE`].
/// Where each tile is a message of its own to or from every peer, there are no more messages than
/// warps.
pub(super) fn coded_share(algorithm: Algorithm, nranks: usize) -> usize {
    match algorithm {
        Algorithm::OneShot => CODED_SHARE,
        _ => (MOVER_WARPS / (nranks - 1).max(1)).clamp(1, CODED_SHARE),
    }
}
