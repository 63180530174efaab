//! Schedules on nested groups. Data is reduce-scattered inside the innermost groups and then between groups
//! along rails, and all-gathered in the reverse order. A rail connects one GPU of each group.

use super::cuts::Cuts;
use super::flows::{Bottleneck, LinkTime, Loads};
use super::graph::MachineGraph;
use super::groups::Partition;
use super::paths::Paths;
use super::rings::next_permutation;

/// How the members of a group, which are GPUs or smaller groups, exchange their parts of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LevelExchange {
    /// Each member sends every other member the part that the other member owns.
    Direct,
    /// Parts travel around a ring, half of the data in each direction.
    Ring,
}

/// Largest number of members whose ring orders are all compared.
const ENUMERATED: usize = 7;

/// A schedule on nested groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Partitions into groups, innermost first. The GPU at place p of each innermost group is on rail p. In a
    /// group with fewer GPUs than rails, rail r is at place r modulo the size of the group.
    pub partitions: Vec<Partition>,
    /// Exchanges from the innermost level to the outermost: inside the innermost groups, then between the
    /// groups of each partition.
    pub exchanges: Vec<LevelExchange>,
    /// Time that the fullest link or pool needs for an all_reduce with this schedule.
    pub time: LinkTime,
}

/// Returns the fastest schedule on any chain of nested `partitions`; `None` if there is none. If several are
/// equally fast, fewer levels win, then direct exchanges.
pub fn best(
    graph: &MachineGraph,
    paths: &Paths,
    partitions: &[Partition],
    allowed: &[LevelExchange],
) -> Option<Hierarchy> {
    let mut best: Option<Hierarchy> = None;
    let mut chains = chains(partitions);
    chains.sort_by_key(Vec::len);
    for chain in chains {
        let levels = chain.len() + 1;
        for code in 0..allowed.len().pow(levels as u32) {
            let exchange =
                |level: usize| allowed[code / allowed.len().pow(level as u32) % allowed.len()];
            let exchanges: Vec<LevelExchange> = (0..levels).map(exchange).collect();
            let partitions = chain.iter().map(|&at| partitions[at].clone()).collect();
            let mut next = Hierarchy {
                partitions,
                exchanges,
                time: LinkTime::ZERO,
            };
            next.time = next.loads(graph, paths).time(graph);
            if best.as_ref().is_none_or(|best| next.time < best.time) {
                best = Some(next);
            }
        }
    }
    best.map(|best| best.with_better_rails(graph, paths))
}

/// Returns the fastest schedule on two levels that is direct inside the groups of `partition`, as the engines run it.
pub(super) fn best_of_two_levels(
    graph: &MachineGraph,
    paths: &Paths,
    partition: &Partition,
) -> Hierarchy {
    let of = |between: LevelExchange| {
        let mut hierarchy = Hierarchy {
            partitions: vec![partition.clone()],
            exchanges: vec![LevelExchange::Direct, between],
            time: LinkTime::ZERO,
        };
        hierarchy.time = hierarchy.loads(graph, paths).time(graph);
        hierarchy.with_better_rails(graph, paths)
    };
    let [direct, ring] = [LevelExchange::Direct, LevelExchange::Ring].map(of);
    if ring.time < direct.time {
        ring
    } else {
        direct
    }
}

/// Returns all chains of one to three nested partitions, as indices, innermost first.
fn chains(partitions: &[Partition]) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = (0..partitions.len()).map(|at| vec![at]).collect();
    let mut at = 0;
    while at < all.len() {
        let chain = all[at].clone();
        at += 1;
        if chain.len() == 3 {
            continue;
        }
        for next in 0..partitions.len() {
            if partitions[chain[chain.len() - 1]].refines(&partitions[next]) {
                all.push(chain.iter().copied().chain([next]).collect());
            }
        }
    }
    all
}

/// The GPUs of a group, and for each part of the message the GPU that owns it after the reduce-scatters
/// inside the group.
struct OwnerGroup {
    gpus: Vec<usize>,
    owners: Vec<usize>,
}

impl Hierarchy {
    /// Returns the loads of all links.
    pub fn loads(&self, graph: &MachineGraph, paths: &Paths) -> Loads {
        self.loads_and_owned(graph, paths, 1).0
    }

    /// Returns the loads of all links, and for each GPU the number of units whose sums the GPU owns. These
    /// numbers are multiples of `divisor`.
    pub fn loads_and_owned(
        &self,
        graph: &MachineGraph,
        paths: &Paths,
        divisor: u64,
    ) -> (Loads, Vec<u64>) {
        let parts = self.parts(graph.gpus.len());
        // A ring carries half of the data each way.
        let whole = 2 * divisor * parts.iter().product::<usize>() as u64;
        let mut loads = Loads::new(graph, whole);
        let mut groups: Vec<OwnerGroup> = (0..graph.gpus.len())
            .map(|gpu| OwnerGroup {
                gpus: vec![gpu],
                owners: vec![gpu],
            })
            .collect();
        // Number of units in a part of the message; the exchange of each level divides parts further.
        let mut units = loads.whole();
        for (level, &parts) in parts.iter().enumerate() {
            units /= parts as u64;
            let around = self.members(level, &mut groups);
            groups = around
                .into_iter()
                .map(|members| {
                    self.exchange(graph, paths, level, &members, (parts, units), &mut loads);
                    merge(members, parts)
                })
                .collect();
            loads.end_phase();
        }
        let mut owned = vec![0; graph.gpus.len()];
        for &owner in groups.iter().flat_map(|group| &group.owners) {
            owned[owner] += units;
        }
        (loads, owned)
    }

    /// Returns for each level the number of pieces into which its exchange divides a part. This is the
    /// largest number of members that a group of the level has.
    fn parts(&self, gpus: usize) -> Vec<usize> {
        let mut inner = gpus;
        let mut parts = Vec::new();
        for partition in &self.partitions {
            let most = partition.groups.iter().map(Vec::len).max().unwrap_or(1);
            let members = match parts.is_empty() {
                true => most,
                false => self.most_members(parts.len()),
            };
            parts.push(members);
            inner = partition.groups.len();
        }
        parts.push(inner);
        parts
    }

    /// Returns the largest number of groups of level `level - 1` inside one group of level `level`.
    fn most_members(&self, level: usize) -> usize {
        let inner = &self.partitions[level - 1].groups;
        let inside = |around: &Vec<usize>| {
            inner
                .iter()
                .filter(|group| around.contains(&group[0]))
                .count()
        };
        self.partitions[level]
            .groups
            .iter()
            .map(inside)
            .max()
            .unwrap_or(1)
    }

    /// Divides the groups of the level below among the groups of `level`, in the order of the partition.
    fn members(&self, level: usize, groups: &mut Vec<OwnerGroup>) -> Vec<Vec<OwnerGroup>> {
        let Some(partition) = self.partitions.get(level) else {
            return vec![std::mem::take(groups)];
        };
        let mut rest: Vec<Option<OwnerGroup>> =
            std::mem::take(groups).into_iter().map(Some).collect();
        let mut take = |around: &Vec<usize>| -> Vec<OwnerGroup> {
            let place = |group: &OwnerGroup| around.iter().position(|gpu| *gpu == group.gpus[0]);
            let mut found: Vec<(usize, OwnerGroup)> = rest
                .iter_mut()
                .filter_map(|slot| {
                    let at = slot.as_ref().and_then(place)?;
                    Some((at, slot.take()?))
                })
                .collect();
            found.sort_by_key(|(at, _)| *at);
            found.into_iter().map(|(_, group)| group).collect()
        };
        partition.groups.iter().map(&mut take).collect()
    }

    /// Adds the exchange between `members` to `loads`. The share of the message that each rail carries is
    /// divided into `parts` pieces of `units` units.
    fn exchange(
        &self,
        graph: &MachineGraph,
        paths: &Paths,
        level: usize,
        members: &[OwnerGroup],
        (parts, units): (usize, u64),
        loads: &mut Loads,
    ) {
        if members.len() < 2 {
            return;
        }
        let order: Vec<usize> = (0..members.len()).collect();
        match self.exchanges[level] {
            LevelExchange::Direct => direct(paths, members, parts, units, loads),
            LevelExchange::Ring => {
                let time = |order: &[usize]| {
                    let mut alone = Loads::new(graph, loads.whole());
                    ring(paths, members, order, (parts, units), &mut alone);
                    alone.time(graph)
                };
                let order = best_order(order, time);
                ring(paths, members, &order, (parts, units), loads);
            }
        }
    }

    /// Returns whether it is certain that no places of GPUs inside the groups are faster. The fullest link then divides
    /// whole groups from others, or members of one group from all other GPUs. In a schedule on groups of equal size each
    /// GPU has one rail and exchanges as many bytes as any other, so the link carries as many bytes with any places.
    fn has_best_rails(&self, graph: &MachineGraph, paths: &Paths) -> bool {
        let [Partition { groups, .. }] = &self.partitions[..] else {
            return false;
        };
        let [LevelExchange::Direct, between] = self.exchanges[..] else {
            return false;
        };
        // The order of a ring may depend on places. Three groups have one order.
        let has_one_order = between == LevelExchange::Direct || groups.len() < 4;
        let is_even = groups.iter().all(|group| group.len() == groups[0].len());
        if !has_one_order || !is_even || !graph.fans.is_empty() {
            return false;
        }
        let Some((_, Bottleneck::Link(link))) = self.loads(graph, paths).fullest(graph) else {
            return false;
        };
        let Some(before) = Cuts::new(graph, paths).before(link) else {
            return false;
        };
        let groups: Option<Vec<u128>> = groups.iter().map(|group| bits(group)).collect();
        groups.is_some_and(|groups| {
            let is_whole = |&group: &u128| before & group == 0 || before & group == group;
            groups.iter().all(is_whole) || groups.iter().any(|group| before & !group == 0)
        })
    }

    /// Swaps the places of GPUs inside the innermost groups while that makes the schedule faster.
    fn with_better_rails(mut self, graph: &MachineGraph, paths: &Paths) -> Hierarchy {
        loop {
            if self.has_best_rails(graph, paths) {
                return self;
            }
            let mut better = None;
            for group in 1..self.partitions[0].groups.len() {
                let size = self.partitions[0].groups[group].len();
                for (a, b) in (0..size).flat_map(|a| (a + 1..size).map(move |b| (a, b))) {
                    let mut next = self.clone();
                    next.partitions[0].groups[group].swap(a, b);
                    next.time = next.loads(graph, paths).time(graph);
                    if next.time < better.as_ref().map_or(self.time, |b: &Hierarchy| b.time) {
                        better = Some(next);
                    }
                }
            }
            match better {
                Some(next) => self = next,
                None => return self,
            }
        }
    }
}

/// Returns the bits of `gpus`; `None` if a GPU has a number beyond all bits.
fn bits(gpus: &[usize]) -> Option<u128> {
    let mut bits = gpus.iter().map(|&gpu| 1u128.checked_shl(gpu as u32));
    bits.try_fold(0, |all, bit| Some(all | bit?))
}

/// Returns how many of `parts` parts each of `members` members owns.
fn shares(parts: usize, members: usize) -> Vec<u64> {
    (0..members)
        .map(|at| (parts / members + usize::from(at < parts % members)) as u64)
        .collect()
}

fn direct(paths: &Paths, members: &[OwnerGroup], parts: usize, units: u64, loads: &mut Loads) {
    let shares = shares(parts, members.len());
    for rail in 0..members[0].owners.len() {
        for (a, from) in members.iter().enumerate() {
            for (b, to) in members.iter().enumerate().filter(|(b, _)| *b != a) {
                let both = shares[a] + shares[b];
                loads.send(paths, from.owners[rail], to.owners[rail], both * units);
            }
        }
    }
}

fn ring(
    paths: &Paths,
    members: &[OwnerGroup],
    order: &[usize],
    (parts, units): (usize, u64),
    loads: &mut Loads,
) {
    let shares = shares(parts, members.len());
    for rail in 0..members[0].owners.len() {
        for (at, &a) in order.iter().enumerate() {
            let b = order[(at + 1) % order.len()];
            // As a partial sum, a part crosses all edges of the ring but the edge out of its owner. As a
            // result, the part crosses all edges but the edge into its owner.
            let each_way = (2 * parts as u64 - shares[a] - shares[b]) * units / 2;
            let [a, b] = [a, b].map(|member| members[member].owners[rail]);
            loads.send(paths, a, b, each_way);
            loads.send(paths, b, a, each_way);
        }
    }
}

/// Returns the fastest order of a ring; if several are equally fast, the first in lexicographic order.
/// Returns `first` if it has fewer than 4 or more than [`ENUMERATED`] members.
fn best_order(first: Vec<usize>, time: impl Fn(&[usize]) -> LinkTime) -> Vec<usize> {
    if !(4..=ENUMERATED).contains(&first.len()) {
        return first;
    }
    let mut best = (time(&first), first.clone());
    let mut next = first;
    while next_permutation(&mut next[1..]) {
        if next[1] < next[next.len() - 1] {
            let time = time(&next);
            if time < best.0 {
                best = (time, next.clone());
            }
        }
    }
    best.1
}

/// Joins the members of a group. On each rail, part q belongs to member q modulo the number of members.
fn merge(members: Vec<OwnerGroup>, parts: usize) -> OwnerGroup {
    let rails = members[0].owners.len();
    let owners = (0..rails * parts)
        .map(|at| members[at % parts % members.len()].owners[at / parts])
        .collect();
    OwnerGroup {
        gpus: members
            .iter()
            .flat_map(|member| member.gpus.iter().copied())
            .collect(),
        owners,
    }
}
