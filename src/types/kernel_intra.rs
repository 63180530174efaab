//! [`KernelIntra`]: what kernels send inside groups beside their codec.

use super::{CodecKind, CodecSetting, CodecSpec, ScaleRule};

/// How a kernel with a codec encodes messages for [`Level::Intra`](super::Level::Intra), which are contributions.
/// Numbers are part of exported residuals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum KernelIntra {
    /// By the codec of all other messages.
    Coded = 0,
    /// Not at all.
    Raw = 1,
    /// By cast16.
    Cast16 = 2,
    /// By cast_bf16.
    CastBf16 = 3,
    /// By linear8, with a scale for each block.
    Linear8 = 4,
}

impl KernelIntra {
    /// Log2 of the sizes of blocks of linear8; a warp has no larger block at once.
    const LOG2_BLOCKS: std::ops::RangeInclusive<u32> = 5..=9;

    /// The codecs that messages inside groups may have beside another codec.
    pub fn own_codecs() -> impl Iterator<Item = CodecSpec> {
        let plain = [CodecKind::Raw, CodecKind::Cast16, CodecKind::CastBf16].map(CodecSpec::of);
        let with_blocks = KernelIntra::LOG2_BLOCKS.map(|log2| CodecSpec {
            scale: ScaleRule::Block(1 << log2),
            ..CodecSpec::of(CodecKind::Linear8)
        });
        plain.into_iter().chain(with_blocks)
    }

    /// Returns how the kernels of the codec between groups encode messages inside them; `None` if no kernel has both
    /// codecs.
    pub fn of(setting: CodecSetting) -> Option<KernelIntra> {
        let [intra, inter] = [setting.intra, setting.inter].map(CodecSpec::is_lossy);
        if !intra && !inter || !setting.is_by_level() {
            return Some(KernelIntra::Coded);
        }
        if !inter || KernelIntra::own_codecs().all(|own| own != setting.intra) {
            return None;
        }
        Some(match setting.intra.kind {
            CodecKind::Raw => KernelIntra::Raw,
            CodecKind::Cast16 => KernelIntra::Cast16,
            CodecKind::CastBf16 => KernelIntra::CastBf16,
            _ => KernelIntra::Linear8,
        })
    }
}
