//! Measures kernel variants on GPUs, by replaying a graph for each variant.

use super::super::layout;
use super::super::queue::GpuQueue;
use super::super::runner::CallQueue;
use super::search::Stopwatch;
use crate::bench::combine::slowest;
use crate::bench::metrics::median;
use crate::bench::output::Output;
use crate::bench::record::RunInfo;
use crate::bench::row::Row;
use crate::bench::world::BenchRank;
use cinch::plan::KernelVariant;
use cinch::{CodecSpec, Communicator, Error, Result};
use serde::Serialize;
use std::time::Instant;

/// Target length of a replay in seconds, and its largest number of calls. Both are smaller than in
/// a benchmark, because tuning records many more graphs.
const REPLAY_SECONDS: f64 = 2e-3;
const MOST_CALLS: usize = 100;

/// A line of the measurement log.
#[derive(Serialize)]
struct TuneRecord<'a> {
    collective: &'a str,
    #[serde(rename = "type")]
    dtype: &'a str,
    codec: String,
    ranks: usize,
    size: usize,
    repetitions: usize,
    #[serde(rename = "ways")]
    variants: Vec<VariantRecord>,
    run: &'a RunInfo,
}

#[derive(Serialize)]
struct VariantRecord {
    algo: &'static str,
    protocol: String,
    blocks: usize,
    chunk: usize,
    time_us: f64,
}

/// The stopwatch of one rank.
pub struct GpuWatch<'a, 'b> {
    control: &'a Communicator,
    queue: &'a mut GpuQueue<'b>,
    run: &'a RunInfo,
    output: &'a mut Output,
    begin: Instant,
}

impl<'a, 'b> GpuWatch<'a, 'b> {
    /// Creates the stopwatch and starts its clock.
    pub fn new(
        control: &'a Communicator,
        queue: &'a mut GpuQueue<'b>,
        run: &'a RunInfo,
        output: &'a mut Output,
    ) -> GpuWatch<'a, 'b> {
        GpuWatch {
            control,
            queue,
            run,
            output,
            begin: Instant::now(),
        }
    }

    /// Returns the seconds of a call on the slowest rank, estimated from a few calls on the stream.
    fn estimate(&mut self) -> Result<f64> {
        let mut least = f64::INFINITY;
        for calls in [1, 4] {
            self.control.barrier()?;
            self.queue.start_ours(calls)?;
            least = least.min(self.queue.finish()? / calls as f64);
        }
        Ok(slowest(self.control, &[least])?[0])
    }

    /// Returns an error if the last call used another codec than the row's.
    fn check(&self, row: &Row) -> Result<()> {
        let asked = row.codec.map_or(CodecSpec::RAW, |codec| codec.inter);
        let ran = self.queue.report()?.codec.inter;
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
        self.queue.variants(row)
    }

    fn supports(&mut self, row: &Row, variant: &KernelVariant) -> Result<bool> {
        self.queue.supports(row, variant)
    }

    fn time(
        &mut self,
        row: &Row,
        variants: &[KernelVariant],
        repetitions: usize,
    ) -> Result<Vec<f64>> {
        self.queue.begin(row)?;
        let mut calls = Vec::with_capacity(variants.len());
        for variant in variants {
            self.queue.comm().force_variant(Some(*variant))?;
            let each = self.estimate()?;
            self.check(row)?;
            let these = (REPLAY_SECONDS / each.max(1e-9)).ceil() as usize;
            let these = these.clamp(1, MOST_CALLS.min(layout::Mode::Graph.most_calls()));
            self.queue.record_variant(these)?;
            calls.push(these);
        }
        self.queue.comm().force_variant(None)?;
        let mut times = vec![Vec::with_capacity(repetitions); variants.len()];
        // The first replay of each variant is not counted. Every second round reverses the order of
        // the variants.
        for round in 0..=repetitions {
            for turn in 0..variants.len() {
                let variant = match round % 2 {
                    0 => turn,
                    _ => variants.len() - 1 - turn,
                };
                self.control.barrier()?;
                self.queue.start_variant(variant)?;
                let seconds = self.queue.finish()? / calls[variant] as f64;
                if round > 0 {
                    times[variant].push(seconds);
                }
            }
        }
        self.queue.end_variants();
        times
            .iter()
            .map(|times| Ok(median(&slowest(self.control, times)?)))
            .collect()
    }

    fn elapsed(&mut self) -> Result<f64> {
        let own = self.begin.elapsed().as_secs_f64();
        // Rank 0's clock decides, so that all ranks stop together.
        Ok(f64::from_bits(
            self.control.gather_words(&[own.to_bits()])?[0],
        ))
    }

    fn keep(&mut self, row: &Row, size: usize, times: &[(KernelVariant, f64)], repetitions: usize) {
        let codec = row.codec.map_or("raw".into(), |codec| codec.to_string());
        let variants = times.iter().map(|(variant, seconds)| VariantRecord {
            algo: variant.algorithm.name(),
            protocol: variant.kernel.to_string(),
            blocks: variant.channels,
            chunk: variant.chunk,
            time_us: seconds * 1e6,
        });
        let record = TuneRecord {
            collective: row.collective.name(),
            dtype: row.dtype.name(),
            codec,
            ranks: self.control.nranks(),
            size,
            repetitions,
            variants: variants.collect(),
            run: self.run,
        };
        if let Err(error) = self.output.record(&record) {
            self.output.note(&format!("warning: {error}"));
        }
        if let Some((variant, seconds)) = times.iter().min_by(|a, b| a.1.total_cmp(&b.1)) {
            self.output.note(&format!(
                "{} {} {size}: {} variants, best {variant}, {:.2} us",
                record.collective,
                record.codec,
                times.len(),
                seconds * 1e6
            ));
        }
    }
}
