//! Tests what `cinch ps` and the file of `CINCH_DUMP_FILE` report about jobs that hang or fail.

use super::child;
use super::support::{Rng, launcher, number, seed};
use cinch::{Communicator, Config, ReduceOp, UniqueId};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const RANKS: usize = 4;

/// Runs one rank: makes 20 calls, waits for a line if it is the victim, and makes one more call.
pub fn rank_process(task: &str) {
    let words: Vec<&str> = task.split(' ').collect();
    let id = UniqueId::from_hex(words[0]).unwrap();
    let [rank, victim]: [usize; 2] = [1, 2].map(|at| words[at].parse().unwrap());
    let config = Config {
        timeout: Duration::from_secs(30),
        ..Config::from_env().unwrap()
    };
    let comm = Communicator::init(&id, rank, RANKS, config).unwrap();
    let mut data = vec![1.0f32; 1000];
    for _ in 0..20 {
        comm.all_reduce_in_place(&mut data, ReduceOp::Max).unwrap();
    }
    println!("@ready");
    if rank == victim {
        std::io::stdin().read_line(&mut String::new()).unwrap();
    }
    match comm.all_reduce_in_place(&mut data, ReduceOp::Max) {
        Ok(_) => println!("@done"),
        Err(error) => println!("@{error}"),
    }
}

/// The ranks of a job, with their sockets and files in a folder of their own.
struct Job {
    folder: PathBuf,
    ranks: Vec<(Child, BufReader<std::process::ChildStdout>)>,
}

impl Job {
    fn start(name: &str, victim: usize) -> Job {
        Job::start_with(name, victim, true)
    }

    /// Starts the ranks, of which `victim` makes its last call late. With `dumps` they have a file of
    /// CINCH_DUMP_FILE.
    fn start_with(name: &str, victim: usize, dumps: bool) -> Job {
        // Builds the tool before the ranks' deadlines begin.
        launcher::tool();
        let folder = std::env::temp_dir().join(format!("cinch-ps-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let id = UniqueId::create(&Config::default()).unwrap().to_hex();
        let start = |rank: usize| {
            let task = format!("{id} {rank} {victim}");
            let mut command = child::rank(&["timeout", "60"], "ps", &task);
            if dumps {
                command.env("CINCH_DUMP_FILE", folder.join("dump-%p"));
            }
            let mut child = command
                .env("XDG_RUNTIME_DIR", &folder)
                .env("CINCH_PS", "1")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap());
            (child, lines)
        };
        let mut job = Job {
            ranks: (0..RANKS).map(start).collect(),
            folder,
        };
        (0..RANKS).for_each(|rank| assert_eq!(job.line(rank), "ready"));
        job
    }

    /// Returns the next line that a rank prints.
    fn line(&mut self, rank: usize) -> String {
        let mut line = String::new();
        while self.ranks[rank].1.read_line(&mut line).unwrap() > 0 {
            if let Some((_, said)) = line.split_once('@') {
                return said.trim_end().to_string();
            }
            line.clear();
        }
        panic!("rank {rank} printed nothing more");
    }

    fn ps(&self, words: &[&str]) -> String {
        let done = launcher::cinch()
            .arg("ps")
            .args(words)
            .env("XDG_RUNTIME_DIR", &self.folder)
            .output()
            .unwrap();
        assert!(
            done.status.success(),
            "{}",
            String::from_utf8_lossy(&done.stderr)
        );
        String::from_utf8(done.stdout).unwrap()
    }

    /// Returns the processes of the ranks themselves, which `timeout` started.
    fn pids(&self) -> Vec<u64> {
        let report: Value = serde_json::from_str(&self.ps(&["--json"])).unwrap();
        let processes = report["processes"].as_array().unwrap().iter();
        let mut pids: Vec<(u64, u64)> = processes
            .map(|one| {
                (
                    one["communicators"][0]["rank"].as_u64().unwrap(),
                    one["pid"].as_u64().unwrap(),
                )
            })
            .collect();
        pids.sort_unstable();
        pids.into_iter().map(|(_, pid)| pid).collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for (rank, _) in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn dumped(path: &Path) -> Value {
    let start = Instant::now();
    loop {
        match std::fs::read_to_string(path) {
            Ok(text) => return serde_json::from_str(&text).unwrap(),
            Err(error) => assert!(
                start.elapsed() < Duration::from_secs(10),
                "{path:?}: {error}"
            ),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns who holds up whom, once `cinch ps` reports it, and the seconds until then.
fn diagnosis(job: &Job) -> (Value, f64) {
    let start = Instant::now();
    loop {
        let report: Value = serde_json::from_str(&job.ps(&["--json"])).unwrap();
        let held = report["held_up_by"].as_array().unwrap();
        let all = held
            .iter()
            .map(|one| one["waiting"].as_array().unwrap().len())
            .sum::<usize>();
        if !held.is_empty() && all > 0 {
            return (report["held_up_by"].clone(), start.elapsed().as_secs_f64());
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{report}");
    }
}

/// `CINCH_TEST_HANGS` sets the number of hung jobs.
#[test]
fn the_rank_that_hangs_is_named() {
    let trials = number("CINCH_TEST_HANGS").unwrap_or(2);
    let seed = seed();
    let mut rng = Rng(seed);
    let mut times = Vec::new();
    for trial in 0..trials {
        let victim = rng.below(RANKS);
        let mut job = Job::start(&format!("hang-{trial}"), victim);
        let (held, seconds) = diagnosis(&job);
        times.push(seconds);
        for one in held.as_array().unwrap() {
            assert_eq!(one["rank"], victim, "seed {seed}, trial {trial}: {held}");
            let state = one["state"].as_str().unwrap();
            assert!(
                state.contains("between calls; the last began")
                    && state.contains("all_reduce of 1000 f32"),
                "{state}"
            );
        }
        let text = job.ps(&["--calls", "3"]);
        assert!(
            text.contains("4 of 4 ranks answer") && text.contains(" holds up rank "),
            "{text}"
        );
        job.ranks[victim]
            .0
            .stdin
            .take()
            .unwrap()
            .write_all(b"\n")
            .unwrap();
        (0..RANKS).for_each(|rank| assert_eq!(job.line(rank), "done"));
        for (rank, _) in &mut job.ranks {
            assert!(rank.wait().unwrap().success());
        }
        let sockets = std::fs::read_dir(job.folder.join("cinch")).unwrap().count();
        assert_eq!(sockets, 0, "sockets of processes that have ended");
    }
    times.sort_by(f64::total_cmp);
    let (median, worst) = (times[times.len() / 2], times[times.len() - 1]);
    println!("figure: {trials} hung jobs explained, median {median:.2} s, worst {worst:.2} s");
}

#[test]
fn signal_and_failure_write_the_latest_calls() {
    let victim = 2;
    let mut job = Job::start("dump", victim);
    let pids = job.pids();
    launcher::signal(pids[victim] as u32, "USR2");
    let path = |rank: usize| job.folder.join(format!("dump-{}", pids[rank]));
    let dump = dumped(&path(victim));
    assert_eq!(dump["reason"], "SIGUSR2");
    let comm = &dump["communicators"][0];
    assert_eq!(
        (&comm["rank"], &comm["calls"]),
        (&Value::from(victim), &Value::from(20))
    );
    let recent = comm["recent"].as_array().unwrap();
    assert_eq!(recent.len(), 20);
    assert!(
        recent.iter().all(|call| call["state"] == "done"),
        "{recent:?}"
    );
    let others: Vec<PathBuf> = (0..RANKS)
        .filter(|rank| *rank != victim)
        .map(path)
        .collect();
    launcher::signal(pids[victim] as u32, "KILL");
    for other in &others {
        let dump = dumped(other);
        let reason = dump["reason"].as_str().unwrap();
        assert!(reason.contains("rank 2"), "{reason}");
        assert_eq!(dump["communicators"][0]["failed"], reason);
        let last = dump["communicators"][0]["recent"]
            .as_array()
            .unwrap()
            .last()
            .unwrap();
        assert_eq!(last["state"], "running");
    }
    for rank in (0..RANKS).filter(|rank| *rank != victim) {
        assert!(job.line(rank).contains("rank 2"));
    }
}

/// A pipe whose other end was closed once kept the thread awake.
#[test]
fn the_thread_that_answers_sleeps_between_answers() {
    let job = Job::start_with("idle", 0, false);
    let pid = job.pids()[0];
    let switches = || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let of_task = |task: std::io::Result<std::fs::DirEntry>| {
            let path = task.unwrap().path();
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            let stat = std::fs::read_to_string(path.join("stat")).ok()?;
            // User and system time in ticks of 10 ms, behind the name in brackets.
            let fields: Vec<&str> = stat.rsplit(") ").next()?.split(' ').collect();
            let ticks = fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?;
            (name.trim() == "cinch-recorder").then_some(ticks)
        };
        tasks.filter_map(of_task).sum::<u64>()
    };
    let before = switches();
    std::thread::sleep(Duration::from_millis(500));
    let spent = switches() - before;
    assert!(spent <= 5, "{spent} ticks of 10 ms in 0.5 s");
}
