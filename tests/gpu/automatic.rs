//! Codecs that run where they pay (`auto:`): ranks time calls when they join, and choose alike.

use crate::arena::Arena;
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::options::Options;
use crate::world::World;
use cinch::comm::Call;
use cinch::config::FileChoice;
use cinch::{Collective, Communicator, DType};
use std::time::Instant;

pub fn checks(_options: &Options) -> Vec<Check> {
    let check = |(nranks, gpus, is_pinned): (usize, usize, bool)| {
        let pinned = if is_pinned { "-pinned" } else { "" };
        let name = format!("auto/n{nranks}-gpus{gpus}{pinned}");
        Check::new(name, gpus, move |setup| {
            choose(setup, nranks, gpus, is_pinned)
        })
        .within(60)
    };
    let worlds = [
        (2, 1, false),
        (2, 1, true),
        (4, 1, false),
        (2, 2, false),
        (8, 8, false),
    ];
    worlds.into_iter().map(check).collect()
}

/// Returns the last line of the explanation of a call: the costs by which its codec was chosen.
fn costs(comm: &Communicator, call: &Call) -> Result<String, Stop> {
    let text = comm.explain(call)?;
    Ok(text.lines().last().unwrap_or("").trim().into())
}

/// Runs calls of several sizes. All ranks choose by equal times, and calls of ranks without a measurement are raw. A second
/// communicator takes the times that the first one saved.
fn choose(setup: &Setup, nranks: usize, gpus: usize, is_pinned: bool) -> Verdict {
    const LARGEST: usize = 16 << 20;
    let mut world = World::new(setup, nranks, gpus);
    world.config.p2p_disable = is_pinned;
    // The library's table has lines of some machines, by which calls are encoded without a measurement.
    world.config.tuning = FileChoice::Off;
    let arenas = world.arenas(2 * LARGEST)?;
    let run = |comm: &Communicator, arena: &Arena, call: &Call| -> Result<String, Stop> {
        let bytes = call.count * 4;
        let buffers = arena.buffers((0, bytes), (LARGEST, bytes), arena.stream()?)?;
        let report = comm.call_on(call, buffers)?;
        arena.wait(comm)?;
        Ok(report.codec.to_string())
    };
    let mut call = Call::new(Collective::AllReduce, DType::F32, LARGEST / 4);
    call.codec = "auto:linear8".parse().ok();
    let unmeasured = world.run(|comm| run(comm, &arenas[comm.rank()], &call))?;
    ensure(unmeasured.iter().all(|codec| codec == "raw"), || {
        format!("without a measurement {unmeasured:?} ran")
    })?;
    world.config.codec = call.codec.unwrap_or(world.config.codec);
    let (mut chosen, mut took) = (Vec::new(), Vec::new());
    for is_saved in [false, true] {
        world.config.saved_times = is_saved;
        let start = Instant::now();
        let of_ranks = world.run(|comm| {
            let joined = start.elapsed();
            let mut chosen = Vec::new();
            for bytes in [4 << 10, 64 << 10, 1 << 20, LARGEST] {
                chosen.push((
                    bytes >> 10,
                    run(comm, &arenas[comm.rank()], &call_of(bytes, &call))?,
                ));
            }
            Ok(((chosen, costs(comm, &call)?), joined))
        })?;
        let (of_ranks, joined): (Vec<_>, Vec<_>) = of_ranks.into_iter().unzip();
        chosen.extend(of_ranks);
        took.extend(joined.into_iter().max());
    }
    ensure(chosen.iter().all(|one| *one == chosen[0]), || {
        format!("ranks, or communicators of equal times, chose otherwise: {chosen:?}")
    })?;
    let (codecs, costs) = &chosen[0];
    ensure(
        costs.contains("measured") && costs.contains("linear8:block=256 f32"),
        || costs.clone(),
    )?;
    Ok(format!(
        "joined in {took:?}, measured and saved; {codecs:?}; {costs}"
    ))
}

fn call_of(bytes: usize, call: &Call) -> Call {
    Call {
        count: bytes / 4,
        ..*call
    }
}
