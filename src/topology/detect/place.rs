//! Places GPUs and NICs below PCIe switches and sockets.
//!
//! A switch consists of one upstream port and several downstream ports, which /sys shows as bridges of two levels.
//! A description has the upstream port only, and no root ports. So of the bridges above a device every second is
//! a switch, counted from the root bus: root port, upstream port, downstream port, upstream port, and so on. A port leads to
//! one device. So if a bridge that would be a port leads to several, a GPU among them, the bridge is a switch as well.

use super::gpus::DetectedGpus;
use crate::sys::pci::{PciAttributes, PciLinkText, PciTree};
use crate::topology::machine::{CpuSocket, Gpu, Machine, Nic, PciDevice, PciLink};
use crate::topology::{BusId, Defect, ProcessorFacts, speed};
use std::collections::{BTreeMap, BTreeSet};

/// Number of a socket whose NUMA node is unknown.
const UNKNOWN_NUMA: i32 = -1;

/// Returns the machine with these GPUs and these network devices.
pub(super) fn machine(
    tree: &PciTree<'_>,
    processor: &ProcessorFacts,
    found: DetectedGpus,
    nics: Vec<(Option<usize>, Nic)>,
) -> Machine {
    let mut placer = Placer {
        tree,
        gpus: found.gpus,
        driver_links: found.links,
        nics: BTreeMap::new(),
        children: BTreeMap::new(),
        attributes: BTreeMap::new(),
        defects: found.defects,
    };
    let mut elsewhere = Vec::new();
    for (function, nic) in nics {
        match function {
            Some(function) => placer.nics.entry(function).or_default().push(nic),
            None => elsewhere.push(nic),
        }
    }
    let mut sockets = placer.sockets();
    if sockets.is_empty() {
        sockets.insert(UNKNOWN_NUMA, Vec::new());
    }
    let mut sockets: Vec<CpuSocket> = sockets
        .into_iter()
        .map(|(numa, devices)| CpuSocket {
            numa,
            arch: processor.arch.clone(),
            vendor: processor.vendor.clone(),
            family: processor.family,
            model: processor.model,
            affinity: if numa >= 0 {
                tree.cpumap(numa)
            } else {
                String::new()
            },
            devices,
            nics: Vec::new(),
        })
        .collect();
    // Devices on no PCI bus belong to the first socket, as in NCCL.
    if let Some(first) = sockets.first_mut() {
        first.nics = elsewhere;
    }
    Machine {
        sockets,
        version: found.version,
        defects: placer.defects,
    }
}

struct Placer<'a, 'f> {
    tree: &'a PciTree<'f>,
    /// GPUs that are not yet placed.
    gpus: BTreeMap<BusId, Gpu>,
    driver_links: BTreeMap<BusId, PciLink>,
    /// Network devices by PCI function.
    nics: BTreeMap<usize, Vec<Nic>>,
    /// Functions behind each switch, in the order of addresses. Functions at root ports are under `None`.
    children: BTreeMap<Option<usize>, BTreeSet<(BusId, usize)>>,
    attributes: BTreeMap<usize, PciAttributes>,
    defects: Vec<Defect>,
}

impl Placer<'_, '_> {
    /// Returns the devices of each NUMA node.
    fn sockets(&mut self) -> BTreeMap<i32, Vec<PciDevice>> {
        self.connect();
        let mut sockets: BTreeMap<i32, Vec<PciDevice>> = BTreeMap::new();
        for (_, function) in self.behind(None) {
            let numa = self.numa(function);
            let device = self.device(function);
            sockets.entry(numa).or_default().push(device);
        }
        if !self.tree.has_bus() {
            self.defects.push(Defect::NoPciBus);
        }
        for (bus_id, gpu) in std::mem::take(&mut self.gpus) {
            if self.tree.has_bus() {
                self.defects.push(Defect::UnlistedGpu(bus_id));
            }
            let link = self.driver_links.get(&bus_id).copied().unwrap_or_default();
            let device = PciDevice {
                link,
                gpu: Some(gpu),
                ..PciDevice::new(bus_id)
            };
            sockets.entry(UNKNOWN_NUMA).or_default().push(device);
        }
        sockets
    }

    /// Connects GPUs and NICs with the switches above them, up to the root ports.
    fn connect(&mut self) {
        let tree = self.tree;
        let functions = tree.functions();
        let mut depth = vec![0; functions.len()];
        for (index, function) in functions.iter().enumerate() {
            depth[index] = function.parent.map_or(0, |parent| depth[parent] + 1);
        }
        let gpus = self.gpus.keys().filter_map(|&bus_id| tree.find(bus_id));
        let gpus: BTreeSet<usize> = gpus.collect();
        let shared = self.shared_bridges(&gpus);
        let ends: BTreeSet<usize> = gpus.into_iter().chain(self.nics.keys().copied()).collect();
        for end in ends {
            let mut below = end;
            loop {
                let switch = tree
                    .bridges_above(below)
                    .find(|&bridge| depth[bridge] % 2 == 1 || shared.contains(&bridge));
                let siblings = self.children.entry(switch).or_default();
                let is_new = siblings.insert((functions[below].bus_id, below));
                match switch {
                    Some(switch) if is_new => below = switch,
                    _ => break,
                }
            }
        }
    }

    /// Returns the bridges right behind which are several devices that hold or lead to GPUs and NICs, among them a GPU.
    /// Virtual functions of a NIC look like several devices, so NICs alone do not count.
    fn shared_bridges(&self, gpus: &BTreeSet<usize>) -> BTreeSet<usize> {
        let functions = self.tree.functions();
        let mut behind: BTreeMap<usize, (BTreeSet<BusId>, bool)> = BTreeMap::new();
        for &end in gpus.iter().chain(self.nics.keys()) {
            let mut below = end;
            for bridge in self.tree.bridges_above(end) {
                let (devices, has_gpu) = behind.entry(bridge).or_default();
                devices.insert(functions[below].bus_id.of_device());
                *has_gpu |= gpus.contains(&end);
                below = bridge;
            }
        }
        let shared = behind
            .into_iter()
            .filter(|(_, (devices, has_gpu))| *has_gpu && devices.len() > 1);
        shared.map(|(bridge, _)| bridge).collect()
    }

    fn behind(&self, switch: Option<usize>) -> Vec<(BusId, usize)> {
        let children = self.children.get(&switch);
        children.into_iter().flatten().copied().collect()
    }

    fn attributes(&mut self, function: usize) -> &PciAttributes {
        let tree = self.tree;
        self.attributes
            .entry(function)
            .or_insert_with(|| tree.attributes(function))
    }

    /// Returns the NUMA node of a function or of the port above it.
    fn numa(&mut self, function: usize) -> i32 {
        let port = self.tree.functions()[function].parent;
        let nodes = [Some(function), port].into_iter().flatten();
        let mut known = nodes.filter_map(|function| self.attributes(function).numa);
        known.find(|numa| *numa >= 0).unwrap_or(UNKNOWN_NUMA)
    }

    /// Returns a function and everything behind it. The depth of the tree is limited.
    fn device(&mut self, function: usize) -> PciDevice {
        let known = &self.tree.functions()[function];
        let (bus_id, class) = (known.bus_id, known.class);
        if class.is_none() {
            self.defects.push(Defect::NoClass(bus_id));
        }
        let driver = self.driver_links.get(&bus_id).copied().unwrap_or_default();
        let link = match driver {
            PciLink {
                speed: Some(_),
                width: Some(_),
            } => driver,
            _ => self.link(function),
        };
        let devices = self.behind(Some(function));
        PciDevice {
            bus_id,
            class,
            ids: self.attributes(function).ids,
            link,
            gpu: self.gpus.remove(&bus_id),
            nics: self.nics.remove(&function).unwrap_or_default(),
            devices: devices
                .into_iter()
                .map(|(_, child)| self.device(child))
                .collect(),
        }
    }

    /// Returns the link between a function and the port above it: the slower speed and the smaller width of
    /// both. A port that a virtual machine invents does not count.
    fn link(&mut self, function: usize) -> PciLink {
        let own = self.usable(function);
        let trained = parse(&self.attributes(function).current_link).width;
        let Some(above) = self.tree.functions()[function].parent else {
            return own;
        };
        let port = self.usable(above);
        // If the device's link was trained with the port's width, the link really is slow.
        if speed::is_virtual(port, own) && trained != port.width {
            let bridge = self.tree.functions()[above].bus_id;
            self.report(Defect::VirtualBridge(bridge, speed::link_text(port)));
            return own;
        }
        let smaller = |own: u32, port: Option<u32>| port.map_or(own, |port| own.min(port));
        PciLink {
            speed: own.speed.map(|speed| smaller(speed, port.speed)),
            width: own.width.map(|width| smaller(width, port.width)),
        }
    }

    /// Adds a defect unless an equal one is known.
    fn report(&mut self, defect: Defect) {
        if !self.defects.contains(&defect) {
            self.defects.push(defect);
        }
    }

    /// Returns the fastest link of a function, or the trained one if its maximum is unknown.
    fn usable(&mut self, function: usize) -> PciLink {
        let attributes = self.attributes(function);
        let [max, current] = [&attributes.max_link, &attributes.current_link].map(parse);
        if max.speed.is_none() && current.speed.is_some() {
            let bus_id = self.tree.functions()[function].bus_id;
            self.report(Defect::TrainedSpeed(bus_id, speed::link_text(current)));
        }
        PciLink {
            speed: max.speed.or(current.speed),
            width: max.width.or(current.width),
        }
    }
}

fn parse(text: &PciLinkText) -> PciLink {
    PciLink {
        speed: speed::generation(&text.speed),
        // Linux prints 255 for an unknown width.
        width: text.width.filter(|width| (1..=32).contains(width)),
    }
}
