//! Which of this machine's addresses to listen on. Never all of them.

use crate::config::Config;
use crate::error::{Error, Result};
use nix::net::if_::InterfaceFlags;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// One address of one interface.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    interface: String,
    ip: IpAddr,
    up: bool,
}

/// The address to listen on: of the interface that `CINCH_SOCKET_IFNAME` names (or the first
/// address that starts with its text), else of the first interface that is up and no loopback,
/// IPv4 before IPv6, else the loopback address.
///
/// # Errors
/// Invalid argument, with the names there are, if nothing is as the setting says.
pub fn choose(config: &Config) -> Result<IpAddr> {
    pick(config.interface.as_deref(), &candidates()?)
}

/// The address for a job that is known to stay on this host: nobody outside can reach it.
pub fn for_one_host() -> IpAddr {
    IpAddr::V4(Ipv4Addr::LOCALHOST)
}

fn pick(wanted: Option<&str>, candidates: &[Candidate]) -> Result<IpAddr> {
    let usable = || {
        // IPv4 first; a stable sort keeps the kernel's order of interfaces.
        let mut list: Vec<&Candidate> = candidates.iter().filter(|one| one.up).collect();
        list.sort_by_key(|one| one.ip.is_ipv6());
        list.into_iter()
    };
    match wanted {
        Some(text) => usable()
            .find(|one| one.interface == text)
            .or_else(|| usable().find(|one| one.ip.to_string().starts_with(text)))
            .map(|one| one.ip)
            .ok_or_else(|| {
                let known: Vec<String> = usable()
                    .map(|one| format!("{} ({})", one.interface, one.ip))
                    .collect();
                Error::invalid_argument(format!(
                    "CINCH_SOCKET_IFNAME=\"{text}\" is neither an interface that is up nor the \
                     start of an address; there are {}",
                    known.join(", ")
                ))
            }),
        None => Ok(usable()
            .find(|one| !one.ip.is_loopback())
            .map_or_else(for_one_host, |one| one.ip)),
    }
}

fn candidates() -> Result<Vec<Candidate>> {
    let interfaces = nix::ifaddrs::getifaddrs()
        .map_err(|cause| Error::system("the network interfaces cannot be listed", cause))?;
    Ok(interfaces
        .filter_map(|interface| {
            let address = interface.address?;
            let ip = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
                (Some(v4), _) => IpAddr::V4(v4.ip()),
                (_, Some(v6)) => IpAddr::V6(v6.ip()),
                _ => return None,
            };
            Some(Candidate {
                up: interface
                    .flags
                    .contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING)
                    && !needs_scope(&ip),
                interface: interface.interface_name,
                ip,
            })
        })
        .collect())
}

/// Link-local IPv6 addresses mean nothing without an interface, which differs from host to host.
fn needs_scope(ip: &IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if Ipv6Addr::is_unicast_link_local(v6))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(interface: &str, ip: &str, up: bool) -> Candidate {
        Candidate {
            interface: interface.into(),
            ip: ip.parse().unwrap(),
            up,
        }
    }

    #[test]
    fn choices() {
        let all = [
            candidate("lo", "127.0.0.1", true),
            candidate("eth9", "192.168.9.9", false),
            candidate("eth0", "2001:db8::1", true),
            candidate("eth0", "10.1.0.7", true),
            candidate("ib0", "10.2.0.7", true),
        ];
        let ip = |wanted| pick(wanted, &all).map(|ip| ip.to_string());
        assert_eq!(ip(None).unwrap(), "10.1.0.7");
        assert_eq!(ip(Some("ib0")).unwrap(), "10.2.0.7");
        assert_eq!(ip(Some("10.2.")).unwrap(), "10.2.0.7");
        assert_eq!(ip(Some("2001:")).unwrap(), "2001:db8::1");
        assert_eq!(ip(Some("lo")).unwrap(), "127.0.0.1");
        let error = ip(Some("eth9")).unwrap_err();
        assert!(error.message().contains("ib0 (10.2.0.7)"), "{error}");
        assert_eq!(pick(None, &all[..2]).unwrap(), for_one_host());
    }

    #[test]
    fn the_real_machine_has_an_address() {
        let mut config = Config::default();
        choose(&config).unwrap();
        config.interface = Some("lo".into());
        assert!(choose(&config).unwrap().is_loopback());
    }
}
