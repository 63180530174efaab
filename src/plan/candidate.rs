//! A candidate: algorithm, kernel and cut for a request, with their predicted time.

use super::Geometry;
use crate::schedule::{CostCounts, Hops};
use crate::types::{Algorithm, KernelProtocol};

/// Algorithm, kernel and cut that can run a request, with their predicted time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Algorithm between hosts of a hierarchical schedule; unused by others.
    pub between: Algorithm,
    /// Rings per channel of a ring; 1 for other algorithms.
    pub rings: usize,
    /// Chunks and passes of the message.
    pub geometry: Geometry,
    /// Channels that have at least one pass.
    pub channels: usize,
    /// Steps of one pass of the busiest rank.
    pub counts: CostCounts,
    /// Messages that depend on one another in a pass.
    pub hops: Hops,
    /// Predicted seconds.
    pub seconds: f64,
    /// The kernel and its protocol.
    pub kernel: KernelProtocol,
}

impl Candidate {
    /// Returns the algorithm's name for tables: with the algorithm between hosts, or the number of
    /// rings per channel.
    pub fn name(&self) -> String {
        match self.algorithm {
            Algorithm::Hierarchical => format!("{}/{}", self.algorithm, self.between),
            Algorithm::Ring if self.rings > 1 => format!("{}/{}", self.algorithm, self.rings),
            flat => flat.name().into(),
        }
    }
}
