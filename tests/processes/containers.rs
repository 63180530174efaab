//! Tests ranks in network namespaces of their own, as containers are.

use super::bootstrap_processes::NetworkLink;
use super::child;
use cinch::types::TransportKind;
use cinch::{Communicator, Config, ReduceOp, UniqueId};
use std::process::{Command, Stdio};
use std::time::Duration;

fn config() -> Config {
    Config {
        init_timeout: Duration::from_secs(20),
        timeout: Duration::from_secs(20),
        allow_unauthenticated: true,
        ..Config::default()
    }
}

/// Runs one rank: joins, adds up vectors of all ranks, and prints the number of hosts and the transports to its peers.
pub fn rank_process(task: &str) {
    let words: Vec<&str> = task.split(' ').collect();
    let id = UniqueId::from_hex(words[0]).unwrap();
    let (rank, nranks) = (words[1].parse().unwrap(), words[2].parse().unwrap());
    let comm = Communicator::init(&id, rank, nranks, config()).unwrap();
    let mut data: Vec<f32> = (0..100_000).map(|at| (at % 100 + rank) as f32).collect();
    comm.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
    let of_ranks = nranks * (nranks - 1) / 2;
    for (at, found) in data.iter().enumerate() {
        assert_eq!(*found, (nranks * (at % 100) + of_ranks) as f32, "{at}");
    }
    let info = comm.info();
    let transports = info.transports.iter().flatten().map(|kind| kind.name());
    let transports: Vec<&str> = transports.collect();
    println!(
        "@{} hosts: {}",
        info.hosts.count().max(1),
        transports.join(" ")
    );
}

/// Runs ranks 0 and 1 in the first namespace and rank 2 in the second. Returns the line that each rank prints.
/// `prefix` comes before the command of rank 2.
fn run(link: &NetworkLink, prefix: &[&str], port: u16) -> Vec<String> {
    let id = UniqueId::for_address("10.199.0.1", port, &config())
        .unwrap()
        .to_hex();
    let start = |rank: usize| {
        let space = &link.names[usize::from(rank == 2)];
        let mut words = vec!["timeout", "60", "ip", "netns", "exec", space];
        if rank == 2 {
            words.extend(prefix);
        }
        let mut command = child::rank(&words, "containers", &format!("{id} {rank} 3"));
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let ranks: Vec<_> = (0..3).map(start).collect();
    let lines = ranks.into_iter().map(|rank| {
        let done = rank.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(done.status.success(), "{text}");
        let (_, line) = text.split_once('@').expect("a line of the rank");
        line.lines().next().unwrap_or_default().to_string()
    });
    lines.collect()
}

#[test]
fn containers_with_one_shm_directory_are_one_host() {
    let Some(link) = NetworkLink::make("one") else {
        return println!("skipped: no network namespaces for this user");
    };
    let shm = TransportKind::Shm.name();
    assert_eq!(
        run(&link, &[], 29_778),
        vec![format!("1 hosts: {shm} {shm}"); 3]
    );
}

#[test]
fn containers_with_their_own_shm_directories_are_two_hosts() {
    let mount = "mount -t tmpfs none /dev/shm";
    let mut trial = Command::new("unshare");
    trial.args(["-m", "sh", "-c", mount]).stderr(Stdio::null());
    let may_mount = trial.status().is_ok_and(|status| status.success());
    let Some(link) = NetworkLink::make("two").filter(|_| may_mount) else {
        return println!("skipped: no network namespaces or mounts for this user");
    };
    let script = format!("{mount} && exec \"$@\"");
    let (shm, tcp) = (TransportKind::Shm.name(), TransportKind::Tcp.name());
    assert_eq!(
        run(&link, &["unshare", "-m", "sh", "-c", &script, "sh"], 29_779),
        [
            format!("2 hosts: {shm} {tcp}"),
            format!("2 hosts: {shm} {tcp}"),
            format!("2 hosts: {tcp} {tcp}"),
        ]
    );
}
