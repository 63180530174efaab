//! Paths between GPUs: the links that a message crosses, and the class of the path.

use super::graph::{BandwidthOrigin, LinkId, LinkKind, MachineGraph, NodeId, NodeKind};
use super::machine::XmlVersion;
use std::fmt;

/// Class of a path between two GPUs, with NCCL's names, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathType {
    /// A GPU and itself.
    Loc,
    /// NVLink or Infinity Fabric, perhaps through link switches, but through no other GPU.
    Nvl,
    /// A single PCIe switch.
    Pix,
    /// Several PCIe switches below one root port.
    Pxb,
    /// The host bridge of one socket.
    Phb,
    /// The link between sockets.
    Sys,
    /// No path.
    Dis,
}

impl PathType {
    /// Returns NCCL's name.
    pub const fn name(self) -> &'static str {
        match self {
            PathType::Loc => "LOC",
            PathType::Nvl => "NVL",
            PathType::Pix => "PIX",
            PathType::Pxb => "PXB",
            PathType::Phb => "PHB",
            PathType::Sys => "SYS",
            PathType::Dis => "DIS",
        }
    }
}

impl fmt::Display for PathType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Pairs of GPUs that read and write each other's memory. Other pairs exchange data through memory of the
/// receiver's socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerAccess {
    /// Pairs that NCCL or RCCL would allow on this machine: paths up to a class that depends on the
    /// processor.
    Rule,
    /// No pair of GPUs.
    Never,
    /// GPUs whose path is of this class or nearer.
    UpTo(PathType),
    /// For each ordered pair whether it has peer access, at index `from * gpus + to`.
    Pairs(Vec<bool>),
}

impl PeerAccess {
    /// Returns the farthest class with peer access by the rule of the machine's description: NCCL allows peer
    /// access below one root port, and everywhere if an AMD processor has at most two GPUs. RCCL allows peer
    /// access everywhere on AMD and POWER processors or if the architecture is unknown, and below one root
    /// port otherwise.
    fn rule(graph: &MachineGraph) -> PathType {
        let [arch, vendor] = graph.processor.each_ref().map(String::as_str);
        let amd = (arch, vendor) == ("x86_64", "AuthenticAMD");
        match graph.version {
            XmlVersion::Nccl if amd && graph.gpus.len() <= 2 => PathType::Sys,
            XmlVersion::Nccl => PathType::Pxb,
            XmlVersion::Rccl if amd || matches!(arch, "ppc64" | "ppc64le" | "") => PathType::Sys,
            XmlVersion::Rccl => PathType::Pxb,
        }
    }
}

/// The path from one GPU to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// Class of the path that a message would take with peer access.
    pub class: PathType,
    /// Whether the GPUs have peer access.
    pub peer_access: bool,
    /// Links that a message crosses, in order. Without peer access, these links lead through the receiver's
    /// socket.
    pub links: Vec<LinkId>,
    /// Link from a socket down its root port, if the path has one.
    pub root_port: Option<LinkId>,
}

/// The paths between all GPUs of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    count: usize,
    paths: Vec<Path>,
}

impl Paths {
    /// Finds the path of each pair of GPUs.
    pub fn new(graph: &MachineGraph, access: &PeerAccess) -> Paths {
        let count = graph.gpus.len();
        let finder = Finder::new(graph);
        let farthest = match access {
            PeerAccess::Rule => PeerAccess::rule(graph),
            PeerAccess::Never => PathType::Loc,
            PeerAccess::UpTo(class) => *class,
            PeerAccess::Pairs(_) => PathType::Dis,
        };
        let pair = |from: usize, to: usize| {
            let [a, b] = [from, to].map(|gpu| graph.gpus[gpu].node);
            let (class, mut links) = finder.path(a, b);
            let peer_access = match access {
                PeerAccess::Pairs(pairs) => pairs.get(from * count + to) == Some(&true),
                _ => class <= farthest,
            };
            // Slices of a GPU have no peer access.
            let peer_access = peer_access && !graph.gpus[from].mig && !graph.gpus[to].mig;
            if !peer_access && class > PathType::Loc {
                links = finder.through_socket(a, b);
            }
            Path {
                class,
                peer_access,
                root_port: finder.root_port(&links),
                links,
            }
        };
        let paths = (0..count * count)
            .map(|at| pair(at / count, at % count))
            .collect();
        Paths { count, paths }
    }

    /// Returns the PCIe and socket links from GPU `gpu` to network device `nic`, followed by the link of its
    /// port. `gpu` and `nic` are indices in [`MachineGraph::gpus`] and [`MachineGraph::nics`]. `None` if
    /// there is no path.
    pub fn to_nic(graph: &MachineGraph, gpu: usize, nic: usize) -> Option<Vec<LinkId>> {
        Paths::from_node_to_nic(graph, graph.gpus.get(gpu)?.node, nic)
    }

    /// Returns the links from `node`, a GPU or a socket, to network device `nic`, as [`Paths::to_nic`].
    pub(super) fn from_node_to_nic(
        graph: &MachineGraph,
        node: NodeId,
        nic: usize,
    ) -> Option<Vec<LinkId>> {
        let nic = graph.nics.get(nic)?.node;
        let is_port = |id: &LinkId| {
            let link = graph.links[*id];
            link.class == LinkKind::Network && link.to == nic
        };
        let port = (0..graph.links.len()).find(is_port)?;
        let (_, mut links) = Finder::new(graph).tree(node, graph.links[port].from)?;
        links.push(port);
        Some(links)
    }

    /// Returns the class of the PCIe path from GPU `gpu` to the adapter of network device `nic`, by the indices of
    /// [`Paths::to_nic`]. `None` if there is no path, or if the device is on no PCI bus.
    pub fn class_to_nic(graph: &MachineGraph, gpu: usize, nic: usize) -> Option<PathType> {
        let (gpu, nic) = (graph.gpus.get(gpu)?.node, graph.nics.get(nic)?.node);
        let adapter = graph.nodes[nic].parent?;
        if graph.nodes[adapter].kind == NodeKind::Socket {
            return None;
        }
        let finder = Finder::new(graph);
        let (top, links) = finder.tree(gpu, adapter)?;
        Some(finder.tree_class(top, &links))
    }

    /// Returns the PCIe and socket links from GPU `gpu`, by index in [`MachineGraph::gpus`], to the memory of `socket`,
    /// and the links back. `None` if there is no path.
    pub(super) fn to_socket(
        graph: &MachineGraph,
        gpu: usize,
        socket: NodeId,
    ) -> Option<[Vec<LinkId>; 2]> {
        let node = graph.gpus.get(gpu)?.node;
        let (_, there) = Finder::new(graph).tree(node, socket)?;
        let back = there.iter().rev().copied();
        let back = back.map(MachineGraph::reverse).collect();
        Some([there, back])
    }

    /// Returns the path from GPU `from` to GPU `to`, by index in [`MachineGraph::gpus`].
    pub fn get(&self, from: usize, to: usize) -> &Path {
        &self.paths[from * self.count + to]
    }

    /// Returns the number of GPUs.
    pub const fn count(&self) -> usize {
        self.count
    }
}

/// Finds paths in a graph, with the links of each node at hand.
struct Finder<'a> {
    graph: &'a MachineGraph,
    up: Vec<Option<LinkId>>,
    /// For each node, the links out of the node that do not belong to the PCIe tree.
    beside: Vec<Vec<LinkId>>,
}

impl<'a> Finder<'a> {
    fn new(graph: &'a MachineGraph) -> Finder<'a> {
        let mut up = vec![None; graph.nodes.len()];
        let mut beside = vec![Vec::new(); graph.nodes.len()];
        for (id, link) in graph.links.iter().enumerate() {
            match link.class {
                LinkKind::Pcie if graph.nodes[link.from].parent == Some(link.to) => {
                    up[link.from] = Some(id);
                }
                LinkKind::NvLink | LinkKind::Socket => beside[link.from].push(id),
                LinkKind::Pcie if graph.is_beside_tree(id) => beside[link.from].push(id),
                _ => {}
            }
        }
        Finder { graph, up, beside }
    }

    fn path(&self, a: NodeId, b: NodeId) -> (PathType, Vec<LinkId>) {
        if a == b {
            return (PathType::Loc, Vec::new());
        }
        if let Some(links) = self.nvlink(a, b) {
            return (PathType::Nvl, links);
        }
        let Some((top, links)) = self.tree(a, b) else {
            return (PathType::Dis, Vec::new());
        };
        (self.tree_class(top, &links), links)
    }

    /// Returns the class of a path along the PCIe tree, whose highest node is `top`.
    fn tree_class(&self, top: NodeId, links: &[LinkId]) -> PathType {
        let sockets = links
            .iter()
            .any(|&link| self.graph.links[link].class == LinkKind::Socket);
        match self.graph.nodes[top].kind {
            _ if sockets => PathType::Sys,
            NodeKind::Socket => PathType::Phb,
            _ if links.len() == 2 => PathType::Pix,
            _ => PathType::Pxb,
        }
    }

    /// Returns the NVLinks from `a` to `b`: a direct link, or two links through a link switch or a socket,
    /// whichever is faster.
    fn nvlink(&self, a: NodeId, b: NodeId) -> Option<Vec<LinkId>> {
        let links = &self.graph.links;
        let nvlink = |node: NodeId| {
            self.beside[node]
                .iter()
                .copied()
                .filter(|&id| links[id].class == LinkKind::NvLink)
        };
        let direct = nvlink(a).filter(|&id| links[id].to == b).map(|id| vec![id]);
        let is_gpu = |node: NodeId| matches!(self.graph.nodes[node].kind, NodeKind::Gpu(_));
        let through = nvlink(a)
            .filter(|&id| !is_gpu(links[id].to))
            .flat_map(|id| {
                let on = nvlink(links[id].to).filter(|&on| links[on].to == b);
                on.map(move |on| vec![id, on])
            });
        let slowest = |path: &Vec<LinkId>| {
            path.iter()
                .map(|&id| links[id].bandwidth.mb_s)
                .min()
                .unwrap_or(0)
        };
        // If several are equally fast, the first link of the description wins.
        direct.chain(through).first_max_by_key(slowest)
    }

    /// Returns the path along PCIe and between sockets, and the highest node on it. Between a GPU and its socket, NVLink
    /// may replace PCIe.
    fn tree(&self, a: NodeId, b: NodeId) -> Option<(NodeId, Vec<LinkId>)> {
        let over: Vec<NodeId> = self.graph.ancestors(b).collect();
        let mut links = Vec::new();
        let mut top = a;
        while !over.contains(&top) {
            let mut across = self.beside[top].iter().copied().filter(|&id| {
                let link = self.graph.links[id];
                link.class == LinkKind::Pcie && over.contains(&link.to)
            });
            if let Some(link) = across.next() {
                links.push(link);
                top = self.graph.links[link].to;
                break;
            }
            match self.up[top] {
                Some(up) => {
                    links.push(up);
                    top = self.graph.links[up].to;
                }
                None => {
                    let root = *over.last()?;
                    let across = self.beside[top].iter().copied();
                    let across =
                        across.filter(|&id| self.graph.links[id].class == LinkKind::Socket);
                    let link = across
                        .into_iter()
                        .find(|&id| self.graph.links[id].to == root)?;
                    links.push(link);
                    top = root;
                }
            }
        }
        if let Some(at) = links
            .iter()
            .position(|&id| self.is_socket(self.graph.links[id].to))
            && let Some(nvlink) = self.faster_nvlink(a, &links[..=at])
        {
            links.splice(..=at, [nvlink]);
        }
        links.extend(self.down(top, &over)?);
        Some((top, links))
    }

    fn is_socket(&self, node: NodeId) -> bool {
        self.graph.nodes[node].kind == NodeKind::Socket
    }

    /// Returns the NVLink from a GPU to its socket, as POWER9 has, if the link is faster than `ups`, the PCIe links to the
    /// socket. A link of unknown speed is slower than any other.
    fn faster_nvlink(&self, gpu: NodeId, ups: &[LinkId]) -> Option<LinkId> {
        let socket = self.graph.ancestors(gpu).last()?;
        let speed = |&id: &LinkId| {
            let bandwidth = self.graph.links[id].bandwidth;
            (bandwidth.origin > BandwidthOrigin::Assumed, bandwidth.mb_s)
        };
        let slowest = ups.iter().map(speed).min()?;
        let to_socket = self.beside[gpu].iter().copied().filter(|&id| {
            let link = self.graph.links[id];
            link.class == LinkKind::NvLink && link.to == socket && self.is_socket(socket)
        });
        to_socket
            .filter(|id| speed(id) > slowest)
            .first_max_by_key(speed)
    }

    /// Returns the links down from `top` to the first node of `over`, which lists a node and its ancestors.
    fn down(&self, top: NodeId, over: &[NodeId]) -> Option<Vec<LinkId>> {
        let below = over.iter().take_while(|&&node| node != top);
        let ups: Option<Vec<LinkId>> = below.map(|&node| self.up[node]).collect();
        let mut ups = ups?;
        if self.is_socket(top)
            && let Some(nvlink) = self.faster_nvlink(over[0], &ups)
        {
            ups = vec![nvlink];
        }
        Some(ups.into_iter().rev().map(MachineGraph::reverse).collect())
    }

    /// Returns the last link of a path that leads from a socket to a device.
    fn root_port(&self, links: &[LinkId]) -> Option<LinkId> {
        links.iter().copied().rfind(|&id| {
            let link = self.graph.links[id];
            link.class != LinkKind::Socket && self.is_socket(link.from)
        })
    }

    /// Returns the path from `a` up to its socket, to the socket of `b`, and down to `b`.
    fn through_socket(&self, a: NodeId, b: NodeId) -> Vec<LinkId> {
        let over: Vec<NodeId> = self.graph.ancestors(b).collect();
        let root = over.last().copied().unwrap_or(b);
        let (Some((_, mut links)), Some(down)) = (self.tree(a, root), self.down(root, &over))
        else {
            return Vec::new();
        };
        links.extend(down);
        links
    }
}

/// Returns the first of several largest items, while [`Iterator::max_by_key`] returns the last.
trait FirstLargest: Iterator + Sized {
    fn first_max_by_key<K: Ord>(self, key: impl Fn(&Self::Item) -> K) -> Option<Self::Item> {
        self.reduce(|best, item| if key(&item) > key(&best) { item } else { best })
    }
}

impl<I: Iterator> FirstLargest for I {}
