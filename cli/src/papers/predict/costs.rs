//! Gathers the costs of a machine: from a file, from measuring this host, or from options.

use super::{PredictOptions, measure};
use crate::papers::model::{CodecCost, Costs, LinkCost};
use serde::{Deserialize, Serialize};
use std::io::{Result as Written, Write};
use std::path::Path;

/// The JSON file of costs. Times per element are in nanoseconds, times per message in microseconds.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    link: FileLink,
    add_ns: f64,
    codecs: Vec<FileCodec>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileLink {
    latency_us: f64,
    message_us: f64,
    gb_per_s: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileCodec {
    codec: String,
    encode_ns: f64,
    decode_ns: f64,
}

/// Returns the costs that `options` describe.
///
/// # Errors
/// Returns an error message if costs are missing, unreadable or impossible.
pub fn gather(options: &PredictOptions) -> Result<Costs, String> {
    let mut costs = match &options.costs {
        Some(path) => read(path)?,
        None if options.measure => {
            let link = [options.latency_us, options.message_us, options.bandwidth];
            let [Some(latency), Some(message), Some(bandwidth)] = link else {
                return Err(
                    "--measure measures this host's cores; give the costs of the link with \
                     --latency-us, --message-us and --bandwidth (see cinch bench send_recv)"
                        .into(),
                );
            };
            measure::costs(LinkCost {
                latency: latency * 1e-6,
                message: message * 1e-6,
                bandwidth: bandwidth * 1e9,
            })?
        }
        None => {
            return Err(
                "--layers needs costs: --costs FILE, or --measure with --latency-us, \
                        --message-us and --bandwidth"
                    .into(),
            );
        }
    };
    if let Some(latency) = options.latency_us {
        costs.link.latency = latency * 1e-6;
    }
    if let Some(message) = options.message_us {
        costs.link.message = message * 1e-6;
    }
    if let Some(bandwidth) = options.bandwidth {
        costs.link.bandwidth = bandwidth * 1e9;
    }
    costs.check().map_err(|error| error.to_string())?;
    if let Some(path) = &options.write_costs {
        std::fs::write(path, to_json(&costs))
            .map_err(|error| format!("--write-costs {}: {error}", path.display()))?;
    }
    Ok(costs)
}

fn read(path: &Path) -> Result<Costs, String> {
    let bad = |why: String| format!("--costs {}: {why}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    parse(&text).map_err(bad)
}

fn parse(text: &str) -> Result<Costs, String> {
    let file: File = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let codecs = file.codecs.iter().map(|codec| {
        Ok(CodecCost {
            spec: codec
                .codec
                .parse()
                .map_err(|error: cinch::Error| error.to_string())?,
            encode: codec.encode_ns * 1e-9,
            decode: codec.decode_ns * 1e-9,
        })
    });
    Ok(Costs {
        link: LinkCost {
            latency: file.link.latency_us * 1e-6,
            message: file.link.message_us * 1e-6,
            bandwidth: file.link.gb_per_s * 1e9,
        },
        add: file.add_ns * 1e-9,
        codecs: codecs.collect::<Result<_, String>>()?,
    })
}

/// Returns the costs in the JSON form of the file.
pub fn to_json(costs: &Costs) -> String {
    // Further digits are noise, and rounding avoids long binary fractions.
    let tidy = |value: f64| (value * 1e6).round() / 1e6;
    let file = File {
        link: FileLink {
            latency_us: tidy(costs.link.latency * 1e6),
            message_us: tidy(costs.link.message * 1e6),
            gb_per_s: tidy(costs.link.bandwidth * 1e-9),
        },
        add_ns: tidy(costs.add * 1e9),
        codecs: costs
            .codecs
            .iter()
            .map(|cost| FileCodec {
                codec: cost.spec.to_string(),
                encode_ns: tidy(cost.encode * 1e9),
                decode_ns: tidy(cost.decode * 1e9),
            })
            .collect(),
    };
    // Serialising plain numbers and strings cannot fail.
    serde_json::to_string_pretty(&file).unwrap_or_default() + "\n"
}

/// Prints the costs.
///
/// # Errors
/// Returns the writer's errors.
pub fn write_table(costs: &Costs, measured: bool, out: &mut dyn Write) -> Written<()> {
    if measured && cfg!(debug_assertions) {
        writeln!(
            out,
            "# measured by a build without optimisation: codecs look several times as slow"
        )?;
    }
    writeln!(
        out,
        "# wire: {:.1} us latency, {:.1} us a message, {:.3} GB/s; adding {:.3} ns an element\n\
         {:<24} {:>12} {:>12}",
        costs.link.latency * 1e6,
        costs.link.message * 1e6,
        costs.link.bandwidth * 1e-9,
        costs.add * 1e9,
        "codec",
        "encode ns/el",
        "decode ns/el"
    )?;
    for cost in &costs.codecs {
        writeln!(
            out,
            "{:<24} {:>12.4} {:>12.4}",
            cost.spec.to_string(),
            cost.encode * 1e9,
            cost.decode * 1e9
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{
        "link": {"latency_us": 25.0, "message_us": 8.0, "gb_per_s": 1.25},
        "add_ns": 0.1,
        "codecs": [
            {"codec": "raw", "encode_ns": 0.2, "decode_ns": 0.2},
            {"codec": "linear8:block=128", "encode_ns": 0.3, "decode_ns": 0.1}
        ]
    }"#;

    #[test]
    fn costs_survive_a_round_trip_through_json() {
        let costs = parse(FILE).unwrap();
        assert!((costs.link.bandwidth - 1.25e9).abs() < 1.0);
        assert_eq!(costs.codecs[1].spec.to_string(), "linear8:block=128");
        let again = to_json(&costs);
        assert_eq!(to_json(&parse(&again).unwrap()), again);
        assert!(costs.check().is_ok());
    }

    #[test]
    fn malformed_files_of_costs_are_refused() {
        assert!(parse(&FILE.replace("add_ns", "ad_ns")).is_err());
        let error = parse(&FILE.replace("linear8", "linear9")).unwrap_err();
        assert!(error.contains("linear9"), "{error}");
    }
}
