//! Loads of links under a schedule, and the time of the fullest link.
//!
//! Schedules are pipelined, so all their flows run at once. The link or pool with the most bytes per bandwidth
//! decides the time. A fan is different: its cap holds for the flows of a phase if enough GPUs of that phase send
//! through it to enough root ports. A phase is an exchange that a schedule makes at one time, such as a two-shot
//! inside all groups of a level.

use super::graph::{LinkId, MachineGraph};
use super::limits::FanFlows;
use super::paths::{Path, Paths};
use std::cmp::Ordering;

/// Time per byte of the message, as the exact fraction `units / (whole * mb_s)`: microseconds per byte.
#[derive(Clone, Copy, Debug)]
pub struct LinkTime {
    units: u64,
    whole: u64,
    mb_s: u64,
}

impl LinkTime {
    /// The time of a schedule that sends nothing.
    pub const ZERO: LinkTime = LinkTime {
        units: 0,
        whole: 1,
        mb_s: 1,
    };

    /// Creates the time that a link of `mb_s` MB/s needs for the fraction `units / whole` of the message.
    pub const fn new(units: u64, whole: u64, mb_s: u64) -> LinkTime {
        LinkTime { units, whole, mb_s }
    }

    /// Returns the time that is shorter by the fraction 1 / `part`.
    pub(super) const fn less_by(self, part: u64) -> LinkTime {
        LinkTime::new(
            self.units.saturating_mul(part - 1),
            self.whole.saturating_mul(part),
            self.mb_s,
        )
    }

    /// Returns the milliseconds for a message of `bytes` bytes.
    pub fn milliseconds(self, bytes: u64) -> f64 {
        self.units as f64 * bytes as f64 / (self.whole as f64 * self.mb_s as f64 * 1e3)
    }
}

impl Ord for LinkTime {
    fn cmp(&self, other: &LinkTime) -> Ordering {
        let side = |a: &LinkTime, b: &LinkTime| {
            u128::from(a.units) * u128::from(b.whole) * u128::from(b.mb_s)
        };
        side(self, other).cmp(&side(other, self))
    }
}

impl PartialOrd for LinkTime {
    fn partial_cmp(&self, other: &LinkTime) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for LinkTime {
    fn eq(&self, other: &LinkTime) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for LinkTime {}

/// Limit that decides the time of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// A link, by index in [`MachineGraph::links`].
    Link(LinkId),
    /// A pool, by index in [`MachineGraph::pools`].
    Pool(usize),
}

/// Number of fraction bits with which units are counted on a link that a fan slows down.
const FRACTION_BITS: u32 = 16;

/// The loads of a graph's links under a schedule, in units. The message has `whole` units.
#[derive(Clone, Debug)]
pub struct Loads {
    units: Vec<u64>,
    whole: u64,
    /// Flows of the current phase through fans.
    fans: FanFlows,
    /// Units that the current phase has added to each link; empty if the graph has no fans.
    phase: Vec<u64>,
    /// Loads of earlier phases that a fan slowed down: link, units, and MB/s of the fan's cap.
    capped: Vec<(LinkId, u64, u32)>,
}

impl Loads {
    /// Creates loads of zero for a message of `whole` units.
    pub fn new(graph: &MachineGraph, whole: u64) -> Loads {
        let fans = FanFlows::new(&graph.fans);
        let phase = if fans.is_empty() {
            Vec::new()
        } else {
            vec![0; graph.links.len()]
        };
        Loads {
            units: vec![0; graph.links.len()],
            whole,
            fans,
            phase,
            capped: Vec::new(),
        }
    }

    /// Adds a message of `units` from GPU `from` to GPU `to`.
    pub fn send(&mut self, paths: &Paths, from: usize, to: usize, units: u64) {
        self.send_on(paths.get(from, to), from, units);
    }

    /// Adds `units` to each of `links`.
    pub fn add(&mut self, links: &[LinkId], units: u64) {
        for &link in links {
            self.units[link] += units;
            if let Some(phase) = self.phase.get_mut(link) {
                *phase += units;
            }
        }
    }

    /// Adds a message of `units` from GPU `from` on `path`.
    fn send_on(&mut self, path: &Path, from: usize, units: u64) {
        self.add(&path.links, units);
        if units > 0 {
            self.fans.count(from, &path.links, path.root_port, true);
        }
    }

    /// Ends a phase. Messages that are added later are not sent at the same time as the messages so far, so
    /// fans count them separately.
    pub fn end_phase(&mut self) {
        if self.fans.is_empty() {
            return;
        }
        self.capped = self.capped_with_phase();
        self.phase.fill(0);
        self.fans.clear();
    }

    /// Returns the units that links carry at the bandwidth of a fan, in the phases so far and in the current one.
    fn capped_with_phase(&self) -> Vec<(LinkId, u64, u32)> {
        let mut capped = self.capped.clone();
        let mut links: Vec<LinkId> = self.fans.holding().map(|fan| fan.link).collect();
        links.sort_unstable();
        links.dedup();
        for link in links {
            if let Some(mb_s) = self.fans.cap(link) {
                capped.push((link, self.phase[link], mb_s));
            }
        }
        capped
    }

    /// Returns the units on a link.
    pub fn units(&self, link: LinkId) -> u64 {
        self.units[link]
    }

    /// Returns the number of units in the message.
    pub const fn whole(&self) -> u64 {
        self.whole
    }

    /// Returns the longest time that a link or pool needs for its load, and this link or pool. If several
    /// need equally long, returns the first. `None` if nothing is sent.
    pub fn fullest(&self, graph: &MachineGraph) -> Option<(LinkTime, Bottleneck)> {
        let capped = self.capped_with_phase();
        let links = (0..graph.links.len())
            .filter(|&id| self.units[id] > 0)
            .map(|id| (self.link_time(graph, id, &capped), Bottleneck::Link(id)));
        let pools = graph.pools.iter().enumerate().filter_map(|(at, pool)| {
            let units: u64 = pool.links.iter().map(|&link| self.units[link]).sum();
            let time = LinkTime::new(units, self.whole, pool.mb_s.into());
            (units > 0).then_some((time, Bottleneck::Pool(at)))
        });
        links
            .chain(pools)
            .reduce(|best, next| if next.0 > best.0 { next } else { best })
    }

    /// Returns the time that a link needs for its load. `capped` lists the units that fans slow down.
    fn link_time(
        &self,
        graph: &MachineGraph,
        link: LinkId,
        capped: &[(LinkId, u64, u32)],
    ) -> LinkTime {
        let mb_s = graph.links[link].bandwidth.mb_s;
        let slow = capped
            .iter()
            .filter(|&&(at, units, cap)| at == link && units > 0 && cap < mb_s);
        if slow.clone().count() == 0 {
            return LinkTime::new(self.units[link], self.whole, mb_s.into());
        }
        // A unit at the cap of a fan takes as long as `mb_s / cap` units at the bandwidth of the link.
        let longer = slow.fold(0u128, |sum, &(_, units, cap)| {
            let scaled = (u128::from(units) * u128::from(mb_s - cap)) << FRACTION_BITS;
            sum.saturating_add(scaled.div_ceil(cap.into()))
        });
        let units = (u128::from(self.units[link]) << FRACTION_BITS).saturating_add(longer);
        let units = u64::try_from(units).unwrap_or(u64::MAX);
        LinkTime::new(units, self.whole << FRACTION_BITS, mb_s.into())
    }

    /// Returns the longest time that a link or pool needs for its load.
    pub fn time(&self, graph: &MachineGraph) -> LinkTime {
        self.fullest(graph).map_or(LinkTime::ZERO, |(time, _)| time)
    }

    /// Returns the loads of a ring through all GPUs of `order`, half of the message each way round.
    pub fn ring(graph: &MachineGraph, paths: &Paths, order: &[usize]) -> Loads {
        Loads::rings(graph, paths, &[order])
    }

    /// Returns the loads of rings that carry equal parts of the message at once, half of each part each way round.
    pub fn rings(graph: &MachineGraph, paths: &Paths, orders: &[impl AsRef<[usize]>]) -> Loads {
        let n = paths.count() as u64;
        let mut loads = Loads::new(graph, (n * orders.len() as u64).max(1));
        for order in orders.iter().map(AsRef::as_ref) {
            for (at, &gpu) in order.iter().enumerate() {
                let next = order[(at + 1) % order.len()];
                // In each direction, an edge carries N-1 of the N parts of half the ring's part twice: as partial
                // sums and as results.
                loads.send(paths, gpu, next, n - 1);
                loads.send(paths, next, gpu, n - 1);
            }
        }
        loads
    }

    /// Returns the loads of a two-shot in which each GPU owns an equal part.
    pub fn direct(graph: &MachineGraph, paths: &Paths) -> Loads {
        let n = paths.count();
        let mut loads = Loads::new(graph, n.max(1) as u64);
        for from in 0..n {
            for to in (0..n).filter(|&to| to != from) {
                loads.send(paths, from, to, 2);
            }
        }
        loads
    }
}
