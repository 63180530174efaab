//! The status for people.

use super::Versions;
use super::status::{COUNTED, RankStage, async_error, count_of, grouped, stages};
use crate::error::words;
use crate::types::ncclSuccess;
use cinch::recorder::{CommSnapshot, JobSnapshot};
use cinch::sys::clock::monotonic_nanoseconds;
use std::collections::BTreeSet;
use std::fmt::Write;

/// Number of ranks of a list beyond which only a verbose status prints them all.
const MAX_LISTED: usize = 10;

/// Returns the state of a job. A verbose status lists all ranks that differ.
pub(super) fn status(job: &JobSnapshot, versions: Versions, is_verbose: bool) -> String {
    let comms = job.communicators();
    let mut text = String::new();
    let driver = versions
        .driver
        .map_or("none".into(), |version| version.to_string());
    let _ = writeln!(
        text,
        "cinch {} in place of NCCL {}, CUDA driver version {driver}\n",
        cinch::VERSION,
        versions.nccl_text()
    );
    summary(job, &comms, &mut text);
    table(job, &comms, &mut text);
    let places: Vec<Problems> = comms
        .iter()
        .map(|comm| Problems::of(comm, is_verbose))
        .collect();
    section("Errors", places.iter().map(|one| &one.errors), &mut text);
    let mut warnings: Vec<Vec<String>> = places.into_iter().map(|one| one.warnings).collect();
    if !job.unresponsive.is_empty() {
        warnings.push(vec![format!(
            "no answer in time from processes {}",
            listed(&job.unresponsive, is_verbose)
        )]);
    }
    section("Warnings", warnings.iter(), &mut text);
    text
}

fn headline(title: &str, text: &mut String) {
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(text, "{title}\n{}\n", "=".repeat(title.len()));
}

fn summary(job: &JobSnapshot, comms: &[CommSnapshot<'_>], text: &mut String) {
    headline("Job summary", text);
    let names = || comms.iter().flat_map(|comm| &comm.label.ranks);
    let mut processes: BTreeSet<(&str, u32)> =
        names().map(|name| (name.host.as_str(), name.pid)).collect();
    processes.extend(job.processes.iter().map(|one| (one.host.as_str(), one.pid)));
    let hosts: BTreeSet<&str> = processes.iter().map(|(host, _)| *host).collect();
    let gpus: BTreeSet<(&str, u32)> = job
        .processes
        .iter()
        .flat_map(|process| process.ranks.iter().map(move |rank| (process, rank)))
        .filter_map(|(process, rank)| {
            let gpu = rank.label.gpu?;
            Some((process.host.as_str(), gpu.nvml.unwrap_or(gpu.cuda)))
        })
        .collect();
    let _ = writeln!(
        text,
        "  hosts  processes  that answered  their GPUs\n{:>7}  {:>9}  {:>13}  {:>10}\n",
        hosts.len(),
        processes.len(),
        job.processes.len(),
        gpus.len()
    );
}

fn table(job: &JobSnapshot, comms: &[CommSnapshot<'_>], text: &mut String) {
    headline(
        &format!("Communicators ({:.3} s)", job.elapsed.as_secs_f64()),
        text,
    );
    if comms.is_empty() {
        text.push_str("none\n\n");
        return;
    }
    text.push_str("  #              hash   ranks  answered    status  errors\n");
    for (at, comm) in comms.iter().enumerate() {
        let stage = stages(comm)
            .last_key_value()
            .map_or(RankStage::NoComm, |(stage, _)| *stage);
        let _ = writeln!(
            text,
            "{at:>3}  {:016x}  {:>6}  {:>8}  {:>8}  {}",
            u64::from_be_bytes(comm.label.id),
            comm.label.ranks.len(),
            comm.ranks.len(),
            stage.name(),
            marks(comm)
        );
    }
    text.push('\n');
}

/// Returns NCCL's words for what is wrong with a communicator.
fn marks(comm: &CommSnapshot<'_>) -> String {
    let marks = [
        (
            "INCOMPLETE",
            comm.missing.iter().any(|one| one.is_unresponsive),
        ),
        (
            "ERROR",
            comm.ranks
                .values()
                .any(|one| async_error(one.rank) != ncclSuccess),
        ),
        ("MISMATCH", differs(comm)),
    ];
    let found: Vec<&str> = marks
        .iter()
        .filter(|(_, is_so)| *is_so)
        .map(|(mark, _)| *mark)
        .collect();
    match found.is_empty() {
        true => "OK".into(),
        false => found.join(","),
    }
}

fn differs(comm: &CommSnapshot<'_>) -> bool {
    let of_calls = |(_, collective)| grouped(comm, |rank| count_of(rank, collective)).len() > 1;
    stages(comm).len() > 1 || COUNTED.into_iter().any(of_calls)
}

/// Sentences about one communicator.
struct Problems {
    errors: Vec<String>,
    warnings: Vec<String>,
}

impl Problems {
    fn of(comm: &CommSnapshot<'_>, is_verbose: bool) -> Problems {
        let name = match comm.label.name.as_str() {
            "" => String::new(),
            name => format!(" \"{}\"", printable(name)),
        };
        let about = format!(
            "communicator {:016x}{name}: ",
            u64::from_be_bytes(comm.label.id)
        );
        let mut errors = missing(comm, is_verbose);
        errors.extend(failures(comm));
        let warnings = differences(comm, is_verbose).into_iter().chain(waits(comm));
        Problems {
            warnings: warnings.map(|line| format!("{about}{line}")).collect(),
            errors: errors.iter().map(|line| format!("{about}{line}")).collect(),
        }
    }
}

/// Returns the ranks that gave no answer.
fn missing(comm: &CommSnapshot<'_>, is_verbose: bool) -> Vec<String> {
    let silent = comm.missing.iter().filter(|one| one.is_unresponsive);
    let names: Vec<String> = silent
        .map(|one| match one.is_dead {
            true => format!("{} (dead)", one.name.text),
            false => one.name.text.clone(),
        })
        .collect();
    match names.is_empty() {
        true => Vec::new(),
        false => vec![format!(
            "INCOMPLETE: no data from {}",
            listed(&names, is_verbose)
        )],
    }
}

/// Returns a line for each failure and the ranks that report it.
fn failures(comm: &CommSnapshot<'_>) -> Vec<String> {
    let reason = |rank: &cinch::recorder::RankSnapshot| match async_error(rank) {
        ncclSuccess => None,
        code => rank
            .error
            .as_ref()
            .map(|error| (words(code), error.to_string())),
    };
    grouped(comm, reason)
        .into_iter()
        .filter_map(|(reason, ranks)| {
            let (code, sentence) = reason?;
            Some(format!(
                "ERROR: {} on ranks {}: {}",
                code.to_string_lossy(),
                listed(&ranks, true),
                printable(&sentence)
            ))
        })
        .collect()
}

/// Returns the stages and the numbers of calls in which ranks differ.
fn differences(comm: &CommSnapshot<'_>, is_verbose: bool) -> Vec<String> {
    let mut lines = Vec::new();
    let stages = stages(comm);
    if stages.len() > 1 {
        let parts: Vec<String> = stages
            .iter()
            .map(|(stage, ranks)| {
                format!("{} on ranks {}", stage.name(), listed(ranks, is_verbose))
            })
            .collect();
        lines.push(format!("MISMATCH: status {}", parts.join(", ")));
    }
    for (name, collective) in COUNTED {
        let counts = grouped(comm, |rank| count_of(rank, collective));
        if counts.len() > 1 {
            let parts: Vec<String> = counts
                .iter()
                .map(|(count, ranks)| format!("{count} on ranks {}", listed(ranks, is_verbose)))
                .collect();
            lines.push(format!("MISMATCH: {name} calls: {}", parts.join(", ")));
        }
    }
    lines
}

/// Returns a line for each rank that waits.
fn waits(comm: &CommSnapshot<'_>) -> Vec<String> {
    let now = monotonic_nanoseconds();
    let line = |(rank, gathered): (&usize, &cinch::recorder::GatheredRank<'_>)| {
        // A failed call waits no longer.
        let waits = gathered.rank.waits.as_ref();
        let waits = waits.filter(|_| gathered.rank.error.is_none())?;
        let seconds = now.saturating_sub(waits.since) as f64 * 1e-9;
        let missing: Vec<String> = waits
            .missing
            .iter()
            .map(|(peer, what)| format!("rank {peer} ({})", printable(what)))
            .collect();
        Some(format!(
            "WAIT: rank {rank} waits {seconds:.1} s for {}",
            missing.join(", ")
        ))
    };
    comm.ranks.iter().filter_map(line).collect()
}

fn section<'a>(title: &str, lines: impl Iterator<Item = &'a Vec<String>>, text: &mut String) {
    headline(title, text);
    let lines: Vec<&String> = lines.flatten().collect();
    if lines.is_empty() {
        text.push_str("none\n");
    }
    for line in lines {
        let _ = writeln!(text, "{line}");
    }
    text.push('\n');
}

fn listed<T: ToString>(items: &[T], is_verbose: bool) -> String {
    let shown = match is_verbose {
        true => items.len(),
        false => items.len().min(MAX_LISTED),
    };
    let mut text: Vec<String> = items[..shown].iter().map(ToString::to_string).collect();
    if shown < items.len() {
        text.push(format!("and {} more", items.len() - shown));
    }
    text.join(", ")
}

/// Returns text without control characters, which a terminal obeys.
fn printable(text: &str) -> String {
    text.chars()
        .map(|c| match c.is_control() {
            true => char::REPLACEMENT_CHARACTER,
            false => c,
        })
        .collect()
}
