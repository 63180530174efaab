//! A machine as text: the tree, the matrix of paths, groups, rings, predictions and defects.

use super::Shown;
use super::probe::Probed;
use crate::gpus::write_matrix;
use cinch::topology::probe::{FlowEnd, ProbeFlow, predicted_rates};
use cinch::topology::{
    Bandwidth, BandwidthOrigin, Hierarchy, LevelExchange, LinkKind, MachineGraph, NodeId, NodeKind,
    RingSet,
};
use std::io::{self, Write};

/// Writes everything that is known of the machine.
pub fn write(shown: &Shown, out: &mut dyn Write) -> io::Result<()> {
    let (gpus, nics) = (shown.gpus(), shown.graph.nics.len());
    writeln!(
        out,
        "{}: {}, {}",
        shown.source,
        count(gpus, "GPU"),
        count(nics, "network device")
    )?;
    writeln!(
        out,
        "\nmachine (GB/s each way; * assumed, because the description has no usable figure; m measured)"
    )?;
    for node in 0..shown.graph.nodes.len() {
        if shown.graph.nodes[node].kind == NodeKind::Socket {
            write_tree(&shown.graph, node, 1, out)?;
        }
    }
    write_links(&shown.graph, out)?;
    write_limits(&shown.graph, out)?;
    write_paths(shown, out)?;
    write_groups(shown, out)?;
    write_rings(shown, out)?;
    write_predictions(shown, out)?;
    if let Some(probed) = &shown.probed {
        write_patterns(shown, probed, out)?;
    }
    if !shown.graph.defects.is_empty() {
        writeln!(out, "\ndefects of the description")?;
    }
    for defect in &shown.graph.defects {
        writeln!(out, "  {defect}")?;
    }
    Ok(())
}

fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Formats a bandwidth in GB/s.
pub(super) fn gb_s(bandwidth: Bandwidth) -> String {
    let assumed = bandwidth.origin == BandwidthOrigin::Assumed;
    let number = f64::from(bandwidth.mb_s) / 1e3;
    let digits = if number < 10.0 { 2 } else { 1 };
    let text = format!("{number:.digits$}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{text}{}", if assumed { "*" } else { "" })
}

/// Formats a bandwidth in GB/s, with a mark if it was measured.
fn marked(bandwidth: Bandwidth) -> String {
    let is_measured = bandwidth.origin == BandwidthOrigin::Measured;
    format!("{}{}", gb_s(bandwidth), if is_measured { "m" } else { "" })
}

/// Returns the kind of a node and its name, such as `switch 0000:80:00.0`.
pub(super) fn title(graph: &MachineGraph, node: NodeId) -> String {
    let name = &graph.nodes[node].name;
    match graph.nodes[node].kind {
        NodeKind::Gpu(index) => {
            let gpu = graph.gpus[index];
            let rank = gpu.rank.filter(|rank| *rank != gpu.dev);
            format!(
                "GPU {}{}  {name}",
                gpu.dev,
                rank.map_or(String::new(), |r| format!(" (rank {r})"))
            )
        }
        NodeKind::Switch => format!("switch  {name}"),
        NodeKind::Socket | NodeKind::LinkSwitch => name.clone(),
        NodeKind::Nic(index) => format!("NIC {}  {name}", graph.nics[index].dev),
    }
}

/// Writes a node and all nodes below it. Readers of descriptions limit the depth, so the recursion
/// is bounded.
fn write_tree(
    graph: &MachineGraph,
    node: NodeId,
    depth: usize,
    out: &mut dyn Write,
) -> io::Result<()> {
    let up = graph
        .links
        .iter()
        .find(|link| link.from == node && Some(link.to) == graph.nodes[node].parent);
    let speed = up.map_or(String::new(), |link| {
        format!("  {}", marked(link.bandwidth))
    });
    writeln!(
        out,
        "{:width$}{}{speed}",
        "",
        title(graph, node),
        width = 2 * depth
    )?;
    for below in 0..graph.nodes.len() {
        if graph.nodes[below].parent == Some(node) {
            write_tree(graph, below, depth + 1, out)?;
        }
    }
    Ok(())
}

fn write_links(graph: &MachineGraph, out: &mut dyn Write) -> io::Result<()> {
    for (class, heading) in [
        (LinkKind::Socket, "between sockets"),
        (LinkKind::NvLink, "NVLink, xGMI"),
    ] {
        let links = graph
            .links
            .iter()
            .step_by(2)
            .filter(|link| link.class == class);
        let mut texts = links.map(|link| {
            let short = |node: NodeId| {
                title(graph, node)
                    .split("  ")
                    .next()
                    .unwrap_or("")
                    .to_string()
            };
            format!(
                "{} - {}: {}",
                short(link.from),
                short(link.to),
                marked(link.bandwidth)
            )
        });
        if let Some(first) = texts.next() {
            writeln!(out, "\n{heading} (GB/s each way)\n  {first}")?;
        }
        for text in texts {
            writeln!(out, "  {text}")?;
        }
    }
    Ok(())
}

/// Writes the limits that single links do not show.
fn write_limits(graph: &MachineGraph, out: &mut dyn Write) -> io::Result<()> {
    if graph.pools.is_empty() && graph.fans.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nmeasured limits of several links and flows (GB/s)")?;
    let name = |node: NodeId| graph.nodes[node].name.as_str();
    let measured = |mb_s: u32| {
        gb_s(Bandwidth {
            mb_s,
            origin: BandwidthOrigin::Measured,
        })
    };
    for pool in &graph.pools {
        let ends = pool.links.iter().map(|&link| {
            let link = graph.links[link];
            format!("{} > {}", name(link.from), name(link.to))
        });
        let ends: Vec<String> = ends.collect();
        writeln!(
            out,
            "  {} together: {}",
            measured(pool.mb_s),
            ends.join(", ")
        )?;
    }
    for fan in &graph.fans {
        writeln!(
            out,
            "  {} out of switch {} while at least {} send to at least {}",
            measured(fan.mb_s),
            name(graph.links[fan.link].from),
            count(fan.sources as usize, "GPU"),
            count(fan.ports as usize, "root port")
        )?;
    }
    Ok(())
}

/// Writes measured beside predicted rates: of patterns of several flows by writing, and of pairs of GPUs alone.
fn write_patterns(shown: &Shown, probed: &Probed, out: &mut dyn Write) -> io::Result<()> {
    let graph = &shown.graph;
    writeln!(out, "\nmeasured patterns, {}", probed.source)?;
    writeln!(
        out,
        "  GB/s of all flows: {:>10} {:>10}",
        "predicted", "measured"
    )?;
    for measured in &probed.saved.patterns {
        let flows = &measured.pattern.flows;
        let is_read = flows.iter().any(|flow| flow.is_read);
        let is_pair = flows.len() == 1 && measured.pattern.is_peer_write();
        if is_read || is_pair {
            continue;
        }
        let predicted: u64 = predicted_rates(graph, &shown.paths, flows).iter().sum();
        let [predicted, found] = [predicted, measured.total()].map(|mb_s| mb_s as f64 / 1e3);
        let name = &measured.pattern.name;
        writeln!(out, "  {predicted:>29.1} {found:>10.1}  {name}")?;
    }
    for (title, by_reading) in [
        (
            "written by the row's GPU to the column's alone, GB/s",
            false,
        ),
        ("read by the column's GPU from the row's alone, GB/s", true),
    ] {
        let cell = |from: usize, to: usize| {
            let flow = ProbeFlow {
                from: FlowEnd::Gpu(from),
                to: FlowEnd::Gpu(to),
                is_read: by_reading,
            };
            let mut patterns = probed.saved.patterns.iter();
            let found = patterns.find(|measured| measured.pattern.flows == [flow]);
            found.map_or("-".into(), |found| {
                format!("{:.1}", found.total() as f64 / 1e3)
            })
        };
        let row = |from: usize| (0..shown.gpus()).map(|to| cell(from, to)).collect();
        let cells: Vec<Vec<String>> = (0..shown.gpus()).map(row).collect();
        if cells.iter().flatten().any(|cell| cell != "-") {
            write_matrix(title, &cells, out)?;
        }
    }
    Ok(())
}

fn write_paths(shown: &Shown, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "\npaths between GPUs (- without peer access: through the memory of the receiver's socket)"
    )?;
    let gpus = shown.gpus();
    write!(out, "  {:>4}", "")?;
    for to in 0..gpus {
        write!(out, "{:>6}", shown.graph.gpus[to].dev)?;
    }
    writeln!(out)?;
    for from in 0..gpus {
        write!(out, "  {:>4}", shown.graph.gpus[from].dev)?;
        for to in 0..gpus {
            let path = shown.paths.get(from, to);
            let mark = if path.peer_access || from == to {
                ""
            } else {
                "-"
            };
            write!(out, "{:>6}", format!("{}{mark}", path.class))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// Formats GPUs as their numbers.
pub(super) fn devs(graph: &MachineGraph, gpus: &[usize]) -> String {
    let numbers: Vec<String> = gpus
        .iter()
        .map(|&gpu| graph.gpus[gpu].dev.to_string())
        .collect();
    numbers.join(" ")
}

fn write_groups(shown: &Shown, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "\ngroups behind one way out")?;
    if shown.prediction.partitions.is_empty() {
        writeln!(out, "  none: all GPUs stand beside each other")?;
    }
    for partition in &shown.prediction.partitions {
        let groups: Vec<String> = partition
            .groups
            .iter()
            .map(|group| format!("[{}]", devs(&shown.graph, group)))
            .collect();
        writeln!(out, "  {:<13} {}", partition.unit.noun(), groups.join(" "))?;
    }
    Ok(())
}

fn write_rings(shown: &Shown, out: &mut dyn Write) -> io::Result<()> {
    let set = &shown.prediction.ring_set;
    let rings = &set.rings;
    let whole: u64 = rings.iter().map(|(_, share)| share).sum();
    writeln!(
        out,
        "\n{} (both ways round)",
        if rings.len() == 1 {
            "best ring"
        } else {
            "best set of rings"
        }
    )?;
    for (ring, share) in rings {
        let percent = 100.0 * *share as f64 / whole as f64;
        writeln!(
            out,
            "  {:<40} {percent:>5.1} % of the message",
            devs(&shown.graph, ring)
        )?;
    }
    if !set.is_best {
        let why = match shown.gpus() > RingSet::MOST_GPUS {
            true => format!("sets are not compared beyond {} GPUs", RingSet::MOST_GPUS),
            false => "the search for sets stopped at its limit".into(),
        };
        writeln!(out, "  A set of rings may be faster: {why}.")?;
    }
    Ok(())
}

fn write_predictions(shown: &Shown, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "\npredicted all_reduce of {} bytes of fp32, by the fullest link (ms)",
        shown.bytes
    )?;
    for (name, ms) in shown.predicted_ms() {
        writeln!(out, "  {:<14} {ms:>10.2}", name.replace('_', " "))?;
    }
    if let Some(hierarchy) = &shown.prediction.hierarchy {
        let ms = hierarchy.time.milliseconds(shown.bytes);
        writeln!(out, "  {:<14} {ms:>10.2}  {}", "groups", levels(hierarchy))?;
    }
    writeln!(out, "  Times of linear8 leave out the codec.")
}

/// Describes the exchanges of a schedule on groups, innermost first, such as `direct inside each
/// switch, ring between them`.
pub(super) fn levels(hierarchy: &Hierarchy) -> String {
    let exchange = |exchange: &LevelExchange| match exchange {
        LevelExchange::Direct => "direct",
        LevelExchange::Ring => "ring",
    };
    let mut text = String::new();
    for (partition, inside) in hierarchy.partitions.iter().zip(&hierarchy.exchanges) {
        text += &format!(
            "{} inside each {}, ",
            exchange(inside),
            partition.unit.noun()
        );
    }
    let between = hierarchy.exchanges.last().map_or("direct", exchange);
    format!("{text}{between} between them")
}
