//! Loads of links under a schedule, and the time of the fullest link.
//!
//! Schedules are pipelined, so all their flows run at once. The link with the most bytes per bandwidth
//! decides the time.

use super::graph::{LinkId, MachineGraph};
use super::paths::Paths;
use std::cmp::Ordering;

/// Time per byte of the message, as the exact fraction `units / (whole * mb_s)`: microseconds per byte.
#[derive(Clone, Copy, Debug)]
pub struct LinkTime {
    units: u64,
    whole: u64,
    mb_s: u64,
}

impl LinkTime {
    /// No time.
    pub const ZERO: LinkTime = LinkTime {
        units: 0,
        whole: 1,
        mb_s: 1,
    };

    /// Creates the time that a link of `mb_s` takes for `units / whole` of the message.
    pub const fn new(units: u64, whole: u64, mb_s: u64) -> LinkTime {
        LinkTime { units, whole, mb_s }
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

/// The loads of a graph's links under a schedule, as parts of the message.
#[derive(Clone, Debug)]
pub struct Loads {
    units: Vec<u64>,
    whole: u64,
}

impl Loads {
    /// Creates loads of zero, in units of which the message has `whole`.
    pub fn new(graph: &MachineGraph, whole: u64) -> Loads {
        Loads {
            units: vec![0; graph.links.len()],
            whole,
        }
    }

    /// Adds `units` to each of `links`.
    pub fn add(&mut self, links: &[LinkId], units: u64) {
        for &link in links {
            self.units[link] += units;
        }
    }

    /// Adds a message of `units` from GPU `from` to GPU `to`.
    pub fn send(&mut self, paths: &Paths, from: usize, to: usize, units: u64) {
        self.add(&paths.get(from, to).links, units);
    }

    /// Returns the units on a link.
    pub fn units(&self, link: LinkId) -> u64 {
        self.units[link]
    }

    /// Returns the number of units in the message.
    pub const fn whole(&self) -> u64 {
        self.whole
    }

    /// Returns the time of the fullest link, and that link; of equals the first. `None` if nothing is sent.
    pub fn fullest(&self, graph: &MachineGraph) -> Option<(LinkTime, LinkId)> {
        let times = self.units.iter().zip(&graph.links).enumerate();
        let times = times
            .filter(|(_, (units, _))| **units > 0)
            .map(|(id, (&units, link))| {
                (
                    LinkTime::new(units, self.whole, link.bandwidth.mb_s.into()),
                    id,
                )
            });
        times.reduce(|best, next| if next.0 > best.0 { next } else { best })
    }

    /// Returns the time of the fullest link.
    pub fn time(&self, graph: &MachineGraph) -> LinkTime {
        self.fullest(graph).map_or(LinkTime::ZERO, |(time, _)| time)
    }

    /// Returns the loads of a ring through all GPUs of `order`, half of the message each way round.
    pub fn ring(graph: &MachineGraph, paths: &Paths, order: &[usize]) -> Loads {
        let n = order.len() as u64;
        let mut loads = Loads::new(graph, n.max(1));
        for (at, &gpu) in order.iter().enumerate() {
            let next = order[(at + 1) % order.len()];
            // Each way, an edge carries N-1 of N parts of a half twice: for partial sums and for results.
            loads.send(paths, gpu, next, n - 1);
            loads.send(paths, next, gpu, n - 1);
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
