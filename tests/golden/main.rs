//! Golden results: hashes of the outputs that every collective gives with every codec and algorithm, on every
//! transport of host memory. A refactoring must keep them.
//!
//! `CINCH_UPDATE_GOLDEN=1 cargo test --test golden` writes `results.txt`; commit a28b15e wrote its first
//! version. The test uses the C ABI only, so this folder compiles in a checkout of any commit. Copy it there
//! to get the results of that commit.
//!
//! A line of the file holds a case's name and a hash of its outputs on all ranks. If the library refuses a
//! call of the case, the line ends with the error code. Lines named `reports` hash the reports of a batch of
//! cases.
//!
//! Names that begin with `n3` are cases of three ranks on one host. Loopback, shm and TCP must give equal
//! results for them, each with another instruction set and buffer placement. Names that begin with `h0101`
//! are cases of four ranks, which alternate between hosts 0 and 1.
//!
//! Each case runs in a child process on one core. The library chooses algorithms by whether ranks share
//! cores, and results must not depend on the machine's number of cores.
#![allow(unsafe_code)] // the C ABI

mod abi;
mod alone;
mod cases;
mod data;
mod run;

use cases::Batch;
use run::{Outcomes, Placement, Rank};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Environment variable of a child process. It holds job number, process number in the job, core,
/// and folder.
const PART: &str = "CINCH_TEST_CHILD";
const UPDATE: &str = "CINCH_UPDATE_GOLDEN";
/// Time after which a job counts as hung.
const DEADLINE: Duration = Duration::from_secs(240);
const SHOWN: usize = 20;

/// A set of cases with processes of its own. Jobs run in parallel.
#[derive(Clone, Copy, Debug)]
enum Job {
    /// Codecs and helpers that need no communicator.
    Alone,
    /// A communicator for each number of ranks, with this transport, buffer placement and
    /// instruction set.
    Flat(Transport, Placement, &'static str, &'static [usize]),
    /// A communicator of ranks on simulated hosts; the list holds each rank's host number.
    Hosts(&'static [usize]),
}

/// Transports between ranks, with their numbers in `cinch_transport_t`.
#[derive(Clone, Copy, Debug)]
enum Transport {
    Loopback = 2,
    Shm = 3,
    Tcp = 4,
}

/// All jobs, the longest first.
const JOBS: [Job; 10] = [
    Job::Flat(Transport::Loopback, Placement::Apart, "scalar", &[3]),
    Job::Flat(Transport::Tcp, Placement::Unaligned, "auto", &[3]),
    Job::Flat(Transport::Shm, Placement::InPlace, "avx2", &[3]),
    Job::Flat(
        Transport::Loopback,
        Placement::Apart,
        "scalar",
        &[1, 2, 4, 5],
    ),
    Job::Flat(Transport::Tcp, Placement::Unaligned, "auto", &[2, 4]),
    Job::Flat(Transport::Shm, Placement::InPlace, "avx2", &[2, 4]),
    Job::Hosts(&[0, 1, 0, 1]),
    Job::Hosts(&[0, 0, 1, 2, 1]),
    Job::Hosts(&[0, 0, 0, 1, 1, 1]),
    Job::Alone,
];

impl Job {
    fn processes(self) -> usize {
        match self {
            Job::Alone | Job::Flat(..) => 1,
            Job::Hosts(hosts) => hosts.iter().max().unwrap() + 1,
        }
    }

    /// Runs the ranks of a process of the job, and returns each rank with its outcomes.
    fn run(self, process: usize, ids: &Path) -> Vec<(usize, Outcomes)> {
        let rank = |prefix: String, nranks, rank, transport, placement| Rank {
            rank,
            nranks,
            transport,
            placement,
            ids: ids.into(),
            prefix,
        };
        match self {
            Job::Alone => vec![(0, alone::run())],
            Job::Flat(transport, placement, _, sizes) => {
                let mut all = Vec::new();
                for &nranks in sizes {
                    let number = transport as u32;
                    let make = |at| rank(format!("n{nranks}"), nranks, at, number, placement);
                    let ranks: Vec<_> = (0..nranks).map(make).collect();
                    all.extend(run_ranks(&ranks, &cases::flat(nranks)));
                    // The library chooses the algorithm of these cases by transport, so their names
                    // include the transport.
                    let named = |rank: Rank| Rank {
                        prefix: format!("{transport:?}-n{nranks}").to_lowercase(),
                        ..rank
                    };
                    let ranks: Vec<_> = ranks.into_iter().map(named).collect();
                    all.extend(run_ranks(&ranks, &[cases::chosen()]));
                }
                all
            }
            Job::Hosts(hosts) => {
                let name: String = hosts.iter().map(ToString::to_string).collect();
                let ranks = hosts
                    .iter()
                    .enumerate()
                    .filter(|&(_, &host)| host == process);
                let ranks: Vec<_> = ranks
                    .map(|(at, _)| rank(format!("h{name}"), hosts.len(), at, 0, Placement::Apart))
                    .collect();
                let mut batches = cases::on_hosts(hosts.len(), hosts.len() == 5);
                batches.push(cases::chosen());
                run_ranks(&ranks, &batches)
            }
        }
    }
}

fn run_ranks(ranks: &[Rank], batches: &[Batch]) -> Vec<(usize, Outcomes)> {
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for rank in ranks {
            threads.push(scope.spawn(move || (rank.rank, rank.run(batches))));
        }
        let join = |thread: std::thread::ScopedJoinHandle<_>| thread.join().expect("see above");
        threads.into_iter().map(join).collect()
    })
}

/// Runs a process of a job. Without the environment variable [`PART`] it does nothing, because the test
/// harness also runs this function as a test.
#[test]
fn child_process() {
    let Ok(part) = std::env::var(PART) else {
        return;
    };
    let (numbers, folder) = part.split_once('/').unwrap();
    let numbers: Vec<usize> = numbers
        .split(',')
        .map(|text| text.parse().unwrap())
        .collect();
    let [job, process, core] = numbers[..] else {
        panic!("{part}")
    };
    bind(core);
    let folder = Path::new("/").join(folder);
    let mut text = String::new();
    for (rank, outcomes) in JOBS[job].run(process, &folder) {
        for (name, outcome) in outcomes {
            let error = outcome.error.unwrap_or(0);
            writeln!(text, "{rank} {name} {:016x} {error}", outcome.hash.0).unwrap();
        }
    }
    fs::write(folder.join(format!("{process}.out")), text).unwrap();
}

/// Returns the cores that this process may use.
fn cores() -> Vec<usize> {
    // SAFETY: `set` is plain data of the size that the call receives, and the system only writes to
    // it.
    unsafe {
        let mut set = std::mem::zeroed::<libc::cpu_set_t>();
        assert_eq!(libc::sched_getaffinity(0, size_of_val(&set), &mut set), 0);
        (0..libc::CPU_SETSIZE as usize)
            .filter(|&core| libc::CPU_ISSET(core, &set))
            .collect()
    }
}

/// Binds this thread to `core`, and with it all threads that it starts later.
fn bind(core: usize) {
    // SAFETY: `set` is plain data of the size that the call receives, and the system only reads it.
    unsafe {
        let mut set = std::mem::zeroed::<libc::cpu_set_t>();
        libc::CPU_SET(core, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &set), 0);
    }
}

/// Processes of a job with their log files. Dropping this value kills the processes that still run.
struct Children(Vec<(Child, PathBuf)>);

impl Children {
    fn start(number: usize, core: usize, folder: &Path) -> Children {
        let start = |process| {
            let log = folder.join(format!("{process}.log"));
            let output = fs::File::create(&log).unwrap();
            let mut command = Command::new(std::env::current_exe().unwrap());
            for (name, _) in std::env::vars_os() {
                let text = name.to_string_lossy();
                if text.starts_with("CINCH_") || text.starts_with("NCCL_") {
                    command.env_remove(&name);
                }
            }
            match JOBS[number] {
                Job::Alone => &mut command,
                Job::Flat(_, _, simd, _) => command.env("CINCH_SIMD", simd),
                Job::Hosts(_) => command.env("CINCH_HOST_ID", format!("host {process}")),
            };
            let part = format!("{number},{process},{core}{}", folder.display());
            command
                .args(["--exact", "child_process", "--nocapture"])
                .env(PART, part);
            command.stdout(output.try_clone().unwrap()).stderr(output);
            (command.spawn().unwrap(), log)
        };
        Children((0..JOBS[number].processes()).map(start).collect())
    }

    /// Waits for all processes. On failure returns the logs of the processes that failed.
    fn wait(mut self) -> Result<(), String> {
        let deadline = Instant::now() + DEADLINE;
        let mut error = String::new();
        for (child, log) in &mut self.0 {
            let status = loop {
                match child.try_wait().unwrap() {
                    Some(status) => break status.to_string(),
                    None if Instant::now() > deadline => break "killed after the deadline".into(),
                    None => std::thread::sleep(Duration::from_millis(5)),
                }
            };
            let text = fs::read_to_string(log).unwrap_or_default();
            if status != "exit status: 0" {
                write!(error, "\n--- {status}\n{text}").unwrap();
            }
        }
        if error.is_empty() { Ok(()) } else { Err(error) }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs a job on `core`. Returns each case's result by name, as the text in the golden file.
fn run_job(number: usize, core: usize) -> Result<BTreeMap<String, String>, String> {
    let begin = Instant::now();
    let process = std::process::id();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("golden-{process}-{number}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let done = Children::start(number, core, &folder).wait();
    done.map_err(|error| format!("{:?} failed{error}", JOBS[number]))?;
    let mut cases: BTreeMap<String, BTreeMap<usize, (u64, u32)>> = BTreeMap::new();
    for process in 0..JOBS[number].processes() {
        for line in fs::read_to_string(folder.join(format!("{process}.out")))
            .unwrap()
            .lines()
        {
            let words: Vec<_> = line.split(' ').collect();
            let rank = words[0].parse().unwrap();
            let hash = u64::from_str_radix(words[2], 16).unwrap();
            let case = cases.entry(words[1].into()).or_default();
            case.insert(rank, (hash, words[3].parse().unwrap()));
        }
    }
    fs::remove_dir_all(&folder).unwrap();
    println!(
        "{:?}: {} cases in {:.1?}",
        JOBS[number],
        cases.len(),
        begin.elapsed()
    );
    Ok(cases
        .into_iter()
        .map(|(name, ranks)| (name, text(ranks.into_values())))
        .collect())
}

/// Formats the result of a case: the hash of all ranks' hashes, and the error codes if any rank has
/// one.
fn text(ranks: impl Iterator<Item = (u64, u32)>) -> String {
    let (mut hash, mut errors) = (data::Hash::NEW, Vec::new());
    for (rank, error) in ranks {
        hash.word(rank);
        errors.push(error);
    }
    let hash = format!("{:016x}", hash.0);
    let first = errors[0];
    match errors.iter().all(|&error| error == first) {
        true if first == 0 => hash,
        true => format!("{hash} error={first}"),
        false => {
            let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
            format!("{hash} errors={}", errors.join(","))
        }
    }
}

/// Runs all jobs, as many at a time as there are cores, and returns results in the order of
/// [`JOBS`].
fn run_jobs() -> Vec<BTreeMap<String, String>> {
    let next = Mutex::new(0..JOBS.len());
    let results = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for core in cores().into_iter().take(JOBS.len()) {
            let (next, results) = (&next, &results);
            scope.spawn(move || {
                loop {
                    let Some(job) = next.lock().unwrap().next() else {
                        return;
                    };
                    let result = run_job(job, core);
                    results.lock().unwrap().insert(job, result);
                }
            });
        }
    });
    let results = results.into_inner().unwrap().into_values();
    results
        .map(|result| result.unwrap_or_else(|error| panic!("{error}")))
        .collect()
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/results.txt")
}

/// Reads the result of each case by name from the golden file.
fn read() -> BTreeMap<String, String> {
    let path = file();
    let text =
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let split = |line: &str| {
        let (name, text) = line
            .split_once(' ')
            .unwrap_or_else(|| panic!("bad line {line:?}"));
        (name.to_string(), text.to_string())
    };
    lines.map(split).collect()
}

fn write(results: &BTreeMap<String, String>) {
    let mut text = format!(
        "# Golden results of seed {}; see main.rs. Written by {UPDATE}=1 cargo test --test golden\n",
        data::SEED
    );
    for (name, result) in results {
        writeln!(text, "{name} {result}").unwrap();
    }
    fs::write(file(), text).unwrap();
}

#[test]
fn results_of_every_case_equal_the_golden_file() {
    println!("seed {}", data::SEED);
    let begin = Instant::now();
    let mut results = BTreeMap::new();
    let mut wrong = Vec::new();
    let jobs = run_jobs();
    for (job, found) in JOBS.iter().zip(jobs) {
        for (name, text) in found {
            let first = results.entry(name.clone()).or_insert_with(|| text.clone());
            if *first != text {
                wrong.push(format!(
                    "{name}: {first} on one transport, {text} in {job:?}"
                ));
            }
        }
    }
    println!("{} cases in {:.1?}", results.len(), begin.elapsed());
    if wrong.is_empty() && std::env::var_os(UPDATE).is_some_and(|value| value == "1") {
        return write(&results);
    }
    let golden = read();
    let differing = wrong.len();
    let (mut changed, mut missing, mut gone) = (0, 0, 0);
    for (name, text) in &results {
        match golden.get(name) {
            Some(expected) if expected == text => {}
            Some(expected) => {
                changed += 1;
                wrong.push(format!("{name}: {text}, and {expected} in the file"));
            }
            None => {
                missing += 1;
                wrong.push(format!("{name}: {text}, and not in the file"));
            }
        }
    }
    for name in golden.keys().filter(|name| !results.contains_key(*name)) {
        gone += 1;
        wrong.push(format!("{name}: in the file, and not run"));
    }
    assert!(
        wrong.is_empty(),
        "of {} cases {changed} have other results than the file, {missing} are not in the file, \
         {gone} of the file were not run; {differing} differ between transports. The first:\n{}",
        results.len(),
        wrong[..wrong.len().min(SHOWN)].join("\n")
    );
}
