//! Trains small networks on handwritten digits over four ranks, with every codec, with and without
//! error feedback, and says what compression does to the test error. See the README beside this.

mod digits;
mod layers;
mod network;
mod parallel;
mod report;

use cinch::CodecSpec;
use cinch::types::CodecKind;
use parallel::{Model, Setup, train};
use report::Row;
use std::process::ExitCode;

const USAGE: &str = "\
train [--models mlp,conv,split] [--codecs NAME,NAME] [--seeds N] [--epochs N] [--rate R]
      [--csv FILE] [--svg FILE]

Without options: all models, all codecs, 10 seeds, 15 epochs, rate 0.05. raw, with which the others are
compared, always runs.";

/// What to run.
struct Options {
    models: Vec<Model>,
    codecs: Vec<CodecSpec>,
    seeds: u64,
    epochs: usize,
    rate: f32,
    csv: Option<String>,
    svg: Option<String>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let options = match parse(&arguments) {
        Ok(options) => options,
        Err(why) => {
            eprintln!("{why}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
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
    let mut rows: Vec<Row> = Vec::new();
    for &model in &options.models {
        let ways = ways(model, &options.codecs);
        let mut outcomes = vec![Vec::new(); ways.len()];
        // Seed by seed, so that what else the machine does meets all codecs alike.
        for seed in 1..=options.seeds {
            for (&(codec, feedback), outcomes) in ways.iter().zip(&mut outcomes) {
                let outcome = train(&Setup {
                    model,
                    codec,
                    feedback,
                    seed,
                    epochs: options.epochs,
                    rate: options.rate,
                });
                outcomes.push(outcome.map_err(|error| format!("{codec}: {error}"))?);
            }
        }
        for ((codec, feedback), outcomes) in ways.into_iter().zip(outcomes) {
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
            std::fs::write(path, text).map_err(|error| format!("{path}: {error}"))?;
        }
    }
    Ok(())
}

/// Codecs, without and with error feedback where that makes sense.
fn ways(model: Model, codecs: &[CodecSpec]) -> Vec<(CodecSpec, bool)> {
    let both = codecs
        .iter()
        .flat_map(|&codec| [(codec, false), (codec, true)]);
    // Activations differ from batch to batch: there is nothing to make up for. Nor for raw.
    let sensible = |&(codec, feedback): &(CodecSpec, bool)| {
        !feedback || (codec.kind != CodecKind::Raw && model != Model::Split)
    };
    both.filter(sensible).collect()
}

fn parse(arguments: &[String]) -> Result<Options, String> {
    let mut options = Options {
        models: Model::ALL.to_vec(),
        codecs: CodecKind::ALL.into_iter().map(CodecSpec::of).collect(),
        seeds: 10,
        epochs: 15,
        rate: parallel::RATE,
        csv: None,
        svg: None,
    };
    let mut arguments = arguments.iter();
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or(format!("{name} needs a value"))?;
        match name.as_str() {
            "--models" => {
                options.models = value.split(',').map(model).collect::<Result<_, _>>()?;
            }
            "--codecs" => {
                let named = value
                    .split(',')
                    .map(|name| name.parse::<CodecSpec>().map_err(|error| error.to_string()));
                options.codecs = named.collect::<Result<_, _>>()?;
                options.codecs.retain(|&codec| codec != CodecSpec::RAW);
                options.codecs.insert(0, CodecSpec::RAW);
            }
            "--seeds" => options.seeds = number(name, value, 2)?,
            "--epochs" => options.epochs = number(name, value, 1)? as usize,
            "--rate" => {
                let rate = value
                    .parse()
                    .ok()
                    .filter(|rate| *rate > 0.0 && *rate < 10.0);
                options.rate = rate.ok_or(format!("{name} {value} is no rate above 0"))?;
            }
            "--csv" => options.csv = Some(value.clone()),
            "--svg" => options.svg = Some(value.clone()),
            _ => return Err(format!("there is no option {name}")),
        }
    }
    Ok(options)
}

fn model(name: &str) -> Result<Model, String> {
    let found = Model::ALL.into_iter().find(|model| model.name() == name);
    found.ok_or(format!("no model is called {name}"))
}

fn number(name: &str, text: &str, least: u64) -> Result<u64, String> {
    match text.parse() {
        Ok(number) if (least..=10_000).contains(&number) => Ok(number),
        _ => Err(format!("{name} {text}: a number from {least} to 10000")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options, String> {
        let words: Vec<String> = line.split_whitespace().map(str::to_string).collect();
        parse(&words)
    }

    #[test]
    fn feedback_is_for_lossy_gradients() {
        let codecs = parsed("--codecs linear8").unwrap().codecs;
        let of = |model| {
            ways(model, &codecs)
                .iter()
                .map(|way| way.1)
                .collect::<Vec<_>>()
        };
        assert_eq!(of(Model::Mlp), [false, false, true]);
        assert_eq!(of(Model::Split), [false, false]);
    }

    #[test]
    fn options_are_read_or_refused() {
        let all = parsed("").unwrap();
        assert_eq!((all.models.len(), all.seeds), (3, 10));
        assert_eq!(all.codecs[0], CodecSpec::RAW);
        let some = parsed("--models conv --codecs linear8,raw --seeds 3 --csv x").unwrap();
        assert_eq!(some.models, [Model::Conv]);
        assert_eq!(some.codecs[0], CodecSpec::RAW);
        assert_eq!((some.codecs.len(), some.csv.as_deref()), (2, Some("x")));
        for bad in [
            "--seeds 1",
            "--models rnn",
            "--codecs int8",
            "--csv",
            "--x 1",
        ] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }
}
