//! Descriptions of a machine as a file or the operating system gives them, before anything is derived.

use super::{BusId, Defect};

/// A host: its sockets, and the trees of PCIe devices below each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Sockets (NUMA nodes), in the order of the description.
    pub sockets: Vec<CpuSocket>,
    /// Version of NCCL's XML that the description follows, which selects the rule of peer access.
    pub version: XmlVersion,
    /// Defects of the description that were mended or left out, in order of appearance.
    pub defects: Vec<Defect>,
}

/// Version of NCCL's XML format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XmlVersion {
    /// Version 1, by NCCL.
    #[default]
    Nccl,
    /// Version 2, by RCCL.
    Rccl,
}

impl XmlVersion {
    /// Returns the value of the attribute `version`.
    pub const fn number(self) -> u32 {
        match self {
            XmlVersion::Nccl => 1,
            XmlVersion::Rccl => 2,
        }
    }
}

/// A NUMA node with its processor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSocket {
    /// Number of the NUMA node; -1 if the system does not report it.
    pub numa: i32,
    /// Instruction set, as `uname -m` prints it: `x86_64`, `arm64`, `ppc64`. Empty if unknown.
    pub arch: String,
    /// Vendor as CPUID gives it: `GenuineIntel`, `AuthenticAMD`. Empty if unknown.
    pub vendor: String,
    /// Processor family in NCCL's numbering; see `ProcessorFacts::family`.
    pub family: Option<u32>,
    /// Model as CPUID gives it.
    pub model: Option<u32>,
    /// Processors of the node as a hexadecimal mask, in the format of `cpumap` below /sys. Empty if unknown.
    pub affinity: String,
    /// Devices at the root ports.
    pub devices: Vec<PciDevice>,
    /// Network devices that are on no PCI bus.
    pub nics: Vec<Nic>,
}

/// A device on a PCI bus: a bridge (port of a switch), a GPU, a NIC, or another device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciDevice {
    /// PCI address of the device.
    pub bus_id: BusId,
    /// Class code of 24 bits, such as 0x060400 for a bridge. `None` if the description has none.
    pub class: Option<u32>,
    /// Vendor and device, then subsystem vendor and device; zeros if unknown.
    pub ids: [u16; 4],
    /// The link towards the socket.
    pub link: PciLink,
    /// Properties of the GPU; `None` if the device is no GPU.
    pub gpu: Option<Gpu>,
    /// Network devices (ports) of the NIC; empty if the device is no NIC.
    pub nics: Vec<Nic>,
    /// Devices behind the bridge; empty if the device is no bridge.
    pub devices: Vec<PciDevice>,
}

/// Speed and width of a PCIe link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PciLink {
    /// Speed of a lane in tenths of a gigatransfer per second; `None` if unknown.
    pub speed: Option<u32>,
    /// Number of lanes; `None` if unknown.
    pub width: Option<u32>,
}

/// Properties of a GPU: number, rank, architecture, and links other than PCIe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// Number by which the driver's management library knows the GPU.
    pub dev: u32,
    /// Rank of the process that uses the GPU; `None` if the description has none.
    pub rank: Option<u32>,
    /// Compute capability times ten of an NVIDIA GPU (`sm` in the XML).
    pub sm: Option<u32>,
    /// Architecture of an AMD GPU (`gcn` in the XML), such as 908 or 942. Letters count as hexadecimal digits:
    /// `gfx90a` is 910.
    pub gcn: Option<u32>,
    /// Whether NICs may read and write the GPU's memory.
    pub gdr: bool,
    /// Whether the GPU is divided into slices (MIG). A slice has neither peer access nor NVLink.
    pub mig: bool,
    /// NVLink, Infinity Fabric and NVLink-C2C links of the GPU.
    pub links: Vec<GpuLink>,
}

/// Kind of a link between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GpuLinkKind {
    /// NVIDIA's NVLink, to a GPU, an NVSwitch or a processor.
    NvLink,
    /// AMD's Infinity Fabric.
    Xgmi,
    /// NVLink-C2C to the socket of a superchip.
    C2c,
}

/// Links of one kind from a GPU to one target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuLink {
    /// NVLink, Infinity Fabric or NVLink-C2C.
    pub kind: GpuLinkKind,
    /// Address of the target; `None` for [`GpuLinkKind::C2c`].
    pub target: Option<BusId>,
    /// PCI class of the target: 0x03.... is a GPU, 0x068000 a switch of links, 0x068001 a processor.
    pub target_class: Option<u32>,
    /// Number of parallel links.
    pub count: u32,
    /// MB/s of each link, if the description states it instead of leaving it to the table of architectures.
    pub bandwidth: Option<u32>,
}

/// A network device, which is one port of a NIC.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nic {
    /// Name, such as `mlx5_0` or `eth0`.
    pub name: String,
    /// Number among the host's network devices.
    pub dev: u32,
    /// Speed in Mbit/s; `None` if unknown.
    pub speed: Option<u32>,
    /// Port number, from 1; 0 if unknown.
    pub port: u32,
    /// Identifier of the NIC, equal for the ports of one adapter; 0 if unknown.
    pub guid: u64,
    /// Whether the device can read and write GPU memory.
    pub gdr: bool,
}

impl PciDevice {
    /// Creates a device of which only the address is known.
    pub const fn new(bus_id: BusId) -> PciDevice {
        PciDevice {
            bus_id,
            class: None,
            ids: [0; 4],
            link: PciLink {
                speed: None,
                width: None,
            },
            gpu: None,
            nics: Vec::new(),
            devices: Vec::new(),
        }
    }

    /// Calls `visit` with this device and all devices behind it, parents first.
    pub fn visit<'a>(&'a self, visit: &mut dyn FnMut(&'a PciDevice)) {
        visit(self);
        for device in &self.devices {
            device.visit(visit);
        }
    }
}

impl Machine {
    /// Returns all PCI devices, parents first, socket by socket.
    pub fn pci_devices(&self) -> Vec<&PciDevice> {
        let mut all = Vec::new();
        for device in self.sockets.iter().flat_map(|socket| &socket.devices) {
            device.visit(&mut |device| all.push(device));
        }
        all
    }
}

/// Returns `text` with a replacement for each control character, which could change what a terminal shows.
pub(super) fn printable(text: &str) -> String {
    let shown = |c: char| {
        if c.is_control() {
            char::REPLACEMENT_CHARACTER
        } else {
            c
        }
    };
    text.chars().map(shown).collect()
}
