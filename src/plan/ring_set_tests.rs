//! Tests where calls run by a set of rings, and what such a set gains.

use super::gpu_tests::{limits as gpu_limits, request};
use super::*;
use crate::mem::PeerBufferLayout;
use crate::schedule::{self, Groups, VerifyLimits, verify};
use crate::topology::{MachineGraph, PeerAccess, read_xml};
use crate::transport::HostLoad;
use crate::types::{Protocol, TransportKind};

/// By this number the links of host tests are slower than those of the file, so that links and not cores decide.
const SLOWER: u32 = 1000;

/// Returns the topology of a machine file whose links are `factor` times as slow.
fn topology(name: &str, factor: u32) -> Arc<RankTopology> {
    let file = format!("{}/tests/topology/{name}.xml", env!("CARGO_MANIFEST_DIR"));
    let graph = MachineGraph::new(&read_xml(&std::fs::read_to_string(file).unwrap()).unwrap());
    let gpus = graph.by_rank();
    let topology = RankTopology::new(&graph, &gpus, &PeerAccess::Rule).unwrap();
    Arc::new(topology.slowed_down(factor))
}

/// Returns limits of ranks in host memory that stand for the GPUs of a machine.
fn host_limits(name: &str) -> Limits {
    let topology = topology(name, SLOWER);
    Limits {
        nranks: 8,
        slot_bytes: 128 << 10,
        slots: 4,
        channels: 2,
        algorithm: None,
        machine: MachineFacts {
            transport: TransportKind::Shm,
            inside: TransportKind::Shm,
            load: HostLoad::LIGHT,
            measured: None,
        },
        hosts: Groups::ONE,
        topology: Some(topology),
        gpu: None,
    }
}

fn sum(mib: usize, codec: &str) -> Request {
    request(Collective::AllReduce, mib << 18, codec)
}

fn sets(request: &Request, limits: &Limits) -> Vec<Candidate> {
    let found = candidates(request, limits, [None, None]).unwrap();
    let is_set = |one: &Candidate| matches!(one.rings, ChannelRings::Set { .. });
    found.into_iter().filter(is_set).collect()
}

/// Returns the milliseconds that links need for 256 MiB by a candidate.
fn link_ms(limits: &Limits, rings: ChannelRings) -> f64 {
    let request = sum(256, "raw");
    let pattern = pattern(
        &request,
        limits,
        (Algorithm::Ring, Algorithm::Direct),
        rings,
    );
    let part = (256u64 << 20) / pattern.parts() as u64;
    let messages = (0..8).flat_map(|rank| {
        let steps = pattern.schedule(rank).unwrap().steps;
        let sends: Vec<_> = steps.iter().flat_map(|step| step.send_to.iter()).collect();
        let messages = sends.iter().map(|&&to| (rank, to as usize, part));
        messages.collect::<Vec<_>>()
    });
    let topology = limits.topology.as_ref().unwrap();
    1e3 / f64::from(SLOWER) * topology.seconds([messages.collect::<Vec<_>>()])
}

/// Machine H has a decomposition of its bricks into three rings; with equal parts they take 7/8 * 256 MiB / 60 GB/s.
/// The shares of I are sevenths.
#[test]
fn sets_come_near_the_best_shares_of_any_size() {
    for (name, one, best, within) in [("H", 5.87, 3.83, 1.03), ("I", 14.68, 8.39, 1.05)] {
        let limits = host_limits(name);
        let both_ways = link_ms(&limits, ChannelRings::OneOrder(2));
        assert!((both_ways - one).abs() < 0.01, "{name}: {both_ways}");
        let mut last = both_ways;
        for set in limits.ring_sets() {
            let ms = link_ms(&limits, ChannelRings::Set { pairs: set.pairs() });
            println!("{name}: {} pairs {ms:.3} ms", set.pairs());
            assert!(ms < 0.97 * last, "{name}: {ms} after {last}");
            last = ms;
        }
        assert!(
            last < within * best && last > 0.999 * best,
            "{name}: {last}"
        );
    }
    let three = ChannelRings::Set { pairs: 3 };
    assert!((link_ms(&host_limits("H"), three) - 3.915).abs() < 0.001);
}

#[test]
fn machines_whose_best_ring_is_as_fast_as_any_set_have_none() {
    for name in ["A", "B", "C", "F", "K"] {
        let limits = host_limits(name);
        assert!(limits.ring_sets().is_empty(), "{name}");
        assert!(sets(&sum(64, "raw"), &limits).is_empty(), "{name}");
    }
}

#[test]
fn large_sums_take_the_set_and_explain_names_it() {
    let limits = host_limits("H");
    let planner = |limits: &Limits| Planner::new(limits.clone(), 0, Isa::Scalar);
    let plan = planner(&limits).plan(&sum(64, "raw")).unwrap();
    assert_eq!(plan.algorithm, Algorithm::Ring);
    assert_eq!((plan.pattern.orders.pairs(), plan.pattern.rings), (3, 6));
    let schedules: Vec<Schedule> = (0..8)
        .map(|rank| plan.pattern.schedule(rank).unwrap())
        .collect();
    let exact = VerifyLimits {
        slots: plan.pattern.slots(),
        passes: 3,
    };
    assert!(exact.slots <= limits.slots);
    verify(&plan.pattern, &schedules, exact).unwrap();
    let text = planner(&limits).explain(&sum(64, "raw")).unwrap();
    let line = text.lines().find(|line| line.contains("ring-set/6"));
    assert!(line.is_some_and(|line| line.contains("cheapest")), "{text}");
    // A coded call has one ring, and a chain has one.
    assert!(sets(&sum(64, "linear8"), &limits).is_empty());
    let chain = request(Collective::Broadcast, 1 << 24, "raw");
    assert!(sets(&chain, &limits).is_empty());
    // Each collective with several rings may have the set.
    for collective in [Collective::AllGather, Collective::ReduceScatter] {
        assert_eq!(sets(&request(collective, 1 << 21, "raw"), &limits).len(), 1);
    }
}

#[test]
fn sets_without_enough_slots_are_refused_with_a_reason() {
    let limits = Limits {
        slots: 2,
        ..host_limits("H")
    };
    let asked = Request {
        algorithm: Some(Algorithm::Ring),
        ..sum(64, "raw")
    };
    let mut planner = Planner::new(limits, 0, Isa::Scalar);
    let text = planner.explain(&asked).unwrap();
    for part in [
        "no ring-set: 6 rings in 3 orders need 3 slots",
        "has 2; raise CINCH_SLOTS",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let plan = planner.plan(&asked).unwrap();
    assert_eq!((plan.pattern.orders.pairs(), plan.pattern.rings), (1, 1));
}

/// A kernel keeps 96 steps: three pairs of rings of 8 ranks have 90.
#[test]
fn kernels_take_sets_that_fit_their_slots_and_steps() {
    let of = |name: &str, budget: usize| {
        let mut limits = gpu_limits(8, 132);
        let shape = PeerBufferLayout::new(8, budget, 64).unwrap();
        limits.gpu = Some(GpuLimits::new(&shape, Resident::both(132), 64));
        limits.topology = Some(topology(name, 1));
        limits
    };
    let limits = of("H", 64 << 20);
    let request = sum(256, "raw");
    let set = sets(&request, &limits);
    assert_eq!(set.len(), 1);
    assert_eq!(set[0].rings, ChannelRings::Set { pairs: 3 });
    assert_eq!(set[0].kernel, KernelProtocol::SIMPLE);
    let plan = Planner::new(limits, 0, Isa::Scalar).plan(&request).unwrap();
    assert_eq!(plan.pattern.orders.pairs(), 3);
    assert!(plan.schedule.steps.len() <= KEPT_STEPS);
    // Larger sets of I are faster, but a kernel would read their steps again in each pass.
    let limits = of("I", 64 << 20);
    let fastest = limits.ring_sets().last().unwrap().pairs();
    assert!(fastest > 3, "{fastest}");
    for set in sets(&request, &limits) {
        assert!(set.rings.count() * schedule::ring_steps(8) <= KEPT_STEPS);
    }
    let text = Planner::new(limits, 0, Isa::Scalar)
        .explain(&request)
        .unwrap();
    assert!(
        text.contains("steps a pass, and a kernel keeps 96"),
        "{text}"
    );
    // Small buffers have two slots for each connection.
    let limits = of("H", 4 << 20);
    assert_eq!(
        limits.gpu.as_ref().unwrap().depths[Protocol::Simple as usize],
        2
    );
    assert!(sets(&request, &limits).is_empty());
    let text = Planner::new(limits, 0, Isa::Scalar)
        .explain(&request)
        .unwrap();
    assert!(text.contains("raise CINCH_BUFFER_BYTES"), "{text}");
}
