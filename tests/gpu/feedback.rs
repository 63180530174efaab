//! Tests error feedback. Residuals must equal the residuals of the host engine for equal chunk
//! sizes, over calls with changing arguments, rescaling, export and import, and graph replays.

use crate::case::{Case, Done, Values};
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::options::Options;
use crate::world::{World, expect_error};
use cinch::comm::Call;
use cinch::error::ErrorKind;
use cinch::gpu::{CaptureMode, Graph};
use cinch::plan::Limits;
use cinch::testing::Pattern;
use cinch::types::KernelProtocol;
use cinch::{Collective, Communicator, DType, ReduceOp, schedule};

const SPECS: [&str; 9] = [
    "onebit",
    "terngrad:seed=3",
    "minmax4",
    "minmax1:block=64",
    "minmax2:block=2048",
    "linear8",
    "dynamic8:block=1024",
    "trunc16",
    "threshold2:tau=0.5",
];
/// Number of calls for each tensor.
const CALLS: usize = 4;

pub fn checks(options: &Options) -> Vec<Check> {
    let worlds = [(2, 1), (3, 1), (5, 1), (2, 2), (8, 2), (4, 4), (8, 8)];
    let check = |(nranks, gpus): (usize, usize)| {
        let name = format!("feedback/n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| compare(setup, nranks, gpus));
        check.within(options.either(180, 240)).also_on_host()
    };
    let mut checks: Vec<Check> = worlds.into_iter().map(check).collect();
    checks.push(Check::new("feedback/replays", 1, replays));
    checks
}

/// Returns one call for each combination of codec, type, collective and algorithm, each with its
/// own tensor.
fn tensors(nranks: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let counts = [1, 700, 5000, 70_001];
    for (number, text) in SPECS.into_iter().enumerate() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for collective in [
                Collective::AllReduce,
                Collective::ReduceScatter,
                Collective::Reduce,
            ] {
                for algorithm in schedule::algorithms(collective) {
                    let at = cases.len();
                    let count = counts[(at + number) % counts.len()];
                    let mut call = Call::new(collective, dtype, count);
                    call.codec = text.parse().ok();
                    call.algorithm = Some(*algorithm);
                    call.feedback = Some(1 + at as u64);
                    call.op = [ReduceOp::Sum, ReduceOp::Avg][at % 2];
                    if collective.has_root() {
                        call.root = at % nranks;
                    }
                    // Blocks with infinities or NaN must leave their residuals as they were.
                    let values = match at % 5 {
                        0 => Values::Bits,
                        _ => Values::Of(Pattern::Gaussian),
                    };
                    let mut case = Case::new(call, values, 77 + at as u64);
                    case.in_place = at % 3 == 0;
                    case.shifted = at % 4 == 1;
                    cases.push(case);
                }
            }
        }
    }
    cases
}

/// Runs all tensors with the kernels that the cost model selects, then with schedule kernels, then
/// with fused kernels.
fn compare(setup: &Setup, nranks: usize, gpus: usize) -> Verdict {
    let mut summaries = Vec::new();
    for protocol in [
        None,
        Some(KernelProtocol::SIMPLE),
        Some(KernelProtocol::FUSED_LL),
        Some(KernelProtocol::FUSED_LL128),
    ] {
        let mut world = World::new(setup, nranks, gpus);
        world
            .config
            .force_kernel(protocol.filter(|_| !setup.options.host));
        summaries.push(compare_in(&world, nranks)?);
    }
    Ok(summaries.swap_remove(0))
}

fn compare_in(world: &World, nranks: usize) -> Verdict {
    let cases = tensors(nranks);
    let (on_gpu, limits) = outputs(world, &cases, None)?;
    let host_world = world.on_host_memory(&limits);
    let (on_host, _) = outputs(&host_world, &cases, Some(limits))?;
    let mut changed = 0;
    for rank in 0..nranks {
        for (at, (found, wanted)) in on_gpu[rank].iter().zip(&on_host[rank]).enumerate() {
            let (round, case) = (at / cases.len(), &cases[at % cases.len()]);
            case.same_numbers(&found.output, &wanted.output, rank, nranks)
                .map_err(|why| {
                    Stop::Wrong(format!("call {round}: {why} (expected is the host engine)"))
                })?;
            // A tensor has equal inputs in every call, so only residuals can change its output.
            if round > 0 && found.output != on_gpu[rank][at - cases.len()].output {
                changed += 1;
            }
        }
    }
    ensure(changed > cases.len(), || {
        format!("residuals changed {changed} outputs only")
    })?;
    Ok(format!(
        "{} calls of {} tensors on {nranks} ranks, {changed} outputs changed, equal to the host engine",
        CALLS * cases.len(),
        cases.len()
    ))
}

/// Returns each rank's outputs of all calls, in rounds over all tensors. Between rounds the
/// residuals are rescaled, or exported and imported.
fn outputs(
    world: &World,
    cases: &[Case],
    limits: Option<Limits>,
) -> Result<(Vec<Vec<Done>>, Limits), Stop> {
    let nranks = world.nranks();
    let bytes = cases.iter().map(|case| case.bytes(nranks)).max();
    let arenas = world.arenas(bytes.unwrap_or(0))?;
    let all = world.run(|comm| {
        if let Some(limits) = &limits {
            comm.copy_limits(limits.clone())?;
        }
        let mut done = Vec::new();
        for round in 0..CALLS {
            for case in cases {
                let input = case.input(comm.rank(), nranks);
                let outcome = arenas[comm.rank()].run(case, comm, &input);
                done.push(outcome.map_err(|error| Stop::from(error).context(case))?);
            }
            match round {
                0 => comm.rescale_residuals(0.5)?,
                1 => restore(comm)?,
                _ => {}
            }
        }
        Ok((done, comm.limits()?))
    })?;
    let limits = all[0].1.clone();
    Ok((all.into_iter().map(|(done, _)| done).collect(), limits))
}

/// Exports the residuals, forgets them, and imports them.
fn restore(comm: &Communicator) -> Result<(), Stop> {
    let stored = comm.export_residuals()?;
    comm.forget_residuals(None)?;
    comm.import_residuals(&stored)?;
    ensure(comm.export_residuals()? == stored, || {
        "imported residuals differ from the exported ones".into()
    })
}

/// Each replay of a graph must use the residuals that the previous replay left. A capture must
/// refuse a tensor that has no residuals yet.
fn replays(setup: &Setup) -> Verdict {
    const COUNT: usize = 20_000;
    const REPLAYS: usize = 5;
    let mut call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    call.codec = "onebit".parse().ok();
    call.feedback = Some(9);
    let case = Case::new(call, Values::Of(Pattern::Gaussian), 5);
    let world = World::new(setup, 2, 1);
    let layout = case.layout(0, 2);
    let captured = |captures: bool| {
        let arenas = world.arenas(case.bytes(2))?;
        world.run(|comm| {
            let arena = &arenas[comm.rank()];
            let before = arena.prepare(&case, comm.rank(), 2, &case.input(comm.rank(), 2))?;
            let stream = arena.stream()?;
            let queue = || {
                let buffers = arena.buffers(layout.input, layout.output, stream)?;
                comm.call_on(&call, buffers)
            };
            let mut report = None;
            let graph = if captures {
                let refused = Graph::capture(stream, CaptureMode::Relaxed, |_| {
                    let error = queue().err().ok_or_else(|| {
                        cinch::Error::internal("a capture began the residuals of a tensor")
                    })?;
                    expect_error(&error, ErrorKind::InvalidUsage, &["tensor 9", "before"])
                        .map_err(|_| error)
                });
                refused?;
                report = Some(queue()?);
                Some(Graph::capture(stream, CaptureMode::Relaxed, |_| {
                    queue().map(drop)
                })?)
            } else {
                None
            };
            let mut outputs = Vec::new();
            for round in 0..REPLAYS {
                match &graph {
                    Some(_) if round == 0 => {}
                    Some(graph) => graph.launch(stream)?,
                    None => report = Some(queue()?),
                }
                arena.wait(comm)?;
                let report = report.ok_or_else(|| Stop::Wrong("no call".into()))?;
                outputs.push(
                    arena
                        .collect(&case, comm.rank(), 2, &before, report)?
                        .output,
                );
            }
            Ok(outputs)
        })
    };
    let (replayed, called) = (captured(true)?, captured(false)?);
    for rank in 0..2 {
        for round in 0..REPLAYS {
            case.same(&replayed[rank][round], &called[rank][round], rank, 2)
                .map_err(|why| Stop::Wrong(format!("replay {round}: {why}")))?;
        }
        ensure(called[rank][0] != called[rank][1], || {
            "residuals changed nothing".into()
        })?;
    }
    Ok(format!("{} replays as so many calls", REPLAYS - 1))
}
