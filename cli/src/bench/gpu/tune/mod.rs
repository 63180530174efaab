//! `cinch tune`: measures kernel variants and writes a tuning table.

mod choose;
mod point;
mod search;
mod watch;

use super::layout;
use super::options::GpuOptions;
use super::queue::GpuQueue;
use super::ranks::{self, GpuTask, RunContext};
use crate::bench::data::{Distribution, InputSource};
use crate::bench::output::{Output, check_writable};
use crate::bench::values::{Types, parse_codec, parse_collective, parse_datatypes, parse_size};
use crate::bench::workload::Workload;
use crate::bench::world::BenchRank;
use crate::{ExitResult, USAGE};
use cinch::config::Origin;
use cinch::plan::{TableHeader, TuningTable};
use cinch::types::CodecSetting;
use cinch::{Collective, Communicator, Config, Error, Result};
use clap::Args;
use point::Sweep;
use search::Search;
use std::path::PathBuf;
use watch::GpuWatch;

/// Measures algorithms, protocols, blocks and chunks on GPUs, and writes a tuning table of the
/// fastest ones.
#[derive(Args, Clone, Debug)]
pub struct TuneOptions {
    /// Collectives, separated by commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = parse_collective,
          default_value = "all_reduce,all_gather,reduce_scatter")]
    pub collectives: Vec<Collective>,
    /// Codecs, separated by commas, for each of the collectives [default: raw for all of them, also
    /// linear8 and dynamic8 for all_reduce]
    #[arg(long, value_name = "CODECS", value_delimiter = ',', value_parser = parse_codec)]
    pub codecs: Vec<CodecSetting>,
    /// Element types, separated by commas; the table distinguishes types only by their bytes
    #[arg(short = 'd', long, default_value = "f32", value_parser = parse_datatypes)]
    pub datatype: Types,
    /// Smallest size in bytes
    #[arg(short = 'b', long, value_name = "BYTES", default_value = "8", value_parser = parse_size)]
    pub minbytes: usize,
    /// Largest size in bytes
    #[arg(short = 'e', long, value_name = "BYTES", default_value = "1G", value_parser = parse_size)]
    pub maxbytes: usize,
    /// Seconds to measure. Sizes a factor of 4 apart come first, then sizes between neighbours that
    /// choose different variants
    #[arg(long, default_value_t = 80.0, value_parser = crate::bench::values::parse_seconds)]
    pub seconds: f64,
    /// File for the table; all measurements go to FILE.jsonl
    #[arg(short = 'o', long, value_name = "FILE")]
    pub output: PathBuf,
    /// Options for GPUs and ranks.
    #[command(flatten)]
    pub gpu: GpuOptions,
}

/// Runs `cinch tune` and returns its exit code.
///
/// # Errors
/// Returns an exit code and an error message.
pub fn main(options: &TuneOptions, mut config: Config) -> ExitResult {
    let usage = |sentence: String| (USAGE, sentence);
    options.check(&config).map_err(usage)?;
    // A tuning table in use must not influence the measurement.
    config
        .set("CINCH_TUNING", "off", Origin::Program)
        .map_err(|error| usage(error.to_string()))?;
    ranks::start(&options.gpu, &config, &Tune { options })
}

impl TuneOptions {
    /// Refuses options without effect, and options whose table no communicator would use.
    fn check(&self, config: &Config) -> std::result::Result<(), String> {
        if !self.gpu.on_gpus(None)? {
            return Err("tables are for GPUs: give --device gpu".into());
        }
        let meaningless = [
            ("--graph: replays are what is timed", self.gpu.graph),
            ("--proto: all are measured", self.gpu.proto != "auto"),
            ("--kernel: all are measured", self.gpu.kernel != "auto"),
            ("--vs: `cinch bench` compares", self.gpu.vs.is_some()),
            ("--hosts: tables are for one host", self.gpu.hosts() > 1),
            (
                "--ranks-per-gpu: a table is for a GPU each",
                self.gpu.per_gpu() > 1,
            ),
        ];
        if let Some((what, _)) = meaningless.iter().find(|(_, said)| *said) {
            return Err(format!("cinch tune takes no {what}; leave it out"));
        }
        for (name, what) in [
            ("CINCH_ALGO", "calls go by it and by no table"),
            ("CINCH_PROTO", "calls go by it and by no table"),
            ("CINCH_GPU_CHANNELS", "calls go by it and by no table"),
            ("CINCH_CODEC", "--codecs names what is measured"),
            ("CINCH_CODEC_RULES", "--codecs names what is measured"),
        ] {
            if config.is_set(name) {
                return Err(format!("{name} is set: {what}; unset it"));
            }
        }
        if let Some(codec) = self.codecs.iter().find(|codec| codec.auto) {
            return Err(format!(
                "--codecs {codec}: with auto a call may go without the codec, and the table would be \
                 of calls that did; leave out auto"
            ));
        }
        if self.minbytes > self.maxbytes || self.minbytes == 0 {
            return Err(format!(
                "-b {} and -e {}: sizes go from 1 byte or more up",
                self.minbytes, self.maxbytes
            ));
        }
        match self.sweeps().is_empty() {
            true => Err("no codec carries any of these types; give --codecs raw".into()),
            false => Ok(()),
        }
    }

    /// Returns the combinations of collective, type and codec to measure.
    fn sweeps(&self) -> Vec<Sweep> {
        let standard = ["raw", "linear8", "dynamic8"]
            .iter()
            .filter_map(|name| name.parse().ok());
        let mut sweeps = Vec::new();
        for &collective in &self.collectives {
            for &dtype in &self.datatype.list {
                let codecs: Vec<CodecSetting> = match self.codecs.as_slice() {
                    [] if collective == Collective::AllReduce => standard.clone().collect(),
                    [] => vec![CodecSetting::RAW],
                    codecs => codecs.to_vec(),
                };
                let carried = |codec: &&CodecSetting| !codec.is_lossy() || dtype.has_codecs();
                for &codec in codecs.iter().filter(carried) {
                    let sweep = Sweep {
                        collective,
                        dtype,
                        codec,
                    };
                    // Types of equal width share one part of a table, so only the first is
                    // measured.
                    let same = |known: &Sweep| {
                        (known.collective, known.wire()) == (collective, sweep.wire())
                    };
                    if !sweeps.iter().any(same) {
                        sweeps.push(sweep);
                    }
                }
            }
        }
        sweeps
    }

    fn log(&self) -> PathBuf {
        let mut name = self.output.as_os_str().to_owned();
        name.push(".jsonl");
        name.into()
    }
}

struct Tune<'a> {
    options: &'a TuneOptions,
}

impl GpuTask for Tune<'_> {
    fn name(&self) -> String {
        "tune".into()
    }

    fn workload(&self, ranks: usize) -> std::result::Result<Workload, String> {
        if ranks < 2 {
            return Err(format!(
                "{ranks} GPU has nothing to choose from; give 2 or more"
            ));
        }
        let sweeps = self.options.sweeps();
        let rows = sweeps
            .iter()
            .flat_map(|sweep| {
                search::coarse(self.options.minbytes, self.options.maxbytes)
                    .into_iter()
                    .map(|size| sweep.row(ranks, size))
            })
            .collect();
        Ok(Workload {
            source: InputSource::generated(1, Distribution::Gaussian, ranks)
                .repeating(layout::PERIOD),
            rows,
        })
    }

    fn output(&self, _: usize) -> Result<Output> {
        // An unwritable table file must fail before anything is measured and before an earlier log
        // is overwritten.
        let table = &self.options.output;
        check_writable(table).map_err(|error| self.unwritten(error))?;
        Output::of_rows(Some(self.options.log()))
    }

    fn run(
        &self,
        control: &Communicator,
        queue: &mut GpuQueue<'_>,
        _: &Workload,
        context: &RunContext<'_>,
        output: &mut Output,
    ) -> Result<bool> {
        let options = self.options;
        let place = queue
            .comm()
            .site()
            .ok_or_else(|| Error::internal("a communicator on GPUs does not know what they are"))?;
        agree(&shared_texts(
            control,
            &format!("{} over {}", place.gpu, place.links),
        )?)?;
        let header = TableHeader {
            gpu: place.gpu,
            ranks: place.ranks,
            links: place.links,
            date: context.run.date.clone(),
            cinch: context.run.cinch.clone(),
            command: context.run.command.clone(),
        };
        let mut watch = GpuWatch::new(control, queue, context.run, output);
        let (searches, notes) = search::run(
            &mut watch,
            &options.sweeps(),
            control.nranks(),
            (options.minbytes, options.maxbytes),
            options.seconds,
        )?;
        for note in notes {
            output.note(&note);
        }
        if control.rank() == 0 {
            self.write(&header, &searches, output)?;
        }
        Ok(false)
    }
}

impl Tune<'_> {
    /// Writes the table file. The table is parsed first, as the library will parse it.
    fn write(&self, header: &TableHeader, searches: &[Search], output: &mut Output) -> Result<()> {
        let entries: Vec<_> = searches
            .iter()
            .flat_map(|search| choose::entries(search.sweep(), search.points()))
            .collect();
        let text = header.write(&entries);
        let path = self.options.output.display().to_string();
        let table = TuningTable::parse(&path, &text)?;
        std::fs::write(&self.options.output, &text).map_err(|error| self.unwritten(error))?;
        for cliff in table.cliffs() {
            output.note(&format!(
                "cliff: {cliff}; measure again with more --seconds"
            ));
        }
        for line in text.lines() {
            output.line(line);
        }
        output.note(&format!("written to {path}"));
        Ok(())
    }

    fn unwritten(&self, error: std::io::Error) -> Error {
        let path = self.options.output.display();
        Error::invalid_argument(format!("-o {path}: {error}"))
    }
}

/// Number of 8-byte words in which each rank sends its text; longer texts are cut.
const TEXT_WORDS: usize = 32;

/// All-gathers the texts of all ranks, each cut to [`TEXT_WORDS`] words.
fn shared_texts(world: &impl BenchRank, own: &str) -> Result<Vec<String>> {
    let mut words = [0u64; TEXT_WORDS];
    for (word, bytes) in words.iter_mut().zip(own.as_bytes().chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(whole);
    }
    let all = world.gather_words(&words)?;
    let text = |words: &[u64]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let text = String::from_utf8_lossy(&bytes);
        text.trim_end_matches('\0').to_string()
    };
    Ok(all.chunks(TEXT_WORDS).map(text).collect())
}

/// Refuses GPUs and links that differ between ranks. A communicator uses a table only if all ranks
/// match its header, so none would use this table.
fn agree(said: &[String]) -> Result<()> {
    let Some(other) = said.iter().position(|text| *text != said[0]) else {
        return Ok(());
    };
    Err(Error::invalid_usage(format!(
        "rank 0 has {}, but rank {other} has {}: a table is for ranks that are alike, and these would not go \
         by it; take GPUs whose links are (`cinch info` shows them)",
        said[0], said[other]
    )))
}

#[cfg(test)]
mod tests;
