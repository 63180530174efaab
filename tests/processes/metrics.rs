//! Counters of running ranks: the file of Prometheus, `cinch top`, and the rank for which others wait.

use super::rank_group::{self, RankGroup, say};
use crate::support::{config, launcher};
use cinch::types::TransportKind;
use cinch::{Communicator, ReduceOp};
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const LATE: Duration = Duration::from_millis(40);
const CALLS: usize = 25;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Rank 1 comes late to every call.
pub fn rank_process(task: &str) {
    rank_group::run_for(Duration::from_secs(60), || work(task));
}

fn work(task: &str) -> Outcome<()> {
    let (rank, file) = task.split_once(' ').ok_or("no file")?;
    let rank = rank.parse()?;
    let mut config = config(TransportKind::Shm);
    config.metrics_file = Some(Path::new(file).into());
    config.metrics_interval = Duration::from_millis(100);
    config.comm_name = "dp".into();
    let id = rank_group::receive_id(rank, &config)?;
    let comm = Communicator::init(&id, rank, 2, config)?;
    let mut data = vec![1.0f32; 25_000];
    for _ in 0..CALLS {
        if rank == 1 {
            std::thread::sleep(LATE);
        }
        comm.all_reduce_in_place(&mut data, ReduceOp::Max)?;
    }
    // The thread of the recorder writes while the rank lives.
    let begun = std::time::Instant::now();
    let all = format!("}} {CALLS}\n");
    while !std::fs::read_to_string(written(file, std::process::id()))
        .is_ok_and(|text| text.contains(&all))
    {
        if begun.elapsed() > Duration::from_secs(20) {
            return Err("no file with all calls after 20 s".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    comm.barrier()?;
    comm.finalize()?;
    drop(comm);
    say(&format!("ended {}", std::process::id()));
    Ok(())
}

fn written(pattern: &str, pid: u32) -> PathBuf {
    pattern.replace("%p", &pid.to_string()).into()
}

/// Returns the samples of a file in Prometheus' format by their names and labels.
fn samples(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ').expect(line);
        (name.to_string(), value.parse().expect(line))
    };
    lines.map(sample).collect()
}

/// Returns the sum of the samples that begin with `name` and have all `labels`.
fn sum(samples: &BTreeMap<String, f64>, name: &str, labels: &[&str]) -> f64 {
    let wanted =
        |key: &&String| key.starts_with(name) && labels.iter().all(|label| key.contains(label));
    samples.keys().filter(wanted).map(|key| samples[key]).sum()
}

#[test]
fn files_have_all_calls_and_name_the_rank_that_comes_late() {
    let folder = tempfile_folder();
    let pattern = folder.join("cinch-%p.prom").display().to_string();
    let tasks: Vec<String> = (0..2).map(|rank| format!("{rank} {pattern}")).collect();
    let mut group = RankGroup::start("metrics", &tasks);
    group.hand_on_id();
    let pids = group.wait_for("ended", &[0, 1]);
    let files: Vec<_> = [0, 1]
        .map(|rank: usize| {
            let path = written(&pattern, pids[rank].parse().unwrap());
            // Exporters run as other users.
            let mode = std::fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o444, 0o444, "{mode:o}");
            samples(&std::fs::read_to_string(path).unwrap())
        })
        .into();
    for found in &files {
        let class = [
            "collective=\"all_reduce\"",
            "codec=\"raw\"",
            "size_class=\"131072\"",
            "communicator=\"dp\"",
        ];
        assert_eq!(sum(found, "cinch_calls_total", &class), CALLS as f64);
        assert_eq!(
            sum(found, "cinch_call_bytes_total", &class),
            100_000.0 * CALLS as f64
        );
        assert_eq!(
            sum(found, "cinch_wire_bytes_total", &class),
            100_000.0 * CALLS as f64
        );
        // Calls of more than 64 KiB are all timed.
        assert_eq!(sum(found, "cinch_timed_calls_total", &class), CALLS as f64);
        assert_eq!(sum(found, "cinch_communicator_failed", &[]), 0.0);
    }
    let late = LATE.as_secs_f64() * CALLS as f64;
    let waited = sum(&files[0], "cinch_peer_wait_seconds_total", &["peer=\"1\""]);
    let timed = sum(&files[0], "cinch_timed_call_seconds_total", &[]);
    // On a busy machine rank 0 may come later than rank 1.
    assert!(waited > 0.2 * late, "{waited} of {late} s: {:?}", files[0]);
    // Waits of small calls count too, of which one in 64 is timed.
    assert!(1.05 * timed >= waited, "{timed} {waited}");
    let other = sum(&files[1], "cinch_peer_wait_seconds_total", &["peer=\"0\""]);
    assert!(other < 0.5 * waited, "{other} beside {waited}");
    let advised = launcher::output(
        launcher::cinch().args(["advise", "--json"]).args(
            pids.iter()
                .map(|pid| written(&pattern, pid.parse().unwrap())),
        ),
    );
    assert!(advised.status.success(), "{advised:?}");
    let advice: serde_json::Value = serde_json::from_slice(&advised.stdout).unwrap();
    let communicator = &advice["communicators"][0];
    assert_eq!(communicator["communicator"], "dp");
    assert_eq!(
        (&communicator["ranks"], &communicator["hosts"]),
        (&2.into(), &1.into())
    );
    // A rank's seconds are the mean of both.
    let both: f64 = files
        .iter()
        .map(|found| sum(found, "cinch_timed_call_seconds_total", &[]))
        .sum();
    let seconds = communicator["seconds"].as_f64().unwrap();
    assert!(
        (seconds - both / 2.0).abs() < 0.01 * both,
        "{seconds} {both}"
    );
    std::fs::remove_dir_all(&folder).unwrap();
}

fn tempfile_folder() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("cinch-metrics-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}
