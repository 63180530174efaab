//! `cinch doctor`: checks a machine, or the environment of a job, and advises on each problem.
//!
//! Each file of this folder checks one part. All files of the system are read below a root directory, so that tests,
//! and users with a copy of another machine's files, check that instead.

mod check_result;
mod clock;
mod environment;
mod gpu;
mod hosts;
mod library;
mod limits;
mod network;

use crate::{ExitResult, WRONG, finish};
use check_result::{CheckResult, Severity};
use cinch::bootstrap::alternatives;
use cinch::{Communicator, Config, UniqueId};
use network::ChosenAddress;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Options of `cinch doctor`.
#[derive(clap::Args)]
pub struct DoctorOptions {
    /// Check the environment and limits of this running process instead of those of the shell
    #[arg(long, value_name = "PID", conflicts_with = "hosts")]
    pid: Option<u32>,
    /// Check the hosts in this file over ssh, and what differs between them; lines of `HOST [slots=N]`
    #[arg(long, value_name = "FILE")]
    hosts: Option<PathBuf>,
    /// Program that runs a command on a host, as for `cinch run`
    #[arg(
        long,
        value_name = "PROGRAM",
        default_value = "ssh",
        requires = "hosts"
    )]
    ssh: OsString,
    /// Path of cinch on the other hosts [default: the path on this host]
    #[arg(long, value_name = "PATH", requires = "hosts")]
    remote_cinch: Option<String>,
    /// Directory with the files of a machine (sys, proc, dev, etc) instead of this machine's
    #[arg(long, value_name = "DIR", conflicts_with = "hosts")]
    root: Option<PathBuf>,
    /// Print one JSON object, with the numbers of each result
    #[arg(long)]
    json: bool,
    /// Run as the agent that --hosts starts on each host
    #[arg(long, hide = true, conflicts_with_all = ["hosts", "pid", "root", "json"])]
    agent: bool,
}

/// The machine and process to check.
struct Scope {
    /// Directory with the machine's files; `/` for this machine.
    root: PathBuf,
    /// Whether the root is this machine's, so that libraries may be opened and sockets tried.
    is_here: bool,
    /// Name of the process's folder below /proc: `self`, or a number.
    process: String,
    /// Cores that ranks may use.
    cores: usize,
}

impl Scope {
    fn here() -> Scope {
        Scope {
            root: "/".into(),
            is_here: true,
            process: "self".into(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    fn of(options: &DoctorOptions) -> Scope {
        let here = Scope::here();
        Scope {
            is_here: options.root.is_none(),
            root: options.root.clone().unwrap_or(here.root),
            process: options.pid.map_or(here.process, |pid| pid.to_string()),
            cores: here.cores,
        }
    }

    fn process_file(&self, name: &str) -> PathBuf {
        self.root.join("proc").join(&self.process).join(name)
    }

    /// Returns where a path of the machine lies.
    fn below_root(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn has_rdma(&self) -> bool {
        let folder = self.root.join("sys/class/infiniband");
        std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
    }
}

/// Names and values of environment variables.
#[derive(Clone, Debug, Default)]
struct EnvironmentVariables(BTreeMap<String, String>);

impl EnvironmentVariables {
    /// Returns this process's variables, or those of the process to check.
    fn read(scope: &Scope) -> io::Result<EnvironmentVariables> {
        if scope.is_here && scope.process == "self" {
            let text = |text: OsString| text.to_string_lossy().into_owned();
            return Ok(EnvironmentVariables(
                std::env::vars_os()
                    .map(|(name, value)| (text(name), text(value)))
                    .collect(),
            ));
        }
        match std::fs::read(scope.process_file("environ")) {
            Ok(bytes) => Ok(EnvironmentVariables::parse(&bytes)),
            // A copy of a machine's files need not have a process.
            Err(_) if !scope.is_here => Ok(EnvironmentVariables::default()),
            Err(error) => Err(error),
        }
    }

    /// Parses the text of /proc/PID/environ.
    fn parse(bytes: &[u8]) -> EnvironmentVariables {
        let entries = bytes.split(|&byte| byte == 0);
        let pairs = entries.filter_map(|entry| {
            let text = String::from_utf8_lossy(entry).into_owned();
            let (name, value) = text.split_once('=')?;
            Some((name.to_string(), value.to_string()))
        });
        EnvironmentVariables(pairs.collect())
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn names(&self) -> impl Iterator<Item = String> + '_ {
        self.0.keys().cloned()
    }

    #[cfg(test)]
    fn of(pairs: &[(&str, &str)]) -> EnvironmentVariables {
        let owned = |(name, value): &(&str, &str)| (name.to_string(), value.to_string());
        EnvironmentVariables(pairs.iter().map(owned).collect())
    }
}

/// Results on one machine, and what is compared between hosts.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct MachineReport {
    host: String,
    /// Version of cinch.
    version: String,
    /// Version of the wire format, which all ranks must share.
    wire_format: u32,
    /// Version of NVIDIA's driver; `None` without one.
    driver: Option<String>,
    /// Address that cinch takes; `None` if there is none.
    address: Option<String>,
    results: Vec<CheckResult>,
}

impl MachineReport {
    fn of(scope: &Scope, variables: &EnvironmentVariables) -> MachineReport {
        let (config, environment) = environment::check(variables);
        let chosen = scope.is_here.then(|| chosen(&config));
        let mut results = gpu::check(scope);
        results.extend(limits::check(scope, &config));
        results.extend(network::check(scope, &config, chosen.as_ref()));
        results.push(clock::check(scope));
        results.extend(library::check(scope, variables));
        results.extend(environment);
        let address = chosen.and_then(Result::ok);
        MachineReport {
            host: crate::machine::host_name(),
            version: cinch::VERSION.into(),
            wire_format: u32::from(cinch::types::FORMAT_VERSION),
            driver: crate::bench::record::driver_version_below(&scope.root),
            address: address.map(|chosen| chosen.ip.to_string()),
            results,
        }
    }
}

/// Returns a number of bytes in the largest binary unit that leaves at least 1.
fn bytes(number: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fits = units.into_iter().find(|(shift, _)| number >> shift > 0);
    match fits {
        Some((shift, unit)) => format!("{} {unit}", number >> shift),
        None => format!("{number} bytes"),
    }
}

/// Runs `cinch doctor`. The exit code is 1 if a result is an error.
///
/// # Errors
/// Returns an exit code and an error message if the process or the file of hosts cannot be read.
pub fn run(options: &DoctorOptions) -> ExitResult {
    let mut out = io::stdout().lock();
    if options.agent {
        return hosts::agent(&mut out);
    }
    if let Some(file) = &options.hosts {
        return hosts::run(options, file, &mut out);
    }
    let scope = Scope::of(options);
    let variables = EnvironmentVariables::read(&scope).map_err(|error| {
        let path = scope.process_file("environ");
        (crate::FAILURE, format!("{}: {error}", path.display()))
    })?;
    let report = MachineReport::of(&scope, &variables);
    let written = match options.json {
        true => write_json(&report, &mut out),
        false => write_text(&report, &scope.root, &mut out),
    };
    finish(written).map(|_| exit_code(&report.results))
}

fn write_text(report: &MachineReport, root: &Path, out: &mut dyn Write) -> io::Result<()> {
    let machine = match root == Path::new("/") {
        true => format!("host {}", report.host),
        false => format!("files in {}", root.display()),
    };
    writeln!(out, "cinch {} doctor, {machine}", report.version)?;
    check_result::write(&report.results, out)
}

fn write_json(value: &impl Serialize, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}", serde_json::to_string_pretty(value)?)
}

/// Returns 1 if a result is an error, else 0.
fn exit_code(results: &[CheckResult]) -> i32 {
    match results.iter().any(|it| it.level == Severity::Error) {
        true => WRONG,
        false => 0,
    }
}

/// Returns the address of a communicator on this machine, by creating one of a single rank.
fn chosen(config: &Config) -> Result<ChosenAddress, String> {
    let config = Config {
        interface: config.interface.clone(),
        ipv6: config.ipv6,
        ..Config::default()
    };
    let joined = UniqueId::create(&config)
        .and_then(|id| Communicator::init(&id, 0, 1, config.clone()))
        .map_err(|error| error.message().to_string())?;
    let ip = joined.peers().first().map(|peer| peer.address);
    let ip = ip.ok_or("a communicator of one rank has no address")?;
    let unrestricted = Config::default();
    let all = alternatives(&unrestricted).map_err(|error| error.message().to_string())?;
    let own = all.into_iter().find(|it| it.ip == ip);
    Ok(ChosenAddress {
        ip,
        interface: own.map_or("lo".into(), |own| own.interface),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with files of an invented machine, which is removed when dropped.
    pub struct FakeRoot(pub PathBuf);

    impl FakeRoot {
        pub fn new(name: &str) -> FakeRoot {
            let root =
                std::env::temp_dir().join(format!("cinch-doctor-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&root).unwrap();
            FakeRoot(root)
        }

        pub fn write(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        /// Returns the machine with 4 cores.
        pub fn scope(&self) -> Scope {
            Scope {
                root: self.0.clone(),
                is_here: false,
                process: "self".into(),
                cores: 4,
            }
        }
    }

    impl Drop for FakeRoot {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn variables_of_another_process_are_read() {
        let root = FakeRoot::new("environ");
        root.write("proc/self/environ", "A=1=2\0CINCH_LOG=info\0\0broken");
        let variables = EnvironmentVariables::read(&root.scope()).unwrap();
        assert_eq!(variables.get("A"), Some("1=2"));
        assert_eq!(variables.get("CINCH_LOG"), Some("info"));
        assert_eq!(variables.names().count(), 2);
    }

    #[test]
    fn report_fails_exactly_if_a_finding_is_an_error() {
        let root = FakeRoot::new("report");
        let good = MachineReport::of(&root.scope(), &EnvironmentVariables::default());
        assert_eq!(exit_code(&good.results), 0, "{good:?}");
        let bad = MachineReport::of(
            &root.scope(),
            &EnvironmentVariables::of(&[("CINCH_SLOTS", "3")]),
        );
        assert_eq!(exit_code(&bad.results), WRONG);
    }

    #[test]
    fn this_machine_has_an_address_on_one_of_its_interfaces() {
        let config = Config {
            interface: Some("lo".into()),
            ..Config::default()
        };
        let chosen = chosen(&config).unwrap();
        assert!(chosen.ip.is_loopback());
        assert_eq!(chosen.interface, "lo");
        let none = Config {
            interface: Some("=none7".into()),
            ..Config::default()
        };
        assert!(super::chosen(&none).err().unwrap().contains("none7"));
    }
}
