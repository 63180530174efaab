//! The measurement of one row, apart from what runs it.
//!
//! A repetition is a number of calls between two marks on each rank's stream. All ranks meet
//! before it, outside of the timing; none waits on the host before all of its calls are queued.
//! The time of a repetition is that of its slowest rank, the row's time the median over
//! repetitions. Two libraries take turns, and the order turns every second time.

use super::layout::{self, Mode};
use crate::bench::combine::{share, slowest};
use crate::bench::data::Source;
use crate::bench::measure::{Effort, Measured, is_late};
use crate::bench::metrics::{median, quantile};
use crate::bench::row::Row;
use crate::bench::verify::{Check, Outcome, same_on_all_ranks};
use crate::bench::world::World;
use cinch::{Report, Result};
use std::hash::Hasher;
use std::time::Instant;

/// Whose calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// This library's.
    Ours,
    /// Those of the library to compare with.
    Peer,
    /// The same, on buffers in its symmetric windows.
    Symmetric,
}

impl Side {
    /// All of them.
    pub const ALL: [Side; 3] = [Side::Ours, Side::Peer, Side::Symmetric];
}

/// One rank's GPU.
pub trait Lane {
    /// Makes ready for a row; nothing of an earlier one is queued any more.
    fn begin(&mut self, row: &Row) -> Result<()>;
    /// Whether this side has this row's call; ours always does.
    fn has(&self, side: Side, row: &Row) -> bool;
    /// Records a graph of `calls` calls.
    fn record(&mut self, side: Side, calls: usize) -> Result<()>;
    /// Queues a mark, `calls` calls (of the recorded graph if `replay`), and another mark.
    fn start(&mut self, side: Side, calls: usize, replay: bool) -> Result<()>;
    /// Waits for the last mark; seconds between the two.
    fn finish(&mut self) -> Result<f64>;
    /// Spoils all outputs.
    fn poison(&mut self) -> Result<()>;
    /// Elements of this rank's output, and where call number `call` has put it: the number of its
    /// set, and the element of the rank's data with which its input begins.
    fn output(&self, call: usize) -> (usize, usize, usize);
    /// Reads the output of a set from element `start` on.
    fn read(&mut self, set: usize, start: usize, bytes: &mut [u8]) -> Result<()>;
    /// What our last call did.
    fn report(&self) -> Result<Report>;
}

/// Times of one library, in seconds per call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// Median over repetitions.
    pub median: f64,
    /// Least.
    pub least: f64,
    /// 99th percentile.
    pub p99: f64,
}

/// What a row's measurement gave; the same on all ranks.
#[derive(Clone, Debug)]
pub struct Found {
    /// Ours.
    pub measured: Measured,
    /// Calls of a repetition.
    pub calls: usize,
    /// The other library's.
    pub peer: Option<Times>,
    /// The other library's on symmetric windows.
    pub symmetric: Option<Times>,
}

/// Warms up, measures and compares.
///
/// # Errors
/// Those of the lane.
pub fn run<W: World, L: Lane>(
    world: &W,
    lane: &mut L,
    source: &Source,
    row: &Row,
    effort: Effort,
    mode: Mode,
) -> Result<Found> {
    let graph = mode == Mode::Graph;
    // Calls that warm up are no graph's, and ranks may share a GPU in this mode too.
    let eager = match mode {
        Mode::Graph => Mode::Crowded,
        mode => mode,
    };
    lane.begin(row)?;
    let mut sides = Side::ALL.to_vec();
    sides.retain(|&side| lane.has(side, row));
    let half = effort.half();
    let mut each = f64::INFINITY;
    for &side in &sides {
        // The first calls may connect, load and allocate.
        let mut fastest = repeat(world, lane, side, 2, false)?;
        let mut left = effort.warmup.max(1) as usize;
        while left > 0 && !is_late(world, half)? {
            let calls = left.min(eager.most_calls());
            fastest = repeat(world, lane, side, calls, false)?.min(fastest);
            left -= calls;
        }
        each = each.min(fastest);
    }
    let each = slowest(world, &[each])?[0];
    let calls = layout::calls(each, mode);
    if graph {
        for &side in &sides {
            lane.record(side, calls)?;
        }
        for &side in &sides {
            repeat(world, lane, side, calls, true)?;
        }
    }
    let repetitions = affordable(world, effort, each * (calls * sides.len()) as f64)?;
    let mut times = Side::ALL.map(|_| Vec::new());
    for repetition in 0..repetitions {
        for turn in 0..sides.len() {
            let side = sides[(turn + repetition) % sides.len()];
            times[side as usize].push(repeat(world, lane, side, calls, graph)?);
        }
    }
    let mut outcome = None;
    if effort.check {
        lane.poison()?;
        repeat(world, lane, Side::Ours, calls, graph)?;
        outcome = Some(compare(world, lane, source, row, calls - 1)?);
    }
    let other = |side: Side| match times[side as usize].as_slice() {
        [] => Ok(None),
        times => {
            let slowest = slowest(world, times)?;
            Ok::<_, cinch::Error>(Some(Times {
                median: median(&slowest),
                least: quantile(&slowest, 0.0),
                p99: quantile(&slowest, 0.99),
            }))
        }
    };
    let (peer, symmetric) = (other(Side::Peer)?, other(Side::Symmetric)?);
    let report = lane.report()?;
    Ok(Found {
        measured: share(world, row, &report, &times[Side::Ours as usize], outcome)?,
        calls,
        peer,
        symmetric,
    })
}

/// One repetition; seconds of a call on this rank.
fn repeat<W: World, L: Lane>(
    world: &W,
    lane: &mut L,
    side: Side,
    calls: usize,
    replay: bool,
) -> Result<f64> {
    world.barrier()?;
    lane.start(side, calls, replay)?;
    Ok(lane.finish()? / calls as f64)
}

/// Compares the output of call number `call`. Where all ranks must hold the same, each compares
/// its share with the exact result, and all compare their bits.
fn compare<W: World, L: Lane>(
    world: &W,
    lane: &mut L,
    source: &Source,
    row: &Row,
    call: usize,
) -> Result<Outcome> {
    let (rank, nranks) = (world.rank(), world.nranks());
    let report = lane.report()?;
    let (elements, set, shift) = lane.output(call);
    let check = Check {
        source,
        row,
        rank,
        nranks,
        set: 0,
        shift,
        codec: report.codec.inter,
        algorithm: report.algorithm,
    };
    let size = row.dtype.size();
    let shared = same_on_all_ranks(row.collective);
    let mut hasher = std::hash::DefaultHasher::new();
    let mut outcome = Outcome::default();
    let mut held = Vec::new();
    for (index, piece) in layout::pieces(elements, size, row.count as u64)
        .into_iter()
        .enumerate()
    {
        held.resize(piece.len() * size, 0);
        lane.read(set, piece.start, &mut held)?;
        hasher.write(&held);
        if !shared || index % nranks == rank {
            check.piece(piece.start, &held, &mut outcome);
        }
    }
    outcome.hash = hasher.finish();
    Ok(outcome)
}

/// Repetitions that the deadline leaves time for, agreed by all ranks: rank 0's clock decides.
fn affordable<W: World>(world: &W, effort: Effort, each: f64) -> Result<usize> {
    let wanted = effort.iterations as usize;
    let Some(deadline) = effort.deadline else {
        return Ok(wanted);
    };
    let left = deadline.saturating_duration_since(Instant::now());
    let left = world.gather_words(&[left.as_secs_f64().to_bits()])?[0];
    Ok(((f64::from_bits(left) / 2.0 / each.max(1e-9)) as usize).clamp(1, wanted))
}

#[cfg(test)]
#[path = "runner_tests.rs"]
mod tests;
