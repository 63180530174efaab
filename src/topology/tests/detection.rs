//! Machines read from a directory that looks like /sys, beside their descriptions in XML.

use super::fake_sys::FakeSys;
use super::machines::{case, dealt, each_gpu, with_nics};
use crate::sys::nvml::{NvmlGpu, NvmlResult};
use crate::sys::pci::memory_files::{MemoryEntry, MemoryFiles};
use crate::topology::machine::{Gpu, Machine, PciDevice, PciLink, XmlVersion};
use crate::topology::{
    BandwidthOrigin, BusId, Defect, DetectSources, DriverGpu, LinkKind, LinkTime, MachineGraph,
    PathType, Paths, PeerAccess, detect, detect_in, predict, read_xml, write_xml,
};
use std::path::PathBuf;

const NAMES: [&str; 10] = ["A", "B", "C", "D", "E", "F", "G", "H", "I", "K"];

/// Returns the graph without defects and without ranks, because /sys and NVML report no ranks.
fn graph(machine: &Machine) -> MachineGraph {
    let mut machine = machine.clone();
    each_gpu(&mut machine, &mut |gpu| gpu.rank = None);
    MachineGraph {
        defects: Vec::new(),
        ..MachineGraph::new(&machine)
    }
}

fn detected(files: &MemoryFiles, nvml: &[NvmlGpu]) -> Machine {
    let sources = DetectSources {
        nvml,
        ..DetectSources::default()
    };
    detect_in(files, &sources).unwrap()
}

/// Returns all GPUs with their numbers.
fn gpus(machine: &Machine) -> Vec<(BusId, &Gpu)> {
    let devices = machine.pci_devices();
    devices
        .iter()
        .filter_map(|d| Some((d.bus_id, d.gpu.as_ref()?)))
        .collect()
}

/// A directory that is removed with everything in it.
pub struct Directory(pub PathBuf);

impl Directory {
    pub fn new(name: &str, files: &MemoryFiles) -> Directory {
        let path = std::env::temp_dir().join(format!("cinch-sys-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        files.write_to(&path);
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns the machines of the test: all machines with predictions, and three with NICs. One of the three has
/// switches that show two levels of bridges, another a socket with NICs and without GPUs.
fn machines() -> Vec<(String, Machine)> {
    let mut all: Vec<_> = NAMES
        .iter()
        .map(|name| (name.to_string(), case(name).machine))
        .collect();
    all.push(("NICs".into(), with_nics(2, 2)));
    let mut broadcom = with_nics(1, 4);
    for socket in &mut broadcom.sockets {
        let outer = &mut socket.devices[0];
        let mut inner = PciDevice::new(BusId::new(0, 0xd0 + socket.numa as u8, 0, 0));
        (inner.class, inner.link) = (outer.class, outer.link);
        inner.ids = [0x1000, 0xc030, 0x1000, 0x1001];
        outer.ids = [0x1000, 0xc030, 0x1000, 0x0001];
        inner.devices = std::mem::take(&mut outer.devices);
        outer.devices.push(inner);
    }
    all.push(("Broadcom".into(), broadcom));
    let mut apart = with_nics(1, 2);
    apart.sockets[0].devices[0]
        .devices
        .retain(|device| device.gpu.is_some());
    let second = &mut apart.sockets[1].devices[0].devices;
    second.retain(|device| device.gpu.is_none());
    for (dev, nic) in second
        .iter_mut()
        .flat_map(|device| &mut device.nics)
        .enumerate()
    {
        nic.dev = dev as u32;
    }
    all.push(("apart".into(), apart));
    all
}

#[test]
fn a_tree_gives_the_graph_that_the_xml_file_gives() {
    for (name, machine) in machines() {
        let expected = graph(&read_xml(&write_xml(&machine)).unwrap());
        let fake = FakeSys::new(&machine);
        let directory = Directory::new(&name, &fake.files);
        let nvml = fake.gpus();
        // Without NVML's PCIe links, the PCIe links must come from /sys.
        let mut without_pcie = nvml.clone();
        for gpu in &mut without_pcie {
            gpu.max_link = Default::default();
        }
        for nvml in [nvml, without_pcie] {
            let sources = fake.sources(&nvml);
            let in_memory = detect_in(&fake.files, &sources).unwrap();
            assert_eq!(graph(&in_memory), expected, "{name}");
            assert_eq!(detect(&directory.0, &sources).unwrap(), in_memory, "{name}");
            assert_eq!(in_memory.defects, [], "{name}");
            let written = read_xml(&write_xml(&in_memory)).unwrap();
            assert_eq!(graph(&written), expected, "{name}");
        }
    }
}

#[test]
fn descriptions_hold_the_facts_that_the_graph_leaves_out() {
    let machine = with_nics(1, 2);
    let fake = FakeSys::new(&machine);
    let found = detect_in(&fake.files, &fake.sources(&fake.gpus())).unwrap();
    for (found, expected) in found.sockets.iter().zip(&machine.sockets) {
        assert_eq!(
            (found.numa, &found.affinity),
            (expected.numa, &expected.affinity)
        );
        assert_eq!(
            (found.family, found.model),
            (expected.family, expected.model)
        );
    }
    let [found, expected] = [&found, &machine].map(Machine::pci_devices);
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!((found.class, found.link), (expected.class, expected.link));
        assert_eq!(found.nics, expected.nics);
        assert_eq!(found.gpu.is_some(), found.ids[0] == 0x10de);
    }
    // Without a driver neither the capability nor access by NICs is known, and numbers follow addresses.
    let without = detected(&fake.files, &[]);
    let expected: Vec<_> = (0..4)
        .map(|dev| Gpu {
            dev,
            ..Gpu::default()
        })
        .collect();
    let found: Vec<_> = gpus(&without)
        .into_iter()
        .map(|(_, gpu)| gpu.clone())
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn driver_facts_fill_what_nvml_leaves_open() {
    let fake = FakeSys::new(&with_nics(1, 1));
    fake.nvml
        .fail("compute_capability", 0, NvmlResult::NOT_SUPPORTED);
    let driver = |bus, sm| DriverGpu {
        bus_id: BusId::new(0, bus, 0, 0),
        sm: Some(sm),
        gdr: Some(true),
    };
    let nvml = fake.gpus();
    let sources = DetectSources {
        driver: &[driver(0x10, 89), driver(0x11, 89), driver(0x99, 75)],
        ..fake.sources(&nvml)
    };
    let found = detect_in(&fake.files, &sources).unwrap();
    let facts: Vec<_> = gpus(&found)
        .iter()
        .map(|(_, gpu)| (gpu.dev, gpu.sm, gpu.gdr))
        .collect();
    // The GPU that /sys lacks is at a socket of its own, whose NUMA node is unknown.
    let expected = [
        (2, Some(75), true),
        (0, Some(89), true),
        (1, Some(70), true),
    ];
    assert_eq!(facts, expected);
    assert_eq!(found.sockets[0].numa, -1);
    assert_eq!(
        found.defects,
        [Defect::UnlistedGpu(BusId::new(0, 0x99, 0, 0))]
    );
}

#[test]
fn without_sys_gpus_stand_side_by_side_at_an_unknown_socket() {
    for name in NAMES.into_iter().filter(|name| *name != "I") {
        let machine = case(name).machine;
        let fake = FakeSys::new(&machine);
        let nvml = fake.gpus();
        let missing = std::env::temp_dir().join("cinch-no-such-directory");
        let found = detect(&missing, &fake.sources(&nvml)).unwrap();
        let [socket] = &found.sockets[..] else {
            panic!("{name}: {} sockets", found.sockets.len())
        };
        assert_eq!(socket.numa, -1);
        assert_eq!(socket.devices.len(), nvml.len());
        assert_eq!(found.defects, [Defect::NoPciBus]);
        // NVLinks that NVML reports are known even without /sys.
        let [found, expected] = [&found, &machine].map(gpus);
        for ((_, found), (_, expected)) in found.iter().zip(&expected) {
            assert_eq!(
                (found.dev, &found.links),
                (expected.dev, &expected.links),
                "{name}"
            );
        }
    }
    let nothing = detected(&MemoryFiles::default(), &[]);
    assert_eq!((nothing.sockets.len(), nothing.sockets[0].numa), (1, -1));
    assert!(nothing.pci_devices().is_empty());
}

#[test]
fn gpus_that_sys_lacks_keep_the_others_in_place() {
    let machine = case("B").machine;
    let mut fake = FakeSys::new(&machine);
    let [missing, other] = [0x11, 0x15].map(|bus| BusId::new(0, bus, 0, 0));
    for bus_id in [missing, other] {
        fake.files
            .entries
            .remove(&format!("bus/pci/devices/{bus_id}"));
    }
    let found = detect_in(&fake.files, &fake.sources(&fake.gpus())).unwrap();
    let numbers: Vec<_> = found
        .sockets
        .iter()
        .map(|s| (s.numa, s.devices.len()))
        .collect();
    assert_eq!(numbers, [(-1, 2), (0, 2), (1, 2)]);
    assert_eq!(found.defects, [missing, other].map(Defect::UnlistedGpu));
    let graph = MachineGraph::new(&found);
    let paths = Paths::new(&graph, &PeerAccess::Rule);
    assert!(graph.has_unknown_socket);
    assert_eq!(paths.get(2, 3).class, PathType::Pix);
    // How far GPU 1 is from the others is unknown, but the sockets of the others are 10 GB/s apart.
    let between = |a: usize, b: usize| {
        let mut links = paths.get(a, b).links.iter().map(|&link| graph.links[link]);
        links
            .find(|link| link.class == LinkKind::Socket)
            .unwrap()
            .bandwidth
    };
    assert_eq!(between(0, 1).origin, BandwidthOrigin::Assumed);
    assert_eq!(between(0, 4).mb_s, 10_000);
}

/// The GPUs of one socket are known, the others are not, and ranks are dealt to both. Where the others are is not guessed.
#[test]
fn unknown_numa_nodes_divide_nothing() {
    let mut machine = case("F").machine;
    dealt(&mut machine, &[(0..4).collect(), (4..8).collect()]);
    let of = |machine: &Machine| {
        let graph = MachineGraph::new(machine);
        predict(&graph, &Paths::new(&graph, &PeerAccess::Rule))
    };
    let known = of(&machine);
    assert_eq!(known.partitions.len(), 1);
    assert!(known.best() < known.ring_by_rank);
    machine.sockets[1].numa = -1;
    let unknown = of(&machine);
    assert_eq!(unknown.partitions, []);
    assert_eq!(unknown.groups.len(), 1);
    assert_eq!(unknown.best_ring.0, [0, 4, 1, 5, 2, 6, 3, 7]);
    // Only the GPUs' links of 24 GB/s count.
    let own = LinkTime::new(14, 8, 24_000);
    assert_eq!([unknown.ring_by_rank, unknown.best()], [own; 2]);
    // Switches whose links are known still divide GPUs.
    let mut machine = case("C").machine;
    machine.sockets[1].numa = -1;
    let pairs = of(&machine).groups;
    assert_eq!(pairs, [[0, 1], [2, 3], [4, 5], [6, 7]]);
}

#[test]
fn a_bus_without_bridges_is_flat() {
    // The directories of the functions are in `bus/pci/devices` itself, as in a copy of /sys that followed
    // symbolic links.
    let fake = FakeSys::new(&case("A").machine);
    let mut flat = MemoryFiles::default();
    for (path, entry) in &fake.files.entries {
        let MemoryEntry::Link(target) = entry else {
            continue;
        };
        let target = target.trim_start_matches("../");
        for (file, content) in fake.files.entries.iter().filter(|(file, _)| {
            file.strip_prefix(target)
                .is_some_and(|rest| rest.starts_with('/') && !rest[1..].contains('/'))
        }) {
            flat.entries
                .insert(file.replacen(target, path, 1), content.clone());
        }
    }
    let found = detect_in(&flat, &fake.sources(&fake.gpus())).unwrap();
    assert_eq!(found.sockets.len(), 1);
    assert_eq!(found.sockets[0].devices.len(), 8);
    assert!(
        found.sockets[0]
            .devices
            .iter()
            .all(|device| device.gpu.is_some())
    );
}

#[test]
fn unknown_numa_nodes_make_a_single_socket_and_keep_switches() {
    let mut machine = case("C").machine;
    let fake = FakeSys::new(&machine);
    let mut files = fake.files.clone();
    for (path, entry) in &mut files.entries {
        if path.ends_with("/numa_node") {
            *entry = MemoryEntry::File(b"-1\n".into());
        }
    }
    let found = detect_in(&files, &fake.sources(&fake.gpus())).unwrap();
    let second = machine.sockets.remove(1);
    machine.sockets[0].numa = -1;
    machine.sockets[0].devices.extend(second.devices);
    assert_eq!(graph(&found), graph(&machine));
    // If only root ports know a NUMA node, the devices behind a root port are on its node.
    let mut files = fake.files.clone();
    files
        .entries
        .retain(|path, _| !path.ends_with("/numa_node") || path.matches('/').count() == 3);
    let found = detect_in(&files, &fake.sources(&fake.gpus())).unwrap();
    assert_eq!(graph(&found), graph(&case("C").machine));
}

/// Sets attributes of all functions whose path contains `part`.
fn set(files: &mut MemoryFiles, part: &str, attributes: [(&str, &str); 2]) {
    for (path, entry) in &mut files.entries {
        let (directory, name) = path.rsplit_once('/').unwrap();
        if let Some((_, text)) = attributes.iter().find(|(attribute, _)| *attribute == name)
            && directory.starts_with("devices/")
            && directory.ends_with(part)
        {
            *entry = MemoryEntry::File(text.as_bytes().into());
        }
    }
}

#[test]
fn bridges_that_a_virtual_machine_invents_do_not_slow_devices() {
    let machine = case("F").machine;
    let fake = FakeSys::new(&machine);
    let mut files = fake.files.clone();
    let slow = [("max_link_speed", "2.5 GT/s PCIe"), ("max_link_width", "1")];
    set(&mut files, "0000:e0:00.0", slow);
    let found = detected(&files, &[]);
    let port = BusId::new(0, 0xe0, 0, 0);
    assert_eq!(
        found.defects,
        [Defect::VirtualBridge(port, "2.5 GT/s PCIe x1".into())]
    );
    assert_eq!(
        found.pci_devices()[0].link,
        PciLink {
            speed: Some(160),
            width: Some(16)
        }
    );
    // A device whose link was trained with a single lane does have a slow link.
    set(
        &mut files,
        "0000:10:00.0",
        [("current_link_width", "1"), ("", "")],
    );
    let found = detected(&files, &[]);
    assert_eq!(found.defects, []);
    assert_eq!(
        found.pci_devices()[0].link,
        PciLink {
            speed: Some(25),
            width: Some(1)
        }
    );
    // A switch keeps the slow link that a virtual machine invents. The graph corrects this link, because it
    // knows the devices behind the switch.
    let fake = FakeSys::new(&case("A").machine);
    let mut files = fake.files.clone();
    set(&mut files, "0000:80:00.0", slow);
    let found = graph(&detect_in(&files, &fake.sources(&fake.gpus())).unwrap());
    let bandwidths: Vec<_> = found.links.iter().map(|link| link.bandwidth.mb_s).collect();
    assert!(
        bandwidths.iter().all(|mb_s| *mb_s == 12_000),
        "{bandwidths:?}"
    );
}

/// Two GPUs and a NIC of two functions are right behind a bridge of the root bus, as behind a bridge from PCIe to PCI. A port
/// with a single GPU of two functions, and a port with virtual functions of a NIC, stay ports.
#[test]
fn a_bridge_with_several_devices_is_a_switch() {
    let mut files = MemoryFiles::default();
    let mut function = |path: &str, class: &str| {
        let path = format!("devices/pci0000:00/{path}");
        for (name, text) in [
            ("class", class),
            ("vendor", "0x10de"),
            ("max_link_speed", "16.0 GT/s PCIe"),
            ("max_link_width", "16"),
            ("numa_node", "0"),
        ] {
            files.file(&format!("{path}/{name}"), text);
        }
        let bus_id = path.rsplit('/').next().unwrap();
        files.link_to(&format!("bus/pci/devices/{bus_id}"), &path);
        if class == "0x020000" {
            let entry = format!("{path}/net/eth{}", bus_id.replace(['.', ':'], ""));
            files.link_to(&format!("{entry}/device"), &path);
            files.file(&format!("{entry}/operstate"), "up");
            let name = entry.rsplit('/').next().unwrap();
            files.link_to(&format!("class/net/{name}"), &entry);
        }
    };
    let [bridge, gpu, sound, nic] = ["0x060400", "0x030200", "0x040300", "0x020000"];
    for port in ["01", "02", "03"] {
        function(&format!("0000:00:{port}.0"), bridge);
    }
    for (device, class) in [("00.0", gpu), ("01.0", gpu), ("02.0", nic), ("02.1", nic)] {
        function(&format!("0000:00:01.0/0000:10:{device}"), class);
    }
    for (device, class) in [("00.0", gpu), ("00.1", sound)] {
        function(&format!("0000:00:02.0/0000:20:{device}"), class);
    }
    for device in ["00.0", "00.2", "01.0"] {
        function(&format!("0000:00:03.0/0000:30:{device}"), nic);
    }
    let found = detected(&files, &[]);
    let shape = |device: &PciDevice| (device.bus_id.to_string(), device.devices.len());
    let shapes: Vec<_> = found.sockets[0].devices.iter().map(shape).collect();
    let expected = [
        ("0000:00:01.0", 4),
        ("0000:20:00.0", 0),
        ("0000:30:00.0", 0),
        ("0000:30:00.2", 0),
        ("0000:30:01.0", 0),
    ];
    assert_eq!(
        shapes,
        expected.map(|(name, count)| (name.to_string(), count))
    );
    let graph = MachineGraph::new(&found);
    let paths = Paths::new(&graph, &PeerAccess::Rule);
    assert_eq!(
        [paths.get(0, 1).class, paths.get(0, 2).class],
        [PathType::Pix, PathType::Phb]
    );
    let prediction = predict(&graph, &paths);
    assert_eq!(prediction.groups, [vec![0, 1], vec![2]]);
}

#[test]
fn a_speed_that_may_save_power_is_reported() {
    let machine = case("F").machine;
    let mut files = FakeSys::new(&machine).files;
    // GPU 0 and the port above GPU 1 do not report their fastest speed.
    for part in ["0000:10:00.0", "0000:e0:00.1"] {
        let unreadable = [
            ("max_link_speed", "Unknown"),
            ("current_link_speed", "8.0 GT/s PCIe"),
        ];
        set(&mut files, part, unreadable);
    }
    let found = detected(&files, &[]);
    let trained = |bus: u8, function: u8| {
        let bus_id = BusId::new(0, bus, 0, function);
        Defect::TrainedSpeed(bus_id, "8.0 GT/s PCIe x16".into())
    };
    assert_eq!(found.defects, [trained(0x10, 0), trained(0xe0, 1)]);
    assert_eq!(found.pci_devices()[0].link.speed, Some(80));
}

#[test]
fn speeds_that_linux_does_not_know_stay_unknown() {
    let machine = case("A").machine;
    for (speed, width) in [
        ("Unknown", "0"),
        ("", ""),
        ("Unknown speed", "255"),
        ("16.0 GT/s", "words"),
    ] {
        let mut files = FakeSys::new(&machine).files;
        for name in ["max", "current"] {
            let [speed_name, width_name] =
                ["speed", "width"].map(|what| format!("{name}_link_{what}"));
            set(&mut files, "", [(&speed_name, speed), (&width_name, width)]);
        }
        let found = detected(&files, &[]);
        assert!(
            found
                .pci_devices()
                .iter()
                .all(|device| device.link.width.is_none())
        );
        let graph = MachineGraph::new(&found);
        let unknown = graph
            .defects
            .iter()
            .filter(|d| matches!(d, Defect::UnknownSpeed(..)));
        assert_eq!(unknown.count(), 10);
    }
}

#[test]
fn slices_have_neither_links_nor_peer_access() {
    let mut machine = case("H").machine;
    each_gpu(&mut machine, &mut |gpu| gpu.mig = gpu.dev == 2);
    let fake = FakeSys::new(&machine);
    let found = detect_in(&fake.files, &fake.sources(&fake.gpus())).unwrap();
    let found = read_xml(&write_xml(&found)).unwrap();
    let graph = MachineGraph::new(&found);
    assert_eq!(graph.defects, []);
    for access in [
        PeerAccess::UpTo(PathType::Sys),
        PeerAccess::Pairs(vec![true; 64]),
    ] {
        let paths = Paths::new(&graph, &access);
        for (a, b) in (0..8)
            .flat_map(|a| (0..8).map(move |b| (a, b)))
            .filter(|(a, b)| a != b)
        {
            let sliced = a == 2 || b == 2;
            let path = paths.get(a, b);
            assert_eq!(path.peer_access, !sliced, "{a} {b}");
            assert!(!sliced || path.class > PathType::Nvl, "{a} {b}");
        }
    }
}

#[test]
fn gpus_of_other_vendors_and_other_functions_are_left_out() {
    let mut fake = FakeSys::new(&case("G").machine);
    for (device, (class, vendor)) in [
        ("030000", "0x1a03"), // the display of a management controller
        ("030000", "0x1002"), // a GPU of AMD beside GPUs of NVIDIA
        ("040300", "0x10de"), // the sound function of a GPU
        ("068000", "0x10de"), // an NVSwitch
        ("120000", "0x10de"), // an accelerator, which counts
    ]
    .into_iter()
    .enumerate()
    {
        let bus_id = BusId::new(0, 0x90, device as u8, 0);
        let path = format!("devices/pci0000:00/{bus_id}");
        fake.files
            .file(&format!("{path}/class"), &format!("0x{class}"));
        fake.files.file(&format!("{path}/vendor"), vendor);
        fake.files
            .link_to(&format!("bus/pci/devices/{bus_id}"), &path);
    }
    let found = detect_in(&fake.files, &fake.sources(&fake.gpus())).unwrap();
    let gpus: Vec<_> = gpus(&found)
        .iter()
        .map(|(bus_id, gpu)| (bus_id.to_string(), gpu.dev))
        .collect();
    let expected = [
        "0000:90:04.0",
        "0000:10:00.0",
        "0000:11:00.0",
        "0000:12:00.0",
        "0000:13:00.0",
    ];
    assert_eq!(
        gpus,
        expected
            .map(String::from)
            .into_iter()
            .zip([4, 0, 1, 2, 3])
            .collect::<Vec<_>>()
    );
    assert_eq!(found.version, XmlVersion::Nccl);
}
