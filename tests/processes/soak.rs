//! Random calls on four rank processes, which are killed and replaced all the time. Every value is checked, and
//! processes that live long may not grow.
//! `scripts/soak --minutes 120` runs it for two hours; `--pause 100` leaves most of the processor to other work.

#![allow(unsafe_code)] // fork

use super::rank_group::{self, RankGroup, say};
use crate::support::{Rng, config, number, seed};
use cinch::comm::{Call, Group};
use cinch::mem::UserBuffers;
use cinch::testing::{Data, Pattern, Problem, random_word};
use cinch::types::TransportKind;
use cinch::{Collective, Communicator, Config, DType, ErrorKind, ReduceOp};
use nix::libc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const RANKS: usize = 4;
/// Seconds of the test without `CINCH_TEST_SOAK`.
const DEFAULT_SECONDS: u64 = 6;
/// Calls between two agreements on the end.
const CALLS_OF_A_TURN: u64 = 32;
/// Rounds after which a process has allocated what it keeps.
const WARM_UP_ROUNDS: u64 = 8;
/// Bytes by which a process may grow at most: of any length, and in an hour.
const GROWTH: [f64; 2] = [4e6, 1e6];
/// Largest RMS difference of a sum through a lossy codec; inputs are of N(0, 1). A sum that lacks a rank differs
/// by 1.
const LOSSY: f64 = 0.5;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Counts of one process: calls of its last round, rounds, bytes of resident memory now and after the first rounds, and
/// seconds between both.
#[derive(Debug)]
struct Counts {
    calls: u64,
    rounds: u64,
    grown: f64,
    seconds: f64,
}

impl Counts {
    fn parse(line: &str) -> Counts {
        let numbers: Vec<f64> = line.split(' ').map(|it| it.parse().unwrap()).collect();
        Counts {
            calls: numbers[0] as u64,
            rounds: numbers[1] as u64,
            grown: numbers[2],
            seconds: numbers[3],
        }
    }
}

#[test]
fn calls_with_kills_and_replacements_stay_right() {
    let length = Duration::from_secs(number("CINCH_TEST_SOAK").unwrap_or(DEFAULT_SECONDS));
    let seed = seed();
    println!("seed {seed}");
    let mut rng = Rng(seed);
    let begun = Instant::now();
    let (mut calls, mut recoveries, mut jobs, mut worst) = (0u64, 0, 0, Duration::ZERO);
    let mut longest: Option<Counts> = None;
    while begun.elapsed() < length || jobs < 2 {
        let transport = [TransportKind::Shm, TransportKind::Tcp][jobs % 2];
        let until = Instant::now() + (length / 2).min(Duration::from_secs(900));
        let task = |kind: &str, rank: usize, seed: u64| {
            format!("{kind} {rank} {transport} {seed} {}", length.as_secs())
        };
        let tasks = (0..RANKS).map(|rank| task("first", rank, rng.next()));
        let tasks: Vec<String> = tasks.collect();
        let mut group = RankGroup::start("soak", &tasks);
        group.hand_on_id();
        let mut members: Vec<usize> = (0..RANKS).collect();
        group.wait_for("works", &members);
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(100 + rng.below(400) as u64));
            // In one job of each transport in four the first process lives, so that its memory shows a growth.
            let first = usize::from(jobs % 4 == 0 || jobs % 4 == 3);
            let victim = first + rng.below(RANKS - first);
            let killed = Instant::now();
            group.kill(members.remove(victim));
            let id = group.wait_for("id", &[members[0]])[members[0]].clone();
            let new = group.add("soak", &task("new", RANKS - 1, rng.next()), &[]);
            group.hand(new, &id);
            members.push(new);
            let said = group.wait_for("works", &members);
            for &member in &members {
                calls += said[member].parse::<u64>().unwrap();
            }
            worst = worst.max(killed.elapsed());
            recoveries += 1;
        }
        members
            .iter()
            .for_each(|&member| group.hand(member, "stop"));
        let said = group.wait_for("ended", &members);
        let counts = members.iter().map(|&member| Counts::parse(&said[member]));
        let counts: Vec<Counts> = counts.collect();
        calls += counts.iter().map(|counts| counts.calls).sum::<u64>();
        for counts in counts {
            if longest.as_ref().is_none_or(|it| it.rounds < counts.rounds) {
                longest = Some(counts);
            }
        }
        jobs += 1;
    }
    let longest = longest.expect("a job ran");
    println!(
        "{calls} checked calls of ranks that lived on, {recoveries} recoveries (worst {worst:.2?}) in {jobs} jobs; the \
         process with most rounds: {longest:?}"
    );
    let limit = GROWTH[0] + GROWTH[1] * longest.seconds / 3600.0;
    assert!(
        longest.grown <= limit,
        "{longest:?} grew by more than {limit} bytes"
    );
}

// ---- in a rank ----

/// Makes calls until the parent hands "stop"; replaces ranks that die.
pub fn rank_process(task: &str) {
    let words: Vec<&str> = task.split(' ').collect();
    let seconds: u64 = words[4].parse().expect("seconds");
    let lifetime = Duration::from_secs(60 + seconds);
    rank_group::run_for(lifetime, || work(&words));
}

fn work(words: &[&str]) -> Outcome<()> {
    let rank: usize = words[1].parse()?;
    let kind = TransportKind::from_name(words[2]).ok_or("no such transport")?;
    let (mut own, config): (Rng, Config) = (Rng(words[3].parse()?), config(kind));
    let id = rank_group::receive_id(rank, &config)?;
    let mut comm = Communicator::init(&id, rank, RANKS, config.clone())?;
    // A new rank has done so in the grow.
    if words[0] == "first" {
        comm.prepare_to_shrink()?;
    }
    let pause = Duration::from_millis(number("CINCH_TEST_SOAK_PAUSE").unwrap_or(0));
    let stops: &'static AtomicBool = Box::leak(Box::default());
    std::thread::spawn(move || {
        let line = rank_group::receive_line();
        stops.store(line.is_ok_and(|line| line == "stop"), Ordering::Relaxed);
    });
    let mut memory = Memory::default();
    // Calls of the last round.
    let mut calls = 0;
    for rounds in 0.. {
        memory.note(rounds);
        say(&format!("works {calls}"));
        let mut number = 0;
        let error = loop {
            match turn(&comm, own.next(), &mut number, stops) {
                Ok(true) => {
                    calls = number;
                    let (grown, seconds) = memory.growth();
                    comm.finalize()?;
                    say(&format!("ended {calls} {rounds} {grown} {seconds}"));
                    return Ok(());
                }
                Ok(false) => std::thread::sleep(pause),
                Err(error) => break error,
            }
        };
        calls = number;
        if error.kind() != ErrorKind::Remote {
            return Err(error.into());
        }
        let left = comm.shrink(&[], config.clone())?;
        if left.rank() == 0 {
            say(&format!("id {}", left.grow_id()?.to_hex()));
        }
        comm = left.grow(RANKS, config.clone())?;
    }
    Ok(())
}

/// Makes calls by the seed of rank 0, then agrees with the other ranks on the end. Returns whether all stop.
fn turn(
    comm: &Communicator,
    seed: u64,
    number: &mut u64,
    stops: &AtomicBool,
) -> Result<bool, cinch::Error> {
    let mut seed = [if comm.rank() == 0 { seed } else { 0 }];
    comm.all_reduce_in_place(&mut seed, ReduceOp::Max)?;
    for _ in 0..CALLS_OF_A_TURN {
        let mut rng = Rng(random_word(seed[0], *number));
        match rng.below(200) {
            0 => split(comm)?,
            1 => fork(),
            2..20 => group(comm, &mut rng)?,
            _ => single(comm, &mut rng)?,
        }
        *number += 1;
    }
    let mut all = [u32::from(stops.load(Ordering::Relaxed))];
    comm.all_reduce_in_place(&mut all, ReduceOp::Min)?;
    Ok(all == [1])
}

fn split(comm: &Communicator) -> Result<(), cinch::Error> {
    let part = comm.split(Some((comm.rank() % 2) as u32), 0)?;
    let part = part.expect("every rank has a colour");
    let mut sum = [comm.rank() as i64];
    part.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
    assert_eq!(sum, [[2, 4][comm.rank() % 2]]);
    part.finalize()
}

/// Forks a child that ends at once.
fn fork() {
    // SAFETY: the child calls `_exit` only, which is safe after a fork of a process with threads.
    match unsafe { libc::fork() } {
        // SAFETY: as above.
        0 => unsafe { libc::_exit(0) },
        child => {
            let mut status = -1;
            // SAFETY: the child is this process's, and `status` is writable.
            let reaped = unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!((reaped, status), (child, 0));
        }
    }
}

/// A call with its inputs, which all ranks know.
struct Drawn {
    call: Call,
    problem: Problem,
    inputs: Vec<Vec<u8>>,
    output: Vec<u8>,
}

impl Drawn {
    fn new(comm: &Communicator, rng: &mut Rng) -> Drawn {
        let collective = rng.pick(&Collective::ALL);
        let collective = match collective {
            Collective::SendRecv => Collective::AllReduce,
            other => other,
        };
        let dtype = rng.pick(&[DType::F32, DType::F32, DType::F16, DType::I32, DType::F64]);
        let count = match rng.below(8) {
            0 => rng.below(3),
            1 => rng.below(60_000),
            _ => rng.below(3000),
        };
        let mut call = Call::new(collective, dtype, count);
        call.op = rng.pick(&[ReduceOp::Sum, ReduceOp::Max, ReduceOp::Sum]);
        call.root = rng.below(comm.nranks());
        if dtype == DType::F32 && call.op == ReduceOp::Sum && rng.below(3) == 0 {
            let codec = rng.pick(&["linear8", "dynamic8", "cast16", "minmax8", "fp8_e4m3"]);
            call.codec = Some(codec.parse().expect("a codec"));
        }
        let problem = Problem {
            op: call.op,
            root: call.root,
            ..Problem::new(collective, dtype, comm.nranks(), count)
        };
        let data = Data {
            pattern: Pattern::Gaussian,
            dtype,
            seed: rng.next(),
        };
        let ranks = 0..comm.nranks();
        let inputs = ranks.map(|rank| data.vec(rank, problem.input_elements(rank)));
        Drawn {
            inputs: inputs.collect(),
            output: vec![0; problem.output_elements(comm.rank()) * dtype.size()],
            call,
            problem,
        }
    }

    fn check(&self, comm: &Communicator) {
        let is_lossy = self.call.codec.is_some();
        let extra = if is_lossy { f64::INFINITY } else { 0.0 };
        let found = self
            .problem
            .check(&self.inputs, comm.rank(), &self.output, extra);
        let found = found.expect("a possible problem");
        let rms = (found.error_squares / found.elements.max(1) as f64).sqrt();
        let right = found.wrong == 0 && found.max_abs_err.is_finite() && rms < LOSSY;
        assert!(right, "{:?}: {found:?}", self.call);
    }
}

fn single(comm: &Communicator, rng: &mut Rng) -> Result<(), cinch::Error> {
    let mut drawn = Drawn::new(comm, rng);
    let input = &drawn.inputs[comm.rank()];
    comm.call(&drawn.call, UserBuffers::new(input, &mut drawn.output))?;
    drawn.check(comm);
    Ok(())
}

fn group(comm: &Communicator, rng: &mut Rng) -> Result<(), cinch::Error> {
    let mut all: Vec<Drawn> = (0..1 + rng.below(5))
        .map(|_| Drawn::new(comm, rng))
        .collect();
    let mut group = Group::new();
    for drawn in &mut all {
        let input = &drawn.inputs[comm.rank()];
        group.add(
            comm,
            &drawn.call,
            UserBuffers::new(input, &mut drawn.output),
        )?;
    }
    group.run()?;
    all.iter().for_each(|drawn| drawn.check(comm));
    Ok(())
}

/// Resident memory of this process after the first rounds.
#[derive(Default)]
struct Memory {
    first: Option<(f64, Instant)>,
}

impl Memory {
    fn note(&mut self, rounds: u64) {
        if rounds == WARM_UP_ROUNDS {
            self.first = Some((resident_bytes(), Instant::now()));
        }
    }

    /// Returns the growth in bytes and the seconds in which it came about; zeros before the end of the first
    /// rounds.
    fn growth(&self) -> (f64, f64) {
        self.first.map_or((0.0, 0.0), |(bytes, since)| {
            (resident_bytes() - bytes, since.elapsed().as_secs_f64())
        })
    }
}

/// Returns the resident memory of this process alone, without what the allocator holds back. Pages of shared slots
/// become resident when a message first uses them.
fn resident_bytes() -> f64 {
    // SAFETY: the call has no preconditions.
    unsafe { libc::malloc_trim(0) };
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let mut pages = statm.split(' ').skip(1).map(|pages| pages.parse::<f64>());
    let (Some(Ok(resident)), Some(Ok(shared))) = (pages.next(), pages.next()) else {
        panic!("/proc/self/statm: {statm}");
    };
    (resident - shared) * 4096.0
}
