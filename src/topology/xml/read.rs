//! Reads a machine from XML. The file may be hostile: its size and shape are limited, and document types are
//! refused.

use super::limits;
use crate::error::{Error, ErrorKind, Result};
use crate::topology::machine::{
    CpuSocket, Gpu, GpuLink, GpuLinkKind, Machine, Nic, PciDevice, PciLink, XmlVersion, printable,
};
use crate::topology::{BusId, Defect, speed};
use roxmltree::{Document, Node, ParsingOptions};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::str::FromStr;

/// Reads a machine from the text of an XML file.
///
/// # Errors
/// Invalid argument if the text is no XML, has another root or version, a document type, more than 8 MiB,
/// 4,096 elements or 64 levels, several hosts, no GPU, a GPU without `dev` or in a place that is not read; if two GPUs have
/// one address, `dev` or rank; or if a number is malformed. The sentence names the line and what to do. Milder defects are listed in
/// [`Machine::defects`].
pub fn read(text: &str) -> Result<Machine> {
    limits::check(text)?;
    let options = ParsingOptions {
        allow_dtd: false,
        ..ParsingOptions::default()
    };
    let document = Document::parse_with_options(text, options).map_err(|error| {
        let (line, error) = (error.pos().row, printable(&error.to_string()));
        let what =
            format!("line {line}: no XML: {error}; correct the line, or write the file again");
        Error::invalid_argument(what)
    })?;
    XmlReader {
        document: &document,
        gpus: Vec::new(),
        defects: Vec::new(),
    }
    .machine()
}

struct XmlReader<'a> {
    document: &'a Document<'a>,
    /// GPUs so far: where their elements begin, addresses, numbers and ranks.
    gpus: Vec<(usize, BusId, u32, Option<u32>)>,
    defects: Vec<Defect>,
}

impl XmlReader<'_> {
    fn machine(mut self) -> Result<Machine> {
        let root = self.document.root_element();
        if root.tag_name().name() != "system" {
            let found = format!(
                "the root is <{}>, not <system>; give a file that NCCL_TOPO_DUMP_FILE names",
                root.tag_name().name()
            );
            return Err(self.refuse(root, found));
        }
        let version = match self.number::<u32>(root, "version")? {
            Some(1) => XmlVersion::Nccl,
            Some(2) => XmlVersion::Rccl,
            Some(other) => {
                let found = format!("version {other} is unknown; valid: 1 (NCCL), 2 (RCCL)");
                return Err(self.refuse(root, found));
            }
            None => {
                return Err(self.refuse(root, "<system> has no version; valid: 1 (NCCL), 2 (RCCL)"));
            }
        };
        let mut sockets = Vec::new();
        let mut hosts: Vec<&str> = Vec::new();
        for node in elements(root) {
            if node.tag_name().name() != "cpu" {
                continue;
            }
            let host = node.attribute("host_hash").unwrap_or("");
            if !hosts.contains(&host) {
                hosts.push(host);
            }
            if hosts.len() > 1 {
                let found = "the file has several hosts (host_hash differs); give each host a file of its own";
                return Err(self.refuse(node, found));
            }
            sockets.push(self.socket(node)?);
        }
        let machine = Machine {
            sockets,
            version,
            defects: Vec::new(),
        };
        self.repeated_bridges(&machine);
        self.check_gpus(root)?;
        Ok(Machine {
            defects: self.defects,
            ..machine
        })
    }

    fn refuse(&self, node: Node<'_, '_>, what: impl Into<String>) -> Error {
        self.refuse_at(node.range().start, what)
    }

    fn refuse_at(&self, begin: usize, what: impl Into<String>) -> Error {
        let row = self.document.text_pos_at(begin).row;
        Error::new(
            ErrorKind::InvalidArgument,
            format!("line {row}: {}", what.into()),
        )
    }

    /// Returns an attribute as a number; `None` if it is missing or empty.
    fn number<T: Whole>(&self, node: Node<'_, '_>, name: &str) -> Result<Option<T>> {
        let Some(text) = attribute(node, name) else {
            return Ok(None);
        };
        let number = text.parse().map_err(|_| {
            let range = format!("a whole number from {} to {}, in digits", T::LEAST, T::MOST);
            self.unusable(node, name, &range)
        })?;
        Ok(Some(number))
    }

    /// Returns an attribute as a hexadecimal number; `None` if it is missing or empty.
    fn hexadecimal<T: TryFrom<u64>>(&self, node: Node<'_, '_>, name: &str) -> Result<Option<T>> {
        let Some(text) = attribute(node, name) else {
            return Ok(None);
        };
        let digits = text.strip_prefix("0x").unwrap_or(text);
        let number = match digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            true => u64::from_str_radix(digits, 16).ok(),
            false => None,
        };
        number
            .and_then(|number| T::try_from(number).ok())
            .map(Some)
            .ok_or_else(|| {
                let most = 2 * std::mem::size_of::<T>();
                let range = format!("a hexadecimal number of at most {most} digits");
                self.unusable(node, name, &range)
            })
    }

    /// Refuses an attribute that is not `wanted`.
    fn unusable(&self, node: Node<'_, '_>, name: &str, wanted: &str) -> Error {
        let (tag, text) = (node.tag_name().name(), node.attribute(name).unwrap_or(""));
        let short: String = printable(text).chars().take(40).collect();
        self.refuse(
            node,
            format!("<{tag} {name}=\"{short}\"> is not {wanted}; correct it"),
        )
    }

    fn bus_id(&self, node: Node<'_, '_>, name: &str) -> Result<BusId> {
        const EXAMPLE: &str = "a PCI address such as 0000:c1:00.0";
        let tag = node.tag_name().name();
        match attribute(node, name) {
            None => Err(self.refuse(node, format!("<{tag}> has no {name}; add {EXAMPLE}"))),
            Some(text) => text
                .parse()
                .map_err(|()| self.unusable(node, name, EXAMPLE)),
        }
    }

    fn socket(&mut self, node: Node<'_, '_>) -> Result<CpuSocket> {
        let text = |name: &str| printable(node.attribute(name).unwrap_or("").trim());
        // Blanks belong to the name of one vendor.
        let vendor = printable(node.attribute("vendor").unwrap_or(""));
        let mut socket = CpuSocket {
            numa: self.number(node, "numaid")?.unwrap_or(-1),
            arch: text("arch"),
            vendor,
            family: self.number(node, "familyid")?,
            model: self.number(node, "modelid")?,
            affinity: text("affinity"),
            ..CpuSocket::default()
        };
        for child in elements(node) {
            match child.tag_name().name() {
                "pci" => socket.devices.push(self.device(child)?),
                "nic" => socket.nics.extend(self.nics(child)?),
                "gpu" => {
                    let found =
                        "<gpu> stands outside of any <pci>; put it into a <pci> with its busid";
                    return Err(self.refuse(child, found));
                }
                _ => {}
            }
        }
        Ok(socket)
    }

    /// Reads a device and all behind it. The limit of nesting bounds the recursion.
    fn device(&mut self, node: Node<'_, '_>) -> Result<PciDevice> {
        let mut device = PciDevice::new(self.bus_id(node, "busid")?);
        device.class = self.hexadecimal(node, "class")?;
        for (id, name) in
            device
                .ids
                .iter_mut()
                .zip(["vendor", "device", "subsystem_vendor", "subsystem_device"])
        {
            *id = self.hexadecimal(node, name)?.unwrap_or(0);
        }
        device.link = PciLink {
            speed: speed::generation(node.attribute("link_speed").unwrap_or("")),
            // Files, also those of `write`, have 0 where the width is unknown.
            width: self.number(node, "link_width")?.filter(|&width| width > 0),
        };
        if device.class.is_none() {
            self.defects.push(Defect::NoClass(device.bus_id));
        }
        for child in elements(node) {
            match child.tag_name().name() {
                "pci" => device.devices.push(self.device(child)?),
                "nic" => device.nics.extend(self.nics(child)?),
                "gpu" if device.gpu.is_some() => {
                    let found = "a second <gpu> in one <pci>; give each GPU a <pci> of its own";
                    return Err(self.refuse(child, found));
                }
                "gpu" => {
                    let gpu = self.gpu(child)?;
                    self.gpus
                        .push((child.range().start, device.bus_id, gpu.dev, gpu.rank));
                    device.gpu = Some(gpu);
                }
                _ => {}
            }
        }
        Ok(device)
    }

    fn gpu(&mut self, node: Node<'_, '_>) -> Result<Gpu> {
        let dev = self.number(node, "dev")?;
        let missing = "<gpu> has no dev, the number of the GPU; number the GPUs from 0";
        let dev = dev.ok_or_else(|| self.refuse(node, missing))?;
        let mut gpu = Gpu {
            dev,
            rank: self.number(node, "rank")?,
            sm: self.number(node, "sm")?,
            gcn: self.architecture(node)?,
            gdr: self.number::<u32>(node, "gdr")? == Some(1),
            mig: self.number::<u32>(node, "mig")? == Some(1),
            links: Vec::new(),
        };
        for child in elements(node) {
            let kind = match child.tag_name().name() {
                "nvlink" => GpuLinkKind::NvLink,
                "xgmi" => GpuLinkKind::Xgmi,
                "c2c" => GpuLinkKind::C2c,
                _ => continue,
            };
            let target = match kind {
                GpuLinkKind::C2c => None,
                _ => Some(self.bus_id(child, "target")?),
            };
            gpu.links.push(GpuLink {
                kind,
                target,
                target_class: self.hexadecimal(child, "tclass")?,
                count: self.number(child, "count")?.unwrap_or(1),
                bandwidth: None,
            });
        }
        Ok(gpu)
    }

    /// Reads `gcn`, which is decimal (`908`) or a name (`gfx90a`, whose last digit is hexadecimal).
    fn architecture(&self, node: Node<'_, '_>) -> Result<Option<u32>> {
        let Some(text) = attribute(node, "gcn") else {
            return Ok(None);
        };
        let digits = text
            .strip_prefix("gfx")
            .unwrap_or(text)
            .split(':')
            .next()
            .unwrap_or("");
        let digit = |sum: Option<u32>, c: char| sum?.checked_mul(10)?.checked_add(c.to_digit(16)?);
        let number = digits
            .chars()
            .fold(Some(0), digit)
            .filter(|_| !digits.is_empty());
        number
            .map(Some)
            .ok_or_else(|| self.unusable(node, "gcn", "an architecture such as 942 or gfx90a"))
    }

    fn nics(&mut self, node: Node<'_, '_>) -> Result<Vec<Nic>> {
        let mut nics = Vec::new();
        for child in elements(node) {
            if child.tag_name().name() != "net" {
                continue;
            }
            nics.push(Nic {
                name: printable(child.attribute("name").unwrap_or("")),
                dev: self.number(child, "dev")?.unwrap_or(0),
                speed: self.number(child, "speed")?,
                port: self.number(child, "port")?.unwrap_or(0),
                guid: self.hexadecimal(child, "guid")?.unwrap_or(0),
                gdr: self.number::<u32>(child, "gdr")? == Some(1),
            });
        }
        Ok(nics)
    }

    /// Records a defect for each address that several bridges have.
    fn repeated_bridges(&mut self, machine: &Machine) {
        let mut times: BTreeMap<BusId, usize> = BTreeMap::new();
        for device in machine.pci_devices() {
            if device.gpu.is_none() && !device.devices.is_empty() {
                *times.entry(device.bus_id).or_default() += 1;
            }
        }
        let repeated = times.into_iter().filter(|(_, times)| *times > 1);
        self.defects
            .extend(repeated.map(|(bus_id, times)| Defect::RepeatedBridge(bus_id, times)));
    }

    /// Refuses a file without GPUs, with a GPU in a place that is not read, or with equal GPUs.
    fn check_gpus(&self, root: Node<'_, '_>) -> Result<()> {
        let read: BTreeSet<usize> = self.gpus.iter().map(|gpu| gpu.0).collect();
        let is_gpu = |node: &Node<'_, '_>| node.tag_name().name() == "gpu";
        // Channels of graphs name the GPUs that stand elsewhere.
        let in_graphs =
            |node: &Node<'_, '_>| node.ancestors().any(|n| n.tag_name().name() == "graphs");
        let mut all = root.descendants().filter(is_gpu);
        if let Some(node) = all.find(|node| !read.contains(&node.range().start) && !in_graphs(node))
        {
            let found = "<gpu> stands in a place that is not read; put it into a <pci> below a <cpu> of <system>";
            return Err(self.refuse(node, found));
        }
        if self.gpus.is_empty() {
            let found = "the file has no <gpu>; put one into the <pci> of each GPU";
            return Err(self.refuse(root, found));
        }
        for (at, &(begin, bus_id, dev, rank)) in self.gpus.iter().enumerate() {
            for &(_, other_id, other_dev, other_rank) in &self.gpus[..at] {
                let what = if bus_id == other_id {
                    format!("two GPUs have the address {bus_id}; correct a busid, or remove one")
                } else if dev == other_dev {
                    format!(
                        "GPUs {other_id} and {bus_id} both have dev {dev}; number the GPUs from 0"
                    )
                } else if let Some(rank) = rank.filter(|_| rank == other_rank) {
                    format!(
                        "GPUs {other_id} and {bus_id} both have rank {rank}; give each a rank of its own, or none"
                    )
                } else {
                    continue;
                };
                return Err(self.refuse_at(begin, what));
            }
        }
        Ok(())
    }
}

/// A type of whole numbers, with its range.
trait Whole: FromStr + Display {
    const LEAST: Self;
    const MOST: Self;
}

impl Whole for u32 {
    const LEAST: u32 = u32::MIN;
    const MOST: u32 = u32::MAX;
}

impl Whole for i32 {
    const LEAST: i32 = i32::MIN;
    const MOST: i32 = i32::MAX;
}

/// Returns the elements inside `node`, without text and comments.
fn elements<'n, 'i>(node: Node<'n, 'i>) -> impl Iterator<Item = Node<'n, 'i>> {
    node.children().filter(Node::is_element)
}

/// Returns an attribute without spaces around it; `None` if it is missing or empty.
fn attribute<'n>(node: Node<'n, '_>, name: &str) -> Option<&'n str> {
    let text = node.attribute(name)?.trim();
    (!text.is_empty()).then_some(text)
}
