//! Tests of the readers on trees in memory and on disk. `topology/tests` reads whole machines.

use super::memory_files::{MemoryEntry, MemoryFiles};
use super::*;
use crate::error::ErrorKind;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// A directory that is removed with everything in it.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("cinch-pci-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A root port, and a function behind it, with their attributes.
fn small() -> MemoryFiles {
    let mut files = MemoryFiles::default();
    let port = "devices/pci0000:00/0000:00:01.0";
    for (path, class) in [
        (port.to_string(), "0x060400"),
        (format!("{port}/0000:01:00.0"), "0x030200"),
    ] {
        for (name, text) in [
            ("class", class),
            ("vendor", "0x10de"),
            ("device", "0x2335"),
            ("subsystem_vendor", "0x10de"),
            ("subsystem_device", "0x18be"),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("max_link_width", "16"),
            ("current_link_speed", "2.5 GT/s PCIe"),
            ("current_link_width", "16"),
            ("numa_node", "1"),
        ] {
            files.file(&format!("{path}/{name}"), text);
        }
        let bus_id = path.rsplit('/').next().unwrap();
        files.link_to(&format!("bus/pci/devices/{bus_id}"), &path);
    }
    files
}

#[test]
fn functions_have_their_bridges_and_attributes() {
    let files = small();
    let directory = Directory::new("small");
    files.write_to(&directory.0);
    let disk = SysDirectory::new(&directory.0);
    for files in [&files as &dyn PciFiles, &disk] {
        let tree = PciTree::read(files).unwrap();
        assert!(tree.has_bus());
        let found: Vec<_> = tree
            .functions()
            .iter()
            .map(|function| (function.bus_id.to_string(), function.parent, function.class))
            .collect();
        let expected = [
            ("0000:00:01.0".into(), None, Some(0x06_0400)),
            ("0000:01:00.0".into(), Some(0), Some(0x03_0200)),
        ];
        assert_eq!(found, expected);
        let attributes = tree.attributes(1);
        assert_eq!(attributes.ids, [0x10de, 0x2335, 0x10de, 0x18be]);
        assert_eq!(
            attributes.max_link,
            PciLinkText {
                speed: "32.0 GT/s PCIe".into(),
                width: Some(16)
            }
        );
        assert_eq!(attributes.current_link.speed, "2.5 GT/s PCIe");
        assert_eq!(attributes.numa, Some(1));
    }
}

#[test]
fn unreadable_attributes_are_unknown() {
    let mut files = small();
    let gpu = "devices/pci0000:00/0000:00:01.0/0000:01:00.0";
    let mut set = |name: &str, content: &[u8]| {
        let entry = MemoryEntry::File(content.into());
        files.entries.insert(format!("{gpu}/{name}"), entry);
    };
    set("class", &[0xff, 0xfe, 0x00]);
    set("vendor", b"0x10de0");
    set("max_link_speed", &vec![b' '; MAX_FILE_BYTES + 1]);
    set("max_link_width", b"-1");
    set("numa_node", b"99999999999");
    files.entries.remove(&format!("{gpu}/device"));
    files.link_to(
        &format!("{gpu}/subsystem_vendor"),
        &format!("{gpu}/subsystem_device"),
    );
    let directory = Directory::new("unreadable");
    files.write_to(&directory.0);
    // A FIFO would block a reader for ever, a directory is no file.
    let place = directory.0.join(gpu);
    let fifo = place.join("current_link_width");
    std::fs::remove_file(&fifo).unwrap();
    let name = CString::new(fifo.as_os_str().as_bytes()).unwrap();
    // SAFETY: `name` is a C string.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    std::fs::remove_file(place.join("current_link_speed")).unwrap();
    std::fs::create_dir(place.join("current_link_speed")).unwrap();
    let disk = SysDirectory::new(&directory.0);
    let tree = PciTree::read(&disk).unwrap();
    assert_eq!(tree.functions()[1].class, None);
    let expected = PciAttributes {
        ids: [0, 0, 0, 0x18be],
        ..PciAttributes::default()
    };
    assert_eq!(tree.attributes(1), expected);
}

#[test]
fn links_that_are_cyclic_or_leave_the_root_are_not_followed() {
    let directory = Directory::new("links");
    let outside = Directory::new("outside");
    small().write_to(&outside.0);
    let mut files = small();
    files.link_to(
        "bus/pci/devices/0000:02:00.0",
        "bus/pci/devices/0000:03:00.0",
    );
    files.link_to(
        "bus/pci/devices/0000:03:00.0",
        "bus/pci/devices/0000:02:00.0",
    );
    let inner = "devices/pci0000:00/0000:00:01.0/0000:01:00.0";
    let name = outside.0.file_name().unwrap().to_str().unwrap();
    for (bus, target) in [
        (4, format!("../../../../{name}/{inner}")),
        (5, format!("{}/{inner}", outside.0.display())),
        (6, "../../../missing".into()),
        // The root is not its own parent, so this target is outside although it exists inside.
        (7, "../../../../devices/pci0000:00/0000:07:00.0".into()),
    ] {
        let path = format!("bus/pci/devices/0000:0{bus}:00.0");
        files.entries.insert(path, MemoryEntry::Link(target));
    }
    files.file("devices/pci0000:00/0000:07:00.0/class", "0x030200");
    // A directory of functions that contains itself.
    files.link_to("devices/pci0000:00/0000:00:02.0", "devices/pci0000:00");
    files.link_to(
        "bus/pci/devices/0000:00:02.0",
        "devices/pci0000:00/0000:00:02.0",
    );
    files.write_to(&directory.0);
    let disk = SysDirectory::new(&directory.0);
    for files in [&files as &dyn PciFiles, &disk] {
        let tree = PciTree::read(files).unwrap();
        let found: Vec<_> = tree
            .functions()
            .iter()
            .map(|f| f.bus_id.to_string())
            .collect();
        assert_eq!(found, ["0000:00:01.0", "0000:01:00.0"]);
    }
}

#[test]
fn more_devices_or_levels_than_allowed_are_refused_or_left_out() {
    let mut files = MemoryFiles::default();
    let add = |files: &mut MemoryFiles, number: usize| {
        let bus_id = BusId::new(number as u32 / 256, number as u8, 0, 0);
        let path = format!("devices/pci0000:00/{bus_id}");
        files.file(&format!("{path}/class"), "0x020000");
        files.link_to(&format!("bus/pci/devices/{bus_id}"), &path);
    };
    (0..MAX_DEVICES).for_each(|number| add(&mut files, number));
    assert_eq!(
        PciTree::read(&files).unwrap().functions().len(),
        MAX_DEVICES
    );
    (MAX_DEVICES..5000).for_each(|number| add(&mut files, number));
    // Only the number of names matters, so the devices themselves need not exist.
    let directory = Directory::new("many");
    let list = directory.0.join("bus/pci/devices");
    std::fs::create_dir_all(&list).unwrap();
    for number in 0..5000 {
        std::fs::write(list.join(format!("device-{number}")), "").unwrap();
    }
    let disk = SysDirectory::new(&directory.0);
    for files in [&files as &dyn PciFiles, &disk] {
        let error = PciTree::read(files).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("more than 4096"), "{error}");
    }
    for (levels, found) in [(MAX_LEVELS, true), (MAX_LEVELS + 1, false)] {
        let mut files = MemoryFiles::default();
        let path = format!("{}0000:01:00.0", "a/".repeat(levels - 1));
        files.file(&format!("{path}/class"), "0x030200");
        files.link_to("bus/pci/devices/0000:01:00.0", &path);
        let tree = PciTree::read(&files).unwrap();
        assert_eq!(
            tree.find(BusId::new(0, 1, 0, 0)).is_some(),
            found,
            "{levels} levels"
        );
    }
}

#[test]
fn network_ports_are_read_with_rate_and_adapter() {
    let mut files = small();
    let gpu = "devices/pci0000:00/0000:00:01.0/0000:01:00.0";
    for (name, guid, rate) in [
        ("mlx5_10", "9803:9b03:00aa:bbcc", "400 Gb/sec (4X NDR)"),
        ("mlx5_2", "0000:0000:0000:0000", "2.5 Gb/sec (1X SDR)"),
        ("mlx5_3", "words", "fast"),
    ] {
        let entry = format!("{gpu}/infiniband/{name}");
        files.file(&format!("{entry}/sys_image_guid"), guid);
        files.file(&format!("{entry}/node_guid"), "0000:0000:0000:0007");
        for port in 1..3 {
            files.file(&format!("{entry}/ports/{port}/rate"), rate);
            let state = if port == 2 { "1: DOWN" } else { "4: ACTIVE" };
            files.file(&format!("{entry}/ports/{port}/state"), state);
        }
        files.link_to(&format!("{entry}/device"), gpu);
        files.link_to(&format!("class/infiniband/{name}"), &entry);
    }
    // Interfaces: of the adapter above, of a device on another bus, without a device, and one that is down.
    for (name, device, state, speed) in [
        ("ib0", Some(gpu), "up", "400000"),
        (
            "eth0",
            Some("devices/LNXSYSTM:00/VMBUS:00/guid"),
            "up",
            "-1",
        ),
        (
            "eth1",
            Some("devices/pci0000:00/0000:00:03.0/virtio2"),
            "unknown",
            "10000",
        ),
        (
            "eth2",
            Some("devices/pci0000:00/0000:00:03.0/virtio2"),
            "down",
            "10000",
        ),
        ("lo", None, "unknown", "1"),
    ] {
        let entry = format!("{}/net/{name}", device.unwrap_or("devices/virtual"));
        files.file(&format!("{entry}/operstate"), state);
        files.file(&format!("{entry}/speed"), speed);
        if let Some(device) = device {
            files.link_to(&format!("{entry}/device"), device);
        }
        files.link_to(&format!("class/net/{name}"), &entry);
    }
    let mut tree = PciTree::read(&files).unwrap();
    let ports = tree.network_ports().unwrap();
    let of = |name: &str, bus_id: Option<&str>, port, speed, guid| NetworkPort {
        name: name.into(),
        function: bus_id.map(|text| tree.find(text.parse().unwrap()).unwrap()),
        port,
        speed,
        guid,
    };
    let adapter = Some("0000:01:00.0");
    let expected = [
        of("mlx5_2", adapter, 1, Some(2500), 7),
        of("mlx5_3", adapter, 1, None, 7),
        of("mlx5_10", adapter, 1, Some(400_000), 0x9803_9b03_00aa_bbcc),
        of("eth0", None, 0, None, 0),
        of("eth1", Some("0000:00:03.0"), 0, Some(10_000), 0),
    ];
    assert_eq!(ports, expected);
}

#[test]
fn kernel_nodes_of_amd_give_links_between_gpus() {
    let mut files = MemoryFiles::default();
    let node = |files: &mut MemoryFiles, node: u32, text: &str| {
        files.file(
            &format!("devices/virtual/kfd/kfd/topology/nodes/{node}/properties"),
            text,
        );
    };
    files.link_to("class/kfd/kfd", "devices/virtual/kfd/kfd");
    node(
        &mut files,
        0,
        "cpu_cores_count 64\ngfx_target_version 0\nlocation_id 0",
    );
    node(
        &mut files,
        1,
        "gfx_target_version 90010\ndomain 0\nlocation_id 49408",
    );
    node(
        &mut files,
        2,
        "gfx_target_version 90010\ndomain 1\nlocation_id 769\nrubbish",
    );
    let link = |files: &mut MemoryFiles, from: u32, number: u32, text: &str| {
        let links = format!("devices/virtual/kfd/kfd/topology/nodes/{from}/io_links");
        files.file(&format!("{links}/{number}/properties"), text);
    };
    link(
        &mut files,
        1,
        0,
        "type 2\nnode_from 1\nnode_to 0\nmin_bandwidth 312\nmax_bandwidth 64000",
    );
    link(
        &mut files,
        1,
        1,
        "type 11\nnode_from 1\nnode_to 2\nmin_bandwidth 50000\nmax_bandwidth 200000",
    );
    link(
        &mut files,
        2,
        0,
        "type 11\nnode_from 2\nnode_to 1\nmin_bandwidth 0\nmax_bandwidth 0",
    );
    link(&mut files, 2, 1, "type 11\nnode_from 2\nnode_to 9");
    let tree = PciTree::read(&files).unwrap();
    let [a, b] = [BusId::new(0, 0xc1, 0, 0), BusId::new(1, 3, 0, 1)];
    let gpu = |bus_id, target, count| KfdGpu {
        bus_id,
        gfx_version: 90_010,
        links: vec![KfdLink { target, count }],
    };
    assert_eq!(kfd_gpus(&tree).unwrap(), [gpu(a, b, 4), gpu(b, a, 1)]);
}
