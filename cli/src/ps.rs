//! `cinch ps`: asks this user's running ranks of this host what they do and for whom they wait.

use crate::{ExitResult, FAILURE};
use cinch::recorder::{check_folder, remove_stale, socket_folder};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest time for the answer of a process.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Largest answer in bytes; 256 calls of a communicator take about 60 KB.
const MOST_BYTES: usize = 64 << 20;

/// Options of `cinch ps`.
#[derive(clap::Args)]
pub struct PsOptions {
    /// Processes to show; without any, all of this user that run with CINCH_PS=1
    #[arg(value_name = "PID")]
    pids: Vec<u32>,
    /// Print what the processes report, and who holds up whom, as one JSON object
    #[arg(long)]
    json: bool,
    /// Also print the latest calls of each rank, up to this number
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "json")]
    calls: usize,
}

/// Answer of a process.
#[derive(Deserialize)]
pub struct ProcessReport {
    pid: u32,
    /// Ranks of the process.
    pub communicators: Vec<RankReport>,
}

/// A rank as its process reports it.
#[derive(Clone, Deserialize)]
pub struct RankReport {
    /// Name of the communicator; may be empty.
    pub name: String,
    /// Id of the communicator.
    pub id: String,
    /// Number of the rank.
    pub rank: usize,
    ranks: Vec<String>,
    calls: u64,
    failed: Option<String>,
    /// Wait that goes on.
    pub waits: Option<WaitReport>,
    recent: Vec<CallReport>,
    /// Counters since the communicator was created; empty from versions that have none.
    #[serde(default)]
    pub metrics: MetricsReport,
}

/// Counters of a rank.
#[derive(Clone, Default, Deserialize)]
pub struct MetricsReport {
    /// Counts by class of call.
    pub calls: Vec<ClassReport>,
    /// Waits for other ranks.
    pub peer_waits: Vec<PeerWaitReport>,
}

/// Counts of the calls of a class.
#[derive(Clone, Deserialize)]
pub struct ClassReport {
    /// Calls that have returned.
    pub calls: u64,
    /// Bytes of their larger buffers.
    pub bytes: u64,
    /// Bytes that the rank sent.
    pub wire_bytes: u64,
    /// Bytes that it would have sent without codecs; 0 from versions that do not count them.
    #[serde(default)]
    pub raw_bytes: u64,
    /// Calls whose time was measured.
    pub timed_calls: u64,
    /// Seconds of these calls.
    pub timed_seconds: f64,
}

/// Time that a rank has waited for another.
#[derive(Clone, Deserialize)]
pub struct PeerWaitReport {
    /// The other rank.
    pub rank: usize,
    /// Seconds of the waits.
    pub seconds: f64,
}

/// A wait that goes on.
#[derive(Clone, Deserialize)]
pub struct WaitReport {
    /// Seconds since its begin.
    pub seconds: f64,
    /// Ranks whose messages are missing.
    pub missing: Vec<MissingReport>,
}

/// A rank whose message is missing.
#[derive(Clone, Deserialize)]
pub struct MissingReport {
    /// Number of the rank.
    pub rank: usize,
    what: String,
}

#[derive(Clone, Deserialize)]
struct CallReport {
    call: String,
    state: String,
    begun_seconds_ago: f64,
}

/// A rank for which others wait although it waits for nobody.
#[derive(Debug, PartialEq, Serialize)]
struct HoldUp {
    communicator: String,
    rank: usize,
    /// Ranks that wait for it.
    waiting: Vec<usize>,
    /// The longest of their waits.
    seconds: f64,
    /// Activity of the rank, as far as its process reports.
    state: String,
}

/// Runs `cinch ps`. Exit code 0, also if no process answers; a process that was named and does not answer is a
/// failure.
pub fn run(options: &PsOptions, out: &mut dyn Write) -> ExitResult {
    let folder = socket_folder();
    let failed = |text: String| (FAILURE, text);
    if folder.exists() {
        check_folder(&folder).map_err(|error| failed(error.to_string()))?;
    }
    let pids = match options.pids.is_empty() {
        true => {
            listed(&folder).map_err(|error| failed(format!("{}: {error}", folder.display())))?
        }
        false => options.pids.clone(),
    };
    let mut answers = Vec::new();
    for pid in pids {
        match ask(&folder, pid) {
            Ok(answer) => answers.push(answer),
            // The process has ended since the folder was read, or was killed and left its socket.
            Err(error) if options.pids.is_empty() && is_gone(&error) => {
                remove_stale(pid, &socket(&folder, pid));
            }
            Err(error) => {
                let text = format!(
                    "process {pid} does not answer at {}: {error}; it must run as you, with CINCH_PS=1",
                    socket(&folder, pid).display()
                );
                if !options.pids.is_empty() {
                    return Err(failed(text));
                }
                eprintln!("cinch: {text}");
            }
        }
    }
    let reports = answers
        .iter()
        .map(|answer| serde_json::from_value(answer.clone()))
        .collect::<Result<Vec<ProcessReport>, _>>()
        .map_err(|error| {
            failed(format!(
                "a process of another version of cinch answered: {error}"
            ))
        })?;
    let communicators = by_communicator(&reports);
    let printed = match options.json {
        true => {
            let holds: Vec<HoldUp> = communicators.values().flat_map(hold_ups).collect();
            let circles: BTreeMap<_, _> = communicators
                .iter()
                .map(|(id, ranks)| (id, circle(ranks)))
                .filter(|(_, ranks)| !ranks.is_empty())
                .collect();
            writeln!(
                out,
                "{}",
                serde_json::json!({"processes": answers, "held_up_by": holds, "wait_for_each_other": circles})
            )
        }
        false => {
            let mut text = Vec::new();
            print(&communicators, options.calls, &folder, &mut text)
                .and_then(|()| out.write_all(printable(&text).as_bytes()))
        }
    };
    printed
        .map(|()| 0)
        .map_err(|error| failed(error.to_string()))
}

/// Returns text without control characters, which names of communicators could have, and which a terminal obeys.
pub fn printable(text: &[u8]) -> String {
    let shown = |c: char| match c.is_control() && c != '\n' {
        true => char::REPLACEMENT_CHARACTER,
        false => c,
    };
    String::from_utf8_lossy(text).chars().map(shown).collect()
}

/// Returns the ranks that wait while nobody holds them up: they wait for each other.
fn circle(ranks: &CommReport<'_>) -> Vec<usize> {
    if !hold_ups(ranks).is_empty() {
        return Vec::new();
    }
    let waits =
        |(rank, (_, report)): (&usize, &(u32, &RankReport))| report.waits.as_ref().map(|_| *rank);
    ranks.iter().filter_map(waits).collect()
}

fn socket(folder: &Path, pid: u32) -> std::path::PathBuf {
    folder.join(format!("{pid}.sock"))
}

fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ConnectionRefused | ErrorKind::NotFound
    )
}

/// Returns the processes with a socket in `folder`, ascending.
pub fn listed(folder: &Path) -> io::Result<Vec<u32>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let pid = |entry: io::Result<fs::DirEntry>| {
        let name = entry.ok()?.file_name();
        name.to_str()?.strip_suffix(".sock")?.parse().ok()
    };
    let mut pids: Vec<u32> = entries.filter_map(pid).collect();
    pids.sort_unstable();
    Ok(pids)
}

/// Returns the answer of a process.
///
/// # Errors
/// The errors of its socket; a timeout.
pub fn ask(folder: &Path, pid: u32) -> io::Result<Value> {
    let mut stream = UnixStream::connect(socket(folder, pid))?;
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let (mut bytes, mut part) = (Vec::new(), vec![0; 64 << 10]);
    while bytes.len() < MOST_BYTES {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part)? {
            0 => break,
            n => bytes.extend(&part[..n]),
        }
    }
    serde_json::from_slice(&bytes).map_err(io::Error::other)
}

/// The ranks of a communicator that answered, each with its process.
type CommReport<'a> = BTreeMap<usize, (u32, &'a RankReport)>;

fn by_communicator(reports: &[ProcessReport]) -> BTreeMap<&str, CommReport<'_>> {
    let mut found: BTreeMap<&str, CommReport<'_>> = BTreeMap::new();
    for process in reports {
        for rank in &process.communicators {
            let ranks = found.entry(rank.id.as_str()).or_default();
            ranks.insert(rank.rank, (process.pid, rank));
        }
    }
    found
}

/// Returns the ranks for which others wait, and that wait for nobody themselves or do not answer.
fn hold_ups(ranks: &CommReport<'_>) -> Vec<HoldUp> {
    let mut found: BTreeMap<usize, (Vec<usize>, f64)> = BTreeMap::new();
    for (&rank, (_, report)) in ranks {
        let Some(waits) = &report.waits else { continue };
        for missing in &waits.missing {
            let is_waiting = ranks
                .get(&missing.rank)
                .is_some_and(|(_, other)| other.waits.is_some());
            if !is_waiting {
                let (waiting, seconds) = found.entry(missing.rank).or_default();
                if waiting.last() != Some(&rank) {
                    waiting.push(rank);
                }
                *seconds = waits.seconds.max(*seconds);
            }
        }
    }
    let hold_up = |(rank, (waiting, seconds))| {
        HoldUp {
        communicator: ranks.values().next().map_or(String::new(), |(_, any)| any.id.clone()),
        rank,
        waiting,
        seconds,
        state: match ranks.get(&rank) {
            Some((_, report)) => state(report),
            None => "it does not answer: it runs on another host, without CINCH_PS=1, or as another user".into(),
        },
    }
    };
    found.into_iter().map(hold_up).collect()
}

/// Returns what a rank does, in words.
fn state(report: &RankReport) -> String {
    if let Some(reason) = &report.failed {
        return format!("failed: {reason}");
    }
    let Some(last) = report.recent.last() else {
        return "has made no call".into();
    };
    match (&report.waits, last.state.as_str()) {
        (Some(waits), _) => {
            let missing: Vec<String> = waits
                .missing
                .iter()
                .map(|missing| format!("rank {} ({})", missing.rank, missing.what))
                .collect();
            format!(
                "{}: waits {:.1} s for {}",
                last.call,
                waits.seconds,
                missing.join(", ")
            )
        }
        (None, "done") => format!(
            "between calls; the last began {:.1} s ago: {}",
            last.begun_seconds_ago, last.call
        ),
        (None, state) => format!(
            "{}: {state} since {:.1} s",
            last.call, last.begun_seconds_ago
        ),
    }
}

fn print(
    communicators: &BTreeMap<&str, CommReport<'_>>,
    calls: usize,
    folder: &Path,
    out: &mut dyn Write,
) -> io::Result<()> {
    if communicators.is_empty() {
        return writeln!(
            out,
            "no process with a communicator answers in {}; ranks that run with CINCH_PS=1 do",
            folder.display()
        );
    }
    for (id, ranks) in communicators {
        let Some((_, (_, any))) = ranks.first_key_value() else {
            continue;
        };
        let name = match any.name.as_str() {
            "" => String::new(),
            name => format!(" \"{name}\""),
        };
        writeln!(
            out,
            "communicator{name} {id}: {} of {} ranks answer",
            ranks.len(),
            any.ranks.len()
        )?;
        for (rank, (pid, report)) in ranks {
            writeln!(
                out,
                "  rank {rank} (pid {pid}), {} calls: {}",
                report.calls,
                state(report)
            )?;
            for call in report.recent.iter().rev().take(calls) {
                writeln!(
                    out,
                    "    {:.1} s ago, {}: {}",
                    call.begun_seconds_ago, call.state, call.call
                )?;
            }
        }
        let circle: Vec<String> = circle(ranks).iter().map(ToString::to_string).collect();
        if !circle.is_empty() {
            writeln!(
                out,
                "  ranks {} wait for each other: compare their calls",
                circle.join(", ")
            )?;
        }
        for held in hold_ups(ranks) {
            let who = any.ranks.get(held.rank).map_or("a rank", String::as_str);
            let waiting: Vec<String> = held.waiting.iter().map(ToString::to_string).collect();
            writeln!(
                out,
                "  {who} holds up rank {} for {:.1} s: {}",
                waiting.join(", "),
                held.seconds,
                held.state
            )?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: usize, waits_for: &[usize], seconds: f64) -> RankReport {
        let missing = |&rank| MissingReport {
            rank,
            what: "a message".into(),
        };
        let waits = WaitReport {
            seconds,
            missing: waits_for.iter().map(missing).collect(),
        };
        RankReport {
            name: "dp".into(),
            id: "1f".into(),
            rank,
            ranks: (0..4)
                .map(|rank| format!("rank {rank} (host h, pid {rank}0)"))
                .collect(),
            calls: 3,
            failed: None,
            waits: (!waits_for.is_empty()).then_some(waits),
            metrics: MetricsReport::default(),
            recent: vec![CallReport {
                call: "call 2 all_reduce".into(),
                state: if waits_for.is_empty() {
                    "done"
                } else {
                    "running"
                }
                .into(),
                begun_seconds_ago: 9.0,
            }],
        }
    }

    #[test]
    fn a_rank_that_waits_for_nobody_holds_up_the_others() {
        // Rank 3 waits for rank 0, which itself waits for rank 2.
        let reports = [
            ProcessReport {
                pid: 7,
                communicators: vec![rank(0, &[2], 4.0), rank(2, &[], 0.0)],
            },
            ProcessReport {
                pid: 8,
                communicators: vec![rank(3, &[0], 5.0), rank(1, &[2, 2], 6.0)],
            },
        ];
        let communicators = by_communicator(&reports);
        let held = hold_ups(&communicators["1f"]);
        assert_eq!(held.len(), 1);
        assert_eq!((held[0].rank, held[0].seconds), (2, 6.0));
        assert_eq!(held[0].waiting, [0, 1]);
        let mut out = Vec::new();
        print(&communicators, 1, Path::new("/run"), &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        for part in [
            "communicator \"dp\" 1f: 4 of 4 ranks answer",
            "rank 2 (pid 7), 3 calls: between calls; the last began 9.0 s ago: call 2",
            "call 2 all_reduce: waits 5.0 s for rank 0 (a message)",
            "rank 2 (host h, pid 20) holds up rank 0, 1 for 6.0 s: between calls",
            "9.0 s ago, done: call 2",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_named() {
        let communicators = vec![rank(0, &[1], 4.0), rank(1, &[0], 5.0), rank(2, &[], 0.0)];
        let reports = [ProcessReport {
            pid: 7,
            communicators,
        }];
        let communicators = by_communicator(&reports);
        assert_eq!(circle(&communicators["1f"]), [0, 1]);
        let mut out = Vec::new();
        print(&communicators, 0, Path::new("/run"), &mut out).unwrap();
        let text = printable(&out);
        assert!(text.contains("ranks 0, 1 wait for each other"), "{text}");
        assert_eq!(printable(b"a\x1b[31m\nb"), "a\u{fffd}[31m\nb");
    }

    #[test]
    fn a_rank_that_does_not_answer_is_named() {
        let reports = [ProcessReport {
            pid: 7,
            communicators: vec![rank(0, &[3], 2.0)],
        }];
        let held = hold_ups(&by_communicator(&reports)["1f"]);
        assert_eq!((held.len(), held[0].rank), (1, 3));
        assert!(held[0].state.contains("does not answer"));
    }
}
