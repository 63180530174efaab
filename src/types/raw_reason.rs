//! Reasons why calls run without a codec.

/// The reason why a call ran without a codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RawReason {
    /// Neither a setting nor the call names a codec. Or a codec is set only inside hosts, and the algorithm
    /// treats all ranks alike.
    NotAsked,
    /// The process or a rule has turned compression off.
    Off,
    /// The call names `raw`.
    ByCall,
    /// The communicator's codec does not carry this collective.
    Collective,
    /// Codecs do not carry this element type.
    DType,
    /// Codecs carry sums and averages only.
    Operation,
    /// The input has fewer bytes than the smallest input that is coded (`CINCH_CODEC_MIN_BYTES`).
    Small,
    /// The codec keeps scales of tensors, and the call names no tensor.
    NoTensor,
    /// The error of a sampled call exceeded the bound, which switched the codec off.
    SwitchedOff,
    /// The cost model predicted that the codec does not pay.
    Costs,
    /// The input has more bytes than a rule codes (`max=`).
    Large,
}

impl RawReason {
    /// All reasons, in numeric order.
    pub const ALL: [RawReason; 11] = [
        RawReason::NotAsked,
        RawReason::Off,
        RawReason::ByCall,
        RawReason::Collective,
        RawReason::DType,
        RawReason::Operation,
        RawReason::Small,
        RawReason::NoTensor,
        RawReason::SwitchedOff,
        RawReason::Costs,
        RawReason::Large,
    ];

    /// Returns the reason as logs print it.
    pub const fn name(self) -> &'static str {
        match self {
            RawReason::NotAsked => "no codec",
            RawReason::Off => "off",
            RawReason::ByCall => "by call",
            RawReason::Collective => "collective",
            RawReason::DType => "data type",
            RawReason::Operation => "operation",
            RawReason::Small => "small",
            RawReason::NoTensor => "no tensor",
            RawReason::SwitchedOff => "beyond the bound",
            RawReason::Costs => "does not pay",
            RawReason::Large => "large",
        }
    }
}
