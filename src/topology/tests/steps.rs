//! Tests that the flows of each schedule are the sums of its steps.

use super::hostile::peak_kib;
use super::machines::case;
use super::pairs::nested;
use crate::schedule::{Groups, SchedulePattern, walk};
use crate::sys::fork::tests::{in_child, processor_time};
use crate::topology::flows::Loads;
use crate::topology::hierarchy::LevelExchange::{Direct, Ring};
use crate::topology::{
    BusId, Cluster, ClusterPort, MachineGraph, Nic, Paths, PciDevice, PeerAccess,
};
use crate::types::{Algorithm, Collective};

fn all_reduce(algorithm: Algorithm, nranks: usize, rings: usize) -> SchedulePattern {
    SchedulePattern {
        rings,
        ..SchedulePattern::flat(Collective::AllReduce, algorithm, nranks)
    }
}

fn levels(groups: usize, ranks: usize, between: Algorithm) -> SchedulePattern {
    SchedulePattern {
        groups: Groups::even_hosts(groups, ranks),
        between,
        ..all_reduce(Algorithm::Hierarchical, groups * ranks, 1)
    }
}

/// Counts the loads of the first host's links from the schedule steps of all ranks. A unit is a chunk.
fn count(cluster: &Cluster, pattern: &SchedulePattern) -> Loads {
    let gpus = cluster.graph.gpus.len();
    let order = cluster.graph.by_rank();
    let mut loads = Loads::new(&cluster.graph, pattern.parts() as u64);
    for from in 0..pattern.nranks {
        let schedule = pattern.schedule(from).unwrap();
        for visit in walk(&schedule, 1) {
            for &to in schedule.steps[visit.step].send_to.iter() {
                let [from, to] = [from, to as usize].map(|rank| (rank / gpus, order[rank % gpus]));
                match (from.0, to.0) {
                    (0, 0) => loads.send(&cluster.paths, from.1, to.1, 1),
                    (0, _) => loads.add(cluster.out(from.1), 1),
                    (_, 0) => loads.add(&cluster.back(to.1), 1),
                    _ => {}
                }
            }
        }
    }
    loads
}

fn assert_equal(cluster: &Cluster, flows: &Loads, pattern: &SchedulePattern) {
    let steps = count(cluster, pattern);
    for link in 0..cluster.graph.links.len() {
        assert_eq!(
            flows.units(link) * steps.whole(),
            steps.units(link) * flows.whole(),
            "{} of {} ranks, {:?}",
            pattern.algorithm,
            pattern.nranks,
            cluster.graph.links[link]
        );
    }
}

#[test]
fn flows_inside_a_host_are_the_sums_of_steps() {
    for name in ["A", "B", "C", "D", "E", "F", "G", "H", "I", "K"] {
        let case = case(name);
        let graph = MachineGraph::new(&case.machine);
        let paths = Paths::new(&graph, &case.access);
        let n = graph.gpus.len();
        let cluster = Cluster::single(graph.clone(), paths.clone());
        let ring = Loads::ring(&graph, &paths, &graph.by_rank());
        assert_equal(&cluster, &ring, &all_reduce(Algorithm::Ring, n, 2));
        assert_equal(
            &cluster,
            &cluster.flat_ring(true),
            &all_reduce(Algorithm::Ring, n, 2),
        );
        assert_equal(
            &cluster,
            &cluster.flat_ring(false),
            &all_reduce(Algorithm::Ring, n, 1),
        );
        let direct = Loads::direct(&graph, &paths);
        assert_equal(&cluster, &direct, &all_reduce(Algorithm::Direct, n, 1));
        for size in [2, 4].into_iter().filter(|&size| size < n) {
            let gpus: Vec<usize> = (0..n).collect();
            let groups: Vec<&[usize]> = gpus.chunks(size).collect();
            let flows = nested(&groups, [Direct, Direct]).loads(&graph, &paths);
            assert_equal(&cluster, &flows, &levels(n / size, size, Algorithm::Direct));
            // In schedules a ring between groups sends in one direction; in flows it sends in both. On a tree
            // of PCIe links, either form loads each link alike.
            if "ABCDF".contains(name) {
                let flows = nested(&groups, [Direct, Ring]).loads(&graph, &paths);
                assert_equal(&cluster, &flows, &levels(n / size, size, Algorithm::Ring));
            }
        }
    }
}

/// Returns hosts of machine `name` with as many ports, of 25 GB/s each, as `gpus` has groups.
fn cluster(name: &'static str, hosts: usize, gpus: &[&[usize]]) -> Cluster {
    let port = |gpus: &&[usize]| ClusterPort {
        mb_s: 25_000,
        gpus: gpus.to_vec(),
    };
    let ports: Vec<ClusterPort> = gpus.iter().map(port).collect();
    let case = case(name);
    let host = MachineGraph::new(&case.machine);
    Cluster::new(&host, &case.access, hosts, &ports).unwrap()
}

const EACH: [&[usize]; 8] = [&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7]];
const HALVES: [&[usize]; 2] = [&[0, 1, 2, 3], &[4, 5, 6, 7]];

#[test]
fn flows_between_hosts_are_the_sums_of_steps() {
    for (name, ports) in [("K", &EACH[..]), ("B", &HALVES[..]), ("H", &EACH[..])] {
        for hosts in 2..=8 {
            let cluster = cluster(name, hosts, ports);
            let n = cluster.ranks();
            assert_equal(
                &cluster,
                &cluster.flat_ring(true),
                &all_reduce(Algorithm::Ring, n, 2),
            );
            assert_equal(
                &cluster,
                &cluster.flat_ring(false),
                &all_reduce(Algorithm::Ring, n, 1),
            );
            assert_equal(
                &cluster,
                &cluster.flat_direct(),
                &all_reduce(Algorithm::Direct, n, 1),
            );
            let rails = cluster.rails(None);
            for between in [Algorithm::Direct, Algorithm::Ring] {
                assert_equal(&cluster, &rails, &levels(hosts, 8, between));
            }
        }
    }
}

/// The limits are those of the published description, for one core. A child counts only its own processor time and memory.
#[test]
fn a_hundred_thousand_ranks_take_little_time_and_memory() {
    const MOST_SECONDS: u64 = 10;
    const MOST_KIB: u64 = 1 << 20;
    assert!(in_child(|| {
        let before = peak_kib();
        let time = processor_time(assert_published_times);
        time.as_secs() < MOST_SECONDS && peak_kib() - before < MOST_KIB
    }));
}

#[test]
fn a_hundred_thousand_ranks_take_the_published_times() {
    assert_published_times();
}

fn assert_published_times() {
    let cluster = cluster("K", 12_500, &EACH);
    assert_eq!(cluster.ranks(), 100_000);
    let bytes = 256 << 20;
    let ms = |loads: Loads| loads.time(&cluster.graph).milliseconds(bytes);
    assert!((ms(cluster.rails(None)) - 2.68).abs() < 0.01);
    assert!((ms(cluster.flat_ring(false)) - 21.47).abs() < 0.01);
    assert!((ms(cluster.flat_ring(true)) - 10.74).abs() < 0.01);
    // Groups inside the hosts own equal parts too.
    let inside = nested(&HALVES, [Direct, Direct]);
    assert!((ms(cluster.rails(Some(&inside))) - 2.68).abs() < 0.01);
    // A port for four GPUs carries the parts of all four.
    let shared = self::cluster("K", 12_500, &HALVES);
    let time = shared.rails(None).time(&shared.graph).milliseconds(bytes);
    assert!((time - 4.0 * 2.684).abs() < 0.01, "{time}");
}

#[test]
fn ports_that_do_not_fit_are_refused() {
    let host = MachineGraph::new(&case("K").machine);
    let port = |gpus: &[usize]| ClusterPort {
        mb_s: 25_000,
        gpus: gpus.to_vec(),
    };
    let cases = [
        (0, vec![], "at least one host"),
        (2, vec![port(&[0, 1, 2])], "GPU 3 is on no port"),
        (2, vec![port(&[0]), port(&[0])], "GPU 0 is on two ports"),
        (2, vec![port(&[8])], "GPU 8, but a host has 8"),
    ];
    for (hosts, ports, what) in cases {
        let error = Cluster::new(&host, &PeerAccess::Rule, hosts, &ports).unwrap_err();
        assert!(error.message().contains(what), "{error}");
    }
}

#[test]
fn data_for_other_hosts_shares_the_way_to_its_network_device() {
    let mut machine = case("A").machine;
    // A device of 100 Gbit/s beside the GPUs of each switch.
    for (number, switch) in machine.sockets[0].devices.iter_mut().enumerate() {
        let bus_id = BusId::new(0, 0x40 + number as u8, 0, 0);
        switch.devices.push(PciDevice {
            link: switch.link,
            nics: vec![Nic {
                name: format!("nic{number}"),
                dev: number as u32,
                speed: Some(100_000),
                ..Nic::default()
            }],
            ..PciDevice::new(bus_id)
        });
    }
    let graph = MachineGraph::new(&machine);
    let rule = PeerAccess::Rule;
    let ms = |cluster: &Cluster| {
        let loads = cluster.rails(None);
        let (time, _) = loads.fullest(&cluster.graph).unwrap();
        time.milliseconds(256 << 20)
    };
    let near = Cluster::with_nics(graph.clone(), &rule, 2, &[0, 0, 0, 0, 1, 1, 1, 1]).unwrap();
    let far = Cluster::with_nics(graph.clone(), &rule, 2, &[1, 1, 1, 1, 0, 0, 0, 0]).unwrap();
    // Within hosts a way out carries 4 S at 12 GB/s; data for the far device adds half of S each way.
    assert!((ms(&near) - 89.48).abs() < 0.01, "{}", ms(&near));
    assert!((ms(&far) - 89.48 * 1.25).abs() < 0.01, "{}", ms(&far));
    let four = [0, 0, 0, 0];
    let error = Cluster::with_nics(graph.clone(), &rule, 2, &four).unwrap_err();
    assert!(error.message().contains("GPU 4 is on no port"), "{error}");
    let error = Cluster::with_nics(graph, &rule, 2, &[2; 8]).unwrap_err();
    assert!(
        error.message().contains("GPU 0 to network device 2"),
        "{error}"
    );
}
