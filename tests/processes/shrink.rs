//! Kills several ranks, also while the others shrink: every attempt of a survivor to shrink must end in time,
//! with an error that names a killed rank or with a communicator that gives the right bits.
//! `CINCH_TEST_SHRINKS=50 cargo test --test processes shrink -- --nocapture` makes 50 trials.

use super::child;
use super::rank_group::{self, RankGroup, holdings, say};
use crate::support::{Rng, config, number, seed};
use cinch::types::TransportKind;
use cinch::{Communicator, Config, ErrorKind, ReduceOp, UniqueId};
use std::collections::BTreeSet;
use std::io::ErrorKind::ConnectionReset;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Longest time of an attempt to shrink.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest times in milliseconds between two kills: during a shrink, or after it.
const KILL_INTERVALS: [usize; 3] = [2, 15, 60];
/// Elements of a sum.
const COUNT: usize = 4000;

/// A set-up of ranks, and the ranks that are killed.
struct Trial {
    nranks: usize,
    transport: TransportKind,
    hosts: usize,
    /// Ranks in the order in which they are killed, each with its time after the earlier kill.
    kills: Vec<(usize, Duration)>,
}

impl Trial {
    fn random(number: u64, rng: &mut Rng) -> Trial {
        let nranks = 4 + rng.below(5);
        let hosts = 1 + rng.below(2);
        let transport = match hosts {
            1 => rng.pick(&[TransportKind::Shm, TransportKind::Tcp]),
            _ => TransportKind::Tcp,
        };
        let mut ranks: Vec<usize> = (0..nranks).collect();
        let mut kills = Vec::new();
        for at in 0..1 + rng.below(nranks - 2) {
            // The root dies in at least every second trial: as the first victim, or as the second.
            let root = at == (number / 2 % 2) as usize && number.is_multiple_of(2) && ranks[0] == 0;
            let victim = ranks.remove(if root { 0 } else { rng.below(ranks.len()) });
            let most = if at == 0 {
                100
            } else {
                rng.pick(&KILL_INTERVALS)
            };
            kills.push((victim, Duration::from_micros(rng.below(1000 * most) as u64)));
        }
        Trial {
            nranks,
            transport,
            hosts,
            kills,
        }
    }

    fn survivors(&self) -> Vec<usize> {
        let is_killed = |rank: usize| self.kills.iter().any(|(victim, _)| *victim == rank);
        (0..self.nranks).filter(|&rank| !is_killed(rank)).collect()
    }

    /// Runs the trial, and returns the times of the failed and of the successful attempts to shrink.
    fn run(&self, what: &str) -> [Vec<Duration>; 2] {
        let (n, left) = (self.nranks, self.survivors().len());
        let (transport, hosts) = (self.transport, self.hosts);
        let tasks = (0..n).map(|rank| format!("{rank} {n} {left} {transport} {}", rank % hosts));
        let mut ranks = RankGroup::start("shrink", &tasks.collect::<Vec<_>>());
        ranks.hand_on_id();
        ranks.wait_for("joined", &(0..n).collect::<Vec<_>>());
        for &(victim, delay) in &self.kills {
            std::thread::sleep(delay);
            ranks.children[victim].kill().expect("the victim lives");
            ranks.children[victim].wait().expect("the victim is reaped");
        }
        let survivors = self.survivors();
        let done = ranks.wait_for("done", &survivors);
        for &rank in &survivors {
            let members = format!("{survivors:?}");
            assert_eq!(
                done[rank], members,
                "{what}: ranks of {rank}'s communicator"
            );
        }
        let victims = self
            .kills
            .iter()
            .map(|(victim, _)| ranks.children[*victim].id());
        let victims: Vec<String> = victims.map(|pid| format!("pid {pid})")).collect();
        let mut times = [Vec::new(), Vec::new()];
        for (rank, line) in ranks.lines("attempt") {
            let (nanoseconds, outcome) = line.split_once(' ').expect("time and outcome");
            let time = Duration::from_nanos(nanoseconds.parse().expect("nanoseconds"));
            assert!(
                time <= ATTEMPT_TIMEOUT,
                "{what}: {rank} took {time:?}: {outcome}"
            );
            let named = victims.iter().any(|pid| outcome.contains(pid));
            assert!(outcome == "ok" || named, "{what}: {rank} reports {outcome}");
            times[usize::from(outcome == "ok")].push(time);
        }
        ranks.expect_clean_ends(&survivors, what);
        times
    }
}

#[test]
fn ranks_that_die_before_and_while_others_shrink_are_errors_in_time() {
    let mut rng = Rng(seed());
    let mut all = [Vec::new(), Vec::new()];
    let trials = number("CINCH_TEST_SHRINKS").unwrap_or(10);
    for number in 0..trials {
        let trial = Trial::random(number, &mut rng);
        let (n, transport, hosts) = (trial.nranks, trial.transport, trial.hosts);
        let what = format!(
            "shrink {number}: {n} ranks on {hosts} hosts over {transport}, kills {:?}",
            trial.kills
        );
        println!("{what}");
        let times = trial.run(&what);
        for (all, times) in all.iter_mut().zip(times) {
            all.extend(times);
        }
    }
    println!("{trials} of {trials} trials:");
    for (name, times) in ["errors", "successes"].iter().zip(&mut all) {
        times.sort();
        if let Some(worst) = times.last() {
            let median = times[times.len() / 2];
            println!("{} {name}: median {median:?}, worst {worst:?}", times.len());
        }
    }
}

/// Ranks 1 and 2 try for half a second each time. Rank 0, which serves the rendezvous, comes after several of
/// their attempts.
#[test]
fn retries_with_uneven_patience_meet() {
    let tasks = (0..4).map(|rank| format!("patience {rank}"));
    let mut ranks = RankGroup::start("shrink", &tasks.collect::<Vec<_>>());
    ranks.hand_on_id();
    ranks.wait_for("joined", &[0, 1, 2, 3]);
    ranks.children[3].kill().expect("the victim lives");
    let done = ranks.wait_for("done", &[0, 1, 2]);
    for (rank, outcome) in done[..3].iter().enumerate() {
        let (attempts, nanoseconds) = outcome.split_once(' ').expect("attempts and time");
        let time = Duration::from_nanos(nanoseconds.parse().expect("nanoseconds"));
        println!("rank {rank}: {attempts} attempts, {time:?} in the last");
        assert!(rank == 0 || attempts.parse::<usize>().expect("a number") > 2);
        assert!(time <= ATTEMPT_TIMEOUT, "rank {rank} took {time:?}");
    }
}

/// Unauthenticated peers fill no queue while no rendezvous is under way, and delay none.
#[test]
fn listener_for_a_later_shrink_drops_connections() {
    child::alone(|| {
        let connections = number("CINCH_TEST_HOSTILE").unwrap_or(1000) as usize;
        let before = sockets_that_listen();
        let (at_rest, left) = (Barrier::new(4), Barrier::new(4));
        let config = config(TransportKind::Shm);
        let id = UniqueId::create(&config).expect("a unique id");
        let rank_main = &|rank: usize| {
            let comm = Communicator::init(&id, rank, 3, config.clone()).expect("three ranks");
            comm.prepare_to_shrink().expect("all ranks exist");
            at_rest.wait();
            left.wait();
            if rank == 0 {
                return None;
            }
            let begun = Instant::now();
            let pair = comm.shrink(&[0], config.clone()).expect("two are left");
            let time = begun.elapsed();
            let mut sum = [rank as i64];
            pair.all_reduce_in_place(&mut sum, ReduceOp::Sum)
                .expect("both call");
            assert_eq!(sum, [3]);
            Some(time)
        };
        let times = std::thread::scope(|scope| {
            let ranks = [0, 1, 2].map(|rank| scope.spawn(move || rank_main(rank)));
            at_rest.wait();
            let listeners: Vec<_> = sockets_that_listen().difference(&before).copied().collect();
            assert_eq!(listeners.len(), 3);
            let descriptors = open_descriptors();
            // Each connection fills its buffer, and then waits until the rank closes it.
            let mut crowd: Vec<TcpStream> = Vec::new();
            for at in 0..connections {
                let mut stream = TcpStream::connect(listeners[at % 3]).expect("it listens");
                stream
                    .set_write_timeout(Some(Duration::from_millis(1)))
                    .expect("a timeout");
                let _ = stream.write(&[0x5a; 16 << 10]);
                crowd.push(stream);
            }
            for stream in &mut crowd {
                stream
                    .set_read_timeout(Some(Duration::from_secs(5)))
                    .expect("a timeout");
                let end = stream.read(&mut [0]);
                let closed = matches!(&end, Ok(0))
                    || end.is_err_and(|error| error.kind() == ConnectionReset);
                assert!(closed, "a connection is still open");
            }
            drop(crowd);
            assert_eq!(open_descriptors(), descriptors);
            left.wait();
            ranks.map(|rank| rank.join().expect("a rank"))
        });
        let times: Vec<Duration> = times.into_iter().flatten().collect();
        println!("{connections} connections, then a shrink in {times:?}");
        assert!(times.iter().all(|time| *time <= ATTEMPT_TIMEOUT));
    });
}

/// Returns the addresses at which TCP sockets of this process listen.
fn sockets_that_listen() -> BTreeSet<SocketAddr> {
    let links = std::fs::read_dir("/proc/self/fd")
        .expect("own descriptors")
        .flatten();
    let targets = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    let own: Vec<String> = targets.map(|target| target.display().to_string()).collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").expect("TCP sockets");
    let sockets = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let is_own = own.contains(&format!("socket:[{}]", fields[9]));
        let (ip, port) = fields[1].split_once(':')?;
        let ip = u32::from_str_radix(ip, 16).ok()?.to_le_bytes();
        let port = u16::from_str_radix(port, 16).ok()?;
        // State 0A is LISTEN.
        (is_own && fields[3] == "0A").then(|| SocketAddr::from((ip, port)))
    });
    sockets.collect()
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .expect("own descriptors")
        .count()
}

// ---- a rank ----

/// Makes calls, and shrinks after each failure, until the communicator has the surviving ranks.
pub fn rank_process(task: &str) {
    rank_group::run(|| match task.strip_prefix("patience ") {
        Some(rank) => run_patient_rank(rank.parse()?),
        None => run_rank(task),
    });
}

/// Shrinks again and again until the other ranks do, too.
fn run_patient_rank(rank: usize) -> Result<(), Box<dyn std::error::Error>> {
    let mut config = config(TransportKind::Shm);
    let id = rank_group::receive_id(rank, &config)?;
    let comm = Communicator::init(&id, rank, 4, config.clone())?;
    comm.prepare_to_shrink()?;
    say("joined ");
    while comm.async_error().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    match rank {
        0 => std::thread::sleep(Duration::from_secs(2)),
        _ => config.init_timeout = Duration::from_millis(500),
    }
    for attempt in 1.. {
        let begun = Instant::now();
        match comm.shrink(&[3], config.clone()) {
            Ok(left) => {
                let time = begun.elapsed().as_nanos();
                let mut sum = [rank as i64];
                left.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
                assert_eq!(sum, [3]);
                say(&format!("done {attempt} {time}"));
                break;
            }
            Err(error) if error.kind() == ErrorKind::Timeout => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn run_rank(task: &str) -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<&str> = task.split(' ').collect();
    let (rank, nranks, left): (usize, usize, usize) =
        (words[0].parse()?, words[1].parse()?, words[2].parse()?);
    let transport = TransportKind::from_name(words[3]).ok_or("no such transport")?;
    let mut config = config(transport);
    config.host_id = Some(words[4].into());
    let before = holdings();
    let id = rank_group::receive_id(rank, &config)?;
    let mut comm = Communicator::init(&id, rank, nranks, config.clone())?;
    comm.prepare_to_shrink()?;
    say("joined ");
    let members = loop {
        match work(&comm, rank, left) {
            Ok(members) => break members,
            Err(error) if matches!(error.kind(), ErrorKind::Remote | ErrorKind::Aborted) => {}
            Err(error) => return Err(error.into()),
        }
        comm = shrink(&comm, &config)?;
    };
    say(&format!("done {members:?}"));
    comm.finalize()?;
    drop(comm);
    rank_group::report_holdings(&before);
    Ok(())
}

/// Shrinks until an attempt succeeds, and reports the time and outcome of each attempt.
fn shrink(comm: &Communicator, config: &Config) -> Result<Communicator, cinch::Error> {
    loop {
        let begun = Instant::now();
        let made = comm.shrink(&[], config.clone());
        let time = begun.elapsed().as_nanos();
        match made {
            Ok(made) => {
                say(&format!("attempt {time} ok"));
                return Ok(made);
            }
            Err(error) => {
                say(&format!("attempt {time} {error}"));
                if !matches!(error.kind(), ErrorKind::Remote) {
                    return Err(error);
                }
            }
        }
    }
}

/// Compares sums with the right bits until a call fails or `left` ranks have summed. Returns these ranks, by
/// their numbers in the first communicator.
fn work(comm: &Communicator, rank: usize, left: usize) -> Result<Vec<usize>, cinch::Error> {
    let n = comm.nranks();
    let mut members = vec![0u64; n];
    comm.all_gather(&[rank as u64], &mut members)?;
    let value = |member: u64, at: usize| (member * 7919 + at as u64) as i64;
    loop {
        let mut sum: Vec<i64> = (0..COUNT).map(|at| value(rank as u64, at)).collect();
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
        for (at, found) in sum.iter().enumerate() {
            let right: i64 = members.iter().map(|&member| value(member, at)).sum();
            assert_eq!(*found, right, "element {at} of the sum of {members:?}");
        }
        if n == left {
            return Ok(members.iter().map(|&member| member as usize).collect());
        }
    }
}
