//! The graph of a machine: nodes, and links with a bandwidth each way.

use super::limits::{FanCap, LinkPool};
use super::machine::{CpuSocket, GpuLinkKind, Machine, PciDevice};
use super::{BusId, Defect, XmlVersion, speed};
use std::collections::HashMap;
use std::fmt;

/// Index of a node in [`MachineGraph::nodes`].
pub type NodeId = usize;

/// Index of a link in [`MachineGraph::links`].
pub type LinkId = usize;

/// Kind of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeKind {
    /// A GPU; the index in [`MachineGraph::gpus`].
    Gpu(usize),
    /// A PCIe switch, or one level of it.
    Switch,
    /// A NUMA node with its processor and memory.
    Socket,
    /// The switches between NVLinks, taken as one.
    LinkSwitch,
    /// A network device (port); the index in [`MachineGraph::nics`].
    Nic(usize),
}

/// A node of the graph, with its name and its place in the PCIe tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphNode {
    /// GPU, switch, socket, link switch or network device.
    pub kind: NodeKind,
    /// PCI address, `socket 0`, `link switch`, or the name of a network device.
    pub name: String,
    /// Node one level nearer to the processor; `None` for sockets and link switches.
    pub parent: Option<NodeId>,
}

/// Source of a bandwidth. A figure from a source later in this list replaces a figure from an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BandwidthOrigin {
    /// Assumed, because the link's speed is unknown.
    Assumed,
    /// From the table of link generations.
    Table,
    /// Stated by a file.
    File,
    /// Measured on this machine.
    Measured,
}

/// A bandwidth in MB/s each way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bandwidth {
    /// MB/s (10^6 bytes per second); at least 1.
    pub mb_s: u32,
    /// Source of the figure.
    pub origin: BandwidthOrigin,
}

/// Kind of connection that a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkKind {
    /// NVLink or Infinity Fabric.
    NvLink,
    /// A PCIe link to a switch or a socket.
    Pcie,
    /// A link between two sockets.
    Socket,
    /// A link that stands for the port of a network device.
    Network,
}

/// A link in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphLink {
    /// Node that sends over the link.
    pub from: NodeId,
    /// Node that receives over the link.
    pub to: NodeId,
    /// NVLink, PCIe, or a link between sockets or to the network.
    pub class: LinkKind,
    /// Bandwidth from `from` to `to`, and the origin of the figure.
    pub bandwidth: Bandwidth,
}

/// A GPU of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// Its node.
    pub node: NodeId,
    /// PCI address of the GPU.
    pub bus_id: BusId,
    /// Number of the GPU in the driver's management library, such as NVML.
    pub dev: u32,
    /// Rank that the description gives to the GPU; `None` if it gives none.
    pub rank: Option<u32>,
    /// Whether the GPU is divided into slices (MIG), which have no peer access.
    pub mig: bool,
}

/// A network device of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicFacts {
    /// Its node.
    pub node: NodeId,
    /// Number among the host's network devices.
    pub dev: u32,
    /// Identifier of the adapter; equal for ports of one adapter. 0 if unknown.
    pub guid: u64,
    /// Whether the device can read and write GPU memory.
    pub gdr: bool,
}

/// The graph of one machine. Links come in pairs: the reverse of link `2 k` is link `2 k + 1`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineGraph {
    /// Nodes; a [`NodeId`] is an index in this list.
    pub nodes: Vec<GraphNode>,
    /// Links; a [`LinkId`] is an index in this list.
    pub links: Vec<GraphLink>,
    /// GPUs in the order of their numbers (`dev`).
    pub gpus: Vec<GpuFacts>,
    /// Network devices in the order of their numbers.
    pub nics: Vec<NicFacts>,
    /// Links that share a bandwidth, as measured.
    pub pools: Vec<LinkPool>,
    /// Links that fall to a lower bandwidth when many GPUs send through them to many root ports, as measured.
    pub fans: Vec<FanCap>,
    /// Format of the description (NCCL's or RCCL's), which selects the rule of peer access.
    pub version: XmlVersion,
    /// Architecture and vendor of all processors; empty texts if unknown, or if processors differ.
    pub processor: [String; 2],
    /// Whether the NUMA node of some socket is unknown.
    pub has_unknown_socket: bool,
    /// Defects found while the graph was built.
    pub defects: Vec<Defect>,
}

impl MachineGraph {
    /// Builds the graph of `machine`. Never fails: parts of the description that cannot be used become
    /// defects.
    pub fn new(machine: &Machine) -> MachineGraph {
        let mut builder = Builder::default();
        builder.graph.version = machine.version;
        machine
            .defects
            .iter()
            .for_each(|defect| builder.report(defect.clone()));
        let sockets: Vec<NodeId> = machine
            .sockets
            .iter()
            .map(|socket| builder.socket(socket))
            .collect();
        builder.connect_sockets(machine, &sockets);
        builder.connect_gpus();
        builder.processor(machine);
        builder.number();
        builder.graph
    }

    /// Returns the reverse direction of a link.
    pub const fn reverse(link: LinkId) -> LinkId {
        link ^ 1
    }

    /// Returns the PCIe link from node `from` up to its parent; `None` if there is none.
    pub fn up(&self, from: NodeId) -> Option<LinkId> {
        let parent = self.nodes[from].parent?;
        (0..self.links.len()).find(|&link| {
            let GraphLink {
                from: a,
                to: b,
                class,
                ..
            } = self.links[link];
            a == from && b == parent && class == LinkKind::Pcie
        })
    }

    /// Returns whether a PCIe link connects two nodes of which neither is the parent of the other, such as
    /// two partitions of one switch chip.
    pub fn is_beside_tree(&self, link: LinkId) -> bool {
        let GraphLink {
            from, to, class, ..
        } = self.links[link];
        let is_parent = |child: NodeId, parent| self.nodes[child].parent == Some(parent);
        class == LinkKind::Pcie && !is_parent(from, to) && !is_parent(to, from)
    }

    /// Returns the nodes from `node` to its root, `node` first.
    pub fn ancestors(&self, node: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        std::iter::successors(Some(node), |&node| self.nodes[node].parent)
    }

    /// Returns the indices of the GPUs in the order of rank, and of `dev` where ranks are unknown.
    pub fn by_rank(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.gpus.len()).collect();
        if self.gpus.iter().all(|gpu| gpu.rank.is_some()) {
            order.sort_by_key(|&gpu| self.gpus[gpu].rank);
        }
        order
    }
}

/// A GPU whose NVLinks are connected after all nodes have been added.
struct PendingGpu<'a> {
    node: NodeId,
    bus_id: BusId,
    socket: NodeId,
    gpu: &'a super::Gpu,
}

/// Largest number of links between a GPU and one other device. Chips have at most 18 each.
const MOST_LINKS: u32 = 255;

#[derive(Default)]
struct Builder<'a> {
    graph: MachineGraph,
    gpus: Vec<PendingGpu<'a>>,
}

impl<'a> Builder<'a> {
    fn node(&mut self, kind: NodeKind, name: String, parent: Option<NodeId>) -> NodeId {
        self.graph.nodes.push(GraphNode { kind, name, parent });
        self.graph.nodes.len() - 1
    }

    fn connect(&mut self, a: NodeId, b: NodeId, class: LinkKind, bandwidth: Bandwidth) {
        for (from, to) in [(a, b), (b, a)] {
            self.graph.links.push(GraphLink {
                from,
                to,
                class,
                bandwidth,
            });
        }
    }

    /// Adds a defect unless an equal one is known.
    fn report(&mut self, defect: Defect) {
        if !self.graph.defects.contains(&defect) {
            self.graph.defects.push(defect);
        }
    }

    fn socket(&mut self, socket: &'a CpuSocket) -> NodeId {
        let name = match socket.numa {
            0.. => format!("socket {}", socket.numa),
            _ => "socket".into(),
        };
        if socket.numa < 0 {
            self.graph.has_unknown_socket = true;
            self.report(Defect::NoNuma);
        }
        let node = self.node(NodeKind::Socket, name, None);
        for device in &socket.devices {
            self.device(device, node, node);
        }
        for nic in &socket.nics {
            self.nic(nic, node, None);
        }
        node
    }

    /// Adds the device and all devices behind it, below `parent`.
    fn device(&mut self, device: &'a PciDevice, parent: NodeId, socket: NodeId) {
        let kind = match (&device.gpu, device.nics.first(), device.devices.first()) {
            (Some(_), ..) => NodeKind::Gpu(0),
            (None, Some(_), _) => return self.nics(device, parent),
            (None, None, Some(_)) => NodeKind::Switch,
            // Other devices, and bridges with nothing behind them, carry no data of collectives.
            (None, None, None) => return,
        };
        let node = self.node(kind, device.bus_id.to_string(), Some(parent));
        let bandwidth = self.pcie(device);
        self.connect(node, parent, LinkKind::Pcie, bandwidth);
        if let Some(gpu) = &device.gpu {
            let bus_id = device.bus_id;
            self.gpus.push(PendingGpu {
                node,
                bus_id,
                socket,
                gpu,
            });
            let (dev, rank, mig) = (gpu.dev, gpu.rank, gpu.mig);
            self.graph.gpus.push(GpuFacts {
                node,
                bus_id,
                dev,
                rank,
                mig,
            });
        }
        for child in &device.devices {
            // A switch that shows two levels of bridges becomes a single node.
            if is_one_switch(device, child) {
                for grandchild in &child.devices {
                    self.device(grandchild, node, socket);
                }
            } else {
                self.device(child, node, socket);
            }
        }
    }

    fn nics(&mut self, device: &'a PciDevice, parent: NodeId) {
        let adapter = self.node(NodeKind::Switch, device.bus_id.to_string(), Some(parent));
        let bandwidth = self.pcie(device);
        self.connect(adapter, parent, LinkKind::Pcie, bandwidth);
        for nic in &device.nics {
            self.nic(nic, adapter, Some(bandwidth));
        }
    }

    /// Adds a network device below its adapter, or below its socket.
    fn nic(&mut self, nic: &super::Nic, parent: NodeId, adapter: Option<Bandwidth>) {
        let node = self.node(NodeKind::Nic(0), nic.name.clone(), Some(parent));
        let of_speed = nic
            .speed
            .filter(|speed| *speed >= 8)
            .map(|speed| Bandwidth {
                mb_s: speed / 8,
                origin: BandwidthOrigin::File,
            });
        let assumed = Bandwidth {
            mb_s: speed::ASSUMED_PCIE,
            origin: BandwidthOrigin::Assumed,
        };
        let bandwidth = of_speed.or(adapter).unwrap_or(assumed);
        self.connect(node, parent, LinkKind::Network, bandwidth);
        let (dev, guid, gdr) = (nic.dev, nic.guid, nic.gdr);
        self.graph.nics.push(NicFacts {
            node,
            dev,
            guid,
            gdr,
        });
    }

    /// Returns the bandwidth of a device's link towards the socket.
    fn pcie(&mut self, device: &PciDevice) -> Bandwidth {
        let mut behind = Vec::new();
        device.visit(&mut |device| behind.push(device.link));
        // The first is the device itself.
        let behind = &behind[1..];
        let is_virtual = behind
            .iter()
            .any(|&behind| speed::is_virtual(device.link, behind));
        let text = speed::link_text(device.link);
        let defect = match speed::pcie(device.link) {
            None => Defect::UnknownSpeed(device.bus_id, text),
            Some(_) if is_virtual => Defect::VirtualBridge(device.bus_id, text),
            Some(mb_s) => {
                return Bandwidth {
                    mb_s,
                    origin: BandwidthOrigin::Table,
                };
            }
        };
        self.report(defect);
        // The link is assumed to be as fast as the fastest device behind it.
        let fastest = behind.iter().filter_map(|&link| speed::pcie(link)).max();
        let mb_s = fastest.unwrap_or(speed::ASSUMED_PCIE);
        Bandwidth {
            mb_s,
            origin: BandwidthOrigin::Assumed,
        }
    }

    /// Connects each pair of sockets. A socket without a NUMA node stands for devices whose place is unknown, so its
    /// links are assumed whatever the processor is.
    fn connect_sockets(&mut self, machine: &Machine, sockets: &[NodeId]) {
        let speed = |socket: usize| {
            let known = Some(&machine.sockets[socket]).filter(|socket| socket.numa >= 0);
            known.and_then(speed::between_sockets)
        };
        for (a, &from) in sockets.iter().enumerate() {
            for (b, &to) in sockets.iter().enumerate().skip(a + 1) {
                let both = [a, b].map(speed);
                let bandwidth = match both {
                    [Some(a), Some(b)] => Bandwidth {
                        mb_s: a.min(b),
                        origin: BandwidthOrigin::Table,
                    },
                    _ => Bandwidth {
                        mb_s: speed::ASSUMED_BETWEEN_SOCKETS,
                        origin: BandwidthOrigin::Assumed,
                    },
                };
                self.connect(from, to, LinkKind::Socket, bandwidth);
            }
        }
    }

    /// Connects GPUs by the links that they list. Both GPUs of a pair list their common links, but each pair
    /// is connected once.
    fn connect_gpus(&mut self) {
        let gpus = std::mem::take(&mut self.gpus);
        let by_bus_id: HashMap<BusId, usize> = gpus
            .iter()
            .enumerate()
            .map(|(at, gpu)| (gpu.bus_id, at))
            .collect();
        // For each ordered pair of GPUs, the number of links that the first GPU lists, and their total MB/s.
        let mut pairs: HashMap<(usize, usize), (u32, u32)> = HashMap::new();
        let mut switch = None;
        for (at, pending) in gpus.iter().enumerate() {
            for link in &pending.gpu.links {
                if link.kind == GpuLinkKind::C2c {
                    continue;
                }
                if !(1..=MOST_LINKS).contains(&link.count) {
                    self.report(Defect::LinkCount(pending.bus_id, link.count));
                    continue;
                }
                let mb_s = speed::gpu_link(pending.gpu, link);
                let origin = link
                    .bandwidth
                    .map_or(BandwidthOrigin::Table, |_| BandwidthOrigin::File);
                let bandwidth = Bandwidth { mb_s, origin };
                let to_gpu = link.target.and_then(|target| by_bus_id.get(&target));
                match (link.target_class.map(|class| class >> 8), to_gpu) {
                    (_, Some(&to)) if to == at => {
                        self.report(Defect::LinkToItself(pending.bus_id));
                    }
                    (_, Some(&to)) => {
                        let pair = pairs.entry((at, to)).or_default();
                        *pair = (
                            pair.0.saturating_add(link.count),
                            pair.1.saturating_add(mb_s),
                        );
                    }
                    (Some(0x0680), None) if link.target_class == Some(0x06_8001) => {
                        self.connect_or_widen(pending.node, pending.socket, bandwidth);
                    }
                    (Some(0x0680), None) => {
                        let node = *switch.get_or_insert_with(|| {
                            let name = "link switch".to_string();
                            self.graph.nodes.push(GraphNode {
                                kind: NodeKind::LinkSwitch,
                                name,
                                parent: None,
                            });
                            self.graph.nodes.len() - 1
                        });
                        self.connect_or_widen(pending.node, node, bandwidth);
                    }
                    (_, None) => {
                        let target = link.target.unwrap_or(BusId::new(0, 0, 0, 0));
                        let defect = Defect::LinkToNowhere(pending.bus_id, target);
                        self.report(defect);
                    }
                }
            }
        }
        let mut once: Vec<(usize, usize)> =
            pairs.keys().map(|&(a, b)| (a.min(b), a.max(b))).collect();
        once.sort_unstable();
        once.dedup();
        for (a, b) in once {
            let there = pairs.get(&(a, b)).copied().unwrap_or_default();
            let back = pairs.get(&(b, a)).copied().unwrap_or_default();
            if there.0 != back.0 {
                let (a, b) = (gpus[a].bus_id, gpus[b].bus_id);
                self.report(Defect::UnequalLinks(a, b, [there.0, back.0]));
            }
            let bandwidth = Bandwidth {
                mb_s: there.1.max(back.1),
                origin: BandwidthOrigin::Table,
            };
            self.connect(gpus[a].node, gpus[b].node, LinkKind::NvLink, bandwidth);
        }
    }

    /// Connects a GPU by NVLink with the link switch or its socket, or adds `bandwidth` to their existing NVLink. Files list
    /// the links to each switch of a machine separately, but the graph has a single link switch.
    fn connect_or_widen(&mut self, gpu: NodeId, switch: NodeId, bandwidth: Bandwidth) {
        let between = |link: &GraphLink| {
            let ends = [(link.from, link.to), (link.to, link.from)];
            link.class == LinkKind::NvLink && ends.contains(&(gpu, switch))
        };
        let mut found = false;
        for link in self.graph.links.iter_mut().filter(|link| between(link)) {
            link.bandwidth.mb_s = link.bandwidth.mb_s.saturating_add(bandwidth.mb_s);
            found = true;
        }
        if !found {
            self.connect(gpu, switch, LinkKind::NvLink, bandwidth);
        }
    }

    fn processor(&mut self, machine: &Machine) {
        let mut all = machine
            .sockets
            .iter()
            .map(|s| [s.arch.clone(), s.vendor.clone()]);
        if let Some(first) = all.next()
            && all.all(|other| other == first)
        {
            self.graph.processor = first;
        }
    }

    /// Sorts GPUs and network devices by number, and sets the index in their nodes.
    fn number(&mut self) {
        self.graph.gpus.sort_by_key(|gpu| gpu.dev);
        self.graph.nics.sort_by_key(|nic| nic.dev);
        for (index, gpu) in self.graph.gpus.iter().enumerate() {
            self.graph.nodes[gpu.node].kind = NodeKind::Gpu(index);
        }
        for (index, nic) in self.graph.nics.iter().enumerate() {
            self.graph.nodes[nic.node].kind = NodeKind::Nic(index);
        }
    }
}

/// Returns whether `child` is the second level of the switch `device`: Broadcom's switches of generations 4
/// and 5 show two levels of bridges, which forward at full speed to each other.
fn is_one_switch(device: &PciDevice, child: &PciDevice) -> bool {
    let generation = |ids: [u16; 4], level: u16| match ids {
        [0x1000, 0xc010, 0x1000, sub] if sub & 0xf000 == 0xa000 => Some(4),
        [0x1000, 0xc030, 0x1000, sub] if sub & 0xf000 == level << 12 => Some(5),
        _ => None,
    };
    let outer = generation(device.ids, 0);
    child.gpu.is_none() && outer.is_some() && outer == generation(child.ids, 1)
}

impl fmt::Display for BandwidthOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BandwidthOrigin::Assumed => "assumed",
            BandwidthOrigin::Table => "table",
            BandwidthOrigin::File => "file",
            BandwidthOrigin::Measured => "measured",
        })
    }
}
