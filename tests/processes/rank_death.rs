//! Kills rank processes: every survivor must report an error that names the killed rank, and must release all
//! its resources.
//! `CINCH_TEST_KILLS=200 cargo test --test processes rank_death -- --nocapture` kills 200 ranks.
//! `scripts/test-net` starts the same rank processes on several hosts.

use super::child;
use crate::support::{Rng, config, number, seed};
use cinch::comm::Call;
use cinch::mem::UserBuffers;
use cinch::testing::on_rdma_devices;
use cinch::types::TransportKind;
use cinch::{CodecSetting, Collective, Communicator, DType, UniqueId};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Time limits until survivors report the error: for the slowest survivor, and for the median over
/// survivors.
const WORST: Duration = Duration::from_secs(1);
const WORST_OF_RDMA: Duration = Duration::from_secs(2);
const MEDIAN: Duration = Duration::from_millis(300);
/// Time after which a step of the test itself counts as failed.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time after which a rank process exits, even if its parent is gone.
const CHILD_LIFETIME: Duration = Duration::from_secs(60);
/// Prefix of the lines of a rank process; it separates them from lines that the test harness
/// prints.
const MARK: &str = "@@";

// ---- the parent ----

/// Rank processes. Dropping this value kills and reaps them.
struct Ranks {
    children: Vec<Child>,
    inputs: Vec<ChildStdin>,
    said: Receiver<(usize, String)>,
    /// Lines of ranks that arrived before the test waited for them.
    backlog: Vec<(usize, String)>,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Ranks {
    fn start(nranks: usize, transport: TransportKind, seed: u64) -> Ranks {
        let (sender, said) = channel();
        let (mut children, mut inputs) = (Vec::new(), Vec::new());
        for rank in 0..nranks {
            let task = format!("{rank} {nranks} {transport} {seed}");
            let mut child = child::rank(&[], "rank_death", &task)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("a rank process");
            let output = child.stdout.take().expect("piped");
            inputs.push(child.stdin.take().expect("piped"));
            children.push(child);
            let sender: Sender<_> = sender.clone();
            // The thread ends when its child closes standard output.
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if let Some(at) = line.find(MARK) {
                        let _ = sender.send((rank, line[at + MARK.len()..].to_string()));
                    }
                }
            });
        }
        Ranks {
            children,
            inputs,
            said,
            backlog: Vec::new(),
        }
    }

    /// Waits until each of `ranks` has printed a line that starts with `word`. Returns the rest of
    /// each line, by rank.
    fn wait_for(&mut self, word: &str, ranks: &[usize]) -> Vec<String> {
        let mut found = vec![None; self.children.len()];
        let deadline = Instant::now() + PATIENCE * if on_rdma_devices() { 5 } else { 1 };
        let mut lines = std::mem::take(&mut self.backlog);
        loop {
            for (rank, line) in lines.drain(..) {
                match line.split_once(' ') {
                    Some((first, rest)) if first == word => found[rank] = Some(rest.to_string()),
                    _ if line.starts_with("failed") => panic!("rank {rank} {line}"),
                    _ => self.backlog.push((rank, line)),
                }
            }
            if ranks.iter().all(|&rank| found[rank].is_some()) {
                return found.into_iter().map(Option::unwrap_or_default).collect();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            lines.push(self.said.recv_timeout(left).unwrap_or_else(|_| {
                panic!(
                    "waiting for \"{word}\" of {ranks:?}: got {found:?}, and {:?}",
                    self.backlog
                )
            }));
        }
    }
}

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

    let mut ranks = Ranks::start(nranks, transport, rng.next());
    let id = ranks.wait_for("id", &[0]).swap_remove(0);
    for input in &mut ranks.inputs {
        writeln!(input, "{id}").expect("a rank that reads");
    }
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
    let left = ranks.wait_for("left", &survivors);
    for &rank in &survivors {
        let (before, after) = left[rank].split_once(" | ").expect("two sides");
        assert_eq!(before, after, "{what}: rank {rank} left something behind");
        let status = ranks.children[rank].wait().expect("a survivor is reaped");
        assert!(status.success(), "{what}: rank {rank} ended with {status}");
    }
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
    assert_eq!(shared_memory_names(), before, "names in /dev/shm");
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

/// Counts the resources of this process that a communicator could leave behind. Files of /dev/shm
/// must never be among them.
fn holdings() -> String {
    let entries = |path: &str| std::fs::read_dir(path).map_or(0, |entries| entries.count());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let shared = maps.lines().filter(|line| line.contains("memfd:")).count();
    let mut text = String::new();
    let _ = write!(
        text,
        "fds {}, threads {}, shared mappings {shared}",
        entries("/proc/self/fd"),
        entries("/proc/self/task")
    );
    if maps.contains("/dev/shm") {
        text += ", a file of /dev/shm";
    }
    text
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{MARK}{line}").and_then(|()| out.flush());
}

/// Runs one rank until a call fails.
pub fn rank_process(task: &str) {
    std::thread::spawn(|| {
        std::thread::sleep(CHILD_LIFETIME * if on_rdma_devices() { 5 } else { 1 });
        say("failed: still there at the end of its lifetime");
        std::process::exit(3);
    });
    if let Err(error) = run_rank(task) {
        say(&format!("failed: {error}"));
        std::process::exit(1);
    }
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
    if rank == 0 {
        // The rendezvous runs in rank 0. Its id reaches all ranks through the parent, in
        // hexadecimal.
        let id = UniqueId::create(&config)?;
        let hex: String = id.as_bytes().iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        });
        say(&format!("id {hex}"));
    }
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let mut bytes = [0; 128];
    for (at, byte) in bytes.iter_mut().enumerate() {
        let digits = line.get(2 * at..2 * at + 2).ok_or("a short id")?;
        *byte = u8::from_str_radix(digits, 16)?;
    }
    {
        let comm = Communicator::init(&UniqueId::from_bytes(&bytes)?, rank, nranks, config)?;
        say("joined ");
        let error = work(&comm, &mut rng);
        let (now, kind) = (unix_time().as_nanos(), error.kind());
        say(&format!("error {now} {kind:?} {}", error.message()));
    }
    // The kernel may list a thread for a moment after it was joined.
    let patience = Instant::now() + Duration::from_secs(1);
    let mut after = holdings();
    while after != before && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(5));
        after = holdings();
    }
    say(&format!("left {before} | {after}"));
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
