//! Groups of GPUs that share one way out to other GPUs: an NVLink island, a PCIe switch, a root port, or a
//! socket.

use super::graph::{BandwidthOrigin, GraphLink, LinkKind, MachineGraph, NodeKind};
use super::paths::{PathType, Paths};
use crate::schedule::GroupUnit;
use std::collections::BTreeMap;

/// A partition of the GPUs into groups. GPUs are indices in [`MachineGraph::gpus`], in this order, and groups are
/// in the order of their first GPU, however ranks are dealt to GPUs: so engines plan groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Resource that the members of a group share.
    pub unit: GroupUnit,
    /// GPUs of each group.
    pub groups: Vec<Vec<usize>>,
}

impl Partition {
    fn new<K: Ord>(unit: GroupUnit, graph: &MachineGraph, key: impl Fn(usize) -> K) -> Partition {
        let mut numbers = BTreeMap::new();
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for gpu in 0..graph.gpus.len() {
            let number = *numbers.entry(key(gpu)).or_insert_with(|| {
                groups.push(Vec::new());
                groups.len() - 1
            });
            groups[number].push(gpu);
        }
        Partition { unit, groups }
    }

    /// Returns whether each group of `self` lies inside one group of `other`, and the partitions differ.
    pub fn refines(&self, other: &Partition) -> bool {
        let inside = |group: &Vec<usize>| {
            other
                .groups
                .iter()
                .any(|around| group.iter().all(|gpu| around.contains(gpu)))
        };
        self.groups.len() > other.groups.len() && self.groups.iter().all(inside)
    }

    /// Returns whether there are several groups, and at least one group has several GPUs.
    fn is_useful(&self) -> bool {
        self.groups.len() > 1 && self.groups.iter().any(|group| group.len() > 1)
    }
}

/// Returns the partitions that the machine suggests, finest first. There are none if NVLink connects every
/// pair of GPUs, directly or through a link switch, or if nothing is known of the machine. A link of unknown speed divides
/// nothing.
pub fn partitions(graph: &MachineGraph, paths: &Paths) -> Vec<Partition> {
    let n = graph.gpus.len();
    let reaches = |a: usize, b: usize| {
        let path = paths.get(a, b);
        path.class == PathType::Nvl && path.peer_access
    };
    // Without peer access data leaves NVLink alone.
    let linked = |a: usize, b: usize| a == b || reaches(a, b) && reaches(b, a);
    if n < 2 || (0..n).all(|a| (0..n).all(|b| linked(a, b))) {
        return Vec::new();
    }
    let node = |gpu: usize| graph.gpus[gpu].node;
    let known = switches_of_known_speed(graph);
    let switches = |gpu: usize| graph.ancestors(node(gpu)).filter(|&above| known[above]);
    let mut all = vec![
        Partition::new(GroupUnit::NvlinkIsland, graph, island_of(graph, &linked)),
        Partition::new(GroupUnit::Switch, graph, |gpu| {
            switches(gpu).next().unwrap_or(node(gpu))
        }),
        Partition::new(GroupUnit::RootPort, graph, |gpu| {
            switches(gpu).last().unwrap_or(node(gpu))
        }),
    ];
    let between = graph
        .links
        .iter()
        .filter(|link| link.class == LinkKind::Socket);
    if between.clone().all(is_known) {
        all.push(Partition::new(GroupUnit::Socket, graph, |gpu| {
            graph.ancestors(node(gpu)).last()
        }));
    }
    all.retain(Partition::is_useful);
    all.sort_by_key(|partition| std::cmp::Reverse(partition.groups.len()));
    let mut distinct: Vec<Partition> = Vec::new();
    for partition in all {
        if distinct
            .iter()
            .all(|known| known.groups != partition.groups)
        {
            distinct.push(partition);
        }
    }
    distinct
}

fn is_known(link: &GraphLink) -> bool {
    link.bandwidth.origin > BandwidthOrigin::Assumed
}

/// Returns for each node whether it is a switch whose way out has a known speed.
fn switches_of_known_speed(graph: &MachineGraph) -> Vec<bool> {
    let mut known = vec![false; graph.nodes.len()];
    for link in &graph.links {
        let is_up = graph.nodes[link.from].parent == Some(link.to) && link.class == LinkKind::Pcie;
        let is_switch = graph.nodes[link.from].kind == NodeKind::Switch;
        known[link.from] |= is_up && is_switch && is_known(link);
    }
    known
}

/// Returns a function that maps a GPU to the lowest-numbered GPU that it reaches over NVLinks, directly or
/// through other GPUs.
fn island_of(
    graph: &MachineGraph,
    linked: &dyn Fn(usize, usize) -> bool,
) -> impl Fn(usize) -> usize {
    let n = graph.gpus.len();
    let mut lowest: Vec<usize> = (0..n).collect();
    loop {
        let mut changed = false;
        for a in 0..n {
            for b in (0..n).filter(|&b| linked(a, b)) {
                changed |= lowest[b] < lowest[a];
                lowest[a] = lowest[a].min(lowest[b]);
            }
        }
        if !changed {
            return move |gpu| lowest[gpu];
        }
    }
}
