//! Ranks as real processes: what the others learn when one is killed, stopped, or leaves.
//!
//! The test binary runs itself again for each rank. `CINCH_TEST_KILLS=200 cargo test --release
//! --test bootstrap_processes killed` kills more ranks than the routine run.

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

const ROLE: &str = "CINCH_TEST_ROLE";

fn config() -> Config {
    Config {
        init_timeout: Duration::from_secs(20),
        timeout: Duration::from_secs(20),
        ..Config::default()
    }
}

/// One rank: joins, then obeys lines on its input until it ends, telling what it hears.
///
/// This is no test of its own: without the variable it does nothing.
#[test]
fn rank_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let mut words = role.split(' ');
    let id = UniqueId::from_hex(words.next().unwrap()).unwrap();
    let mut number = || words.next().unwrap().parse::<usize>().unwrap();
    let (rank, nranks, ballast) = (number(), number(), number());
    let mut config = config();
    config.host_id = words.next().map(String::from);
    let fault = Fault::new();
    let notice = WarningHook::new(|text| say(&format!("notice {text}")));
    let star =
        ControlPlane::join_with_warning_hook(&id, rank, nranks, &config, fault.clone(), notice)
            .unwrap();
    // Memory that the kernel has to free before it closes files.
    let memory = vec![1u8; ballast << 20];
    say("joined");
    let lines = lines_of(std::io::stdin());
    let mut told = false;
    loop {
        if let (false, Err(error)) = (told, fault.check()) {
            say(&format!("fault {error}"));
            told = true;
        }
        match lines.recv_timeout(Duration::from_millis(1)) {
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
            Ok((_, line)) => match line.as_str() {
                "barrier" => match star.barrier() {
                    Ok(()) => say("through"),
                    Err(error) => say(&format!("error {error}")),
                },
                "leave" => {
                    star.leave();
                    say("left");
                }
                "lend" => {
                    lend_sockets();
                    say("lent");
                }
                "has_left" => {
                    let gone: Vec<_> = (0..nranks).filter(|&rank| star.has_left(rank)).collect();
                    say(&format!("has_left {gone:?}"));
                }
                other => panic!("{other}"),
            },
        }
    }
    // Without destructors, as after an error.
    std::hint::black_box(memory);
    std::process::exit(0);
}

/// Keeps this process's connections open in another one for a few seconds: when this one is
/// killed, they do not end, as those of a process that takes long to die do not.
#[allow(unsafe_code)]
fn lend_sockets() {
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if target.to_string_lossy().starts_with("socket:") {
            let number = entry.file_name().to_string_lossy().parse().unwrap();
            // SAFETY: the descriptor is the star's, which outlives this function.
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

fn say(text: &str) {
    // Behind the test harness's back: it captures println.
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{text}").unwrap();
    out.flush().unwrap();
}

fn lines_of(input: impl std::io::Read + Send + 'static) -> Receiver<(Instant, String)> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(input).lines().map_while(Result::ok) {
            // Behind what the harness prints before it.
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
    fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// The rest of the next line that begins with `word`; others are skipped.
    fn hears(&self, word: &str) -> (Instant, String) {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let (when, line) = self.lines.recv_timeout(left).unwrap_or_else(|_| {
                panic!("pid {} never said {word}", self.child.id());
            });
            if let Some(rest) = line.strip_prefix(word) {
                return (when, rest.trim().to_string());
            }
        }
    }

    fn hears_nothing_of(&self, word: &str, wait: Duration) {
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

/// `nranks` ranks on one host.
fn start(nranks: usize) -> Vec<Rank> {
    let id = UniqueId::create_for_one_host(&config()).unwrap();
    let spawn = |rank| spawn(&[], &format!("{} {rank} {nranks} 0", id.to_hex()));
    joined((0..nranks).map(spawn).collect())
}

fn spawn(prefix: &[&str], role: &str) -> Rank {
    let binary = std::env::current_exe().unwrap();
    let words = [prefix, &[binary.to_str().unwrap()]].concat();
    let mut child = Command::new(words[0])
        .args(&words[1..])
        .args(["rank_process", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = lines_of(child.stdout.take().unwrap());
    Rank { child, lines }
}

fn joined(ranks: Vec<Rank>) -> Vec<Rank> {
    ranks.iter().for_each(|rank| drop(rank.hears("joined")));
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
            let (when, text) = rank.hears("fault");
            assert!(text.starts_with("remote error: "), "{text}");
            assert!(text.contains(&format!("rank {victim} (host ")), "{text}");
            assert!(text.contains(&format!("pid {pid}) died")), "{text}");
            when - killed
        })
        .collect()
}

#[test]
fn a_killed_rank_is_named_by_all_within_a_second() {
    let kills = std::env::var("CINCH_TEST_KILLS").map_or(6, |text| text.parse().unwrap());
    let mut delays = Vec::new();
    for round in 0..kills {
        let nranks = 4 + round % 3;
        let mut ranks = start(nranks);
        // The hub in one round of three.
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

/// A process that the kernel takes long to bury. Megabytes: `CINCH_TEST_BALLAST`.
#[test]
fn a_large_rank_is_missed_in_time() {
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

/// Connections stay open, only the beats stop: /proc tells. With rank 0 on a host of its own, the
/// others look for it.
#[test]
fn a_dead_rank_whose_connections_stand_is_missed_in_time() {
    for (victim, hosts) in [(0, ["a"; 3]), (2, ["a"; 3]), (2, ["a", "b", "b"])] {
        let id = UniqueId::create_for_one_host(&config()).unwrap().to_hex();
        let spawn = |rank: usize| spawn(&[], &format!("{id} {rank} 3 0 {}", hosts[rank]));
        let mut ranks = joined((0..3).map(spawn).collect());
        ranks[victim].tell("lend");
        ranks[victim].hears("lent");
        let delays = kill_one(&mut ranks, victim);
        println!("rank {victim}, connections stand, hosts {hosts:?}: {delays:?}");
        assert!(
            delays.iter().all(|delay| *delay <= Duration::from_secs(1)),
            "{delays:?}"
        );
    }
}

/// Two network namespaces with a wire between them. Dropped, it takes away what there is of it: of a
/// wire that could not be laid that may be nothing.
struct Wire {
    names: [String; 2],
}

impl Wire {
    /// None where this user may not make any.
    fn lay() -> Option<Wire> {
        let names = ["a", "b"].map(|end| format!("cinch{}{end}", std::process::id()));
        let wire = Wire { names };
        let [a, b] = &wire.names;
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
        made.then_some(wire)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

fn ip(arguments: &str) -> bool {
    let mut command = Command::new("ip");
    command.args(arguments.split(' ')).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[test]
fn a_cut_link_is_an_error_within_five_seconds() {
    let Some(wire) = Wire::lay() else {
        println!("skipped: no network namespaces for this user");
        return;
    };
    let mut config = config();
    config.allow_unauthenticated = true;
    let id = UniqueId::for_address("10.199.0.1", 29_777, &config)
        .unwrap()
        .to_hex();
    let end = |rank: usize| wire.names[usize::from(rank == 2)].as_str();
    let spawn = |rank| {
        let prefix = ["ip", "netns", "exec", end(rank)];
        spawn(&prefix, &format!("{id} {rank} 3 0"))
    };
    let ranks = joined((0..3).map(spawn).collect());
    ranks[0].hears_nothing_of("fault", Duration::from_millis(300));
    let cut = Instant::now();
    assert!(ip(&format!("-n {} link set v0 down", end(2))));
    for (rank, lost) in [(0, 2), (1, 2), (2, 0)] {
        let (when, text) = ranks[rank].hears("fault");
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

#[test]
fn a_stopped_rank_is_named_and_no_failure() {
    for victim in [0, 2] {
        let mut ranks = start(3);
        ranks[victim].signal(Signal::SIGSTOP);
        let watcher = if victim == 0 { 1 } else { 0 };
        let (_, text) = ranks[watcher].hears("notice");
        assert!(
            text.starts_with(&format!("rank {victim} (")) && text.contains("stopped"),
            "{text}"
        );
        ranks[1].hears_nothing_of("fault", Duration::from_millis(1500));
        ranks[victim].signal(Signal::SIGCONT);
        ranks.iter_mut().for_each(|rank| rank.tell("barrier"));
        ranks.iter().for_each(|rank| drop(rank.hears("through")));
        ranks[0].hears_nothing_of("fault", Duration::from_millis(200));
    }
}

#[test]
fn the_hub_may_leave_and_end_first() {
    let mut ranks = start(3);
    ranks[0].tell("leave");
    ranks[0].hears("left");
    drop(ranks[0].child.stdin.take());
    ranks[0].child.wait().unwrap();
    for rank in &ranks[1..] {
        rank.hears_nothing_of("fault", Duration::from_millis(400));
    }
    ranks[1].tell("has_left");
    assert_eq!(ranks[1].hears("has_left").1, "[0]");
    ranks[1].tell("barrier");
    let (_, text) = ranks[1].hears("error");
    assert!(text.contains("rank 0 ("), "{text}");
    // Nobody can tell any more whether rank 2 said goodbye: it counts as has_left.
    ranks[2].signal(Signal::SIGKILL);
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        ranks[1].tell("has_left");
        if ranks[1].hears("has_left").1 == "[0, 2]" {
            break;
        }
        assert!(Instant::now() < until);
    }
}

#[test]
fn a_rank_that_left_may_end_without_ado() {
    let mut ranks = start(3);
    ranks[2].tell("leave");
    ranks[2].hears("left");
    ranks[2].signal(Signal::SIGKILL);
    ranks[0].hears_nothing_of("fault", Duration::from_millis(400));
    ranks[1].tell("has_left");
    assert_eq!(ranks[1].hears("has_left").1, "[2]");
    // The others are watched over as before.
    ranks[1].signal(Signal::SIGKILL);
    assert!(ranks[0].hears("fault").1.contains("rank 1 ("));
}
