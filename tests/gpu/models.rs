//! Tests process models: one thread for all ranks, a process for each rank, and processes of
//! several ranks.

use crate::arena::Arena;
use crate::case::{Case, Done};
use crate::cover::{self, Rng};
use crate::harness::{Check, Setup, Stop, Verdict, end_with_parent, ensure, say};
use crate::options::Options;
use crate::ranks::Ranks;
use crate::world::World;
use crate::{failures, figures};
use cinch::comm::Group;
use cinch::{Communicator, UniqueId};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::process::ExitCode;
use std::time::Duration;

/// Time after which a rank process exits, whatever the other ranks do.
const LIFETIME: Duration = Duration::from_secs(120);
/// Largest number of elements in a buffer. Processes take turns on one GPU, which makes large cases
/// slow.
const FEW: usize = 5000;

pub fn checks(options: &Options) -> Vec<Check> {
    let limit = options.either(60, 180);
    let mut checks = Vec::new();
    for (nranks, gpus) in [(2, 1), (5, 1), (8, 1), (2, 2), (8, 2), (4, 4), (8, 8)] {
        let check = Check::new(format!("model/one-thread-n{nranks}-gpus{gpus}"), gpus, {
            move |setup| one_thread(setup, nranks, gpus)
        });
        checks.push(check.within(limit).also_on_host());
    }
    for (nranks, gpus) in [(2, 1), (3, 1), (2, 2), (8, 2), (4, 4), (8, 8)] {
        let check = Check::new(format!("model/processes-n{nranks}-gpus{gpus}"), gpus, {
            move |setup| processes(setup, nranks, 1, gpus, false)
        });
        checks.push(check.within(120).also_on_host());
    }
    for (nranks, gpus) in [(4, 1), (4, 2), (8, 2), (4, 4), (8, 8)] {
        let check = Check::new(format!("model/mixed-n{nranks}-gpus{gpus}"), gpus, {
            move |setup| processes(setup, nranks, nranks / 2, gpus, false)
        });
        checks.push(check.within(120).also_on_host());
        let name = format!("model/processes-p2p-disabled-n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| {
            processes(setup, nranks, 1, gpus, true)
        });
        checks.push(check.within(120));
    }
    checks
}

/// Makes the calls of all ranks from one thread, each case in one group.
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

/// Returns the cases of the rank processes. Every process derives them from the seed.
fn cases_of(options: &Options, nranks: usize) -> Vec<Case> {
    let mut rng = Rng::new(options.seed ^ 0x9c3);
    cover::random(&mut rng, nranks, options.either(60, 200), FEW)
}

/// Runs processes with `per_process` ranks per process, which are threads.
fn processes(
    setup: &Setup,
    nranks: usize,
    per_process: usize,
    gpus: usize,
    p2p_disable: bool,
) -> Verdict {
    let world = World::new(setup, nranks, gpus);
    let id = UniqueId::create_for_one_host(&world.config)?.to_hex();
    let tasks = (0..nranks)
        .step_by(per_process)
        .map(|first| format!("cases {first} {per_process} {nranks} {gpus} {p2p_disable} {id}"));
    let mut ranks = Ranks::start(&setup.options, tasks)?;
    let all: Vec<usize> = (0..nranks / per_process).collect();
    let said = ranks.wait_for("done", &all, Duration::from_secs(90))?;
    let hashes: Vec<&str> = said.iter().flat_map(|text| text.split(' ')).collect();
    ensure(
        hashes.len() == nranks && hashes.iter().all(|hash| *hash == hashes[0]),
        || format!("ranks have other bits of shared results: {hashes:?}"),
    )?;
    Ok(format!("{} cases", cases_of(&setup.options, nranks).len()))
}

/// Runs a rank process. Its parent passes `task` on the command line.
pub fn run_rank(options: &Options, task: &str) -> ExitCode {
    end_with_parent();
    std::thread::spawn(|| {
        std::thread::sleep(LIFETIME);
        say("failed still there at the end of its lifetime");
        std::process::exit(3);
    });
    let words: Vec<&str> = task.split(' ').collect();
    let result = match words[..] {
        ["cases", ref words @ ..] => run_cases(options, words),
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

/// Runs the cases as `per_process` ranks, which check their own outputs. Returns a hash for each rank of the
/// outputs that must be equal on all ranks.
fn run_cases(options: &Options, words: &[&str]) -> Verdict {
    let [first, per_process, nranks, gpus, p2p_disable, id] = words else {
        return Stop::wrong("cases FIRST EACH NRANKS GPUS P2P_DISABLE ID");
    };
    let (first, per_process, nranks) = (number(first)?, number(per_process)?, number(nranks)?);
    let mut world = World::new(&Setup::new(options), nranks, number(gpus)?);
    world.config.p2p_disable = *p2p_disable == "true";
    let id = UniqueId::from_hex(id)?;
    let cases = cases_of(options, nranks);
    let bytes = cases.iter().map(|case| case.bytes(nranks)).max();
    let mut arenas = Vec::new();
    for rank in first..first + per_process {
        arenas.push(Arena::new(world.gpus[rank], bytes.unwrap_or(0))?);
    }
    let one = |rank: usize, arena: &Arena| -> Verdict {
        let mut config = world.config_of(rank);
        if options.host {
            config.transport = None;
        }
        let comm = Communicator::init(&id, rank, nranks, config)?;
        let hash = run_as(&comm, arena, &cases);
        match &hash {
            Ok(_) => comm.finalize()?,
            Err(_) => comm.abort(),
        }
        hash
    };
    let hashes: Vec<Verdict> = std::thread::scope(|scope| {
        let one = &one;
        let start = |(at, arena)| scope.spawn(move || one(first + at, arena));
        let threads: Vec<_> = arenas.iter().enumerate().map(start).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Verdict>| {
            let joined = thread.join();
            joined.unwrap_or_else(|_| Stop::wrong("a rank panicked"))
        };
        threads.into_iter().map(join).collect()
    });
    Ok(hashes.into_iter().collect::<Result<Vec<_>, _>>()?.join(" "))
}

fn run_as(comm: &Communicator, arena: &Arena, cases: &[Case]) -> Verdict {
    let (rank, nranks) = (comm.rank(), comm.nranks());
    let mut hasher = DefaultHasher::new();
    for case in cases {
        let inputs = case.inputs(nranks);
        let done = arena.run(case, comm, &inputs[rank]);
        let done = done.map_err(|error| Stop::from(error).context(case))?;
        if case.is_shared() {
            done.output.hash(&mut hasher);
        }
        case.judge_rank(&inputs, rank, &done).map_err(Stop::Wrong)?;
    }
    Ok(format!("{:016x}", hasher.finish()))
}
