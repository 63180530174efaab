//! Tests the statistics that calls write: of their contribution, and the verdict of their output. They are compared
//! with a loop over the input and the output, for calls with and without a codec, and in graphs. Another
//! check prints what they and the verdict alone cost.

use crate::arena::{Arena, PATIENCE, Takes};
use crate::case::{Case, Values};
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::options::Options;
use crate::world::{World, expect_error};
use cinch::codec;
use cinch::comm::{Call, Group};
use cinch::cpu::Isa;
use cinch::error::ErrorKind;
use cinch::gpu::{CaptureMode, Graph};
use cinch::testing::{Pattern, set_value, value};
use cinch::types::{KernelProtocol, Scalar};
use cinch::{CallStatistics, Collective, Communicator, DType, ReduceOp, schedule};
use std::time::{Duration, Instant};

/// Codecs of the calls. Those from `cast16` on saturate.
const SPECS: [&str; 9] = [
    "raw",
    "linear8",
    "linear8:block=2048",
    "dynamic8",
    "minmax4",
    "fp8_e4m3",
    "cast16",
    "static8",
    "trunc16",
];

pub fn checks(options: &Options) -> Vec<Check> {
    let worlds = [(2, 1), (3, 1), (2, 2), (4, 4), (8, 8)];
    let check = |(nranks, gpus): (usize, usize)| {
        let name = format!("statistics/n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| compare(setup, nranks, gpus));
        check.within(options.either(180, 240))
    };
    let mut checks: Vec<Check> = worlds.into_iter().map(check).collect();
    checks.push(Check::new("statistics/replays", 1, replays));
    checks.push(Check::new("statistics/refusals", 1, refusals));
    checks.push(Check::new("statistics/extents", 1, extents));
    for gpus in [1, 2, 4, 8] {
        let name = format!("statistics/cost-gpus{gpus}");
        checks.push(Check::new(name, gpus, move |setup| cost(setup, gpus)).within(120));
    }
    checks
}

/// Returns calls of every collective, algorithm and codec; types, operators and values vary.
fn cases(nranks: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let counts = [1, 700, 5000, 70_001];
    for (number, text) in SPECS.into_iter().enumerate() {
        // Messages take no statistics.
        let collectives = Collective::ALL.into_iter();
        for collective in collectives.filter(|it| *it != Collective::SendRecv) {
            for algorithm in schedule::algorithms(collective) {
                let at = cases.len();
                let dtypes = match number {
                    0 => [DType::F32, DType::F64, DType::F16, DType::F8E5M2],
                    _ => [DType::F32, DType::BF16, DType::F16, DType::F32],
                };
                let mut call = Call::new(collective, dtypes[at % 4], counts[(at + number) % 4]);
                call.codec = text.parse().ok();
                call.algorithm = Some(*algorithm);
                if collective.reduces() {
                    let factor = ReduceOp::PreMulSum(Scalar::Float(0.5));
                    call.op = [ReduceOp::Sum, ReduceOp::Avg, factor][at % 3];
                }
                if collective.has_root() {
                    call.root = at % nranks;
                }
                let values = match at % 4 {
                    0 => Values::Bits,
                    _ => Values::Of(Pattern::Gaussian),
                };
                let mut case = Case::new(call, values, 2 * at as u64);
                case.in_place = at % 3 == 0 && collective != Collective::AllToAll;
                case.shifted = at % 4 == 1;
                cases.push(case);
            }
        }
    }
    cases
}

/// Runs all calls with the kernels that the cost model selects, then with schedule kernels, then with fused kernels.
fn compare(setup: &Setup, nranks: usize, gpus: usize) -> Verdict {
    let cases = cases(nranks);
    for kernel in [
        None,
        Some(KernelProtocol::SIMPLE),
        Some(KernelProtocol::FUSED_LL128),
    ] {
        let mut world = World::new(setup, nranks, gpus);
        world.config.force_kernel(kernel);
        let bytes = cases.iter().map(|case| place(case, nranks) + 64);
        let arenas = world.arenas(bytes.max().unwrap_or(0))?;
        world.run(|comm| {
            for (number, case) in cases.iter().enumerate() {
                let takes = [Takes::All, Takes::Verdict][number / 2 % 2];
                let checked = check(case, takes, comm, &arenas[comm.rank()]);
                checked.map_err(|stop| stop.context(format!("{takes:?} of {case}")))?;
            }
            Ok(())
        })?;
    }
    Ok(format!("{} calls on {nranks} ranks", 3 * cases.len()))
}

/// Returns the offset of the statistics behind a case's buffers.
fn place(case: &Case, nranks: usize) -> usize {
    case.bytes(nranks).next_multiple_of(256)
}

fn check(case: &Case, takes: Takes, comm: &Communicator, arena: &Arena) -> Result<(), Stop> {
    let (rank, nranks) = (comm.rank(), comm.nranks());
    let input = case.input(rank, nranks);
    arena.prepare(case, rank, nranks, &input)?;
    let (at, layout) = (place(case, nranks), case.layout(rank, nranks));
    arena.write(at, &[0xee; size_of::<CallStatistics>()])?;
    let stream = arena.stream()?;
    let buffers = |input, output| arena.buffers_with_statistics(input, output, (at, takes), stream);
    comm.call_on(&case.call_of(rank), buffers(layout.input, layout.output)?)?;
    let found = arena.statistics(comm, at, stream)?;
    let mut output = vec![0; layout.output.1];
    if !output.is_empty() {
        arena.read(layout.output.0, &mut output)?;
    }
    judge((&case.call_of(rank), takes), &input, &output, &found)
}

/// Returns the number beyond which finite elements saturate in the codec of a call.
fn largest(call: &Call) -> Result<f64, Stop> {
    let Some(setting) = call.codec.filter(|setting| setting.is_lossy()) else {
        return Ok(f64::INFINITY);
    };
    let codec = codec::build_for(setting.inter, call.dtype, Isa::Scalar)?;
    Ok(codec.map_or(f64::INFINITY, |codec| codec.description().errors.largest))
}

/// Compares the statistics of a call with a loop over its input and its output.
pub fn judge(
    (call, takes): (&Call, Takes),
    input: &[u8],
    output: &[u8],
    found: &CallStatistics,
) -> Result<(), Stop> {
    let dtype = call.dtype;
    let values = |all: &[u8]| -> Vec<f64> {
        let elements = all.chunks_exact(dtype.size());
        elements.map(|element| value(dtype, element)).collect()
    };
    let factor = match call.op {
        ReduceOp::PreMulSum(Scalar::Float(factor)) if call.collective.reduces() => factor,
        _ => 1.0,
    };
    let mut expected = CallStatistics {
        known: CallStatistics::NON_FINITE,
        ..CallStatistics::default()
    };
    let largest = largest(call)?;
    expected.has_input = u32::from(takes == Takes::All);
    let input = if takes == Takes::All { input } else { &[] };
    for x in values(input) {
        let x = match dtype {
            DType::F64 => x * factor,
            // Kernels multiply in fp32.
            _ => f64::from(x as f32 * factor as f32),
        };
        match x.is_finite() {
            true => {
                expected.abs_max = expected.abs_max.max(x.abs());
                expected.sum_squares += x * x;
                expected.saturated += u64::from(x.abs() > largest);
            }
            false => expected.non_finite += 1,
        }
    }
    if values(output).iter().any(|x| !x.is_finite()) {
        expected.verdict = CallStatistics::NON_FINITE;
    }
    if call.op == ReduceOp::Avg {
        // An average encodes the elements times a power of two.
        expected.saturated = found.saturated;
    }
    let near = |a: f64, b: f64| a == b || (a - b).abs() <= 1e-5 * b.abs();
    let same = near(found.abs_max, expected.abs_max)
        && near(found.sum_squares, expected.sum_squares)
        && CallStatistics {
            abs_max: expected.abs_max,
            sum_squares: expected.sum_squares,
            ..*found
        } == expected;
    ensure(same, || format!("found {found:?}, expected {expected:?}"))
}

/// Launches a graph several times, with other inputs, and checks the statistics of each launch.
fn replays(setup: &Setup) -> Verdict {
    const COUNT: usize = 100_000;
    let world = World::new(setup, 2, 1);
    let bytes = 8 * COUNT + 64;
    let arenas = world.arenas(bytes)?;
    world.run(|comm| {
        let (rank, arena) = (comm.rank(), &arenas[comm.rank()]);
        let stream = arena.stream()?;
        let mut calls = Vec::new();
        for text in ["raw", "raw", "cast16", "linear8"] {
            let mut call = Call::new(Collective::AllReduce, DType::F32, COUNT);
            call.codec = text.parse().ok();
            calls.push(call);
        }
        for (number, call) in calls.into_iter().enumerate() {
            let (input, output) = ((0, 4 * COUNT), (4 * COUNT, 4 * COUNT));
            let takes = |number| [Takes::All, Takes::Verdict][number % 2];
            let place = (8 * COUNT, takes(number));
            let buffers = || arena.buffers_with_statistics(input, output, place, stream);
            let graph = Graph::capture(stream, CaptureMode::ThreadLocal, |_| {
                comm.call_on(&call, buffers()?).map(|_| ())
            })?;
            for launch in 0..4 {
                let mut data = vec![0; 4 * COUNT];
                for (at, element) in data.chunks_exact_mut(4).enumerate() {
                    let x = match (launch, rank, at) {
                        // This element of rank 1 must reach the verdicts of both ranks.
                        (1, 1, 77_777) => f64::NAN,
                        (2, 0, 5) => 1e6,
                        _ => (at as f64 * 0.37 + f64::from(launch)).sin(),
                    };
                    set_value(DType::F32, x, element);
                }
                arena.write(0, &data)?;
                graph.launch(stream)?;
                let found = arena.statistics(comm, 8 * COUNT, stream)?;
                let mut result = vec![0; 4 * COUNT];
                arena.read(4 * COUNT, &mut result)?;
                let saturates = call
                    .codec
                    .is_some_and(|codec| codec.to_string() == "cast16");
                judge((&call, takes(number)), &data, &result, &found)
                    .map_err(|stop| stop.context(format!("launch {launch}, {:?}", call.codec)))?;
                let is_spoiled = launch == 1;
                ensure(found.has_non_finite_output() == Some(is_spoiled), || {
                    format!("launch {launch}: verdict {found:?}")
                })?;
                let expected = u64::from(saturates && launch == 2 && rank == 0);
                ensure(!saturates || found.saturated == expected, || {
                    format!(
                        "launch {launch}: {} saturated, not {expected}",
                        found.saturated
                    )
                })?;
            }
        }
        Ok(())
    })?;
    Ok("4 launches of 4 graphs".into())
}

/// Calls that cannot have statistics, or statistics in a wrong place, are refused before anything is queued.
fn refusals(setup: &Setup) -> Verdict {
    let world = World::new(setup, 2, 1);
    let arenas = world.arenas(4096)?;
    world.run(|comm| {
        let arena = &arenas[comm.rank()];
        let stream = arena.stream()?;
        let sum = Collective::AllReduce;
        for (collective, dtype, at, words) in [
            (sum, DType::I32, 2048, ["only floats", "i32"]),
            (sum, DType::F32, 2052, ["not aligned", "8 bytes"]),
            (sum, DType::F32, 120, ["overlap", "output of 64 bytes"]),
            (
                Collective::SendRecv,
                DType::F32,
                2048,
                ["send and recv", "NULL"],
            ),
        ] {
            let mut call = Call::new(collective, dtype, 16);
            call.peer = 1;
            let buffers =
                arena.buffers_with_statistics((0, 64), (64, 64), (at, Takes::All), stream)?;
            match comm.call_on(&call, buffers) {
                Ok(_) => {
                    return Stop::wrong(format!("{collective} of {dtype} at {at} was accepted"));
                }
                Err(error) => expect_error(&error, ErrorKind::InvalidArgument, &words)?,
            }
        }
        Ok(())
    })?;
    Ok("4 calls".into())
}

/// Statistics cover the elements of a call, in longer buffers too, and are written for calls without elements. Calls of
/// a group write theirs in order with the streams of all its calls.
fn extents(setup: &Setup) -> Verdict {
    const COUNT: usize = 100;
    const ROOM: usize = 4096;
    let world = World::new(setup, 2, 1);
    let arenas = world.arenas(4 * ROOM)?;
    world.run(|comm| {
        let arena = &arenas[comm.rank()];
        // A new stream zeroes the memory.
        let streams = [arena.new_stream(0)?, arena.new_stream(0)?];
        let mut elements = [0u8; ROOM];
        for (at, element) in elements.chunks_exact_mut(4).enumerate() {
            // Elements behind those of the call are not finite.
            let x = if at < COUNT { 2.0 } else { f64::NAN };
            set_value(DType::F32, x, element);
        }
        arena.write(0, &elements)?;
        arena.write(ROOM, &elements)?;
        arena.write(2 * ROOM, &[0xee; 2 * 64])?;
        let mut group = Group::new();
        for (number, count) in [COUNT, 0].into_iter().enumerate() {
            let call = Call::new(Collective::AllReduce, DType::F32, count);
            let (at, stream) = (2 * ROOM + 64 * number, &streams[number]);
            let buffers =
                arena.buffers_with_statistics((0, ROOM), (ROOM, ROOM), (at, Takes::All), stream)?;
            group.add_on(comm, &call, buffers)?;
        }
        group.run()?;
        for (number, count) in [COUNT, 0].into_iter().enumerate() {
            let at = 2 * ROOM + 64 * number;
            let found = arena.statistics(comm, at, &streams[number])?;
            let expected = CallStatistics {
                sum_squares: 4.0 * count as f64,
                abs_max: if count > 0 { 2.0 } else { 0.0 },
                known: CallStatistics::NON_FINITE,
                has_input: 1,
                ..CallStatistics::default()
            };
            ensure(found == expected, || format!("{count} elements: {found:?}"))?;
        }
        Ok(())
    })?;
    Ok("2 calls of a group".into())
}

/// Measures all_reduces of 64 MiB without statistics, with all of them, and with the verdict alone, in turn.
fn cost(setup: &Setup, gpus: usize) -> Verdict {
    const BYTES: usize = 64 << 20;
    const CALLS: u32 = 50;
    let mut lines = Vec::new();
    for (dtype, text) in [
        (DType::F32, "linear8"),
        (DType::BF16, "linear8"),
        (DType::F32, "minmax4"),
        (DType::F32, "cast16"),
        (DType::F32, "raw"),
    ] {
        let world = World::new(setup, gpus.max(2), gpus);
        let arenas = world.arenas(2 * BYTES + 64)?;
        let times = world.run(|comm| {
            let arena = &arenas[comm.rank()];
            let stream = arena.stream()?;
            let mut call = Call::new(Collective::AllReduce, dtype, BYTES / dtype.size());
            call.codec = text.parse().ok();
            let mut data = vec![0; 1 << 20];
            for (at, element) in data.chunks_exact_mut(dtype.size()).enumerate() {
                set_value(dtype, (at as f64 * 0.37).sin(), element);
            }
            for at in (0..BYTES).step_by(data.len()) {
                arena.write(at, &data)?;
            }
            let (input, output) = ((0, BYTES), (BYTES, BYTES));
            let with_statistics =
                |takes| arena.buffers_with_statistics(input, output, (2 * BYTES, takes), stream);
            let mut best = [Duration::MAX; 3];
            for round in 0..10 {
                for (with, best) in best.iter_mut().enumerate() {
                    comm.barrier()?;
                    let begin = Instant::now();
                    for _ in 0..CALLS {
                        let buffers = match with {
                            0 => arena.buffers(input, output, stream)?,
                            1 => with_statistics(Takes::All)?,
                            _ => with_statistics(Takes::Verdict)?,
                        };
                        comm.call_on(&call, buffers)?;
                    }
                    stream.wait(PATIENCE)?;
                    if round > 1 {
                        *best = (*best).min(begin.elapsed() / CALLS);
                    }
                }
            }
            Ok(best)
        })?;
        let [without, all, verdict] = times[0].map(|time| time.as_secs_f64() * 1e6);
        let percent = |with: f64| 100.0 * (with / without - 1.0);
        lines.push(format!(
            "{dtype} {text}: {without:.1} us without, {all:.1} us with all ({:+.1} %), {verdict:.1} us with the verdict \
             ({:+.1} %)",
            percent(all),
            percent(verdict)
        ));
    }
    Ok(lines.join("; "))
}
