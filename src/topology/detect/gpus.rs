//! Finds the GPUs, their numbers, and the links between them.

use super::DetectSources;
use crate::error::Result;
use crate::sys::nvml::{NvmlGpu, NvmlRemote};
use crate::sys::pci::{KfdGpu, PciTree, kfd_gpus};
use crate::topology::machine::{Gpu, GpuLink, GpuLinkKind, PciLink, XmlVersion};
use crate::topology::{BusId, Defect, speed};
use std::collections::{BTreeMap, BTreeSet};

/// The first two bytes of a GPU's class: VGA, 3D, other display, accelerator.
const GPU_CLASSES: [u32; 4] = [0x0300, 0x0302, 0x0380, 0x1200];

const NVIDIA: u16 = 0x10de;
const AMD: u16 = 0x1002;

/// Class of a GPU without display, of an NVSwitch, and of a processor at an NVLink.
const GPU_CLASS: u32 = 0x03_0200;
const NVSWITCH_CLASS: u32 = 0x06_8000;
const PROCESSOR_CLASS: u32 = 0x06_8001;

/// Address that NVML gives to devices that the system does not see.
const HIDDEN: BusId = BusId::new(0xffff_ffff, 0xff, 0xff, 0);

/// The GPUs of a machine.
#[derive(Default)]
pub(super) struct DetectedGpus {
    /// GPUs by address.
    pub gpus: BTreeMap<BusId, Gpu>,
    /// PCIe links that NVML reports, by address of the GPU.
    pub links: BTreeMap<BusId, PciLink>,
    /// Version of NCCL's XML that fits the GPUs.
    pub version: XmlVersion,
    /// Defects that were found.
    pub defects: Vec<Defect>,
}

/// Finds the GPUs of NVIDIA, or those of AMD where there are none of NVIDIA: a communicator has GPUs of one vendor.
pub(super) fn find(tree: &PciTree<'_>, sources: &DetectSources<'_>) -> Result<DetectedGpus> {
    let kfd = kfd_gpus(tree)?;
    let [mut nvidia, mut amd] = of_sys(tree);
    nvidia.extend(sources.nvml.iter().map(|gpu| gpu.bus_id));
    nvidia.extend(sources.driver.iter().map(|gpu| gpu.bus_id));
    amd.extend(kfd.iter().map(|gpu| gpu.bus_id));
    let is_amd = nvidia.is_empty() && !amd.is_empty();
    let mut found = DetectedGpus::default();
    if is_amd {
        found.version = XmlVersion::Rccl;
    }
    let nvml: BTreeMap<BusId, &NvmlGpu> =
        sources.nvml.iter().map(|gpu| (gpu.bus_id, gpu)).collect();
    // GPUs that NVML lists have NVML's numbers. Other GPUs get the next numbers, in the order of addresses.
    let mut next = sources
        .nvml
        .iter()
        .map(|gpu| gpu.index.saturating_add(1))
        .max()
        .unwrap_or(0);
    for bus_id in if is_amd { amd } else { nvidia } {
        let listed = nvml.get(&bus_id).copied();
        let mut gpu =
            listed.map_or_else(Gpu::default, |gpu| nvml_gpu(tree, gpu, &mut found.defects));
        if listed.is_none() {
            gpu.dev = next;
            next = next.saturating_add(1);
        }
        if let Some(driver) = sources.driver.iter().find(|gpu| gpu.bus_id == bus_id) {
            gpu.sm = gpu.sm.or(driver.sm);
            gpu.gdr = driver.gdr.unwrap_or(false);
        }
        found.gpus.insert(bus_id, gpu);
    }
    found.links = nvml
        .iter()
        .map(|(&bus_id, gpu)| (bus_id, nvml_pcie(gpu)))
        .collect();
    for gpu in kfd.iter().filter(|_| is_amd) {
        add_kfd(&mut found.gpus, gpu);
    }
    drop_links_of_slices(&mut found.gpus);
    Ok(found)
}

/// Returns the GPUs of NVIDIA and of AMD that /sys lists.
fn of_sys(tree: &PciTree<'_>) -> [BTreeSet<BusId>; 2] {
    let mut of_vendors = [BTreeSet::new(), BTreeSet::new()];
    for (index, function) in tree.functions().iter().enumerate() {
        let class = function.class.map(|class| class >> 8);
        if !class.is_some_and(|class| GPU_CLASSES.contains(&class)) {
            continue;
        }
        match tree.vendor(index) {
            NVIDIA => of_vendors[0].insert(function.bus_id),
            AMD => of_vendors[1].insert(function.bus_id),
            _ => false,
        };
    }
    of_vendors
}

/// Returns the GPU as NVML describes it.
fn nvml_gpu(tree: &PciTree<'_>, gpu: &NvmlGpu, defects: &mut Vec<Defect>) -> Gpu {
    let mut links: Vec<GpuLink> = Vec::new();
    for link in &gpu.links {
        let listed = link.remote.and_then(|remote| tree.find(remote));
        let listed = listed.and_then(|function| tree.functions()[function].class);
        let class = match link.kind {
            NvmlRemote::Gpu => Some(GPU_CLASS),
            NvmlRemote::Switch => Some(NVSWITCH_CLASS),
            NvmlRemote::Processor => Some(PROCESSOR_CLASS),
            NvmlRemote::Unknown => listed,
        };
        let target = link.remote.unwrap_or(HIDDEN);
        let Some(class) = class else {
            defects.push(Defect::LinkToNowhere(gpu.bus_id, target));
            continue;
        };
        let same =
            |link: &&mut GpuLink| (link.target, link.target_class) == (Some(target), Some(class));
        match links.iter_mut().find(same) {
            Some(link) => link.count += 1,
            None => links.push(GpuLink {
                kind: GpuLinkKind::NvLink,
                target: Some(target),
                target_class: Some(class),
                count: 1,
                bandwidth: None,
            }),
        }
    }
    Gpu {
        dev: gpu.index,
        sm: gpu.sm,
        mig: gpu.mig,
        links,
        ..Gpu::default()
    }
}

/// Returns the PCIe link of a GPU. An idle GPU lowers the speed of its link, but not the width.
fn nvml_pcie(gpu: &NvmlGpu) -> PciLink {
    let width = gpu.current_link.width.or(gpu.max_link.width);
    PciLink {
        speed: gpu.max_link.generation.and_then(speed::of_generation),
        width: width.filter(|width| (1..=32).contains(width)),
    }
}

/// Adds the architecture and the links of a GPU of AMD.
fn add_kfd(gpus: &mut BTreeMap<BusId, Gpu>, kfd: &KfdGpu) {
    let known: BTreeSet<BusId> = gpus.keys().copied().collect();
    let Some(gpu) = gpus.get_mut(&kfd.bus_id) else {
        return;
    };
    let [major, minor, step] = [
        kfd.gfx_version / 10_000,
        kfd.gfx_version / 100 % 100,
        kfd.gfx_version % 100,
    ];
    // gfx90a is version 9.0.10, whose last digit is hexadecimal.
    gpu.gcn = Some((major * 10 + minor) * 10 + step);
    for link in kfd.links.iter().filter(|link| known.contains(&link.target)) {
        // Partitions of a GPU share one address, so links to this address are counted once.
        if gpu
            .links
            .iter()
            .any(|known| known.target == Some(link.target))
        {
            continue;
        }
        gpu.links.push(GpuLink {
            kind: GpuLinkKind::Xgmi,
            target: Some(link.target),
            target_class: Some(GPU_CLASS),
            count: link.count,
            bandwidth: None,
        });
    }
}

/// Removes the links from and to GPUs that are divided into slices, which have no NVLink.
fn drop_links_of_slices(gpus: &mut BTreeMap<BusId, Gpu>) {
    let sliced: BTreeSet<BusId> = gpus
        .iter()
        .filter(|(_, gpu)| gpu.mig)
        .map(|(&bus_id, _)| bus_id)
        .collect();
    for gpu in gpus.values_mut() {
        let is_mig = gpu.mig;
        gpu.links
            .retain(|link| !is_mig && !link.target.is_some_and(|target| sliced.contains(&target)));
    }
}
