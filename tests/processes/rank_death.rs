//! Kills rank processes: every survivor must report an error that names the killed rank, and must release all
//! its resources.
//! `CINCH_TEST_KILLS=200 cargo test --test processes rank_death -- --nocapture` kills 200 ranks.
//! `scripts/test-net` starts the same rank processes on several hosts.

use super::rank_group::{self, RankGroup, holdings, say};
use crate::support::{Rng, config, number, seed};
use cinch::comm::Call;
use cinch::mem::UserBuffers;
use cinch::testing::on_rdma_devices;
use cinch::types::TransportKind;
use cinch::{CodecSetting, Collective, Communicator, DType};
use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Time limits until survivors report the error: for the slowest survivor, and for the median over
/// survivors.
const WORST: Duration = Duration::from_secs(1);
const WORST_OF_RDMA: Duration = Duration::from_secs(2);
const MEDIAN: Duration = Duration::from_millis(300);
// ---- the parent ----

fn unix_time() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a clock after 1970")
}

/// Kills one rank. Returns how long each survivor took to report the error.
fn kill_one(round: u64, rng: &mut Rng) -> (TransportKind, Vec<Duration>) {
    let transport = match on_rdma_devices() {
        true => TransportKind::Rdma,
        false => rng.pick(&[TransportKind::Shm, TransportKind::Tcp]),
    };
    // Emulated RDMA devices run in a virtual machine with two slow cores: use few ranks.
    let nranks = if on_rdma_devices() {
        4
    } else {
        4 + rng.below(5)
    };
    let victim = rng.below(nranks);
    let delay = Duration::from_micros(rng.below(200_000) as u64);
    let what = format!("kill {round}: rank {victim} of {nranks} over {transport} after {delay:?}");

    let seed = rng.next();
    let tasks = (0..nranks).map(|rank| format!("{rank} {nranks} {transport} {seed}"));
    let mut ranks = RankGroup::start("rank_death", &tasks.collect::<Vec<_>>());
    ranks.hand_on_id();
    let everybody: Vec<usize> = (0..nranks).collect();
    ranks.wait_for("joined", &everybody);
    std::thread::sleep(delay);
    let pid = ranks.children[victim].id();
    let killed = unix_time();
    ranks.children[victim].kill().expect("the victim lives");
    ranks.children[victim].wait().expect("the victim is reaped");

    let survivors: Vec<usize> = everybody
        .into_iter()
        .filter(|&rank| rank != victim)
        .collect();
    let errors = ranks.wait_for("error", &survivors);
    let mut times = Vec::new();
    for &rank in &survivors {
        let (at, error) = errors[rank].split_once(' ').expect("time and error");
        let named = error.starts_with("Remote ")
            && error.contains(&format!("rank {victim} (host "))
            && error.contains(&format!("pid {pid})"));
        assert!(named, "{what} (pid {pid}): rank {rank} reports {error}");
        times.push(Duration::from_nanos(at.parse().expect("nanoseconds")).saturating_sub(killed));
    }
    ranks.expect_clean_ends(&survivors, &what);
    let worst = times.iter().max().expect("survivors");
    let limit = match transport {
        TransportKind::Rdma => WORST_OF_RDMA,
        _ => WORST,
    };
    assert!(*worst <= limit, "{what}: a survivor knew after {worst:?}");
    (transport, times)
}

fn shared_memory_names() -> BTreeSet<String> {
    let Ok(entries) = std::fs::read_dir("/dev/shm") else {
        return BTreeSet::new();
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| name.contains("cinch")).collect()
}

#[test]
fn survivors_name_the_killed_rank_in_time_and_leave_nothing() {
    let mut rng = Rng(seed());
    let before = shared_memory_names();
    let mut by_transport = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..number("CINCH_TEST_KILLS").unwrap_or(10) {
        let (transport, times) = kill_one(round, &mut rng);
        let place = match transport {
            TransportKind::Tcp => 1,
            TransportKind::Rdma => 2,
            _ => 0,
        };
        by_transport[place].extend(times);
    }
    // Tests of containers, which run at once, have names there for a while.
    let until = Instant::now() + Duration::from_secs(30);
    while !shared_memory_names().is_subset(&before) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(50));
    }
    let left: Vec<String> = shared_memory_names().difference(&before).cloned().collect();
    assert!(left.is_empty(), "names in /dev/shm: {left:?}");
    for (name, times) in ["shm", "tcp", "rdma"].iter().zip(&mut by_transport) {
        times.sort();
        if let Some(worst) = times.last() {
            let median = times[times.len() / 2];
            println!(
                "{name}: {} survivors, median {median:?}, worst {worst:?}",
                times.len()
            );
            assert!(
                median
                    <= if *name == "rdma" {
                        WORST_OF_RDMA
                    } else {
                        MEDIAN
                    },
                "{name}: the median survivor knew after {median:?}"
            );
        }
    }
}

// ---- a rank ----

/// Runs one rank until a call fails.
pub fn rank_process(task: &str) {
    rank_group::run(|| run_rank(task));
}

fn run_rank(task: &str) -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<&str> = task.split(' ').collect();
    let (rank, nranks): (usize, usize) = (words[0].parse()?, words[1].parse()?);
    let mut config = config(TransportKind::Tcp);
    config.transport = match words[2] {
        "auto" => None,
        name => Some(TransportKind::from_name(name).ok_or("no such transport")?),
    };
    let mut rng = Rng(words[3].parse()?);

    let before = holdings();
    let id = rank_group::receive_id(rank, &config)?;
    {
        let comm = Communicator::init(&id, rank, nranks, config)?;
        say("joined ");
        let error = work(&comm, &mut rng);
        let (now, kind) = (unix_time().as_nanos(), error.kind());
        say(&format!("error {now} {kind:?} {}", error.message()));
    }
    rank_group::report_holdings(&before);
    Ok(())
}

/// Makes random calls, equal on all ranks, until a call fails. Returns the call's error.
fn work(comm: &Communicator, rng: &mut Rng) -> cinch::Error {
    const LARGEST: usize = 100_000;
    let codecs = ["raw", "linear8", "dynamic8"].map(|text| text.parse::<CodecSetting>().ok());
    let input = vec![0x3fu8; LARGEST * comm.nranks() * 4];
    let mut output = vec![0u8; input.len()];
    loop {
        let collective = rng.pick(&[
            Collective::AllReduce,
            Collective::AllReduce,
            Collective::AllGather,
            Collective::ReduceScatter,
            Collective::Broadcast,
            Collective::AllToAll,
        ]);
        let largest = rng.pick(&[100, 5000, LARGEST]);
        let mut call = Call::new(collective, DType::F32, 1 + rng.below(largest));
        call.codec = rng.pick(&codecs);
        if collective == Collective::Broadcast {
            call.root = rng.below(comm.nranks());
        }
        let is_root = comm.rank() == call.root;
        let bytes = |extent: cinch::types::Extent| {
            extent.elements(call.count, comm.nranks()).unwrap_or(0) * 4
        };
        let ins = &input[..bytes(collective.input_extent(is_root))];
        let outs = &mut output[..bytes(collective.output_extent(is_root))];
        if let Err(error) = comm.call(&call, UserBuffers::new(ins, outs)) {
            return error;
        }
    }
}
