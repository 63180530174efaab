//! Distances from a rank to the network devices of its host.

use super::detect::{DetectSources, detect_in};
use super::{BusId, Machine, MachineGraph, PathType, Paths};
use crate::error::Result;
use crate::sys::pci::PciFiles;

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
    /// Class of the path from the rank; `None` if it is unknown.
    pub path: Option<PathType>,
}

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
