//! Small collectives of a group, which share launches: their outputs, with and without codecs, statistics and replays, and
//! the time of a group beside that of separate launches.

use crate::arena::{Arena, Takes};
use crate::case::{Case, Done, GUARD, Values};
use crate::cover::Rng;
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::options::Options;
use crate::statistics;
use crate::world::World;
use cinch::comm::{Call, Group};
use cinch::gpu::{CaptureMode, Event, Graph, Stream};
use cinch::testing::Pattern;
use cinch::types::KernelProtocol;
use cinch::{Collective, Communicator, DType, ReduceOp};
use std::time::Duration;

/// Calls of a group.
const CALLS: usize = 24;

pub fn checks(options: &Options) -> Vec<Check> {
    let worlds = [(2, 1), (3, 1), (5, 1), (8, 1), (2, 2), (4, 4), (8, 8)];
    let check = |(nranks, gpus): (usize, usize)| {
        let name = format!("groups/n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| compare(setup, nranks, gpus));
        check.within(options.either(60, 180))
    };
    let mut checks: Vec<Check> = worlds.into_iter().map(check).collect();
    checks.push(Check::new("groups/dependent", 1, dependent));
    for gpus in [1, 2, 4, 8] {
        let name = format!("groups/times-gpus{gpus}");
        checks.push(Check::new(name, gpus, move |setup| times(setup, gpus)).within(120));
    }
    checks
}

/// Returns a group of calls. Neighbours often fit one kernel, and some calls are too large to share a launch.
fn group(number: usize, nranks: usize) -> Vec<Case> {
    let mut rng = Rng::new(number as u64);
    let collectives = [
        Collective::AllReduce,
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::Reduce,
        Collective::AllGather,
        Collective::Broadcast,
        Collective::AllToAll,
    ];
    let mut cases = Vec::new();
    let (mut dtype, mut codec) = (DType::F32, "raw");
    for at in 0..CALLS {
        if at % 6 == 0 {
            dtype = rng.pick(&[DType::F32, DType::BF16, DType::F16]);
            codec = rng.pick(&["raw", "raw", "linear8", "dynamic8", "minmax4"]);
        }
        let count = rng.pick(&[1, 17, 700, 2048, 5000, 70_000]);
        let mut call = Call::new(rng.pick(&collectives), dtype, count);
        call.codec = codec.parse().ok();
        if call.collective.reduces() {
            call.op = rng.pick(&[ReduceOp::Sum, ReduceOp::Avg]);
        }
        if call.collective.has_root() {
            call.root = rng.below(nranks);
        }
        let mut case = Case::new(
            call,
            Values::Of(Pattern::Gaussian),
            2 * (number * CALLS + at) as u64,
        );
        case.in_place = rng.below(3) == 0 && call.collective != Collective::AllToAll;
        case.shifted = rng.below(4) == 0;
        cases.push(case);
    }
    cases
}

/// Runs groups by themselves and as graphs, and judges every output.
fn compare(setup: &Setup, nranks: usize, gpus: usize) -> Verdict {
    let groups: Vec<Vec<Case>> = (0..setup.options.either(4, 16))
        .map(|at| group(at, nranks))
        .collect();
    for kernel in [None, Some(KernelProtocol::SIMPLE), Some(KernelProtocol::LL)] {
        let mut world = World::new(setup, nranks, gpus);
        world.config.force_kernel(kernel);
        let bytes = groups.iter().flatten().map(|case| case.bytes(nranks)).max();
        let mut arenas = Vec::new();
        for gpu in &world.gpus {
            let bytes = bytes.unwrap_or(0).next_multiple_of(256) + 256;
            let mut own = vec![Arena::with_one_stream(*gpu, bytes)?];
            for _ in 0..CALLS {
                own.push(own[0].beside(*gpu, bytes)?);
            }
            arenas.push(own);
        }
        for (number, cases) in groups.iter().enumerate() {
            let replays = number % 2 == 1;
            let outcomes = world.run(|comm| run(comm, cases, &arenas[comm.rank()], replays))?;
            for (at, case) in cases.iter().enumerate() {
                let done: Vec<Done> = outcomes.iter().map(|all| all[at].clone()).collect();
                let judged = case.judge(&case.inputs(nranks), &done, 0.0);
                judged.map_err(|why| Stop::Wrong(format!("group {number}, call {at}: {why}")))?;
            }
        }
    }
    Ok(format!("{} groups of {CALLS} calls", 3 * groups.len()))
}

/// Two ranks have a message behind this call of the group.
const MESSAGE_BEHIND: usize = 8;

/// Returns the statistics that a call takes, which ranks do not do alike.
fn statistics_of(at: usize, rank: usize) -> Option<Takes> {
    let takes = [Takes::All, Takes::Verdict][at / 5 % 2];
    (at % 5 == rank % 3).then_some(takes)
}

/// Returns the offset of a call's statistics in its arena.
fn place(case: &Case, nranks: usize) -> usize {
    case.bytes(nranks).next_multiple_of(256)
}

/// Runs the calls of a group on one stream, each in an arena of its own, or captures them and launches the graph twice.
fn run(
    comm: &Communicator,
    cases: &[Case],
    arenas: &[Arena],
    replays: bool,
) -> Result<Vec<Done>, Stop> {
    let (rank, nranks) = (comm.rank(), comm.nranks());
    let stream = arenas[0].stream()?;
    let mut images = Vec::new();
    let prepare = || -> Result<Vec<Vec<u8>>, Stop> {
        let mut images = Vec::new();
        for (case, arena) in cases.iter().zip(arenas) {
            images.push(arena.prepare(case, rank, nranks, &case.input(rank, nranks))?);
        }
        Ok(images)
    };
    let mut reports = Vec::new();
    let mut queue = || -> cinch::Result<()> {
        let mut group = Group::new();
        for (at, (case, arena)) in cases.iter().zip(arenas).enumerate() {
            let layout = case.layout(rank, nranks);
            let (input, output) = (layout.input, layout.output);
            let buffers = match statistics_of(at, rank) {
                Some(takes) => {
                    let place = (place(case, nranks), takes);
                    arena.buffers_with_statistics(input, output, place, stream)?
                }
                None => arena.buffers(input, output, stream)?,
            };
            group.add_on(comm, &case.call_of(rank), buffers)?;
            if at == MESSAGE_BEHIND && rank < 2 {
                let mut message = Call::new(Collective::SendRecv, DType::F32, 25);
                message.peer = 1;
                let used = [((0, 100), (0, 0)), ((0, 0), (0, 100))][rank];
                let buffers = arenas[CALLS].buffers(used.0, used.1, stream)?;
                group.add_on(comm, &message, buffers)?;
            }
        }
        reports = group.run()?;
        if rank < 2 {
            reports.remove(MESSAGE_BEHIND + 1);
        }
        Ok(())
    };
    match replays {
        false => {
            images = prepare()?;
            queue()?;
        }
        true => {
            let graph = Graph::capture(stream, CaptureMode::ThreadLocal, |_| queue())?;
            for _ in 0..2 {
                images = prepare()?;
                graph.launch(stream)?;
                arenas[0].wait(comm)?;
            }
        }
    }
    arenas[0].wait(comm)?;
    let mut done = Vec::new();
    for (at, (case, arena)) in cases.iter().zip(arenas).enumerate() {
        let layout = case.layout(rank, nranks);
        let mut image = vec![GUARD; layout.bytes];
        arena.read(0, &mut image)?;
        let (first, bytes) = layout.output;
        let (is_output, before) = (
            |byte: usize| (first..first + bytes).contains(&byte),
            &images[at],
        );
        let stray = (0..layout.bytes).find(|&byte| image[byte] != before[byte] && !is_output(byte));
        if let Some(takes) = statistics_of(at, rank) {
            let found = arena.statistics(comm, place(case, nranks), stream)?;
            let output = &image[first..first + bytes];
            let input = case.input(rank, nranks);
            statistics::judge((&case.call_of(rank), takes), &input, output, &found)
                .map_err(|stop| stop.context(format!("call {at}, {case}")))?;
        }
        done.push(Done {
            output: image[first..first + bytes].to_vec(),
            report: reports[at],
            stray,
        });
    }
    Ok(done)
}

/// A call that reads the output of the call before it sees that call's result.
fn dependent(setup: &Setup) -> Verdict {
    const COUNT: usize = 1000;
    let world = World::new(setup, 2, 1);
    let arenas = world.arenas(4 * 4 * COUNT)?;
    world.run(|comm| {
        let arena = &arenas[comm.rank()];
        let ones: Vec<u8> = [1.0f32; COUNT]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        arena.write(0, &ones)?;
        let stream = arena.stream()?;
        let place = |at: usize| (4 * COUNT * at, 4 * COUNT);
        let mut group = Group::new();
        for at in 0..3 {
            let sum = Call::new(Collective::AllReduce, DType::F32, COUNT);
            group.add_on(comm, &sum, arena.buffers(place(at), place(at + 1), stream)?)?;
        }
        group.run()?;
        arena.wait(comm)?;
        let mut found = vec![0; 4 * COUNT];
        arena.read(4 * COUNT * 3, &mut found)?;
        let expected: Vec<u8> = [8.0f32; COUNT]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        ensure(found == expected, || {
            "three sums of two ranks are not 8".into()
        })
    })?;
    Ok("3 sums".into())
}

/// Returns the microseconds of one of `rounds` rounds of `queue`, the median of 5 measurements.
fn microseconds(
    stream: &Stream,
    rounds: u32,
    queue: &mut dyn FnMut() -> Result<(), Stop>,
) -> Result<f64, Stop> {
    let [begin, end] = [
        Event::timed(stream.context())?,
        Event::timed(stream.context())?,
    ];
    let mut all = Vec::new();
    for _ in 0..5 {
        queue()?;
        begin.record(stream)?;
        for _ in 0..rounds {
            queue()?;
        }
        end.record(stream)?;
        end.wait(Duration::from_secs(20))?;
        all.push(end.since(&begin)? * 1e6 / f64::from(rounds));
    }
    all.sort_by(f64::total_cmp);
    Ok(all[2])
}

/// Prints microseconds of groups of sums that share launches, and of groups whose calls have a launch each.
fn times(setup: &Setup, gpus: usize) -> Verdict {
    let nranks = gpus.max(2);
    let mut lines = Vec::new();
    for (calls, bytes, codec) in [
        (2, 4 << 10, "raw"),
        (8, 4 << 10, "raw"),
        (32, 4 << 10, "raw"),
        (128, 4 << 10, "raw"),
        (32, 64 << 10, "raw"),
        (32, 4 << 10, "linear8"),
        (32, 64 << 10, "linear8"),
    ] {
        let mut found = Vec::new();
        for fuse_bytes in [0, 64 << 10] {
            let mut world = World::new(setup, nranks, gpus);
            world.config.fuse_bytes = fuse_bytes;
            let arenas = world.arenas(2 * calls * bytes)?;
            let measured = world.run(|comm| {
                let arena = &arenas[comm.rank()];
                arena.write(0, &vec![0x3d; calls * bytes])?;
                let stream = arena.stream()?;
                let mut sum = Call::new(Collective::AllReduce, DType::F32, bytes / 4);
                sum.codec = codec.parse().ok();
                let mut queue = || -> Result<(), Stop> {
                    let mut group = Group::new();
                    for at in 0..calls {
                        let [input, output] = [at, calls + at].map(|at| (at * bytes, bytes));
                        group.add_on(comm, &sum, arena.buffers(input, output, stream)?)?;
                    }
                    group.run()?;
                    Ok(())
                };
                let eager = microseconds(stream, 20, &mut queue)?;
                let graph = Graph::capture(stream, CaptureMode::ThreadLocal, |_| {
                    queue().map_err(|_| cinch::Error::invalid_usage("the group"))
                })?;
                let replayed = microseconds(stream, 20, &mut || Ok(graph.launch(stream)?))?;
                Ok([eager, replayed])
            })?;
            let longest = |which: usize| measured.iter().map(|all| all[which]).fold(0.0, f64::max);
            found.push([longest(0), longest(1)]);
        }
        lines.push(format!(
            "{calls} x {}K {codec}: {:.1} and {:.1} us apart, {:.1} and {:.1} together",
            bytes >> 10,
            found[0][0],
            found[0][1],
            found[1][0],
            found[1][1]
        ));
    }
    Ok(format!("calls and graphs: {}", lines.join("; ")))
}
