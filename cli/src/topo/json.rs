//! A machine as one JSON object.

use super::Shown;
use serde_json::{Map, Value, json};
use std::io::{self, Write};

/// Writes the object on one line. GPUs are indices in `gpus` everywhere.
pub fn write(shown: &Shown, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}", object(shown))
}

fn object(shown: &Shown) -> Value {
    let graph = &shown.graph;
    let gpus: Vec<String> = graph
        .gpus
        .iter()
        .map(|gpu| gpu.bus_id.to_string())
        .collect();
    let row = |from: usize| -> Vec<&str> {
        (0..shown.gpus())
            .map(|to| shown.paths.get(from, to).class.name())
            .collect()
    };
    let paths: Vec<_> = (0..shown.gpus()).map(row).collect();
    let prediction = &shown.prediction;
    let rings: Vec<_> = prediction
        .ring_set
        .rings
        .iter()
        .map(|(ring, _)| ring.clone())
        .collect();
    let shares: u64 = prediction
        .ring_set
        .rings
        .iter()
        .map(|(_, share)| share)
        .sum();
    let parts: Vec<f64> = prediction
        .ring_set
        .rings
        .iter()
        .map(|(_, share)| rounded(*share as f64 / shares as f64, 1e4))
        .collect();
    let predicted: Map<String, Value> = shown
        .predicted_ms()
        .into_iter()
        .map(|(name, ms)| (name.to_string(), json!(rounded(ms, 1e4))))
        .collect();
    let nics: Vec<&str> = graph
        .nics
        .iter()
        .map(|nic| graph.nodes[nic.node].name.as_str())
        .collect();
    let levels: Vec<Value> = prediction
        .partitions
        .iter()
        .map(|partition| json!({"behind": partition.unit.noun(), "groups": sorted(&partition.groups)}))
        .collect();
    let defects: Vec<String> = graph.defects.iter().map(ToString::to_string).collect();
    json!({
        "source": shown.source,
        "bytes": shown.bytes,
        "gpus": gpus,
        "nics": nics,
        "paths": paths,
        "groups": sorted(&prediction.groups),
        "levels": levels,
        "rings": rings,
        "ring_shares": parts,
        "predicted_ms": predicted,
        "defects": defects,
    })
}

/// Returns groups with their GPUs in the order of `gpus`, and in the order of their first GPU.
fn sorted(groups: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut groups = groups.to_vec();
    groups.iter_mut().for_each(|group| group.sort_unstable());
    groups.sort_unstable();
    groups
}

fn rounded(value: f64, places: f64) -> f64 {
    (value * places).round() / places
}
