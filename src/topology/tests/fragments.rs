//! Fragments of machines, and their fusion.

use super::machines::case;
use crate::error::ErrorKind;
use crate::topology::{Machine, MachineGraph, Paths, PeerAccess, fragment, fuse, predict};

/// Returns the fragments of all GPUs, with names of ranks.
fn fragments(machine: &Machine) -> Vec<(String, Machine)> {
    let graph = MachineGraph::new(machine);
    let gpus = graph.gpus.iter().enumerate();
    gpus.map(|(rank, gpu)| {
        (
            format!("rank {rank}"),
            fragment(machine, gpu.bus_id).unwrap(),
        )
    })
    .collect()
}

#[test]
fn fused_fragments_have_the_paths_and_predictions_of_the_machine() {
    for name in ["A", "B", "C", "D", "F", "G", "H", "I", "K"] {
        let machine = case(name).machine;
        let mut parts = fragments(&machine);
        let fused = fuse(&parts).unwrap();
        let [before, after] = [&machine, &fused].map(|machine| {
            let graph = MachineGraph::new(machine);
            let paths = Paths::new(&graph, &PeerAccess::Rule);
            let bandwidths = |a: usize, b: usize| -> Vec<_> {
                paths
                    .get(a, b)
                    .links
                    .iter()
                    .map(|&link| graph.links[link].bandwidth)
                    .collect()
            };
            let n = graph.gpus.len();
            let all: Vec<_> = (0..n * n).map(|at| bandwidths(at / n, at % n)).collect();
            let prediction = predict(&graph, &paths);
            (all, prediction.groups.clone(), prediction.best())
        });
        assert_eq!(before, after, "{name}");
        // Fragments come in the order of ranks, but any order gives the same graph.
        parts.reverse();
        let turned = MachineGraph::new(&fuse(&parts).unwrap());
        assert_eq!(turned.gpus.len(), before.0.len().isqrt(), "{name}");
    }
}

#[test]
fn fragments_that_contradict_each_other_are_a_mismatch_with_both_values() {
    let machine = case("A").machine;
    let mut other_speed = fragments(&machine);
    other_speed[2].1.sockets[0].devices[0].link.width = Some(8);
    let mut other_parent = fragments(&machine);
    let stolen = other_parent[5].1.sockets[0].devices[0].devices[0].clone();
    let mut copy = other_parent[0].clone();
    copy.1.sockets[0].devices[0].devices = vec![stolen];
    other_parent.push(("rank 8".into(), copy.1));
    let mut other_processor = fragments(&machine);
    other_processor[1].1.sockets[0].model = Some(1);
    for (parts, words) in [
        (
            other_speed,
            [
                "device 0000:80:00.0",
                "Some(16)",
                "rank 0",
                "Some(8)",
                "rank 2",
            ],
        ),
        (
            other_parent,
            [
                "GPU 0000:15:00.0",
                "behind 0000:84:00.0",
                "rank 5",
                "behind 0000:80:00.0",
                "rank 8",
            ],
        ),
        (
            other_processor,
            ["NUMA node 0", "Some(85)", "rank 0", "Some(1)", "rank 1"],
        ),
    ] {
        let error = fuse(&parts).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        for word in words {
            assert!(error.message().contains(word), "{word} is not in {error}");
        }
    }
}
