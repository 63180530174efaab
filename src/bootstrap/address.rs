//! Chooses the address of this machine to listen on; a socket never listens on all addresses.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::sys::process::block_signals;
use nix::net::if_::InterfaceFlags;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Duration;

/// An address of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
struct InterfaceAddress {
    interface: String,
    ip: IpAddr,
    /// Number of leading bits that all addresses of the network have in common; 0 if unknown.
    prefix: u8,
    up: bool,
}

/// An address of this host, with its network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAddress {
    /// Name of the interface.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// Number of leading bits that all addresses of the network have in common.
    pub prefix: u8,
}

/// Returns the addresses among which ranks may choose the nearest interface: those of interfaces that are up, except
/// loopback and link-local addresses. Returns none if `CINCH_SOCKET_IFNAME` is set, which is the choice.
///
/// # Errors
/// System if the interfaces cannot be listed.
pub fn alternatives(config: &Config) -> Result<Vec<HostAddress>> {
    if config.interface.is_some() {
        return Ok(Vec::new());
    }
    Ok(of_networks(candidates()?, config.ipv6))
}

fn of_networks(candidates: Vec<InterfaceAddress>, ipv6: Option<bool>) -> Vec<HostAddress> {
    let is_usable = |one: &InterfaceAddress| {
        let is_link_local = matches!(one.ip, IpAddr::V4(v4) if v4.is_link_local());
        one.up
            && one.prefix > 0
            && !one.ip.is_loopback()
            && !is_link_local
            && ipv6.is_none_or(|ipv6| one.ip.is_ipv6() == ipv6)
    };
    let usable = candidates.into_iter().filter(is_usable);
    usable
        .map(|one| HostAddress {
            interface: one.interface,
            ip: one.ip,
            prefix: one.prefix,
        })
        .collect()
}

/// Chooses the address to listen on, among the interfaces that `CINCH_SOCKET_IFNAME` admits. If
/// that is unset, takes the first interface that is up and not loopback, else the loopback address.
/// IPv4 comes before IPv6 unless `CINCH_SOCKET_FAMILY` is set.
///
/// # Errors
/// Invalid argument, with the existing names, if no interface matches the settings.
pub fn choose(config: &Config) -> Result<IpAddr> {
    pick(config.interface.as_deref(), config.ipv6, &candidates()?)
}

/// Returns the address for a job on this host alone, which other hosts cannot reach.
pub fn for_one_host() -> IpAddr {
    IpAddr::V4(Ipv4Addr::LOCALHOST)
}

/// Looks up the addresses of a host. A name server that does not answer would delay the caller for longer than
/// `timeout`; the thread that waits for it ends when the resolver gives up.
///
/// # Errors
/// The resolver's errors; timed out; the system's error if the thread cannot start.
pub fn look_up(host: &str, port: u16, timeout: Duration) -> std::io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let (sender, found) = mpsc::channel();
    let name = host.to_string();
    std::thread::Builder::new()
        .name("cinch-resolver".into())
        .spawn(move || {
            block_signals();
            let found = (name.as_str(), port).to_socket_addrs();
            // The caller may have stopped waiting.
            let _ = sender.send(found.map(Iterator::collect));
        })?;
    found
        .recv_timeout(timeout)
        .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}

fn pick(
    wanted: Option<&str>,
    ipv6: Option<bool>,
    candidates: &[InterfaceAddress],
) -> Result<IpAddr> {
    // Puts IPv4 first; the stable sort keeps the kernel's order of interfaces.
    let mut usable: Vec<&InterfaceAddress> = candidates
        .iter()
        .filter(|one| one.up && ipv6.is_none_or(|ipv6| one.ip.is_ipv6() == ipv6))
        .collect();
    usable.sort_by_key(|one| one.ip.is_ipv6());
    let outside = |one: &&&InterfaceAddress| !one.ip.is_loopback();
    let found = match wanted {
        None => match usable.iter().find(outside) {
            Some(one) => Some(one.ip),
            None if ipv6 == Some(true) => usable.first().map(|one| one.ip),
            None => Some(for_one_host()),
        },
        Some(text) => match text.strip_prefix('^') {
            None => admitted(text, &usable),
            Some(text) => {
                let others = usable.iter().filter(|one| !named(text, one));
                let others: Vec<&InterfaceAddress> = others.copied().collect();
                let first = others.iter().find(outside).or(others.first());
                first.map(|one| one.ip)
            }
        },
    };
    found.ok_or_else(|| {
        let known: Vec<String> = usable
            .iter()
            .map(|one| format!("{} ({})", one.interface, one.ip))
            .collect();
        let family = match ipv6 {
            None => "",
            Some(false) => ", CINCH_SOCKET_FAMILY=ipv4",
            Some(true) => ", CINCH_SOCKET_FAMILY=ipv6",
        };
        Error::invalid_argument(format!(
            "CINCH_SOCKET_IFNAME=\"{}\"{family}: no interface that is up, and no address, has \
             this name or begins with it; there are {}",
            wanted.unwrap_or_default(),
            known.join(", ")
        ))
    })
}

/// Returns the usable address for the first entry of `list` that matches an interface name or an
/// address. An entry after `=` must be a whole name; other entries may be beginnings. Whole names
/// come first, so that `eth1` does not match `eth10`.
fn admitted(list: &str, usable: &[&InterfaceAddress]) -> Option<IpAddr> {
    list.split(',').map(str::trim).find_map(|text| {
        let exact = text.strip_prefix('=');
        let name = exact.unwrap_or(text);
        let whole = usable.iter().find(|one| one.interface == name);
        let begins = || {
            let name = usable.iter().find(|one| one.interface.starts_with(text));
            name.or_else(|| {
                usable
                    .iter()
                    .find(|one| one.ip.to_string().starts_with(text))
            })
        };
        let found = match exact {
            Some(_) => whole,
            None if text.is_empty() => None,
            None => whole.or_else(begins),
        };
        found.map(|one| one.ip)
    })
}

/// Returns whether a list names an interface: by its whole name after `=`, else by its beginning.
fn named(list: &str, one: &InterfaceAddress) -> bool {
    // In NCCL's form `^=a,b` the first `=` applies to all names.
    let (list, exact) = match list.strip_prefix('=') {
        Some(list) => (list, true),
        None => (list, false),
    };
    list.split(',').map(str::trim).any(|name| match exact {
        true => one.interface == name,
        false => !name.is_empty() && one.interface.starts_with(name),
    })
}

fn candidates() -> Result<Vec<InterfaceAddress>> {
    let interfaces = nix::ifaddrs::getifaddrs()
        .map_err(|cause| Error::system("the network interfaces cannot be listed", cause))?;
    Ok(interfaces
        .filter_map(|interface| {
            let address = interface.address?;
            let mask = interface.netmask;
            let prefix = mask.map_or(0, |mask| {
                match (mask.as_sockaddr_in(), mask.as_sockaddr_in6()) {
                    (Some(v4), _) => v4.ip().to_bits().leading_ones(),
                    (_, Some(v6)) => v6.ip().to_bits().leading_ones(),
                    _ => 0,
                }
            });
            let ip = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
                (Some(v4), _) => IpAddr::V4(v4.ip()),
                (_, Some(v6)) => IpAddr::V6(v6.ip()),
                _ => return None,
            };
            Some(InterfaceAddress {
                up: interface
                    .flags
                    .contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING)
                    && !needs_scope(&ip),
                interface: interface.interface_name,
                ip,
                prefix: prefix as u8,
            })
        })
        .collect())
}

/// Returns whether an address is link-local IPv6. Such an address is valid only with the number of
/// an interface, which differs from host to host.
fn needs_scope(ip: &IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if Ipv6Addr::is_unicast_link_local(v6))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(interface: &str, ip: &str, up: bool) -> InterfaceAddress {
        InterfaceAddress {
            interface: interface.into(),
            ip: ip.parse().unwrap(),
            prefix: 24,
            up,
        }
    }

    #[test]
    fn host_is_looked_up_within_the_timeout() {
        let none = Duration::ZERO;
        assert_eq!(look_up("10.1.2.3", 5, none).unwrap()[0].port(), 5);
        assert!(look_up("::1", 5, none).unwrap()[0].is_ipv6());
        let found = look_up("localhost", 7, Duration::from_secs(20)).unwrap();
        assert!(
            found
                .iter()
                .all(|address| address.ip().is_loopback() && address.port() == 7)
        );
    }

    #[test]
    fn addresses_of_networks_are_alternatives() {
        let all = vec![
            candidate("lo", "127.0.0.1", true),
            candidate("eth9", "192.168.9.9", false),
            candidate("usb0", "169.254.3.1", true),
            candidate("eth0", "2001:db8::1", true),
            candidate("eth0", "10.1.0.7", true),
            InterfaceAddress {
                prefix: 0,
                ..candidate("tun0", "10.9.0.7", true)
            },
        ];
        let ips = |ipv6| {
            let found = of_networks(all.clone(), ipv6).into_iter();
            found.map(|one| one.ip.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(ips(None), ["2001:db8::1", "10.1.0.7"]);
        assert_eq!(ips(Some(false)), ["10.1.0.7"]);
        let config = Config {
            interface: Some("eth".into()),
            ..Config::default()
        };
        assert!(alternatives(&config).unwrap().is_empty());
    }

    #[test]
    fn settings_choose_interface_and_family() {
        let all = [
            candidate("lo", "127.0.0.1", true),
            candidate("eth9", "192.168.9.9", false),
            candidate("eth0", "2001:db8::1", true),
            candidate("eth0", "10.1.0.7", true),
            candidate("ib0", "10.2.0.7", true),
        ];
        let ip = |wanted| pick(wanted, None, &all).map(|ip| ip.to_string());
        assert_eq!(ip(None).unwrap(), "10.1.0.7");
        assert_eq!(ip(Some("ib0")).unwrap(), "10.2.0.7");
        assert_eq!(ip(Some("10.2.")).unwrap(), "10.2.0.7");
        assert_eq!(ip(Some("2001:")).unwrap(), "2001:db8::1");
        assert_eq!(ip(Some("lo")).unwrap(), "127.0.0.1");
        let error = ip(Some("eth9")).unwrap_err();
        assert!(error.message().contains("ib0 (10.2.0.7)"), "{error}");
        assert_eq!(pick(None, None, &all[..2]).unwrap(), for_one_host());
        assert_eq!(ip(Some("eth1,eth")).unwrap(), "10.1.0.7");
        assert_eq!(ip(Some("=ib0")).unwrap(), "10.2.0.7");
        assert_eq!(ip(Some("=ib,eth0")).unwrap(), "10.1.0.7");
        assert_eq!(ip(Some("^eth,lo")).unwrap(), "10.2.0.7");
        assert_eq!(ip(Some("^=eth,lo")).unwrap(), "10.1.0.7");
        assert!(ip(Some("=ib")).is_err() && ip(Some("^eth,lo,ib")).is_err());
        let of = |ipv6| pick(None, Some(ipv6), &all).unwrap().to_string();
        assert_eq!(
            (of(false), of(true)),
            ("10.1.0.7".into(), "2001:db8::1".into())
        );
        assert!(pick(Some("ib0"), Some(true), &all).is_err());
    }

    #[test]
    fn this_machine_has_an_address() {
        let mut config = Config::default();
        choose(&config).unwrap();
        config.interface = Some("lo".into());
        assert!(choose(&config).unwrap().is_loopback());
    }
}
