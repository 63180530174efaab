//! Schedules on groups of ranks: hosts, and groups inside a host.

use super::*;

/// Calls between hosts use counters, because a proxy cannot see flags among the data. Fused kernels, ll and
/// ll128 stay inside hosts.
#[test]
fn between_hosts_there_are_slots_with_counters_only() {
    let on = |hosts: Groups, collective, count, root, peer| {
        let mut limits = limits(4, 64);
        limits.hosts = hosts;
        limits.machine.transport = TransportKind::Tcp;
        let request = Request {
            root,
            peer,
            ..request(collective, count, "raw")
        };
        plan(limits, &request)
    };
    let two = || Groups::even_hosts(2, 2);
    for collective in Collective::ALL {
        for count in [1, 1000, 1 << 20] {
            let peer = 2 * usize::from(collective == Collective::SendRecv);
            let plan = on(two(), collective, count, 0, peer);
            assert_eq!(
                plan.kernel,
                KernelProtocol::SIMPLE,
                "{collective} of {count}"
            );
        }
    }
    let near = on(two(), Collective::SendRecv, 16, 2, 3);
    assert_ne!(
        near.kernel,
        KernelProtocol::SIMPLE,
        "inside a host all is as before"
    );
    let near = on(Groups::ONE, Collective::AllReduce, 16, 0, 0);
    assert_eq!(near.kernel, KernelProtocol::FUSED_LL);
    // A large all_reduce sends each host's data over its network link once, not once for each rank.
    let large = on(two(), Collective::AllReduce, 16 << 20, 0, 0);
    assert_eq!(large.algorithm, Algorithm::Hierarchical);
}

#[test]
fn a_kernel_has_one_codec_beside_those_inside_groups() {
    let mut limits = limits(4, 64);
    limits.hosts = Groups::even_hosts(2, 2);
    let asked = |intra: &str| Request {
        algorithm: Some(Algorithm::Hierarchical),
        ..request(
            Collective::AllReduce,
            1 << 20,
            &format!("intra={intra},inter=linear8"),
        )
    };
    let mut planner = Planner::new(limits, 0, Isa::Scalar);
    for (intra, bytes) in [("linear8", 4), ("raw", 4), ("cast16", 2), ("cast_bf16", 2)] {
        let plan = planner.plan(&asked(intra)).unwrap();
        assert_eq!(plan.algorithm, Algorithm::Hierarchical);
        if intra != "linear8" {
            assert_eq!(plan.bytes_for(Level::Intra, 4096), 4096 * bytes, "{intra}");
        }
    }
    let error = planner.plan(&asked("dynamic8")).unwrap_err();
    for word in ["intra=dynamic8", "inter=linear8", "one codec", "cast16"] {
        assert!(error.message().contains(word), "{error}");
    }
}

fn file_topology(name: &str) -> Arc<RankTopology> {
    let file = format!("{}/tests/topology/{name}.xml", env!("CARGO_MANIFEST_DIR"));
    let graph = MachineGraph::new(&read_xml(&std::fs::read_to_string(file).unwrap()).unwrap());
    let gpus = [0, 1, 2, 3, 4, 5, 6, 7];
    Arc::new(RankTopology::new(&graph, &gpus, &PeerAccess::Rule).unwrap())
}

/// Levels are switches, sockets and hosts.
#[test]
fn messages_inside_groups_may_be_raw() {
    for groups in ["B", "F", "hosts"] {
        let mut limits = limits(8, 132);
        match groups {
            "hosts" => limits.hosts = Groups::even_hosts(2, 4),
            file => limits.topology = Some(file_topology(file)),
        }
        for collective in [Collective::AllReduce, Collective::ReduceScatter] {
            let asked = Request {
                algorithm: Some(Algorithm::Hierarchical),
                ..request(collective, 16 << 20, "intra=raw,inter=dynamic8")
            };
            let plan = plan(limits.clone(), &asked);
            assert!(plan.intra.is_none(), "{groups}");
            assert_eq!(plan.specs.inter, "dynamic8".parse().unwrap());
            assert_eq!(plan.kernel, KernelProtocol::SIMPLE);
            let raw = plan
                .schedule
                .steps
                .iter()
                .filter(|s| s.gives == Level::Intra);
            assert!(raw.count() > 0, "{groups}");
            let slot = limits.gpu.as_ref().unwrap().fifos[Protocol::Simple as usize].0;
            assert!(plan.geometry.chunk() * 4 <= slot, "{groups}");
        }
    }
}

/// On two sockets the call takes two levels by itself, and raw messages inside take longer than encoded ones.
#[test]
fn large_sums_with_a_codec_by_level_take_two_levels() {
    let mut limits = limits(8, 132);
    limits.topology = Some(file_topology("F"));
    let seconds = |codec: &str| {
        let request = request(Collective::AllReduce, 64 << 20, codec);
        let mut planner = Planner::new(limits.clone(), 0, Isa::Scalar);
        assert_eq!(
            planner.plan(&request).unwrap().algorithm,
            Algorithm::Hierarchical,
            "{codec}"
        );
        let text = planner.explain(&request).unwrap();
        assert!(!text.contains("for host buffers"), "{text}");
        planner.predict(&request).unwrap()
    };
    let [raw, by_level, coded] = ["raw", "intra=raw,inter=linear8", "linear8"].map(seconds);
    assert!(
        coded < by_level && by_level < raw,
        "{coded} {by_level} {raw}"
    );
}

/// Groups of different sizes put several rails on a connection, which ll and ll128 lack slots for.
#[test]
fn every_candidate_has_the_slots_of_its_schedule() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/topology/A.xml");
    let graph = MachineGraph::new(&read_xml(&std::fs::read_to_string(file).unwrap()).unwrap());
    for gpus in [
        &[0, 1, 2, 3, 4, 5][..],
        &[0, 1, 2, 3, 4, 5, 6, 7],
        &[0, 1, 2, 7],
    ] {
        let topology = RankTopology::new(&graph, gpus, &PeerAccess::Rule).unwrap();
        let mut limits = limits(gpus.len(), 132);
        limits.topology = Some(Arc::new(topology));
        limits.gpu = limits.gpu.map(|gpu| GpuLimits { ll128: true, ..gpu });
        let depths = limits.gpu.as_ref().unwrap().depths;
        let request = request(Collective::AllReduce, 1000, "raw");
        let found = candidates(&request, &limits, [None, None]).unwrap();
        let scheduled = |one: &&Candidate| one.kernel.kernel == Kernel::Schedule;
        let protocols = found.iter().filter(scheduled).filter_map(|one| {
            let pattern = pattern(&request, &limits, (one.algorithm, one.between), one.rings);
            let depth = depths[one.kernel.protocol as usize];
            assert!(pattern.slots() <= depth, "{} on {gpus:?}", one.name());
            (one.algorithm == Algorithm::Hierarchical).then_some(one.kernel.protocol)
        });
        let of_ll = protocols
            .filter(|protocol| *protocol == Protocol::Ll)
            .count();
        assert_eq!(
            of_ll > 0,
            gpus.len() != 6,
            "4 + 2 ranks have two rails on a connection"
        );
    }
}
