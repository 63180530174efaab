//! The text of a saved probe. Besides the lines of measured limits (see `measured::text`) it has:
//!
//! | line | meaning |
//! | --- | --- |
//! | `fingerprint 0123456789abcdef` | the machine, driver and settings that were measured; the first line |
//! | `access 01 10` | for each GPU which GPUs' memory it accesses, in the order of `dev` |
//! | `pattern write A>B=39000 B>A=38000 : NAME` | a measured pattern with the MB/s of each flow; `read` if the receiving GPUs read |

use super::{FlowEnd, MeasuredPattern, ProbeFlow, TrafficPattern};
use crate::error::{Error, Result};
use crate::topology::BusId;
use crate::topology::graph::{MachineGraph, NodeKind};
use crate::topology::measured::MeasuredLimits;
use crate::topology::paths::PeerAccess;
use std::fmt::Write;

/// Largest number of patterns, and of flows of one pattern.
const MAX_PATTERNS: usize = 4_096;

/// A measured machine: its limits, and the patterns that showed them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedProbe {
    /// Pairs of GPUs that accessed each other's memory.
    pub access: PeerAccess,
    /// Inferred limits.
    pub limits: MeasuredLimits,
    /// Measured patterns.
    pub patterns: Vec<MeasuredPattern>,
}

impl SavedProbe {
    /// Returns the text form. `graph` is the measured machine.
    pub fn to_text(&self, graph: &MachineGraph, fingerprint: &str) -> String {
        let mut text = format!(
            "fingerprint {fingerprint}\n\
             # Measured by `cinch topo --probe`, in MB/s. Without this file the tables' figures hold.\n"
        );
        if let PeerAccess::Pairs(pairs) = &self.access {
            text += "access";
            for row in pairs.chunks(graph.gpus.len().max(1)) {
                let row = row.iter().map(|&can| if can { '1' } else { '0' });
                text.push(' ');
                text.extend(row);
            }
            text.push('\n');
        }
        text += &self.limits.to_string();
        for MeasuredPattern { pattern, mb_s } in &self.patterns {
            let is_read = pattern.flows.iter().any(|flow| flow.is_read);
            text += if is_read {
                "pattern read"
            } else {
                "pattern write"
            };
            for (flow, mb_s) in pattern.flows.iter().zip(mb_s) {
                let [from, to] = [flow.from, flow.to].map(|end| end_name(graph, end));
                // Writing to a string cannot fail.
                let _ = write!(text, " {from}>{to}={mb_s}");
            }
            let _ = writeln!(text, " : {}", pattern.name);
        }
        text
    }

    /// Reads the text form. `graph` is the measured machine.
    ///
    /// # Errors
    /// Invalid argument, with the line, for a line that is none of the above, for a node that the machine lacks, and
    /// for the errors of measured limits.
    pub fn from_text(text: &str, graph: &MachineGraph) -> Result<SavedProbe> {
        let mut saved = SavedProbe {
            access: PeerAccess::Rule,
            limits: MeasuredLimits::default(),
            patterns: Vec::new(),
        };
        // Lines that are no limits are blank in the text of limits, so that its errors have the right lines.
        let mut limits = String::new();
        for (number, line) in text.lines().enumerate() {
            let refuse = |why| Error::invalid_argument(format!("line {}: {why}", number + 1));
            match line.split_once(' ') {
                Some(("fingerprint", _)) if number == 0 => {}
                Some(("access", rows)) => saved.access = access(rows, graph).map_err(refuse)?,
                Some(("pattern", _)) if saved.patterns.len() == MAX_PATTERNS => {
                    return Err(refuse(format!("more than {MAX_PATTERNS} patterns")));
                }
                Some(("pattern", rest)) => {
                    saved.patterns.push(pattern(rest, graph).map_err(refuse)?);
                }
                _ => limits += line,
            }
            limits.push('\n');
        }
        saved.limits = limits.parse()?;
        // A limit that does not fit the machine is refused now, with its line.
        saved.limits.apply(&mut graph.clone())?;
        Ok(saved)
    }
}

/// Returns the fingerprint of a text; `None` if its first line has none.
pub(super) fn fingerprint(text: &str) -> Option<&str> {
    let first = text.lines().next()?;
    first.strip_prefix("fingerprint ").map(str::trim)
}

fn end_name(graph: &MachineGraph, end: FlowEnd) -> String {
    match end {
        FlowEnd::Gpu(gpu) => graph.gpus[gpu].bus_id.to_string(),
        FlowEnd::Host(node) => graph.nodes[node].name.replace(' ', "_"),
    }
}

fn end(text: &str, graph: &MachineGraph) -> Result<FlowEnd, String> {
    let bus_id = text.parse::<BusId>();
    let gpu = graph.gpus.iter().position(|gpu| Ok(gpu.bus_id) == bus_id);
    let is_named = |&node: &usize| {
        let node = &graph.nodes[node];
        node.kind == NodeKind::Socket && node.name.replace(' ', "_") == text
    };
    let socket = || (0..graph.nodes.len()).find(is_named).map(FlowEnd::Host);
    let shown = || text.chars().take(80).collect::<String>();
    gpu.map(FlowEnd::Gpu)
        .or_else(socket)
        .ok_or_else(|| format!("the machine has no GPU or socket `{}`", shown()))
}

fn access(rows: &str, graph: &MachineGraph) -> Result<PeerAccess, String> {
    let count = graph.gpus.len();
    let rows: Vec<&str> = rows.split_ascii_whitespace().collect();
    let is_row = |row: &&str| row.len() == count && row.bytes().all(|bit| b"01".contains(&bit));
    if rows.len() != count || !rows.iter().all(is_row) {
        return Err(format!(
            "access needs {count} words of {count} digits 0 or 1"
        ));
    }
    let bits = rows.iter().flat_map(|row| row.bytes());
    Ok(PeerAccess::Pairs(bits.map(|bit| bit == b'1').collect()))
}

fn pattern(text: &str, graph: &MachineGraph) -> Result<MeasuredPattern, String> {
    let form = || "a pattern has the form `pattern write A>B=MB/S ... : NAME`".to_string();
    let (flows, name) = text.split_once(" : ").ok_or_else(form)?;
    let mut words = flows.split_ascii_whitespace();
    let is_read = match words.next() {
        Some("read") => true,
        Some("write") => false,
        _ => return Err(form()),
    };
    let mut measured = MeasuredPattern {
        pattern: TrafficPattern {
            name: name.chars().filter(|c| !c.is_control()).take(200).collect(),
            flows: Vec::new(),
        },
        mb_s: Vec::new(),
    };
    for word in words.take(MAX_PATTERNS) {
        let (ends, mb_s) = word.split_once('=').ok_or_else(form)?;
        let (from, to) = ends.split_once('>').ok_or_else(form)?;
        measured.pattern.flows.push(ProbeFlow {
            from: end(from, graph)?,
            to: end(to, graph)?,
            is_read,
        });
        measured.mb_s.push(mb_s.parse().map_err(|_| form())?);
    }
    match measured.mb_s.is_empty() {
        true => Err(form()),
        false => Ok(measured),
    }
}
