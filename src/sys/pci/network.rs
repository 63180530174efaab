//! Network devices, from `class/infiniband` and `class/net`.

use super::{MAX_DEVICES, PciTree};
use crate::error::Result;

/// Largest number of ports of an RDMA device.
const MAX_PORTS: usize = 256;

/// A port of an RDMA device, or a network interface of a device without RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkPort {
    /// Name of the device or the interface, such as `mlx5_0` or `eth0`.
    pub name: String,
    /// Index of the adapter's PCI function in the tree; `None` if the device is on another bus.
    pub function: Option<usize>,
    /// Number of the RDMA device's port, from 1; 0 for an interface.
    pub port: u32,
    /// Speed in Mbit/s; `None` if unknown.
    pub speed: Option<u32>,
    /// Identifier of the adapter, equal for all ports of the adapter; 0 if unknown.
    pub guid: u64,
}

impl PciTree<'_> {
    /// Returns the RDMA ports in the order of names and numbers, then the interfaces of other devices. Ports and
    /// interfaces that are down, and interfaces without a device, are left out.
    ///
    /// # Errors
    /// Unsupported if there are too many devices.
    pub fn network_ports(&mut self) -> Result<Vec<NetworkPort>> {
        let mut ports = Vec::new();
        for name in self.network_names("class/infiniband")? {
            self.rdma_ports(name, &mut ports)?;
        }
        let with_rdma: Vec<usize> = ports.iter().filter_map(|port| port.function).collect();
        for name in self.network_names("class/net")? {
            let interface = self.interface(name)?;
            // Network interfaces of an RDMA adapter are left out, because they are the same ports.
            let is_rdma =
                |port: &NetworkPort| port.function.is_some_and(|at| with_rdma.contains(&at));
            ports.extend(interface.filter(|port| !is_rdma(port)));
        }
        Ok(ports)
    }

    /// Returns all network interfaces that are up and have a device, also those of RDMA adapters, in the order of names.
    ///
    /// # Errors
    /// Unsupported if there are too many devices.
    pub fn interfaces(&mut self) -> Result<Vec<NetworkPort>> {
        let mut found = Vec::new();
        for name in self.network_names("class/net")? {
            found.extend(self.interface(name)?);
        }
        Ok(found)
    }

    /// Returns the names in `directory`, `mlx5_2` before `mlx5_10`.
    fn network_names(&self, directory: &str) -> Result<Vec<String>> {
        let mut names = self.list(directory, MAX_DEVICES)?.unwrap_or_default();
        names.retain(|name| name.bytes().all(|byte| byte.is_ascii_graphic()));
        names.sort_by_cached_key(|name| natural_order(name));
        Ok(names)
    }

    /// Returns the index of the function that contains the device of a class entry. `None` if the entry is
    /// virtual, `Some(None)` if its device is on another bus.
    fn function_of(&mut self, entry: &str) -> Result<Option<Option<usize>>> {
        let link = self.resolve(entry).map(|entry| format!("{entry}/device"));
        let Some(link) = link.filter(|link| self.files.link(link).is_some()) else {
            return Ok(None);
        };
        match self.resolve(&link) {
            Some(path) => Ok(Some(self.insert(&path)?)),
            None => Ok(None),
        }
    }

    fn rdma_ports(&mut self, name: String, ports: &mut Vec<NetworkPort>) -> Result<()> {
        let entry = format!("class/infiniband/{name}");
        let (Some(path), Some(function)) = (self.resolve(&entry), self.function_of(&entry)?) else {
            return Ok(());
        };
        // `sys_image_guid` comes first: it is equal for the ports of one adapter, even if the adapter has two
        // PCI functions.
        let guid = ["sys_image_guid", "node_guid"].iter().find_map(|file| {
            let text = self.text(&format!("{path}/{file}"))?;
            let digits: String = text.split(':').collect();
            u64::from_str_radix(&digits, 16)
                .ok()
                .filter(|guid| *guid != 0)
        });
        let numbers = self
            .list(&format!("{path}/ports"), MAX_PORTS)?
            .unwrap_or_default();
        let mut numbers: Vec<u32> = numbers
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect();
        numbers.sort_unstable();
        for port in numbers {
            let directory = format!("{path}/ports/{port}");
            let state = self.text(&format!("{directory}/state"));
            if state.is_some_and(|state| !state.contains("ACTIVE")) {
                continue;
            }
            let rate = self.text(&format!("{directory}/rate"));
            ports.push(NetworkPort {
                name: name.clone(),
                function,
                port,
                speed: rate.and_then(|rate| rate_in_mbit(&rate)),
                guid: guid.unwrap_or(0),
            });
        }
        Ok(())
    }

    fn interface(&mut self, name: String) -> Result<Option<NetworkPort>> {
        let entry = format!("class/net/{name}");
        let (Some(path), Some(function)) = (self.resolve(&entry), self.function_of(&entry)?) else {
            return Ok(None);
        };
        let state = self.text(&format!("{path}/operstate"));
        if state.is_some_and(|state| state != "up" && state != "unknown") {
            return Ok(None);
        }
        // Linux prints -1 for an unknown speed.
        let speed = self.text(&format!("{path}/speed"));
        let speed = speed
            .and_then(|text| text.parse().ok())
            .filter(|speed| *speed > 0);
        Ok(Some(NetworkPort {
            name,
            function,
            port: 0,
            speed,
            guid: 0,
        }))
    }
}

/// Returns Mbit/s of a rate such as `400 Gb/sec (4X NDR)` or `2.5 Gb/sec (1X SDR)`.
fn rate_in_mbit(text: &str) -> Option<u32> {
    let (number, unit) = text.split_once(' ')?;
    let (whole, tenth) = number.split_once('.').unwrap_or((number, "0"));
    let tenth = tenth.parse::<u32>().ok().filter(|tenth| *tenth < 10)?;
    let mbit = whole
        .parse::<u32>()
        .ok()?
        .checked_mul(1000)?
        .checked_add(100 * tenth)?;
    (unit.starts_with("Gb/sec") && mbit > 0).then_some(mbit)
}

/// Returns a key that sorts names by their text, and equal texts by the number at their end.
fn natural_order(name: &str) -> (String, u64, String) {
    let text = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let number = name[text.len()..].parse().unwrap_or(0);
    (text.into(), number, name.into())
}
