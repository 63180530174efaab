//! Rings, and links that carry only some protocols.

use super::*;

/// The number of rings per channel is limited by the slots, and by the kernel's shared memory for steps.
/// Coded calls and calls between hosts have one ring.
#[test]
fn rings_have_the_slots_that_they_need() {
    let ring = |limits: &Limits, collective, codec: &str| {
        let mut asked = request(collective, 1 << 20, codec);
        asked.algorithm = Some(Algorithm::Ring);
        let plan = plan(limits.clone(), &asked);
        assert_eq!(plan.algorithm, Algorithm::Ring);
        (
            plan.pattern.rings,
            plan.pattern.slots(),
            plan.schedule.steps.len(),
        )
    };
    let mut found = std::collections::BTreeSet::new();
    for nranks in 2..=32 {
        for budget in [16, 64, 256, 1024] {
            let Ok(shape) = PeerBufferLayout::new(nranks, budget << 20, 64) else {
                continue;
            };
            let mut limits = limits(nranks, 132);
            let gpu = GpuLimits {
                ..GpuLimits::new(&shape, Resident::both(132), 64)
            }
            .forced(KernelProtocol::SIMPLE);
            let depth = gpu.depths[Protocol::Simple as usize];
            limits.gpu = Some(gpu);
            let has_ring = |&collective: &Collective| {
                schedule::algorithms(collective).contains(&Algorithm::Ring)
            };
            for collective in Collective::ALL.into_iter().filter(has_ring) {
                let (rings, slots, steps) = ring(&limits, collective, "raw");
                assert!(
                    slots <= depth && steps <= KEPT_STEPS,
                    "{nranks} {collective}"
                );
                let is_chain = !schedule::has_several_rings(collective);
                assert!(
                    rings == 1 || (depth > 2 && !is_chain),
                    "{nranks} {collective}"
                );
                found.insert(rings);
            }
            assert_eq!(ring(&limits, Collective::AllGather, "linear8").0, 1);
            if nranks % 2 == 0 {
                limits.hosts = Groups::even_hosts(2, nranks / 2);
                assert_eq!(ring(&limits, Collective::AllReduce, "raw").0, 1);
            }
        }
    }
    assert!(
        [1, 2, 3, 4].iter().all(|rings| found.contains(rings)),
        "{found:?}"
    );
}

/// Ranks 1 and 2 of four have no peer access. Schedules in which they exchange nothing use ll128.
#[test]
fn one_split_pair_takes_ll128_only_from_schedules_that_use_it() {
    use KernelProtocol as K;
    let mut pairs = PairLinks::NVLINK;
    pairs.set(2, 1, LinkClass::Host);
    let mut by_rank = limits(4, 132);
    let gpu = by_rank.gpu.unwrap().forced(K::LL128);
    by_rank.gpu = Some(GpuLimits {
        ll128: false,
        pairs: pairs.clone(),
        ..gpu
    });
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/topology/K.xml");
    let text = std::fs::read_to_string(file).unwrap();
    // Without peer access data crosses PCIe, whose speed the file leaves out.
    let unknown = "link_speed=\"\" link_width=\"0\"";
    let text = text.replace(unknown, "link_speed=\"32.0 GT/s PCIe\" link_width=\"16\"");
    let machine = read_xml(&text).unwrap();
    let access = (0..16).map(|pair| !pairs.splits_lines(pair / 4, pair % 4));
    let topology = RankTopology::new(
        &MachineGraph::new(&machine),
        &[0, 1, 2, 3],
        &PeerAccess::Pairs(access.collect()),
    )
    .unwrap();
    let around = Limits {
        topology: Some(Arc::new(topology)),
        ..by_rank.clone()
    };
    let kernel = |limits: &Limits, collective, algorithm, root, peer| {
        let request = Request {
            algorithm: Some(algorithm),
            root,
            peer,
            ..request(collective, 32 << 10, "raw")
        };
        let mut kernels: Vec<K> = (0..4)
            .map(|rank| {
                let mut planner = Planner::new(limits.clone(), rank, Isa::Scalar);
                planner.plan(&request).unwrap().kernel
            })
            .collect();
        kernels.dedup();
        assert_eq!(kernels.len(), 1, "all ranks select one kernel");
        kernels[0]
    };
    let sum = Collective::AllReduce;
    assert_eq!(kernel(&around, sum, Algorithm::Ring, 0, 0), K::LL128);
    assert_ne!(kernel(&by_rank, sum, Algorithm::Ring, 0, 0), K::LL128);
    for limits in [&around, &by_rank] {
        assert_ne!(kernel(limits, sum, Algorithm::Direct, 0, 0), K::LL128);
        let message = |from, to| kernel(limits, Collective::SendRecv, Algorithm::Direct, from, to);
        assert_eq!([message(0, 1), message(3, 2)], [K::LL128; 2]);
        assert!(
            [message(1, 2), message(2, 1)]
                .iter()
                .all(|one| *one != K::LL128)
        );
        let to = |root| kernel(limits, Collective::Gather, Algorithm::Direct, root, 0);
        assert_eq!(to(0), K::LL128, "all ranks send to rank 0");
        assert_ne!(to(1), K::LL128);
    }
}
