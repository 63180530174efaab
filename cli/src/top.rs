//! `cinch top`: shows, again and again, how much this user's running ranks of this host communicate.

use crate::ps::{self, MetricsReport, RankReport};
use crate::{ExitResult, FAILURE};
use cinch::recorder::{check_folder, socket_folder};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::time::{Duration, Instant};

/// Options of `cinch top`.
#[derive(clap::Args)]
pub struct TopOptions {
    /// Seconds between two readings
    #[arg(short = 'd', long, value_name = "SECONDS", default_value_t = 2.0, value_parser = parse_interval)]
    interval: f64,
    /// Number of tables to print, instead of one until it is interrupted
    #[arg(short = 'n', long, value_name = "N")]
    tables: Option<u64>,
}

fn parse_interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be seconds from 0.1 to 3600".into()),
    }
}

/// Counters of a rank, summed over the classes of its calls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Totals {
    calls: u64,
    bytes: u64,
    wire_bytes: u64,
    raw_bytes: u64,
    timed: u64,
    seconds: f64,
}

impl Totals {
    fn of(metrics: &MetricsReport) -> Totals {
        let mut totals = Totals::default();
        for class in &metrics.calls {
            totals.calls += class.calls;
            totals.bytes += class.bytes;
            totals.wire_bytes += class.wire_bytes;
            totals.raw_bytes += class.raw_bytes;
            totals.timed += class.timed_calls;
            totals.seconds += class.timed_seconds;
        }
        totals
    }

    /// Returns the change since `before`. A communicator that is new since then counts from zero.
    fn since(&self, before: Option<&Totals>) -> Totals {
        let before = before.copied().unwrap_or_default();
        Totals {
            calls: self.calls.saturating_sub(before.calls),
            bytes: self.bytes.saturating_sub(before.bytes),
            wire_bytes: self.wire_bytes.saturating_sub(before.wire_bytes),
            raw_bytes: self.raw_bytes.saturating_sub(before.raw_bytes),
            timed: self.timed.saturating_sub(before.timed),
            seconds: (self.seconds - before.seconds).max(0.0),
        }
    }
}

/// A rank by its communicator's id, its number and its process.
type RankKey = (String, usize, u32);

/// Counters of a rank at one time.
struct RankReading {
    time: Instant,
    report: RankReport,
    totals: Totals,
}

/// The latest counters of ranks.
type Reading = BTreeMap<RankKey, RankReading>;

/// Runs `cinch top`. Exit code 0 when all tables are printed, or the reader has closed the pipe.
pub fn run(options: &TopOptions, out: &mut dyn Write) -> ExitResult {
    let mut before = read()?;
    let mut left = options.tables.unwrap_or(u64::MAX);
    let clears = io::stdout().is_terminal() && options.tables.is_none();
    while left > 0 {
        std::thread::sleep(Duration::from_secs_f64(options.interval));
        let now = read()?;
        let mut text = Vec::new();
        let written = table(&before, &now, &mut text).and_then(|()| {
            if clears {
                // Clears the terminal and puts the cursor at its top.
                out.write_all(b"\x1b[H\x1b[2J")?;
            }
            out.write_all(ps::printable(&text).as_bytes())?;
            out.flush()
        });
        match written {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(0),
            Err(error) => return Err((FAILURE, error.to_string())),
            Ok(()) => {}
        }
        // A process that was stopped for one reading answers the next one again.
        before.extend(now);
        left -= 1;
    }
    Ok(0)
}

fn read() -> ExitResult<Reading> {
    let folder = socket_folder();
    let failed = |text: String| (FAILURE, text);
    if folder.exists() {
        check_folder(&folder).map_err(|error| failed(error.to_string()))?;
    }
    let pids =
        ps::listed(&folder).map_err(|error| failed(format!("{}: {error}", folder.display())))?;
    let mut ranks = Reading::new();
    for pid in pids {
        // A process that ends meanwhile, or is stopped, is not shown.
        let Ok(answer) = ps::ask(&folder, pid) else {
            continue;
        };
        let time = Instant::now();
        let answer: Result<ps::ProcessReport, _> = serde_json::from_value(answer);
        let report = match answer {
            Ok(report) => report,
            Err(error) => {
                eprintln!("cinch: process {pid} has another version of cinch: {error}");
                continue;
            }
        };
        for report in report.communicators {
            let totals = Totals::of(&report.metrics);
            let key = (report.id.clone(), report.rank, pid);
            ranks.insert(
                key,
                RankReading {
                    time,
                    report,
                    totals,
                },
            );
        }
    }
    Ok(ranks)
}

fn table(before: &Reading, now: &Reading, out: &mut dyn Write) -> io::Result<()> {
    if now.is_empty() {
        return writeln!(
            out,
            "no process with a communicator answers; ranks that run with CINCH_PS=1 do"
        );
    }
    writeln!(
        out,
        "{:<16} {:>5} {:>8} {:>9} {:>9} {:>9} {:>6} {:>10}  waits for",
        "communicator", "rank", "pid", "calls/s", "GB/s", "wire GB/s", "ratio", "mean us"
    )?;
    for (key, reading) in now {
        let (rank, earlier) = (&reading.report, before.get(key));
        let change = reading.totals.since(earlier.map(|earlier| &earlier.totals));
        // A rank that is new has no rates yet.
        let seconds = earlier.map_or(f64::INFINITY, |earlier| {
            let passed = reading.time.duration_since(earlier.time);
            passed.as_secs_f64().max(1e-3)
        });
        let name = if rank.name.is_empty() {
            &rank.id
        } else {
            &rank.name
        };
        let name: String = name.chars().take(16).collect();
        writeln!(
            out,
            "{name:<16} {:>5} {:>8} {:>9.1} {:>9.3} {:>9.3} {:>6} {:>10}  {}",
            rank.rank,
            key.2,
            change.calls as f64 / seconds,
            change.bytes as f64 / seconds / 1e9,
            change.wire_bytes as f64 / seconds / 1e9,
            quotient(change.raw_bytes as f64, change.wire_bytes as f64, 2),
            quotient(change.seconds * 1e6, change.timed as f64, 1),
            waits(rank, earlier.map(|earlier| &earlier.report), seconds)
        )?;
    }
    Ok(())
}

fn quotient(above: f64, below: f64, digits: usize) -> String {
    match below > 0.0 {
        true => format!("{:.digits$}", above / below),
        false => "-".into(),
    }
}

/// Returns the rank for which a rank has waited longest since the last reading, with the share of the time; or the
/// wait that goes on.
fn waits(now: &RankReport, before: Option<&RankReport>, seconds: f64) -> String {
    if let Some(waits) = &now.waits
        && let Some(missing) = waits.missing.first()
    {
        return format!("rank {} since {:.1} s", missing.rank, waits.seconds);
    }
    let earlier = |rank: usize| {
        let waits = before.map(|before| &before.metrics.peer_waits);
        let found = waits.and_then(|waits| waits.iter().find(|wait| wait.rank == rank));
        found.map_or(0.0, |wait| wait.seconds)
    };
    let changes = now
        .metrics
        .peer_waits
        .iter()
        .map(|wait| (wait.rank, wait.seconds - earlier(wait.rank)));
    let longest = changes.max_by(|a, b| a.1.total_cmp(&b.1));
    match longest.filter(|(_, waited)| *waited > 0.0) {
        Some((rank, waited)) => format!("rank {rank} {:.0} %", 100.0 * waited / seconds),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(calls: u64, wait: f64) -> RankReport {
        let text = format!(
            r#"{{"name": "", "id": "1f", "rank": 1, "ranks": [], "calls": 9, "failed": null, "waits": null, "recent": [],
            "metrics": {{"calls": [{{"collective": "all_reduce", "codec": "linear8", "size_class": 1024,
            "calls": {calls}, "bytes": {}, "raw_bytes": {}, "wire_bytes": {}, "timed_calls": {}, "timed_seconds": {}}}],
            "peer_waits": [{{"rank": 0, "seconds": {wait}}}]}}}}"#,
            calls * 1_000_000,
            calls * 1_000_000,
            calls * 250_000,
            calls / 2,
            calls as f64 / 2.0 * 20e-6,
        );
        serde_json::from_str(&text).unwrap()
    }

    fn reading(time: Instant, report: RankReport) -> Reading {
        let totals = Totals::of(&report.metrics);
        let reading = RankReading {
            time,
            report,
            totals,
        };
        [(("1f".to_string(), 1, 77), reading)].into()
    }

    #[test]
    fn rates_are_changes_between_readings() {
        let begin = Instant::now();
        let before = reading(begin, rank(100, 1.0));
        let now = reading(begin + Duration::from_secs(2), rank(2100, 1.5));
        let mut out = Vec::new();
        table(&before, &now, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        let expected = [
            "1f", "1", "77", "1000.0", "1.000", "0.250", "4.00", "20.0", "rank", "0", "25", "%",
        ];
        assert_eq!(words, expected, "{text}");
        let mut out = Vec::new();
        table(&Reading::new(), &now, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        let expected = ["1f", "1", "77", "0.0", "0.000", "0.000", "4.00", "20.0"];
        assert_eq!(words[..8], expected, "a new rank: {text}");
        let empty = Reading::new();
        let mut out = Vec::new();
        table(&empty, &empty, &mut out).unwrap();
        assert!(String::from_utf8(out).unwrap().contains("CINCH_PS=1"));
    }

    #[test]
    fn intervals_are_checked() {
        assert_eq!(parse_interval("0.5"), Ok(0.5));
        assert!(
            ["0", "1e9", "x", "nan"]
                .iter()
                .all(|text| parse_interval(text).is_err())
        );
    }
}
