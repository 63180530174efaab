//! The best ring through all GPUs, and the best set of rings that share the message.

use super::cuts::Cuts;
use super::flows::{LinkTime, Loads};
use super::graph::{LinkId, MachineGraph};
use super::limits::FanFlows;
use super::packing::pack;
use super::paths::Paths;
use std::collections::BTreeMap;

/// Largest number of GPUs whose rings are all compared.
const ENUMERATED: usize = 8;

/// Number of partial rings after which a search stops with the best ring so far. A search of at most
/// [`ENUMERATED`] GPUs ends earlier.
const SEARCH_STEPS: usize = 200_000;

/// A ring: indices in [`MachineGraph::gpus`] in ring order, from the lowest rank on. Half of the ring's
/// message travels in each direction.
pub type RingOrder = Vec<usize>;

/// Rings that share the message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingSet {
    /// Rings, each with its share of the message, largest shares first. The sum of all shares is the whole
    /// message.
    pub rings: Vec<(RingOrder, u64)>,
    /// Time that the fullest link or pool needs for an all_reduce on these rings.
    pub time: LinkTime,
    /// Whether it is certain that no set of these candidates is faster. False if the search stopped at its limit, or beyond
    /// eight GPUs, where it compares no sets.
    pub is_best: bool,
}

impl RingSet {
    /// Largest number of GPUs whose sets of rings are compared.
    pub const MOST_GPUS: usize = ENUMERATED;

    fn of_one(ring: RingOrder, time: LinkTime, is_best: bool) -> RingSet {
        RingSet {
            rings: vec![(ring, 1)],
            time,
            is_best,
        }
    }
}

/// Returns the ring whose fullest link takes least time. If several rings are equally fast, the ring in rank
/// order wins, then the ring that the search meets first. The search has the order of GPUs, so that the time does not
/// depend on how ranks are dealt to them.
pub fn best_ring(graph: &MachineGraph, paths: &Paths) -> (RingOrder, LinkTime) {
    let (ring, time, _) = counted_best_ring(graph, paths);
    (ring, time)
}

/// Returns the ring and the time of [`best_ring`], and the number of steps that the search took.
pub(super) fn counted_best_ring(
    graph: &MachineGraph,
    paths: &Paths,
) -> (RingOrder, LinkTime, usize) {
    let by_rank = graph.by_rank();
    let time_of = |order: &[usize]| Loads::ring(graph, paths, order).time(graph);
    let time = time_of(&by_rank);
    if by_rank.len() < 4 {
        // There is only one ring of fewer than four GPUs.
        return (by_rank, time, 0);
    }
    let by_gpu: RingOrder = (0..by_rank.len()).collect();
    let by_gpu_time = time_of(&by_gpu);
    let mut search = RingSearch::new(graph, paths, by_gpu, by_gpu_time);
    search.extend(RingLoad::NONE);
    match time <= search.time {
        true => (by_rank, time, search.steps),
        false => (
            from_first_rank(search.best, &by_rank),
            search.time,
            search.steps,
        ),
    }
}

/// Turns a ring so that it begins with the lowest rank.
fn from_first_rank(mut ring: RingOrder, by_rank: &[usize]) -> RingOrder {
    let first = ring.iter().position(|&gpu| gpu == by_rank[0]);
    ring.rotate_left(first.unwrap_or(0));
    ring
}

/// Extends partial rings, nearest GPUs first, and drops each partial ring that is no faster than the best
/// complete ring so far.
struct RingSearch<'a> {
    graph: &'a MachineGraph,
    paths: &'a Paths,
    /// For each GPU, the other GPUs in the order in which the search tries them.
    nearest: Vec<Vec<usize>>,
    /// Edges of the partial ring on each link, in the direction of the link.
    edges: Vec<u64>,
    fans: FanFlows,
    ring: RingOrder,
    used: Vec<bool>,
    steps: usize,
    best: RingOrder,
    time: LinkTime,
    /// A time that no ring can beat; the search ends when it is reached.
    least: LinkTime,
}

impl<'a> RingSearch<'a> {
    fn new(
        graph: &'a MachineGraph,
        paths: &'a Paths,
        first: RingOrder,
        time: LinkTime,
    ) -> RingSearch<'a> {
        let n = first.len();
        let mut nearest = vec![Vec::new(); n];
        for &gpu in &first {
            let mut others: Vec<usize> = first.iter().copied().filter(|&o| o != gpu).collect();
            others.sort_by_key(|&other| {
                let path = paths.get(gpu, other);
                (path.class, std::cmp::Reverse(slowest(graph, &path.links)))
            });
            nearest[gpu] = others;
        }
        let mut used = vec![false; n];
        used[first[0]] = true;
        RingSearch {
            graph,
            paths,
            nearest,
            edges: vec![0; graph.links.len()],
            fans: FanFlows::new(&graph.fans),
            ring: vec![first[0]],
            used,
            steps: 0,
            least: least(graph, paths),
            best: first,
            time,
        }
    }

    /// Tries all continuations of the partial ring, whose fullest link has the load `fullest`.
    fn extend(&mut self, fullest: RingLoad) {
        let (Some(&first), Some(&last)) = (self.ring.first(), self.ring.last()) else {
            return;
        };
        if self.ring.len() == self.used.len() {
            let time = fullest
                .or_fuller(self.add(last, first))
                .time(self.used.len());
            if time < self.time {
                self.best.clone_from(&self.ring);
                self.time = time;
            }
            self.remove(last, first);
            return;
        }
        for at in 0..self.nearest[last].len() {
            let next = self.nearest[last][at];
            if self.used[next] {
                continue;
            }
            if self.steps == SEARCH_STEPS || self.time <= self.least {
                return;
            }
            self.steps += 1;
            let longer = fullest.or_fuller(self.add(last, next));
            if longer.time(self.used.len()) < self.time {
                self.used[next] = true;
                self.ring.push(next);
                self.extend(longer);
                self.ring.pop();
                self.used[next] = false;
            }
            self.remove(last, next);
        }
    }

    /// Adds the edge between two GPUs to the loads. Returns the fullest among the links of the edge, all pools and
    /// all fans whose cap holds.
    fn add(&mut self, a: usize, b: usize) -> RingLoad {
        let mut fullest = RingLoad::NONE;
        for (from, to) in [(a, b), (b, a)] {
            let path = self.paths.get(from, to);
            self.fans.count(from, &path.links, path.root_port, true);
            for &link in &path.links {
                self.edges[link] += 1;
                fullest = fullest.or_fuller(RingLoad {
                    edges: self.edges[link],
                    mb_s: self.graph.links[link].bandwidth.mb_s.into(),
                });
            }
        }
        for pool in &self.graph.pools {
            fullest = fullest.or_fuller(RingLoad {
                edges: pool.links.iter().map(|&link| self.edges[link]).sum(),
                mb_s: pool.mb_s.into(),
            });
        }
        for fan in self.fans.holding() {
            fullest = fullest.or_fuller(RingLoad {
                edges: self.edges[fan.link],
                mb_s: fan.mb_s.into(),
            });
        }
        fullest
    }

    /// Removes the edge between two GPUs from the loads.
    fn remove(&mut self, a: usize, b: usize) {
        for (from, to) in [(a, b), (b, a)] {
            let path = self.paths.get(from, to);
            self.fans.count(from, &path.links, path.root_port, false);
            for &link in &path.links {
                self.edges[link] -= 1;
            }
        }
    }
}

/// Edges of a ring on a link, a pool or a fan. Comparisons take two products of 64 bits, where a [`LinkTime`] takes four
/// of 128 bits.
#[derive(Clone, Copy, Debug)]
struct RingLoad {
    edges: u64,
    mb_s: u64,
}

impl RingLoad {
    const NONE: RingLoad = RingLoad { edges: 0, mb_s: 1 };

    /// Returns the load that takes longer, of equal loads `self`.
    fn or_fuller(self, other: RingLoad) -> RingLoad {
        match other.edges * self.mb_s > self.edges * other.mb_s {
            true => other,
            false => self,
        }
    }

    /// Returns the time of the load in a ring of `n` GPUs, whose edges carry (n-1)/n of the message each way.
    const fn time(self, n: usize) -> LinkTime {
        let n = n as u64;
        LinkTime::new(self.edges * (n - 1), n, self.mb_s)
    }
}

fn slowest(graph: &MachineGraph, links: &[LinkId]) -> u32 {
    links
        .iter()
        .map(|&link| graph.links[link].bandwidth.mb_s)
        .min()
        .unwrap_or(u32::MAX)
}

/// Returns a time that no ring can beat. Each GPU has two edges in a ring. If the GPU has a single link, both
/// edges cross it; otherwise each edge crosses a link no faster than the GPU's fastest link.
fn least(graph: &MachineGraph, paths: &Paths) -> LinkTime {
    (0..paths.count())
        .map(|gpu| {
            let firsts = first_links(graph, paths, gpu);
            let edges = if firsts.len() == 1 { 2 } else { 1 };
            least_of(paths, edges, firsts.last().copied())
        })
        .max()
        .unwrap_or(LinkTime::ZERO)
        .max(least_of_sets(graph, paths))
}

/// Returns a time that no set of rings can beat. A ring leaves and enters each part of the machine, so at least two of its
/// edges cross a link that divides the GPUs into two parts.
fn least_of_sets(graph: &MachineGraph, paths: &Paths) -> LinkTime {
    let cuts = Cuts::new(graph, paths);
    let is_cut = |link: &LinkId| cuts.before(*link).is_some();
    let links = (0..graph.links.len())
        .filter(is_cut)
        .map(|link| least_of(paths, 2, Some(graph.links[link].bandwidth.mb_s)));
    let pools = graph.pools.iter().map(|pool| {
        let links = pool.links.iter().filter(|&link| is_cut(link)).count();
        least_of(paths, 2 * links as u64, Some(pool.mb_s))
    });
    links.chain(pools).max().unwrap_or(LinkTime::ZERO)
}

/// Returns the time that a link of `mb_s` MB/s needs for `edges` edges of a ring.
fn least_of(paths: &Paths, edges: u64, mb_s: Option<u32>) -> LinkTime {
    let n = paths.count() as u64;
    LinkTime::new(edges * (n - 1), n, mb_s.unwrap_or(1).into())
}

/// Returns the bandwidths of the links by which data of a GPU leaves it, slowest first.
fn first_links(graph: &MachineGraph, paths: &Paths, gpu: usize) -> Vec<u32> {
    let others = (0..paths.count()).filter(|&other| other != gpu);
    let mut links: Vec<LinkId> = others
        .filter_map(|other| paths.get(gpu, other).links.first().copied())
        .collect();
    links.sort_unstable();
    links.dedup();
    let mut bandwidths: Vec<u32> = links
        .into_iter()
        .map(|link| graph.links[link].bandwidth.mb_s)
        .collect();
    bandwidths.sort_unstable();
    bandwidths
}

/// Returns the set of rings whose fullest link takes least time. Up to eight GPUs all rings are candidates; beyond,
/// the set is `best`, the best ring alone.
pub fn best_set(graph: &MachineGraph, paths: &Paths, best: &(RingOrder, LinkTime)) -> RingSet {
    let (set, is_best) = search_sets(graph, paths, best.1);
    let Some((mut set, _)) = set else {
        return RingSet::of_one(best.0.clone(), best.1, is_best);
    };
    let by_rank = graph.by_rank();
    for (ring, _) in &mut set.rings {
        *ring = from_first_rank(std::mem::take(ring), &by_rank);
    }
    set
}

/// Returns the best set of rings, with the loads of all rings; `None` if no set is known to be faster than `time`, the
/// time of the best ring.
pub(super) fn faster_set(
    graph: &MachineGraph,
    paths: &Paths,
    time: LinkTime,
) -> Option<(RingSet, RingLoads)> {
    search_sets(graph, paths, time).0
}

/// Returns the set of [`faster_set`], and whether it is certain that no set is faster.
fn search_sets(
    graph: &MachineGraph,
    paths: &Paths,
    time: LinkTime,
) -> (Option<(RingSet, RingLoads)>, bool) {
    let n = paths.count();
    if n < 4 || time <= least_of_sets(graph, paths) {
        return (None, true);
    }
    if n > ENUMERATED {
        return (None, false);
    }
    let loads = RingLoads::new(graph, paths);
    let Some(set) = loads.pack(n as u64) else {
        return (None, false);
    };
    let set = slowed_by_fans(graph, paths, set);
    let is_best = set.is_best;
    ((set.time < time).then_some((set, loads)), is_best)
}

/// The edges that each ring puts on links and pools.
pub(super) struct RingLoads {
    /// All rings in lexicographic order of GPUs. Of a ring and its reverse, only one is listed.
    pub orders: Vec<RingOrder>,
    /// Bandwidth in MB/s of each row: a link, or a pool. Links with equal loads in every ring share one row, which has
    /// the least of their bandwidths. Often these are the two directions of a link.
    pub rooms: Vec<u64>,
    /// Largest number of edges that a ring puts on each row.
    pub most: Vec<u32>,
    /// Edges on all rows, ring by ring.
    edges: Vec<u32>,
}

impl RingLoads {
    fn new(graph: &MachineGraph, paths: &Paths) -> RingLoads {
        let n = paths.count();
        let orders = all_rings(n);
        let pair = |(&a, &b): (&usize, &usize)| a.min(b) * n + a.max(b);
        // The pairs of neighbours in all rings, ring by ring.
        let pairs: Vec<usize> = orders
            .iter()
            .flat_map(|order| order.iter().zip(order.iter().cycle().skip(1)).map(pair))
            .collect();
        let mut rows: BTreeMap<Vec<u32>, u64> = BTreeMap::new();
        for (of_pairs, mb_s) in edges_of_pairs(graph, paths) {
            let rings = pairs.chunks_exact(n);
            let column = rings.map(|ring| ring.iter().map(|&pair| of_pairs[pair]).sum());
            let room = rows.entry(column.collect()).or_insert(u64::MAX);
            *room = (*room).min(mb_s);
        }
        let columns = || rows.keys();
        let rings = 0..orders.len();
        RingLoads {
            edges: rings
                .flat_map(|ring| columns().map(move |column| column[ring]))
                .collect(),
            most: columns()
                .map(|column| column.iter().copied().max().unwrap_or(0))
                .collect(),
            rooms: rows.values().copied().collect(),
            orders,
        }
    }

    /// Returns the edges of a ring on each row.
    pub fn edges(&self, ring: usize) -> &[u32] {
        let rows = self.rooms.len();
        &self.edges[ring * rows..(ring + 1) * rows]
    }

    /// Returns the rings that move most bytes in a second when no link carries more than its bandwidth.
    fn pack(&self, n: u64) -> Option<RingSet> {
        // Small numbers keep the integers of [`pack`] within 128 bits.
        let unit = self.rooms.iter().copied().fold(0, greatest_common_divisor);
        let rooms: Vec<u64> = self.rooms.iter().map(|room| room / unit).collect();
        let packing = pack(&self.edges, &rooms)?;
        let sum: u64 = packing.amounts.iter().map(|(_, amount)| amount).sum();
        let rings = packing
            .amounts
            .iter()
            .map(|&(ring, share)| (self.orders[ring].clone(), share));
        // An edge carries (n-1)/n of the message each way.
        let time = LinkTime::new((n - 1) * packing.whole, n * unit, sum);
        let mut rings: Vec<(RingOrder, u64)> = rings.collect();
        rings.sort_by_key(|(_, share)| std::cmp::Reverse(*share));
        let is_best = packing.is_best;
        Some(RingSet {
            rings,
            time,
            is_best,
        })
    }
}

/// Returns how many edges each pair of neighbours puts on each link and pool, with the MB/s of the link or pool. The pair
/// of GPUs a < b has the index a * GPUs + b. Links and pools without edges are left out; of those with equal edges, the
/// slowest stands for all.
fn edges_of_pairs(graph: &MachineGraph, paths: &Paths) -> BTreeMap<Vec<u32>, u64> {
    let n = paths.count();
    let mut of_links = vec![vec![0; n * n]; graph.links.len()];
    for (a, b) in (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b))) {
        for (from, to) in [(a, b), (b, a)] {
            for &link in &paths.get(from, to).links {
                of_links[link][a * n + b] += 1;
            }
        }
    }
    let of_pool = |links: &[LinkId]| {
        let sum = |pair: usize| links.iter().map(|&link| of_links[link][pair]).sum();
        (0..n * n).map(sum).collect::<Vec<u32>>()
    };
    let of_pools = graph.pools.iter();
    let of_pools: Vec<_> = of_pools
        .map(|pool| (of_pool(&pool.links), pool.mb_s))
        .collect();
    let mb_s = graph.links.iter().map(|link| link.bandwidth.mb_s);
    let mut slowest = BTreeMap::new();
    for (edges, mb_s) in of_links.into_iter().zip(mb_s).chain(of_pools) {
        if edges.iter().any(|&edges| edges > 0) {
            let room = slowest.entry(edges).or_insert(u64::MAX);
            *room = (*room).min(mb_s.into());
        }
    }
    slowest
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    match b {
        0 => a,
        _ => greatest_common_divisor(b, a % b),
    }
}

/// Returns the set with the time that it takes if all its rings run at once and fans slow their links down.
fn slowed_by_fans(graph: &MachineGraph, paths: &Paths, mut set: RingSet) -> RingSet {
    let mut fans = FanFlows::new(&graph.fans);
    if fans.is_empty() {
        return set;
    }
    let n = paths.count() as u64;
    let mut loads = vec![0; graph.links.len()];
    for (ring, share) in &set.rings {
        for (at, &a) in ring.iter().enumerate() {
            let b = ring[(at + 1) % ring.len()];
            for (from, to) in [(a, b), (b, a)] {
                let path = paths.get(from, to);
                fans.count(from, &path.links, path.root_port, true);
                for &link in &path.links {
                    loads[link] += (n - 1) * share;
                }
            }
        }
    }
    let shares: u64 = set.rings.iter().map(|(_, share)| share).sum();
    for fan in fans.holding() {
        let time = LinkTime::new(loads[fan.link], n * shares, fan.mb_s.into());
        set.time = set.time.max(time);
    }
    set
}

/// Returns all rings of `n` GPUs in lexicographic order. Of a ring and its reverse, only one is returned.
fn all_rings(n: usize) -> Vec<RingOrder> {
    let mut all = Vec::new();
    let mut rest: Vec<usize> = (1..n).collect();
    loop {
        if rest.first() < rest.last() {
            all.push(std::iter::once(0).chain(rest.iter().copied()).collect());
        }
        if !next_permutation(&mut rest) {
            return all;
        }
    }
}

/// Turns `items` into the next permutation in lexicographic order; returns false after the last.
pub(super) fn next_permutation(items: &mut [usize]) -> bool {
    let Some(pivot) = (1..items.len()).rev().find(|&at| items[at - 1] < items[at]) else {
        return false;
    };
    let larger = (pivot..items.len())
        .rev()
        .find(|&at| items[at] > items[pivot - 1]);
    items.swap(pivot - 1, larger.unwrap_or(pivot));
    items[pivot..].reverse();
    true
}
