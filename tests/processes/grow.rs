//! Replaces killed ranks: the others shrink, and grow by a new process without a restart. Kills ranks also
//! while the others grow.
//! `CINCH_TEST_GROWS=20 cargo test --test processes grow -- --nocapture` makes 20 trials of each kind.

use super::rank_group::{self, RankGroup, holdings, say};
use crate::support::{Rng, config, number, seed};
use cinch::types::TransportKind;
use cinch::{Communicator, Config, ErrorKind, ReduceOp, UniqueId};
use std::time::{Duration, Instant};

/// Longest time from a kill to the next sum of all ranks, with the start of the new process.
const REPLACEMENT_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest time from a death to the error on all other ranks.
const DEATH_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of an init that lacks a rank which nobody can know to be dead.
const SHORT_INIT_TIMEOUT: Duration = Duration::from_millis(1500);
/// Replacements in one trial: the second one may replace the first new rank.
const ROUNDS: usize = 2;
const RANKS: usize = 4;
/// Elements of a sum.
const COUNT: usize = 4000;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn trials() -> u64 {
    number("CINCH_TEST_GROWS").unwrap_or(2)
}

/// Prints the median and the worst of `times`.
fn print_times(what: &str, times: &mut [Duration]) {
    times.sort();
    if let Some(worst) = times.last() {
        let median = times[times.len() / 2];
        println!("{} {what}: median {median:?}, worst {worst:?}", times.len());
    }
}

#[test]
fn killed_rank_is_replaced_while_the_others_live() {
    let mut rng = Rng(seed());
    let mut times = Vec::new();
    for trial in 0..trials() {
        let transport = [TransportKind::Shm, TransportKind::Tcp][trial as usize % 2];
        let victims: Vec<usize> = (0..ROUNDS).map(|_| rng.below(RANKS)).collect();
        // A rank of the shrunk communicator makes the id.
        let maker = rng.below(RANKS - 1);
        let what = format!("grow {trial}: kills {victims:?} over {transport}, {maker} makes ids");
        println!("{what}");
        let task = |rank: usize, rounds: usize| format!("work {rank} {rounds} {transport} {maker}");
        let tasks: Vec<String> = (0..RANKS).map(|rank| task(rank, ROUNDS)).collect();
        let mut group = RankGroup::start("grow", &tasks);
        group.hand_on_id();
        // Processes by their ranks in the latest communicator.
        let mut members: Vec<usize> = (0..RANKS).collect();
        group.wait_for("summed", &members);
        for (round, &victim) in victims.iter().enumerate() {
            std::thread::sleep(Duration::from_micros(rng.below(20_000) as u64));
            let begun = Instant::now();
            group.kill(members.remove(victim));
            let id = group.wait_for("id", &[members[maker]])[members[maker]].clone();
            let new = group.add("grow", &task(RANKS - 1, ROUNDS - 1 - round), &[]);
            group.hand(new, &id);
            members.push(new);
            group.wait_for("summed", &members);
            let time = begun.elapsed();
            println!("{what}: process {victim} replaced in {time:?}");
            assert!(time <= REPLACEMENT_TIMEOUT, "{what}: took {time:?}");
            times.push(time);
        }
        group.expect_clean_ends(&members, &what);
    }
    print_times("replacements", &mut times);
}

#[test]
fn communicators_of_several_sizes_grow() {
    for (old, new) in [(1, 2), (2, 5), (3, 4)] {
        for transport in [TransportKind::Shm, TransportKind::Tcp] {
            let maker = old - 1;
            let task = |rank: usize| format!("size {rank} {old} {new} {transport} {maker}");
            let tasks: Vec<String> = (0..new).map(task).collect();
            let mut group = RankGroup::start("grow", &tasks);
            let id = group.wait_for("id", &[0]).swap_remove(0);
            (0..old).for_each(|rank| group.hand(rank, &id));
            let id = group.wait_for("grow-id", &[maker]).swap_remove(maker);
            (old..new).for_each(|rank| group.hand(rank, &id));
            let all: Vec<usize> = (0..new).collect();
            group.expect_clean_ends(&all, &format!("from {old} to {new} over {transport}"));
        }
    }
}

/// A rank dies before or while the others grow: a rank of the old communicator, its root and the rank that
/// serves the rendezvous included, or the new rank.
#[test]
fn rank_that_dies_while_others_grow_is_an_error_in_time() {
    let mut rng = Rng(seed());
    let mut times = Vec::new();
    for trial in 0..4 * trials() {
        let transport = rng.pick(&[TransportKind::Shm, TransportKind::Tcp]);
        let maker = rng.below(RANKS);
        let victim = match trial % 4 {
            0 => maker,
            1 => 0,
            2 => rng.below(RANKS),
            _ => RANKS,
        };
        let delay = Duration::from_micros(match rng.below(4) {
            0 => 0,
            _ => rng.below(30_000) as u64,
        });
        let what = format!("{victim} dies {delay:?} after the begin of {trial} over {transport}");
        println!("{what}, {maker} makes the id");
        // The others cannot know that a process was to be a rank if it dies before it has registered.
        let timeout = if victim < RANKS { 20_000 } else { 1500 };
        let task = |rank| format!("death {rank} {transport} {maker} {timeout}");
        let tasks: Vec<String> = (0..=RANKS).map(task).collect();
        let mut group = RankGroup::start("grow", &tasks);
        let id = group.wait_for("id", &[0]).swap_remove(0);
        (0..RANKS).for_each(|rank| group.hand(rank, &id));
        let id = group.wait_for("grow-id", &[maker]).swap_remove(maker);
        let others: Vec<usize> = (0..=RANKS).filter(|&rank| rank != victim).collect();
        let all: Vec<usize> = (0..=RANKS).collect();
        group.wait_for("ready", &all);
        for &rank in others.iter().chain((!delay.is_zero()).then_some(&victim)) {
            group.hand(rank, &id);
        }
        std::thread::sleep(delay);
        let pid = format!("pid {})", group.children[victim].id());
        let died = Instant::now();
        group.kill(victim);
        let ended = group.wait_for("ended", &others);
        let time = died.elapsed();
        let limit = match victim {
            RANKS => SHORT_INIT_TIMEOUT + Duration::from_secs(1),
            _ => DEATH_TIMEOUT,
        };
        assert!(time <= limit, "{what}: took {time:?}: {ended:?}");
        for &rank in &others {
            let outcome = &ended[rank];
            let is_named = outcome.contains(&pid) || outcome.contains(&format!("rank {victim},"));
            let is_missing = victim == RANKS && outcome.contains(&format!("rank {RANKS} of 5"));
            let is_over = outcome == "ok" && !delay.is_zero();
            assert!(
                is_named || is_missing || is_over,
                "{what}: {rank}: {outcome}"
            );
        }
        if ended.iter().any(|outcome| outcome.contains(&pid)) {
            times.push(time);
        }
    }
    print_times("errors on all ranks", &mut times);
}

// ---- a rank ----

/// Runs the rank of one of the tests.
pub fn rank_process(task: &str) {
    rank_group::run(|| {
        let words: Vec<&str> = task.split(' ').collect();
        match words[0] {
            "work" => run_worker(&words[1..]),
            "size" => run_size(&words[1..]),
            _ => run_death(&words[1..]),
        }
    });
}

fn transport(word: &str) -> Outcome<Config> {
    let kind = TransportKind::from_name(word).ok_or("no such transport")?;
    Ok(config(kind))
}

/// Sums once and compares the bits with those that the ranks of `comm` give.
fn sum(comm: &Communicator) -> Result<(), cinch::Error> {
    let value = |rank: usize, at: usize| (rank * 7919 + at) as i64;
    let mut sum: Vec<i64> = (0..COUNT).map(|at| value(comm.rank(), at)).collect();
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
    for (at, found) in sum.iter().enumerate() {
        let right: i64 = (0..comm.nranks()).map(|rank| value(rank, at)).sum();
        assert_eq!(*found, right, "element {at} of {} ranks", comm.nranks());
    }
    Ok(())
}

/// Sums until a rank is killed, shrinks, and grows, for some rounds. An original rank gets the id of an init,
/// a new rank the id of a grow.
fn run_worker(words: &[&str]) -> Outcome<()> {
    let (rank, rounds): (usize, usize) = (words[0].parse()?, words[1].parse()?);
    let (config, maker): (Config, usize) = (transport(words[2])?, words[3].parse()?);
    let before = holdings();
    let is_new = rounds < ROUNDS;
    let id = match is_new {
        true => UniqueId::from_hex(&rank_group::receive_line()?)?,
        false => rank_group::receive_id(rank, &config)?,
    };
    let mut comm = Communicator::init(&id, rank, RANKS, config.clone())?;
    if !is_new {
        comm.prepare_to_shrink()?;
    }
    for _ in 0..rounds {
        sum(&comm)?;
        say("summed ");
        while let Ok(()) = sum(&comm) {}
        let left = comm.shrink(&[], config.clone())?;
        if left.rank() == maker {
            say(&format!("id {}", left.grow_id()?.to_hex()));
        }
        comm = left.grow(RANKS, config.clone())?;
        assert_eq!(comm.rank(), left.rank());
        // The old communicator is usable beside the new one.
        sum(&left)?;
    }
    sum(&comm)?;
    say("summed ");
    comm.finalize()?;
    drop(comm);
    rank_group::report_holdings(&before);
    Ok(())
}

/// Joins a communicator of `old` ranks and grows it, or joins it as a new rank.
fn run_size(words: &[&str]) -> Outcome<()> {
    let numbers = words[..3].iter().map(|word| word.parse());
    let numbers: Vec<usize> = numbers.collect::<Result<_, _>>()?;
    let [rank, old, new] = numbers[..] else {
        return Err("three numbers".into());
    };
    let (config, maker): (Config, usize) = (transport(words[3])?, words[4].parse()?);
    let before = holdings();
    let comm = if rank < old {
        let id = rank_group::receive_id(rank, &config)?;
        let small = Communicator::init(&id, rank, old, config.clone())?;
        sum(&small)?;
        if rank == maker {
            say(&format!("grow-id {}", small.grow_id()?.to_hex()));
        }
        let grown = small.grow(new, config)?;
        sum(&small)?;
        // The end of the old communicator is no failure of the new one.
        small.abort();
        grown
    } else {
        let id = UniqueId::from_hex(&rank_group::receive_line()?)?;
        Communicator::init(&id, rank, new, config)?
    };
    assert_eq!((comm.rank(), comm.nranks()), (rank, new));
    sum(&comm)?;
    comm.finalize()?;
    drop(comm);
    rank_group::report_holdings(&before);
    Ok(())
}

/// Grows from 4 to 5 ranks once, and reports the outcome.
fn run_death(words: &[&str]) -> Outcome<()> {
    let rank: usize = words[0].parse()?;
    let (config, maker): (Config, usize) = (transport(words[1])?, words[2].parse()?);
    let short = Config {
        init_timeout: Duration::from_millis(words[3].parse()?),
        ..config.clone()
    };
    let made = if rank < RANKS {
        let id = rank_group::receive_id(rank, &config)?;
        let comm = Communicator::init(&id, rank, RANKS, config)?;
        sum(&comm)?;
        if rank == maker {
            say(&format!("grow-id {}", comm.grow_id()?.to_hex()));
        }
        say("ready ");
        rank_group::receive_line()?;
        let made = comm.grow(RANKS + 1, short);
        if let Ok(grown) = &made {
            // The rank died after the grow, or dies now.
            while sum(grown).is_ok() {}
        }
        made
    } else {
        say("ready ");
        let id = UniqueId::from_hex(&rank_group::receive_line()?)?;
        Communicator::init(&id, rank, RANKS + 1, short)
    };
    match made {
        Ok(_) => say("ended ok"),
        Err(error) => {
            assert!(matches!(
                error.kind(),
                ErrorKind::Remote | ErrorKind::Timeout
            ));
            say(&format!("ended {error}"));
        }
    }
    // The new rank may come later, and gets the reason from the rank that serves. The test ends this process.
    rank_group::receive_line()?;
    Ok(())
}
