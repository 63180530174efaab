//! Predicted times of the schedules of an all_reduce on a machine.

use super::assumed;
use super::bound::bound;
use super::flows::{LinkTime, Loads};
use super::graph::MachineGraph;
use super::groups::{self, Partition};
use super::hierarchy::{self, Hierarchy, LevelExchange, best_of_two_levels};
use super::paths::Paths;
use super::rings::{self, RingOrder, RingSet};
use crate::schedule::GroupUnit;

/// Predictions for a message that is large enough that the fullest link decides.
#[derive(Clone, Debug)]
pub struct AllReducePrediction {
    /// Time of the ring in the order of ranks.
    pub ring_by_rank: LinkTime,
    /// The fastest single ring, and its time.
    pub best_ring: (RingOrder, LinkTime),
    /// The fastest set of rings that share the message.
    pub ring_set: RingSet,
    /// Time of the direct all_reduce (two-shot) between all GPUs.
    pub direct: LinkTime,
    /// The best schedule on nested groups; `None` if the machine has no groups.
    pub hierarchy: Option<Hierarchy>,
    /// The best schedule on nested groups whose exchanges are all direct, as for lossy codecs, which a ring would
    /// round at every hop.
    pub direct_hierarchy: Option<Hierarchy>,
    /// Groups behind the nearest way out: NVLink islands or PCIe switches, whichever leave no GPU alone and make the faster
    /// schedule on two levels, else sockets. All GPUs are one group if nothing divides them.
    pub groups: Vec<Vec<usize>>,
    /// Partitions into groups that the machine suggests, smallest groups first.
    pub partitions: Vec<Partition>,
    /// A time that no schedule can beat.
    pub bound: LinkTime,
}

impl AllReducePrediction {
    /// Returns the least time of all predicted schedules.
    pub fn best(&self) -> LinkTime {
        let flat = self.best_ring.1.min(self.ring_set.time).min(self.direct);
        self.hierarchy
            .as_ref()
            .map_or(flat, |hierarchy| flat.min(hierarchy.time))
    }

    /// Returns the least time of the schedules whose exchanges are all direct. A lossy codec rounds a sum
    /// there at most once per level of groups.
    pub fn best_direct(&self) -> LinkTime {
        let nested = self.direct_hierarchy.as_ref();
        nested.map_or(self.direct, |nested| self.direct.min(nested.time))
    }
}

/// Predicts the times of an all_reduce over all GPUs of `graph`. Links of unknown speed slow nothing down.
pub fn predict(graph: &MachineGraph, paths: &Paths) -> AllReducePrediction {
    let graph = &assumed::lifted_for_times(graph);
    let partitions = groups::partitions(graph, paths);
    let by_rank = graph.by_rank();
    let sets: Vec<Vec<Vec<usize>>> = partitions.iter().map(|p| p.groups.clone()).collect();
    let best_ring = rings::best_ring(graph, paths);
    let exchanges = [LevelExchange::Direct, LevelExchange::Ring];
    AllReducePrediction {
        ring_by_rank: Loads::ring(graph, paths, &by_rank).time(graph),
        ring_set: rings::best_set(graph, paths, &best_ring),
        best_ring,
        direct: Loads::direct(graph, paths).time(graph),
        hierarchy: hierarchy::best(graph, paths, &partitions, &exchanges),
        direct_hierarchy: hierarchy::best(graph, paths, &partitions, &exchanges[..1]),
        groups: nearest(graph, paths, &partitions),
        bound: bound(graph, paths, &sets),
        partitions,
    }
}

/// Returns [`AllReducePrediction::groups`]. A GPU alone has no way out to share: between groups of which one is a single GPU,
/// a ring is nearly a ring of all GPUs, and as fast. So partitions without single GPUs come first. If islands and switches
/// are equally fast, islands win.
fn nearest(graph: &MachineGraph, paths: &Paths, partitions: &[Partition]) -> Vec<Vec<usize>> {
    let is_island = |partition: &&Partition| partition.unit == GroupUnit::NvlinkIsland;
    let islands = partitions.iter().find(is_island);
    let others = partitions.iter().find(|partition| !is_island(partition));
    let order = |partition: &&Partition| {
        let leaves_one_alone = partition.groups.iter().any(|group| group.len() < 2);
        let time = best_of_two_levels(graph, paths, partition).time;
        (leaves_one_alone, time)
    };
    let best = match (islands, others) {
        (Some(islands), Some(others)) => [islands, others].into_iter().min_by_key(order),
        (one, other) => one.or(other),
    };
    best.map_or_else(
        || vec![graph.by_rank()],
        |partition| partition.groups.clone(),
    )
}
