//! `cinch predict`: prints a paper's speed-up model beside its printed figures. For a list of
//! layers and measured costs, predicts which codec pays at which rank count.

mod costs;
mod measure;
mod output;
mod tables;

use crate::bench::options::different;
use crate::papers::model::{Layer, Prediction, predict};
use std::io::{self, Write};
use std::path::PathBuf;

/// Options of `cinch predict`.
#[derive(clap::Args)]
pub struct PredictOptions {
    /// Layers in forward order, as CSV: name,elements[,forward_us,backward_us]. Without this
    /// option, the tables of the paper are printed
    #[arg(long, value_name = "FILE")]
    layers: Option<PathBuf>,
    /// Costs as JSON, in the form of --write-costs
    #[arg(
        long,
        value_name = "FILE",
        requires = "layers",
        conflicts_with = "measure"
    )]
    costs: Option<PathBuf>,
    /// Measure copying, adding and every codec on one core of this host
    #[arg(long)]
    measure: bool,
    /// Write the costs in use to this file, as JSON
    #[arg(long, value_name = "FILE")]
    write_costs: Option<PathBuf>,
    /// Microseconds from the end of a message to the peer's next action; overrides the file
    #[arg(long, value_name = "US")]
    latency_us: Option<f64>,
    /// Microseconds that each message occupies its sender; overrides the file
    #[arg(long, value_name = "US")]
    message_us: Option<f64>,
    /// Bandwidth of a rank's link in GB/s (1e9 bytes) each way; overrides the file
    #[arg(long, value_name = "GB/S")]
    bandwidth: Option<f64>,
    /// Rank counts, separated by commas
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "2,4,8,16,32,64,128",
        requires = "layers"
    )]
    ranks: Vec<usize>,
    /// Write the figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the figures as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw step time, and step time relative to raw, over the number of ranks
    #[arg(long, value_name = "FILE", requires = "layers")]
    svg: Option<PathBuf>,
}

/// Largest number of ranks in a prediction, as schedules are generated for each count.
const MOST_RANKS: usize = 65_536;

/// Prints and writes what `options` ask for.
///
/// # Errors
/// Returns an exit code and an error message.
pub fn main(options: &PredictOptions, out: &mut dyn Write) -> crate::ExitResult<()> {
    let usage = |sentence: String| (crate::USAGE, sentence);
    options.refuse().map_err(usage)?;
    let Some(path) = &options.layers else {
        if options.measure {
            let costs = costs::gather(options).map_err(usage)?;
            return print(costs::write_table(&costs, options.measure, out));
        }
        save(options.json.as_deref(), tables::json)?;
        save(options.csv.as_deref(), tables::csv)?;
        return print(tables::write(out));
    };
    for &nranks in &options.ranks {
        if !(1..=MOST_RANKS).contains(&nranks) {
            return Err(usage(format!(
                "--ranks {nranks}: must be a number from 1 to {MOST_RANKS}"
            )));
        }
    }
    let text = std::fs::read_to_string(path)
        .map_err(|error| usage(format!("--layers {}: {error}", path.display())))?;
    let layers = Layer::parse(&text).map_err(|error| usage(error.to_string()))?;
    let costs = costs::gather(options).map_err(usage)?;
    let mut outcomes: Vec<Vec<Prediction>> = Vec::new();
    for &nranks in &options.ranks {
        let found = predict(&layers, &costs, nranks).map_err(|error| usage(error.to_string()))?;
        outcomes.push(found);
    }
    save(options.json.as_deref(), || {
        output::json(&layers, &costs, &outcomes)
    })?;
    save(options.csv.as_deref(), || output::csv(&outcomes))?;
    save(options.svg.as_deref(), || {
        output::svg(&layers, &costs, &outcomes)
    })?;
    print(
        costs::write_table(&costs, options.measure, out)
            .and_then(|()| output::write(&layers, &outcomes, out)),
    )
}

impl PredictOptions {
    /// Refuses options without effect, and options that name one file twice.
    fn refuse(&self) -> Result<(), String> {
        let costs = [
            ("--latency-us", self.latency_us.is_some()),
            ("--message-us", self.message_us.is_some()),
            ("--bandwidth", self.bandwidth.is_some()),
            ("--write-costs", self.write_costs.is_some()),
        ];
        let figures = [
            ("--json", self.json.is_some()),
            ("--csv", self.csv.is_some()),
        ];
        let said = |options: &[(&'static str, bool)]| {
            options
                .iter()
                .find(|(_, said)| *said)
                .map(|(name, _)| *name)
        };
        match (self.layers.is_some(), self.measure) {
            (false, false) => {
                if let Some(name) = said(&costs) {
                    return Err(format!(
                        "{name} applies only with --layers or --measure; give one of them"
                    ));
                }
            }
            (false, true) => {
                if let Some(name) = said(&figures) {
                    return Err(format!(
                        "{name} writes predictions: give --layers; --write-costs writes costs"
                    ));
                }
            }
            (true, _) => {}
        }
        different([
            ("--json", &self.json),
            ("--csv", &self.csv),
            ("--svg", &self.svg),
            ("--write-costs", &self.write_costs),
        ])
    }
}

/// Writes a file, if its option was given.
fn save(path: Option<&std::path::Path>, text: impl FnOnce() -> String) -> crate::ExitResult<()> {
    match path {
        None => Ok(()),
        Some(path) => std::fs::write(path, text())
            .map_err(|error| (crate::FAILURE, format!("{}: {error}", path.display()))),
    }
}

/// Turns a failed write into an exit code; see [`crate::finish`].
fn print(written: io::Result<()>) -> crate::ExitResult<()> {
    crate::finish(written).map(|_| ())
}
