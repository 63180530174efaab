//! `MASTER_ADDR` and `MASTER_PORT`: address of torch's own store, for its start by `env://`. Communicators of cinch
//! do not use it, because ranks of `cinch run` join through `CINCH_LAUNCH_ID`.

use std::net::{Ipv4Addr, TcpListener};

/// The variables.
pub const NAMES: [&str; 2] = ["MASTER_ADDR", "MASTER_PORT"];

/// Smallest port that is chosen. Chosen ports lie below the kernel's ephemeral range, from which other programs'
/// connections take theirs.
const FIRST_PORT: u16 = 32_000 - PORTS;

/// Number of ports to choose from.
const PORTS: u16 = 12_000;

/// Number of ports that are tried on this host. If all are taken, the first is chosen, and torch's
/// error names it.
const TRIES: u16 = 64;

/// Returns the variables that `given` lacks. `host` is the name of the host of rank 0, by which the others reach it;
/// `None` if all ranks are on this host. `job` is a number of this job, from which the port follows.
pub fn variables(
    given: impl Fn(&str) -> Option<String>,
    host: Option<&str>,
    job: u64,
) -> Vec<(String, String)> {
    let address = || match host {
        // Files of hosts may have the user in front of the name.
        Some(host) => host.rsplit('@').next().unwrap_or(host).to_string(),
        None => Ipv4Addr::LOCALHOST.to_string(),
    };
    let port = || match host {
        // Ports of another host cannot be tried from here.
        Some(_) => port_of(job, 0).to_string(),
        None => free_port(job).to_string(),
    };
    let values: [&dyn Fn() -> String; 2] = [&address, &port];
    let all = NAMES.into_iter().zip(values);
    let missing = all.filter(|(name, _)| given(name).is_none());
    missing
        .map(|(name, value)| (name.to_string(), value()))
        .collect()
}

/// Returns the first port of the job on which this host has no listener.
fn free_port(job: u64) -> u16 {
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok();
    let mut ports = (0..TRIES).map(|step| port_of(job, step));
    ports.find(is_free).unwrap_or(port_of(job, 0))
}

fn port_of(job: u64, step: u16) -> u16 {
    FIRST_PORT + ((job % u64::from(PORTS)) as u16 + step) % PORTS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[(&'static str, &'static str)]) -> impl Fn(&str) -> Option<String> {
        move |name| {
            let found = names.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.to_string())
        }
    }

    fn pair(name: &str, value: &str) -> (String, String) {
        (name.into(), value.into())
    }

    #[test]
    fn values_of_the_user_are_kept() {
        let both = [("MASTER_ADDR", "h"), ("MASTER_PORT", "29500")];
        assert_eq!(variables(set(&both), None, 5), []);
        assert_eq!(
            variables(set(&both[1..]), None, 5),
            [pair("MASTER_ADDR", "127.0.0.1")]
        );
        assert_eq!(
            variables(set(&both[..1]), Some("b"), 5),
            [pair("MASTER_PORT", "20005")]
        );
    }

    #[test]
    fn several_hosts_meet_at_the_name_of_the_first() {
        assert_eq!(
            variables(set(&[]), Some("me@node1"), 12_001),
            [pair("MASTER_ADDR", "node1"), pair("MASTER_PORT", "20001")]
        );
    }

    #[test]
    fn taken_port_is_passed_over() {
        let held = (0..100).find_map(|job| {
            let port = port_of(job, 0);
            Some((job, port, TcpListener::bind(("127.0.0.1", port)).ok()?))
        });
        let (job, port, _listener) = held.unwrap();
        let chosen = free_port(job);
        assert!(chosen > port && chosen < port + TRIES, "{chosen} {port}");
    }
}
