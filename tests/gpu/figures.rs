//! What is promised about starting and about memory, measured.

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

/// The promises.
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

fn promised(times: &[Duration], one_each: bool) -> Verdict {
    let worst = times.iter().max().copied().unwrap_or_default();
    // Ranks that share a GPU were promised nothing.
    ensure(worst < INIT || !one_each, || {
        format!("init took {worst:?}, promised {INIT:?}")
    })?;
    let texts: Vec<String> = times.iter().map(|time| format!("{time:.3?}")).collect();
    Ok(texts.join(", "))
}

fn contexts(gpus: usize) -> Result<Vec<Arc<Context>>, Stop> {
    Ok((0..gpus).map(context).collect::<Result<_, _>>()?)
}

/// All ranks as threads: first with kernels to load, then while others have them.
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
    promised(&[cold, warm], nranks == gpus)
}

/// Device memory of a communicator: what it says, and what is gone.
fn memory(setup: &Setup, nranks: usize, gpus: usize) -> Verdict {
    let contexts = contexts(gpus)?;
    let free = || -> Result<Vec<usize>, Stop> {
        let one = |context: &Arc<Context>| context.memory().map(|(free, _)| free);
        Ok(contexts.iter().map(one).collect::<Result<_, _>>()?)
    };
    let world = World::new(setup, nranks, gpus);
    // Kernels are loaded once for all communicators.
    let first = world.communicators()?;
    let before = free()?;
    let second = world.communicators()?;
    let after = free()?;
    let each = nranks.div_ceil(gpus);
    let gone = before.iter().zip(&after);
    let gone = gone.map(|(before, after)| before.saturating_sub(*after) / each);
    let gone = gone.max().unwrap_or(0);
    let said = second.iter().map(|comm| comm.info().buffer_bytes).max();
    let said = said.unwrap_or(0);
    drop((first, second));
    ensure(gone <= MEMORY && said <= MEMORY, || {
        format!("{said} bytes said, {gone} gone, of {MEMORY} promised")
    })?;
    // The driver hands out pages of 2 MiB.
    ensure(gone <= said + (8 << 20), || {
        format!("{said} bytes said, {gone} gone")
    })?;
    Ok(format!(
        "{:.1} MiB said, {:.1} MiB gone",
        mib(said),
        mib(gone)
    ))
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// One process for each GPU.
fn processes(setup: &Setup, gpus: usize) -> Verdict {
    let world = World::new(setup, gpus, gpus);
    let meeting = UniqueId::create_for_one_host(&world.config)?.to_hex();
    let id = UniqueId::create_for_one_host(&world.config)?.to_hex();
    let tasks = (0..gpus).map(|rank| format!("init {rank} {gpus} {meeting} {id}"));
    let mut ranks = Ranks::start(&setup.options, tasks)?;
    let all: Vec<usize> = (0..gpus).collect();
    let said = ranks.wait_for("done", &all, Duration::from_secs(90))?;
    let times: Vec<Duration> = said
        .iter()
        .map(|text| Duration::from_secs_f64(text.parse().unwrap_or(1e6)))
        .collect();
    promised(&[times.into_iter().max().unwrap_or_default()], true)
}

/// A rank process that says how long joining took once every rank had its context.
pub fn init(setup: &Setup, words: &[&str]) -> Verdict {
    let [rank, gpus, meeting, id] = words else {
        return Stop::wrong("init RANK GPUS ID ID");
    };
    let (rank, gpus) = (number(rank)?, number(gpus)?);
    let world = World::new(setup, gpus, gpus);
    let mut config = world.config_of(rank);
    let own = config.clone();
    config.device = DeviceChoice::Host;
    let together = Communicator::init(&UniqueId::from_hex(meeting)?, rank, gpus, config)?;
    let arena = Arena::new(Some(rank), 256)?;
    together.barrier()?;
    let begin = Instant::now();
    let comm = Communicator::init(&UniqueId::from_hex(id)?, rank, gpus, own)?;
    let took = begin.elapsed();
    comm.finalize()?;
    together.finalize()?;
    drop(arena);
    Ok(took.as_secs_f64().to_string())
}
