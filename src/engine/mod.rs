//! Runs plans: executes the steps of each channel, waits with a deadline, and moves bytes.

#[allow(unsafe_code)]
pub mod gpu;
mod host;
mod numbers;

pub use host::{Batch, Caller, HostEngine, Progress, Run};

use crate::codec::EncodeStats;
use crate::types::{Algorithm, CodecSetting, TransportKind};

/// What a call did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// The codecs that ran: equal, but for hierarchical calls whose setting has one for each level.
    pub codec: CodecSetting,
    /// The algorithm that ran.
    pub algorithm: Algorithm,
    /// The slowest transport that carried data; `None` if no data travelled.
    pub transport: Option<TransportKind>,
    /// Channels used.
    pub channels: usize,
    /// Payload bytes that this rank sent.
    pub wire_bytes: u64,
    /// Payload bytes that the same steps would have sent without a codec.
    pub raw_bytes: u64,
    /// Statistics of this rank's input from the encode pass. `None` for calls on GPUs, and when this rank
    /// encoded nothing.
    pub input: Option<EncodeStats>,
    /// Calls of a group that were fused with this call, itself included; 1 if it ran alone.
    pub fused: usize,
}
