//! Writes a directory that looks like /sys, and a simulated NVML, from the description of a machine.
//!
//! Root ports and downstream ports, which a description lacks, are added. Either the device or the port above
//! it, in turn, has the link of the description; its counterpart has a faster link. The detection must find
//! the slower link.

use crate::sys::nvml::mock::{MockGpu, MockLink, MockNvml};
use crate::sys::nvml::{NVML_REMOTE_GPU, NVML_REMOTE_IBM_NPU, NVML_REMOTE_SWITCH, Nvml, NvmlGpu};
use crate::sys::pci::memory_files::MemoryFiles;
use crate::topology::machine::{GpuLinkKind, Machine, PciDevice, PciLink, XmlVersion};
use crate::topology::{BusId, DetectSources, ProcessorFacts, speed};
use std::sync::Arc;

/// A machine as the operating system and NVML show it.
pub struct FakeSys {
    pub files: MemoryFiles,
    pub nvml: Arc<MockNvml>,
    pub processor: ProcessorFacts,
}

impl FakeSys {
    pub fn new(machine: &Machine) -> FakeSys {
        let mut writer = Writer {
            files: MemoryFiles::default(),
            vendor: match machine.version {
                XmlVersion::Nccl => "0x10de",
                XmlVersion::Rccl => "0x1002",
            },
            numa: -1,
            ports: 0,
        };
        for (at, socket) in machine.sockets.iter().enumerate() {
            writer.numa = socket.numa;
            if socket.numa >= 0 {
                let path = format!("devices/system/node/node{}/cpumap", socket.numa);
                writer.files.file(&path, &socket.affinity);
            }
            for device in &socket.devices {
                writer.device(&format!("devices/pci{at:04x}:00"), device);
            }
        }
        let has_gdr = machine
            .pci_devices()
            .iter()
            .any(|device| device.nics.iter().any(|nic| nic.gdr));
        if has_gdr {
            writer.files.file("module/nvidia_peermem/version", "1.0");
        }
        writer.kfd(machine);
        let processor = machine.sockets.first().map(|socket| ProcessorFacts {
            arch: socket.arch.clone(),
            vendor: socket.vendor.clone(),
            family: socket.family,
            model: socket.model,
        });
        FakeSys {
            files: writer.files,
            nvml: nvml(machine),
            processor: processor.unwrap_or_default(),
        }
    }

    /// Returns what NVML lists.
    pub fn gpus(&self) -> Vec<NvmlGpu> {
        Nvml::new(self.nvml.clone()).unwrap().gpus().unwrap()
    }

    pub fn sources<'a>(&self, nvml: &'a [NvmlGpu]) -> DetectSources<'a> {
        DetectSources {
            processor: self.processor.clone(),
            nvml,
            driver: &[],
        }
    }
}

struct Writer {
    files: MemoryFiles,
    vendor: &'static str,
    numa: i32,
    ports: usize,
}

impl Writer {
    fn function(&mut self, path: &str, class: Option<u32>, ids: [String; 4], link: PciLink) {
        let speed = link.speed.map_or("Unknown".into(), speed::generation_text);
        let width = link.width.map_or("255".into(), |width| width.to_string());
        let [vendor, device, subsystem_vendor, subsystem_device] = ids;
        let mut attributes = vec![
            ("vendor", vendor),
            ("device", device),
            ("subsystem_vendor", subsystem_vendor),
            ("subsystem_device", subsystem_device),
            ("max_link_speed", speed),
            ("max_link_width", width),
            // An idle device trains its link to a low speed.
            ("current_link_speed", "2.5 GT/s PCIe".into()),
            ("current_link_width", link.width.unwrap_or(0).to_string()),
            ("numa_node", self.numa.to_string()),
        ];
        if link.speed.is_none() {
            attributes.retain(|(name, _)| !name.starts_with("current"));
        }
        if let Some(class) = class {
            attributes.push(("class", format!("0x{class:06x}")));
        }
        for (name, text) in attributes {
            self.files.file(&format!("{path}/{name}"), &text);
        }
        let bus_id = path.rsplit('/').next().unwrap();
        self.files
            .link_to(&format!("bus/pci/devices/{bus_id}"), path);
    }

    /// Writes a device with the port above it, which is a root port or a downstream port, into `directory`.
    fn device(&mut self, directory: &str, device: &PciDevice) {
        let number = self.ports;
        self.ports += 1;
        let port = BusId::new(
            0,
            0xe0 + (number / 256) as u8,
            (number / 8 % 32) as u8,
            (number % 8) as u8,
        );
        let faster = PciLink {
            speed: device.link.speed.map(|_| 640),
            width: device.link.width.map(|width| width.max(16)),
        };
        let (own, above) = match number % 2 {
            0 => (device.link, faster),
            _ => (faster, device.link),
        };
        let port = format!("{directory}/{port}");
        let unnamed = ["0x8086", "0x352a", "0x0000", "0x0000"].map(String::from);
        self.function(&port, Some(0x06_0400), unnamed, above);
        let mut ids = device.ids.map(|id| format!("0x{id:04x}"));
        if device.gpu.is_some() {
            ids[0] = self.vendor.into();
        }
        let path = format!("{port}/{}", device.bus_id);
        self.function(&path, device.class, ids, own);
        self.network(&path, device);
        for child in &device.devices {
            self.device(&path, child);
        }
    }

    fn network(&mut self, path: &str, device: &PciDevice) {
        for nic in &device.nics {
            let class = if nic.port > 0 { "infiniband" } else { "net" };
            let entry = format!("{path}/{class}/{}", nic.name);
            self.files.link_to(&format!("{entry}/device"), path);
            self.files
                .link_to(&format!("class/{class}/{}", nic.name), &entry);
            if nic.port == 0 {
                self.files.file(&format!("{entry}/operstate"), "up");
                let speed = nic.speed.map_or(-1, i64::from);
                self.files
                    .file(&format!("{entry}/speed"), &speed.to_string());
                continue;
            }
            let guid = format!("{:016x}", nic.guid);
            let guid = [0, 4, 8, 12].map(|at| &guid[at..at + 4]).join(":");
            self.files.file(&format!("{entry}/sys_image_guid"), &guid);
            let port = format!("{entry}/ports/{}", nic.port);
            self.files.file(&format!("{port}/state"), "4: ACTIVE");
            let rate = nic.speed.map_or(String::new(), |speed| {
                format!("{} Gb/sec (4X NDR)", speed / 1000)
            });
            self.files.file(&format!("{port}/rate"), &rate);
        }
    }

    /// Writes the nodes of AMD's driver: a processor, then the GPUs.
    fn kfd(&mut self, machine: &Machine) {
        const NODES: &str = "devices/virtual/kfd/kfd/topology/nodes";
        if machine.version != XmlVersion::Rccl {
            return;
        }
        self.files
            .link_to("class/kfd/kfd", "devices/virtual/kfd/kfd");
        self.files.file(
            &format!("{NODES}/0/properties"),
            "cpu_cores_count 64\nlocation_id 0",
        );
        let devices = machine.pci_devices();
        let gpus: Vec<_> = devices
            .iter()
            .filter_map(|d| Some((d.bus_id, d.gpu.as_ref()?)))
            .collect();
        for (at, (bus_id, gpu)) in gpus.iter().enumerate() {
            let node = format!("{NODES}/{}", at + 1);
            let text = bus_id.to_string();
            let bus = u32::from_str_radix(&text[5..7], 16).unwrap();
            let version = match gpu.gcn.unwrap_or(908) {
                910 => 90_010,
                gcn => gcn / 100 * 10_000 + gcn / 10 % 10 * 100 + gcn % 10,
            };
            let properties = format!(
                "gfx_target_version {version}\ndomain 0\nlocation_id {}",
                bus << 8
            );
            self.files.file(&format!("{node}/properties"), &properties);
            for (number, link) in gpu.links.iter().enumerate() {
                let to = gpus
                    .iter()
                    .position(|(bus_id, _)| Some(*bus_id) == link.target)
                    .unwrap();
                let properties = format!(
                    "type 11\nnode_from {}\nnode_to {}\nmin_bandwidth 50000\nmax_bandwidth {}",
                    at + 1,
                    to + 1,
                    50_000 * link.count
                );
                self.files
                    .file(&format!("{node}/io_links/{number}/properties"), &properties);
            }
        }
    }
}

/// Returns a simulated NVML that lists the GPUs of NVIDIA by number.
fn nvml(machine: &Machine) -> Arc<MockNvml> {
    let devices = machine.pci_devices();
    let mut gpus: Vec<(u32, MockGpu)> = Vec::new();
    for device in devices
        .iter()
        .filter(|_| machine.version == XmlVersion::Nccl)
    {
        let Some(gpu) = &device.gpu else { continue };
        let links = gpu
            .links
            .iter()
            .filter(|link| link.kind == GpuLinkKind::NvLink)
            .flat_map(|link| {
                let kind = match link.target_class {
                    Some(0x06_8000) => NVML_REMOTE_SWITCH,
                    Some(0x06_8001) => NVML_REMOTE_IBM_NPU,
                    _ => NVML_REMOTE_GPU,
                };
                let mock = MockLink {
                    remote: link.target.unwrap().to_string(),
                    kind,
                    is_up: true,
                    p2p: true,
                };
                std::iter::repeat_n(mock, link.count as usize)
            });
        let generation = |speed: u32| {
            (1..7)
                .find(|&g| speed::of_generation(g) == Some(speed))
                .unwrap()
        };
        let pcie = device.link.speed.zip(device.link.width);
        gpus.push((
            gpu.dev,
            MockGpu {
                bus_id: device.bus_id,
                sm: gpu.sm.unwrap_or(70),
                pcie: pcie.map(|(speed, width)| (generation(speed), width)),
                mig: gpu.mig,
                links: links.collect(),
            },
        ));
    }
    gpus.sort_by_key(|(dev, _)| *dev);
    MockNvml::new(gpus.into_iter().map(|(_, gpu)| gpu).collect())
}
