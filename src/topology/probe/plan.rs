//! The list of patterns by which a machine is measured.

use super::{FlowEnd, ProbeFlow, TrafficPattern};
use crate::topology::graph::{LinkId, MachineGraph, NodeId, NodeKind};
use crate::topology::paths::Paths;
use std::collections::{BTreeMap, HashSet};

/// Largest number of patterns. At 20 ms a pattern they take 9 s.
pub const MAX_PATTERNS: usize = 450;

/// Number of GPUs up to which every pair is measured.
const ALL_PAIRS: usize = 8;

/// Largest number of sockets whose pairs are all measured, and of sockets whose memory each GPU uses.
const ALL_SOCKETS: usize = 4;
const HOSTS_PER_GPU: usize = 3;

/// Numbers of sending GPUs of a switch that are measured, besides all of them.
const SOURCES: [usize; 5] = [1, 2, 3, 4, 8];

/// Largest number of root ports that the GPUs of a switch send to at once.
const MOST_PORTS: usize = 4;

/// Lists the patterns that show the limits of a machine whose GPUs reach each other on `paths`. Patterns of several
/// flows come first, then host memory, pairs, and the patterns by reading. The list ends at [`MAX_PATTERNS`], so
/// that a machine of any size is measured in bounded time.
pub fn plan(graph: &MachineGraph, paths: &Paths) -> Vec<TrafficPattern> {
    let mut list = PatternList {
        groups: groups(graph),
        graph,
        paths,
        patterns: Vec::new(),
        seen: HashSet::new(),
    };
    list.ways_out();
    list.root_ports();
    list.sockets();
    list.everybody();
    list.host_memory();
    list.pairs();
    list.by_reading();
    list.patterns.truncate(MAX_PATTERNS);
    list.patterns
}

/// Returns the GPUs behind each lowest switch, and each other GPU alone, in the order of their first GPU.
fn groups(graph: &MachineGraph) -> Vec<Vec<usize>> {
    let mut groups: Vec<(NodeId, Vec<usize>)> = Vec::new();
    for (gpu, facts) in graph.gpus.iter().enumerate() {
        let parent = graph.nodes[facts.node].parent;
        let switch = parent.filter(|&node| graph.nodes[node].kind == NodeKind::Switch);
        let key = switch.unwrap_or(facts.node);
        match groups.iter_mut().find(|(node, _)| *node == key) {
            Some((_, gpus)) => gpus.push(gpu),
            None => groups.push((key, vec![gpu])),
        }
    }
    groups.into_iter().map(|(_, gpus)| gpus).collect()
}

/// Returns the GPUs behind each switch that has a link towards the socket.
pub(super) fn behind_switches(graph: &MachineGraph) -> Vec<(NodeId, Vec<usize>)> {
    let switches = (0..graph.nodes.len())
        .filter(|&node| graph.nodes[node].kind == NodeKind::Switch && graph.up(node).is_some());
    let behind = |switch: NodeId| -> Vec<usize> {
        let is_behind = |&gpu: &usize| graph.ancestors(graph.gpus[gpu].node).any(|n| n == switch);
        (0..graph.gpus.len()).filter(is_behind).collect()
    };
    let all = switches.map(|switch| (switch, behind(switch)));
    all.filter(|(_, gpus)| !gpus.is_empty()).collect()
}

/// Pairs each of `from` with one of `to`, by place.
fn by_place(from: &[usize], to: &[usize]) -> Vec<(usize, usize)> {
    let pair = |(at, &gpu): (usize, &usize)| (gpu, to[at % to.len()]);
    from.iter().enumerate().map(pair).collect()
}

fn reversed(flows: &[(usize, usize)]) -> Vec<(usize, usize)> {
    flows.iter().map(|&(from, to)| (to, from)).collect()
}

struct PatternList<'a> {
    graph: &'a MachineGraph,
    paths: &'a Paths,
    /// GPUs behind each lowest switch.
    groups: Vec<Vec<usize>>,
    patterns: Vec<TrafficPattern>,
    /// Sorted flows of the patterns so far.
    seen: HashSet<Vec<ProbeFlow>>,
}

impl PatternList<'_> {
    /// Adds a pattern, unless one with equal flows is there.
    fn add_flows(&mut self, name: String, mut flows: Vec<ProbeFlow>) {
        flows.sort_unstable();
        flows.dedup();
        flows.retain(|flow| flow.from != flow.to);
        if !flows.is_empty() && self.seen.insert(flows.clone()) {
            self.patterns.push(TrafficPattern { name, flows });
        }
    }

    /// Adds a pattern of writes between GPUs.
    fn add(&mut self, name: String, flows: &[(usize, usize)]) {
        let write = |&(from, to): &(usize, usize)| ProbeFlow {
            from: FlowEnd::Gpu(from),
            to: FlowEnd::Gpu(to),
            is_read: false,
        };
        self.add_flows(name, flows.iter().map(write).collect());
    }

    /// Adds a pattern, its reverse, and both at once.
    fn add_ways(&mut self, [from, to]: [&str; 2], flows: &[(usize, usize)]) {
        let back = reversed(flows);
        self.add(format!("{from} to {to}"), flows);
        self.add(format!("{to} to {from}"), &back);
        self.add(
            format!("{from} and {to} both ways"),
            &[flows, &back].concat(),
        );
    }

    fn gpu(&self, gpu: usize) -> String {
        format!("GPU {}", self.graph.gpus[gpu].dev)
    }

    fn gpus(&self, gpus: &[usize]) -> String {
        match gpus {
            [gpu] => self.gpu(*gpu),
            _ => {
                let devs = gpus.iter().map(|&gpu| self.graph.gpus[gpu].dev.to_string());
                format!("GPUs {}", devs.collect::<Vec<_>>().join(" "))
            }
        }
    }

    fn socket(&self, gpu: usize) -> Option<NodeId> {
        let root = self.graph.ancestors(self.graph.gpus[gpu].node).last()?;
        (self.graph.nodes[root].kind == NodeKind::Socket).then_some(root)
    }

    /// Adds all GPUs of a switch at once out of it, to the GPUs of up to four other groups.
    fn ways_out(&mut self) {
        for (_, members) in behind_switches(self.graph) {
            let groups = self.groups.clone();
            let others: Vec<&Vec<usize>> = groups
                .iter()
                .filter(|group| group.iter().all(|gpu| !members.contains(gpu)))
                .collect();
            if members.len() < 2 || others.is_empty() {
                continue;
            }
            let first = others.partition_point(|group| group[0] < members[0]);
            let count = others.len();
            for step in [0, 1, 2, count / 2] {
                let other = others[(first + step) % count];
                let flows = by_place(&members, other);
                let names = [self.gpus(&members), self.gpus(other)];
                self.add_ways(names.each_ref().map(String::as_str), &flows);
            }
        }
    }

    /// Adds GPUs of a switch to one root port, and to several. Root ports of other sockets and of all sockets are
    /// measured separately, because switches of one socket may be connected beside the tree.
    fn root_ports(&mut self) {
        for (switch, members) in behind_switches(self.graph) {
            let [far, all] = self.ports(switch, &members);
            for ports in [&far, &all] {
                if let [port, ..] = ports.as_slice() {
                    let two = &members[..members.len().min(2)];
                    let name = format!(
                        "{} to {} behind one root port",
                        self.gpus(two),
                        self.gpus(port)
                    );
                    self.add(name, &by_place(two, port));
                }
                let most = ports.len().min(MOST_PORTS);
                for count in [2, most] {
                    if count > 1 && count <= most {
                        self.send_to_ports(&members, &ports[..count]);
                    }
                }
            }
        }
    }

    /// Returns the GPUs behind each root port that GPUs of `switch` send to through the switch's link towards the
    /// socket: at other sockets, and at all sockets with those of other sockets first.
    fn ports(&self, switch: NodeId, members: &[usize]) -> [Vec<Vec<usize>>; 2] {
        let Some(up) = self.graph.up(switch) else {
            return Default::default();
        };
        let mut ports: BTreeMap<(bool, LinkId), Vec<usize>> = BTreeMap::new();
        for to in (0..self.graph.gpus.len()).filter(|to| !members.contains(to)) {
            let path = self.paths.get(members[0], to);
            let is_near = self.socket(to) == self.socket(members[0]);
            if let (Some(port), true) = (path.root_port, path.links.contains(&up)) {
                ports.entry((is_near, port)).or_default().push(to);
            }
        }
        let far = ports.iter().filter(|((is_near, _), _)| !is_near);
        let far: Vec<Vec<usize>> = far.map(|(_, gpus)| gpus.clone()).collect();
        // Near and far root ports alternate, so that the first two are one of each.
        let near = ports.iter().filter(|((is_near, _), _)| *is_near);
        let mut near = near.map(|(_, gpus)| gpus.clone());
        let mut all = Vec::new();
        for port in &far {
            all.push(port.clone());
            all.extend(near.next());
        }
        all.extend(near);
        [far, all]
    }

    /// Adds sends from 1, 2, 3, 4, 8 and all of `members` to `ports` at once.
    fn send_to_ports(&mut self, members: &[usize], ports: &[Vec<usize>]) {
        let counts = SOURCES.into_iter().filter(|&count| count < members.len());
        for sources in counts.chain([members.len()]) {
            let flow = |at: usize| {
                let port = &ports[at % ports.len()];
                (members[at % sources], port[at / ports.len() % port.len()])
            };
            let flows: Vec<_> = (0..sources.max(ports.len())).map(flow).collect();
            let mut to: Vec<usize> = flows.iter().map(|&(_, to)| to).collect();
            to.sort_unstable();
            to.dedup();
            let [from, to] = [&members[..sources], &to].map(|gpus| self.gpus(gpus));
            let name = format!("{from} to {to} behind {} root ports", ports.len());
            self.add(name, &flows);
        }
    }

    /// Adds one GPU of each switch across to another socket, and all GPUs across.
    fn sockets(&mut self) {
        let mut sockets: Vec<(NodeId, Vec<Vec<usize>>)> = Vec::new();
        for group in self.groups.clone() {
            let Some(socket) = self.socket(group[0]) else {
                continue;
            };
            match sockets.iter_mut().find(|(node, _)| *node == socket) {
                Some((_, groups)) => groups.push(group),
                None => sockets.push((socket, vec![group])),
            }
        }
        let count = sockets.len();
        for a in 0..count {
            for b in a + 1..count {
                let is_next = [1, count / 2, count - 1].contains(&(b - a));
                if count <= ALL_SOCKETS || is_next {
                    let names = [sockets[a].0, sockets[b].0];
                    self.across(names, [&sockets[a].1, &sockets[b].1]);
                }
            }
        }
    }

    fn across(&mut self, sockets: [NodeId; 2], groups: [&[Vec<usize>]; 2]) {
        // The side with more groups sends from each of them.
        let is_swapped = groups[0].len() < groups[1].len();
        let [from, to] = if is_swapped {
            [groups[1], groups[0]]
        } else {
            groups
        };
        let mut names = sockets.map(|socket| self.graph.nodes[socket].name.clone());
        if is_swapped {
            names.reverse();
        }
        let pairs = || {
            from.iter()
                .enumerate()
                .map(|(at, group)| (group, &to[at % to.len()]))
        };
        let one: Vec<_> = pairs().map(|(a, b)| (a[0], b[0])).collect();
        let all: Vec<_> = pairs().flat_map(|(a, b)| by_place(a, b)).collect();
        for (what, flows) in [("one GPU of each switch", one), ("all GPUs", all)] {
            let from = format!("{what} of {}", names[0]);
            self.add_ways([&from, &names[1]], &flows);
        }
    }

    /// Adds every GPU to the next, and to the GPU half of the machine away.
    fn everybody(&mut self) {
        let order = self.graph.by_rank();
        let count = order.len();
        for step in [1, count / 2] {
            if step == 0 || count < 3 {
                continue;
            }
            let flow = |at: usize| (order[at], order[(at + step) % count]);
            let flows: Vec<_> = (0..count).map(flow).collect();
            let name = format!("every GPU to the GPU {step} places on");
            self.add(
                format!("{name}, both ways"),
                &[flows.clone(), reversed(&flows)].concat(),
            );
            self.add(name, &flows);
        }
    }

    /// Adds host memory of sockets and GPUs: each GPU alone to and from memory, both at once, and all GPUs of a switch.
    fn host_memory(&mut self) {
        let nodes = 0..self.graph.nodes.len();
        let sockets: Vec<NodeId> = nodes
            .filter(|&node| self.graph.nodes[node].kind == NodeKind::Socket)
            .collect();
        for (_, members) in behind_switches(self.graph) {
            if let (Some(socket), true) = (self.socket(members[0]), members.len() > 1) {
                self.host_flows(&members, socket);
            }
        }
        for gpu in 0..self.graph.gpus.len() {
            let own = sockets
                .iter()
                .position(|&node| Some(node) == self.socket(gpu));
            let count = sockets.len().min(HOSTS_PER_GPU);
            for step in 0..count {
                self.host_flows(&[gpu], sockets[(own.unwrap_or(0) + step) % sockets.len()]);
            }
        }
    }

    fn host_flows(&mut self, gpus: &[usize], socket: NodeId) {
        let to_host = |&gpu: &usize| ProbeFlow {
            from: FlowEnd::Gpu(gpu),
            to: FlowEnd::Host(socket),
            is_read: false,
        };
        let out: Vec<ProbeFlow> = gpus.iter().map(to_host).collect();
        let back = |flow: &ProbeFlow| ProbeFlow {
            from: flow.to,
            to: flow.from,
            is_read: false,
        };
        let into: Vec<ProbeFlow> = out.iter().map(back).collect();
        let (gpus, host) = (self.gpus(gpus), &self.graph.nodes[socket].name);
        let both = format!("{gpus} and memory of {host} both ways");
        let (there, here) = (
            format!("{gpus} to memory of {host}"),
            format!("memory of {host} to {gpus}"),
        );
        self.add_flows(there, out.clone());
        self.add_flows(here, into.clone());
        self.add_flows(both, [out, into].concat());
    }

    /// Adds pairs alone, one way and both ways: all of them on a small machine. On a large machine each GPU is paired
    /// with the next of its group, and with a GPU of three other groups.
    fn pairs(&mut self) {
        let count = self.graph.gpus.len();
        let mut pairs: Vec<(usize, usize)> = Vec::new();
        if count <= ALL_PAIRS {
            pairs.extend((0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b))));
        } else {
            let groups = &self.groups;
            for (at, group) in groups.iter().enumerate() {
                for (place, &gpu) in group.iter().enumerate() {
                    pairs.push((gpu, group[(place + 1) % group.len()]));
                    for step in [1, 2, groups.len() / 2] {
                        let other = &groups[(at + step) % groups.len()];
                        pairs.push((gpu, other[place % other.len()]));
                    }
                }
            }
        }
        for (a, b) in pairs {
            if a != b {
                let names = [self.gpu(a), self.gpu(b)];
                self.add_ways(names.each_ref().map(String::as_str), &[(a, b)]);
            }
        }
    }

    /// Adds the patterns between GPUs once more, by reading. Both ways at once are left out.
    fn by_reading(&mut self) {
        let is_one_way = |pattern: &TrafficPattern| {
            let senders: HashSet<FlowEnd> = pattern.flows.iter().map(|flow| flow.from).collect();
            pattern.is_peer_write() && pattern.flows.iter().all(|flow| !senders.contains(&flow.to))
        };
        for pattern in self.patterns.clone() {
            if is_one_way(&pattern) {
                let mut flows = pattern.flows;
                flows.iter_mut().for_each(|flow| flow.is_read = true);
                self.add_flows(format!("{}, by reading", pattern.name), flows);
            }
        }
    }
}
