//! Topologies of communicators: ranks on some or all GPUs, in any order.

use super::machines::case;
use super::pairs::measured_pairs;
use crate::schedule::{Groups, RankOrder};
use crate::topology::{MachineGraph, PeerAccess, RankTopology};

fn of(name: &'static str, gpus: &[usize]) -> RankTopology {
    let graph = MachineGraph::new(&case(name).machine);
    RankTopology::new(&graph, gpus, &PeerAccess::Rule).unwrap()
}

fn members(topology: &RankTopology) -> Vec<Vec<u32>> {
    let groups = topology.groups();
    (0..groups.count())
        .map(|group| groups.ranks(group).to_vec())
        .collect()
}

#[test]
fn ranks_that_are_dealt_to_switches_get_a_ring_and_groups_by_switch() {
    let dealt = of("A", &[0, 4, 1, 5, 2, 6, 3, 7]);
    assert_eq!(members(&dealt), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    let crossings = (0..8).filter(|&at| {
        let [a, b] = [at, (at + 1) % 8].map(|at| dealt.order().at(at));
        a % 2 != b % 2
    });
    assert_eq!(crossings.count(), 2, "{:?}", dealt.order());
    let in_order = of("A", &[0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(*in_order.order(), RankOrder::BY_RANK);
    assert_ne!(dealt.fingerprint(), in_order.fingerprint());
}

/// Switches 0 and 1 are on one socket, and 2 and 3 on the other.
#[test]
fn groups_have_the_order_of_the_machine_however_ranks_are_dealt() {
    let dealt = of("B", &[0, 4, 1, 5, 2, 6, 3, 7]);
    assert_eq!(members(&dealt), [[0, 2], [4, 6], [1, 3], [5, 7]]);
    let reversed = of("B", &[7, 6, 5, 4, 3, 2, 1, 0]);
    assert_eq!(members(&reversed), [[7, 6], [5, 4], [3, 2], [1, 0]]);
    let graph = MachineGraph::new(&case("B").machine);
    let gpus = [0, 4, 1, 5, 2, 6, 3, 7];
    // Peer access inside the switches, by pairs of ranks.
    let pairs = (0..64).map(|pair| gpus[pair / 8] / 2 == gpus[pair % 8] / 2);
    let access = PeerAccess::Pairs(pairs.collect());
    let by_pairs = RankTopology::new(&graph, &gpus, &access).unwrap();
    assert_eq!(by_pairs.groups(), dealt.groups());
}

#[test]
fn ranks_of_one_switch_are_one_group_in_rank_order() {
    let one = of("A", &[3, 1, 0, 2]);
    assert_eq!(*one.groups(), Groups::ONE);
    assert_eq!(*one.order(), RankOrder::BY_RANK);
    let pair_and_one = of("B", &[0, 1, 2]);
    assert_eq!(members(&pair_and_one), [vec![0, 1], vec![2]]);
}

#[test]
fn the_fullest_link_gives_the_time() {
    let topology = of("A", &[0, 1, 2, 3, 4, 5, 6, 7]);
    let inside = topology.seconds([[(0, 1, 12_000_000), (2, 3, 12_000_000)]]);
    assert!((inside - 1e-3).abs() < 1e-12, "{inside}");
    let across = topology.seconds([[(0, 4, 12_000_000), (1, 5, 12_000_000)]]);
    assert!((across - 2e-3).abs() < 1e-12, "{across}");
    let none: [[(usize, usize, u64); 0]; 1] = [[]];
    assert_eq!(topology.seconds(none), 0.0);
}

#[test]
fn pools_and_fans_count_for_the_time_and_the_fingerprint() {
    let (graph, _) = measured_pairs(true);
    let of = |graph: &MachineGraph| {
        let gpus = [0, 1, 2, 3, 4, 5, 6, 7];
        RankTopology::new(graph, &gpus, &PeerAccess::Rule).unwrap()
    };
    let topology = of(&graph);
    let to_two_ports = [(0, 4, 2_700_000), (1, 6, 2_700_000)];
    let capped = topology.seconds([to_two_ports]);
    assert!((capped - 2e-3).abs() < 1e-6, "{capped}");
    let one_by_one = topology.seconds(to_two_ports.map(|message| [message]));
    assert!((one_by_one - 5.4e-3 / 39.0).abs() < 1e-6, "{one_by_one}");
    // In each direction, 41 MB cross between the sockets; the pool of 82 GB/s carries both in 1 ms.
    let both_ways = [0, 2, 4, 6].map(|from| (from, (from + 4) % 8, 20_500_000));
    let pooled = topology.seconds([both_ways]);
    assert!((pooled - 1e-3).abs() < 1e-6, "{pooled}");
    let mut without = graph.clone();
    without.fans.clear();
    assert_ne!(of(&without).fingerprint(), topology.fingerprint());
    without.pools.clear();
    assert_ne!(of(&without).fingerprint(), topology.fingerprint());
}

#[test]
fn gpus_that_do_not_exist_or_stand_twice_are_refused() {
    let graph = MachineGraph::new(&case("A").machine);
    for (gpus, part) in [
        (&[0, 8][..], "rank 1 has no GPU"),
        (&[3, 3], "two ranks use GPU 0000:13:00.0"),
    ] {
        let error = RankTopology::new(&graph, gpus, &PeerAccess::Rule).unwrap_err();
        assert!(error.message().contains(part), "{error}");
    }
}
