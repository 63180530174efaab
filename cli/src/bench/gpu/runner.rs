//! Measures one row on GPUs.
//!
//! A repetition is a number of calls between two CUDA events on each rank's stream. An untimed
//! barrier precedes it, and no rank waits on the host before all of its calls are queued. The time
//! of a repetition is that of its slowest rank. The row's time is the median over repetitions. In
//! each round cinch and NCCL take turns. Each round begins with another contender than the round
//! before.

use super::layout::{self, Mode};
use crate::bench::combine::{Measured, Times, share, slowest};
use crate::bench::data::InputSource;
use crate::bench::pipeline::{Effort, is_late};
use crate::bench::row::Row;
use crate::bench::verify::{Check, CheckOutcome, same_on_all_ranks};
use crate::bench::world::BenchRank;
use cinch::{Report, Result};
use std::hash::Hasher;

/// The library that makes the calls, and the kind of its buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// cinch, on ordinary GPU buffers.
    Ours,
    /// The NCCL library of `--vs`, on ordinary GPU buffers.
    Peer,
    /// NCCL on buffers in its symmetric windows.
    Symmetric,
}

impl Contender {
    /// All contenders, in the order of their numbers.
    pub const ALL: [Contender; 3] = [Contender::Ours, Contender::Peer, Contender::Symmetric];
}

/// A rank's GPU with a stream on which calls are queued.
pub trait CallQueue {
    /// Prepares for a row. No call of an earlier row may still be queued.
    fn begin(&mut self, row: &Row) -> Result<()>;
    /// Returns whether the contender can run this row's call. cinch always can.
    fn has(&self, contender: Contender, row: &Row) -> bool;
    /// Records a CUDA graph of `calls` calls.
    fn record(&mut self, contender: Contender, calls: usize) -> Result<()>;
    /// Queues an event, `calls` calls, and another event. With `replay` the calls are a replay of
    /// the recorded graph.
    fn start(&mut self, contender: Contender, calls: usize, replay: bool) -> Result<()>;
    /// Waits for the second event and returns the seconds between both.
    fn finish(&mut self) -> Result<f64>;
    /// Overwrites all outputs with [`crate::bench::verify::POISON`].
    fn poison(&mut self) -> Result<()>;
    /// Describes the output of call number `call`. Returns its number of elements on this rank, its
    /// buffer set, and the index in the rank's data at which the input begins.
    fn output(&self, call: usize) -> (usize, usize, usize);
    /// Reads the output of buffer set `set` from element `start` on.
    fn read(&mut self, set: usize, start: usize, bytes: &mut [u8]) -> Result<()>;
    /// Returns the report of the last cinch call.
    fn report(&self) -> Result<Report>;
}

/// Result of a row's measurement, the same on all ranks.
#[derive(Clone, Debug)]
pub struct GpuMeasured {
    /// Times, errors and report of cinch's calls.
    pub measured: Measured,
    /// Calls in one repetition.
    pub calls: usize,
    /// Times of NCCL's calls on ordinary buffers; `None` if NCCL was not measured.
    pub peer: Option<Times>,
    /// Times of NCCL's calls on symmetric windows; `None` if they were not measured.
    pub symmetric: Option<Times>,
}

/// Warms up, measures the row and compares its result.
///
/// # Errors
/// Returns the queue's errors.
pub fn run<W: BenchRank, Q: CallQueue>(
    world: &W,
    queue: &mut Q,
    source: &InputSource,
    row: &Row,
    effort: Effort,
    mode: Mode,
) -> Result<GpuMeasured> {
    let graph = mode == Mode::Graph;
    // Warm-up calls are always launched on a stream, even if graphs are measured. Their number is
    // therefore limited if ranks share a GPU.
    let eager = match mode {
        Mode::Graph => Mode::Crowded,
        mode => mode,
    };
    queue.begin(row)?;
    let mut contenders = Contender::ALL.to_vec();
    contenders.retain(|&contender| queue.has(contender, row));
    let half = effort.half();
    let mut each = f64::INFINITY;
    for &contender in &contenders {
        // The first calls include connecting, loading kernels and allocating.
        let mut fastest = repeat(world, queue, contender, 2, false)?;
        let mut left = effort.warmup.max(1) as usize;
        while left > 0 && !is_late(world, half)? {
            let calls = left.min(eager.most_calls());
            fastest = repeat(world, queue, contender, calls, false)?.min(fastest);
            left -= calls;
        }
        each = each.min(fastest);
    }
    let each = slowest(world, &[each])?[0];
    let calls = layout::calls(each, mode);
    if graph {
        for &contender in &contenders {
            queue.record(contender, calls)?;
        }
        for &contender in &contenders {
            repeat(world, queue, contender, calls, true)?;
        }
    }
    let repetitions = effort.affordable(world, each * (calls * contenders.len()) as f64)?;
    let mut times = Contender::ALL.map(|_| Vec::new());
    for repetition in 0..repetitions {
        for turn in 0..contenders.len() {
            let contender = contenders[(turn + repetition) % contenders.len()];
            times[contender as usize].push(repeat(world, queue, contender, calls, graph)?);
        }
    }
    let mut outcome: Option<CheckOutcome> = None;
    for check in 0..effort.checks {
        if check > 0 && is_late(world, effort.half())? {
            break;
        }
        queue.poison()?;
        repeat(world, queue, Contender::Ours, calls, graph)?;
        let found = compare(world, queue, source, row, calls - 1)?;
        outcome.get_or_insert_default().merge(&found);
    }
    let other = |contender: Contender| match times[contender as usize].as_slice() {
        [] => Ok(None),
        times => {
            let slowest = slowest(world, times)?;
            Ok::<_, cinch::Error>(Some(Times::of(&slowest)))
        }
    };
    let (peer, symmetric) = (other(Contender::Peer)?, other(Contender::Symmetric)?);
    let report = queue.report()?;
    Ok(GpuMeasured {
        measured: share(
            world,
            row,
            &report,
            &times[Contender::Ours as usize],
            outcome,
        )?,
        calls,
        peer,
        symmetric,
    })
}

/// Runs one repetition and returns the seconds of one call on this rank.
fn repeat<W: BenchRank, Q: CallQueue>(
    world: &W,
    queue: &mut Q,
    contender: Contender,
    calls: usize,
    replay: bool,
) -> Result<f64> {
    world.barrier()?;
    queue.start(contender, calls, replay)?;
    Ok(queue.finish()? / calls as f64)
}

/// Compares the output of call number `call` with the exact result. If all ranks must hold the same
/// data, each rank compares only its share, and the hashes of all ranks must match.
fn compare<W: BenchRank, Q: CallQueue>(
    world: &W,
    queue: &mut Q,
    source: &InputSource,
    row: &Row,
    call: usize,
) -> Result<CheckOutcome> {
    let (rank, nranks) = (world.rank(), world.nranks());
    let report = queue.report()?;
    let (elements, set, shift) = queue.output(call);
    let check = Check {
        source,
        row,
        rank,
        nranks,
        set: 0,
        shift,
        codec: report.codec.into(),
        algorithm: report.algorithm,
    };
    let size = row.dtype.size();
    let shared = same_on_all_ranks(row.collective);
    let mut hasher = std::hash::DefaultHasher::new();
    let mut outcome = CheckOutcome::default();
    let mut held = Vec::new();
    for (index, piece) in layout::pieces(elements, size, row.count as u64)
        .into_iter()
        .enumerate()
    {
        held.resize(piece.len() * size, 0);
        queue.read(set, piece.start, &mut held)?;
        hasher.write(&held);
        if !shared || index % nranks == rank {
            check.piece(piece.start, &held, &mut outcome);
        }
    }
    outcome.hash = hasher.finish();
    Ok(outcome)
}

#[cfg(test)]
#[path = "runner_tests.rs"]
mod tests;
