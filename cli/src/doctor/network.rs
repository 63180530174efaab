//! Interfaces, the address that cinch takes, and RDMA ports.

use super::Scope;
use super::check_result::CheckResult;
use cinch::config::Config;
use cinch::types::TransportKind;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

const AREA: &str = "network";

/// Beginnings of the names of interfaces that lead to containers and virtual machines of one host.
const VIRTUAL: [&str; 7] = ["docker", "virbr", "br-", "veth", "cni", "flannel", "cali"];

/// A network interface, by /sys/class/net.
#[derive(Clone, Debug, PartialEq)]
struct Interface {
    name: String,
    is_up: bool,
    /// Megabits a second; `None` if the driver reports none, as virtual ones do.
    speed: Option<u64>,
    mtu: Option<u64>,
}

impl Interface {
    fn shown(&self) -> String {
        let speed = match self.speed {
            Some(speed) if speed >= 1000 => format!("{} Gbit/s", speed as f64 / 1000.0),
            Some(speed) => format!("{speed} Mbit/s"),
            None => "unknown speed".into(),
        };
        let mtu = self.mtu.map_or("unknown".into(), |mtu| mtu.to_string());
        format!("{}, MTU {mtu}", speed)
    }
}

/// The address that a communicator takes on this machine, with its interface.
pub struct ChosenAddress {
    pub ip: IpAddr,
    /// Name of the interface that has the address.
    pub interface: String,
}

/// Checks interfaces, the chosen address and RDMA ports. `chosen` is `None` for another machine's files.
pub fn check(
    scope: &Scope,
    config: &Config,
    chosen: Option<&Result<ChosenAddress, String>>,
) -> Vec<CheckResult> {
    let interfaces = interfaces(&scope.root);
    let mut results: Vec<CheckResult> = interfaces.iter().map(of_interface).collect();
    match chosen {
        Some(Ok(chosen)) => results.push(judge(chosen, &interfaces)),
        Some(Err(error)) => results.push(CheckResult::error(
            AREA,
            "chosen",
            error,
            "bring an interface up, or name one in CINCH_SOCKET_IFNAME",
        )),
        None => {}
    }
    results.extend(rdma(scope, config));
    results
}

fn interfaces(root: &Path) -> Vec<Interface> {
    let folder = root.join("sys/class/net");
    let read = |name: &str, file: &str| {
        let text = fs::read_to_string(folder.join(name).join(file)).ok()?;
        Some(text.trim().to_string())
    };
    let mut found: Vec<Interface> = names(&folder)
        .into_iter()
        .filter(|name| name != "lo")
        .map(|name| Interface {
            // Virtual interfaces that carry data report the state `unknown`.
            is_up: read(&name, "operstate")
                .is_some_and(|state| state == "up" || state == "unknown"),
            // Without a link some drivers report -1, some an error, some 2^32 - 1.
            speed: read(&name, "speed")
                .and_then(|speed| speed.parse::<u64>().ok())
                .filter(|&speed| speed > 0 && speed < u64::from(u32::MAX)),
            mtu: read(&name, "mtu").and_then(|mtu| mtu.parse().ok()),
            name,
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Returns the sorted names in a folder; none if it does not exist.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

fn of_interface(interface: &Interface) -> CheckResult {
    let state = if interface.is_up { "up" } else { "down" };
    let result = CheckResult::ok(
        AREA,
        &interface.name,
        format!("{state}, {}", interface.shown()),
    );
    result
        .with("up", interface.is_up)
        .with("speed_mbit", interface.speed)
        .with("mtu", interface.mtu)
}

fn judge(chosen: &ChosenAddress, interfaces: &[Interface]) -> CheckResult {
    let name = &chosen.interface;
    let found = format!("cinch takes {} of {name}", chosen.ip);
    let others = interfaces
        .iter()
        .filter(|it| it.is_up && it.name != *name && !is_virtual(&it.name));
    let own = interfaces
        .iter()
        .find(|it| it.name == *name)
        .and_then(|it| it.speed);
    let faster = others.clone().find(|it| {
        let speeds = it.speed.zip(own);
        speeds.is_some_and(|(other, own)| other >= 2 * own)
    });
    let result = if chosen.ip.is_loopback() {
        CheckResult::warning(
            AREA,
            "chosen",
            format!("{found}, which other hosts cannot reach"),
            "fine for ranks of one host; for several, bring an interface up or set CINCH_SOCKET_IFNAME",
        )
    } else if is_virtual(name) {
        let other = others.clone().next().map_or("NAME", |it| it.name.as_str());
        CheckResult::warning(
            AREA,
            "chosen",
            format!("{found}, an interface for containers and virtual machines"),
            format!("set CINCH_SOCKET_IFNAME={other}"),
        )
    } else if let Some(faster) = faster {
        CheckResult::warning(
            AREA,
            "chosen",
            format!("{found}, but {} is faster: {}", faster.name, faster.shown()),
            format!(
                "set CINCH_SOCKET_IFNAME={} if all hosts have it",
                faster.name
            ),
        )
    } else {
        CheckResult::ok(AREA, "chosen", found)
    };
    result
        .with("address", chosen.ip.to_string())
        .with("interface", name.as_str())
}

fn is_virtual(name: &str) -> bool {
    VIRTUAL.iter().any(|beginning| name.starts_with(beginning))
}

/// Checks RDMA ports, as /sys/class/infiniband shows them, and whether this process can open their devices.
fn rdma(scope: &Scope, config: &Config) -> Vec<CheckResult> {
    let folder = scope.root.join("sys/class/infiniband");
    let devices = names(&folder);
    if devices.is_empty() {
        return vec![CheckResult::ok(
            AREA,
            "rdma",
            "no RDMA device; TCP connects hosts",
        )];
    }
    let mut results = Vec::new();
    let mut active = 0;
    for device in &devices {
        for port in names(&folder.join(device).join("ports")) {
            let result = of_port(&folder, device, &port);
            active += usize::from(result.values["active"] == true);
            results.push(result);
        }
    }
    results.push(usable(scope, config, active));
    results
}

fn of_port(folder: &Path, device: &str, port: &str) -> CheckResult {
    let port_folder = folder.join(device).join("ports").join(port);
    let read = |file: &str| {
        let text = fs::read_to_string(port_folder.join(file)).unwrap_or_default();
        text.trim().to_string()
    };
    let (state, rate, layer) = (read("state"), read("rate"), read("link_layer"));
    let name = format!("{device}:{port}");
    let found = format!("{layer} port, state {state}, {rate}");
    let is_active = state.starts_with("4:");
    let result = match is_active {
        true => CheckResult::ok(AREA, &name, found),
        false => CheckResult::warning(
            AREA,
            &name,
            found,
            "see its cable, its switch and `ip link` or `ibstat`; leave it out by CINCH_IB_HCA if it is not meant",
        ),
    };
    result
        .with("active", is_active)
        .with("rate", rate)
        .with("link_layer", layer)
}

/// Judges RDMA as a whole, by the library's own attempt where the files are those of this machine.
fn usable(scope: &Scope, config: &Config, active: usize) -> CheckResult {
    let devices = names(&scope.root.join("dev/infiniband"));
    let found = format!("{active} active ports");
    if config.ib_disable {
        return CheckResult::ok(AREA, "rdma", format!("{found}, unused: CINCH_IB_DISABLE=1"));
    }
    if !devices.iter().any(|name| name.starts_with("uverbs")) {
        return CheckResult::warning(
            AREA,
            "rdma",
            format!("{found}, but /dev/infiniband has no uverbs device, so TCP connects hosts"),
            "load ib_uverbs; in a container pass --device=/dev/infiniband, or a resource of the RDMA device plug-in",
        );
    }
    if !scope.is_here {
        return CheckResult::ok(AREA, "rdma", found);
    }
    match cinch::transport::probe(TransportKind::Rdma, config) {
        Some(Err(error)) => CheckResult::warning(
            AREA,
            "rdma",
            format!("{found}, but RDMA cannot be used: {}", error.message()),
            "TCP connects hosts until this is solved; docs/rdma.md has the set-up",
        ),
        _ => CheckResult::ok(AREA, "rdma", format!("{found}; RDMA connects hosts")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check_result::Severity;
    use super::super::tests::FakeRoot;
    use super::*;

    fn interface(root: &FakeRoot, name: &str, state: &str, speed: &str) {
        root.write(&format!("sys/class/net/{name}/operstate"), state);
        root.write(&format!("sys/class/net/{name}/speed"), speed);
        root.write(&format!("sys/class/net/{name}/mtu"), "1500\n");
    }

    fn chosen(ip: &str, interface: &str) -> Option<Result<ChosenAddress, String>> {
        Some(Ok(ChosenAddress {
            ip: ip.parse().unwrap(),
            interface: interface.into(),
        }))
    }

    fn result(root: &FakeRoot, name: &str, ip: &str, interface: &str) -> CheckResult {
        let results = check(
            &root.scope(),
            &Config::default(),
            chosen(ip, interface).as_ref(),
        );
        results.into_iter().find(|it| it.check == name).unwrap()
    }

    #[test]
    fn chosen_interface_is_judged_beside_the_others() {
        let root = FakeRoot::new("interfaces");
        interface(&root, "eth0", "up\n", "1000\n");
        interface(&root, "docker0", "up\n", "-1\n");
        interface(&root, "lo", "unknown\n", "");
        let good = result(&root, "chosen", "10.0.0.1", "eth0");
        assert_eq!(good.level, Severity::Ok);
        let docker = result(&root, "chosen", "172.17.0.1", "docker0");
        assert_eq!(docker.level, Severity::Warning);
        assert!(docker.advice.unwrap().contains("CINCH_SOCKET_IFNAME=eth0"));
        let loopback = result(&root, "chosen", "127.0.0.1", "lo");
        assert_eq!(loopback.level, Severity::Warning);
        // A faster interface counts only while it is up.
        interface(&root, "eth1", "down\n", "100000\n");
        assert_eq!(
            result(&root, "chosen", "10.0.0.1", "eth0").level,
            Severity::Ok
        );
        interface(&root, "eth1", "up\n", "100000\n");
        let slow = result(&root, "chosen", "10.0.0.1", "eth0");
        assert_eq!(slow.level, Severity::Warning);
        assert!(
            slow.found.contains("eth1 is faster: 100 Gbit/s"),
            "{}",
            slow.found
        );
        let eth1 = result(&root, "eth1", "10.0.0.1", "eth0");
        assert_eq!(
            (&eth1.values["speed_mbit"], &eth1.values["mtu"]),
            (&100_000.into(), &1500.into())
        );
        let docker = result(&root, "docker0", "10.0.0.1", "eth0");
        assert!(docker.found.contains("unknown speed"), "{}", docker.found);
    }

    #[test]
    fn rdma_ports_are_judged_by_state_and_device_files() {
        let root = FakeRoot::new("rdma");
        let config = Config::default();
        let find = |name: &str, config: &Config| {
            let results = check(&root.scope(), config, None);
            results.into_iter().find(|it| it.check == name).unwrap()
        };
        assert!(find("rdma", &config).found.contains("no RDMA device"));
        for (port, state) in [("1", "4: ACTIVE\n"), ("2", "1: DOWN\n")] {
            let folder = format!("sys/class/infiniband/mlx5_0/ports/{port}");
            root.write(&format!("{folder}/state"), state);
            root.write(&format!("{folder}/rate"), "200 Gb/sec (4X HDR)\n");
            root.write(&format!("{folder}/link_layer"), "InfiniBand\n");
        }
        assert_eq!(find("mlx5_0:1", &config).level, Severity::Ok);
        assert_eq!(find("mlx5_0:2", &config).level, Severity::Warning);
        let blocked = find("rdma", &config);
        assert_eq!(blocked.level, Severity::Warning);
        assert!(blocked.advice.unwrap().contains("--device=/dev/infiniband"));
        root.write("dev/infiniband/uverbs0", "");
        let rdma = find("rdma", &config);
        assert_eq!(
            (rdma.level, rdma.found.as_str()),
            (Severity::Ok, "1 active ports")
        );
        let off = Config {
            ib_disable: true,
            ..config
        };
        assert!(find("rdma", &off).found.contains("CINCH_IB_DISABLE=1"));
    }
}
