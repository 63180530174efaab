//! Stops a rank inside collectives for as long as ten seconds, on one host and between hosts: others are warned,
//! nobody counts as dead, and results have the same bits as ever.
//! `CINCH_TEST_STOPS=20 cargo test --test processes stops -- --nocapture` stops 20 ranks.

use super::rank_group::{self, RankGroup, say};
use crate::support::{Rng, config, launcher, number, seed};
use cinch::comm::Call;
use cinch::mem::{UserBuffers, bytes_of_mut};
use cinch::testing::random_word;
use cinch::types::TransportKind;
use cinch::{CodecSetting, Collective, Communicator, DType, ReduceOp};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const RANKS: usize = 4;
const STOP: Duration = Duration::from_secs(10);
/// Longest time from the stop to the warning of a rank that waits.
const WARNING: Duration = Duration::from_secs(5);
/// Calls between two agreements on the end.
const CALLS_OF_A_TURN: u64 = 32;
const COUNT: usize = 5000;

/// Stops one rank of a job for [`STOP`]. Returns how long the warning took, and the calls of the job.
fn stop_one(round: usize, rng: &mut Rng) -> (Duration, u64) {
    // Without a transport ranks of one host use shared memory.
    let (hosts, transport) = [(1, "auto"), (2, "auto"), (1, "tcp")][round % 3];
    let victim = rng.below(RANKS);
    let delay = Duration::from_micros(rng.below(300_000) as u64);
    let what =
        format!("stop {round}: rank {victim} of {hosts} hosts, {transport}, after {delay:?}");
    let folder = std::env::temp_dir().join(format!("cinch-stops-{}-{round}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let task = |rank| format!("{rank} {hosts} {transport} {}", folder.display());
    let mut ranks = RankGroup::start("stops", &(0..RANKS).map(task).collect::<Vec<_>>());
    ranks.hand_on_id();
    let all: Vec<usize> = (0..RANKS).collect();
    ranks.wait_for("joined", &all);
    std::thread::sleep(delay);
    let pid = ranks.children[victim].id();
    let log = |rank| std::fs::read_to_string(log_file(&folder, rank)).unwrap_or_default();
    let before: Vec<usize> = (0..RANKS).map(|rank| log(rank).len()).collect();
    launcher::signal(pid, "STOP");
    let stopped = Instant::now();
    let name = format!("rank {victim} (");
    let mut warned = None;
    while stopped.elapsed() < STOP {
        let mut logs = all.iter().filter(|&&rank| rank != victim);
        let found = logs.any(|&rank| {
            let text = log(rank);
            let mut lines = text[before[rank]..].lines();
            lines.any(|line| line.contains("warn: ") && line.contains(&name))
        });
        if found {
            warned.get_or_insert(stopped.elapsed());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    launcher::signal(pid, "CONT");
    std::thread::sleep(Duration::from_millis(300));
    ranks.hand(0, "stop");
    // A rank whose call fails, or gives other bits, reports a failure instead.
    let ended = ranks.wait_for("calls", &all);
    assert!(
        ended.iter().all(|line| *line == ended[0]),
        "{what}: {ended:?}"
    );
    let (calls, _) = ended[0].split_once(' ').expect("calls and bits");
    for (rank, child) in ranks.children.iter_mut().enumerate() {
        let status = child.wait().expect("a rank is reaped");
        assert!(status.success(), "{what}: rank {rank} ended with {status}");
    }
    let warned = warned.unwrap_or_else(|| panic!("{what}: no rank was warned"));
    assert!(
        warned <= WARNING,
        "{what}: the warning came after {warned:?}"
    );
    let _ = std::fs::remove_dir_all(&folder);
    (warned, calls.parse().expect("a number"))
}

#[test]
fn stopped_ranks_go_on_with_the_same_bits_and_others_are_warned() {
    let seed = seed();
    let rounds = number("CINCH_TEST_STOPS").unwrap_or(3) as usize;
    let next = AtomicUsize::new(0);
    let begun = Instant::now();
    // Stopped jobs need no core, so many run at once.
    let done: Vec<(Duration, u64)> = std::thread::scope(|scope| {
        let worker = || {
            let mut done = Vec::new();
            loop {
                let round = next.fetch_add(1, Ordering::Relaxed);
                if round >= rounds {
                    return done;
                }
                done.push(stop_one(round, &mut Rng(random_word(seed, round as u64))));
            }
        };
        let workers: Vec<_> = (0..3).map(|_| scope.spawn(worker)).collect();
        let results = workers
            .into_iter()
            .flat_map(|it| it.join().expect("no panic"));
        results.collect()
    });
    assert_eq!(done.len(), rounds);
    println!(
        "{rounds} stops of {STOP:?}: warnings after at most {:?}, {} calls with the same bits on all ranks, {:?}",
        done.iter().map(|done| done.0).max().unwrap_or_default(),
        done.iter().map(|done| done.1).sum::<u64>(),
        begun.elapsed()
    );
}

fn log_file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("log-{rank}"))
}

// ---- in a rank ----

/// Makes calls until rank 0 reads a line.
pub fn rank_process(task: &str) {
    rank_group::run(|| run_rank(task));
}

fn run_rank(task: &str) -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<&str> = task.splitn(4, ' ').collect();
    let (rank, hosts): (usize, usize) = (words[0].parse()?, words[1].parse()?);
    let mut config = config(TransportKind::Tcp);
    if words[2] == "auto" {
        config.transport = None;
    }
    config.host_id = Some(format!("host {}", rank % hosts));
    config.log_file = Some(log_file(Path::new(words[3]), rank));
    let id = rank_group::receive_id(rank, &config)?;
    let comm = Communicator::init(&id, rank, RANKS, config)?;
    say("joined ");
    let stops: &'static AtomicBool = Box::leak(Box::default());
    if rank == 0 {
        std::thread::spawn(move || {
            // The end of the parent ends the calls, too.
            let _ = rank_group::receive_line();
            stops.store(true, Ordering::Relaxed);
        });
    }
    let (calls, bits) = work(&comm, stops)?;
    say(&format!("calls {calls} {bits}"));
    comm.finalize()?;
    Ok(())
}

fn sum(comm: &Communicator, data: &mut [f32], codec: CodecSetting) -> Result<(), cinch::Error> {
    let mut call = Call::new(Collective::AllReduce, DType::F32, data.len());
    call.codec = Some(codec);
    let length = size_of_val(data);
    comm.call(&call, UserBuffers::in_place(bytes_of_mut(data), 0, length)?)
        .map(drop)
}

/// Makes calls whose results every rank knows, and agrees on the end. Returns the number of calls, and a number that
/// stands for the bits of the lossy sum.
fn work(comm: &Communicator, stops: &AtomicBool) -> Result<(u64, u64), Box<dyn std::error::Error>> {
    let (raw, lossy): (CodecSetting, CodecSetting) = ("raw".parse()?, "linear8".parse()?);
    let mut first: Option<Vec<f32>> = None;
    let mut calls = 0;
    loop {
        for _ in 0..CALLS_OF_A_TURN / 2 {
            let own = |at: usize| (at % 997 + comm.rank()) as f32;
            let mut exact: Vec<f32> = (0..COUNT).map(own).collect();
            sum(comm, &mut exact, raw)?;
            let of_ranks = RANKS * (RANKS - 1) / 2;
            for (at, &found) in exact.iter().enumerate() {
                if found != (RANKS * (at % 997) + of_ranks) as f32 {
                    return Err(format!("call {calls}: {found} at {at}").into());
                }
            }
            let mut coded: Vec<f32> = (0..COUNT).map(own).collect();
            sum(comm, &mut coded, lossy)?;
            if first.get_or_insert_with(|| coded.clone()) != &coded {
                return Err(
                    format!("call {calls}: a sum in 8 bits has other bits than before").into(),
                );
            }
            calls += 2;
        }
        let mut all = [u32::from(stops.load(Ordering::Relaxed))];
        comm.all_reduce_in_place(&mut all, ReduceOp::Max)?;
        if all[0] != 0 {
            let bits = first
                .iter()
                .flatten()
                .map(|value| u64::from(value.to_bits()));
            return Ok((calls, bits.fold(0, random_word)));
        }
    }
}
