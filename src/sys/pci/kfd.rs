//! AMD's GPUs and the Infinity Fabric (XGMI) links between them, from `class/kfd/kfd/topology/nodes`.

use super::{BusId, MAX_DEVICES, PciTree};
use crate::error::Result;
use std::collections::BTreeMap;

/// Type of a link that is Infinity Fabric, in the kernel's table of links.
const XGMI: u64 = 11;

/// Largest number of links of a node.
const MAX_KFD_LINKS: usize = 256;

/// A GPU that the kernel driver of AMD lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KfdGpu {
    /// PCI address of the GPU.
    pub bus_id: BusId,
    /// Architecture, three numbers in one: 90402 is gfx942, and 90010 is gfx90a.
    pub gfx_version: u32,
    /// Infinity Fabric links to other GPUs.
    pub links: Vec<KfdLink>,
}

/// Infinity Fabric links from a GPU to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KfdLink {
    /// PCI address of the other GPU.
    pub target: BusId,
    /// Number of parallel links.
    pub count: u32,
}

/// A file of lines `name value`, all of them numbers.
type Properties = BTreeMap<String, u64>;

/// Returns the GPUs of AMD, with their links, in the order of the driver's nodes. There are none without the driver.
///
/// # Errors
/// Unsupported if there are too many nodes or links.
pub fn kfd_gpus(tree: &PciTree<'_>) -> Result<Vec<KfdGpu>> {
    const NODES: &str = "class/kfd/kfd/topology/nodes";
    let Some(nodes) = tree.resolve(NODES) else {
        return Ok(Vec::new());
    };
    let names = tree.list(&nodes, MAX_DEVICES)?.unwrap_or_default();
    let mut numbers: Vec<u64> = names.iter().filter_map(|name| name.parse().ok()).collect();
    numbers.sort_unstable();
    let mut gpus: BTreeMap<u64, KfdGpu> = BTreeMap::new();
    for &node in &numbers {
        let properties = properties(tree, &format!("{nodes}/{node}/properties"));
        if let Some(gpu) = gpu(&properties) {
            gpus.insert(node, gpu);
        }
    }
    let bus_ids: BTreeMap<u64, BusId> =
        gpus.iter().map(|(&node, gpu)| (node, gpu.bus_id)).collect();
    for (node, gpu) in &mut gpus {
        let directory = format!("{nodes}/{node}/io_links");
        for name in tree.list(&directory, MAX_KFD_LINKS)?.unwrap_or_default() {
            let link = properties(tree, &format!("{directory}/{name}/properties"));
            let target = link.get("node_to").and_then(|to| bus_ids.get(to));
            if let Some(&target) = target.filter(|_| link.get("type") == Some(&XGMI)) {
                let count = parallel_links(&link);
                gpu.links.push(KfdLink { target, count });
            }
        }
    }
    Ok(gpus.into_values().collect())
}

/// Returns the GPU that the properties of a node describe; `None` if the node is a processor.
fn gpu(properties: &Properties) -> Option<KfdGpu> {
    let get = |name: &str| properties.get(name).copied();
    let gfx_version = get("gfx_target_version").and_then(|version| u32::try_from(version).ok());
    let location = get("location_id")?;
    let domain = u32::try_from(get("domain").unwrap_or(0)).ok()?;
    let (bus, device) = (location >> 8 & 0xff, location >> 3 & 0x1f);
    Some(KfdGpu {
        bus_id: BusId::new(domain, bus as u8, device as u8, (location & 7) as u8),
        gfx_version: gfx_version.filter(|version| *version > 0)?,
        links: Vec::new(),
    })
}

/// Returns the number of parallel links. The driver reports the bandwidth of one link as the minimum, and of
/// all links as the maximum. Older drivers report neither, and list each link separately.
fn parallel_links(link: &Properties) -> u32 {
    let get = |name: &str| link.get(name).copied().unwrap_or(0);
    let count = get("max_bandwidth").checked_div(get("min_bandwidth"));
    count.map_or(1, |count| count.clamp(1, 64) as u32)
}

fn properties(tree: &PciTree<'_>, file: &str) -> Properties {
    let text = tree.text(file).unwrap_or_default();
    let pairs = text.lines().filter_map(|line| {
        let (name, value) = line.split_once(' ')?;
        Some((name.into(), value.trim().parse().ok()?))
    });
    pairs.collect()
}
