//! Rank and rendezvous of this process, from the environment variables of its launcher.
//!
//! | launcher | rank and size | rendezvous |
//! | --- | --- | --- |
//! | `cinch run` | `CINCH_LAUNCH_RANK`, `_SIZE` | `CINCH_LAUNCH_ID`, a whole unique id |
//! | torchrun | `RANK`, `WORLD_SIZE` | `MASTER_ADDR`, port `MASTER_PORT` + 1 |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | as torchrun's; one host: loopback, port from the job |
//! | Slurm | `SLURM_PROCID`, `SLURM_NTASKS` | as torchrun's; else first node of the step, port from the job |
//! | PMI (MPICH, Intel MPI) | `PMI_RANK`, `PMI_SIZE` | as torchrun's |
//!
//! `CINCH_COMM_ID=host:port` overrides every address. `MASTER_PORT` itself belongs to torch's store,
//! so cinch takes the next port. Slurm runs task 0 on the first node of the step;
//! `SLURM_LAUNCH_NODE_IPADDR` may be a login node and is the last resort.

use super::UniqueId;
use crate::config::Config;
use crate::error::{Error, Result};

/// Description of this process by its launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchInfo {
    /// Rank of this process.
    pub rank: usize,
    /// Number of ranks.
    pub nranks: usize,
    /// Rendezvous of all ranks.
    pub rendezvous: Rendezvous,
    /// Name of the launcher, for messages.
    pub launcher: &'static str,
}

/// Rendezvous of the ranks of a [`LaunchInfo`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendezvous {
    /// A complete unique id.
    Id(UniqueId),
    /// Host and port where rank 0 listens.
    Address(String, u16),
    /// The launcher names no rendezvous; the sentence states what is missing.
    Unknown(String),
}

impl LaunchInfo {
    /// Returns the id by which all ranks of this launch join.
    ///
    /// # Errors
    /// Invalid usage if the launcher names no rendezvous; else as for
    /// [`UniqueId::for_address`].
    pub fn unique_id(&self, config: &Config) -> Result<UniqueId> {
        match &self.rendezvous {
            Rendezvous::Id(id) => Ok(*id),
            Rendezvous::Address(host, port) => UniqueId::for_address(host, *port, config),
            // A single rank needs no rendezvous.
            Rendezvous::Unknown(_) if self.nranks == 1 => {
                UniqueId::for_address("127.0.0.1", FIRST_PORT, config)
            }
            Rendezvous::Unknown(missing) => Err(Error::invalid_usage(missing.clone())),
        }
    }
}

/// Smallest port that is derived from a job's number. Derived ports lie below the kernel's
/// ephemeral range.
const FIRST_PORT: u16 = 20_000;
const PORTS: u64 = 12_000;

/// Launchers, each with its variables of rank and number of ranks.
const LAUNCHERS: [(&str, &str, &str); 5] = [
    ("cinch run", "CINCH_LAUNCH_RANK", "CINCH_LAUNCH_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
    ("PMI", "PMI_RANK", "PMI_SIZE"),
];

/// Returns a launcher's variable that is set without its partner, and the partner.
pub fn half_set(lookup: impl Fn(&str) -> Option<String>) -> Option<(&'static str, &'static str)> {
    LAUNCHERS.into_iter().find_map(|(_, rank, size)| {
        match (lookup(rank).is_some(), lookup(size).is_some()) {
            (true, false) => Some((rank, size)),
            (false, true) => Some((size, rank)),
            _ => None,
        }
    })
}

/// Finds rank, size and rendezvous. `lookup` returns the value of a variable (see
/// [`crate::config::launcher_environment`]); [`Config::comm_id`] overrides its variable. Returns
/// `None` if no launcher's variables are set.
///
/// # Errors
/// Invalid argument, naming variable and value, if one is malformed or its partner is missing.
pub fn discover(
    config: &Config,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<Option<LaunchInfo>> {
    let lookup = |name: &str| match (&config.comm_id, name) {
        (Some(set), "CINCH_COMM_ID") => Some(set.clone()),
        _ => lookup(name),
    };
    for (launcher, rank_name, size_name) in LAUNCHERS {
        let (rank, nranks) = match (lookup(rank_name), lookup(size_name)) {
            (Some(rank), Some(size)) => (
                number(rank_name, &rank)?,
                number::<usize>(size_name, &size)?,
            ),
            (None, None) => continue,
            // RANK alone is a common name; SLURM_NTASKS alone means that srun did not start this.
            _ if launcher != "cinch run" => continue,
            _ => {
                return Err(Error::invalid_argument(format!(
                    "of {rank_name} and {size_name} only one is set"
                )));
            }
        };
        if rank >= nranks {
            return Err(Error::invalid_argument(format!(
                "{rank_name}={rank} is impossible with {size_name}={nranks}"
            )));
        }
        return Ok(Some(LaunchInfo {
            rank,
            nranks,
            rendezvous: rendezvous(launcher, nranks, &lookup)?,
            launcher,
        }));
    }
    Ok(None)
}

fn rendezvous(
    launcher: &str,
    nranks: usize,
    lookup: &impl Fn(&str) -> Option<String>,
) -> Result<Rendezvous> {
    if launcher == "cinch run" {
        return match lookup("CINCH_LAUNCH_ID") {
            Some(text) => UniqueId::from_hex(&text)
                .map(Rendezvous::Id)
                .map_err(|error| error.context("CINCH_LAUNCH_ID")),
            None => Err(Error::invalid_argument(
                "CINCH_LAUNCH_RANK is set and CINCH_LAUNCH_ID is not",
            )),
        };
    }
    if let Some(text) = lookup("CINCH_COMM_ID") {
        return host_and_port(&text);
    }
    match (lookup("MASTER_ADDR"), lookup("MASTER_PORT")) {
        (Some(host), Some(port)) => {
            let port: u16 = number("MASTER_PORT", &port)?;
            let next = port.checked_add(1).filter(|_| port > 0).ok_or_else(|| {
                Error::invalid_argument(format!(
                    "MASTER_PORT={port}: the rendezvous needs the port after it; set \
                     CINCH_COMM_ID=host:port"
                ))
            })?;
            return Ok(Rendezvous::Address(host.trim().to_string(), next));
        }
        (None, None) => {}
        (host, _) => {
            return Ok(Rendezvous::Unknown(format!(
                "MASTER_{} is set and MASTER_{} is not",
                if host.is_some() { "ADDR" } else { "PORT" },
                if host.is_some() { "PORT" } else { "ADDR" },
            )));
        }
    }
    let by_launcher = match launcher {
        "Slurm" => slurm(lookup)?,
        "Open MPI" => open_mpi(nranks, lookup),
        _ => None,
    };
    Ok(by_launcher.unwrap_or_else(|| {
        Rendezvous::Unknown(format!(
            "{launcher} names the rank of this process, one of {nranks}, but no rendezvous: set \
             CINCH_COMM_ID=host:port, or MASTER_ADDR and MASTER_PORT, to an address of rank 0's \
             host"
        ))
    }))
}

fn slurm(lookup: &impl Fn(&str) -> Option<String>) -> Result<Option<Rendezvous>> {
    let nodes = [
        "SLURM_STEP_NODELIST",
        "SLURM_NODELIST",
        "SLURM_JOB_NODELIST",
    ];
    let host = nodes
        .iter()
        .find_map(|name| lookup(name))
        .and_then(|list| first_node(&list))
        .or_else(|| lookup("SLURM_LAUNCH_NODE_IPADDR"));
    let (Some(host), Some(job)) = (host, lookup("SLURM_JOB_ID")) else {
        return Ok(None);
    };
    let job: u64 = number("SLURM_JOB_ID", &job)?;
    let step: u64 = lookup("SLURM_STEP_ID").map_or(Ok(0), |step| number("SLURM_STEP_ID", &step))?;
    let port = job.wrapping_mul(131).wrapping_add(step) % PORTS;
    Ok(Some(Rendezvous::Address(host, FIRST_PORT + port as u16)))
}

/// Derives a loopback port from the job's name, so that all ranks of one host derive the same port.
fn open_mpi(nranks: usize, lookup: &impl Fn(&str) -> Option<String>) -> Option<Rendezvous> {
    let local: usize = lookup("OMPI_COMM_WORLD_LOCAL_SIZE")?.trim().parse().ok()?;
    let job = lookup("PMIX_NAMESPACE")?;
    if local != nranks {
        return None;
    }
    // FNV-1a; any function that all ranks compute alike would do.
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let port = FIRST_PORT + (hash % PORTS) as u16;
    Some(Rendezvous::Address("127.0.0.1".into(), port))
}

/// Returns the first host of Slurm's list: `a`, `a,b`, `node[007-009,12],c`, `rack[1-2]n[3,4]`.
fn first_node(list: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = list.trim();
    while let Some(c) = rest.chars().next() {
        match c {
            ',' => break,
            '[' => {
                let end = rest.find(']')?;
                let first = rest[1..end].split([',', '-']).next()?;
                name.push_str(first);
                rest = &rest[end + 1..];
            }
            _ => {
                name.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
    }
    (!name.is_empty()).then_some(name)
}

fn host_and_port(text: &str) -> Result<Rendezvous> {
    let bad = || {
        let shown: String = text.chars().take(80).collect();
        Error::invalid_argument(format!(
            "CINCH_COMM_ID=\"{shown}\" is not host:port (an IPv6 address in brackets)"
        ))
    };
    let (host, port) = text.trim().rsplit_once(':').ok_or_else(bad)?;
    let host = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .or_else(|| (!host.contains([':', '[', ']'])).then_some(host))
        .filter(|host| !host.is_empty())
        .ok_or_else(bad)?;
    match port.parse() {
        Ok(port) if port > 0 => Ok(Rendezvous::Address(host.to_string(), port)),
        _ => Err(bad()),
    }
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T> {
    text.trim().parse().map_err(|_| {
        let shown: String = text.chars().take(80).collect();
        Error::invalid_argument(format!("{name}=\"{shown}\" is no number in range"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Result<Option<LaunchInfo>> {
        set(&Config::default(), pairs)
    }

    fn set(config: &Config, pairs: &[(&str, &str)]) -> Result<Option<LaunchInfo>> {
        discover(config, |name| {
            let found = pairs.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.to_string())
        })
    }

    fn found(pairs: &[(&str, &str)]) -> (usize, usize, Rendezvous) {
        let launch = of(pairs).unwrap().unwrap();
        (launch.rank, launch.nranks, launch.rendezvous)
    }

    fn at(host: &str, port: u16) -> Rendezvous {
        Rendezvous::Address(host.into(), port)
    }

    #[test]
    fn discover_without_variables_finds_no_launcher() {
        assert_eq!(of(&[]).unwrap(), None);
        assert_eq!(of(&[("SLURM_NTASKS", "4"), ("RANK", "1")]).unwrap(), None);
    }

    #[test]
    fn rendezvous_of_torchrun_is_beside_its_store() {
        let torch = [
            ("RANK", "2"),
            ("WORLD_SIZE", "8"),
            ("MASTER_ADDR", "node1"),
            ("MASTER_PORT", "29500"),
        ];
        assert_eq!(found(&torch), (2, 8, at("node1", 29501)));
        let other = [&torch[..], &[("CINCH_COMM_ID", "[::1]:7")]].concat();
        assert_eq!(found(&other), (2, 8, at("::1", 7)));
        // A program's setting overrides the variable.
        let config = Config {
            comm_id: Some("node3:9".into()),
            ..Config::default()
        };
        for pairs in [&torch[..2], &other] {
            let launch = set(&config, pairs).unwrap().unwrap();
            assert_eq!(launch.rendezvous, at("node3", 9));
        }
        let (.., unknown) = found(&torch[..3]);
        assert_eq!(
            unknown,
            Rendezvous::Unknown("MASTER_ADDR is set and MASTER_PORT is not".into())
        );
    }

    #[test]
    fn rendezvous_of_open_mpi_on_one_host_follows_from_the_jobs_name() {
        let job = |local: &str, name: &str| {
            found(&[
                ("OMPI_COMM_WORLD_RANK", "1"),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", local),
                ("PMIX_NAMESPACE", name),
            ])
            .2
        };
        let Rendezvous::Address(host, port) = job("4", "3342860289") else {
            panic!("no address")
        };
        assert_eq!(host, "127.0.0.1");
        assert!((20_000..32_000).contains(&port));
        assert_ne!(job("4", "3342860290"), at("127.0.0.1", port));
        assert!(
            matches!(job("2", "x"), Rendezvous::Unknown(text) if text.contains("CINCH_COMM_ID"))
        );
    }

    #[test]
    fn rendezvous_of_slurm_and_pmi() {
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_NODELIST", "gpu[007-009,12],cpu1"),
            ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"),
            ("SLURM_JOB_ID", "1000"),
        ];
        let port = 20_000 + (131_000u64 % 12_000) as u16;
        assert_eq!(found(&slurm), (3, 4, at("gpu007", port)));
        let launch_node = [&slurm[..2], &slurm[3..]].concat();
        assert_eq!(found(&launch_node).2, at("10.0.0.1", port));
        let pmi = [("PMI_RANK", "0"), ("PMI_SIZE", "2")];
        assert!(matches!(found(&pmi).2, Rendezvous::Unknown(_)));
        assert!(
            of(&pmi)
                .unwrap()
                .unwrap()
                .unique_id(&Config::default())
                .is_err()
        );
        let alone = of(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")])
            .unwrap()
            .unwrap();
        alone.unique_id(&Config::default()).unwrap();
    }

    #[test]
    fn first_node_of_lists() {
        for (list, first) in [
            ("a", "a"),
            ("a,b", "a"),
            ("n[1-4]", "n1"),
            ("rack[1-2]n[3,4]-ib", "rack1n3-ib"),
        ] {
            assert_eq!(first_node(list).as_deref(), Some(first));
        }
        assert_eq!(first_node(""), None);
        assert_eq!(first_node("n[1"), None);
    }

    #[test]
    fn cinch_run_comes_first_and_must_be_complete() {
        let config = Config::default();
        let id = UniqueId::for_address("127.0.0.1", 9, &config).unwrap();
        let hex = id.to_hex();
        let ours = [
            ("CINCH_LAUNCH_RANK", "1"),
            ("CINCH_LAUNCH_SIZE", "2"),
            ("CINCH_LAUNCH_ID", hex.as_str()),
            ("RANK", "7"),
            ("WORLD_SIZE", "8"),
        ];
        assert_eq!(found(&ours), (1, 2, Rendezvous::Id(id)));
        assert!(of(&ours[..2]).is_err());
        assert!(of(&ours[..1]).is_err());
    }

    #[test]
    fn malformed_value_is_named() {
        for (name, value) in [
            ("RANK", "-1"),
            ("RANK", "8"),
            ("RANK", "x"),
            ("WORLD_SIZE", ""),
            ("MASTER_PORT", "65536"),
            ("MASTER_PORT", "65535"),
            ("CINCH_COMM_ID", "host"),
            ("CINCH_COMM_ID", "host:0"),
            ("CINCH_COMM_ID", "::1:7"),
            ("CINCH_COMM_ID", ":7"),
        ] {
            let mut pairs = vec![(name, value)];
            pairs.extend([
                ("RANK", "2"),
                ("WORLD_SIZE", "8"),
                ("MASTER_ADDR", "a"),
                ("MASTER_PORT", "1"),
            ]);
            let error = of(&pairs).unwrap_err();
            assert!(error.message().contains(name), "{name}={value}: {error}");
        }
    }
}
