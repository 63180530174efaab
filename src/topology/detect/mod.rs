//! Describes the machine at hand, from a directory that looks like /sys and from what drivers report.
//!
//! The sources are /sys, the CUDA driver and NVML; a later source in this list overrides an earlier one. A
//! fact that no source knows stays unknown: without PCI devices or NUMA nodes, all GPUs are at one socket,
//! whose number is -1.

mod gpus;
mod place;

use super::machine::printable;
use super::{BusId, Machine, Nic, ProcessorFacts};
use crate::error::Result;
use crate::sys::nvml::NvmlGpu;
use crate::sys::pci::{NetworkPort, PciFiles, PciTree, SysDirectory};
use std::path::Path;

/// Sources of facts about the machine other than /sys.
#[derive(Clone, Debug, Default)]
pub struct DetectSources<'a> {
    /// Facts of the processors.
    pub processor: ProcessorFacts,
    /// GPUs that NVML lists; empty without NVML.
    pub nvml: &'a [NvmlGpu],
    /// GPUs that the CUDA driver lists; empty without the driver.
    pub driver: &'a [DriverGpu],
}

/// A GPU that the CUDA driver lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverGpu {
    /// PCI address of the GPU.
    pub bus_id: BusId,
    /// Compute capability times ten; `None` if unknown.
    pub sm: Option<u32>,
    /// Whether NICs may read and write the GPU's memory; `None` if unknown.
    pub gdr: Option<bool>,
}

/// Describes the machine whose /sys is `root`. Defects that were found are listed in
/// [`Machine::defects`]; a missing /sys is a defect as well.
///
/// # Errors
/// Unsupported if the machine has more than 4,096 PCI devices or network devices.
pub fn detect(root: &Path, sources: &DetectSources<'_>) -> Result<Machine> {
    detect_in(&SysDirectory::new(root), sources)
}

/// Describes the machine whose /sys is `files`, as [`detect`] does.
///
/// # Errors
/// As [`detect`].
pub fn detect_in(files: &dyn PciFiles, sources: &DetectSources<'_>) -> Result<Machine> {
    let mut tree = PciTree::read(files)?;
    let ports = tree.network_ports()?;
    let gpus = gpus::find(&tree, sources)?;
    let nics = nics(&tree, ports);
    Ok(place::machine(&tree, &sources.processor, gpus, nics))
}

/// Returns the network devices, numbered in order, each with the index of its PCI function.
fn nics(tree: &PciTree<'_>, ports: Vec<NetworkPort>) -> Vec<(Option<usize>, Nic)> {
    // NVIDIA's modules that let RDMA adapters use GPU memory, newest first.
    const MODULES: [&str; 3] = [
        "module/nvidia_peermem/version",
        "kernel/mm/memory_peers/nv_mem/version",
        "kernel/mm/memory_peers/nv_mem_nc/version",
    ];
    let has_rdma = ports.iter().any(|port| port.port > 0);
    let peer_memory = has_rdma && MODULES.iter().any(|module| tree.exists(module));
    let nics = ports.into_iter().enumerate().map(|(dev, port)| {
        let nic = Nic {
            name: printable(&port.name),
            dev: dev as u32,
            speed: port.speed,
            port: port.port,
            guid: port.guid,
            gdr: port.port > 0 && peer_memory,
        };
        (port.function, nic)
    });
    nics.collect()
}
