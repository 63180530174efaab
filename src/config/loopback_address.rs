//! TCP addresses that no other host can reach.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Name for the loopback addresses of both families.
const LOCALHOST: &str = "localhost";

/// Returns the addresses of `localhost:port`, `127.0.0.1:port` or `[::1]:port`. A host without IPv6 has the first
/// alone. Other names are refused: looking them up may take seconds, and their addresses may change.
///
/// # Errors
/// The reason why the text is none of these, as a phrase.
pub fn loopback_addresses(text: &str) -> Result<Vec<SocketAddr>, String> {
    let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
    let port = port.parse().ok().filter(|&port| port > 0);
    let port: u16 = port.ok_or("it needs a port from 1 to 65535 behind a colon")?;
    let at = |address: IpAddr| SocketAddr::new(address, port);
    if host.eq_ignore_ascii_case(LOCALHOST) {
        return Ok(vec![
            at(Ipv4Addr::LOCALHOST.into()),
            at(Ipv6Addr::LOCALHOST.into()),
        ]);
    }
    match text.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_loopback() => Ok(vec![address]),
        _ => Err(
            "clients are not authenticated, so it takes localhost or a loopback address only; forward the port \
             (ssh -L) to ask from another host"
                .into(),
        ),
    }
}

/// Returns the text without blanks around it, if it has loopback addresses.
pub(super) fn parse_loopback(text: &str) -> Result<String, String> {
    loopback_addresses(text.trim()).map(|_| text.trim().to_string())
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
            let expected: Vec<SocketAddr> =
                addresses.iter().map(|one| one.parse().unwrap()).collect();
            assert_eq!(loopback_addresses(text), Ok(expected));
            assert_eq!(parse_loopback(&format!(" {text} ")), Ok(text.to_string()));
        }
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
            assert!(parse_loopback(text).is_err(), "{text}");
        }
    }
}
