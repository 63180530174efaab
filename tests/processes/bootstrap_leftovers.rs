//! Control planes must leave no descriptor and no thread behind. The test runs in a process of its
//! own, because it counts the descriptors and threads of its process.

use super::child;
use cinch::bootstrap::{ControlPlane, OutOfBand};
use cinch::sync::Fault;
use cinch::{Config, Error, ErrorKind, UniqueId};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn counts() -> (usize, usize) {
    let entries = |path| std::fs::read_dir(path).unwrap().count();
    (entries("/proc/self/fd"), entries("/proc/self/task"))
}

fn world(nranks: usize, config: &Config) -> Vec<(Arc<Fault>, Arc<ControlPlane>)> {
    let id = UniqueId::create_for_one_host(config).unwrap();
    std::thread::scope(|scope| {
        let join = |rank| {
            scope.spawn(move || {
                let fault = Fault::new();
                let plane = ControlPlane::join(&id, rank, nranks, config, fault.clone()).unwrap();
                (fault, plane)
            })
        };
        let threads: Vec<_> = (0..nranks).map(join).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// Ids that nobody uses hold one thread together, and few descriptors. The newest still serves its ranks.
#[test]
fn unused_ids_hold_one_thread_and_a_bounded_number_of_descriptors() {
    const IDS: usize = 2000;
    const LIMIT: usize = 256;
    child::alone(|| {
        limit_descriptors(LIMIT);
        let config = Config {
            init_timeout: Duration::from_secs(20),
            log_level: "none".into(),
            ..Config::default()
        };
        let base = counts();
        let ids: Vec<UniqueId> = (0..IDS)
            .map(|_| UniqueId::create_for_one_host(&config).unwrap())
            .collect();
        let (descriptors, threads) = counts();
        println!("{IDS} ids: {threads} threads instead of {}", base.1);
        assert!(threads <= base.1 + 1, "{threads} threads");
        assert!(
            descriptors <= base.0 + LIMIT / 2,
            "{descriptors} descriptors"
        );
        std::thread::scope(|scope| {
            let join = |rank| {
                let newest = &ids[IDS - 1];
                ControlPlane::join(newest, rank, 2, &config, Fault::new())
                    .map(|plane| plane.leave())
            };
            let other = scope.spawn(move || join(1));
            join(0).unwrap();
            other.join().unwrap().unwrap();
        });
        let oldest = ControlPlane::join(&ids[0], 1, 2, &config, Fault::new()).unwrap_err();
        assert_eq!(oldest.kind(), ErrorKind::Remote, "{oldest}");
        ids.iter().for_each(UniqueId::cancel);
        let until = Instant::now() + Duration::from_secs(10);
        while counts() != base && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(counts(), base, "descriptors and threads, before and after");
    });
}

/// Sets the largest number of open descriptors of this process.
fn limit_descriptors(limit: usize) {
    let pid = std::process::id().to_string();
    let mut command = std::process::Command::new("prlimit");
    command.args(["--pid", &pid, &format!("--nofile={limit}:{limit}")]);
    assert!(command.status().expect("prlimit of util-linux").success());
}

#[test]
fn ended_control_planes_hold_no_descriptors_or_threads() {
    child::alone(|| {
        let config = Config {
            init_timeout: Duration::from_secs(20),
            heartbeat: Duration::from_millis(20),
            ..Config::default()
        };
        let base = counts();
        let mut joins = Vec::new();
        for round in 0..40 {
            let started = Instant::now();
            let ranks = world(8, &config);
            joins.push(started.elapsed());
            match round % 4 {
                0 => ranks.iter().for_each(|(_, plane)| plane.leave()),
                1 => ranks.iter().rev().for_each(|(_, plane)| plane.leave()),
                2 => {
                    let reason = Error::new(ErrorKind::Aborted, "enough");
                    ranks[round % 8].1.announce(&reason);
                    ranks.iter().for_each(|(_, plane)| plane.leave());
                }
                // In this round all ranks are dropped without `leave`, as after a crash.
                _ => {}
            }
            drop(ranks);
            let unused = UniqueId::create_for_one_host(&config).unwrap();
            unused.cancel();
        }
        let until = Instant::now() + Duration::from_secs(10);
        while counts() != base && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(counts(), base, "descriptors and threads, before and after");
        joins.sort();
        println!(
            "8 ranks join: median {:?}, worst {:?}",
            joins[20], joins[39]
        );
    });
}
