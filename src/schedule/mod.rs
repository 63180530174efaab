//! Schedules are data: the steps of every rank, chunk by chunk, in one pass.
//!
//! The host interpreter, the GPU interpreter, the proxy and the verifier all walk a schedule with [`walk`],
//! so their step counts and order cannot differ. [`SchedulePattern`] alone defines chunks: how many a pass
//! has, their places in the buffers, and the ranks that contribute to them. Each algorithm has a file with
//! its generators; [`verify()`] proves that their schedules are right.

mod chunks;
mod cost;
mod direct;
mod encodes;
mod fan;
mod flat_tree;
mod generate;
mod generator;
mod groups;
mod hierarchical;
mod ir;
mod oneshot;
mod rank_order;
mod ring;
mod ring_count;
mod ring_orders;
mod tree;
mod verify;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod hierarchical_tests;
#[cfg(test)]
mod way_out_tests;

pub use chunks::{ChunkPlace, SchedulePattern};
pub use cost::{CostCounts, Hops, cost_counts};
pub use encodes::encoded_contributions;
pub use generate::generate;
pub use groups::{GroupUnit, Groups};
pub use ir::{MAX_FAN, Op, Own, Schedule, Step, StepPeers, Visit, Walk, WalkCursor, walk};
pub use rank_order::RankOrder;
pub use ring_count::{directions, has_several_rings, ring_steps};
pub use ring_orders::RingOrders;
pub use verify::{Proof, VerifyLimits, verify};

use crate::types::{Algorithm, Collective};
use generator::{FlatAlgorithms, Generator};

/// The generators of all algorithms, in the order of [`Algorithm`].
const TABLE: [Generator; Algorithm::ALL.len()] = [
    ring::GENERATOR,
    tree::GENERATOR,
    oneshot::GENERATOR,
    direct::GENERATOR,
    hierarchical::GENERATOR,
    flat_tree::GENERATOR,
];

static GENERATORS: [Generator; TABLE.len()] = TABLE;

static FLAT_ALGORITHMS: [FlatAlgorithms; Collective::ALL.len()] = FlatAlgorithms::of_all(&TABLE);

fn generator_of(algorithm: Algorithm) -> &'static Generator {
    &GENERATORS[algorithm as usize]
}

/// Returns the flat (not hierarchical) algorithms of a collective, in numeric order.
/// [`SchedulePattern::between_groups`] lists the algorithms that a hierarchical schedule may use between
/// groups.
pub fn algorithms(collective: Collective) -> &'static [Algorithm] {
    FLAT_ALGORITHMS[collective as usize].as_slice()
}
