//! Predictions as a table, JSON, CSV and SVG.

use super::costs::to_json;
use crate::papers::model::{Costs, Layer, Prediction};
use crate::plot::{self, Panel, Series};
use serde::Serialize;
use serde_json::json;
use std::io::{Result, Write};

/// Prints a row for each rank count and codec, then the fastest codec at each rank count.
///
/// # Errors
/// Returns the writer's errors.
pub fn write(layers: &[Layer], outcomes: &[Vec<Prediction>], out: &mut dyn Write) -> Result<()> {
    writeln!(out, "\n# {}", summary(layers))?;
    writeln!(
        out,
        "# vs raw: step time with raw over this one; vs 16: with the best of 16 bits or more; \
         * pays: beats all of those\n\
         {:>6} {:<24} {:>10} {:>10} {:>10} {:>9} {:>8} {:>8} {:>12}",
        "ranks", "codec", "sums ms", "exposed", "step ms", "speed-up", "vs raw", "vs 16", "MB sent"
    )?;
    for outcome in outcomes.iter().flatten() {
        writeln!(
            out,
            "{:>6} {:<24} {:>10.3} {:>10.3} {:>10.3} {:>9} {:>8.3} {:>8.3} {:>12.3} {}",
            outcome.nranks,
            outcome.codec.to_string(),
            outcome.sums * 1e3,
            outcome.exposed * 1e3,
            outcome.step * 1e3,
            speedup(outcome).map_or("-".into(), |factor| format!("{factor:.2}")),
            outcome.against_raw,
            outcome.against_wide,
            outcome.wire_bytes * 1e-6,
            if outcome.pays() { "*" } else { "" }
        )?;
    }
    writeln!(out)?;
    for at in outcomes {
        let best = at.iter().min_by(|a, b| a.step.total_cmp(&b.step));
        if let Some(best) = best {
            writeln!(
                out,
                "{} ranks: {} is fastest, {:.3} ms a step, {:.2} times raw",
                best.nranks,
                best.codec,
                best.step * 1e3,
                best.against_raw
            )?;
        }
    }
    Ok(())
}

/// Returns the speed-up; `None` if the layers have no times.
fn speedup(outcome: &Prediction) -> Option<f64> {
    (outcome.speedup > 0.0).then_some(outcome.speedup)
}

fn summary(layers: &[Layer]) -> String {
    let elements: usize = layers.iter().map(|layer| layer.elements).sum();
    let compute: f64 = layers
        .iter()
        .map(|layer| layer.forward + layer.backward)
        .sum();
    format!(
        "{} layers, {elements} elements, {:.3} ms of computing a step on one rank",
        layers.len(),
        compute * 1e3
    )
}

/// A predicted step in the form of JSON and CSV.
#[derive(Serialize)]
struct PredictionRow {
    ranks: usize,
    codec: String,
    sums_s: f64,
    exposed_s: f64,
    step_s: f64,
    speedup: Option<f64>,
    against_raw: f64,
    against_16_bits: f64,
    wire_bytes: f64,
    pays: bool,
}

fn rows(outcomes: &[Vec<Prediction>]) -> impl Iterator<Item = PredictionRow> {
    outcomes.iter().flatten().map(|outcome| PredictionRow {
        ranks: outcome.nranks,
        codec: outcome.codec.to_string(),
        sums_s: outcome.sums,
        exposed_s: outcome.exposed,
        step_s: outcome.step,
        speedup: speedup(outcome),
        against_raw: outcome.against_raw,
        against_16_bits: outcome.against_wide,
        wire_bytes: outcome.wire_bytes,
        pays: outcome.pays(),
    })
}

/// Formats costs and predictions as JSON.
pub fn json(layers: &[Layer], costs: &Costs, outcomes: &[Vec<Prediction>]) -> String {
    let layers: Vec<_> = layers
        .iter()
        .map(|layer| {
            json!({
                "name": layer.name,
                "elements": layer.elements,
                "forward_s": layer.forward,
                "backward_s": layer.backward,
            })
        })
        .collect();
    let costs: serde_json::Value = serde_json::from_str(&to_json(costs)).unwrap_or_default();
    let rows: Vec<PredictionRow> = rows(outcomes).collect();
    format!(
        "{:#}\n",
        json!({"layers": layers, "costs": costs, "outcomes": rows})
    )
}

/// Formats predictions as CSV.
pub fn csv(outcomes: &[Vec<Prediction>]) -> String {
    to_csv(rows(outcomes))
}

/// Formats rows as CSV, with the names of their fields as header.
pub fn to_csv(rows: impl Iterator<Item = impl Serialize>) -> String {
    let mut csv = csv::Writer::from_writer(Vec::new());
    // Writing plain values to a vector cannot fail.
    for row in rows {
        let written = csv.serialize(row);
        debug_assert!(written.is_ok(), "{written:?}");
    }
    let text = csv.into_inner().unwrap_or_default();
    String::from_utf8_lossy(&text).into_owned()
}

/// Draws step time, and step time relative to raw, over the number of ranks.
pub fn svg(layers: &[Layer], costs: &Costs, outcomes: &[Vec<Prediction>]) -> String {
    let panel = |label: &str, logarithmic, value: &dyn Fn(&Prediction) -> f64| Panel {
        label: label.into(),
        logarithmic,
        series: costs
            .codecs
            .iter()
            .enumerate()
            .map(|(at, cost)| Series {
                name: cost.spec.to_string(),
                dashed: false,
                points: outcomes
                    .iter()
                    .map(|codecs| (codecs[at].nranks as f64, value(&codecs[at])))
                    .collect(),
            })
            .collect(),
    };
    let subtitle = format!(
        "{}; wire {:.3} GB/s, {:.1} us",
        summary(layers),
        costs.link.bandwidth * 1e-9,
        costs.link.latency * 1e6
    );
    plot::svg(
        "ranks",
        "Predicted training step by codec",
        &subtitle,
        &[
            panel("speed against raw", false, &|outcome| outcome.against_raw),
            panel("step time (ms)", true, &|outcome| outcome.step * 1e3),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::papers::model::{CodecCost, LinkCost, predict};
    use cinch::CodecSpec;
    use cinch::types::CodecKind;

    #[test]
    fn every_output_format_has_every_prediction() {
        let layers = Layer::parse("a,1000000,500,1000\nb,10,1,2\n").unwrap();
        let cost = |kind| CodecCost {
            spec: CodecSpec::of(kind),
            encode: 0.2e-9,
            decode: 0.2e-9,
        };
        let costs = Costs {
            link: LinkCost {
                latency: 1e-5,
                message: 1e-6,
                bandwidth: 1e9,
            },
            add: 1e-10,
            codecs: vec![cost(CodecKind::Raw), cost(CodecKind::Linear8)],
        };
        let outcomes: Vec<_> = [1, 2, 8]
            .map(|nranks| predict(&layers, &costs, nranks).unwrap())
            .into();
        let mut out = Vec::new();
        write(&layers, &outcomes, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(
            text.contains("8 ranks: linear8:block=256 is fastest"),
            "{text}"
        );
        assert_eq!(csv(&outcomes).lines().count(), 7);
        let value: serde_json::Value =
            serde_json::from_str(&json(&layers, &costs, &outcomes)).unwrap();
        assert_eq!(value["outcomes"].as_array().unwrap().len(), 6);
        assert_eq!(value["outcomes"][5]["pays"], true);
        assert_eq!(value["costs"]["link"]["gb_per_s"], 1.0);
        let drawing = svg(&layers, &costs, &outcomes);
        assert_eq!(drawing.matches("<circle").count(), 2 * 2 * 3);
        assert!(drawing.contains("ranks"));
    }
}
