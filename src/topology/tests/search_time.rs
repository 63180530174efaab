//! Steps and time of the searches that ranks make while they join.

use super::detection::Directory;
use super::fake_sys::FakeSys;
use super::machines::{case, with_nics};
use crate::sys::fork::tests::{in_child, processor_time};
use crate::topology::rings::{counted_best_ring, faster_set};
use crate::topology::whole_rings::counted_whole_rings;
use crate::topology::{MachineGraph, Paths, PeerAccess, RankTopology, detect};
use std::time::{Duration, Instant};

/// Returns the shortest of several times.
fn fastest<T>(run: impl Fn() -> T) -> Duration {
    let once = |_| {
        let start = Instant::now();
        std::hint::black_box(run());
        start.elapsed()
    };
    (0..5).map(once).min().unwrap_or_default()
}

/// For each machine, the most steps that the searches of the best ring and of sets of rings may take, and fingerprints. Sets
/// have 20,000 steps for each of 7 numbers of pairs. The fingerprints are those of a search that compares all rings, with
/// ranks in the order of GPUs, and with rank r on GPU 3 r modulo the number of GPUs.
const SEARCHES: [(&str, [usize; 2], [&str; 2]); 11] = [
    ("A", [20, 0], ["aa807a45418eb93b", "7e80315fadf18f29"]),
    ("B", [20, 0], ["dbbfbf5effb6c725", "2b5bda16535538f7"]),
    ("C", [20, 0], ["1cbe42259c0e58a1", "1135297ed97f9e0d"]),
    ("D", [20, 0], ["2761a88a2d9b12b6", "dd35e4a600ef6ea8"]),
    ("E", [10_000, 0], ["0287b397b2a8ad6d", "4ecb7838ebd74ccf"]),
    ("F", [20, 0], ["8f06ff90e3008fad", "99e3ff72fd7a65be"]),
    ("G", [20, 0], ["082666b32543d85c", "9111825e1fc495cb"]),
    ("H", [20, 140_000], ["d0e54f68ba16aaf4", "2acb1966791cc893"]),
    (
        "I",
        [200, 140_000],
        ["be183f6023747d2c", "e1f0f3ec2f5fc0cd"],
    ),
    ("K", [20, 0], ["a12e1863f82fd384", "90136af67fc0c8c5"]),
    (
        "16 GPUs, 16 NICs",
        [20, 0],
        ["97081d29ac814ec9", "36b09f33600fbe5a"],
    ),
];

#[test]
fn searches_end_after_few_steps() {
    for (name, most, fingerprints) in SEARCHES {
        let (machine, access) = match name.len() {
            1 => (case(name).machine, case(name).access),
            _ => (with_nics(2, 4), PeerAccess::Rule),
        };
        let graph = MachineGraph::new(&machine);
        let paths = Paths::new(&graph, &access);
        let (ring, time, ring_steps) = counted_best_ring(&graph, &paths);
        let (sets, set_steps) = counted_whole_rings(&graph, &paths, &(ring, time));
        let n = graph.gpus.len();
        let topology = |every: usize| {
            let gpus: Vec<usize> = (0..n).map(|rank| rank * every % n).collect();
            RankTopology::new(&graph, &gpus, &PeerAccess::Rule).unwrap()
        };
        println!(
            "{name}: {ring_steps} steps for the best ring in {:?}, {set_steps} for {} sets of rings in {:?}, all in {:?}",
            fastest(|| counted_best_ring(&graph, &paths)),
            sets.len(),
            fastest(|| faster_set(&graph, &paths, time)),
            fastest(|| topology(1)),
        );
        assert!(
            ring_steps <= most[0] && set_steps <= most[1],
            "{name}: {ring_steps} and {set_steps} steps"
        );
        let found = [1, 3].map(|every| topology(every).fingerprint());
        assert_eq!(found, fingerprints, "{name}");
    }
}

/// Detection and search take less than 20 ms of an optimised build. A child counts only its own processor time.
#[test]
fn detection_and_search_of_16_gpus_and_16_nics_take_little_time() {
    /// Code of tests is hardly optimised, and machines of tests are loaded.
    const FACTOR: u32 = if cfg!(debug_assertions) { 10 } else { 2 };
    let fake = FakeSys::new(&with_nics(2, 4));
    let directory = Directory::new("time", &fake.files);
    let nvml = fake.gpus();
    let run = || {
        let machine = detect(&directory.0, &fake.sources(&nvml)).unwrap();
        let graph = MachineGraph::new(&machine);
        let gpus: Vec<usize> = (0..16).collect();
        let topology = RankTopology::new(&graph, &gpus, &PeerAccess::Rule).unwrap();
        assert_eq!((graph.nics.len(), topology.groups().count()), (16, 2));
    };
    assert!(in_child(|| {
        let fastest = (0..5).map(|_| processor_time(run)).min().unwrap();
        fastest < Duration::from_millis(20) * FACTOR
    }));
}
