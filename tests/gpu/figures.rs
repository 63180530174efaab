//! Measurements of start-up time and device memory, compared with the documented limits.

use crate::arena::{Arena, context};
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::models::number;
use crate::ranks::Ranks;
use crate::world::World;
use cinch::gpu::Context;
use cinch::types::DeviceChoice;
use cinch::{Communicator, UniqueId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Documented limits: the time of `Communicator::init`, and the bytes of device memory of a
/// communicator.
const INIT: Duration = Duration::from_secs(1);
const MEMORY: usize = 64 << 20;

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for (nranks, gpus) in [(1, 1), (4, 1), (2, 2), (8, 2), (4, 4), (8, 8)] {
        let name = format!("figure/init-threads-n{nranks}-gpus{gpus}");
        checks.push(Check::new(name, gpus, move |setup| {
            threads(setup, nranks, gpus)
        }));
        let name = format!("figure/memory-n{nranks}-gpus{gpus}");
        checks.push(Check::new(name, gpus, move |setup| {
            memory(setup, nranks, gpus)
        }));
    }
    for gpus in [1, 2, 4, 8] {
        let name = format!("figure/init-processes-n{gpus}-gpus{gpus}");
        checks.push(Check::new(name, gpus, move |setup| processes(setup, gpus)).within(120));
    }
    checks
}

fn within_limit(times: &[Duration], one_each: bool) -> Verdict {
    let worst = times.iter().max().copied().unwrap_or_default();
    // The limit applies only if each rank has a GPU of its own.
    ensure(worst < INIT || !one_each, || {
        format!("init took {worst:?}, promised {INIT:?}")
    })?;
    let texts: Vec<String> = times.iter().map(|time| format!("{time:.3?}")).collect();
    Ok(texts.join(", "))
}

fn contexts(gpus: usize) -> Result<Vec<Arc<Context>>, Stop> {
    Ok((0..gpus).map(context).collect::<Result<_, _>>()?)
}

/// Measures `init` of all ranks as threads: first when it must load the kernels, then when another
/// communicator has already loaded them.
fn threads(setup: &Setup, nranks: usize, gpus: usize) -> Verdict {
    let contexts = contexts(gpus)?;
    let world = World::new(setup, nranks, gpus);
    let begin = Instant::now();
    let first = world.communicators()?;
    let cold = begin.elapsed();
    let begin = Instant::now();
    let second = world.communicators()?;
    let warm = begin.elapsed();
    drop((first, second, contexts));
    within_limit(&[cold, warm], nranks == gpus)
}

/// Compares the device memory that a communicator reports with the decrease of free memory on its
/// GPU.
fn memory(setup: &Setup, nranks: usize, gpus: usize) -> Verdict {
    let contexts = contexts(gpus)?;
    let free = || -> Result<Vec<usize>, Stop> {
        let one = |context: &Arc<Context>| context.memory().map(|(free, _)| free);
        Ok(contexts.iter().map(one).collect::<Result<_, _>>()?)
    };
    let world = World::new(setup, nranks, gpus);
    // The first communicator loads the kernels, which all communicators share.
    let first = world.communicators()?;
    let before = free()?;
    let second = world.communicators()?;
    let after = free()?;
    let each = nranks.div_ceil(gpus);
    let taken = before.iter().zip(&after);
    let taken = taken.map(|(before, after)| before.saturating_sub(*after) / each);
    let taken = taken.max().unwrap_or(0);
    let reported = second.iter().map(|comm| comm.info().buffer_bytes).max();
    let reported = reported.unwrap_or(0);
    drop((first, second));
    ensure(taken <= MEMORY && reported <= MEMORY, || {
        format!("{reported} bytes reported, {taken} taken, of {MEMORY} promised")
    })?;
    // The driver allocates pages of 2 MiB, so a few allocations may take up to 8 MiB more.
    ensure(taken <= reported + (8 << 20), || {
        format!("{reported} bytes reported, {taken} taken")
    })?;
    Ok(format!(
        "{:.1} MiB reported, {:.1} MiB taken",
        mib(reported),
        mib(taken)
    ))
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Times `init` of one rank process per GPU.
fn processes(setup: &Setup, gpus: usize) -> Verdict {
    let world = World::new(setup, gpus, gpus);
    let sync_id = UniqueId::create_for_one_host(&world.config)?.to_hex();
    let id = UniqueId::create_for_one_host(&world.config)?.to_hex();
    let tasks = (0..gpus).map(|rank| format!("init {rank} {gpus} {sync_id} {id}"));
    let mut ranks = Ranks::start(&setup.options, tasks)?;
    let all: Vec<usize> = (0..gpus).collect();
    let reported = ranks.wait_for("done", &all, Duration::from_secs(90))?;
    let times: Vec<Duration> = reported
        .iter()
        .map(|text| Duration::from_secs_f64(text.parse().unwrap_or(1e6)))
        .collect();
    within_limit(&[times.into_iter().max().unwrap_or_default()], true)
}

/// Joins in a rank process and returns the seconds that it took. A first communicator synchronizes
/// the ranks after each has created its CUDA context.
pub fn init(setup: &Setup, words: &[&str]) -> Verdict {
    let [rank, gpus, sync_id, id] = words else {
        return Stop::wrong("init RANK GPUS SYNC_ID ID");
    };
    let (rank, gpus) = (number(rank)?, number(gpus)?);
    let world = World::new(setup, gpus, gpus);
    let mut config = world.config_of(rank);
    let own = config.clone();
    config.device = DeviceChoice::Host;
    let sync = Communicator::init(&UniqueId::from_hex(sync_id)?, rank, gpus, config)?;
    let arena = Arena::new(Some(rank), 256)?;
    sync.barrier()?;
    let begin = Instant::now();
    let comm = Communicator::init(&UniqueId::from_hex(id)?, rank, gpus, own)?;
    let took = begin.elapsed();
    comm.finalize()?;
    sync.finalize()?;
    drop(arena);
    Ok(took.as_secs_f64().to_string())
}
