//! Distances from a rank to the network devices of its host.

use super::detect::{DetectSources, detect_in};
use super::{
    BandwidthOrigin, BusId, LinkKind, Machine, MachineGraph, NodeKind, PathType, Paths,
    ProcessorFacts,
};
use crate::error::Result;
use crate::sys::pci::{NetworkPort, PciFiles, PciTree};

/// The place from which distances of a rank count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RankPlace {
    /// The rank's GPU.
    Gpu(BusId),
    /// The NUMA node of the rank's cores.
    Node(usize),
    /// No place: all distances are unknown.
    #[default]
    Unknown,
}

/// A network device with its distance from a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicDistance {
    /// Name of the device, such as `mlx5_0` or `eth0`.
    pub name: String,
    /// Identifier of the adapter, equal for all its ports; 0 if unknown.
    pub adapter: u64,
    /// Address of the adapter's PCI function; `None` if the device is on another bus.
    pub function: Option<BusId>,
    /// Class of the path from the rank; `None` if it is unknown.
    pub path: Option<PathType>,
    /// MB/s of the slowest known link from the rank into the network; `None` if the path or the device's own speed is
    /// unknown.
    pub mb_s: Option<u32>,
}

/// A network interface with its distance from a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceDistance {
    /// Name of the interface.
    pub name: String,
    /// Mbit/s of the interface, or of a slower link on the way to it; `None` if the interface's own speed is unknown.
    pub speed: Option<u32>,
    /// Class of the path from the rank; `None` if it is unknown.
    pub path: Option<PathType>,
}

/// Returns the network interfaces that are up and have a device on the machine whose /sys is `files`, with their
/// distances from `place`. The list is empty if the place is unknown. The processor determines the speed between sockets.
///
/// # Errors
/// As for [`nic_distances`].
pub fn interface_distances(
    files: &dyn PciFiles,
    processor: ProcessorFacts,
    place: RankPlace,
) -> Result<Vec<InterfaceDistance>> {
    let nics = nic_distances(files, processor, place)?;
    if nics.is_empty() {
        return Ok(Vec::new());
    }
    let mut tree = PciTree::read(files)?;
    let ports = tree.interfaces()?;
    let distance = |port: NetworkPort| {
        let function = port.function.map(|at| tree.functions()[at].bus_id);
        let nic = nics
            .iter()
            .find(|nic| nic.function.is_some() && nic.function == function);
        let on_the_way = nic
            .and_then(|nic| nic.mb_s)
            .map(|mb_s| mb_s.saturating_mul(8));
        InterfaceDistance {
            path: nic.and_then(|nic| nic.path),
            name: port.name,
            // The device may have a faster port.
            speed: port
                .speed
                .map(|speed| speed.min(on_the_way.unwrap_or(speed))),
        }
    };
    Ok(ports.into_iter().map(distance).collect())
}

/// Returns the number of a path's class in messages between ranks; 0 if the path is unknown.
pub fn path_number(path: Option<PathType>) -> u8 {
    let index = NIC_PATHS.iter().position(|&class| Some(class) == path);
    index.map_or(0, |index| index as u8 + 1)
}

/// Returns the path of a number by [`path_number`]; `None` if there is no such number.
pub fn path_of_number(number: u8) -> Option<Option<PathType>> {
    match number {
        0 => Some(None),
        number => NIC_PATHS
            .get(usize::from(number) - 1)
            .map(|&path| Some(path)),
    }
}

/// Classes of paths to network devices, nearest first.
const NIC_PATHS: [PathType; 4] = [PathType::Pix, PathType::Pxb, PathType::Phb, PathType::Sys];

/// Returns the network devices of the machine whose /sys is `files`, with their distances from `place`. The list is
/// empty if the place is unknown. The processor determines the speed between sockets.
///
/// # Errors
/// Unsupported if the machine has more than 4,096 PCI devices or network devices.
pub fn nic_distances(
    files: &dyn PciFiles,
    processor: ProcessorFacts,
    place: RankPlace,
) -> Result<Vec<NicDistance>> {
    if place == RankPlace::Unknown {
        return Ok(Vec::new());
    }
    let sources = DetectSources {
        processor,
        ..DetectSources::default()
    };
    let machine = detect_in(files, &sources)?;
    Ok(nic_distances_on(&machine, place))
}

/// Returns the network devices of `machine` with their distances from `place`.
///
/// If a NUMA node is unknown, a path is known only below PCIe switches. So no device counts as near because the
/// firmware left out a number.
pub fn nic_distances_on(machine: &Machine, place: RankPlace) -> Vec<NicDistance> {
    let graph = MachineGraph::new(machine);
    let gpu = match place {
        RankPlace::Gpu(bus_id) => graph.gpus.iter().position(|gpu| gpu.bus_id == bus_id),
        _ => None,
    };
    let from_gpu = |nic: usize| {
        let class = Paths::class_to_nic(&graph, gpu?, nic)?;
        (class < PathType::Phb || !graph.has_unknown_socket).then_some(class)
    };
    let start = match place {
        RankPlace::Gpu(_) => gpu.map(|gpu| graph.gpus[gpu].node),
        RankPlace::Node(node) => socket(machine, &graph, node),
        RankPlace::Unknown => None,
    };
    let nics = graph.nics.iter().enumerate();
    nics.map(|(index, nic)| {
        let path = match place {
            RankPlace::Gpu(_) => from_gpu(index),
            RankPlace::Node(node) => from_node(machine, node, nic.dev),
            RankPlace::Unknown => None,
        };
        NicDistance {
            name: graph.nodes[nic.node].name.clone(),
            adapter: nic.guid,
            function: graph.nodes[nic.node]
                .parent
                .and_then(|adapter| graph.nodes[adapter].name.parse().ok()),
            path,
            mb_s: path.and_then(|_| slowest_link(&graph, start?, index)),
        }
    })
    .collect()
}

/// Returns the node of the socket with NUMA node `numa`.
fn socket(machine: &Machine, graph: &MachineGraph, numa: usize) -> Option<usize> {
    let is_it = |socket: &super::CpuSocket| usize::try_from(socket.numa) == Ok(numa);
    let place = machine.sockets.iter().position(is_it)?;
    let is_socket = |node: &usize| graph.nodes[*node].kind == NodeKind::Socket;
    (0..graph.nodes.len()).filter(is_socket).nth(place)
}

/// Returns the MB/s of the slowest known link from `node` through network device `nic`; `None` if the speed of the device
/// is unknown. Links whose speed is assumed count as fast, so that no choice depends on an assumption.
fn slowest_link(graph: &MachineGraph, node: usize, nic: usize) -> Option<u32> {
    let links = Paths::from_node_to_nic(graph, node, nic)?;
    let port = graph.links[*links.last()?];
    // Without a speed of its own the device has the speed of its adapter's PCIe link.
    if port.class != LinkKind::Network || port.bandwidth.origin < BandwidthOrigin::File {
        return None;
    }
    let bandwidths = links.iter().map(|&link| graph.links[link].bandwidth);
    let known = bandwidths.filter(|one| one.origin > BandwidthOrigin::Assumed);
    known.map(|one| one.mb_s).min()
}

/// Returns whether a device of `mb_s` is too slow for a rank that also reaches one of `fastest` MB/s, whatever the
/// distances are. Ranks in a collective wait for the slowest, so two ranks on a fast device finish before one of them does
/// on a device of half its speed. The limit is 9/5, not 2, because tables give a PCIe link a few percent less than the
/// network device behind it.
pub fn is_too_slow(mb_s: u32, fastest: u32) -> bool {
    u64::from(mb_s) * 9 <= u64::from(fastest) * 5
}

/// Returns the class of the path from the cores of NUMA node `node` to network device `dev`.
fn from_node(machine: &Machine, node: usize, dev: u32) -> Option<PathType> {
    if machine.sockets.iter().any(|socket| socket.numa < 0) {
        return None;
    }
    let holds = |devices: &[super::PciDevice]| {
        let mut found = false;
        for device in devices {
            device.visit(&mut |device| found |= device.nics.iter().any(|nic| nic.dev == dev));
        }
        found
    };
    let mut sockets = machine.sockets.iter();
    let socket = sockets.find(|socket| holds(&socket.devices))?;
    Some(match usize::try_from(socket.numa) == Ok(node) {
        true => PathType::Phb,
        false => PathType::Sys,
    })
}
