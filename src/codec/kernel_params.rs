//! Lists the codecs that have CUDA kernels, and computes the parameter words of these kernels.

use super::info::info;
use super::kernel_info::KernelInfo;
use super::{RoundingRandom, TABLE};
use crate::cpu::FloatEnvironment;
use crate::types::{CodecKind, CodecSpec, ScaleRule};

/// The codecs that have CUDA kernels; GPUs reject all others.
pub const KERNEL_CODECS: [CodecKind; count(false)] = select(false);

/// The codecs that also have fused CUDA kernels.
pub const FUSED_CODECS: [CodecKind; count(true)] = select(true);

/// Returns whether codec number `at` of [`TABLE`] has kernels; if `fused`, whether it has fused
/// kernels.
const fn is_selected(at: usize, fused: bool) -> bool {
    match TABLE[at].kernels {
        Some(kernels) => kernels.is_fused || !fused,
        None => false,
    }
}

const fn count(fused: bool) -> usize {
    let (mut at, mut n) = (0, 0);
    while at < TABLE.len() {
        n += is_selected(at, fused) as usize;
        at += 1;
    }
    n
}

const fn select<const N: usize>(fused: bool) -> [CodecKind; N] {
    let mut selected = [CodecKind::Raw; N];
    let (mut at, mut n) = (0, 0);
    while at < TABLE.len() {
        if is_selected(at, fused) {
            selected[n] = TABLE[at].kind;
            n += 1;
        }
        at += 1;
    }
    selected
}

fn kernels(kind: CodecKind) -> Option<KernelInfo> {
    info(kind)?.kernels
}

/// Returns the codec's part of the names of kernels for collectives; see [`KernelInfo::family`].
pub fn kernel_family(kind: CodecKind) -> &'static str {
    kernels(kind).map_or(kind.name(), |kernels| kernels.family)
}

/// Returns the codec's part of the names of kernels for whole arrays; see
/// [`KernelInfo::array_family`].
pub fn array_family(kind: CodecKind) -> &'static str {
    kernels(kind).map_or(kind.name(), |kernels| kernels.array_family)
}

/// Index in [`kernel_params`] of the number of calls for which a kernel keeps the scale of a chunk.
pub const REFRESH_WORD: usize = 6;

/// Returns the eight words of `cinch_codec_params` or `cinch_bits_params` (`kernels/codec/params.h`) for a
/// valid specification of one of [`KERNEL_CODECS`].
///
/// Under a tensor rule `scale` is the scale of the chunk to encode. If rounding is stochastic, `draws` are
/// the random numbers of contributions and of sums. A kernel adds the element's index in the message.
///
/// Codecs without a scale take the limit of their elements as `scale` ([`super::Codec::element_limit`]); 0 stands
/// for none.
pub fn kernel_params(spec: CodecSpec, scale: f32, draws: [RoundingRandom; 2]) -> [u32; 8] {
    let _environment = FloatEnvironment::standard();
    let mut words = [0; 8];
    match spec.scale {
        ScaleRule::Block(block) if spec.kind.has_scale() => words[0] = block.ilog2(),
        ScaleRule::Tensor { refresh } if spec.kind.has_scale() => {
            (words[1], words[REFRESH_WORD]) = (scale.to_bits(), refresh);
        }
        ScaleRule::Threshold(bits) if spec.kind.has_threshold() => words[1] = bits,
        _ if spec.kind.has_limit() => words[1] = scale.to_bits(),
        _ => {}
    }
    if spec.is_stochastic() {
        let [[a, b], [c, d]] = draws.map(|random| random.parts().0);
        words[2..6].copy_from_slice(&[a, b, c, d]);
        words[7] = u32::from(spec.seed != 0);
    }
    if let Some(kernels) = kernels(spec.kind) {
        (kernels.words)(spec, &mut words);
    }
    words
}
