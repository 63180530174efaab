use super::*;
use cinch::recorder::{CommLabel, GpuNumbers, ProcessSnapshot, RankName, RankSnapshot, WaitRecord};
use cinch::sys::clock::monotonic_nanoseconds;
use cinch::{Error, ErrorKind};
use std::cell::Cell;

const VERSIONS: Versions = Versions {
    nccl: 22809,
    driver: Some(13000),
};

/// Returns process `rank` of a job of 3, with one rank that has made `calls` calls of all_reduce.
fn process(rank: usize, calls: u64) -> ProcessSnapshot {
    let name = |rank: usize| RankName {
        text: format!("rank {rank} (host a, pid {})", 100 + rank),
        host: "a".into(),
        pid: 100 + rank as u32,
    };
    ProcessSnapshot {
        host: "a".into(),
        pid: 100 + rank as u32,
        service: String::new(),
        ranks: vec![RankSnapshot {
            label: CommLabel {
                name: "tp\u{1b}".into(),
                id: [0, 0, 0, 0, 0, 0, 1, 0xab],
                rank,
                ranks: (0..3).map(name).collect(),
                gpu: Some(GpuNumbers {
                    cuda: 0,
                    nvml: Some(rank as u32),
                }),
            },
            counts: vec![calls],
            is_closing: false,
            is_destroyed: false,
            is_aborted: false,
            error: None,
            waits: None,
        }],
    }
}

fn job(processes: Vec<ProcessSnapshot>) -> JobSnapshot {
    JobSnapshot {
        processes,
        unresponsive: Vec::new(),
        elapsed: Duration::from_millis(2),
    }
}

fn ask(session: &mut RasSession, line: &str) -> TextReply {
    session.answer(line, &|_| panic!("{line} gathers nothing"))
}

#[test]
fn commands_are_answered_as_clients_of_nccl_expect() {
    let mut session = RasSession::new(VERSIONS);
    for (line, text) in [
        ("CLIENT PROTOCOL 2", "SERVER PROTOCOL 2\n"),
        ("client protocol 9", "SERVER PROTOCOL 2\n"),
        ("TIMEOUT 7", "OK\n"),
        ("SET FORMAT json", "OK\n"),
        ("set format TEXT", "OK\n"),
        (
            "MONITOR all",
            "ERROR: MONITOR is not offered; ask for STATUS in turn\n",
        ),
        ("TIMEOUT -1", "ERROR: TIMEOUT takes whole seconds, not -1\n"),
        (
            "SET FORMAT xml",
            "ERROR: SET FORMAT takes text or json, not xml\n",
        ),
        ("", "ERROR: unknown command \n"),
    ] {
        let reply = ask(&mut session, line);
        assert_eq!(
            (reply.text.as_str(), reply.is_last),
            (text, false),
            "{line}"
        );
    }
    // The limit of a client counts, and 0 is the longest one.
    for (seconds, limit) in [("7", 7), ("0", 60), ("100000", 60)] {
        ask(&mut session, &format!("TIMEOUT {seconds}"));
        let waited = Cell::new(0);
        let reply = session.answer("verbose STATUS", &|timeout| {
            waited.set(timeout.as_secs());
            job(Vec::new())
        });
        assert!(reply.is_last);
        assert_eq!(waited.get(), limit, "TIMEOUT {seconds}");
    }
}

#[test]
fn text_names_missing_ranks_failures_differences_and_waits() {
    let mut processes = vec![process(0, 5), process(1, 4)];
    processes[0].ranks[0].error = Some(Error::new(
        ErrorKind::Remote,
        "rank 2 (host a, pid 102) died: its control connection closed",
    ));
    processes[1].ranks[0].waits = Some(WaitRecord {
        missing: vec![(2, "1 message".into())],
        since: monotonic_nanoseconds(),
    });
    let text = text::status(&job(processes), VERSIONS, false);
    for part in [
        "in place of NCCL 2.28.9, CUDA driver version 13000\n",
        "      1          3              2           2\n",
        "  0  00000000000001ab       3         2   RUNNING  INCOMPLETE,ERROR,MISMATCH\n",
        "communicator 00000000000001ab \"tp\u{fffd}\": INCOMPLETE: no data from rank 2 (host a, pid 102) (dead)\n",
        "on ranks 0: remote error: rank 2 (host a, pid 102) died",
        "MISMATCH: AllReduce calls: 4 on ranks 1, 5 on ranks 0\n",
        "WAIT: rank 1 waits 0.0 s for rank 2 (1 message)\n",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert!(!text.contains('\u{1b}'));
}

#[test]
fn healthy_job_has_no_errors() {
    let text = text::status(
        &job((0..3).map(|rank| process(rank, 9)).collect()),
        VERSIONS,
        true,
    );
    assert!(text.contains("3   RUNNING  OK\n"), "{text}");
    assert!(text.contains("Errors\n======\n\nnone\n"), "{text}");
    assert!(text.contains("Warnings\n========\n\nnone\n"), "{text}");
}

#[test]
fn ranks_that_leave_are_told_apart_from_silent_ranks() {
    // Rank 1 closes, and the process of rank 2 lives without the communicator.
    let mut processes: Vec<_> = (0..3).map(|rank| process(rank, 9)).collect();
    processes[1].ranks[0].is_closing = true;
    processes[2].ranks.clear();
    let text = text::status(&job(processes), VERSIONS, false);
    let line = "MISMATCH: status NOCOMM on ranks 2, RUNNING on ranks 0, FINALIZE on ranks 1\n";
    assert!(text.contains(line), "{text}");
    assert!(text.contains("2  FINALIZE  MISMATCH\n"), "{text}");
}

#[test]
fn long_lists_are_cut_unless_verbose() {
    let mut job = job(vec![process(0, 1)]);
    job.unresponsive = (200..220).collect();
    let cut = text::status(&job, VERSIONS, false);
    assert!(cut.contains("209, and 10 more\n"), "{cut}");
    assert!(text::status(&job, VERSIONS, true).contains("218, 219\n"));
}
