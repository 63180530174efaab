//! Links that divide the GPUs into two parts: every message from one part to the other crosses the link, and no other
//! message does. On a tree of PCIe links these are all links.

use super::graph::{LinkId, MachineGraph};
use super::paths::Paths;

/// Largest number of GPUs whose cuts are found. Beyond it none is known.
const MOST_GPUS: usize = 128;

/// For each link, the GPUs whose messages to all other GPUs cross it, as bits; `None` if the link is no cut.
pub(super) struct Cuts(Vec<Option<u128>>);

impl Cuts {
    pub fn new(graph: &MachineGraph, paths: &Paths) -> Cuts {
        let n = paths.count();
        if n > MOST_GPUS {
            return Cuts(vec![None; graph.links.len()]);
        }
        // By link: senders, receivers, and number of pairs.
        let mut crossing = vec![(0u128, 0u128, 0u32); graph.links.len()];
        for (from, to) in (0..n).flat_map(|from| (0..n).map(move |to| (from, to))) {
            for &link in &paths.get(from, to).links {
                let (senders, receivers, pairs) = &mut crossing[link];
                *senders |= 1 << from;
                *receivers |= 1 << to;
                *pairs += 1;
            }
        }
        let cut = |(senders, receivers, pairs): (u128, u128, u32)| {
            let all = senders.count_ones() + receivers.count_ones();
            let divides = senders & receivers == 0 && all == n as u32;
            let is_cut = divides && pairs == senders.count_ones() * receivers.count_ones();
            (is_cut && pairs > 0).then_some(senders)
        };
        Cuts(crossing.into_iter().map(cut).collect())
    }

    /// Returns the GPUs before `link`, as bits; `None` if the link is no cut.
    pub fn before(&self, link: LinkId) -> Option<u128> {
        self.0[link]
    }
}
