//! Distances from a rank to the network devices of its host.

use super::detect::{DetectSources, detect_in};
use super::{BusId, Machine, MachineGraph, PathType, Paths};
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
}

/// A network interface with its distance from a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceDistance {
    /// Name of the interface.
    pub name: String,
    /// Speed in Mbit/s; `None` if it is unknown.
    pub speed: Option<u32>,
    /// Class of the path from the rank; `None` if it is unknown.
    pub path: Option<PathType>,
}

/// Returns the network interfaces that are up and have a device on the machine whose /sys is `files`, with their
/// distances from `place`. The list is empty if the place is unknown.
///
/// # Errors
/// As for [`nic_distances`].
pub fn interface_distances(
    files: &dyn PciFiles,
    place: RankPlace,
) -> Result<Vec<InterfaceDistance>> {
    let nics = nic_distances(files, place)?;
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
        InterfaceDistance {
            path: nic.and_then(|nic| nic.path),
            name: port.name,
            speed: port.speed,
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
/// empty if the place is unknown.
///
/// # Errors
/// Unsupported if the machine has more than 4,096 PCI devices or network devices.
pub fn nic_distances(files: &dyn PciFiles, place: RankPlace) -> Result<Vec<NicDistance>> {
    if place == RankPlace::Unknown {
        return Ok(Vec::new());
    }
    let machine = detect_in(files, &DetectSources::default())?;
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
    let nics = graph.nics.iter().enumerate();
    nics.map(|(index, nic)| NicDistance {
        name: graph.nodes[nic.node].name.clone(),
        adapter: nic.guid,
        function: graph.nodes[nic.node]
            .parent
            .and_then(|adapter| graph.nodes[adapter].name.parse().ok()),
        path: match place {
            RankPlace::Gpu(_) => from_gpu(index),
            RankPlace::Node(node) => from_node(machine, node, nic.dev),
            RankPlace::Unknown => None,
        },
    })
    .collect()
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
