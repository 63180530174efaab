//! Topologies in NCCL's XML format, measured limits, and saved probes, which come from files.

use super::input::Input;
use cinch::topology::probe::SavedProbe;
use cinch::topology::{
    MachineGraph, MeasuredLimit, MeasuredLimits, Paths, PeerAccess, RankTopology, predict,
    read_xml, write_xml,
};
use std::sync::OnceLock;

/// A machine with 8 GPUs under 4 switches.
const MACHINE: &str = include_str!("../../tests/topology/A.xml");

fn graph() -> &'static MachineGraph {
    static GRAPH: OnceLock<MachineGraph> = OnceLock::new();
    GRAPH.get_or_init(|| MachineGraph::new(&read_xml(MACHINE).expect("the machine's file")))
}

/// Reads one of the three formats. What was read must survive being written.
pub fn topology(data: &[u8]) -> Option<bool> {
    let mut input = Input(data);
    let kind = input.u8();
    let text = String::from_utf8_lossy(input.0);
    match kind {
        b'L' => limits(&text),
        b'P' => probe(&text),
        _ => xml(&String::from_utf8_lossy(data)),
    }
}

fn xml(text: &str) -> Option<bool> {
    let machine = read_xml(text).ok()?;
    let written = write_xml(&machine);
    assert_eq!(read_xml(&written).as_ref(), Ok(&machine), "{written}");
    let graph = MachineGraph::new(&machine);
    // Larger machines take longer than an input may.
    if graph.nodes.len() <= 64 {
        let paths = Paths::new(&graph, &PeerAccess::Rule);
        // The bound of 8 GPUs compares 4,140 partitions.
        if graph.gpus.len() <= 6 {
            let prediction = predict(&graph, &paths);
            let times = [prediction.bound, prediction.best()];
            let [bound, best] = times.map(|time| time.milliseconds(1 << 30));
            // Shares of rings are rounded to 40 bits.
            assert!(bound <= best * (1.0 + 1e-6), "{written}");
        }
        let gpus: Vec<usize> = (0..graph.gpus.len().min(8)).collect();
        if let Ok(topology) = RankTopology::new(&graph, &gpus, &PeerAccess::Rule) {
            let _ = topology.fingerprint();
        }
    }
    Some(graph.gpus.iter().any(|gpu| gpu.dev > 15))
}

fn limits(text: &str) -> Option<bool> {
    let limits = text.parse::<MeasuredLimits>().ok()?;
    let again = limits
        .to_string()
        .parse::<MeasuredLimits>()
        .expect("written limits");
    assert!(again.limits().eq(limits.limits()), "{limits}");
    let mut copy = graph().clone();
    limits.apply(&mut copy).ok()?;
    let is_fast = |limit: &MeasuredLimit| match limit {
        MeasuredLimit::Link(_, mb_s) | MeasuredLimit::Pool(_, mb_s) => *mb_s > 100_000,
        _ => false,
    };
    Some(limits.limits().any(is_fast))
}

fn probe(text: &str) -> Option<bool> {
    let saved = SavedProbe::from_text(text, graph()).ok()?;
    let written = saved.to_text(graph(), "0123456789abcdef");
    let again = SavedProbe::from_text(&written, graph()).expect("a written probe");
    assert_eq!(again.to_text(graph(), "0123456789abcdef"), written);
    assert_eq!(again.patterns, saved.patterns);
    Some(saved.patterns.len() == 3)
}
