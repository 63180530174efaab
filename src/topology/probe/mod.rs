//! Measures a machine by traffic patterns, and infers the limits of its links from the results.
//!
//! Pairs of GPUs alone do not show which links they share. So [`plan`] lists patterns whose flows run at once: all
//! GPUs of a switch out of it, one GPU of each switch across, two GPUs of a switch to one root port and to two. A
//! [`PatternMeter`] measures them, and [`infer`] turns the results into [`MeasuredLimits`](super::MeasuredLimits).

mod infer;
mod plan;
mod routes;
mod saved;
mod saved_text;

pub use infer::infer;
pub use plan::{MAX_PATTERNS, plan};
pub use routes::predicted_rates;
pub use saved::{DRIVER, ProbeKey, SavedLimits};
pub use saved_text::SavedProbe;

use super::graph::{MachineGraph, NodeId};
use crate::error::{Error, Result};
use std::fmt;

/// End of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FlowEnd {
    /// Memory of a GPU, by index in [`MachineGraph::gpus`].
    Gpu(usize),
    /// Host memory of a socket, by index in [`MachineGraph::nodes`].
    Host(NodeId),
}

/// Data that flows from one memory to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProbeFlow {
    /// Memory that the data comes from.
    pub from: FlowEnd,
    /// Memory that the data goes to.
    pub to: FlowEnd,
    /// Whether the receiving GPU reads from the sending GPU. Otherwise the sending GPU writes, as the library's kernels
    /// do. False between a GPU and host memory, where the GPU moves the data in any case.
    pub is_read: bool,
}

/// Flows that run at once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TrafficPattern {
    /// Phrase for reports, such as `all of switch 0000:80:00.0 to switch 0000:84:00.0`.
    pub name: String,
    /// Flows of the pattern; at least one.
    pub flows: Vec<ProbeFlow>,
}

impl TrafficPattern {
    /// Returns whether GPUs write to GPUs in all flows.
    pub fn is_peer_write(&self) -> bool {
        let is_gpu = |end: FlowEnd| matches!(end, FlowEnd::Gpu(_));
        let mut flows = self.flows.iter();
        flows.all(|flow| is_gpu(flow.from) && is_gpu(flow.to) && !flow.is_read)
    }
}

/// A pattern with the rate of each flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredPattern {
    /// The flows.
    pub pattern: TrafficPattern,
    /// MB/s of each flow, in the order of the pattern's flows.
    pub mb_s: Vec<u32>,
}

impl MeasuredPattern {
    /// Returns the MB/s of all flows together.
    pub fn total(&self) -> u64 {
        self.mb_s.iter().copied().map(u64::from).sum()
    }
}

/// Measures the rates of flows that run at once.
pub trait PatternMeter {
    /// Returns the MB/s of each flow while all of them run.
    ///
    /// # Errors
    /// Errors of the measurement, such as memory that is short or a copy that does not end.
    fn measure(&mut self, graph: &MachineGraph, flows: &[ProbeFlow]) -> Result<Vec<u32>>;
}

/// Measures each pattern.
///
/// # Errors
/// The first error of the meter, with the name of the pattern.
pub fn measure(
    graph: &MachineGraph,
    patterns: Vec<TrafficPattern>,
    meter: &mut dyn PatternMeter,
) -> Result<Vec<MeasuredPattern>> {
    let one = |pattern: TrafficPattern| {
        let mb_s = meter.measure(graph, &pattern.flows);
        let mb_s =
            mb_s.map_err(|error| error.context(format!("while measuring {}", pattern.name)))?;
        if mb_s.len() != pattern.flows.len() {
            return Err(Error::internal(format!(
                "{} rates were measured for {} flows",
                mb_s.len(),
                pattern.flows.len()
            )));
        }
        Ok(MeasuredPattern { pattern, mb_s })
    };
    patterns.into_iter().map(one).collect()
}

impl fmt::Display for TrafficPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}
