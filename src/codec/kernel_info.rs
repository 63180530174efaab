//! Facts about the CUDA kernels of a codec.

use crate::types::CodecSpec;

/// Facts about the CUDA kernels of one codec.
#[derive(Clone, Copy, Debug)]
pub struct KernelInfo {
    /// Part of the names of the kernels that run collectives. Codecs that differ only in a
    /// parameter share kernels.
    pub family: &'static str,
    /// Part of the names of the kernels for whole arrays. A kernel that uses a table gives equal codes with
    /// at most a fifth of the instructions.
    pub array_family: &'static str,
    /// Whether the codec has a fused kernel, for small and medium messages. Only such codecs are
    /// measured for tuning tables.
    pub is_fused: bool,
    /// Seconds per encoded element when all channels of a GPU work together, for the cost model.
    pub encode_seconds: f64,
    /// Seconds per decoded element when all channels of a GPU work together, for the cost model.
    pub decode_seconds: f64,
    /// Sets the kernel parameter words whose meaning is specific to this codec.
    pub(super) words: fn(CodecSpec, &mut [u32; 8]),
}

impl KernelInfo {
    /// Creates the facts for kernels that are not fused, need no codec-specific words, and are as fast as
    /// those of `dynamic8`.
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
