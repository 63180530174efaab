//! Runs plans: walks the steps of each lane, waits without hanging, moves bytes.

mod batch;
#[allow(unsafe_code)]
pub mod gpu;
mod host;
mod numbers;
mod run;
mod state;
mod step;
mod zero_copy;

pub use batch::{Batch, Caller, Progress};
pub use host::HostEngine;
pub use run::Run;

use crate::codec::EncodeStats;
use crate::types::{Algorithm, CodecSetting, TransportKind};

/// What a call did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// The codecs that ran: equal, but for hierarchical calls whose setting has one for each level.
    pub codec: CodecSetting,
    /// The algorithm that ran.
    pub algorithm: Algorithm,
    /// The slowest transport that carried data; `None` if none did.
    pub transport: Option<TransportKind>,
    /// Lanes used.
    pub channels: usize,
    /// Payload bytes that this rank sent.
    pub wire_bytes: u64,
    /// Payload bytes that it would have sent by the same steps with no codec.
    pub raw_bytes: u64,
    /// What the encode pass learnt about this rank's input; `None` when nothing was encoded
    /// (codec raw, or a rank without input), and for calls on GPUs.
    pub input: Option<EncodeStats>,
    /// Calls of a group that travelled as one with this one, itself included; 1 if it went alone.
    pub fused: usize,
}
