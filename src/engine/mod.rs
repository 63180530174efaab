//! Runs plans: executes the steps of each channel, waits with a deadline, and moves bytes.

#[allow(unsafe_code)]
pub mod gpu;
mod host;
mod numbers;
mod scale_key;

pub use host::{Batch, Caller, HostEngine, Progress, Run};

use crate::codec::EncodeStats;
use crate::types::{Algorithm, CodecSetting, TransportKind};

/// The report of a call that ran: codec, algorithm, channels and bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// The codecs that ran inside and between hosts. Both are equal, except in hierarchical calls whose
    /// setting names two codecs.
    pub codec: CodecSetting,
    /// The algorithm that ran.
    pub algorithm: Algorithm,
    /// The slowest transport that carried data; `None` if no data travelled.
    pub transport: Option<TransportKind>,
    /// Number of channels that the call used.
    pub channels: usize,
    /// Payload bytes that this rank sent.
    pub wire_bytes: u64,
    /// Payload bytes that the same steps would have sent without a codec.
    pub raw_bytes: u64,
    /// Statistics of this rank's input, collected while encoding. `None` for calls on GPUs, and if this rank
    /// encoded nothing.
    pub input: Option<EncodeStats>,
    /// L2 norm of this rank's residuals of the call's tensor after the call. `None` without error feedback,
    /// and for calls on GPUs.
    pub residual_norm: Option<f64>,
    /// Number of calls of a group that were fused into one call with this call, itself included; 1
    /// if it ran alone.
    pub fused: usize,
}
