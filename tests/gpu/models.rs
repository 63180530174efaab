//! Process models: one thread that drives several communicators, and ranks that are processes.

use crate::arena::Arena;
use crate::case::{Case, Done};
use crate::cover::{self, Rng};
use crate::harness::{Check, Setup, Stop, Verdict, end_with_parent, ensure, say};
use crate::options::Options;
use crate::world::World;
use crate::{failures, figures};
use cinch::comm::Group;
use cinch::{Communicator, UniqueId};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::process::ExitCode;
use std::time::Duration;

/// A rank process ends by itself after this, whatever becomes of the others.
const LIFETIME: Duration = Duration::from_secs(120);
/// Elements of a buffer between processes that take turns on one GPU.
const FEW: usize = 5000;

pub fn checks(options: &Options) -> Vec<Check> {
    let limit = options.either(60, 180);
    let mut checks = Vec::new();
    for (nranks, gpus) in [(2, 1), (5, 1), (8, 1), (2, 2), (8, 8)] {
        let check = Check::new(format!("model/one-thread-n{nranks}-gpus{gpus}"), gpus, {
            move |setup| one_thread(setup, nranks, gpus)
        });
        checks.push(check.within(limit).also_on_host());
    }
    for (nranks, gpus) in [(2, 1), (3, 1), (2, 2), (8, 8)] {
        let check = Check::new(format!("model/processes-n{nranks}-gpus{gpus}"), gpus, {
            move |setup| processes(setup, nranks, gpus)
        });
        checks.push(check.within(120).also_on_host());
    }
    checks
}

/// One thread makes the calls of all ranks, each round in one group.
fn one_thread(setup: &Setup, nranks: usize, gpus: usize) -> Verdict {
    let world = World::new(setup, nranks, gpus);
    let mut rng = Rng::new(setup.options.seed ^ 0x6e0);
    let number = setup.options.either(150, 600);
    let cases = cover::random(&mut rng, nranks, number, 1 << 18);
    let bytes = cases.iter().map(|case| case.bytes(nranks)).max();
    let arenas = world.arenas(bytes.unwrap_or(0))?;
    let comms = world.communicators()?;
    for case in &cases {
        let inputs = case.inputs(nranks);
        round(case, &inputs, &arenas, &comms).map_err(|stop| stop.context(case))?;
    }
    Ok(format!("{number} groups"))
}

fn round(
    case: &Case,
    inputs: &[Vec<u8>],
    arenas: &[Arena],
    comms: &[Communicator],
) -> Result<(), Stop> {
    let nranks = comms.len();
    let mut before = Vec::new();
    for (rank, arena) in arenas.iter().enumerate() {
        before.push(arena.prepare(case, rank, nranks, &inputs[rank])?);
    }
    let mut group = Group::new();
    for (arena, comm) in arenas.iter().zip(comms) {
        arena.add(&mut group, case, comm)?;
    }
    let reports = group.run()?;
    let mut done: Vec<Done> = Vec::new();
    for (rank, (arena, comm)) in arenas.iter().zip(comms).enumerate() {
        arena.wait(comm)?;
        done.push(arena.collect(case, rank, nranks, &before[rank], reports[rank])?);
    }
    case.judge(inputs, &done, 0.0).map_err(Stop::Wrong)
}

/// The cases that the rank processes of a world run.
fn cases_of(options: &Options, nranks: usize) -> Vec<Case> {
    let mut rng = Rng::new(options.seed ^ 0x9c3);
    cover::random(&mut rng, nranks, options.either(60, 200), FEW)
}

/// Every rank is a process.
fn processes(setup: &Setup, nranks: usize, gpus: usize) -> Verdict {
    let world = World::new(setup, nranks, gpus);
    let id = UniqueId::create_for_one_host(&world.config)?;
    let tasks = (0..nranks).map(|rank| format!("cases {rank} {nranks} {gpus} {}", id.to_hex()));
    let mut ranks = crate::ranks::Ranks::start(&setup.options, tasks)?;
    let all: Vec<usize> = (0..nranks).collect();
    let hashes = ranks.wait_for("done", &all, Duration::from_secs(90))?;
    ensure(hashes.iter().all(|hash| *hash == hashes[0]), || {
        format!("ranks have other bits of shared results: {hashes:?}")
    })?;
    Ok(format!("{} cases", cases_of(&setup.options, nranks).len()))
}

/// A rank process: its task is in the words that its parent gave it.
pub fn be_a_rank(options: &Options, task: &str) -> ExitCode {
    end_with_parent();
    std::thread::spawn(|| {
        std::thread::sleep(LIFETIME);
        say("failed still there at the end of its lifetime");
        std::process::exit(3);
    });
    let words: Vec<&str> = task.split(' ').collect();
    let result = match words[..] {
        ["cases", rank, nranks, gpus, id] => run_cases(options, rank, nranks, gpus, id),
        ["die", ref words @ ..] => failures::die(&Setup::new(options), words),
        ["init", ref words @ ..] => figures::init(&Setup::new(options), words),
        _ => Stop::wrong(format!("no such task: {task}")),
    };
    match result {
        Ok(said) => {
            say(&format!("done {said}"));
            ExitCode::SUCCESS
        }
        Err(stop) => {
            say(&format!("failed {stop:?}").replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}

pub fn number(text: &str) -> Result<usize, Stop> {
    text.parse()
        .map_err(|_| Stop::Wrong(format!("{text} is no number")))
}

/// Runs the cases, judges its own outputs; a hash of what all ranks must share.
fn run_cases(options: &Options, rank: &str, nranks: &str, gpus: &str, id: &str) -> Verdict {
    let (rank, nranks, gpus) = (number(rank)?, number(nranks)?, number(gpus)?);
    let setup = Setup::new(options);
    let world = World::new(&setup, nranks, gpus);
    let cases = cases_of(options, nranks);
    let bytes = cases.iter().map(|case| case.bytes(nranks)).max();
    let arena = Arena::new(world.seats[rank], bytes.unwrap_or(0))?;
    let mut config = world.config_of(rank);
    if options.host {
        config.transport = None;
    }
    let comm = Communicator::init(&UniqueId::from_hex(id)?, rank, nranks, config)?;
    let mut hasher = DefaultHasher::new();
    for case in &cases {
        let inputs = case.inputs(nranks);
        let done = arena.run(case, &comm, &inputs[rank]);
        let done = done.map_err(|error| Stop::from(error).context(case))?;
        if case.is_shared() {
            done.output.hash(&mut hasher);
        }
        case.judge_one(&inputs, rank, &done).map_err(Stop::Wrong)?;
    }
    comm.finalize()?;
    Ok(format!("{:016x}", hasher.finish()))
}
