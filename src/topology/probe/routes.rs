//! The links that flows cross, and the rates that a graph predicts for them.

use super::{FlowEnd, ProbeFlow};
use crate::topology::graph::MachineGraph;
use crate::topology::paths::Paths;
use crate::topology::rates::{FlowRoute, rates_on};

/// Returns the route of a flow. Its links are empty if the graph has no path.
pub(super) fn route(graph: &MachineGraph, paths: &Paths, flow: &ProbeFlow) -> FlowRoute {
    match (flow.from, flow.to) {
        (FlowEnd::Gpu(from), FlowEnd::Gpu(to)) => {
            let path = paths.get(from, to);
            FlowRoute {
                source: from,
                links: path.links.clone(),
                root_port: path.root_port,
            }
        }
        (FlowEnd::Gpu(gpu), FlowEnd::Host(socket)) => {
            let [there, _] = Paths::to_socket(graph, gpu, socket).unwrap_or_default();
            FlowRoute {
                source: gpu,
                links: there,
                root_port: None,
            }
        }
        (FlowEnd::Host(socket), FlowEnd::Gpu(gpu)) => {
            let [_, back] = Paths::to_socket(graph, gpu, socket).unwrap_or_default();
            FlowRoute {
                source: graph.gpus.len() + socket,
                links: back,
                root_port: None,
            }
        }
        (FlowEnd::Host(socket), FlowEnd::Host(_)) => FlowRoute {
            source: graph.gpus.len() + socket,
            links: Vec::new(),
            root_port: None,
        },
    }
}

/// Returns the MB/s that the graph's links, pools and fans allow each flow while all of them run. A flow without a
/// path has the largest number.
pub fn predicted_rates(graph: &MachineGraph, paths: &Paths, flows: &[ProbeFlow]) -> Vec<u64> {
    let routes: Vec<FlowRoute> = flows.iter().map(|flow| route(graph, paths, flow)).collect();
    let rates = rates_on(graph, &routes).into_iter();
    rates
        .map(|rate| rate.saturating_add(500_000) / 1_000_000)
        .collect()
}
