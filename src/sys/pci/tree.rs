//! The tree of PCI functions.

use super::files::Resolver;
use super::{BusId, MAX_DEVICES, PciFiles};
use crate::error::{Error, ErrorKind, Result};
use std::cell::RefCell;
use std::collections::HashMap;

/// A function of a PCI device, which has an address of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciFunction {
    /// PCI address of the function.
    pub bus_id: BusId,
    /// Index of the bridge right above, which is lower than the index of this function; `None` on a root bus.
    pub parent: Option<usize>,
    /// Class code of 24 bits; `None` if unknown.
    pub class: Option<u32>,
    path: String,
}

/// Attributes of a function. An attribute that cannot be read is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciAttributes {
    /// Vendor and device, then subsystem vendor and device; zeros if unknown.
    pub ids: [u16; 4],
    /// The fastest link of which the function is capable.
    pub max_link: PciLinkText,
    /// The link as it is trained now, which may be slow to save power.
    pub current_link: PciLinkText,
    /// NUMA node; -1 if the system does not know it, `None` if there is no file.
    pub numa: Option<i32>,
}

/// Speed and width of a link as Linux prints them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciLinkText {
    /// Speed, such as `16.0 GT/s PCIe` or `Unknown`. Empty without a file.
    pub speed: String,
    /// Width, such as 16; 0 and 255 mean that it is unknown. `None` without a file.
    pub width: Option<u32>,
}

/// The PCI functions of a directory that looks like /sys.
pub struct PciTree<'a> {
    pub(super) files: &'a dyn PciFiles,
    pub(super) resolver: RefCell<Resolver<'a>>,
    functions: Vec<PciFunction>,
    by_bus_id: HashMap<BusId, usize>,
    has_bus: bool,
}

impl<'a> PciTree<'a> {
    /// Reads the functions below `bus/pci/devices`, and the bridges above them. The tree is empty if there is no
    /// such directory.
    ///
    /// # Errors
    /// Unsupported if there are more than [`MAX_DEVICES`] functions.
    pub fn read(files: &'a dyn PciFiles) -> Result<PciTree<'a>> {
        let mut tree = PciTree {
            files,
            resolver: RefCell::new(Resolver::new(files)),
            functions: Vec::new(),
            by_bus_id: HashMap::new(),
            has_bus: false,
        };
        let listed = tree.list("bus/pci/devices", MAX_DEVICES)?;
        tree.has_bus = listed.is_some();
        let mut names: Vec<(BusId, String)> = listed
            .unwrap_or_default()
            .into_iter()
            .filter_map(|name| Some((address(&name)?, name)))
            .collect();
        names.sort();
        for (bus_id, name) in names {
            let path = tree.resolve(&format!("bus/pci/devices/{name}"));
            if let Some(path) =
                path.filter(|path| path.rsplit('/').next().and_then(address) == Some(bus_id))
            {
                tree.insert(&path)?;
            }
        }
        Ok(tree)
    }

    /// Returns whether the system lists PCI functions at all.
    pub fn has_bus(&self) -> bool {
        self.has_bus
    }

    /// Returns all functions, bridges before what is behind them.
    pub fn functions(&self) -> &[PciFunction] {
        &self.functions
    }

    /// Returns the index of a function; `None` if the tree lacks it.
    pub fn find(&self, bus_id: BusId) -> Option<usize> {
        self.by_bus_id.get(&bus_id).copied()
    }

    /// Returns the bridges above a function, nearest first.
    pub fn bridges_above(&self, function: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(self.functions[function].parent, |&above| {
            self.functions[above].parent
        })
    }

    /// Reads the vendor of a function; 0 if unknown.
    pub fn vendor(&self, function: usize) -> u16 {
        self.id(function, "vendor")
    }

    fn id(&self, function: usize, name: &str) -> u16 {
        let text = self.text(&format!("{}/{name}", self.functions[function].path));
        let id = text.and_then(|text| hexadecimal(&text));
        id.and_then(|id| u16::try_from(id).ok()).unwrap_or(0)
    }

    /// Reads the attributes of a function.
    pub fn attributes(&self, function: usize) -> PciAttributes {
        let path = &self.functions[function].path;
        let text = |name: &str| self.text(&format!("{path}/{name}"));
        let number = |name: &str| text(name)?.parse().ok();
        PciAttributes {
            ids: ["vendor", "device", "subsystem_vendor", "subsystem_device"]
                .map(|name| self.id(function, name)),
            max_link: PciLinkText {
                speed: text("max_link_speed").unwrap_or_default(),
                width: number("max_link_width"),
            },
            current_link: PciLinkText {
                speed: text("current_link_speed").unwrap_or_default(),
                width: number("current_link_width"),
            },
            numa: text("numa_node").and_then(|text| text.parse().ok()),
        }
    }

    /// Returns the processors of a NUMA node as a hexadecimal mask with commas; empty if unknown.
    pub fn cpumap(&self, numa: i32) -> String {
        let path = self.resolve(&format!("devices/system/node/node{numa}/cpumap"));
        let map = path.and_then(|path| self.text(&path)).unwrap_or_default();
        let is_map = map
            .bytes()
            .all(|byte| byte.is_ascii_hexdigit() || byte == b',');
        if is_map { map } else { String::new() }
    }

    /// Returns whether `path` is a regular file that can be read.
    pub fn exists(&self, path: &str) -> bool {
        let path = self.resolve(path);
        path.is_some_and(|path| self.files.content(&path).is_some())
    }

    pub(super) fn resolve(&self, path: &str) -> Option<String> {
        self.resolver.borrow_mut().resolve(path)
    }

    /// Returns the names in a directory in order; `None` if there is no such directory.
    ///
    /// # Errors
    /// Unsupported if there are more than `most`.
    pub(super) fn list(&self, directory: &str, most: usize) -> Result<Option<Vec<String>>> {
        let listed = self
            .resolve(directory)
            .and_then(|path| self.files.names(&path, most + 1));
        let Some(mut names) = listed else {
            return Ok(None);
        };
        if names.len() > most {
            return Err(too_many(directory, most));
        }
        names.sort();
        Ok(Some(names))
    }

    /// Returns the text of a file without the white space around it; `None` if it cannot be read or has other
    /// than printable ASCII characters.
    pub(super) fn text(&self, file: &str) -> Option<String> {
        let text = String::from_utf8(self.files.content(file)?).ok()?;
        let text = text.trim_ascii();
        let is_text = text
            .bytes()
            .all(|byte| matches!(byte, b' '..=b'~' | b'\n' | b'\t'));
        is_text.then(|| text.into())
    }

    /// Adds the function whose directory is `path`, and the bridges above it. Returns its index, `None` if `path`
    /// is inside no function.
    pub(super) fn insert(&mut self, path: &str) -> Result<Option<usize>> {
        let mut last = None;
        let mut end = 0;
        for name in path.split('/') {
            end += name.len() + usize::from(end > 0);
            if is_root_bus(name) {
                // A function above a further root bus, such as Intel's VMD, is not a bridge above the devices
                // on that bus.
                last = None;
            } else if let Some(bus_id) = address(name) {
                last = Some(self.function(bus_id, &path[..end], last)?);
            }
        }
        Ok(last)
    }

    fn function(&mut self, bus_id: BusId, path: &str, parent: Option<usize>) -> Result<usize> {
        if let Some(&known) = self.by_bus_id.get(&bus_id) {
            return Ok(known);
        }
        if self.functions.len() >= MAX_DEVICES {
            return Err(too_many("bus/pci/devices", MAX_DEVICES));
        }
        let class = self.text(&format!("{path}/class"));
        self.functions.push(PciFunction {
            bus_id,
            parent,
            class: class.and_then(|text| hexadecimal(&text)),
            path: path.into(),
        });
        self.by_bus_id.insert(bus_id, self.functions.len() - 1);
        Ok(self.functions.len() - 1)
    }
}

fn too_many(directory: &str, most: usize) -> Error {
    let text = format!(
        "{directory} has more than {most} entries; a machine of this size is not supported"
    );
    Error::new(ErrorKind::Unsupported, text)
}

/// Returns the address that is the name of a function's directory, such as `0000:c1:00.0`.
fn address(name: &str) -> Option<BusId> {
    let bus_id: BusId = name.parse().ok()?;
    (bus_id.to_string() == name).then_some(bus_id)
}

/// Returns whether `name` is the directory of a root bus, such as `pci0000:00`.
fn is_root_bus(name: &str) -> bool {
    let number = name
        .strip_prefix("pci")
        .and_then(|name| name.split_once(':'));
    let is_hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    number.is_some_and(|(domain, bus)| is_hex(domain) && is_hex(bus))
}

/// Reads a number of at most eight hexadecimal digits, with or without `0x`.
pub(super) fn hexadecimal(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let is_hex = (1..=8).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
    is_hex
        .then(|| u32::from_str_radix(digits, 16).ok())
        .flatten()
}
