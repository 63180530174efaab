//! Measured limits of a machine's links. A measured limit replaces the figure of a file, the operating system
//! or a table.

mod text;

use super::BusId;
use super::graph::{
    Bandwidth, BandwidthOrigin, GraphLink, LinkId, LinkKind, MachineGraph, NodeId, NodeKind,
};
use super::limits::{FanCap, LinkPool};
use crate::error::{Error, Result};

/// Limits as a measurement found them, in order. A later limit of a link replaces an earlier limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeasuredLimits {
    lines: Vec<(usize, MeasuredLimit)>,
}

/// A measured limit. Nodes are named as in the text form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MeasuredLimit {
    /// MB/s from the first node to the second.
    Direction([String; 2], u32),
    /// MB/s each way between two nodes.
    Link([String; 2], u32),
    /// MB/s each way of a PCIe link between two switches that are not above each other. The link is added if
    /// the graph lacks it.
    Connect([String; 2], u32),
    /// MB/s that several directions carry together.
    Pool(Vec<[String; 2]>, u32),
    /// Bandwidth of the way out of a switch that many GPUs share.
    Fan {
        /// Switch whose link towards the socket is slowed down.
        switch: String,
        /// Least number of sending GPUs at which the bandwidth holds.
        sources: u32,
        /// Least number of receiving root ports at which the bandwidth holds.
        ports: u32,
        /// MB/s of the link while the limit holds.
        mb_s: u32,
    },
}

impl MeasuredLimits {
    /// Adds a limit. If [`MeasuredLimits::apply`] rejects the limit, the error names the limit's number,
    /// counted from 1.
    pub fn push(&mut self, limit: MeasuredLimit) {
        self.lines.push((self.lines.len() + 1, limit));
    }

    /// Returns the limits in order.
    pub fn limits(&self) -> impl Iterator<Item = &MeasuredLimit> {
        self.lines.iter().map(|(_, limit)| limit)
    }

    /// Sets the limits of `graph`. Leaves `graph` unchanged if it returns an error. Paths must be found
    /// afterwards, because links may have been added.
    ///
    /// # Errors
    /// Invalid argument, with the line, if a node or link does not exist, if a name fits several, or if a limit
    /// does not fit its nodes.
    pub fn apply(&self, graph: &mut MachineGraph) -> Result<()> {
        let mut changed = graph.clone();
        for (line, limit) in &self.lines {
            let applied = apply(limit, &mut changed);
            applied.map_err(|why| Error::invalid_argument(format!("line {line}: {why}")))?;
        }
        *graph = changed;
        Ok(())
    }

    /// Sets the limits of `graph` that fit it, and returns the number of the others. The graph of a communicator's ranks
    /// lacks devices that no rank uses. Of a pool, the links that are there count.
    pub fn apply_known(&self, graph: &mut MachineGraph) -> usize {
        let mut unknown = 0;
        for (_, limit) in &self.lines {
            let known = match limit {
                MeasuredLimit::Pool(directions, mb_s) => {
                    let mut directions = directions.clone();
                    directions.retain(|ends| find_link(graph, ends).is_ok());
                    (!directions.is_empty()).then_some(MeasuredLimit::Pool(directions, *mb_s))
                }
                other => Some(other.clone()),
            };
            let applied = known.is_some_and(|limit| apply(&limit, graph).is_ok());
            unknown += usize::from(!applied);
        }
        unknown
    }
}

fn apply(limit: &MeasuredLimit, graph: &mut MachineGraph) -> Result<(), String> {
    match limit {
        MeasuredLimit::Direction(ends, mb_s) => {
            let link = find_link(graph, ends)?;
            graph.links[link].bandwidth = measured(*mb_s);
        }
        MeasuredLimit::Link(ends, mb_s) => {
            let link = find_link(graph, ends)?;
            for link in [link, MachineGraph::reverse(link)] {
                graph.links[link].bandwidth = measured(*mb_s);
            }
        }
        MeasuredLimit::Connect(ends, mb_s) => connect(graph, ends, *mb_s)?,
        MeasuredLimit::Pool(directions, mb_s) => {
            let mut links = Vec::new();
            for ends in directions {
                links.push(find_link(graph, ends)?);
            }
            links.sort_unstable();
            links.dedup();
            graph.pools.retain(|pool| pool.links != links);
            graph.pools.push(LinkPool { links, mb_s: *mb_s });
        }
        MeasuredLimit::Fan {
            switch,
            sources,
            ports,
            mb_s,
        } => {
            let ways: Vec<LinkId> = find_nodes(graph, switch)?
                .into_iter()
                .filter(|&node| graph.nodes[node].kind == NodeKind::Switch)
                .filter_map(|node| graph.up(node))
                .collect();
            let &[link] = ways.as_slice() else {
                return Err(format!(
                    "{switch} names {} switches with a way out; a fan needs one",
                    ways.len()
                ));
            };
            let (sources, ports, mb_s) = (*sources, *ports, *mb_s);
            let cap = FanCap {
                link,
                sources,
                ports,
                mb_s,
            };
            let key = |fan: &FanCap| (fan.link, fan.sources, fan.ports);
            graph.fans.retain(|fan| key(fan) != key(&cap));
            graph.fans.push(cap);
        }
    }
    Ok(())
}

const fn measured(mb_s: u32) -> Bandwidth {
    Bandwidth {
        mb_s,
        origin: BandwidthOrigin::Measured,
    }
}

/// Returns the nodes with this name. There may be several, because bridges may share an address.
fn find_nodes(graph: &MachineGraph, name: &str) -> Result<Vec<NodeId>, String> {
    let address = name.parse::<BusId>().map(|bus_id| bus_id.to_string());
    let is_named = |node: &NodeId| match &address {
        Ok(address) => graph.nodes[*node].name == *address,
        Err(()) => graph.nodes[*node].name.replace(' ', "_") == name,
    };
    let found: Vec<NodeId> = (0..graph.nodes.len()).filter(is_named).collect();
    if found.is_empty() {
        return Err(format!("the machine has no node {name}"));
    }
    Ok(found)
}

fn find_link(graph: &MachineGraph, [from, to]: &[String; 2]) -> Result<LinkId, String> {
    let (a, b) = (find_nodes(graph, from)?, find_nodes(graph, to)?);
    let is_between = |id: &LinkId| {
        let link = graph.links[*id];
        a.contains(&link.from) && b.contains(&link.to)
    };
    let found: Vec<LinkId> = (0..graph.links.len()).filter(is_between).collect();
    match found.as_slice() {
        [link] => Ok(*link),
        [] => Err(format!("no link leads from {from} to {to}")),
        _ => Err(format!(
            "{} links lead from {from} to {to}; the names fit several nodes",
            found.len()
        )),
    }
}

/// Adds a link between two switches, or sets the link that is there.
fn connect(graph: &mut MachineGraph, ends: &[String; 2], mb_s: u32) -> Result<(), String> {
    let mut nodes = [0; 2];
    for (node, name) in nodes.iter_mut().zip(ends) {
        *node = match find_nodes(graph, name)?.as_slice() {
            [one] if graph.nodes[*one].kind == NodeKind::Switch => *one,
            [_] => return Err(format!("{name} is no switch")),
            _ => return Err(format!("{name} names several nodes")),
        };
    }
    let [a, b] = nodes;
    if a == b {
        return Err(format!("{} cannot be connected with itself", ends[0]));
    }
    let bandwidth = measured(mb_s);
    let mut found = false;
    for link in &mut graph.links {
        if (link.from, link.to) == (a, b) || (link.from, link.to) == (b, a) {
            link.bandwidth = bandwidth;
            found = true;
        }
    }
    if !found {
        for (from, to) in [(a, b), (b, a)] {
            graph.links.push(GraphLink {
                from,
                to,
                class: LinkKind::Pcie,
                bandwidth,
            });
        }
    }
    Ok(())
}
