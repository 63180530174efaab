//! Divides the data of a fused kernel among its thread blocks.

use crate::types::Algorithm;

/// Warps of a thread block that move data.
pub(super) const MOVER_WARPS: usize = 16;
/// Minimum number of bytes that a thread block of a fused kernel sends to each peer. With fewer
/// bytes, launching more blocks costs more than their store bandwidth gains.
pub(super) const FUSED_SHARE: usize = 512;
/// Maximum number of encoded tiles per thread block of a fused kernel with a codec. With four tiles
/// the kernel occupies a quarter of the multiprocessors that it would with one, and is only a few
/// percent slower.
const CODED_SHARE: usize = 4;

/// Returns the number of encoded tiles per thread block of a fused kernel with a codec, at most
/// [`CODED_SHARE`]. Except in a one-shot, each tile is a separate message per peer, so the block
/// gets no more messages than warps.
pub(super) fn coded_share(algorithm: Algorithm, nranks: usize) -> usize {
    match algorithm {
        Algorithm::OneShot => CODED_SHARE,
        _ => (MOVER_WARPS / (nranks - 1).max(1)).clamp(1, CODED_SHARE),
    }
}
