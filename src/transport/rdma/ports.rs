//! The ports of RDMA devices that carry data, and their addresses.

use super::port_shares::PortFacts;
use super::verbs::Device;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::ibverbs::*;
use crate::topology::NicDistance;
use std::ffi::c_uint;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

/// A kind of address, in order of preference. All ranks use the first kind that every rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum AddressKind {
    /// InfiniBand, by LID.
    Lid = 0,
    /// RoCE v2 over IPv4: routed as any UDP packet.
    RoceV2Ipv4 = 1,
    /// RoCE v2 over a routable IPv6 address.
    RoceV2Ipv6 = 2,
    /// RoCE v2 over a link-local address: one switch only.
    RoceV2Local = 3,
    /// RoCE v1: one switch only, and an Ethertype of its own.
    RoceV1 = 4,
}

/// Number of address kinds.
const KINDS: usize = 5;

impl AddressKind {
    /// Returns the most preferred kind of a set, in the format of [`PortFacts::kinds`].
    pub fn first(set: u8) -> Option<AddressKind> {
        use AddressKind::{Lid, RoceV1, RoceV2Ipv4, RoceV2Ipv6, RoceV2Local};
        let all = [Lid, RoceV2Ipv4, RoceV2Ipv6, RoceV2Local, RoceV1];
        all.into_iter().find(|kind| set & kind.bit() != 0)
    }

    /// Returns the names of the kinds in a set.
    pub fn names(mut set: u8) -> String {
        let mut names = Vec::new();
        while let Some(kind) = AddressKind::first(set) {
            names.push(kind.to_string());
            set &= !kind.bit();
        }
        names.join(", ")
    }

    pub fn bit(self) -> u8 {
        1 << self as u8
    }

    fn of(entry: &IbvGidEntry) -> AddressKind {
        let address = Ipv6Addr::from(entry.gid.raw);
        match entry.gid_type {
            IBV_GID_TYPE_IB => AddressKind::Lid,
            IBV_GID_TYPE_ROCE_V1 => AddressKind::RoceV1,
            _ if address.to_ipv4_mapped().is_some() => AddressKind::RoceV2Ipv4,
            _ if address.is_unicast_link_local() => AddressKind::RoceV2Local,
            _ => AddressKind::RoceV2Ipv6,
        }
    }
}

impl fmt::Display for AddressKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AddressKind::Lid => "InfiniBand",
            AddressKind::RoceV2Ipv4 => "RoCE v2 over IPv4",
            AddressKind::RoceV2Ipv6 => "RoCE v2 over IPv6",
            AddressKind::RoceV2Local => "RoCE v2 over link-local IPv6",
            AddressKind::RoceV1 => "RoCE v1",
        })
    }
}

/// A port that is up.
#[derive(Clone, Debug)]
pub(super) struct Port {
    pub device: Arc<Device>,
    pub number: u8,
    pub attributes: IbvPortAttr,
    /// Index in the GID table and address, by kind.
    pub addresses: [Option<(u8, IbvGid)>; KINDS],
}

impl fmt::Debug for IbvPortAttr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port in state {}", state_name(self.state))
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.device.name(), self.number)
    }
}

impl Port {
    /// Returns why the port cannot carry data now; `None` if it is active.
    pub fn trouble(&self) -> Option<String> {
        match self.device.port(self.number) {
            Ok(attributes) if attributes.state == IBV_PORT_ACTIVE => None,
            Ok(attributes) => Some(format!(
                "our port {self} is {}: see its cable, its switch and `ip link` or `ibstat`",
                state_name(attributes.state)
            )),
            Err(error) => Some(error.message().to_string()),
        }
    }

    fn kinds(&self) -> u8 {
        let bits = self.addresses.iter().enumerate();
        bits.fold(0, |set, (kind, address)| {
            set | u8::from(address.is_some()) << kind
        })
    }
}

/// The ports that the settings admit and that are up.
#[derive(Clone, Debug)]
pub(super) struct Ports(pub(super) Vec<Port>);

impl Ports {
    /// Finds the ports of all devices.
    ///
    /// # Errors
    /// Unsupported, with the reason, if no port can be used; invalid argument if a setting names a device or
    /// an address that does not exist.
    pub fn find(api: &Arc<dyn Api>, config: &Config) -> Result<Ports> {
        let wanted = Wanted::parse(config.ib_hca.as_deref());
        let (devices, names) = Device::open_all(api, |name| wanted.admits_device(name))?;
        if names.is_empty() {
            return Err(unsupported(format!(
                "{} lists no RDMA device",
                api.source()
            )));
        }
        if devices.is_empty() {
            return Err(Error::invalid_argument(format!(
                "CINCH_IB_HCA=\"{}\" admits none of the RDMA devices, which are {}",
                config.ib_hca.as_deref().unwrap_or_default(),
                names.join(", ")
            )));
        }
        let (mut ports, mut down, mut bare) = (Vec::new(), Vec::new(), Vec::new());
        for device in &devices {
            for number in 1..=device.attributes()?.phys_port_cnt {
                if !wanted.admits(device.name(), number) {
                    continue;
                }
                let attributes = device.port(number)?;
                let mut port = Port {
                    device: device.clone(),
                    number,
                    attributes,
                    addresses: [None; KINDS],
                };
                if attributes.state != IBV_PORT_ACTIVE {
                    down.push(format!("{port} is {}", state_name(attributes.state)));
                    continue;
                }
                port.addresses = addresses(&port, config.ib_gid.as_deref());
                if port.kinds() == 0 {
                    bare.push(port.to_string());
                } else {
                    ports.push(port);
                }
            }
        }
        if !ports.is_empty() {
            return Ok(Ports(ports));
        }
        if !bare.is_empty() {
            return Err(match &config.ib_gid {
                Some(gid) => Error::invalid_argument(format!(
                    "CINCH_IB_GID={gid}: no such entry in the address table of {}",
                    bare.join(", ")
                )),
                None => unsupported(format!(
                    "{} have no address: give their network interfaces one",
                    bare.join(", ")
                )),
            });
        }
        Err(unsupported(match down.is_empty() {
            true => "no port of the RDMA devices is admitted by CINCH_IB_HCA".into(),
            false => format!("no RDMA port is active: {}", down.join(", ")),
        }))
    }

    /// Returns the kinds of addresses of all ports, as a set of bits.
    #[cfg(test)]
    pub fn kinds(&self) -> u8 {
        self.0.iter().fold(0, |set, port| set | port.kinds())
    }

    /// Returns the ports that have an address of `kind`.
    pub fn with(&self, kind: AddressKind) -> Ports {
        let ports = self.0.iter();
        let has = |port: &&Port| port.kinds() & kind.bit() != 0;
        Ports(ports.filter(has).cloned().collect())
    }

    /// Returns what other ranks need to know of the ports. `distances` has the devices of this host.
    pub fn facts(&self, distances: &[NicDistance]) -> Vec<PortFacts> {
        let facts = self.0.iter().map(|port| {
            let name = port.device.name();
            let known = distances.iter().find(|nic| nic.name == name);
            PortFacts {
                device: name.into(),
                number: port.number,
                adapter: known.map_or(0, |nic| nic.adapter),
                kinds: port.kinds(),
                path: known.and_then(|nic| nic.path),
                mb_s: known.and_then(|nic| nic.mb_s).unwrap_or(0),
            }
        });
        facts.collect()
    }

    /// Returns the names of the ports.
    #[cfg(test)]
    pub fn names(&self) -> String {
        let names: Vec<String> = self.0.iter().map(Port::to_string).collect();
        names.join(", ")
    }
}

fn unsupported(text: String) -> Error {
    Error::new(ErrorKind::Unsupported, text)
}

/// Returns the first address of each kind that `CINCH_IB_GID` admits, by kind.
fn addresses(port: &Port, wanted: Option<&str>) -> [Option<(u8, IbvGid)>; KINDS] {
    let mut found = [None; KINDS];
    let infiniband = port.attributes.link_layer == IBV_LINK_LAYER_INFINIBAND;
    for index in 0..port.attributes.gid_tbl_len.clamp(0, 256) as u32 {
        let Some(entry) = port.device.gid(port.number, index) else {
            continue;
        };
        let admitted = match wanted {
            None => true,
            Some(text) => match text.parse::<u32>() {
                Ok(number) => number == index,
                Err(_) => named(text) == Some(entry.gid.raw),
            },
        };
        let kind = match infiniband {
            true => AddressKind::Lid,
            false => AddressKind::of(&entry),
        };
        if admitted && found[kind as usize].is_none() {
            found[kind as usize] = Some((index as u8, entry.gid));
        }
    }
    found
}

/// Parses an IP address into the bytes of a GID.
pub(super) fn named(text: &str) -> Option<[u8; 16]> {
    match text.parse().ok()? {
        IpAddr::V4(address) => Some(address.to_ipv6_mapped().octets()),
        IpAddr::V6(address) => Some(address.octets()),
    }
}

/// The devices that `CINCH_IB_HCA` names, such as `mlx5_0:1,mlx5_1`. A `^` in front excludes them, `=` matches
/// exact names instead of prefixes.
struct Wanted<'a> {
    excludes: bool,
    exact: bool,
    names: Vec<(&'a str, Option<u8>)>,
}

impl<'a> Wanted<'a> {
    fn parse(text: Option<&'a str>) -> Wanted<'a> {
        let text = text.unwrap_or_default();
        let (excludes, text) = match text.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (text.is_empty(), text),
        };
        let (exact, text) = match text.strip_prefix('=') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let names = text
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty());
        let part = |name: &'a str| match name.split_once(':') {
            Some((name, port)) => (name, port.parse().ok()),
            None => (name, None),
        };
        Wanted {
            excludes,
            exact,
            names: names.map(part).collect(),
        }
    }

    fn matches(&self, name: &str, port: Option<u8>) -> bool {
        self.names.iter().any(|(wanted, its_port)| {
            let same = match self.exact {
                true => name == *wanted,
                false => name.starts_with(wanted),
            };
            // An excluded port does not exclude the other ports of its device.
            same && match (its_port, port) {
                (Some(its), Some(port)) => *its == port,
                (Some(_), None) => !self.excludes,
                (None, _) => true,
            }
        })
    }

    fn admits_device(&self, name: &str) -> bool {
        self.matches(name, None) != self.excludes
    }

    fn admits(&self, name: &str, port: u8) -> bool {
        self.matches(name, Some(port)) != self.excludes
    }
}

pub(super) fn state_name(state: c_uint) -> &'static str {
    match state {
        IBV_PORT_DOWN => "down",
        IBV_PORT_INIT => "initialising (is a subnet manager running?)",
        IBV_PORT_ARMED => "armed, and not yet active",
        IBV_PORT_ACTIVE => "active",
        _ => "in an unknown state",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::ibverbs::fake::{Fabric, FakeDevice};

    fn find(devices: Vec<FakeDevice>, set: impl FnOnce(&mut Config)) -> Result<Ports> {
        let fabric = Fabric::new(devices);
        let mut config = Config::default();
        set(&mut config);
        let api: Arc<dyn Api> = fabric.clone();
        let found = Ports::find(&api, &config);
        if found.is_err() {
            assert_eq!(fabric.leftovers(), [""; 0]);
        }
        found
    }

    fn two() -> Vec<FakeDevice> {
        vec![FakeDevice::roce("b10", 2), FakeDevice::roce("b1", 1)]
    }

    #[test]
    fn address_is_selected_by_kind_number_or_name() {
        let ports = find(two(), |_| {}).unwrap();
        assert_eq!(ports.names(), "b1:1, b10:1");
        let kind = AddressKind::first(ports.kinds()).unwrap();
        assert_eq!(kind, AddressKind::RoceV2Ipv4);
        // Entry 3 of the table is the first with IPv4 and RoCE v2.
        assert_eq!(ports.0[0].addresses[kind as usize].unwrap().0, 3);
        assert_eq!(ports.kinds(), 0b11010);
        for (wanted, kind) in [
            ("1", AddressKind::RoceV2Local),
            ("2", AddressKind::RoceV1),
            ("fe80::2", AddressKind::RoceV2Local),
        ] {
            let ports = find(two(), |config| config.ib_gid = Some(wanted.into())).unwrap();
            assert_eq!(AddressKind::first(ports.kinds()), Some(kind), "{wanted}");
        }
        let ports = find(two(), |config| config.ib_gid = Some("10.0.0.2".into())).unwrap();
        assert_eq!(ports.names(), "b10:1");
        let infiniband = find(vec![FakeDevice::infiniband("i0", 7)], |_| {}).unwrap();
        assert_eq!(
            AddressKind::first(infiniband.kinds()),
            Some(AddressKind::Lid)
        );
        let error = find(two(), |config| config.ib_gid = Some("9".into())).unwrap_err();
        assert!(error.message().contains("CINCH_IB_GID=9"), "{error}");
        let mut v6 = FakeDevice::roce("r", 1);
        v6.gids[3].gid.raw = named("2001:db8::1").unwrap();
        v6.gids.swap(1, 3);
        let ports = find(vec![v6], |_| {}).unwrap();
        assert_eq!(
            AddressKind::first(ports.kinds()),
            Some(AddressKind::RoceV2Ipv6)
        );
    }

    #[test]
    fn device_filter_selects_like_nccl() {
        for (wanted, names) in [
            ("b1", "b1:1, b10:1"),
            ("=b1", "b1:1"),
            ("^=b1", "b10:1"),
            ("b10:1", "b10:1"),
            ("^b10:1", "b1:1"),
            ("^b10:2", "b1:1, b10:1"),
        ] {
            let ports = find(two(), |config| config.ib_hca = Some(wanted.into())).unwrap();
            assert_eq!(ports.names(), names, "{wanted}");
        }
        let error = find(two(), |config| config.ib_hca = Some("mlx5".into())).unwrap_err();
        assert!(error.message().contains("b1, b10"), "{error}");
        let error = find(two(), |config| config.ib_hca = Some("b1:2".into())).unwrap_err();
        assert!(error.message().contains("CINCH_IB_HCA"), "{error}");
    }

    #[test]
    fn missing_port_is_an_error_that_names_the_cause() {
        let error = find(vec![], |_| {}).unwrap_err();
        assert!(error.message().contains("lists no RDMA device"), "{error}");
        let mut down = FakeDevice::roce("b0", 1);
        down.port.state = IBV_PORT_DOWN;
        let error = find(vec![down.clone()], |_| {}).unwrap_err();
        assert!(error.message().contains("b0:1 is down"), "{error}");
        assert_eq!(
            find(vec![down, FakeDevice::roce("b1", 1)], |_| {})
                .unwrap()
                .names(),
            "b1:1"
        );
        let mut bare = FakeDevice::roce("b0", 1);
        bare.gids.clear();
        let error = find(vec![bare], |_| {}).unwrap_err();
        assert!(error.message().contains("have no address"), "{error}");
        let fabric = Fabric::new(two());
        fabric.fail("get_device_list", 0, 1, libc::ENOSYS);
        let api: Arc<dyn Api> = fabric;
        let error = Ports::find(&api, &Config::default()).unwrap_err();
        assert!(error.message().contains("ib_uverbs"), "{error}");
    }
}
