//! Tests that ranks of two hosts, which are network namespaces, use the network nearest to their cores.

use super::bootstrap_processes::{NetworkLink, ip};
use super::child;
use cinch::bootstrap::{ControlPlane, OutOfBand};
use cinch::sync::Fault;
use cinch::topology::RankPlace;
use cinch::transport::{ConnectContext, connect_all};
use cinch::{Config, UniqueId};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn config() -> Config {
    Config {
        init_timeout: Duration::from_secs(20),
        timeout: Duration::from_secs(20),
        allow_unauthenticated: true,
        ..Config::default()
    }
}

/// Connects one rank whose cores are on NUMA node 0, and prints the number of its connections in the second network.
pub fn rank_process(task: &str) {
    let words: Vec<&str> = task.split(' ').collect();
    let id = UniqueId::from_hex(words[0]).unwrap();
    let (config, fault) = (config(), Fault::new());
    let rank = words[1].parse().unwrap();
    let exchange = ControlPlane::join(&id, rank, 2, &config, fault.clone()).unwrap();
    let links = connect_all(&ConnectContext {
        exchange: &*exchange,
        config: &config,
        fault: &fault,
        deadline: Instant::now() + config.init_timeout,
        place: RankPlace::Node(0),
        sys: Path::new(words[2]),
        verbs: None,
    })
    .unwrap();
    let table = fs::read_to_string("/proc/net/tcp").unwrap();
    // Columns: number, own address, peer address, state; 01 is an open connection. 10.199.1.x ends with this text.
    let is_near = |line: &&str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        fields[1].contains("01C70A:") && fields[3] == "01"
    };
    println!("@{}", table.lines().skip(1).filter(is_near).count());
    exchange.barrier().unwrap();
    drop(links);
    exchange.leave();
}

/// Writes a directory like /sys in which v0 is at NUMA node 1 and v1 at NUMA node 0.
fn write_sys(root: &Path) {
    for (name, bus, node) in [("v0", 1, "1"), ("v1", 2, "0")] {
        let port = format!("devices/pci0000:00/0000:00:0{bus}.0");
        let function = format!("{port}/0000:0{bus}:00.0");
        let interface = format!("{function}/net/{name}");
        fs::create_dir_all(root.join(&interface)).unwrap();
        for (path, class) in [(&port, "0x060400"), (&function, "0x020000")] {
            fs::write(root.join(path).join("class"), class).unwrap();
            fs::write(root.join(path).join("numa_node"), node).unwrap();
            let devices = root.join("bus/pci/devices");
            fs::create_dir_all(&devices).unwrap();
            let address = path.rsplit('/').next().unwrap();
            symlink(format!("../../../{path}"), devices.join(address)).unwrap();
        }
        fs::write(root.join(&interface).join("operstate"), "up").unwrap();
        fs::write(root.join(&interface).join("speed"), "10000").unwrap();
        symlink("../..", root.join(&interface).join("device")).unwrap();
        let class = root.join("class/net");
        fs::create_dir_all(&class).unwrap();
        symlink(format!("../../{interface}"), class.join(name)).unwrap();
    }
}

/// Connects a rank in each namespace, and returns the numbers that they print.
fn run(link: &NetworkLink, port: u16) -> Vec<String> {
    let root = std::env::temp_dir().join(format!("cinch-near-{}-{port}", std::process::id()));
    write_sys(&root);
    let id = UniqueId::for_address("10.199.0.1", port, &config())
        .unwrap()
        .to_hex();
    let start = |rank: usize| {
        let prefix = ["timeout", "60", "ip", "netns", "exec", &link.names[rank]];
        let task = format!("{id} {rank} {}", root.display());
        let mut command = child::rank(&prefix, "near_networks", &task);
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let ranks = [start(0), start(1)];
    let counts = ranks.into_iter().map(|rank| {
        let done = rank.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(done.status.success(), "{text}");
        let (_, line) = text.split_once('@').expect("a line of the rank");
        line.lines().next().unwrap_or_default().to_string()
    });
    let counts = counts.collect();
    fs::remove_dir_all(&root).unwrap();
    counts
}

/// Gives both interfaces v1 addresses of one network, and waits until v0 and v1 run.
fn configure_second(link: &NetworkLink, names: &[&str]) -> bool {
    let [a, b] = &link.names;
    let made = ip(&format!("-n {a} addr add 10.199.1.1/24 dev v1"))
        && ip(&format!("-n {b} addr add 10.199.1.2/24 dev v1"))
        && [a, b].iter().all(|space| {
            let up = |name: &&str| ip(&format!("-n {space} link set {name} up"));
            names.iter().all(up)
        });
    // The kernel reports a link that came up after up to a second.
    let runs = |space: &String, name| {
        let mut command = Command::new("ip");
        command.args(["-n", space, "link", "show", name]);
        let output = command.output().unwrap().stdout;
        String::from_utf8_lossy(&output).contains("state UP")
    };
    let until = Instant::now() + Duration::from_secs(10);
    while !link
        .names
        .iter()
        .all(|space| runs(space, "v0") && runs(space, "v1"))
    {
        assert!(Instant::now() < until, "the links do not come up");
        std::thread::sleep(Duration::from_millis(20));
    }
    made
}

#[test]
fn nearer_network_carries_the_data() {
    let Some(link) = NetworkLink::make("near") else {
        return println!("skipped: no network namespaces for this user");
    };
    let [a, b] = &link.names;
    assert!(ip(&format!(
        "link add v1 netns {a} type veth peer name v1 netns {b}"
    )));
    assert!(configure_second(&link, &["v1"]));
    let channels = config().channels * config().tcp_sockets;
    assert_eq!(
        run(&link, 29_780),
        [channels.to_string(), channels.to_string()]
    );
}

#[test]
fn nearer_network_without_a_way_is_left() {
    let Some(link) = NetworkLink::make("far") else {
        return println!("skipped: no network namespaces for this user");
    };
    // Each host has an interface with an address of the same network, but the networks are not connected.
    let made = link.names.iter().all(|space| {
        ip(&format!(
            "link add v1 netns {space} type veth peer name w1 netns {space}"
        ))
    });
    assert!(made && configure_second(&link, &["v1", "w1"]));
    let start = Instant::now();
    assert_eq!(run(&link, 29_781), ["0", "0"]);
    assert!(
        start.elapsed() < Duration::from_secs(15),
        "{:?}",
        start.elapsed()
    );
}
