//! A machine of four switch pairs whose measurements were published (local-inference-lab/rtx6kpro): 8 GPUs, two
//! PCIe switch chips of two partitions each, two sockets.

use super::machines::case;
use crate::schedule::GroupUnit;
use crate::topology::flows::{LinkTime, Loads};
use crate::topology::groups::Partition;
use crate::topology::hierarchy::{Hierarchy, LevelExchange};
use crate::topology::{
    MachineGraph, MeasuredLimits, PathType, Paths, PeerAccess, concurrent_rates, predict,
};
use std::fmt::Write;

pub const BYTES: u64 = 256 << 20;

/// Returns the measured limits. With `fans`, two GPUs of a pair that send to two root ports get 2.7 GB/s in all.
fn measurements(fans: bool) -> String {
    let mut text = String::new();
    for gpu in 0..8 {
        let switch = 0x80 + gpu / 2 * 2;
        writeln!(text, "link {:02x}:00.0 {switch:02x}:00.0 53700", 0x10 + gpu).unwrap();
    }
    for (pair, switch) in [0x80, 0x82, 0x84, 0x86].into_iter().enumerate() {
        writeln!(text, "link {switch:02x}:00.0 socket_{} 39000", pair / 2).unwrap();
        if fans {
            writeln!(text, "fan {switch:02x}:00.0 2 2 2700").unwrap();
        }
    }
    text + "connect 80:00.0 82:00.0 107000\nconnect 84:00.0 86:00.0 107000\n\
            link socket_0 socket_1 82000\npool 82000 socket_0>socket_1 socket_1>socket_0\n"
}

/// Returns the machine with its measured limits.
pub fn measured_pairs(fans: bool) -> (MachineGraph, Paths) {
    let mut graph = MachineGraph::new(&case("C").machine);
    let limits: MeasuredLimits = measurements(fans).parse().unwrap();
    limits.apply(&mut graph).unwrap();
    let paths = Paths::new(&graph, &PeerAccess::UpTo(PathType::Sys));
    (graph, paths)
}

/// Returns a schedule on `groups` with `exchanges` inside and between groups. GPUs at equal places of the
/// groups form a rail.
pub fn nested(groups: &[&[usize]], exchanges: [LevelExchange; 2]) -> Hierarchy {
    Hierarchy {
        partitions: vec![Partition {
            unit: GroupUnit::Switch,
            groups: groups.iter().map(|group| group.to_vec()).collect(),
        }],
        exchanges: exchanges.to_vec(),
        time: LinkTime::ZERO,
    }
}

fn gb_s(flows: &[(usize, usize)], fans: bool) -> f64 {
    let (graph, paths) = measured_pairs(fans);
    let rates = concurrent_rates(&graph, &paths, flows);
    rates.iter().sum::<u64>() as f64 / 1e9
}

#[test]
fn patterns_have_the_published_rates() {
    let all = |from: std::ops::Range<usize>, to: std::ops::Range<usize>| -> Vec<(usize, usize)> {
        from.flat_map(|a| to.clone().filter(move |&b| b != a).map(move |b| (a, b)))
            .collect()
    };
    let one_to_one = [(0, 4), (1, 5), (2, 6), (3, 7)];
    let both_ways: Vec<_> = one_to_one
        .iter()
        .flat_map(|&(a, b)| [(a, b), (b, a)])
        .collect();
    let cases: [(&[(usize, usize)], f64); 10] = [
        (&[(0, 4)], 39.0),
        (&[(0, 4), (2, 6)], 78.0),
        (&[(0, 4), (1, 5)], 39.0),
        (&[(0, 4), (0, 6)], 39.0),
        (&one_to_one, 78.0),
        (&both_ways, 82.0),
        (&all(0..4, 4..8), 5.4),
        (&[(0, 2), (1, 3)], 107.4),
        (&[(0, 2), (1, 3), (2, 0), (3, 1)], 214.8),
        (&all(0..4, 0..4), 214.8),
    ];
    for (flows, published) in cases {
        let found = gb_s(flows, true);
        let error = (found - published).abs() / published;
        assert!(error < 0.01, "{flows:?}: {found:.1} instead of {published}");
    }
    assert!((gb_s(&all(0..4, 4..8), false) - 78.0).abs() < 0.1);
}

#[test]
fn flows_give_the_published_times() {
    use LevelExchange::{Direct, Ring};
    let pairs: [&[usize]; 4] = [&[0, 1], &[2, 3], &[4, 5], &[6, 7]];
    let near: [&[usize]; 2] = [&[0, 1, 2, 3], &[4, 5, 6, 7]];
    let crossed: [&[usize]; 2] = [&[0, 1, 2, 3], &[4, 6, 5, 7]];
    for fans in [true, false] {
        let (graph, paths) = measured_pairs(fans);
        let by_rank: Vec<usize> = (0..8).collect();
        let dealt = [0, 4, 1, 5, 2, 6, 3, 7];
        let of = |hierarchy: Hierarchy| hierarchy.loads(&graph, &paths);
        // For each schedule its loads, the published times of its messages in ms with fans and without, and
        // the tolerance. Messages may take up to 10 % longer than flows.
        let cases = [
            (Loads::ring(&graph, &paths, &by_rank), [11.5, 11.5], 0.03),
            (Loads::ring(&graph, &paths, &dealt), [349.0, 46.5], 0.03),
            (Loads::direct(&graph, &paths), [199.0, 26.0], 0.03),
            (of(nested(&pairs, [Direct, Direct])), [99.7, 13.3], 0.03),
            (of(nested(&pairs, [Direct, Ring])), [10.6, 10.6], 0.1),
            (of(nested(&near, [Direct, Direct])), [9.3, 9.3], 0.1),
            (of(nested(&crossed, [Direct, Direct])), [50.2, 9.3], 0.1),
        ];
        for (at, (loads, published, tolerance)) in cases.iter().enumerate() {
            let found = loads.time(&graph).milliseconds(BYTES);
            let published = published[usize::from(!fans)];
            let error = (found - published).abs() / published;
            println!("{at} fans {fans}: {found:.2} published {published}");
            assert!(
                error < *tolerance,
                "{at}: {found:.2} instead of {published}"
            );
        }
    }
}

#[test]
fn the_search_avoids_fans() {
    let (graph, paths) = measured_pairs(true);
    let prediction = predict(&graph, &paths);
    let ms = |time: LinkTime| time.milliseconds(BYTES);
    assert!(ms(prediction.best()) < 9.0, "{prediction:?}");
    assert!(ms(prediction.best_direct()) < 9.0, "{prediction:?}");
    assert!(ms(prediction.bound) <= ms(prediction.best()) + 1e-9);
    // The two sockets exchange at least twice the message over a pool of 82 GB/s.
    assert!(ms(prediction.bound) > 6.5, "{:?}", ms(prediction.bound));
    let (ring, time) = &prediction.best_ring;
    assert_eq!(Loads::ring(&graph, &paths, ring).time(&graph), *time);
    assert!(ms(prediction.ring_set.time) <= ms(*time));
}

#[test]
fn the_search_avoids_fans_where_ranks_are_dealt() {
    let (mut graph, _) = measured_pairs(true);
    for order in [[0, 1, 2, 3, 4, 6, 5, 7], [0, 4, 1, 5, 2, 6, 3, 7]] {
        for (rank, gpu) in order.into_iter().enumerate() {
            graph.gpus[gpu].rank = Some(rank as u32);
        }
        let paths = Paths::new(&graph, &PeerAccess::Rule);
        let prediction = predict(&graph, &paths);
        let ms = |time: LinkTime| time.milliseconds(BYTES);
        assert!(ms(prediction.best_ring.1) < 11.5, "{order:?}");
        assert!(ms(prediction.ring_set.time) < 11.5, "{order:?}");
        assert!(ms(prediction.best_direct()) < 9.0, "{order:?}");
    }
}
