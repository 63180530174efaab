//! Predicted times of the schedules of an all_reduce on a machine.

use super::assumed;
use super::bound::bound;
use super::flows::{LinkTime, Loads};
use super::graph::MachineGraph;
use super::groups::{self, Partition};
use super::hierarchy::{self, Hierarchy, LevelExchange};
use super::paths::Paths;
use super::rings::{self, RingOrder, RingSet};

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
    /// Groups behind the nearest way out.
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
        groups: groups::nearest(graph, &partitions),
        bound: bound(graph, paths, &sets),
        partitions,
    }
}
