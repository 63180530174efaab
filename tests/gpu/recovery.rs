//! A rank that aborts is replaced: the others shrink and go on, then grow by a new rank. Results are right in
//! between and afterwards.

use crate::arena::Arena;
use crate::case::{Case, Done, Values};
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::world::World;
use cinch::comm::Call;
use cinch::testing::Pattern;
use cinch::{Collective, Communicator, DType, UniqueId};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Rank that aborts, and joins again as the last rank.
const LEAVER: usize = 1;
/// Elements of a rank's input: of several chunks, and not a multiple of a block.
const COUNT: usize = 300_001;
const PATIENCE: Duration = Duration::from_secs(30);

pub fn checks() -> Vec<Check> {
    let check = |(nranks, gpus)| {
        let name = format!("recovery/replace-n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| replace(setup, nranks, gpus));
        check.within(120).also_on_host()
    };
    [(3, 1), (4, 1), (8, 1), (4, 2), (8, 8)].map(check).into()
}

/// Results of the cases in one communicator, with the rank there.
type Stage = (usize, Vec<Done>);

fn replace(setup: &Setup, nranks: usize, gpus: usize) -> Verdict {
    let world = World::new(setup, nranks, gpus);
    let cases = cases(setup.options.seed)?;
    let bytes = cases.iter().map(|case| case.bytes(nranks)).max();
    let arenas = world.arenas(bytes.unwrap_or_default())?;
    let id = UniqueId::create_for_one_host(&world.config)?;
    let (sender, receiver) = channel();
    let (sender, receiver) = (Mutex::new(sender), Mutex::new(receiver));
    let run = |number: usize| -> Result<Vec<Stage>, Stop> {
        let place = Place {
            world: &world,
            cases: &cases,
            arena: &arenas[number],
            number,
        };
        let comm = Communicator::init(&id, number, nranks, world.config_of(number))?;
        comm.prepare_to_shrink()?;
        let first = place.run(&comm)?;
        comm.barrier()?;
        if number == LEAVER {
            comm.abort();
            let again = place.join(&receiver)?;
            return Ok(vec![first, again]);
        }
        // The call waits for a rank that has aborted.
        let input = cases[0].input(number, nranks);
        let failed = place.arena.run(&cases[0], &comm, &input);
        ensure(failed.is_err(), || {
            format!("rank {number}: no error after the abort")
        })?;
        let left = comm.shrink(&[LEAVER], world.config_of(number))?;
        let second = place.run(&left)?;
        if left.rank() == 0 {
            let id = left.grow_id()?;
            let sender = sender
                .lock()
                .map_err(|_| Stop::Wrong("a rank panicked".into()))?;
            let _ = sender.send(id);
        }
        let grown = left.grow(nranks, world.config_of(number))?;
        let third = place.run(&grown)?;
        grown.finalize()?;
        left.finalize()?;
        Ok(vec![first, second, third])
    };
    let ends: Vec<Result<Vec<Stage>, Stop>> = std::thread::scope(|scope| {
        let run = &run;
        let start = |number| {
            scope.spawn(move || run(number).map_err(|stop| stop.context(format!("rank {number}"))))
        };
        let threads: Vec<_> = (0..nranks).map(start).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread
                .join()
                .unwrap_or_else(|cause| std::panic::resume_unwind(cause))
        };
        threads.into_iter().map(join).collect()
    });
    let mut stages = [Vec::new(), Vec::new(), Vec::new()];
    for (number, end) in ends.into_iter().enumerate() {
        let of_rank = match number == LEAVER {
            true => &[0, 2][..],
            false => &[0, 1, 2],
        };
        for (&at, stage) in of_rank.iter().zip(end?) {
            stages[at].push(stage);
        }
    }
    for (name, mut stage) in ["before", "shrunk", "grown"].into_iter().zip(stages) {
        stage.sort_by_key(|(rank, _)| *rank);
        for (at, case) in cases.iter().enumerate() {
            let done: Vec<Done> = stage.iter().map(|(_, done)| done[at].clone()).collect();
            case.judge(&case.inputs(stage.len()), &done, 0.0)
                .map_err(|why| Stop::Wrong(format!("{name}, call {at}: {why}")))?;
        }
    }
    Ok(format!("{} calls before, between and after", cases.len()))
}

/// World, calls and memory of a thread, for all its ranks.
struct Place<'a> {
    world: &'a World,
    cases: &'a [Case],
    arena: &'a Arena,
    number: usize,
}

impl Place<'_> {
    fn run(&self, comm: &Communicator) -> Result<Stage, Stop> {
        let (rank, nranks) = (comm.rank(), comm.nranks());
        let run = |case: &Case| self.arena.run(case, comm, &case.input(rank, nranks));
        let done: Result<Vec<Done>, _> = self.cases.iter().map(run).collect();
        Ok((rank, done?))
    }

    /// Joins as the last rank by the id that another rank makes.
    fn join(&self, ids: &Mutex<Receiver<UniqueId>>) -> Result<Stage, Stop> {
        let ids = ids
            .lock()
            .map_err(|_| Stop::Wrong("a rank panicked".into()))?;
        let id = ids
            .recv_timeout(PATIENCE)
            .map_err(|_| Stop::Wrong("no rank made an id to grow".into()))?;
        let nranks = self.world.nranks();
        let config = self.world.config_of(self.number);
        let comm = Communicator::init(&id, nranks - 1, nranks, config)?;
        let stage = self.run(&comm)?;
        comm.finalize()?;
        Ok(stage)
    }
}

fn cases(seed: u64) -> Result<Vec<Case>, Stop> {
    let calls = [
        (Collective::AllReduce, COUNT, None),
        (Collective::AllReduce, 100, None),
        (Collective::AllReduce, COUNT, Some("linear8")),
        (Collective::AllGather, COUNT / 8, None),
        (Collective::ReduceScatter, COUNT / 8, Some("dynamic8")),
    ];
    let case =
        |(collective, count, codec): (Collective, usize, Option<&str>)| -> Result<Case, Stop> {
            let mut call = Call::new(collective, DType::F32, count);
            call.codec = codec.map(str::parse).transpose()?;
            Ok(Case::new(call, Values::Of(Pattern::Gaussian), seed))
        };
    calls.into_iter().map(case).collect()
}
