//! Sets of rings that carry equal parts of the message, as schedules run them.
//!
//! The best set of rings has shares of any size, and often a dozen rings. A schedule gives each pair of rings of a
//! channel an equal part, and each ring costs slots and messages. So for each small number of pairs, this file finds
//! rings whose fullest link comes near to that of the best set.

use super::flows::{LinkTime, Loads};
use super::graph::MachineGraph;
use super::paths::Paths;
use super::rings::{RingLoads, RingOrder, faster_set};

/// Largest number of pairs of rings of a channel.
const MAX_PAIRS: usize = 8;

/// Number of rings that a search of one number of pairs tries to add before it stops with the best rings so far.
const SEARCH_STEPS: usize = 20_000;

/// More rings must be faster by this part of the time, because each costs slots and messages.
const WORTHWHILE: u64 = 32;

/// Returns lists of rings that carry equal parts of the message, each faster than the best ring and than the lists before
/// it. A ring may stand several times in a list. Empty if no set of rings is known to be faster than `best`.
pub(super) fn whole_rings(
    graph: &MachineGraph,
    paths: &Paths,
    best: &(RingOrder, LinkTime),
) -> Vec<Vec<RingOrder>> {
    counted_whole_rings(graph, paths, best).0
}

/// Returns the lists of [`whole_rings`], and the number of steps that all searches took.
pub(super) fn counted_whole_rings(
    graph: &MachineGraph,
    paths: &Paths,
    best: &(RingOrder, LinkTime),
) -> (Vec<Vec<RingOrder>>, usize) {
    let Some((set, loads)) = faster_set(graph, paths, best.1) else {
        return (Vec::new(), 0);
    };
    let place = |ring: &RingOrder| loads.orders.iter().position(|order| order == ring);
    let shares: Vec<(usize, u64)> = set
        .rings
        .iter()
        .filter_map(|(ring, share)| Some((place(ring)?, *share)))
        .collect();
    let mut found = Vec::new();
    let mut steps = 0;
    let mut time = best.1;
    for pairs in 2..=MAX_PAIRS {
        let mut search = EqualPartSearch::new(&loads, pairs, time.less_by(WORTHWHILE));
        search.take(&by_largest_remainder(&shares, pairs));
        search.extend();
        steps += search.steps;
        let rings: Vec<RingOrder> = search
            .best
            .iter()
            .map(|&ring| loads.orders[ring].clone())
            .collect();
        // The search leaves fans out.
        let slowed = Loads::rings(graph, paths, &rings).time(graph);
        if !rings.is_empty() && slowed <= time.less_by(WORTHWHILE) {
            time = slowed;
            found.push(rings);
        }
    }
    (found, steps)
}

/// Returns the rings of `shares`, each as often as its share of `pairs` is. The largest remainders are rounded up;
/// of equal remainders, the first.
fn by_largest_remainder(shares: &[(usize, u64)], pairs: usize) -> Vec<usize> {
    let whole: u128 = shares.iter().map(|&(_, share)| u128::from(share)).sum();
    let quota = |share: u64| u128::from(share) * pairs as u128;
    let mut counts: Vec<usize> = shares
        .iter()
        .map(|&(_, share)| (quota(share) / whole) as usize)
        .collect();
    let mut by_remainder: Vec<usize> = (0..counts.len()).collect();
    by_remainder.sort_by_key(|&at| std::cmp::Reverse(quota(shares[at].1) % whole));
    let missing = pairs - counts.iter().sum::<usize>();
    for &at in by_remainder.iter().take(missing) {
        counts[at] += 1;
    }
    let rings = shares.iter().zip(counts);
    rings
        .flat_map(|(&(ring, _), count)| std::iter::repeat_n(ring, count))
        .collect()
}

/// Finds the rings with equal parts of the message whose fullest link takes least time.
struct EqualPartSearch<'a> {
    loads: &'a RingLoads,
    pairs: usize,
    /// Rings that no link keeps from being part of a faster list.
    pool: Vec<usize>,
    /// Edges on each row of the first 0, 1, 2, ... chosen rings together.
    edges: Vec<u32>,
    chosen: Vec<usize>,
    steps: usize,
    best: Vec<usize>,
    /// Largest number of edges on each row with which a list is faster than `best`.
    most: Vec<u32>,
}

impl<'a> EqualPartSearch<'a> {
    /// Creates a search for `pairs` rings that are faster than `time`.
    fn new(loads: &'a RingLoads, pairs: usize, time: LinkTime) -> EqualPartSearch<'a> {
        let mut search = EqualPartSearch {
            loads,
            pairs,
            pool: Vec::new(),
            edges: vec![0; (pairs + 1) * loads.rooms.len()],
            chosen: Vec::with_capacity(pairs),
            steps: 0,
            best: Vec::new(),
            most: Vec::new(),
        };
        search.must_beat(time);
        search.pool = (0..loads.orders.len())
            .filter(|&ring| search.fits(loads.edges(ring)))
            .collect();
        search
    }

    /// Returns the time that a row needs for `edges` edges.
    fn time(&self, row: usize, edges: u32) -> LinkTime {
        let n = self.loads.orders[0].len() as u64;
        let parts = n * self.pairs as u64;
        LinkTime::new((n - 1) * u64::from(edges), parts, self.loads.rooms[row])
    }

    /// Sets the time that further lists must beat.
    fn must_beat(&mut self, time: LinkTime) {
        let pairs = self.pairs as u32;
        self.most = (0..self.loads.rooms.len())
            .map(|row| {
                let all = 0..=pairs * self.loads.most[row];
                let faster = |&edges: &u32| self.time(row, edges) < time;
                all.take_while(faster).last().unwrap_or(0)
            })
            .collect();
    }

    /// Returns whether no row has more edges than a faster list may have.
    fn fits(&self, edges: &[u32]) -> bool {
        edges
            .iter()
            .zip(&self.most)
            .all(|(edges, most)| edges <= most)
    }

    /// Takes `rings` as the best list, if they are as many as wanted and fit.
    fn take(&mut self, rings: &[usize]) {
        let mut edges = vec![0; self.loads.rooms.len()];
        for &ring in rings {
            for (sum, edge) in edges.iter_mut().zip(self.loads.edges(ring)) {
                *sum += edge;
            }
        }
        if rings.len() == self.pairs && self.fits(&edges) {
            self.best = rings.to_vec();
            let times = (0..edges.len()).map(|row| self.time(row, edges[row]));
            let time = times.max().unwrap_or(LinkTime::ZERO);
            self.must_beat(time);
        }
    }

    /// Tries all continuations of the chosen rings by rings that are not before the last of them.
    fn extend(&mut self) {
        if self.chosen.len() == self.pairs {
            self.take(&self.chosen.clone());
            return;
        }
        let last = self.chosen.last().copied().unwrap_or(0);
        let first = self.pool.partition_point(|&ring| ring < last);
        for at in first..self.pool.len() {
            if self.steps == SEARCH_STEPS {
                return;
            }
            self.steps += 1;
            let ring = self.pool[at];
            if self.add(ring) {
                self.chosen.push(ring);
                self.extend();
                self.chosen.pop();
            }
        }
    }

    /// Adds the edges of `ring` to those of the chosen rings. Returns whether the rings fit a faster list.
    fn add(&mut self, ring: usize) -> bool {
        let rows = self.loads.rooms.len();
        let (before, after) = self.edges.split_at_mut((self.chosen.len() + 1) * rows);
        let before = &before[self.chosen.len() * rows..];
        // All rows are added even if one is too full, so that the loop has no branch.
        let mut fits = true;
        for ((after, before), (edges, most)) in after
            .iter_mut()
            .zip(before)
            .zip(self.loads.edges(ring).iter().zip(&self.most))
        {
            *after = before + edges;
            fits &= *after <= *most;
        }
        fits
    }
}
