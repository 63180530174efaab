//! Defines a candidate for a request: algorithm, kernel, and division of the message into chunks,
//! with the predicted time.

use super::Geometry;
use crate::schedule::{CostCounts, Hops};
use crate::types::{Algorithm, KernelProtocol};

/// The rings of each channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChannelRings {
    /// As many rings, all in the order of the topology's best ring.
    OneOrder(usize),
    /// The topology's set of rings that has as many pairs of rings, each pair in an order of its own.
    Set {
        /// Number of pairs; the two rings of a pair run in opposite directions.
        pairs: usize,
    },
}

impl ChannelRings {
    /// A single ring.
    pub const ONE: ChannelRings = ChannelRings::OneOrder(1);

    /// Returns the number of rings.
    pub const fn count(self) -> usize {
        match self {
            ChannelRings::OneOrder(rings) => rings,
            ChannelRings::Set { pairs } => 2 * pairs,
        }
    }
}

/// Algorithm, kernel, and division of the message into chunks that can run a request, with their
/// predicted time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Algorithm that generates the schedule, or that the fused kernel implements.
    pub algorithm: Algorithm,
    /// Algorithm between hosts of a hierarchical schedule; flat algorithms ignore it.
    pub between: Algorithm,
    /// Rings of each channel of a ring; [`ChannelRings::ONE`] for other algorithms.
    pub rings: ChannelRings,
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
    /// number of rings per channel, if there is one. A ring set has rings in several orders.
    pub fn name(&self) -> String {
        match self.algorithm {
            Algorithm::Hierarchical => format!("{}/{}", self.algorithm, self.between),
            Algorithm::Ring => match self.rings {
                ChannelRings::ONE => self.algorithm.name().into(),
                ChannelRings::OneOrder(rings) => format!("{}/{rings}", self.algorithm),
                ChannelRings::Set { pairs } => format!("{}-set/{}", self.algorithm, 2 * pairs),
            },
            flat => flat.name().into(),
        }
    }
}
