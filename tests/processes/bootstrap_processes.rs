//! Tests ranks as processes: how the other ranks report a rank that is killed, stopped, or leaves.
//!
//! `CINCH_TEST_KILLS=200 cargo test --release --test processes bootstrap_processes::killed` kills more ranks
//! than a run with default settings.

use super::child;
use cinch::bootstrap::{ControlPlane, OutOfBand, WarningHook};
use cinch::sync::Fault;
use cinch::{Config, UniqueId};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::BorrowedFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

fn config() -> Config {
    Config {
        init_timeout: Duration::from_secs(20),
        timeout: Duration::from_secs(20),
        ..Config::default()
    }
}

/// Runs one rank: joins, then runs the commands on its input until it ends, and prints each event.
pub fn rank_process(role: &str) {
    let mut words = role.split(' ');
    let id = UniqueId::from_hex(words.next().unwrap()).unwrap();
    let mut number = || words.next().unwrap().parse::<usize>().unwrap();
    let (rank, nranks, ballast) = (number(), number(), number());
    let mut config = config();
    config.host_id = words.next().map(String::from);
    let fault = Fault::new();
    let warnings = WarningHook::new(|text| report(&format!("warning {text}")));
    let plane =
        ControlPlane::join_with_warning_hook(&id, rank, nranks, &config, fault.clone(), warnings)
            .unwrap();
    // The kernel has to free this memory of a killed process before it closes the sockets.
    let memory = vec![1u8; ballast << 20];
    report("joined");
    let lines = lines_of(std::io::stdin());
    let mut reported = false;
    loop {
        if let (false, Err(error)) = (reported, fault.check()) {
            report(&format!("fault {error}"));
            reported = true;
        }
        match lines.recv_timeout(Duration::from_millis(1)) {
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
            Ok((_, line)) => match line.as_str() {
                "barrier" => match plane.barrier() {
                    Ok(()) => report("through"),
                    Err(error) => report(&format!("error {error}")),
                },
                "gather" => match plane.all_gather(&vec![7; 4 << 20]) {
                    Ok(all) => report(&format!("gathered {}", all.concat().len())),
                    Err(error) => report(&format!("error {error}")),
                },
                "leave" => {
                    plane.leave();
                    report("left");
                }
                "lend" => {
                    lend_sockets();
                    report("lent");
                }
                "has_left" => {
                    let gone: Vec<_> = (0..nranks).filter(|&rank| plane.has_left(rank)).collect();
                    report(&format!("has_left {gone:?}"));
                }
                other => panic!("{other}"),
            },
        }
    }
    // Exits without running destructors, as a program does after an error.
    std::hint::black_box(memory);
    std::process::exit(0);
}

/// Keeps this process's connections open in a child for a few seconds. When this process is killed,
/// its connections do not close at once, as if the kernel took long to free its memory.
#[allow(unsafe_code)]
fn lend_sockets() {
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if target.to_string_lossy().starts_with("socket:") {
            let number = entry.file_name().to_string_lossy().parse().unwrap();
            // SAFETY: the control plane of `rank_process` keeps the descriptor open during this call.
            let socket = unsafe { BorrowedFd::borrow_raw(number) };
            fcntl(socket, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        }
    }
    let mut sleep = Command::new("sleep");
    sleep
        .arg("4")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    drop(sleep.spawn().unwrap());
}

fn report(text: &str) {
    // println! is not used here, because the test harness captures its output.
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{text}").unwrap();
    out.flush().unwrap();
}

fn lines_of(input: impl std::io::Read + Send + 'static) -> Receiver<(Instant, String)> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(input).lines().map_while(Result::ok) {
            // The test harness may have printed text on this line in front of the `@`.
            let line = line.rsplit('@').next().unwrap_or_default().to_string();
            if sender.send((Instant::now(), line)).is_err() {
                break;
            }
        }
    });
    receiver
}

struct Rank {
    child: Child,
    lines: Receiver<(Instant, String)>,
}

impl Rank {
    fn command(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Waits for the next line that begins with `word`, skips others, and returns the rest.
    fn expect(&self, word: &str) -> (Instant, String) {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let (when, line) = self.lines.recv_timeout(left).unwrap_or_else(|_| {
                panic!("pid {} never reported {word}", self.child.id());
            });
            if let Some(rest) = line.strip_prefix(word) {
                return (when, rest.trim().to_string());
            }
        }
    }

    fn expect_none(&self, word: &str, wait: Duration) {
        let until = Instant::now() + wait;
        while let Ok((_, line)) = self
            .lines
            .recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            assert!(!line.starts_with(word), "{line}");
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts `nranks` ranks on one host.
fn start(nranks: usize) -> Vec<Rank> {
    let id = UniqueId::create_for_one_host(&config()).unwrap();
    let spawn = |rank| spawn(&[], &format!("{} {rank} {nranks} 0", id.to_hex()));
    joined((0..nranks).map(spawn).collect())
}

fn spawn(prefix: &[&str], role: &str) -> Rank {
    let mut child = child::rank(prefix, "bootstrap_processes", role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = lines_of(child.stdout.take().unwrap());
    Rank { child, lines }
}

fn joined(ranks: Vec<Rank>) -> Vec<Rank> {
    ranks.iter().for_each(|rank| drop(rank.expect("joined")));
    ranks
}

/// Kills `victim` and returns how long each survivor took to raise its fault.
fn kill_one(ranks: &mut [Rank], victim: usize) -> Vec<Duration> {
    let pid = ranks[victim].child.id();
    let killed = Instant::now();
    ranks[victim].signal(Signal::SIGKILL);
    let survivors = ranks.iter().enumerate().filter(|(rank, _)| *rank != victim);
    survivors
        .map(|(_, rank)| {
            let (when, text) = rank.expect("fault");
            assert!(text.starts_with("remote error: "), "{text}");
            assert!(text.contains(&format!("rank {victim} (host ")), "{text}");
            assert!(text.contains(&format!("pid {pid}) died")), "{text}");
            when - killed
        })
        .collect()
}

#[test]
fn killed_rank_is_named_by_all_within_a_second() {
    let kills = std::env::var("CINCH_TEST_KILLS").map_or(6, |text| text.parse().unwrap());
    let mut delays = Vec::new();
    for round in 0..kills {
        let nranks = 4 + round % 3;
        let mut ranks = start(nranks);
        // Kills the root in every third round.
        let victim = if round % 3 == 0 {
            0
        } else {
            1 + round % (nranks - 1)
        };
        delays.extend(kill_one(&mut ranks, victim));
    }
    delays.sort();
    let worst = *delays.last().unwrap();
    println!(
        "{kills} kills: median {:?}, worst {worst:?}",
        delays[delays.len() / 2]
    );
    assert!(worst <= Duration::from_secs(1), "promised: {worst:?}");
}

/// Kills a process with so much memory that the kernel takes long to free it. `CINCH_TEST_BALLAST` sets the
/// megabytes.
#[test]
fn killed_large_rank_is_named_within_a_second() {
    let ballast = std::env::var("CINCH_TEST_BALLAST").unwrap_or("128".into());
    for victim in [0, 2] {
        let id = UniqueId::create_for_one_host(&config()).unwrap().to_hex();
        let weight = |rank| {
            if rank == victim {
                ballast.as_str()
            } else {
                "0"
            }
        };
        let spawn = |rank| spawn(&[], &format!("{id} {rank} 3 {}", weight(rank)));
        let mut ranks = joined((0..3).map(spawn).collect());
        let delays = kill_one(&mut ranks, victim);
        println!("rank {victim} with {ballast} MiB: {delays:?}");
        assert!(
            delays.iter().all(|delay| *delay <= Duration::from_secs(1)),
            "{delays:?}"
        );
    }
}

/// The connections of the killed rank stay open and only its heartbeats stop, so other ranks check
/// its process in /proc. If rank 0 is on another host, rank 1 checks.
#[test]
fn killed_rank_with_open_connections_is_named_within_a_second() {
    for (victim, hosts) in [(0, ["a"; 3]), (2, ["a"; 3]), (2, ["a", "b", "b"])] {
        let id = UniqueId::create_for_one_host(&config()).unwrap().to_hex();
        let spawn = |rank: usize| spawn(&[], &format!("{id} {rank} 3 0 {}", hosts[rank]));
        let mut ranks = joined((0..3).map(spawn).collect());
        ranks[victim].command("lend");
        ranks[victim].expect("lent");
        let delays = kill_one(&mut ranks, victim);
        println!("rank {victim}, connections stand, hosts {hosts:?}: {delays:?}");
        assert!(
            delays.iter().all(|delay| *delay <= Duration::from_secs(1)),
            "{delays:?}"
        );
    }
}

/// Two network namespaces with a link between them. Dropping this value deletes them.
pub struct NetworkLink {
    pub names: [String; 2],
}

impl NetworkLink {
    /// Creates the namespaces and the link for the test `tag`; returns `None` if this user may not.
    pub fn make(tag: &str) -> Option<NetworkLink> {
        let names = ["a", "b"].map(|end| format!("cinch{}{tag}{end}", std::process::id()));
        let link = NetworkLink { names };
        let [a, b] = &link.names;
        let made = ip(&format!("netns add {a}"))
            && ip(&format!("netns add {b}"))
            && ip(&format!(
                "link add v0 netns {a} type veth peer name v0 netns {b}"
            ))
            && ip(&format!("-n {a} addr add 10.199.0.1/24 dev v0"))
            && ip(&format!("-n {b} addr add 10.199.0.2/24 dev v0"))
            && [a, b].iter().all(|end| {
                ip(&format!("-n {end} link set v0 up")) && ip(&format!("-n {end} link set lo up"))
            });
        made.then_some(link)
    }
}

impl Drop for NetworkLink {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

/// Runs `ip` and returns whether it succeeds.
pub fn ip(arguments: &str) -> bool {
    let mut command = Command::new("ip");
    command.args(arguments.split(' ')).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[test]
fn cut_link_is_an_error_within_five_seconds() {
    let Some(link) = NetworkLink::make("cut") else {
        println!("skipped: no network namespaces for this user");
        return;
    };
    let mut config = config();
    config.allow_unauthenticated = true;
    let id = UniqueId::for_address("10.199.0.1", 29_777, &config)
        .unwrap()
        .to_hex();
    let end = |rank: usize| link.names[usize::from(rank == 2)].as_str();
    let spawn = |rank| {
        let prefix = ["ip", "netns", "exec", end(rank)];
        spawn(&prefix, &format!("{id} {rank} 3 0"))
    };
    let ranks = joined((0..3).map(spawn).collect());
    ranks[0].expect_none("fault", Duration::from_millis(300));
    let cut = Instant::now();
    assert!(ip(&format!("-n {} link set v0 down", end(2))));
    for (rank, lost) in [(0, 2), (1, 2), (2, 0)] {
        let (when, text) = ranks[rank].expect("fault");
        println!("cut link, rank {rank} after {:?}: {text}", when - cut);
        assert!(
            text.contains(&format!("rank {lost} (")) && text.contains("link"),
            "{text}"
        );
        assert!(
            when - cut <= Duration::from_secs(5),
            "promised: {:?}",
            when - cut
        );
    }
}

/// The rank reads nothing for ten seconds, while much more is sent to it than its socket holds. Its kernel answers.
#[test]
fn rank_of_another_host_that_stops_is_not_lost() {
    let Some(link) = NetworkLink::make("stop") else {
        println!("skipped: no network namespaces for this user");
        return;
    };
    let mut config = config();
    config.allow_unauthenticated = true;
    let id = UniqueId::for_address("10.199.0.1", 29_778, &config)
        .unwrap()
        .to_hex();
    let end = |rank: usize| link.names[usize::from(rank == 2)].as_str();
    let spawn = |rank| {
        let prefix = ["ip", "netns", "exec", end(rank)];
        spawn(&prefix, &format!("{id} {rank} 3 0"))
    };
    let mut ranks = joined((0..3).map(spawn).collect());
    ranks[2].command("gather");
    // Its contribution arrives, and the result is sent while it is stopped.
    ranks[0].expect_none("fault", Duration::from_millis(500));
    ranks[2].signal(Signal::SIGSTOP);
    ranks[0].command("gather");
    ranks[1].command("gather");
    let whole = (12 << 20).to_string();
    for rank in &ranks[..2] {
        assert_eq!(rank.expect("gathered").1, whole);
    }
    ranks[0].expect_none("fault", Duration::from_secs(10));
    ranks[2].signal(Signal::SIGCONT);
    assert_eq!(ranks[2].expect("gathered").1, whole);
    for rank in &ranks {
        rank.expect_none("fault", Duration::from_millis(300));
    }
}

#[test]
fn stopped_rank_causes_a_warning_and_no_failure() {
    for victim in [0, 2] {
        let mut ranks = start(3);
        ranks[victim].signal(Signal::SIGSTOP);
        let watcher = if victim == 0 { 1 } else { 0 };
        let (_, text) = ranks[watcher].expect("warning");
        assert!(
            text.starts_with(&format!("rank {victim} (")) && text.contains("stopped"),
            "{text}"
        );
        ranks[1].expect_none("fault", Duration::from_millis(1500));
        ranks[victim].signal(Signal::SIGCONT);
        ranks.iter_mut().for_each(|rank| rank.command("barrier"));
        ranks.iter().for_each(|rank| drop(rank.expect("through")));
        ranks[0].expect_none("fault", Duration::from_millis(200));
    }
}

/// Rank 1 runs as another user, and its /proc hides the processes of root.
#[test]
fn stopped_rank_that_proc_hides_is_not_gone() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root mounts /proc");
        return;
    }
    let id = UniqueId::create_for_one_host(&config()).unwrap().to_hex();
    let hidden = "mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid=65534 --regid=65534 --clear-groups $0 $*";
    let prefixes = [&[][..], &["unshare", "-m", "sh", "-c", hidden]];
    let start = |rank: usize| spawn(prefixes[rank], &format!("{id} {rank} 2 0"));
    let mut ranks = joined((0..2).map(start).collect());
    ranks[0].signal(Signal::SIGSTOP);
    ranks[1].expect_none("fault", Duration::from_millis(1500));
    ranks[0].signal(Signal::SIGCONT);
    ranks.iter_mut().for_each(|rank| rank.command("barrier"));
    ranks.iter().for_each(|rank| drop(rank.expect("through")));
}

#[test]
fn root_may_leave_and_end_first() {
    let mut ranks = start(3);
    ranks[0].command("leave");
    ranks[0].expect("left");
    drop(ranks[0].child.stdin.take());
    ranks[0].child.wait().unwrap();
    for rank in &ranks[1..] {
        rank.expect_none("fault", Duration::from_millis(400));
    }
    ranks[1].command("has_left");
    assert_eq!(ranks[1].expect("has_left").1, "[0]");
    ranks[1].command("barrier");
    let (_, text) = ranks[1].expect("error");
    assert!(text.contains("rank 0 ("), "{text}");
    // Without the root, rank 1 cannot learn whether rank 2 left in good order, so rank 2 counts as
    // having left.
    ranks[2].signal(Signal::SIGKILL);
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        ranks[1].command("has_left");
        if ranks[1].expect("has_left").1 == "[0, 2]" {
            break;
        }
        assert!(Instant::now() < until);
    }
}

#[test]
fn rank_that_has_left_may_be_killed() {
    let mut ranks = start(3);
    ranks[2].command("leave");
    ranks[2].expect("left");
    ranks[2].signal(Signal::SIGKILL);
    ranks[0].expect_none("fault", Duration::from_millis(400));
    ranks[1].command("has_left");
    assert_eq!(ranks[1].expect("has_left").1, "[2]");
    // The root must still detect the death of other ranks.
    ranks[1].signal(Signal::SIGKILL);
    assert!(ranks[0].expect("fault").1.contains("rank 1 ("));
}
