//! Clusters of hosts that are all alike, and the flows of an all_reduce over all their GPUs.

use crate::error::{Error, Result};
use crate::topology::flows::Loads;
use crate::topology::graph::{
    Bandwidth, BandwidthOrigin, GraphLink, GraphNode, LinkId, LinkKind, MachineGraph, NicFacts,
    NodeId, NodeKind,
};
use crate::topology::hierarchy::Hierarchy;
use crate::topology::paths::{Paths, PeerAccess};

/// Hosts with equal graphs. The network between the ports of the hosts has unlimited bandwidth.
///
/// Ranks are numbered host by host, and inside a host in the order of the GPUs' ranks.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// Graph of a host, with its ports.
    pub graph: MachineGraph,
    /// Paths between the GPUs of a host.
    pub paths: Paths,
    /// Number of hosts; at least 1.
    pub hosts: usize,
    /// Links from each GPU to the network, by index in [`MachineGraph::gpus`].
    out: Vec<Vec<LinkId>>,
}

/// A port of a host, and the GPUs that send and receive through it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterPort {
    /// MB/s each way; at least 1.
    pub mb_s: u32,
    /// GPUs by index in [`MachineGraph::gpus`].
    pub gpus: Vec<usize>,
}

impl Cluster {
    /// Creates a single host, without ports.
    pub fn single(graph: MachineGraph, paths: Paths) -> Cluster {
        Cluster {
            out: vec![Vec::new(); graph.gpus.len()],
            graph,
            paths,
            hosts: 1,
        }
    }

    /// Creates `hosts` hosts with `ports` each. A port is right beside its GPUs: data between a port and its
    /// GPUs loads no PCIe link.
    ///
    /// # Errors
    /// Invalid argument if there is no host, or if a GPU is not on exactly one port.
    pub fn new(
        host: &MachineGraph,
        access: &PeerAccess,
        hosts: usize,
        ports: &[ClusterPort],
    ) -> Result<Cluster> {
        if hosts == 0 {
            return Err(no_host());
        }
        let mut graph = host.clone();
        let network = add_node(&mut graph, NodeKind::LinkSwitch, "network".into());
        let mut out: Vec<Vec<LinkId>> = vec![Vec::new(); graph.gpus.len()];
        for (number, port) in ports.iter().enumerate() {
            let link = add_port(&mut graph, network, number, port.mb_s.max(1));
            for &gpu in &port.gpus {
                match out.get_mut(gpu) {
                    Some(links) if links.is_empty() => links.push(link),
                    Some(_) => {
                        return Err(Error::invalid_argument(format!(
                            "GPU {gpu} is on two ports of a host"
                        )));
                    }
                    None => {
                        return Err(Error::invalid_argument(format!(
                            "port {number} is for GPU {gpu}, but a host has {}",
                            graph.gpus.len()
                        )));
                    }
                }
            }
        }
        if let Some(gpu) = out.iter().position(Vec::is_empty) {
            return Err(Error::invalid_argument(format!(
                "GPU {gpu} is on no port of its host"
            )));
        }
        let paths = Paths::new(&graph, access);
        Ok(Cluster {
            graph,
            paths,
            hosts,
            out,
        })
    }

    /// Creates `hosts` hosts whose GPUs use the network devices of the host's graph. GPU g uses device
    /// `nics[g]`; both are indices, in [`MachineGraph::gpus`] and [`MachineGraph::nics`]. Data between a GPU
    /// and its device loads the PCIe links on the path.
    ///
    /// # Errors
    /// Invalid argument if there is no host, if a GPU has no device, or if no links lead to it.
    pub fn with_nics(
        graph: MachineGraph,
        access: &PeerAccess,
        hosts: usize,
        nics: &[usize],
    ) -> Result<Cluster> {
        let way = |gpu: usize| {
            let nic = nics.get(gpu).copied();
            let links = nic.and_then(|nic| Paths::to_nic(&graph, gpu, nic));
            links.ok_or_else(|| match nic {
                None => Error::invalid_argument(format!("GPU {gpu} is on no port of its host")),
                Some(nic) => Error::invalid_argument(format!(
                    "no links lead from GPU {gpu} to network device {nic}"
                )),
            })
        };
        if hosts == 0 {
            return Err(no_host());
        }
        let out = (0..graph.gpus.len()).map(way).collect::<Result<_>>()?;
        Ok(Cluster {
            paths: Paths::new(&graph, access),
            graph,
            hosts,
            out,
        })
    }

    /// Returns the number of GPUs of all hosts.
    pub fn ranks(&self) -> usize {
        self.hosts * self.graph.gpus.len()
    }

    /// Returns the links from a GPU to the network.
    pub fn out(&self, gpu: usize) -> &[LinkId] {
        &self.out[gpu]
    }

    /// Returns the links from the network to a GPU.
    pub fn back(&self, gpu: usize) -> Vec<LinkId> {
        let links = self.out[gpu].iter().rev();
        links.map(|&link| MachineGraph::reverse(link)).collect()
    }

    /// Returns the loads of a host under a ring by rank over all GPUs. With `both_ways` half of the message goes
    /// each way round.
    pub fn flat_ring(&self, both_ways: bool) -> Loads {
        let n = self.ranks() as u64;
        let mut loads = Loads::new(&self.graph, n.max(1));
        let order = self.graph.by_rank();
        let [there, back] = match both_ways {
            true => [n.saturating_sub(1); 2],
            false => [2 * n.saturating_sub(1), 0],
        };
        for pair in order.windows(2) {
            loads.send(&self.paths, pair[0], pair[1], there);
            loads.send(&self.paths, pair[1], pair[0], back);
        }
        let (Some(&first), Some(&last)) = (order.first(), order.last()) else {
            return loads;
        };
        if self.hosts == 1 {
            loads.send(&self.paths, last, first, there);
            loads.send(&self.paths, first, last, back);
        } else {
            // In the ring, the last GPU of a host is followed by the first GPU of the next host.
            self.across(&mut loads, last, there, back);
            self.across(&mut loads, first, back, there);
        }
        loads
    }

    /// Returns the loads of a host under a two-shot between all GPUs.
    pub fn flat_direct(&self) -> Loads {
        let gpus = self.graph.gpus.len();
        let mut loads = Loads::new(&self.graph, self.ranks().max(1) as u64);
        let elsewhere = 2 * (self.ranks() - gpus) as u64;
        for from in 0..gpus {
            for to in (0..gpus).filter(|&to| to != from) {
                loads.send(&self.paths, from, to, 2);
            }
            self.across(&mut loads, from, elsewhere, elsewhere);
        }
        loads
    }

    /// Returns the loads of a host under a schedule on two levels. Inside hosts it runs `inside`, or a
    /// two-shot if `inside` is `None`. Between hosts there is a rail for each GPU of a host. A ring and a
    /// two-shot on rails load ports alike.
    pub fn rails(&self, inside: Option<&Hierarchy>) -> Loads {
        let gpus = self.graph.gpus.len();
        let hosts = self.hosts as u64;
        let (mut loads, owned) = match inside {
            Some(inside) => inside.loads_and_owned(&self.graph, &self.paths, hosts),
            None => {
                let mut loads = Loads::new(&self.graph, gpus.max(1) as u64 * hosts);
                for from in 0..gpus {
                    for to in (0..gpus).filter(|&to| to != from) {
                        loads.send(&self.paths, from, to, 2 * hosts);
                    }
                }
                loads.end_phase();
                (loads, vec![hosts; gpus])
            }
        };
        for (gpu, owned) in owned.into_iter().enumerate() {
            // A host sends its sum of each part that another host owns, and the result of its own part to
            // every other host.
            let units = 2 * (hosts - 1) * (owned / hosts);
            self.across(&mut loads, gpu, units, units);
        }
        loads
    }

    /// Adds units that a GPU sends to other hosts, and units that it receives from them.
    fn across(&self, loads: &mut Loads, gpu: usize, sent: u64, received: u64) {
        loads.add(&self.out[gpu], sent);
        loads.add(&self.back(gpu), received);
    }
}

fn no_host() -> Error {
    Error::invalid_argument("a cluster has at least one host")
}

fn add_node(graph: &mut MachineGraph, kind: NodeKind, name: String) -> NodeId {
    let parent = None;
    graph.nodes.push(GraphNode { kind, name, parent });
    graph.nodes.len() - 1
}

/// Adds a port and returns its link to the network.
fn add_port(graph: &mut MachineGraph, network: NodeId, number: usize, mb_s: u32) -> LinkId {
    let kind = NodeKind::Nic(graph.nics.len());
    let node = add_node(graph, kind, format!("port {number}"));
    graph.nics.push(NicFacts {
        node,
        dev: number as u32,
        guid: 0,
        gdr: true,
    });
    let link = graph.links.len();
    for (from, to) in [(node, network), (network, node)] {
        graph.links.push(GraphLink {
            from,
            to,
            class: LinkKind::Network,
            bandwidth: Bandwidth {
                mb_s,
                origin: BandwidthOrigin::File,
            },
        });
    }
    link
}
