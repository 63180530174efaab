//! A machine as one JSON object.

use super::Shown;
use super::probe::Probed;
use cinch::topology::probe::{FlowEnd, MeasuredPattern, predicted_rates};
use cinch::topology::{FanCap, GraphLink, LinkPool, MachineGraph};
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
        "rings_are_best": prediction.ring_set.is_best,
        "predicted_ms": predicted,
        "defects": defects,
        "links": links(graph),
        "pools": pools(graph),
        "fans": fans(graph),
        "measured": shown.probed.as_ref().map(|probed| patterns(shown, probed)),
    })
}

/// Returns a bandwidth in GB/s.
fn gb_s(mb_s: u64) -> f64 {
    mb_s as f64 / 1e3
}

fn links(graph: &MachineGraph) -> Vec<Value> {
    let name = |node: usize| graph.nodes[node].name.as_str();
    let link = |link: &GraphLink| {
        json!({
            "from": name(link.from),
            "to": name(link.to),
            "gb_s": gb_s(link.bandwidth.mb_s.into()),
            "origin": link.bandwidth.origin.to_string(),
        })
    };
    graph.links.iter().map(link).collect()
}

fn pools(graph: &MachineGraph) -> Vec<Value> {
    let name = |node: usize| graph.nodes[node].name.as_str();
    let ends = |&link: &usize| [name(graph.links[link].from), name(graph.links[link].to)];
    let pool = |pool: &LinkPool| {
        let links: Vec<_> = pool.links.iter().map(ends).collect();
        json!({"links": links, "gb_s": gb_s(pool.mb_s.into())})
    };
    graph.pools.iter().map(pool).collect()
}

fn fans(graph: &MachineGraph) -> Vec<Value> {
    let fan = |fan: &FanCap| {
        json!({
            "switch": graph.nodes[graph.links[fan.link].from].name,
            "sources": fan.sources,
            "ports": fan.ports,
            "gb_s": gb_s(fan.mb_s.into()),
        })
    };
    graph.fans.iter().map(fan).collect()
}

/// Returns the measured patterns, each flow with its measured and its predicted rate.
fn patterns(shown: &Shown, probed: &Probed) -> Vec<Value> {
    let graph = &shown.graph;
    let name = |end: FlowEnd| match end {
        FlowEnd::Gpu(gpu) => graph.gpus[gpu].bus_id.to_string(),
        FlowEnd::Host(node) => graph.nodes[node].name.clone(),
    };
    let pattern = |MeasuredPattern { pattern, mb_s }: &MeasuredPattern| {
        let flows = pattern.flows.iter();
        let ends: Vec<_> = flows
            .clone()
            .map(|flow| [name(flow.from), name(flow.to)])
            .collect();
        let predicted = predicted_rates(graph, &shown.paths, &pattern.flows);
        let predicted: Vec<f64> = predicted.into_iter().map(gb_s).collect();
        let measured: Vec<f64> = mb_s.iter().map(|&mb_s| gb_s(mb_s.into())).collect();
        json!({
            "pattern": pattern.name,
            "by_reading": flows.clone().any(|flow| flow.is_read),
            "flows": ends,
            "gb_s": measured,
            "predicted_gb_s": predicted,
        })
    };
    probed.saved.patterns.iter().map(pattern).collect()
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
