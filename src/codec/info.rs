//! Facts about codecs, which code outside a codec's folder reads instead of matching on names.

use super::feedback::Contraction;
use super::kernel_info::KernelInfo;
use super::simd::Available;
use super::{Codec, TABLE};
use crate::types::{CodecKind, CodecSpec};
use std::sync::Arc;

/// Facts about one codec.
#[derive(Clone, Copy, Debug)]
pub struct CodecInfo {
    /// The codec that the facts describe.
    pub kind: CodecKind,
    /// Seconds per encoded element on one core, for the cost model; see `benches/codec.rs`.
    pub encode_seconds: f64,
    /// Seconds per decoded element on one core.
    pub decode_seconds: f64,
    /// Numbers that messages can carry.
    pub range: MessageRange,
    /// How the codec contracts errors, which bounds the residuals of error feedback.
    pub contraction: fn(CodecSpec) -> Contraction,
    /// Facts about the codec's CUDA kernels; `None` if it has none and GPUs reject it.
    pub kernels: Option<KernelInfo>,
    /// Creates the codec; the specification must have been checked.
    pub(super) build: fn(CodecSpec, Available) -> Arc<dyn Codec>,
}

/// Numbers that the messages of a codec can carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageRange {
    /// As large as those of fp32.
    Full,
    /// Up to a largest number of the codec, which limits every contribution: no sum of them leaves the range of fp32.
    Fixed,
    /// Up to the largest number of f16, which partial sums may exceed.
    Half,
}

/// Returns the range of messages in a codec; `None` for raw.
pub fn message_range(kind: CodecKind) -> Option<MessageRange> {
    info(kind).map(|info| info.range)
}

static CODECS: [CodecInfo; TABLE.len()] = TABLE;

const _: () = {
    let mut at = 0;
    while at < TABLE.len() {
        assert!(
            TABLE[at].kind as usize == at + 1,
            "the table is in numeric order"
        );
        at += 1;
    }
};

/// Returns the facts about a codec; `None` for raw.
pub fn info(kind: CodecKind) -> Option<&'static CodecInfo> {
    CODECS.get((kind as usize).checked_sub(1)?)
}
