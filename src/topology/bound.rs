//! A time that no all_reduce can beat on a graph.
//!
//! Take any partition of N GPUs into k groups, and a message of S bytes. For each element, k-1 groups must
//! send a contribution, and k-1 groups must receive the result. So at least 2 (k-1) S bytes leave groups. The
//! time is at least this number divided by the bandwidth at which all groups together can send to other
//! groups, a maximum flow. With two groups, each group must also send at least S bytes to the other.

use super::flows::LinkTime;
use super::graph::{BandwidthOrigin, GraphLink, LinkId, LinkKind, MachineGraph, NodeKind};
use super::paths::{PathType, Paths};

/// Largest number of GPUs of which all partitions are compared.
const ENUMERATED: usize = 8;

/// Returns a time that no all_reduce can beat. Beyond eight GPUs only some partitions are compared:
/// `partitions`, each of their groups against all other GPUs, and single GPUs. This bound may be lower than
/// the bound of all partitions, but still holds.
pub fn bound(graph: &MachineGraph, paths: &Paths, partitions: &[Vec<Vec<usize>>]) -> LinkTime {
    let n = graph.gpus.len();
    if n < 2 {
        return LinkTime::ZERO;
    }
    let mut all = partitions.to_vec();
    all.push((0..n).map(|gpu| vec![gpu]).collect());
    if n <= ENUMERATED {
        all = every_partition(n);
    } else {
        let split = |group: &Vec<usize>| {
            vec![
                group.clone(),
                (0..n).filter(|gpu| !group.contains(gpu)).collect(),
            ]
        };
        let groups: Vec<Vec<usize>> = partitions.iter().flatten().cloned().collect();
        all.extend(groups.iter().map(split));
    }
    all.retain(|groups| groups.len() > 1);
    let network = FlowNetwork::new(graph, paths);
    let time = |groups: &Vec<Vec<usize>>| network.least(groups);
    all.iter().map(time).max().unwrap_or(LinkTime::ZERO)
}

/// Returns all partitions of the numbers below `n`.
fn every_partition(n: usize) -> Vec<Vec<Vec<usize>>> {
    let mut all: Vec<Vec<Vec<usize>>> = vec![Vec::new()];
    for gpu in 0..n {
        let mut longer = Vec::new();
        for groups in all {
            for at in 0..=groups.len() {
                let mut next = groups.clone();
                match next.get_mut(at) {
                    Some(group) => group.push(gpu),
                    None => next.push(vec![gpu]),
                }
                longer.push(next);
            }
        }
        all = longer;
    }
    all
}

/// The links as a flow network with two vertices for each node: one for data on its way up, one for data on
/// its way down. Data turns from up to down at the nodes that paths allow.
struct FlowNetwork<'a> {
    graph: &'a MachineGraph,
    /// For each link, whether the flow may use it.
    counts: Vec<bool>,
    /// For each switch, whether some path between two GPUs goes up to this switch and down again.
    turns: Vec<bool>,
    /// GPUs below each node.
    below: Vec<Vec<usize>>,
}

impl<'a> FlowNetwork<'a> {
    fn new(graph: &'a MachineGraph, paths: &Paths) -> FlowNetwork<'a> {
        let mut below = vec![Vec::new(); graph.nodes.len()];
        let mut turns = vec![false; graph.nodes.len()];
        for (index, gpu) in graph.gpus.iter().enumerate() {
            graph
                .ancestors(gpu.node)
                .for_each(|node| below[node].push(index));
        }
        for a in 0..paths.count() {
            for b in 0..paths.count() {
                let path = paths.get(a, b);
                let [a, b] = [a, b].map(|gpu| graph.gpus[gpu].node);
                if matches!(path.class, PathType::Pix | PathType::Pxb) && path.peer_access {
                    let over: Vec<usize> = graph.ancestors(b).collect();
                    if let Some(top) = graph.ancestors(a).find(|node| over.contains(node)) {
                        turns[top] = true;
                    }
                }
            }
        }
        let mut used = vec![false; graph.links.len()];
        for path in
            (0..paths.count()).flat_map(|a| (0..paths.count()).map(move |b| paths.get(a, b)))
        {
            path.links.iter().for_each(|&link| used[link] = true);
        }
        let kind = |node: usize| graph.nodes[node].kind;
        let counts = graph.links.iter().zip(used).map(|(link, is_used)| {
            match (link.class, kind(link.from), kind(link.to)) {
                (LinkKind::Network, ..) => false,
                // A link of unknown speed carries only the data of paths that cross it.
                _ if link.bandwidth.origin == BandwidthOrigin::Assumed => is_used,
                (LinkKind::NvLink, NodeKind::Gpu(a), NodeKind::Gpu(b)) => {
                    paths.get(a, b).peer_access
                }
                (LinkKind::NvLink, ..) => is_used,
                _ => true,
            }
        });
        FlowNetwork {
            graph,
            counts: counts.collect(),
            turns,
            below,
        }
    }

    /// Returns the bound that follows from the partition `groups`: no all_reduce takes less time.
    fn least(&self, groups: &[Vec<usize>]) -> LinkTime {
        let k = groups.len() as u64;
        let leaving = LinkTime::new(2 * (k - 1), 1, self.leaving(groups).max(1));
        if k > 2 {
            return leaving;
        }
        let one_way = [(0, 1), (1, 0)].map(|(from, to)| {
            LinkTime::new(1, 1, self.flow(groups, |g| g == from, |g| g == to).max(1))
        });
        leaving.max(one_way[0]).max(one_way[1])
    }

    fn leaving(&self, groups: &[Vec<usize>]) -> u64 {
        self.flow(groups, |_| true, |_| true)
    }

    /// Returns the most MB/s that groups for which `sends` holds can send to other groups for which
    /// `receives` holds. The links limit this rate. Each pool limits it to the pool's bandwidth plus the flow
    /// over links outside the pool. Fans do not limit it, because a schedule may avoid them.
    fn flow(
        &self,
        groups: &[Vec<usize>],
        sends: impl Fn(usize) -> bool,
        receives: impl Fn(usize) -> bool,
    ) -> u64 {
        let pools = self.graph.pools.iter().map(|pool| {
            let beside = self.flow_without(&pool.links, groups, &sends, &receives);
            beside.saturating_add(pool.mb_s.into())
        });
        let links = self.flow_without(&[], groups, &sends, &receives);
        pools.fold(links, u64::min)
    }

    /// Returns the MB/s as [`FlowNetwork::flow`], but without pools, and as if the links `without` carried
    /// nothing.
    fn flow_without(
        &self,
        without: &[LinkId],
        groups: &[Vec<usize>],
        sends: &dyn Fn(usize) -> bool,
        receives: &dyn Fn(usize) -> bool,
    ) -> u64 {
        let nodes = self.graph.nodes.len();
        let mut group_of = vec![0; self.graph.gpus.len()];
        for (group, gpus) in groups.iter().enumerate() {
            gpus.iter().for_each(|&gpu| group_of[gpu] = group);
        }
        // Data does not turn from up to down at a node if all GPUs below the node belong to one group. There
        // it could only get back to its own group.
        let mixed = |node: usize| {
            let below = &self.below[node];
            let first = below.first().map(|&gpu| group_of[gpu]);
            below.is_empty() || below.iter().any(|&gpu| Some(group_of[gpu]) != first)
        };
        let mut flow = MaxFlow::new(2 * nodes + 2);
        let (source, sink) = (2 * nodes, 2 * nodes + 1);
        for (node, kind) in self.graph.nodes.iter().map(|node| node.kind).enumerate() {
            let (up, down) = (2 * node, 2 * node + 1);
            match kind {
                NodeKind::Gpu(gpu) => {
                    let group = group_of[gpu];
                    if sends(group) {
                        flow.edge(source, up, u64::MAX >> 8);
                    }
                    if receives(group) {
                        flow.edge(down, sink, u64::MAX >> 8);
                    }
                }
                NodeKind::Switch if self.turns[node] && mixed(node) => {
                    flow.edge(up, down, u64::MAX >> 8);
                }
                NodeKind::Socket if mixed(node) => flow.edge(up, down, u64::MAX >> 8),
                NodeKind::LinkSwitch => flow.edge(up, down, u64::MAX >> 8),
                _ => {}
            }
        }
        let carries = |link: &LinkId| self.counts[*link] && !without.contains(link);
        for link in (0..self.graph.links.len()).filter(carries) {
            let GraphLink {
                from, to, class, ..
            } = self.graph.links[link];
            let mb_s = self.graph.links[link].bandwidth.mb_s.into();
            if let Some((from, to)) = self.ends(link, &group_of) {
                flow.edge(from, to, mb_s);
            }
            // Some descriptions put GPUs behind a GPU, at which data begins and ends.
            if class == LinkKind::Pcie && (self.is_gpu_above(from) || self.is_gpu_above(to)) {
                flow.edge(2 * from, 2 * to + 1, mb_s);
            }
        }
        flow.run(source, sink)
    }

    /// Returns whether a node is a GPU with other GPUs behind it.
    fn is_gpu_above(&self, node: usize) -> bool {
        matches!(self.graph.nodes[node].kind, NodeKind::Gpu(_)) && self.below[node].len() > 1
    }

    /// Returns the vertices that a link connects; `None` if it cannot carry data out of a group.
    fn ends(&self, link: LinkId, group_of: &[usize]) -> Option<(usize, usize)> {
        let is_beside_tree = self.graph.is_beside_tree(link);
        let link = self.graph.links[link];
        let (from, to) = (link.from, link.to);
        let kind = |node: usize| self.graph.nodes[node].kind;
        match link.class {
            LinkKind::Network => None,
            LinkKind::Pcie if is_beside_tree => Some((2 * from, 2 * to + 1)),
            LinkKind::Pcie if self.graph.nodes[from].parent == Some(to) => Some((2 * from, 2 * to)),
            LinkKind::Pcie => Some((2 * from + 1, 2 * to + 1)),
            LinkKind::Socket => Some((2 * from, 2 * to + 1)),
            LinkKind::NvLink => match (kind(from), kind(to)) {
                (NodeKind::Gpu(a), NodeKind::Gpu(b)) => {
                    (group_of[a] != group_of[b]).then_some((2 * from, 2 * to + 1))
                }
                (NodeKind::Gpu(_), _) => Some((2 * from, 2 * to)),
                _ => Some((2 * from + 1, 2 * to + 1)),
            },
        }
    }
}

/// Maximum flow by shortest augmenting paths (Edmonds-Karp).
struct MaxFlow {
    edges: Vec<(usize, u64)>,
    from: Vec<Vec<usize>>,
}

impl MaxFlow {
    fn new(vertices: usize) -> MaxFlow {
        MaxFlow {
            edges: Vec::new(),
            from: vec![Vec::new(); vertices],
        }
    }

    fn edge(&mut self, from: usize, to: usize, capacity: u64) {
        for (from, to, capacity) in [(from, to, capacity), (to, from, 0)] {
            self.from[from].push(self.edges.len());
            self.edges.push((to, capacity));
        }
    }

    fn run(mut self, source: usize, sink: usize) -> u64 {
        let mut total = 0;
        while let Some(path) = self.path(source, sink) {
            let capacity = path
                .iter()
                .map(|&edge| self.edges[edge].1)
                .min()
                .unwrap_or(0);
            for edge in path {
                self.edges[edge].1 -= capacity;
                self.edges[edge ^ 1].1 += capacity;
            }
            total += capacity;
        }
        total
    }

    /// Returns the edges of a shortest path with capacity left.
    fn path(&self, source: usize, sink: usize) -> Option<Vec<usize>> {
        let mut by = vec![usize::MAX; self.from.len()];
        let mut queue = std::collections::VecDeque::from([source]);
        while let Some(at) = queue.pop_front() {
            for &edge in &self.from[at] {
                let (to, capacity) = self.edges[edge];
                if capacity > 0 && by[to] == usize::MAX && to != source {
                    by[to] = edge;
                    queue.push_back(to);
                }
            }
        }
        let back = |&at: &usize| (at != source).then(|| self.edges[by[at] ^ 1].0);
        (by[sink] != usize::MAX).then(|| {
            let vertices = std::iter::successors(Some(sink), back);
            let mut path: Vec<usize> = vertices.filter(|&v| v != source).map(|v| by[v]).collect();
            path.reverse();
            path
        })
    }
}
