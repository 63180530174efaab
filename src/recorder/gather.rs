//! Gathers the snapshots of a job's processes on this host, and joins them to communicators.
//!
//! Processes reach each other by sockets in the folder of their user. Ranks of other hosts, of other users and of
//! containers with a folder of their own are missing.

use super::snapshot::{ProcessSnapshot, RankSnapshot};
use super::socket_file::{check_folder, remove_stale, socket_folder};
use super::{CommLabel, RankName};
use crate::sys::socket::{self, Socket};
use crate::wire::Wire;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{ErrorKind, IoSliceMut};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Returns the ending of the names of sockets that answer with snapshots, for processes with this service address. A
/// stopped process of another job must not delay the answers of this one.
pub(super) fn suffix(service: &str) -> String {
    format!("{:08x}.snapshot", crc32c::crc32c(service.as_bytes()))
}

/// Largest snapshot of a process in bytes; 1,000 communicators of 1,000 ranks take about 50 MB.
const MAX_BYTES: usize = 256 << 20;

/// Number of processes that are asked; a host has fewer GPUs.
const MAX_PROCESSES: usize = 1024;

/// State of a job, as its processes on this host report it.
#[derive(Debug)]
pub struct JobSnapshot {
    /// The processes that answered, by their number.
    pub processes: Vec<ProcessSnapshot>,
    /// Ids of processes that did not answer in time.
    pub unresponsive: Vec<u32>,
    /// Time that gathering took.
    pub elapsed: Duration,
}

/// A rank that answered.
#[derive(Clone, Copy, Debug)]
pub struct GatheredRank<'a> {
    /// The rank's process.
    pub process: &'a ProcessSnapshot,
    /// The rank.
    pub rank: &'a RankSnapshot,
}

/// A rank without data.
#[derive(Clone, Copy, Debug)]
pub struct MissingRank<'a> {
    /// Number of the rank.
    pub rank: usize,
    /// Host and process of the rank.
    pub name: &'a RankName,
    /// Whether the rank's process gave no answer at all. Otherwise it is no member of the communicator any more.
    pub is_unresponsive: bool,
    /// Whether a rank that answered reports its death.
    pub is_dead: bool,
}

/// A communicator as its ranks report it.
#[derive(Debug)]
pub struct CommSnapshot<'a> {
    /// The communicator, by the label of its lowest rank that answered.
    pub label: &'a CommLabel,
    /// The ranks that answered, by their number.
    pub ranks: BTreeMap<usize, GatheredRank<'a>>,
    /// The other ranks, ascending.
    pub missing: Vec<MissingRank<'a>>,
}

impl JobSnapshot {
    /// Joins the ranks to communicators. The largest come first; equally large ones are in the order of their ids.
    pub fn communicators(&self) -> Vec<CommSnapshot<'_>> {
        let answered: BTreeSet<(&str, u32)> = self
            .processes
            .iter()
            .map(|process| (process.host.as_str(), process.pid))
            .collect();
        let mut found: BTreeMap<[u8; 8], BTreeMap<usize, GatheredRank<'_>>> = BTreeMap::new();
        for process in &self.processes {
            for rank in &process.ranks {
                let ranks = found.entry(rank.label.id).or_default();
                ranks.insert(rank.label.rank, GatheredRank { process, rank });
            }
        }
        let mut comms: Vec<CommSnapshot<'_>> = Vec::new();
        for ranks in found.into_values() {
            let Some((_, first)) = ranks.first_key_value() else {
                continue;
            };
            let label = &first.rank.label;
            let missing = missing(label, &ranks, &answered);
            comms.push(CommSnapshot {
                label,
                ranks,
                missing,
            });
        }
        comms.sort_by_key(|comm| std::cmp::Reverse(comm.label.ranks.len()));
        comms
    }
}

/// Returns the ranks of `label` that are not among `ranks`.
fn missing<'a>(
    label: &'a CommLabel,
    ranks: &BTreeMap<usize, GatheredRank<'a>>,
    answered: &BTreeSet<(&str, u32)>,
) -> Vec<MissingRank<'a>> {
    let reasons: Vec<&str> = ranks
        .values()
        .filter_map(|gathered| gathered.rank.error.as_ref())
        .map(|error| error.message())
        .collect();
    let numbered = label.ranks.iter().enumerate();
    numbered
        .filter(|(rank, _)| !ranks.contains_key(rank))
        .map(|(rank, name)| {
            // The control plane names a dead rank by its text.
            let died = format!("{} died", name.text);
            MissingRank {
                rank,
                name,
                is_unresponsive: !answered.contains(&(name.host.as_str(), name.pid)),
                is_dead: reasons.iter().any(|reason| reason.contains(&died)),
            }
        })
        .collect()
}

/// A process whose answer has not ended.
struct PendingAnswer {
    pid: u32,
    socket: Socket,
    bytes: Vec<u8>,
}

/// Gathers the snapshots of this process, which is `own`, and of the other processes with its service address. Waits at
/// most `timeout`, and no longer once `end` is closed at its other side.
pub(super) fn gather(own: ProcessSnapshot, timeout: Duration, end: &OwnedFd) -> JobSnapshot {
    let begun = Instant::now();
    let (mut pending, mut unresponsive) = ask_all(&socket_folder(), &own);
    let mut processes = Vec::new();
    let deadline = begun + timeout;
    while !pending.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut interests: Vec<socket::Interest> = pending
            .iter()
            .map(|one| socket::interest(&one.socket, true, false))
            .collect();
        interests.push(socket::interest(end, true, false));
        let count = socket::poll(&mut interests, left);
        let is_ending = interests.last().is_some_and(|end| end.revents != 0);
        if left.is_zero() || count.is_err() || is_ending {
            break;
        }
        let mut at = 0;
        pending.retain_mut(|one| {
            at += 1;
            if interests[at - 1].revents == 0 {
                return true;
            }
            match read(one) {
                Some(Some(answer)) => {
                    processes.extend(Some(answer).filter(|it| it.service == own.service));
                    false
                }
                // The answer is damaged, cut off or of another version.
                Some(None) => {
                    unresponsive.push(one.pid);
                    false
                }
                None => true,
            }
        });
    }
    unresponsive.extend(pending.iter().map(|one| one.pid));
    unresponsive.sort_unstable();
    processes.push(own);
    processes.sort_by_key(|process| process.pid);
    JobSnapshot {
        processes,
        unresponsive,
        elapsed: begun.elapsed(),
    }
}

/// Reads what has arrived. Returns `None` if more will come, or the snapshot unless it is damaged.
fn read(answer: &mut PendingAnswer) -> Option<Option<ProcessSnapshot>> {
    let mut part = [0; 16 << 10];
    loop {
        match socket::read(&answer.socket, &mut [IoSliceMut::new(&mut part)]) {
            Ok(0) => return Some(ProcessSnapshot::from_bytes(&answer.bytes).ok()),
            Ok(count) if answer.bytes.len() + count <= MAX_BYTES => {
                answer.bytes.extend(&part[..count]);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => return Some(None),
        }
    }
}

/// Connects to the sockets of all other processes. Returns the connections, and the processes that take none.
fn ask_all(folder: &Path, own: &ProcessSnapshot) -> (Vec<PendingAnswer>, Vec<u32>) {
    let (mut pending, mut unresponsive) = (Vec::new(), Vec::new());
    if check_folder(folder).is_err() {
        return (pending, unresponsive);
    }
    for (pid, path) in listed(folder, &suffix(&own.service)) {
        if pid == own.pid {
            continue;
        }
        match socket::connect_file(&path) {
            Ok(socket) => pending.push(PendingAnswer {
                pid,
                socket,
                bytes: Vec::new(),
            }),
            // The process has ended since the folder was read, or was killed and left its socket.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => remove_stale(pid, &path),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(_) => unresponsive.push(pid),
        }
    }
    (pending, unresponsive)
}

/// Returns the processes with a socket in `folder` whose name ends with `suffix`, ascending.
fn listed(folder: &Path, suffix: &str) -> Vec<(u32, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let pid = name.to_str()?.strip_suffix(suffix)?.strip_suffix('.')?;
            Some((pid.parse().ok()?, entry.path()))
        })
        .collect();
    found.sort_unstable();
    found.truncate(MAX_PROCESSES);
    found
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::tests::rank_snapshot;
    use super::*;

    fn process(pid: u32, ranks: Vec<RankSnapshot>) -> ProcessSnapshot {
        ProcessSnapshot {
            host: "a".into(),
            pid,
            service: String::new(),
            ranks,
        }
    }

    #[test]
    fn ranks_are_joined_to_communicators_and_missing_ranks_are_explained() {
        // Communicator 2 has 5 ranks: 0 and 2 answer, 1 died, 3 has left it, and 4 does not answer.
        let mut job = JobSnapshot {
            processes: vec![
                process(100, vec![rank_snapshot(1, 0, 2), rank_snapshot(2, 0, 5)]),
                process(102, vec![rank_snapshot(1, 1, 2), rank_snapshot(2, 2, 5)]),
                process(103, Vec::new()),
            ],
            unresponsive: vec![104],
            elapsed: Duration::ZERO,
        };
        let reason = "rank 2 (host a, pid 102) reports: rank 1 (host a, pid 101) died: its end";
        job.processes[0].ranks[1].error = Some(crate::Error::new(crate::ErrorKind::Remote, reason));
        let comms = job.communicators();
        assert_eq!(comms.len(), 2);
        let large = &comms[0];
        assert_eq!(large.label.id, [2; 8]);
        let answered: Vec<(usize, u32)> = large
            .ranks
            .iter()
            .map(|(rank, gathered)| (*rank, gathered.process.pid))
            .collect();
        assert_eq!(answered, [(0, 100), (2, 102)]);
        let missing: Vec<(usize, bool, bool)> = large
            .missing
            .iter()
            .map(|one| (one.rank, one.is_unresponsive, one.is_dead))
            .collect();
        assert_eq!(
            missing,
            [(1, true, true), (3, false, false), (4, true, false)]
        );
        assert!(comms[1].missing.is_empty() && comms[1].ranks.len() == 2);
    }
}
