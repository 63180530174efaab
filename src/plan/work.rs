//! The work of a candidate, from which both cost models predict its time.

use crate::schedule::{CostCounts, Hops};
use crate::transport;
use crate::types::{CodecKind, TransportKind};

/// The work of one candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CandidateWork {
    /// Steps of one pass of the busiest rank.
    pub counts: CostCounts,
    /// Messages that depend on one another in a pass.
    pub hops: Hops,
    /// Passes.
    pub passes: usize,
    /// Slots of a connection.
    pub slots: usize,
    /// Elements of a full chunk.
    pub chunk: usize,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// Wire bytes of a full chunk at each [`Level`](crate::types::Level).
    pub wire_bytes: [usize; 2],
    /// The codec at each level.
    pub codecs: [CodecKind; 2],
    /// Messages of one pass that the ranks of a host send to other hosts.
    pub leaving: usize,
    /// Hosts of the communicator.
    pub hosts: usize,
}

/// Whether bytes move over a transport while the cores work on something else.
pub(super) fn moves_beside(kind: TransportKind) -> bool {
    transport::caps(kind).is_some_and(|caps| caps.moves_beside)
}
