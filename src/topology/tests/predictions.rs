//! Predictions of an all_reduce of 256 MiB, in milliseconds.

use super::machines::{case, connect, dealt, each_gpu, switched};
use crate::testing::Random;
use crate::topology::{
    AllReducePrediction, BusId, GpuLink, GpuLinkKind, LinkKind, LinkTime, Machine, MachineGraph,
    PathType, Paths, PciDevice, PciLink, PeerAccess, predict, read_xml, write_xml,
};

/// The predicted times of a machine, without a codec: ring by rank, ring with ranks dealt to groups, direct,
/// best schedule, bound. Then with `linear8`: direct, and best schedule of direct exchanges.
struct Row(&'static str, [f64; 7]);

const BYTES: u64 = 256 << 20;

/// Bytes of `linear8` with blocks of 256 elements, per byte of fp32.
const LINEAR8: f64 = (256.0 + 4.0) / 1024.0;

const ROWS: [Row; 10] = [
    Row("A", [39.15, 156.59, 89.48, 39.15, 39.15, 22.72, 9.94]),
    Row("B", [46.98, 187.90, 107.37, 39.15, 39.15, 27.26, 9.94]),
    Row("C", [29.36, 117.44, 67.11, 16.78, 16.78, 17.04, 4.26]),
    Row("D", [10.49, 41.94, 33.55, 10.49, 10.49, 8.52, 2.66]),
    Row("E", [78.29, 187.90, 107.37, 78.29, 78.29, 27.26, 19.88]),
    Row("F", [29.36, 117.44, 67.11, 19.57, 19.57, 17.04, 4.97]),
    Row("G", [16.78, 33.55, 22.37, 11.18, 11.18, 5.68, 2.84]),
    Row("H", [46.98, 93.95, 80.53, 3.83, 3.26, 20.45, 1.70]),
    Row("I", [14.68, 29.36, 25.17, 8.39, 4.89, 6.39, 2.13]),
    Row("K", [1.27, 1.27, 1.27, 1.27, 1.27, 0.32, 0.32]),
];

/// Returns the groups to which ranks are dealt in turn.
fn groups_to_deal(name: &str) -> Vec<Vec<usize>> {
    let of = |size: usize, count: usize| -> Vec<Vec<usize>> {
        (0..count)
            .map(|at| (at * size..(at + 1) * size).collect())
            .collect()
    };
    match name {
        "D" => of(4, 4),
        "G" => of(2, 2),
        "I" => vec![vec![0], vec![1, 2, 3], vec![4, 5], vec![6, 7]],
        _ => of(4, 2),
    }
}

#[test]
fn machines_have_the_published_predictions() {
    let mut wrong = Vec::new();
    for Row(name, published) in ROWS {
        let case = case(name);
        let of = |machine| {
            let graph = MachineGraph::new(machine);
            let paths = Paths::new(&graph, &case.access);
            predict(&graph, &paths)
        };
        let prediction = of(&case.machine);
        let mut turned = case.machine.clone();
        dealt(&mut turned, &groups_to_deal(name));
        let dealt = of(&turned);
        let ms = |time: crate::topology::LinkTime| time.milliseconds(BYTES);
        let found = [
            ms(prediction.ring_by_rank),
            ms(dealt.ring_by_rank),
            ms(prediction.direct),
            ms(prediction.best()),
            ms(prediction.bound),
            ms(prediction.direct) * LINEAR8,
            ms(prediction.best_direct()) * LINEAR8,
        ];
        println!("{name} {found:.2?} groups {:?}", prediction.groups);
        for (found, published) in found.iter().zip(published) {
            if (found - published).abs() > 0.01 * published {
                wrong.push(format!("{name}: {found:.2} instead of {published}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Without peer access all data goes over PCIe, as if the machine had no NVLink.
#[test]
fn nvlink_without_peer_access_counts_for_nothing() {
    for name in ["G", "H", "I", "K"] {
        let mut machine = case(name).machine;
        let of = |machine: &Machine| {
            let graph = MachineGraph::new(machine);
            predict(&graph, &Paths::new(&graph, &PeerAccess::Never))
        };
        let with = of(&machine);
        each_gpu(&mut machine, &mut |gpu| gpu.links.clear());
        let without = of(&machine);
        assert_eq!(with.partitions, without.partitions, "{name}");
        let times = |p: &AllReducePrediction| [p.bound, p.best(), p.best_direct(), p.direct];
        assert_eq!(times(&with), times(&without), "{name}");
    }
}

/// Returns a machine of two POWER9 processors, each with two GPUs, whose NVLinks lead to each other and to their processor,
/// three each way. PCIe links have `gb_s`, or unknown speed.
fn power9(gb_s: Option<u32>) -> Machine {
    let link = |target: BusId, class: u32| GpuLink {
        kind: GpuLinkKind::NvLink,
        target: Some(target),
        target_class: Some(class),
        count: 3,
        bandwidth: None,
    };
    let mut machine = case("F").machine;
    for (number, socket) in machine.sockets.iter_mut().enumerate() {
        socket.arch = "ppc64le".into();
        socket.devices.truncate(2);
        let addresses: Vec<BusId> = socket.devices.iter().map(|device| device.bus_id).collect();
        for (at, device) in socket.devices.iter_mut().enumerate() {
            device.link = PciLink {
                speed: gb_s.map(|gb_s| gb_s * 80 / 12),
                width: gb_s.map(|_| 16),
            };
            let gpu = device.gpu.as_mut().unwrap();
            (gpu.dev, gpu.rank) = (2 * number as u32 + at as u32, None);
            gpu.links.push(link(addresses[1 - at], 0x03_0200));
            gpu.links
                .push(link(BusId::new(0, 0, 0, number as u8), 0x06_8001));
        }
    }
    machine
}

/// NVLinks of 60 GB/s to the processors carry data to the other socket, which is 32 GB/s away. If PCIe is slower than this,
/// a GPU could otherwise not fill the link between the sockets.
#[test]
fn nvlink_to_the_processor_carries_data_to_other_sockets() {
    for (pcie, is_over_nvlink) in [(None, true), (Some(12), true), (Some(96), false)] {
        let graph = MachineGraph::new(&power9(pcie));
        for access in [PeerAccess::Rule, PeerAccess::UpTo(PathType::Sys)] {
            let paths = Paths::new(&graph, &access);
            let path = paths.get(0, 3);
            assert_eq!(path.class, PathType::Sys);
            let classes: Vec<LinkKind> = path.links.iter().map(|&l| graph.links[l].class).collect();
            let own = if is_over_nvlink {
                LinkKind::NvLink
            } else {
                LinkKind::Pcie
            };
            assert_eq!(classes, [own, LinkKind::Socket, own], "{pcie:?}");
            assert_eq!(
                path.links[0],
                MachineGraph::reverse(paths.get(3, 0).links[2])
            );
            assert_eq!(paths.get(0, 1).class, PathType::Nvl);
            let prediction = predict(&graph, &paths);
            let sockets = LinkTime::new(1, 1, 32_000);
            assert_eq!(
                [prediction.bound, prediction.best()],
                [sockets; 2],
                "{pcie:?}"
            );
        }
    }
}

/// An NVLink from one switch to the other leaves the switches of A as groups. NVLinks between all GPUs of a socket of C make
/// islands, which are better than its pairs behind switches.
#[test]
fn groups_are_those_of_the_fastest_way_out() {
    let of = |machine: &Machine, access: &PeerAccess| {
        let graph = MachineGraph::new(machine);
        predict(&graph, &Paths::new(&graph, access)).groups
    };
    let even = |groups: usize, size: usize| -> Vec<Vec<usize>> {
        let first = (0..groups).map(|group| group * size);
        first.map(|first| (first..first + size).collect()).collect()
    };
    for (name, groups, size) in [
        ("A", 2, 4),
        ("B", 4, 2),
        ("C", 4, 2),
        ("D", 4, 4),
        ("E", 2, 4),
        ("F", 2, 4),
        ("G", 2, 2),
        ("H", 2, 4),
        ("I", 2, 4),
        ("K", 1, 8),
    ] {
        let case = case(name);
        assert_eq!(
            of(&case.machine, &case.access),
            even(groups, size),
            "{name}"
        );
    }
    // The GPUs of each half of C have NVLinks to each other.
    let mesh = (0..8).flat_map(|a| (a + 1..4 + a / 4 * 4).map(move |b| (a, b, 1)));
    for (name, pairs) in [("A", vec![(0, 4, 12)]), ("C", mesh.collect())] {
        let mut machine = case(name).machine;
        connect(&mut machine, GpuLinkKind::NvLink, &pairs);
        assert_eq!(of(&machine, &PeerAccess::Rule), even(2, 4), "{name}");
    }
}

/// Returns a machine of one socket with switches of these numbers of GPUs.
fn uneven(sizes: &[usize]) -> Machine {
    let mut machine = switched(1, 16, 1, sizes.iter().sum(), 48);
    let one = machine.sockets[0].devices.remove(0);
    let mut gpus = one.devices.iter().cloned();
    let switch = |(number, &size): (usize, &usize)| PciDevice {
        bus_id: BusId::new(1, number as u8, 0, 0),
        devices: gpus.by_ref().take(size).collect(),
        ..one.clone()
    };
    let switches: Vec<PciDevice> = sizes.iter().enumerate().map(switch).collect();
    machine.sockets[0].devices = switches;
    machine
}

/// Groups are planned by GPUs, as in the engines, so only the ring by rank depends on ranks.
#[test]
fn times_of_groups_do_not_depend_on_how_ranks_are_dealt() {
    let sizes: [&[usize]; 5] = [&[1, 3], &[2, 3], &[1, 2, 3], &[2, 2, 1, 1], &[1, 2, 1, 2]];
    let uneven = sizes.iter().map(|sizes| (uneven(sizes), PeerAccess::Rule));
    let cases = ["B", "G", "H", "I"].map(|name| (case(name).machine, case(name).access));
    for (at, (mut machine, access)) in uneven.chain(cases).enumerate() {
        let n = MachineGraph::new(&machine).gpus.len();
        let mut random = Random::new(at as u64);
        let mut ranks: Vec<u32> = (0..n as u32).collect();
        let mut times = Vec::new();
        for _ in 0..6 {
            each_gpu(&mut machine, &mut |gpu| {
                gpu.rank = Some(ranks[gpu.dev as usize])
            });
            let graph = MachineGraph::new(&machine);
            let prediction = predict(&graph, &Paths::new(&graph, &access));
            let first = prediction.best_ring.0[0];
            assert_eq!(graph.gpus[first].rank, Some(0), "{at}");
            times.push([
                prediction.best(),
                prediction.best_direct(),
                prediction.best_ring.1,
                prediction.ring_set.time,
                prediction.bound,
            ]);
            (1..n).for_each(|at| ranks.swap(at, random.below(at + 1)));
        }
        assert!(times.iter().all(|one| *one == times[0]), "{at}: {times:#?}");
    }
}

#[test]
fn a_written_file_reads_back_to_the_machine() {
    for Row(name, _) in ROWS {
        let machine = case(name).machine;
        let read = read_xml(&write_xml(&machine)).unwrap();
        let [mut before, mut after] = [&machine, &read].map(MachineGraph::new);
        (before.defects, after.defects) = (Vec::new(), Vec::new());
        assert_eq!(before, after, "{name}");
    }
}

/// The folder of the machines as files, for `cinch topo --file`.
const FILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/topology");

/// Compares each machine with its file. A failure writes the wanted file to the temporary directory.
#[test]
fn machine_files_are_up_to_date() {
    for Row(name, _) in ROWS {
        let path = format!("{FILES}/{name}.xml");
        let text = write_xml(&case(name).machine);
        let file = std::fs::read_to_string(&path).unwrap_or_default();
        if file != text {
            let wanted = std::env::temp_dir().join(format!("{name}.xml"));
            std::fs::write(&wanted, text).unwrap();
            panic!("{path} is not up to date; copy {}", wanted.display());
        }
    }
}
