//! A process of another user must not join a job of one host that has no secret.
//! `CINCH_TEST_OTHER_USERS=100 cargo test --test processes other_users -- --nocapture` makes 100 attempts.

use super::child;
use super::rank_group::say;
use crate::support::number;
use cinch::bootstrap::{ControlPlane, OutOfBand};
use cinch::sync::Fault;
use cinch::{Config, UniqueId};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::Duration;

/// The user "nobody".
const OTHER_USER: u32 = 65_534;

fn config() -> Config {
    Config {
        init_timeout: Duration::from_secs(10),
        ..Config::default()
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").port()
}

/// Lets a process of another user join as `rank` at `port`, and returns what it reports.
fn join_as_other_user(rank: usize, port: u16, allow: bool) -> String {
    let output = child::rank(&[], "other_users", &format!("{rank} {port} {allow}"))
        .uid(OTHER_USER)
        .stdin(Stdio::null())
        .output()
        .expect("a process of the other user");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.split_once("@@"));
    line.unwrap_or_else(|| panic!("{text}")).1.to_string()
}

fn join(rank: usize, port: u16, config: &Config) -> Result<(), cinch::Error> {
    let id = UniqueId::for_address("127.0.0.1", port, config)?;
    let plane = ControlPlane::join(&id, rank, 2, config, Fault::new())?;
    plane.barrier()?;
    plane.leave();
    Ok(())
}

fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        println!("skipped: only root starts processes of other users");
    }
    is_root
}

#[test]
fn process_of_another_user_is_refused_and_the_job_joins() {
    if !is_root() {
        return;
    }
    let attempts = number("CINCH_TEST_OTHER_USERS").unwrap_or(5);
    for attempt in 0..attempts {
        let (port, config) = (free_port(), config());
        std::thread::scope(|scope| {
            let root = scope.spawn(|| join(0, port, &config));
            // The other user comes before or after rank 0, which waits for rank 1.
            if attempt % 2 == 0 {
                std::thread::sleep(Duration::from_millis(20));
            }
            let refused = join_as_other_user(1, port, false);
            assert!(refused.contains("CINCH_SECRET_FILE"), "{refused}");
            assert!(
                TcpStream::connect(("127.0.0.1", port)).is_err(),
                "a port is open"
            );
            join(1, port, &config).expect("rank 1");
            root.join().expect("no panic").expect("rank 0");
        });
    }
    println!("{attempts} of {attempts} refused");
}

/// The other user takes the place of rank 0.
#[test]
fn rank_does_not_join_a_job_of_another_user() {
    if !is_root() {
        return;
    }
    let port = free_port();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join_as_other_user(0, port, false));
        let error = join(1, port, &config()).expect_err("another user");
        assert!(
            error.message().contains(&format!("user {OTHER_USER}")),
            "{error}"
        );
        let missing = other.join().expect("no panic");
        assert!(missing.contains("rank 1 of 2 did not come"), "{missing}");
    });
}

/// With the setting that the error names, users share a job.
#[test]
fn users_share_a_job_that_allows_it() {
    if !is_root() {
        return;
    }
    let (port, mut config) = (free_port(), config());
    config.allow_unauthenticated = true;
    std::thread::scope(|scope| {
        let root = scope.spawn(|| join(0, port, &config));
        assert_eq!(join_as_other_user(1, port, true), "joined");
        root.join().expect("no panic").expect("rank 0");
    });
}

/// Joins by the rank, port and setting of the task, and reports the outcome.
pub fn rank_process(task: &str) {
    let words: Vec<&str> = task.split(' ').collect();
    let (rank, port) = (
        words[0].parse().expect("a rank"),
        words[1].parse().expect("a port"),
    );
    let config = Config {
        allow_unauthenticated: words[2] == "true",
        // Rank 0 waits for this time.
        init_timeout: Duration::from_secs(4),
        ..config()
    };
    let outcome = join(rank, port, &config);
    say(&outcome.map_or_else(|error| error.to_string(), |()| "joined".into()));
}
