//! Infers limits from measured patterns.
//!
//! 1. Two switches of one socket are connected beside the tree if they exchange more than they move to host memory.
//! 2. A link carries as much as it was seen to carry. Flows between GPUs decide, and host memory only for links
//!    that no such flow crosses: peer writes may be slower than copies to host memory.
//! 3. A pattern that gets less than 0.8 of the rates that the links predict shows a fan, if it leaves one switch
//!    from several GPUs or to several root ports, and otherwise a pool.

use super::plan::behind_switches;
use super::routes::{predicted_rates, route};
use super::{FlowEnd, MeasuredPattern};
use crate::topology::graph::{GraphLink, LinkId, LinkKind, MachineGraph, NodeId, NodeKind};
use crate::topology::measured::{MeasuredLimit, MeasuredLimits};
use crate::topology::paths::{PathType, Paths, PeerAccess};
use crate::topology::rates::FlowRoute;
use std::collections::{BTreeMap, BTreeSet};

/// Largest share of the predicted rate at which a pattern shows a limit that single links do not have, as a fraction.
const SHORT: [u64; 2] = [4, 5];

/// Least ratio of the rate between two switches to their rates to host memory that shows a link between them.
const BESIDE_TREE: [u64; 2] = [5, 4];

/// Returns the limits that the measured patterns show. `graph` is the machine without measured limits.
pub fn infer(
    graph: &MachineGraph,
    access: &PeerAccess,
    measured: &[MeasuredPattern],
) -> MeasuredLimits {
    let mut inference = Inference {
        graph: graph.clone(),
        paths: Paths::new(graph, access),
        measured: Vec::new(),
        limits: MeasuredLimits::default(),
    };
    inference.connect_switches(measured);
    inference.paths = Paths::new(&inference.graph, access);
    inference.set_routes(measured);
    inference.set_links();
    inference.explain_short_patterns();
    inference.limits
}

/// A measured pattern with the routes of its flows.
struct RoutedPattern<'a> {
    measured: &'a MeasuredPattern,
    routes: Vec<FlowRoute>,
}

impl RoutedPattern<'_> {
    /// Returns the MB/s over `links` together. A flow counts for each of the links that it crosses.
    fn over(&self, links: &[LinkId]) -> u64 {
        let flows = self.routes.iter().zip(&self.measured.mb_s);
        let over = flows.map(|(route, &mb_s)| {
            let crossed = route.links.iter().filter(|link| links.contains(link));
            crossed.count() as u64 * u64::from(mb_s)
        });
        over.sum()
    }

    fn crosses(&self, link: LinkId) -> bool {
        self.routes.iter().any(|route| route.links.contains(&link))
    }
}

struct Inference<'a> {
    /// The machine with the limits so far.
    graph: MachineGraph,
    paths: Paths,
    /// Patterns that limits are inferred from.
    measured: Vec<RoutedPattern<'a>>,
    limits: MeasuredLimits,
}

/// Returns the largest total of the patterns whose flows all go from one of `from` to one of `to`.
fn most_between(
    measured: &[MeasuredPattern],
    from: impl Fn(FlowEnd) -> bool,
    to: impl Fn(FlowEnd) -> bool,
) -> Option<u64> {
    let fits = |one: &&MeasuredPattern| {
        let mut flows = one.pattern.flows.iter();
        flows.all(|flow| from(flow.from) && to(flow.to)) && !is_peer_read(one)
    };
    measured
        .iter()
        .filter(fits)
        .map(MeasuredPattern::total)
        .max()
}

/// Returns whether GPUs read from GPUs. Reads are shown, but the library's kernels write.
fn is_peer_read(measured: &MeasuredPattern) -> bool {
    let is_gpu = |end: FlowEnd| matches!(end, FlowEnd::Gpu(_));
    let mut flows = measured.pattern.flows.iter();
    flows.any(|flow| is_gpu(flow.from) && is_gpu(flow.to) && flow.is_read)
}

fn to_mb_s(rate: u64) -> u32 {
    u32::try_from(rate).unwrap_or(u32::MAX).max(1)
}

impl<'a> Inference<'a> {
    /// Adds links between switches of one socket that exchange more than their ways to host memory carry.
    fn connect_switches(&mut self, measured: &[MeasuredPattern]) {
        let switches = behind_switches(&self.graph);
        for (at, (a, of_a)) in switches.iter().enumerate() {
            for (b, of_b) in &switches[at + 1..] {
                let path = self.paths.get(of_a[0], of_b[0]);
                let is_nearest = |switch: &NodeId, gpus: &[usize]| {
                    let parent = |gpu: &usize| self.graph.nodes[self.graph.gpus[*gpu].node].parent;
                    gpus.iter().all(|gpu| parent(gpu) == Some(*switch))
                };
                let is_split = is_nearest(a, of_a) && is_nearest(b, of_b);
                if path.class != PathType::Phb || !path.peer_access || !is_split {
                    continue;
                }
                if let Some(mb_s) = beside_tree(measured, of_a, of_b)
                    && let Some(names) = self.names([*a, *b])
                {
                    let limit = MeasuredLimit::Connect(names, mb_s);
                    self.add(limit);
                }
            }
        }
    }

    /// Finds the routes of the patterns from which limits are inferred.
    fn set_routes(&mut self, measured: &'a [MeasuredPattern]) {
        let usable = measured.iter().filter(|one| !is_peer_read(one));
        let routed = usable.map(|measured| RoutedPattern {
            measured,
            routes: measured
                .pattern
                .flows
                .iter()
                .map(|flow| route(&self.graph, &self.paths, flow))
                .collect(),
        });
        let all: Vec<RoutedPattern<'a>> = routed.collect();
        // Host memory counts only on links that no flow between GPUs crosses.
        let peers = all
            .iter()
            .filter(|one| one.measured.pattern.is_peer_write());
        let crossed: BTreeSet<LinkId> = peers
            .flat_map(|one| one.routes.iter().flat_map(|route| route.links.clone()))
            .collect();
        let counts = |one: &RoutedPattern<'_>| {
            one.measured.pattern.is_peer_write() || !crossed.iter().any(|&link| one.crosses(link))
        };
        self.measured = all.into_iter().filter(counts).collect();
        self.measured.sort_by_key(|one| one.routes.len());
    }

    /// Sets each link that a pattern crosses to the most that it has carried.
    fn set_links(&mut self) {
        let carried: Vec<u64> = (0..self.graph.links.len())
            .map(|link| self.most(&[link]))
            .collect();
        for link in 0..carried.len() {
            let back = MachineGraph::reverse(link);
            let [there, here] = [carried[link], carried.get(back).copied().unwrap_or(0)];
            let GraphLink { from, to, .. } = self.graph.links[link];
            // `connect_switches` has set the links beside the tree.
            let is_open = there > 0 && !self.graph.is_beside_tree(link);
            let Some(names) = self.names([from, to]).filter(|_| is_open) else {
                continue;
            };
            match there == here {
                true if link < back => self.add(MeasuredLimit::Link(names, to_mb_s(there))),
                true => {}
                false => self.add(MeasuredLimit::Direction(names, to_mb_s(there))),
            }
        }
    }

    /// Adds fans and pools until the graph explains the patterns, or no further limit would.
    fn explain_short_patterns(&mut self) {
        for at in 0..self.measured.len() {
            if !self.is_short(at, &self.graph) {
                continue;
            }
            let explained = self.fan(at).or_else(|| self.pool(at));
            if let Some(limit) = explained {
                self.add(limit);
            }
        }
    }

    /// Returns whether a pattern gets less than 0.8 of the rate that `graph` predicts.
    fn is_short(&self, at: usize, graph: &MachineGraph) -> bool {
        let measured = self.measured[at].measured;
        let flows = &measured.pattern.flows;
        let predicted = predicted_rates(graph, &self.paths, flows).into_iter();
        let predicted = predicted.fold(0u64, u64::saturating_add);
        u128::from(measured.total()) * u128::from(SHORT[1])
            < u128::from(predicted) * u128::from(SHORT[0])
    }

    /// Returns the fan that a short pattern shows: all its flows leave one switch through its link towards the
    /// socket, from several GPUs or to several root ports.
    fn fan(&self, at: usize) -> Option<MeasuredLimit> {
        let pattern = &self.measured[at];
        let ports: BTreeSet<LinkId> = pattern.routes.iter().filter_map(|r| r.root_port).collect();
        let sources: BTreeSet<usize> = pattern.routes.iter().map(|route| route.source).collect();
        if ports.is_empty() || sources.len() + ports.len() < 3 {
            return None;
        }
        let leaves_by = |switch: &NodeId| {
            let up = self.graph.up(*switch);
            up.is_some_and(|up| pattern.routes.iter().all(|route| route.links.contains(&up)))
        };
        let mut switches = behind_switches(&self.graph)
            .into_iter()
            .map(|(switch, _)| switch);
        let switch = switches.find(leaves_by)?;
        let limit = MeasuredLimit::Fan {
            switch: self.names([switch, switch])?[0].clone(),
            sources: sources.len() as u32,
            ports: ports.len() as u32,
            mb_s: to_mb_s(pattern.measured.total()),
        };
        self.explains(&limit, at).then_some(limit)
    }

    /// Returns the pool that a short pattern shows: the smallest set of links which, limited to the most that any
    /// pattern has carried over them, explains the pattern. If several are equally small, takes the links nearest to
    /// the sockets, which most GPUs share.
    fn pool(&self, at: usize) -> Option<MeasuredLimit> {
        let pattern = &self.measured[at];
        let mut sets = self.sets(pattern);
        sets.sort_by_key(|links| {
            let depths = links.iter().map(|&link| self.depth(link));
            (links.len(), depths.max(), links.clone())
        });
        sets.into_iter().find_map(|links| {
            let most = self.most(&links);
            let ends = links.iter().map(|&link| {
                let GraphLink { from, to, .. } = self.graph.links[link];
                self.names([from, to])
            });
            let limit = MeasuredLimit::Pool(ends.collect::<Option<_>>()?, to_mb_s(most));
            self.explains(&limit, at).then_some(limit)
        })
    }

    /// Returns the sets of links that may be a pool: both directions of a link, and the links into, out of, and at a
    /// node, with the links between sockets taken as one node. Only links that the pattern crosses count.
    fn sets(&self, pattern: &RoutedPattern<'_>) -> Vec<Vec<LinkId>> {
        let links = (0..self.graph.links.len()).filter(|&link| pattern.crosses(link));
        let mut sets: BTreeMap<(u8, usize), Vec<LinkId>> = BTreeMap::new();
        for link in links {
            let GraphLink {
                from, to, class, ..
            } = self.graph.links[link];
            let mut add = |kind: u8, node: usize| sets.entry((kind, node)).or_default().push(link);
            add(0, link & !1);
            if class == LinkKind::Socket {
                add(1, 0);
                continue;
            }
            for (kind, node) in [(2, from), (3, to), (4, from), (4, to)] {
                let is_shared = !matches!(self.graph.nodes[node].kind, NodeKind::Gpu(_))
                    || class == LinkKind::NvLink;
                if is_shared {
                    add(kind, node);
                }
            }
        }
        let mut sets: Vec<Vec<LinkId>> = sets.into_values().filter(|set| set.len() > 1).collect();
        sets.sort_unstable();
        sets.dedup();
        sets
    }

    /// Returns the number of links between a link and its socket; 0 for a link between sockets.
    fn depth(&self, link: LinkId) -> usize {
        let GraphLink { from, to, .. } = self.graph.links[link];
        let depth = |node: NodeId| self.graph.ancestors(node).count();
        depth(from).max(depth(to)) - 1
    }

    /// Returns the most MB/s that a pattern has carried over `links` together.
    fn most(&self, links: &[LinkId]) -> u64 {
        self.measured
            .iter()
            .map(|one| one.over(links))
            .max()
            .unwrap_or(0)
    }

    /// Returns whether a pattern gets its measured rate with a further limit.
    fn explains(&self, limit: &MeasuredLimit, at: usize) -> bool {
        let mut graph = self.graph.clone();
        let mut limits = MeasuredLimits::default();
        limits.push(limit.clone());
        limits.apply(&mut graph).is_ok() && !self.is_short(at, &graph)
    }

    fn add(&mut self, limit: MeasuredLimit) {
        let mut limits = MeasuredLimits::default();
        limits.push(limit.clone());
        if limits.apply(&mut self.graph).is_ok() {
            self.limits.push(limit);
        }
    }

    /// Returns the names of two nodes in the text form; `None` if a name fits several nodes, so that no limit can
    /// name them.
    fn names(&self, ends: [NodeId; 2]) -> Option<[String; 2]> {
        let [a, b] = ends.map(|node| {
            let name = &self.graph.nodes[node].name;
            let mut others = self.graph.nodes.iter().filter(|other| other.name == *name);
            let is_single = others.next().is_some() && others.next().is_none();
            is_single.then(|| name.replace(' ', "_"))
        });
        Some([a?, b?])
    }
}

/// Returns the MB/s each way between two groups of GPUs, if it is more than their switches move to and from host
/// memory.
fn beside_tree(measured: &[MeasuredPattern], a: &[usize], b: &[usize]) -> Option<u32> {
    let of = |gpus: &'_ [usize]| {
        let gpus = gpus.to_vec();
        move |end: FlowEnd| matches!(end, FlowEnd::Gpu(gpu) if gpus.contains(&gpu))
    };
    let is_host = |end: FlowEnd| matches!(end, FlowEnd::Host(_));
    let mut least = u64::MAX;
    for (from, to) in [(a, b), (b, a)] {
        let beside = most_between(measured, of(from), of(to))?;
        let out = most_between(measured, of(from), is_host)?;
        let into = most_between(measured, is_host, of(to))?;
        if beside * BESIDE_TREE[1] <= out.min(into) * BESIDE_TREE[0] {
            return None;
        }
        least = least.min(beside);
    }
    Some(to_mb_s(least))
}
