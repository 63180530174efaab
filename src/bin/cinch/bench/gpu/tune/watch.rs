//! The stopwatch on GPUs: replays of graphs, one for each way.

use super::super::device::GpuLane;
use super::super::layout;
use super::super::output::Output;
use super::super::runner::Lane;
use super::search::Stopwatch;
use crate::bench::combine::slowest;
use crate::bench::metrics::median;
use crate::bench::record::RunRecord;
use crate::bench::row::Row;
use crate::bench::world::World;
use cinch::plan::KernelVariant;
use cinch::{CodecSpec, Communicator, Error, Result};
use serde::Serialize;
use std::time::Instant;

/// What a replay should take, and the most calls in it: less than in a bench, of which there are
/// fewer.
const REPLAY_SECONDS: f64 = 2e-3;
const MOST_CALLS: usize = 100;

/// One line of the log.
#[derive(Serialize)]
struct Record<'a> {
    collective: &'a str,
    #[serde(rename = "type")]
    dtype: &'a str,
    codec: String,
    ranks: usize,
    size: usize,
    repetitions: usize,
    ways: Vec<WayRecord>,
    run: &'a RunRecord,
}

#[derive(Serialize)]
struct WayRecord {
    algo: &'static str,
    protocol: String,
    blocks: usize,
    chunk: usize,
    time_us: f64,
}

/// One rank's.
pub struct GpuWatch<'a, 'b> {
    control: &'a Communicator,
    lane: &'a mut GpuLane<'b>,
    run: &'a RunRecord,
    output: &'a mut Output,
    begin: Instant,
}

impl<'a, 'b> GpuWatch<'a, 'b> {
    /// Starts the clock.
    pub fn new(
        control: &'a Communicator,
        lane: &'a mut GpuLane<'b>,
        run: &'a RunRecord,
        output: &'a mut Output,
    ) -> GpuWatch<'a, 'b> {
        GpuWatch {
            control,
            lane,
            run,
            output,
            begin: Instant::now(),
        }
    }

    /// Seconds of a call on the slowest rank, by a few of them on the stream.
    fn estimate(&mut self) -> Result<f64> {
        let mut least = f64::INFINITY;
        for calls in [1, 4] {
            self.control.barrier()?;
            self.lane.start_ours(calls)?;
            least = least.min(self.lane.finish()? / calls as f64);
        }
        Ok(slowest(self.control, &[least])?[0])
    }

    /// Refuses times of another codec than the row's.
    fn check(&self, row: &Row) -> Result<()> {
        let asked = row.codec.map_or(CodecSpec::RAW, |codec| codec.spec);
        let ran = self.lane.report()?.codec;
        match ran.kind == asked.kind {
            true => Ok(()),
            false => Err(Error::invalid_usage(format!(
                "{} with {asked} ran with {ran}: the table would be of calls that did not run",
                row.collective
            ))),
        }
    }
}

impl Stopwatch for GpuWatch<'_, '_> {
    fn variants(&mut self, row: &Row) -> Result<Vec<KernelVariant>> {
        self.lane.variants(row)
    }

    fn can(&mut self, row: &Row, way: &KernelVariant) -> Result<bool> {
        self.lane.supports(row, way)
    }

    fn time(&mut self, row: &Row, ways: &[KernelVariant], repetitions: usize) -> Result<Vec<f64>> {
        self.lane.begin(row)?;
        let mut calls = Vec::with_capacity(ways.len());
        for way in ways {
            self.lane.comm().force_variant(Some(*way))?;
            let each = self.estimate()?;
            self.check(row)?;
            let these = (REPLAY_SECONDS / each.max(1e-9)).ceil() as usize;
            let these = these.clamp(1, MOST_CALLS.min(layout::Mode::Graph.most_calls()));
            self.lane.record_way(these)?;
            calls.push(these);
        }
        self.lane.comm().force_variant(None)?;
        let mut times = vec![Vec::with_capacity(repetitions); ways.len()];
        // The first replay of each is not counted, and every second round goes the other way round.
        for round in 0..=repetitions {
            for turn in 0..ways.len() {
                let way = match round % 2 {
                    0 => turn,
                    _ => ways.len() - 1 - turn,
                };
                self.control.barrier()?;
                self.lane.start_way(way)?;
                let seconds = self.lane.finish()? / calls[way] as f64;
                if round > 0 {
                    times[way].push(seconds);
                }
            }
        }
        self.lane.end_ways();
        times
            .iter()
            .map(|times| Ok(median(&slowest(self.control, times)?)))
            .collect()
    }

    fn elapsed(&mut self) -> Result<f64> {
        let own = self.begin.elapsed().as_secs_f64();
        // Rank 0's clock decides.
        Ok(f64::from_bits(
            self.control.gather_words(&[own.to_bits()])?[0],
        ))
    }

    fn keep(&mut self, row: &Row, size: usize, times: &[(KernelVariant, f64)], repetitions: usize) {
        let codec = row.codec.map_or("raw".into(), |codec| codec.to_string());
        let ways = times.iter().map(|(way, seconds)| WayRecord {
            algo: way.algorithm.name(),
            protocol: way.kernel.to_string(),
            blocks: way.channels,
            chunk: way.chunk,
            time_us: seconds * 1e6,
        });
        let record = Record {
            collective: row.collective.name(),
            dtype: row.dtype.name(),
            codec,
            ranks: self.control.nranks(),
            size,
            repetitions,
            ways: ways.collect(),
            run: self.run,
        };
        if let Err(error) = self.output.record(&record) {
            self.output.line(&format!("# warning: {error}"));
        }
        if let Some((way, seconds)) = times.iter().min_by(|a, b| a.1.total_cmp(&b.1)) {
            self.output.line(&format!(
                "# {} {} {size}: {} ways, best {way}, {:.2} us",
                record.collective,
                record.codec,
                times.len(),
                seconds * 1e6
            ));
        }
    }
}
