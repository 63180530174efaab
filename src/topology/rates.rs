//! Rates of flows that run at once and share links, pools and fans max-min fairly: no flow can go faster without
//! slowing down a flow that is not faster than itself.

use super::graph::{LinkId, MachineGraph};
use super::limits::FanFlows;
use super::paths::Paths;

/// Bytes per second of a MB/s.
const MB: u64 = 1_000_000;

/// Returns the bytes per second of each flow, which goes from a GPU to another, by index in
/// [`MachineGraph::gpus`]. All flows run at once, so all of them count towards the cap of a fan. A flow that
/// crosses no link has the rate `u64::MAX`.
pub fn concurrent_rates(graph: &MachineGraph, paths: &Paths, flows: &[(usize, usize)]) -> Vec<u64> {
    let route = |&(from, to): &(usize, usize)| FlowRoute {
        source: from,
        links: paths.get(from, to).links.clone(),
        root_port: paths.get(from, to).root_port,
    };
    let routes: Vec<FlowRoute> = flows.iter().map(route).collect();
    rates_on(graph, &routes)
}

/// The links that a flow crosses, and the facts that fans count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FlowRoute {
    /// Number of the sender: the index of a GPU, or a number beyond all GPUs.
    pub source: usize,
    /// Links in order.
    pub links: Vec<LinkId>,
    /// Link from a socket down its root port, if the route has one.
    pub root_port: Option<LinkId>,
}

/// Returns the bytes per second of flows on these routes, as [`concurrent_rates`] does.
pub(super) fn rates_on(graph: &MachineGraph, flows: &[FlowRoute]) -> Vec<u64> {
    let mut fans = FanFlows::new(&graph.fans);
    let mut limits = SharedLimits::new(graph, 1);
    let mut routes = Vec::new();
    for flow in flows {
        fans.count(flow.source, &flow.links, flow.root_port, true);
        routes.push(limits.route(0, &flow.links));
    }
    limits.hold(graph, 0, &fans);
    let mut rates = Vec::new();
    let all: Vec<usize> = (0..flows.len()).collect();
    limits.share(&all, &routes, &mut rates);
    rates
}

/// The limits that flows of equal hosts share: the links and then the pools of each host, host by host.
pub(super) struct SharedLimits {
    /// Number of limits of a host.
    per_host: usize,
    /// Bytes per second of each limit.
    room: Vec<u64>,
    /// Pools of each link of a host, as places among the limits of the host.
    pools: Vec<Vec<usize>>,
    /// Links with a fan.
    fans: Vec<LinkId>,
    sharing: FairDivision,
}

/// State of the limits while their bandwidth is divided.
#[derive(Default)]
struct FairDivision {
    /// For each limit, the bytes per second that are left, and (`flows`) the number of flows that still share
    /// this rest.
    left: Vec<u64>,
    flows: Vec<u64>,
    /// Limits that at least one flow crosses.
    used: Vec<u32>,
    is_reached: Vec<bool>,
    rising: Vec<usize>,
}

impl SharedLimits {
    /// Creates the limits of `hosts` hosts with equal graphs.
    pub fn new(graph: &MachineGraph, hosts: usize) -> SharedLimits {
        let links = graph.links.iter().map(|link| link.bandwidth.mb_s);
        let all = links.chain(graph.pools.iter().map(|pool| pool.mb_s));
        let of_host: Vec<u64> = all.map(|mb_s| u64::from(mb_s) * MB).collect();
        let mut pools = vec![Vec::new(); graph.links.len()];
        for (pool, at) in graph.pools.iter().zip(graph.links.len()..) {
            pool.links.iter().for_each(|&link| pools[link].push(at));
        }
        let mut fans: Vec<LinkId> = graph.fans.iter().map(|fan| fan.link).collect();
        fans.sort_unstable();
        fans.dedup();
        let room = of_host.repeat(hosts);
        let sharing = FairDivision {
            left: vec![0; room.len()],
            flows: vec![0; room.len()],
            is_reached: vec![false; room.len()],
            ..FairDivision::default()
        };
        SharedLimits {
            per_host: of_host.len(),
            room,
            pools,
            fans,
            sharing,
        }
    }

    /// Returns the limits of a flow over `links` of a host.
    pub fn route(&self, host: usize, links: &[LinkId]) -> Vec<u32> {
        let pools = links.iter().flat_map(|&link| &self.pools[link]);
        let all = links.iter().chain(pools);
        all.map(|&at| (host * self.per_host + at) as u32).collect()
    }

    /// Sets the bandwidth of the links of a host that have fans. A link falls to the cap of its fan if
    /// `flows` reach the fan's numbers of GPUs and root ports.
    pub fn hold(&mut self, graph: &MachineGraph, host: usize, flows: &FanFlows) {
        for &link in &self.fans {
            let mb_s = graph.links[link].bandwidth.mb_s;
            let mb_s = flows.cap(link).map_or(mb_s, |cap| cap.min(mb_s));
            self.room[host * self.per_host + link] = u64::from(mb_s) * MB;
        }
    }

    /// Sets `rates` to the bytes per second of each of `flows`, which are indices of `routes`: the limits of each
    /// flow.
    ///
    /// All rates rise together. Where a limit is reached, the flows over it keep their rate, and the rates of
    /// other flows rise further.
    pub fn share(&mut self, flows: &[usize], routes: &[Vec<u32>], rates: &mut Vec<u64>) {
        rates.clear();
        rates.resize(flows.len(), u64::MAX);
        let sharing = &mut self.sharing;
        sharing.start(&self.room, flows, routes);
        while let Some(rate) = sharing.least() {
            let FairDivision {
                left,
                flows: sharers,
                is_reached,
                rising,
                ..
            } = sharing;
            rising.retain(|&at| {
                let route = &routes[flows[at]];
                if !route.iter().any(|&limit| is_reached[limit as usize]) {
                    return true;
                }
                rates[at] = rate;
                for &limit in route {
                    left[limit as usize] = left[limit as usize].saturating_sub(rate);
                    sharers[limit as usize] -= 1;
                }
                false
            });
        }
    }
}

impl FairDivision {
    fn start(&mut self, room: &[u64], flows: &[usize], routes: &[Vec<u32>]) {
        self.left.copy_from_slice(room);
        self.flows.fill(0);
        self.used.clear();
        self.rising.clear();
        for (at, &flow) in flows.iter().enumerate() {
            if !routes[flow].is_empty() {
                self.rising.push(at);
            }
            for &limit in &routes[flow] {
                if self.flows[limit as usize] == 0 {
                    self.used.push(limit);
                }
                self.flows[limit as usize] += 1;
            }
        }
    }

    /// Finds the least rate at which a limit is reached, and marks all limits that are reached then. `None` if no
    /// flow is left.
    fn least(&mut self) -> Option<u64> {
        self.used
            .iter()
            .for_each(|&limit| self.is_reached[limit as usize] = false);
        self.used.retain(|&limit| self.flows[limit as usize] > 0);
        let rate_of = |limit: u32| self.left[limit as usize] / self.flows[limit as usize];
        let least = self.used.iter().map(|&limit| rate_of(limit)).min()?;
        for &limit in &self.used {
            self.is_reached[limit as usize] = rate_of(limit) == least;
        }
        Some(least)
    }
}
