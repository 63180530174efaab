//! Tests that messages take the time that their flows predict.

use super::machines::case;
use super::pairs::{BYTES, measured_pairs, nested};
use crate::schedule::{GroupUnit, Groups, SchedulePattern};
use crate::topology::flows::Loads;
use crate::topology::hierarchy::LevelExchange::Direct;
use crate::topology::{
    Cluster, ClusterPort, MachineGraph, MessageSettings, Paths, PeerAccess, simulate_messages,
};
use crate::types::{Algorithm, Collective};

fn ring(nranks: usize) -> SchedulePattern {
    SchedulePattern {
        rings: 4,
        ..SchedulePattern::flat(Collective::AllReduce, Algorithm::Ring, nranks)
    }
}

fn direct(nranks: usize) -> SchedulePattern {
    SchedulePattern::flat(Collective::AllReduce, Algorithm::Direct, nranks)
}

fn levels(groups: usize, ranks: usize, between: Algorithm) -> SchedulePattern {
    SchedulePattern {
        groups: Groups::even_hosts(groups, ranks),
        between,
        ..SchedulePattern::flat(
            Collective::AllReduce,
            Algorithm::Hierarchical,
            groups * ranks,
        )
    }
}

fn milliseconds(cluster: &Cluster, pattern: &SchedulePattern, settings: &MessageSettings) -> f64 {
    simulate_messages(cluster, pattern, BYTES, settings).unwrap() as f64 / 1e6
}

#[test]
fn messages_agree_with_flows_on_all_machines() {
    let mut wrong = Vec::new();
    for name in ["A", "B", "C", "D", "E", "F", "G", "H", "I", "K"] {
        let case = case(name);
        let graph = MachineGraph::new(&case.machine);
        let paths = Paths::new(&graph, &case.access);
        let n = graph.gpus.len();
        let size = [4, 2][usize::from(matches!(name, "B" | "C" | "G"))];
        let gpus: Vec<usize> = (0..n).collect();
        let groups: Vec<&[usize]> = gpus.chunks(size).collect();
        let of_groups = nested(&groups, [Direct, Direct]).loads(&graph, &paths);
        let flows = [
            Loads::ring(&graph, &paths, &graph.by_rank()),
            Loads::direct(&graph, &paths),
            of_groups,
        ]
        .map(|loads| loads.time(&graph).milliseconds(BYTES));
        let cluster = Cluster::single(graph, paths);
        let patterns = [
            ring(n),
            direct(n),
            levels(n / size, size, Algorithm::Direct),
        ];
        for (pattern, flows) in patterns.iter().zip(flows) {
            let settings = MessageSettings {
                // On machine K, messages of the two-level schedule cross the links so fast that hops take as
                // long. Fewer passes mean fewer hops.
                passes: [16, 8][usize::from(name == "K")],
                ..MessageSettings::default()
            };
            let found = milliseconds(&cluster, pattern, &settings);
            if !(0.999..1.1).contains(&(found / flows)) {
                wrong.push(format!(
                    "{name} {}: {found:.2}, flows {flows:.2}",
                    pattern.algorithm
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn messages_on_measured_pairs_take_the_published_times() {
    let crossed = [0, 1, 2, 3, 4, 6, 5, 7];
    let dealt = [0, 4, 1, 5, 2, 6, 3, 7];
    let cases: [(SchedulePattern, &[usize], [f64; 2]); 7] = [
        (ring(8), &[], [11.5, 11.5]),
        (ring(8), &dealt, [349.0, 46.5]),
        (direct(8), &[], [199.0, 26.0]),
        (levels(4, 2, Algorithm::Direct), &[], [99.7, 13.3]),
        (levels(4, 2, Algorithm::Ring), &[], [10.6, 10.6]),
        (levels(2, 4, Algorithm::Direct), &[], [9.3, 9.3]),
        (levels(2, 4, Algorithm::Direct), &crossed, [50.2, 9.3]),
    ];
    for fans in [true, false] {
        let (graph, paths) = measured_pairs(fans);
        let cluster = Cluster::single(graph, paths);
        for (pattern, placement, published) in &cases {
            let settings = MessageSettings {
                placement: placement.to_vec(),
                ..MessageSettings::default()
            };
            let found = milliseconds(&cluster, pattern, &settings);
            let published = published[usize::from(!fans)];
            let error = (found - published).abs() / published;
            let what = (pattern.algorithm, placement, fans);
            assert!(error < 0.1, "{what:?}: {found:.2}, not {published}");
        }
    }
}

#[test]
fn groups_that_send_to_one_group_at_a_time_avoid_fans() {
    let pairs = [[0, 1], [2, 3], [4, 5], [6, 7]];
    let pattern = SchedulePattern {
        groups: Groups::of_members(GroupUnit::Switch, &pairs).unwrap(),
        ..levels(4, 2, Algorithm::Direct)
    };
    let [with, without] = [true, false].map(|fans| {
        let (graph, paths) = measured_pairs(fans);
        let cluster = Cluster::single(graph, paths);
        milliseconds(&cluster, &pattern, &MessageSettings::default())
    });
    // The second phase goes round the groups, so 3.5 S cross between the sockets.
    let crossing = 3.5 * BYTES as f64 / 82e6;
    assert!((1.0..1.1).contains(&(without / crossing)), "{without:.2}");
    // The two GPUs of a pair move on to the next group at different times, and in between the fan slows them
    // down. If each GPU sent to all groups at once, the schedule would take 99.7 ms.
    assert!((without..30.0).contains(&with), "{with:.2}");
}

/// Returns `hosts` machines K with a port of 25 GB/s for each GPU.
fn cluster_of_k(hosts: usize) -> Cluster {
    let port = |gpu| ClusterPort {
        mb_s: 25_000,
        gpus: vec![gpu],
    };
    let ports: Vec<ClusterPort> = (0..8).map(port).collect();
    let host = MachineGraph::new(&case("K").machine);
    Cluster::new(&host, &PeerAccess::Rule, hosts, &ports).unwrap()
}

#[test]
fn messages_agree_with_flows_between_hosts() {
    let cluster = cluster_of_k(8);
    let cases = [
        (ring(64), cluster.flat_ring(true)),
        (direct(64), cluster.flat_direct()),
        (levels(8, 8, Algorithm::Direct), cluster.rails(None)),
    ];
    for (pattern, loads) in cases {
        let flows = loads.time(&cluster.graph).milliseconds(BYTES);
        let found = milliseconds(&cluster, &pattern, &MessageSettings::default());
        let ratio = found / flows;
        assert!(
            (0.999..1.1).contains(&ratio),
            "{} {ratio}",
            pattern.algorithm
        );
    }
}

#[test]
fn messages_of_256_ranks_are_simulated() {
    let pattern = levels(32, 8, Algorithm::Direct);
    let settings = MessageSettings {
        passes: 2,
        ..MessageSettings::default()
    };
    let cluster = cluster_of_k(32);
    let found = milliseconds(&cluster, &pattern, &settings);
    let flows = cluster.rails(None).time(&cluster.graph);
    assert!(found > flows.milliseconds(BYTES), "{found}");
}

#[test]
fn one_message_takes_its_time_and_a_hop() {
    let case = case("A");
    let graph = MachineGraph::new(&case.machine);
    let paths = Paths::new(&graph, &case.access);
    let cluster = Cluster::single(graph, paths);
    let pattern = SchedulePattern {
        peer: 5,
        ..SchedulePattern::flat(Collective::SendRecv, Algorithm::Direct, 8)
    };
    let settings = MessageSettings {
        passes: 1,
        ..MessageSettings::default()
    };
    // 12 MB at 12 GB/s take 1 ms, and a hop takes 3 us.
    let time = simulate_messages(&cluster, &pattern, 12_000_000, &settings);
    assert_eq!(time, Ok(1_003_000));
}

#[test]
fn wrong_settings_are_refused() {
    let cluster = cluster_of_k(2);
    let default = MessageSettings::default();
    let no_pass = MessageSettings {
        passes: 0,
        ..default.clone()
    };
    let twice = MessageSettings {
        placement: vec![0, 1, 2, 3, 4, 5, 6, 6],
        ..default.clone()
    };
    let cases = [
        (direct(8), 1, &default, "8 ranks for a cluster of 16"),
        (direct(16), 1, &no_pass, "at least 1 pass"),
        (direct(16), 1, &twice, "names each of the 8 GPUs"),
        (direct(16), u64::MAX, &default, "use the flows"),
    ];
    for (pattern, bytes, settings, what) in cases {
        let error = simulate_messages(&cluster, &pattern, bytes, settings).unwrap_err();
        assert!(error.message().contains(what), "{error}");
    }
}
