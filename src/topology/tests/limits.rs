//! Tests of pools, fans and measured limits.

use super::machines::case;
use super::pairs::measured_pairs;
use crate::schedule::GroupUnit;
use crate::topology::flows::{LinkTime, Loads};
use crate::topology::groups::Partition;
use crate::topology::{
    BandwidthOrigin, Bottleneck, Hierarchy, LevelExchange, MachineGraph, MeasuredLimits, Paths,
    concurrent_rates, predict,
};
use std::collections::HashSet;

#[test]
fn fans_are_judged_on_one_phase() {
    let (graph, paths) = measured_pairs(true);
    let time = |end_phase: bool| {
        let mut loads = Loads::new(&graph, 1);
        loads.send(&paths, 0, 4, 1);
        if end_phase {
            loads.end_phase();
        }
        loads.send(&paths, 1, 6, 1);
        loads.time(&graph).milliseconds(2_700_000)
    };
    // Two GPUs send 2.7 MB each. In one phase both together get the 2.7 GB/s of the fan; in two phases each
    // gets 39 GB/s.
    assert!((time(false) - 2.0).abs() < 1e-3, "{}", time(false));
    let apart = 5.4 / 39.0;
    assert!((time(true) - apart).abs() < 1e-3, "{}", time(true));
}

#[test]
fn a_fan_slows_down_only_the_phase_in_which_it_holds() {
    let (graph, paths) = measured_pairs(true);
    let mut loads = Loads::new(&graph, 1);
    loads.send(&paths, 0, 4, 39);
    loads.end_phase();
    loads.send(&paths, 0, 4, 2);
    loads.send(&paths, 1, 6, 1);
    // 39 MB at 39 GB/s, then 3 MB at 2.7 GB/s.
    let time = loads.time(&graph).milliseconds(1_000_000);
    assert!((time - 1.0 - 3.0 / 2.7).abs() < 1e-3, "{time}");
    let way_out = graph
        .up(graph.nodes[graph.gpus[0].node].parent.unwrap())
        .unwrap();
    let fullest = loads.fullest(&graph).unwrap().1;
    assert_eq!(fullest, Bottleneck::Link(way_out));
}

#[test]
fn rates_are_max_min_fair() {
    let (graph, paths) = measured_pairs(true);
    let mut random = 1u64;
    let mut next = |below: usize| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    for _ in 0..200 {
        let flows: Vec<(usize, usize)> = (0..1 + next(20))
            .map(|_| {
                let from = next(8);
                (from, (from + 1 + next(7)) % 8)
            })
            .collect();
        let rates = concurrent_rates(&graph, &paths, &flows);
        let crosses = |at: usize, links: &[usize]| {
            let (from, to) = flows[at];
            paths
                .get(from, to)
                .links
                .iter()
                .any(|link| links.contains(link))
        };
        // All links and pools with their MB/s. Whether a link falls to the 2,700 MB/s of its fan is counted
        // here independently.
        let mut limits: Vec<(Vec<usize>, u64)> = graph
            .pools
            .iter()
            .map(|pool| (pool.links.clone(), pool.mb_s.into()))
            .collect();
        for link in 0..graph.links.len() {
            let through = || (0..flows.len()).filter(|&at| crosses(at, &[link]));
            let distinct =
                |key: &dyn Fn(usize) -> usize| through().map(key).collect::<HashSet<_>>().len();
            let has_fan = graph.fans.iter().any(|fan| fan.link == link);
            let ports = distinct(&|at| flows[at].1 / 2);
            let is_capped = has_fan && distinct(&|at| flows[at].0) > 1 && ports > 1;
            let mb_s = if is_capped {
                2_700
            } else {
                graph.links[link].bandwidth.mb_s
            };
            limits.push((vec![link], mb_s.into()));
        }
        let mut has_bottleneck = vec![false; flows.len()];
        for (links, mb_s) in limits {
            let sharing: Vec<usize> = (0..flows.len()).filter(|&at| crosses(at, &links)).collect();
            let sum: u64 = sharing.iter().map(|&at| rates[at]).sum();
            assert!(sum <= mb_s * 1_000_000, "{flows:?} {rates:?}");
            let fastest = sharing.iter().map(|&at| rates[at]).max().unwrap_or(0);
            // Rates are rounded down to a byte a second.
            if sum + sharing.len() as u64 * 20 >= mb_s * 1_000_000 {
                sharing
                    .iter()
                    .filter(|&&at| rates[at] + 20 >= fastest)
                    .for_each(|&at| has_bottleneck[at] = true);
            }
        }
        assert!(has_bottleneck.iter().all(|&has| has), "{flows:?} {rates:?}");
    }
}

#[test]
fn limits_that_do_not_fit_are_refused_and_change_nothing() {
    let graph = MachineGraph::new(&case("C").machine);
    let cases = [
        (
            "link 10:00.0 99:00.0 5",
            "line 1: the machine has no node 99:00.0",
        ),
        (
            "link 10:00.0 11:00.0 5",
            "line 1: no link leads from 10:00.0 to 11:00.0",
        ),
        (
            "link 10:00.0 80:00.0 5\n\nfan 10:00.0 2 2 5",
            "line 3: 10:00.0 names 0 switches",
        ),
        ("fan socket_0 2 2 5", "line 1: socket_0 names 0 switches"),
        (
            "connect 80:00.0 80:00.0 5",
            "line 1: 80:00.0 cannot be connected with itself",
        ),
        (
            "connect 80:00.0 socket_0 5",
            "line 1: socket_0 is no switch",
        ),
        (
            "pool 5 80:00.0>82:00.0",
            "line 1: no link leads from 80:00.0 to 82:00.0",
        ),
    ];
    for (text, what) in cases {
        let limits: MeasuredLimits = text.parse().unwrap();
        let mut changed = graph.clone();
        let error = limits.apply(&mut changed).unwrap_err();
        assert!(error.message().contains(what), "{error}");
        assert_eq!(changed, graph);
    }
}

#[test]
fn measured_limits_win_and_later_lines_replace_earlier() {
    let mut graph = MachineGraph::new(&case("C").machine);
    let text = "link 10:00.0 80:00.0 7\nlink 10:00.0>80:00.0 8\nfan 80:00.0 2 2 9\n\
                fan 80:00.0 2 2 10\nconnect 80:00.0 82:00.0 11\nconnect 82:00.0 80:00.0 12\n\
                pool 13 10:00.0>80:00.0\npool 14 10:00.0>80:00.0\n";
    let before = graph.links.len();
    let limits: MeasuredLimits = text.parse().unwrap();
    limits.apply(&mut graph).unwrap();
    let out = graph.up(graph.gpus[0].node).unwrap();
    let found = [out, MachineGraph::reverse(out), before, before + 1].map(|link| {
        let bandwidth = graph.links[link].bandwidth;
        assert_eq!(bandwidth.origin, BandwidthOrigin::Measured);
        bandwidth.mb_s
    });
    assert_eq!(found, [8, 7, 12, 12]);
    assert_eq!(graph.links.len(), before + 2);
    assert_eq!((graph.fans.len(), graph.fans[0].mb_s), (1, 10));
    assert_eq!((graph.pools.len(), graph.pools[0].mb_s), (1, 14));
}

/// Returns machine C with the limits of `text`.
fn machine_c(text: &str) -> (MachineGraph, Paths) {
    let case = case("C");
    let mut graph = MachineGraph::new(&case.machine);
    let limits: MeasuredLimits = text.parse().unwrap();
    limits.apply(&mut graph).unwrap();
    let paths = Paths::new(&graph, &case.access);
    (graph, paths)
}

#[test]
fn a_pool_raises_the_bound_and_the_best_time_alike() {
    for (text, expected) in [
        ("", 16.78),
        ("pool 16000 socket_0>socket_1 socket_1>socket_0", 33.55),
    ] {
        let (graph, paths) = machine_c(text);
        let prediction = predict(&graph, &paths);
        for time in [
            prediction.bound,
            prediction.best(),
            prediction.best_direct(),
        ] {
            let found = time.milliseconds(256 << 20);
            assert!((found - expected).abs() < 0.01, "{text}: {found:.2}");
        }
    }
}

#[test]
fn levels_are_phases_of_their_own() {
    // GPUs of a pair send to the other pair of their socket, and at the next level to a pair of the other socket.
    let pairs = [[0, 1], [2, 3], [4, 5], [6, 7]].map(|pair| pair.to_vec());
    let sockets = [[0, 1, 2, 3], [4, 5, 6, 7]].map(|socket| socket.to_vec());
    let partition = |groups: &[Vec<usize>]| Partition {
        unit: GroupUnit::Switch,
        groups: groups.to_vec(),
    };
    let three_levels = Hierarchy {
        partitions: vec![partition(&pairs), partition(&sockets)],
        exchanges: vec![LevelExchange::Direct; 3],
        time: LinkTime::ZERO,
    };
    let (graph, paths) = machine_c("fan 80:00.0 2 2 100");
    let levels = three_levels.loads(&graph, &paths).time(&graph);
    assert_eq!(levels.milliseconds(256 << 20).round(), 17.0);
    // In a single exchange between all pairs, each GPU sends to all other pairs at once, so the fan slows the
    // links down.
    let mut two_levels = three_levels;
    two_levels.partitions.pop();
    two_levels.exchanges.pop();
    let at_once = two_levels.loads(&graph, &paths).time(&graph);
    assert!(at_once.milliseconds(256 << 20) > 2_000.0);
}

#[test]
fn rings_are_slowed_down_by_fans_that_none_can_avoid() {
    let (graph, paths) = machine_c("fan 80:00.0 1 1 1000");
    let prediction = predict(&graph, &paths);
    // Each ring leaves the pair by two edges, which carry 7/8 of the message each way.
    let expected = LinkTime::new(14, 8, 1_000);
    assert_eq!(prediction.best_ring.1, expected);
    assert_eq!(prediction.ring_set.time, expected);
    assert_eq!(prediction.ring_by_rank, expected);
}
