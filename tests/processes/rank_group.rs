//! Rank processes of one test, which report by lines on standard output and get a unique id on standard
//! input.

use super::child;
use cinch::UniqueId;
use cinch::testing::on_rdma_devices;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Time after which a step of the test itself counts as failed.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
/// Time after which a rank process exits, even if its parent is gone.
const CHILD_LIFETIME: Duration = Duration::from_secs(60);
/// Prefix of the lines of a rank process; it separates them from lines that the test harness
/// prints.
const MARK: &str = "@@";

/// Rank processes. Dropping this value kills and reaps them.
pub struct RankGroup {
    pub children: Vec<Child>,
    inputs: Vec<ChildStdin>,
    /// Source of the lines of processes that are started later.
    sender: Sender<(usize, String)>,
    said: Receiver<(usize, String)>,
    /// Lines of ranks that arrived before the test waited for them.
    backlog: Vec<(usize, String)>,
}

impl Drop for RankGroup {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl RankGroup {
    /// Starts one process for each of `tasks`, which `rank_process` of `module` runs.
    pub fn start(module: &str, tasks: &[String]) -> RankGroup {
        RankGroup::start_with(module, tasks, &[])
    }

    /// Starts processes as [`RankGroup::start`] does, with these environment variables.
    pub fn start_with(module: &str, tasks: &[String], variables: &[(&str, PathBuf)]) -> RankGroup {
        let (sender, said) = channel();
        let mut group = RankGroup {
            children: Vec::new(),
            inputs: Vec::new(),
            sender,
            said,
            backlog: Vec::new(),
        };
        for task in tasks {
            group.add(module, task, variables);
        }
        group
    }

    /// Starts one more process, and returns its number among the processes of this group.
    pub fn add(&mut self, module: &str, task: &str, variables: &[(&str, PathBuf)]) -> usize {
        let number = self.children.len();
        let mut child = child::rank(&[], module, task)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a rank process");
        let output = child.stdout.take().expect("piped");
        self.inputs.push(child.stdin.take().expect("piped"));
        self.children.push(child);
        let sender = self.sender.clone();
        // The thread ends when its child closes standard output.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some(at) = line.find(MARK) {
                    let _ = sender.send((number, line[at + MARK.len()..].to_string()));
                }
            }
        });
        number
    }

    /// Writes a line to standard input of a process.
    pub fn hand(&mut self, number: usize, line: &str) {
        writeln!(self.inputs[number], "{line}").expect("a rank that reads");
    }

    /// Kills and reaps a process.
    pub fn kill(&mut self, number: usize) {
        self.children[number].kill().expect("the victim lives");
        self.children[number].wait().expect("the victim is reaped");
    }

    /// Hands the id that rank 0 reports to all ranks, and returns it in hexadecimal.
    pub fn hand_on_id(&mut self) -> String {
        let id = self.wait_for("id", &[0]).swap_remove(0);
        (0..self.inputs.len()).for_each(|number| self.hand(number, &id));
        id
    }

    /// Waits until each of `ranks` has printed a line that starts with `word`. Returns the rest of
    /// each line, by rank.
    pub fn wait_for(&mut self, word: &str, ranks: &[usize]) -> Vec<String> {
        let mut found = vec![None; self.children.len()];
        let deadline = Instant::now() + STEP_TIMEOUT * if on_rdma_devices() { 5 } else { 1 };
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

    /// Returns the lines that have arrived and that start with `word`, without it, with their ranks.
    pub fn lines(&mut self, word: &str) -> Vec<(usize, String)> {
        self.backlog.extend(self.said.try_iter());
        let found = self.backlog.iter().filter_map(|(rank, line)| {
            let (first, rest) = line.split_once(' ')?;
            (first == word).then(|| (*rank, rest.to_string()))
        });
        found.collect()
    }

    /// Checks that `survivors` report equal holdings before and after, and end with success.
    pub fn expect_clean_ends(&mut self, survivors: &[usize], what: &str) {
        let left = self.wait_for("left", survivors);
        for &rank in survivors {
            let (before, after) = left[rank].split_once(" | ").expect("two sides");
            assert_eq!(before, after, "{what}: rank {rank} left something behind");
            let status = self.children[rank].wait().expect("a survivor is reaped");
            assert!(status.success(), "{what}: rank {rank} ended with {status}");
        }
    }
}

// ---- in a rank ----

/// Prints a line for the parent.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{MARK}{line}").and_then(|()| out.flush());
}

/// Runs a rank in a process that ends after a while even if it hangs. Its error fails the test.
pub fn run(rank: impl FnOnce() -> Result<(), Box<dyn std::error::Error>>) {
    run_for(CHILD_LIFETIME * if on_rdma_devices() { 5 } else { 1 }, rank);
}

/// Runs a rank as [`run`] does, in a process that ends after `lifetime`.
pub fn run_for(lifetime: Duration, rank: impl FnOnce() -> Result<(), Box<dyn std::error::Error>>) {
    std::thread::spawn(move || {
        std::thread::sleep(lifetime);
        say("failed: still there at the end of its lifetime");
        std::process::exit(3);
    });
    if let Err(error) = rank() {
        say(&format!("failed: {error}"));
        std::process::exit(1);
    }
}

/// Reads the id that the parent hands on. Rank 0 makes it: the rendezvous runs in its process.
pub fn receive_id(rank: usize, config: &cinch::Config) -> Result<UniqueId, cinch::Error> {
    if rank == 0 {
        say(&format!("id {}", UniqueId::create(config)?.to_hex()));
    }
    UniqueId::from_hex(&receive_line()?)
}

/// Reads a line that the parent hands to this process.
pub fn receive_line() -> Result<String, cinch::Error> {
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line);
    read.map_err(|cause| cinch::Error::system("no line of the parent", cause))?;
    Ok(line.trim().into())
}

/// Counts the resources of this process that a communicator could leave behind. Files of /dev/shm
/// must never be among them.
pub fn holdings() -> String {
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

/// Reports the holdings `before` and now, once the kernel no longer lists threads that were joined.
pub fn report_holdings(before: &str) {
    let until = Instant::now() + Duration::from_secs(1);
    let mut after = holdings();
    while after != before && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
        after = holdings();
    }
    say(&format!("left {before} | {after}"));
}
