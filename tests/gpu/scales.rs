//! Tests scales that a tensor keeps from call to call (`tensor=K`). Outputs must equal those of the host engine for
//! equal chunk sizes, over calls whose data grows and shrinks, and over graph replays.

use crate::case::{Case, Values};
use crate::coded;
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::options::Options;
use crate::world::World;
use cinch::comm::Call;
use cinch::gpu::{CaptureMode, Graph};
use cinch::testing::Pattern;
use cinch::{Algorithm, Collective, DType, ReduceOp, schedule};

const SPECS: [&str; 5] = [
    "linear8:tensor=2",
    "dynamic8:tensor=3",
    "fp8_e4m3:tensor=2",
    "linear8:tensor=1",
    "dynamic8:tensor=2:seed=5",
];
/// Number of calls for each tensor.
const CALLS: usize = 5;

pub fn checks(options: &Options) -> Vec<Check> {
    let worlds = [(2, 1), (3, 1), (5, 1), (2, 2), (4, 4), (8, 8)];
    let check = |(nranks, gpus): (usize, usize)| {
        let name = format!("scales/n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| compare(setup, nranks, gpus));
        check.within(options.either(180, 240)).also_on_host()
    };
    let mut checks: Vec<Check> = worlds.into_iter().map(check).collect();
    checks.push(Check::new("scales/replays", 1, replays));
    checks
}

/// Returns one call for each combination of codec, type, collective and algorithm, each with its own tensor.
fn tensors(nranks: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let counts = [1, 700, 5000, 70_001, 262_144];
    for (number, text) in SPECS.into_iter().enumerate() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for collective in Collective::OF_ALL_RANKS {
                let all = schedule::algorithms(collective).iter();
                // A scale for each chunk needs an owner of the chunk.
                for &algorithm in all.filter(|&&algorithm| algorithm != Algorithm::OneShot) {
                    let at = cases.len();
                    let mut call =
                        Call::new(collective, dtype, counts[(at + number) % counts.len()]);
                    call.codec = text.parse().ok();
                    call.algorithm = Some(algorithm);
                    call.tensor = Some(1 + at as u64);
                    if collective.reduces() {
                        call.op = [ReduceOp::Sum, ReduceOp::Avg][at % 2];
                        let feeds = at % 3 == 0 && !text.contains("seed");
                        call.feedback = feeds.then_some(1 + at as u64);
                    }
                    if collective.has_root() {
                        call.root = at % nranks;
                    }
                    let mut case = Case::new(call, Values::Of(Pattern::Gaussian), 77 + at as u64);
                    case.in_place = at % 3 == 1 && collective != Collective::AllToAll;
                    case.shifted = at % 4 == 1;
                    cases.push(case);
                }
            }
        }
    }
    cases
}

/// Returns the case with the data of a call. One call in three has infinities and NaN, after which scales must be those
/// of the call before.
fn of_round(case: &Case, round: usize) -> Case {
    let values = match (case.seed as usize + round) % 3 {
        0 => Values::Bits,
        _ => Values::Of(Pattern::HeavyTailed),
    };
    Case {
        values,
        seed: case.seed + 1000 * round as u64,
        ..*case
    }
}

fn compare(setup: &Setup, nranks: usize, gpus: usize) -> Verdict {
    let world = World::new(setup, nranks, gpus);
    let cases = tensors(nranks);
    let rounds = (0..CALLS).flat_map(|round| cases.iter().map(move |case| of_round(case, round)));
    let all: Vec<Case> = rounds.collect();
    let (on_gpu, limits) = coded::outputs(&world, &all, None)?;
    let host_world = world.on_host_memory(&limits);
    let (on_host, _) = coded::outputs(&host_world, &all, Some(limits))?;
    for rank in 0..nranks {
        for (at, (found, wanted)) in on_gpu[rank].iter().zip(&on_host[rank]).enumerate() {
            let (round, case) = (at / cases.len(), &cases[at % cases.len()]);
            case.same_numbers(&found.output, &wanted.output, rank, nranks)
                .map_err(|why| {
                    Stop::Wrong(format!("call {round}: {why} (expected is the host engine)"))
                })?;
        }
    }
    Ok(format!(
        "{} calls of {} tensors on {nranks} ranks, equal to the host engine",
        CALLS * cases.len(),
        cases.len()
    ))
}

/// Replays of a graph count as calls: they drop the scales as so many calls do.
fn replays(setup: &Setup) -> Verdict {
    const COUNT: usize = 200_000;
    const ROUNDS: usize = 7;
    let mut call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    call.codec = "linear8:tensor=3".parse().ok();
    call.tensor = Some(9);
    let case = Case::new(call, Values::Of(Pattern::Gaussian), 6);
    let world = World::new(setup, 2, 1);
    let layout = case.layout(0, 2);
    let captured = |captures: bool| {
        let arenas = world.arenas(case.bytes(2))?;
        world.run(|comm| {
            let arena = &arenas[comm.rank()];
            let stream = arena.stream()?;
            let queue = || {
                let buffers = arena.buffers(layout.input, layout.output, stream)?;
                comm.call_on(&call, buffers)
            };
            let (mut graph, mut report) = (None, None);
            let mut outputs = Vec::new();
            for round in 0..ROUNDS {
                let case = Case {
                    values: Values::Of(Pattern::HeavyTailed),
                    seed: case.seed + round as u64,
                    ..case
                };
                let input = case.input(comm.rank(), 2);
                let before = arena.prepare(&case, comm.rank(), 2, &input)?;
                match &graph {
                    None => report = Some(queue()?),
                    Some(graph) => Graph::launch(graph, stream)?,
                }
                arena.wait(comm)?;
                let report = report.ok_or_else(|| Stop::Wrong("no call".into()))?;
                let done = arena.collect(&case, comm.rank(), 2, &before, report)?;
                outputs.push(done.output);
                if captures && graph.is_none() {
                    let capture =
                        Graph::capture(stream, CaptureMode::Relaxed, |_| queue().map(drop));
                    graph = Some(capture?);
                }
            }
            Ok(outputs)
        })
    };
    let (replayed, called) = (captured(true)?, captured(false)?);
    for rank in 0..2 {
        for round in 0..ROUNDS {
            case.same(&replayed[rank][round], &called[rank][round], rank, 2)
                .map_err(|why| Stop::Wrong(format!("replay {round}: {why}")))?;
        }
    }
    ensure(called[0] == called[1], || "ranks differ".into())?;
    Ok(format!("{} replays as so many calls", ROUNDS - 1))
}
