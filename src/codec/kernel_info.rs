//! Facts about the CUDA kernels of a codec.

use crate::types::CodecSpec;

/// Facts about the CUDA kernels of a codec.
#[derive(Clone, Copy, Debug)]
pub struct KernelInfo {
    /// Name part of the kernels that run collectives. Codecs that differ by a parameter alone share
    /// kernels.
    pub family: &'static str,
    /// Name part of the kernels for whole arrays. Kernels with a table give the same codes for at most
    /// a fifth of the instructions.
    pub array_family: &'static str,
    /// Whether small and medium messages have a fused kernel. Tuning tables are measured for these
    /// codecs only.
    pub is_fused: bool,
    /// Seconds per encoded element, of all channels of a GPU together, for the cost model.
    pub encode_seconds: f64,
    /// Seconds per decoded element, of all channels of a GPU together.
    pub decode_seconds: f64,
    /// Sets the words that only this codec has.
    pub(super) words: fn(CodecSpec, &mut [u32; 8]),
}

impl KernelInfo {
    /// Returns the kernels of a codec without words of its own, not fused, with the costs of `dynamic8`.
    pub(super) const fn new(family: &'static str) -> KernelInfo {
        KernelInfo {
            family,
            array_family: family,
            is_fused: false,
            encode_seconds: 0.9e-12,
            decode_seconds: 0.4e-12,
            words: |_, _| {},
        }
    }
}
