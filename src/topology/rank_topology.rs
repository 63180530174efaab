//! The topology of a communicator's ranks on one host, as the planner needs it.

use super::assumed;
use super::flows::Loads;
use super::graph::{LinkId, MachineGraph, NodeKind};
use super::groups;
use super::hierarchy::{Hierarchy, best_of_two_levels};
use super::paths::{Paths, PeerAccess};
use super::rings;
use super::whole_rings::whole_rings;
use crate::error::{Error, Result};
use crate::schedule::{Groups, RankOrder, RingOrders};
use crate::types::short_digest;
use std::fmt;

/// Ring order, groups, and links between the ranks of a communicator. All ranks have the same topology, and
/// compare its fingerprint.
#[derive(Clone, PartialEq, Eq)]
pub struct RankTopology {
    /// Graph whose GPUs are those of the ranks, in the order of ranks.
    graph: MachineGraph,
    paths: Paths,
    /// Order of the best ring.
    order: RankOrder,
    /// Orders of sets of rings, each faster than the best ring and than the sets before it.
    ring_sets: Vec<RingOrders>,
    groups: Groups,
    /// Factor by which messages take longer than the bandwidths of the graph allow; 1 on a real machine.
    slowdown: u32,
}

impl RankTopology {
    /// Creates the topology of ranks whose GPUs have the indices `gpus` in [`MachineGraph::gpus`].
    ///
    /// # Errors
    /// Invalid argument if an index does not exist, or occurs twice.
    pub fn new(graph: &MachineGraph, gpus: &[usize], access: &PeerAccess) -> Result<RankTopology> {
        let machine = graph;
        let graph = of_ranks(machine, gpus)?;
        let paths = Paths::new(&graph, access);
        let best = rings::best_ring(&graph, &paths);
        let orders = |rings: Vec<rings::RingOrder>| -> Result<RingOrders> {
            let orders = rings.iter().map(|ring| RankOrder::of_ring(ring));
            Ok(RingOrders::of_pairs(orders.collect::<Result<_>>()?))
        };
        let ring_sets = whole_rings(&graph, &paths, &best).into_iter().map(orders);
        Ok(RankTopology {
            order: RankOrder::of_ring(&best.0)?,
            ring_sets: ring_sets.collect::<Result<_>>()?,
            groups: groups_of_ranks(machine, gpus, access)?,
            graph,
            paths,
            slowdown: 1,
        })
    }

    /// Returns the topology of ranks on emulated links, on which messages take `factor` times as long. Rings and groups
    /// stay those of the machine: bandwidths in MB/s that were divided instead would be equal from some factor on.
    pub fn slowed_down(self, factor: u32) -> RankTopology {
        RankTopology {
            slowdown: factor,
            ..self
        }
    }

    /// Returns the order of the best ring, which is the order of ranks if no other ring is faster.
    pub fn order(&self) -> &RankOrder {
        &self.order
    }

    /// Returns the orders of sets of rings that are faster than the best ring, the fastest and largest set last. Empty if
    /// one ring is as fast as any set.
    pub fn ring_sets(&self) -> &[RingOrders] {
        &self.ring_sets
    }

    /// Returns the groups of ranks; the GPUs of a group share one way out to other GPUs. The rank at place p
    /// of each group is on rail p.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Returns the seconds that the fullest link or pool needs for messages between ranks. A phase lists the
    /// messages `(from, to, bytes)` that ranks send at one time. A fan slows down only phases whose messages
    /// reach its numbers of GPUs and root ports.
    pub fn seconds<Messages>(&self, phases: impl IntoIterator<Item = Messages>) -> f64
    where
        Messages: IntoIterator<Item = (usize, usize, u64)>,
    {
        // Loads are counted in bytes: the nominal message has one unit, which is one byte.
        let mut loads = Loads::new(&self.graph, 1);
        for phase in phases {
            for (from, to, bytes) in phase {
                loads.send(&self.paths, from, to, bytes);
            }
            loads.end_phase();
        }
        loads.time(&self.graph).milliseconds(1) * 1e-3 * f64::from(self.slowdown)
    }

    /// Returns the ranks of each group.
    fn members(&self) -> Vec<&[u32]> {
        (0..self.groups.count())
            .map(|group| self.groups.ranks(group))
            .collect()
    }

    /// Returns a fingerprint of all facts that affect the choice of algorithms, as 16 hexadecimal digits.
    pub fn fingerprint(&self) -> String {
        let graph = &self.graph;
        let links: Vec<u32> = graph.links.iter().map(|link| link.bandwidth.mb_s).collect();
        let ranks = self.paths.count();
        let paths: Vec<&[LinkId]> = (0..ranks * ranks)
            .map(|at| self.paths.get(at / ranks, at % ranks).links.as_slice())
            .collect();
        let limits = (links, paths, &graph.pools, &graph.fans);
        let mut text = format!(
            "{:?}",
            (limits, &self.order, &self.ring_sets, self.members())
        );
        if self.slowdown != 1 {
            text += &format!(" / {}", self.slowdown);
        }
        short_digest(text)
    }
}

impl fmt::Display for RankTopology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.groups.count() {
            1 => write!(f, "{} ranks beside each other", self.paths.count()),
            _ => write!(f, "{}", self.groups),
        }
    }
}

impl fmt::Debug for RankTopology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "RankTopology({self}, {:?}, groups {:?})",
            self.order,
            self.members()
        )
    }
}

/// Returns the groups of ranks. Groups and their ranks have the order of the machine's GPUs, however ranks are dealt to
/// them: a ring between groups then goes from neighbour to neighbour, and rails lead to GPUs at the same place.
fn groups_of_ranks(graph: &MachineGraph, gpus: &[usize], access: &PeerAccess) -> Result<Groups> {
    let mut ranks: Vec<usize> = (0..gpus.len()).collect();
    ranks.sort_by_key(|&rank| gpus[rank]);
    let in_order: Vec<usize> = ranks.iter().map(|&rank| gpus[rank]).collect();
    let graph = of_ranks(graph, &in_order)?;
    let access = match access {
        PeerAccess::Pairs(pairs) => {
            let row = |from: usize| ranks.iter().map(move |&to| (from, to));
            let pair = |(from, to): (usize, usize)| pairs[from * gpus.len() + to];
            PeerAccess::Pairs(ranks.iter().flat_map(|&from| row(from)).map(pair).collect())
        }
        other => other.clone(),
    };
    let paths = Paths::new(&graph, &access);
    let Some(best) = best_groups(&graph, &paths) else {
        return Ok(Groups::ONE);
    };
    let partition = &best.partitions[0];
    let members = partition.groups.iter().map(|group| {
        let of_group = group.iter().map(|&gpu| ranks[gpu]);
        of_group.collect::<Vec<usize>>()
    });
    Groups::of_members(partition.unit, &members.collect::<Vec<_>>())
}

/// Returns the graph with only the GPUs of ranks, in the order of ranks. Links of unknown speed get unlimited
/// bandwidth, so that no choice depends on an assumed figure.
fn of_ranks(graph: &MachineGraph, gpus: &[usize]) -> Result<MachineGraph> {
    let mut graph = graph.clone();
    assumed::lift_all(&mut graph);
    let all = std::mem::take(&mut graph.gpus);
    for gpu in &all {
        // A GPU that no rank uses takes no part in any schedule. Its node becomes a switch until a rank
        // claims it.
        graph.nodes[gpu.node].kind = NodeKind::Switch;
    }
    for (rank, &index) in gpus.iter().enumerate() {
        let missing = || Error::invalid_argument(format!("rank {rank} has no GPU in the topology"));
        let mut gpu = *all.get(index).ok_or_else(missing)?;
        if gpus[..rank].contains(&index) {
            let text = format!("two ranks use GPU {} of the topology", gpu.bus_id);
            return Err(Error::invalid_argument(text));
        }
        gpu.rank = Some(rank as u32);
        graph.nodes[gpu.node].kind = NodeKind::Gpu(rank);
        graph.gpus.push(gpu);
    }
    Ok(graph)
}

/// Returns the fastest schedule on two levels that is direct inside groups, as the engines run it.
fn best_groups(graph: &MachineGraph, paths: &Paths) -> Option<Hierarchy> {
    let partitions = groups::partitions(graph, paths);
    // If several are equally fast, the first wins, which has the smallest groups.
    let all = partitions
        .iter()
        .map(|partition| best_of_two_levels(graph, paths, partition));
    all.reduce(|best, next| if next.time < best.time { next } else { best })
}
