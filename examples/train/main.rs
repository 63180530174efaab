//! Trains small networks on handwritten digits over four ranks, with every codec, with and without
//! error feedback, and prints how compression changes the test error. See `README.md` in this folder.

mod digits;
mod layers;
mod network;
mod parallel;
mod report;

use cinch::CodecSpec;
use cinch::types::CodecKind;
use clap::Parser;
use parallel::{Model, Setup, train};
use report::Row;
use std::path::PathBuf;
use std::process::ExitCode;

/// Trains small networks on handwritten digits over four ranks, with and without codecs.
#[derive(Parser)]
#[command(name = "train")]
struct Options {
    /// Networks to train.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Model::ALL)]
    models: Vec<Model>,
    /// Codecs to compare with raw, which always runs; all codecs if absent.
    #[arg(long, value_delimiter = ',')]
    codecs: Option<Vec<CodecSpec>>,
    /// Number of seeds.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(2..=10_000))]
    seeds: u64,
    /// Number of epochs.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    epochs: u32,
    /// Learning rate, above 0 and below 10.
    #[arg(long, default_value_t = parallel::RATE, value_parser = learning_rate)]
    rate: f32,
    /// File for the rows as CSV.
    #[arg(long)]
    csv: Option<PathBuf>,
    /// File for a drawing of the test errors.
    #[arg(long)]
    svg: Option<PathBuf>,
}

impl Options {
    /// Returns the codec `raw` and the codecs to compare with it.
    fn codecs(&self) -> Vec<CodecSpec> {
        let mut codecs = match &self.codecs {
            Some(codecs) => codecs.clone(),
            None => CodecKind::ALL.into_iter().map(CodecSpec::of).collect(),
        };
        codecs.retain(|&codec| codec != CodecSpec::RAW);
        codecs.insert(0, CodecSpec::RAW);
        codecs
    }
}

fn learning_rate(text: &str) -> Result<f32, String> {
    let rate = text.parse().ok();
    rate.filter(|rate| *rate > 0.0 && *rate < 10.0)
        .ok_or(format!("{text} is not a number above 0 and below 10"))
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("train: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), String> {
    let cores = std::thread::available_parallelism().map_or(0, |cores| cores.get());
    println!(
        "# {} ranks as threads on {cores} cores, {} images, {} seeds, {} epochs, rate \
         {}{}",
        parallel::RANKS,
        digits::count(),
        options.seeds,
        options.epochs,
        options.rate,
        if cfg!(debug_assertions) {
            ", built without optimisation"
        } else {
            ""
        }
    );
    println!("{}", report::HEADING);
    let codecs = options.codecs();
    let mut rows: Vec<Row> = Vec::new();
    for &model in &options.models {
        let variants = variants(model, &codecs);
        let mut outcomes = vec![Vec::new(); variants.len()];
        // All codecs train with one seed before the next seed, so that other load on the machine
        // affects all codecs alike.
        for seed in 1..=options.seeds {
            for (&(codec, feedback), outcomes) in variants.iter().zip(&mut outcomes) {
                let outcome = train(&Setup {
                    model,
                    codec,
                    feedback,
                    seed,
                    epochs: options.epochs as usize,
                    rate: options.rate,
                });
                outcomes.push(outcome.map_err(|error| format!("{codec}: {error}"))?);
            }
        }
        for ((codec, feedback), outcomes) in variants.into_iter().zip(outcomes) {
            let row = Row::new(model, codec, feedback, &outcomes);
            let exact = rows.iter().find(|row| row.model == model);
            println!("{}", row.line(exact));
            rows.push(row);
        }
    }
    for (path, text) in [
        (&options.csv, report::csv(&rows)),
        (&options.svg, report::svg(&rows)),
    ] {
        if let Some(path) = path {
            std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        }
    }
    Ok(())
}

/// Returns each codec without error feedback, and also with error feedback where it can help.
fn variants(model: Model, codecs: &[CodecSpec]) -> Vec<(CodecSpec, bool)> {
    let both = codecs
        .iter()
        .flat_map(|&codec| [(codec, false), (codec, true)]);
    // Feedback needs a tensor that is sent in every step, and activations are new in every step. The codec
    // `raw` drops nothing, so feedback cannot help.
    let is_sensible = |&(codec, feedback): &(CodecSpec, bool)| {
        !feedback || (codec.kind != CodecKind::Raw && model != Model::Split)
    };
    both.filter(is_sensible).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(["train"].into_iter().chain(line.split_whitespace()))
    }

    #[test]
    fn feedback_runs_for_lossy_gradients_only() {
        let codecs = parsed("--codecs linear8").unwrap().codecs();
        let feedback = |model| {
            let variants = variants(model, &codecs);
            variants.iter().map(|variant| variant.1).collect::<Vec<_>>()
        };
        assert_eq!(feedback(Model::Mlp), [false, false, true]);
        assert_eq!(feedback(Model::Split), [false, false]);
    }

    #[test]
    fn options_are_parsed_and_bad_values_rejected() {
        let all = parsed("").unwrap();
        assert_eq!((all.models.len(), all.seeds), (3, 10));
        assert_eq!(all.codecs()[0], CodecSpec::RAW);
        let some = parsed("--models conv --codecs linear8,raw --seeds 3 --csv x").unwrap();
        assert_eq!(some.models, [Model::Conv]);
        assert_eq!(some.codecs()[0], CodecSpec::RAW);
        assert_eq!((some.codecs().len(), some.csv), (2, Some("x".into())));
        for bad in [
            "--seeds 1",
            "--models rnn",
            "--codecs int8",
            "--rate 0",
            "--csv",
            "--x 1",
        ] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }
}
