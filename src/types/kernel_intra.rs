//! [`KernelIntra`]: what kernels send inside groups beside their codec.

use super::{CodecKind, CodecSetting, CodecSpec};

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
}

impl KernelIntra {
    /// The codecs that messages inside groups may have beside another codec.
    pub const OWN_CODECS: [(CodecKind, KernelIntra); 3] = [
        (CodecKind::Raw, KernelIntra::Raw),
        (CodecKind::Cast16, KernelIntra::Cast16),
        (CodecKind::CastBf16, KernelIntra::CastBf16),
    ];

    /// Returns how the kernels of the codec between groups encode messages inside them; `None` if no kernel has both
    /// codecs.
    pub fn of(setting: CodecSetting) -> Option<KernelIntra> {
        let [intra, inter] = [setting.intra, setting.inter].map(CodecSpec::is_lossy);
        if !intra && !inter || !setting.is_by_level() {
            return Some(KernelIntra::Coded);
        }
        let own = KernelIntra::OWN_CODECS.into_iter();
        let mut found = own.filter(|(kind, _)| inter && *kind == setting.intra.kind);
        found.next().map(|(_, intra)| intra)
    }
}
