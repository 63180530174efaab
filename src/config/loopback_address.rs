//! A TCP address that no other host can reach.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Name for the loopback addresses of both families.
const LOCALHOST: &str = "localhost";

/// A TCP port of this host's loopback interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopbackAddress {
    /// Address; `None` for `localhost`.
    address: Option<IpAddr>,
    port: u16,
}

impl Default for LoopbackAddress {
    /// Returns `localhost` with the port of NCCL's RAS subsystem.
    fn default() -> LoopbackAddress {
        LoopbackAddress {
            address: None,
            port: 28028,
        }
    }
}

impl LoopbackAddress {
    /// Reads `localhost:port`, `127.0.0.1:port` or `[::1]:port`. Other names are refused: looking them up may take
    /// seconds, and their addresses may change.
    pub(super) fn parse(text: &str) -> Result<LoopbackAddress, String> {
        let text = text.trim();
        let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
        let port = port.parse().ok().filter(|&port| port > 0);
        let port: u16 = port.ok_or("it needs a port from 1 to 65535 behind a colon")?;
        if host.eq_ignore_ascii_case(LOCALHOST) {
            return Ok(LoopbackAddress {
                address: None,
                port,
            });
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().is_loopback() => Ok(LoopbackAddress {
                address: Some(address.ip()),
                port,
            }),
            _ => Err(
                "clients are not authenticated, so it takes localhost or a loopback address only; forward the port \
                 (ssh -L) to ask from another host"
                    .into(),
            ),
        }
    }

    /// Returns the addresses to listen at. A host without IPv6 has the first alone.
    pub fn socket_addresses(&self) -> Vec<SocketAddr> {
        let at = |address| SocketAddr::new(address, self.port);
        match self.address {
            Some(address) => vec![at(address)],
            None => vec![
                at(Ipv4Addr::LOCALHOST.into()),
                at(Ipv6Addr::LOCALHOST.into()),
            ],
        }
    }
}

impl fmt::Display for LoopbackAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => SocketAddr::new(address, self.port).fmt(f),
            None => write!(f, "{LOCALHOST}:{}", self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_addresses_are_read_and_all_others_refused() {
        for (text, addresses) in [
            ("localhost:28028", &["127.0.0.1:28028", "[::1]:28028"][..]),
            ("127.0.0.9:1", &["127.0.0.9:1"]),
            ("[::1]:65535", &["[::1]:65535"]),
        ] {
            let address = LoopbackAddress::parse(text).unwrap();
            assert_eq!(address.to_string(), text);
            let expected: Vec<SocketAddr> =
                addresses.iter().map(|one| one.parse().unwrap()).collect();
            assert_eq!(address.socket_addresses(), expected);
        }
        assert_eq!(
            LoopbackAddress::parse("localhost:28028"),
            Ok(LoopbackAddress::default())
        );
        for text in [
            "",
            "localhost",
            "localhost:",
            "localhost:0",
            "localhost:65536",
            "0.0.0.0:28028",
            "[::]:28028",
            "10.0.0.1:28028",
            "node7:28028",
            ":28028",
            "::1:28028",
        ] {
            assert!(LoopbackAddress::parse(text).is_err(), "{text}");
        }
    }
}
