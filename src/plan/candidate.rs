//! Defines a candidate for a request: algorithm, kernel, and division of the message into chunks,
//! with the predicted time.

use super::Geometry;
use crate::schedule::{CostCounts, Hops};
use crate::types::{Algorithm, KernelProtocol};

/// Algorithm, kernel, and division of the message into chunks that can run a request, with their
/// predicted time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Algorithm that generates the schedule, or that the fused kernel implements.
    pub algorithm: Algorithm,
    /// Algorithm between hosts of a hierarchical schedule; flat algorithms ignore it.
    pub between: Algorithm,
    /// Rings per channel of a ring; 1 for other algorithms.
    pub rings: usize,
    /// Chunks and passes of the message.
    pub geometry: Geometry,
    /// Channels that have at least one pass.
    pub channels: usize,
    /// Work of the busiest rank in one pass.
    pub counts: CostCounts,
    /// Longest chain of messages in a pass, each of which waits for the message before it.
    pub hops: Hops,
    /// Predicted duration of the call in seconds. The planner selects the candidate with the
    /// smallest.
    pub seconds: f64,
    /// Kind of GPU kernel, and the protocol of its messages; [`KernelProtocol::SIMPLE`] on host
    /// memory.
    pub kernel: KernelProtocol,
}

impl Candidate {
    /// Returns the algorithm's name for tables. It includes the algorithm between hosts, or the
    /// number of rings per channel, if there is one.
    pub fn name(&self) -> String {
        match self.algorithm {
            Algorithm::Hierarchical => format!("{}/{}", self.algorithm, self.between),
            Algorithm::Ring if self.rings > 1 => format!("{}/{}", self.algorithm, self.rings),
            flat => flat.name().into(),
        }
    }
}
