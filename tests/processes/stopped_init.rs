//! Stops a rank inside an init, after the rendezvous: the init of the other ranks must fail within
//! `CINCH_INIT_TIMEOUT`, with an error that names the stopped rank, or a rank that waits for it.

use super::rank_group::{self, RankGroup, say};
use crate::support::{Rng, config, number, seed};
use cinch::Communicator;
use cinch::types::TransportKind;
use nix::sys::signal::{Signal, raise};
use std::time::{Duration, Instant};

const RANKS: usize = 4;
const INIT_TIMEOUT: Duration = Duration::from_secs(2);
/// Largest time that the error may take beyond the timeout.
const LATENESS: Duration = Duration::from_secs(1);

#[test]
fn rank_that_stops_after_the_rendezvous_fails_the_init_in_time() {
    let mut rng = Rng(seed());
    let mut worst = Duration::ZERO;
    for trial in 0..number("CINCH_TEST_STOPPED_INITS").unwrap_or(4) {
        let victim = if trial % 2 == 0 {
            0
        } else {
            1 + rng.below(RANKS - 1)
        };
        let transport = rng.pick(&[TransportKind::Shm, TransportKind::Tcp]);
        let delay = rng.below(2) * rng.below(3000);
        let what = format!("stop {trial}: rank {victim} over {transport} after {delay} us");
        println!("{what}");
        let tasks = (0..RANKS).map(|rank| format!("{rank} {victim} {transport} {delay}"));
        let mut ranks = RankGroup::start("stopped_init", &tasks.collect::<Vec<_>>());
        ranks.hand_on_id();
        let others: Vec<usize> = (0..RANKS).filter(|&rank| rank != victim).collect();
        let ended = ranks.wait_for("ended", &others);
        for &rank in &others {
            let (time, outcome) = ended[rank].split_once(' ').expect("time and outcome");
            let time = Duration::from_nanos(time.parse().expect("nanoseconds"));
            assert!(
                time <= INIT_TIMEOUT + LATENESS,
                "{what}: {rank} took {time:?}: {outcome}"
            );
            let names =
                |outcome: &str, rank: usize| outcome.contains(&format!("rank {rank} (host"));
            // A rank may wait for one that waits for the victim, and both end at the same time.
            let chain =
                |&next: &usize| next != rank && names(outcome, next) && names(&ended[next], victim);
            let named = names(outcome, victim) || others.iter().any(chain);
            // A stop after a rank's last exchange fails no init of that rank.
            assert!(
                named || outcome == "ok" && delay > 0,
                "{what}: {rank}: {outcome}"
            );
            worst = worst.max(time);
        }
    }
    println!("worst {worst:?} of an init with a timeout of {INIT_TIMEOUT:?}");
}

/// Joins, and stops this process after the rendezvous if it is the victim.
pub fn rank_process(task: &str) {
    rank_group::run(|| {
        let words: Vec<&str> = task.split(' ').collect();
        let (rank, victim): (usize, usize) = (words[0].parse()?, words[1].parse()?);
        let transport = TransportKind::from_name(words[2]).ok_or("no such transport")?;
        let delay = Duration::from_micros(words[3].parse()?);
        let mut config = config(transport);
        config.init_timeout = INIT_TIMEOUT;
        config.timeout = Duration::from_secs(50);
        let id = rank_group::receive_id(rank, &config)?;
        if rank == victim {
            std::thread::spawn(move || stop_after_rendezvous(delay));
        }
        let begun = Instant::now();
        let made = Communicator::init(&id, rank, RANKS, config);
        let outcome = made.map_or_else(|error| error.to_string(), |_| "ok".into());
        say(&format!("ended {} {outcome}", begun.elapsed().as_nanos()));
        Ok(())
    });
}

/// The control thread starts when the rendezvous is over.
fn stop_after_rendezvous(delay: Duration) {
    loop {
        let tasks = std::fs::read_dir("/proc/self/task")
            .expect("own tasks")
            .flatten();
        let names = tasks.map(|task| std::fs::read_to_string(task.path().join("comm")));
        if names
            .flatten()
            .any(|name| name.trim_end() == "cinch-control")
        {
            std::thread::sleep(delay);
            return raise(Signal::SIGSTOP).expect("SIGSTOP");
        }
    }
}
