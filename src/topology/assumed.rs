//! Links of unknown speed. The graph has an assumed bandwidth for each of them; what follows from the graph must not depend
//! on it.

use super::graph::{BandwidthOrigin, GraphLink, LinkKind, MachineGraph, NodeKind};

/// Gives all links of unknown speed unlimited bandwidth.
pub(super) fn lift_all(graph: &mut MachineGraph) {
    lift(graph, |_| true);
}

/// Returns the graph in which links of unknown speed have unlimited bandwidth. If the PCIe links of all GPUs are of
/// unknown speed, these keep their assumed bandwidth, because no time would follow from unlimited links alone.
pub(super) fn lifted_for_times(graph: &MachineGraph) -> MachineGraph {
    let is_gpu = |node: usize| matches!(graph.nodes[node].kind, NodeKind::Gpu(_));
    let is_own = |link: &GraphLink| {
        let is_up = graph.nodes[link.from].parent == Some(link.to);
        let gpu = if is_up { link.from } else { link.to };
        link.class == LinkKind::Pcie && is_gpu(gpu)
    };
    let is_known = |link: &GraphLink| link.bandwidth.origin > BandwidthOrigin::Assumed;
    let some_known = graph
        .links
        .iter()
        .any(|link| is_own(link) && is_known(link));
    let mut lifted = graph.clone();
    lift(&mut lifted, |link| some_known || !is_own(link));
    lifted
}

fn lift(graph: &mut MachineGraph, which: impl Fn(&GraphLink) -> bool) {
    for link in &mut graph.links {
        if link.bandwidth.origin == BandwidthOrigin::Assumed && which(link) {
            link.bandwidth.mb_s = u32::MAX;
        }
    }
}
