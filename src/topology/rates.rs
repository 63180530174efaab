//! Rates of flows that run at once and share links, pools and fans max-min fairly: no flow can go faster without
//! slowing down a flow that is not faster than itself.

use super::graph::{LinkId, MachineGraph};
use super::limits::FanFlows;
use super::paths::Paths;

/// Bytes per second of a MB/s.
const MB: u64 = 1_000_000;

/// Returns the bytes per second of each flow, which goes from a GPU to another, by index in
/// [`MachineGraph::gpus`]. All flows run at once, so fans are judged on all of them. A flow that crosses no link has
/// the rate `u64::MAX`.
pub fn concurrent_rates(graph: &MachineGraph, paths: &Paths, flows: &[(usize, usize)]) -> Vec<u64> {
    let mut fans = FanFlows::new(&graph.fans);
    let mut limits = ShareLimits::new(graph);
    let mut routes = Vec::new();
    for &(from, to) in flows {
        let path = paths.get(from, to);
        fans.count(from, &path.links, path.root_port, true);
        routes.push(limits.route(&path.links));
    }
    limits.hold(graph, &fans);
    let mut rates = vec![0; flows.len()];
    limits.share(
        &routes.iter().map(Vec::as_slice).collect::<Vec<_>>(),
        &mut rates,
    );
    rates
}

/// The limits that flows share: links, then pools.
pub(super) struct ShareLimits {
    /// Bytes per second of each limit.
    room: Vec<u64>,
    /// Pools of each link.
    pools: Vec<Vec<u32>>,
    /// Links with a fan.
    fans: Vec<LinkId>,
    /// What is left of each limit, and the number of flows that still share it, while flows are shared out.
    left: Vec<u64>,
    sharing: Vec<u32>,
}

impl ShareLimits {
    pub fn new(graph: &MachineGraph) -> ShareLimits {
        let links = graph.links.iter().map(|link| link.bandwidth.mb_s);
        let all = links.chain(graph.pools.iter().map(|pool| pool.mb_s));
        let room: Vec<u64> = all.map(|mb_s| u64::from(mb_s) * MB).collect();
        let mut pools = vec![Vec::new(); graph.links.len()];
        for (pool, at) in graph.pools.iter().zip(graph.links.len() as u32..) {
            pool.links.iter().for_each(|&link| pools[link].push(at));
        }
        let mut fans: Vec<LinkId> = graph.fans.iter().map(|fan| fan.link).collect();
        fans.sort_unstable();
        fans.dedup();
        ShareLimits {
            left: vec![0; room.len()],
            sharing: vec![0; room.len()],
            room,
            pools,
            fans,
        }
    }

    /// Returns the limits of a flow over `links`.
    pub fn route(&self, links: &[LinkId]) -> Vec<u32> {
        let pools = links
            .iter()
            .flat_map(|&link| self.pools[link].iter().copied());
        links.iter().map(|&link| link as u32).chain(pools).collect()
    }

    /// Sets the links with fans to the bandwidth that they have while `flows` run.
    pub fn hold(&mut self, graph: &MachineGraph, flows: &FanFlows) {
        for &link in &self.fans {
            let mb_s = graph.links[link].bandwidth.mb_s;
            let mb_s = flows.cap(link).map_or(mb_s, |cap| cap.min(mb_s));
            self.room[link] = u64::from(mb_s) * MB;
        }
    }

    /// Writes the rate of each flow, given the limits that it shares.
    ///
    /// All rates rise together; where a limit is reached, its flows keep their rate and the others rise on.
    pub fn share(&mut self, routes: &[&[u32]], rates: &mut [u64]) {
        self.left.copy_from_slice(&self.room);
        self.sharing.fill(0);
        rates.fill(u64::MAX);
        for &limit in routes.iter().copied().flatten() {
            self.sharing[limit as usize] += 1;
        }
        let mut rising: Vec<usize> = (0..routes.len())
            .filter(|&flow| !routes[flow].is_empty())
            .collect();
        while !rising.is_empty() {
            let fair = |limit: usize| self.left[limit] / u64::from(self.sharing[limit]);
            let shared = (0..self.room.len()).filter(|&limit| self.sharing[limit] > 0);
            let Some(rate) = shared.clone().map(fair).min() else {
                return;
            };
            let is_reached: Vec<bool> = (0..self.room.len())
                .map(|limit| self.sharing[limit] > 0 && fair(limit) == rate)
                .collect();
            rising.retain(|&flow| {
                if !routes[flow].iter().any(|&limit| is_reached[limit as usize]) {
                    return true;
                }
                rates[flow] = rate;
                for &limit in routes[flow] {
                    self.left[limit as usize] = self.left[limit as usize].saturating_sub(rate);
                    self.sharing[limit as usize] -= 1;
                }
                false
            });
        }
    }
}
