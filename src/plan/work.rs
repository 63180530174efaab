//! Describes the work of a candidate, from which both cost models predict its time.

use crate::schedule::{CostCounts, Hops};
use crate::transport;
use crate::types::{CodecKind, TransportKind};

/// The work of one candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CandidateWork {
    /// Work of one rank in one pass.
    pub counts: CostCounts,
    /// Longest chain of messages in a pass, each of which waits for the message before it.
    pub hops: Hops,
    /// Number of passes in which the call covers the message, over all channels.
    pub passes: usize,
    /// Slots of each connection.
    pub slots: usize,
    /// Elements of a full chunk.
    pub chunk: usize,
    /// Size of an element in bytes.
    pub element_bytes: usize,
    /// Wire bytes of a full chunk at each [`Level`](crate::types::Level).
    pub wire_bytes: [usize; 2],
    /// The codecs of messages inside and between hosts, in the order of
    /// [`Level`](crate::types::Level).
    pub codecs: [CodecKind; 2],
    /// Number of messages that the ranks of one host send to other hosts in a pass.
    pub leaving: usize,
    /// Number of hosts of the communicator.
    pub hosts: usize,
}

/// Returns whether the transport moves bytes while the cores work on something else.
pub(super) fn moves_beside(kind: TransportKind) -> bool {
    transport::caps(kind).is_some_and(|caps| caps.moves_beside)
}
