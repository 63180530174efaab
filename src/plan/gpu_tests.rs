use super::gpu::*;
use super::*;
use crate::cpu::Isa;
use crate::gpu_links::{LinkClass, PairLinks};
use crate::mem::PeerBufferLayout;
use crate::schedule::{self, Groups};
use crate::topology::{MachineGraph, PeerAccess, read_xml};
use crate::types::{CodecSpec, DType, Fused, Kernel, Protocol, ReduceOp, TransportKind};

pub(super) fn limits(nranks: usize, resident: usize) -> Limits {
    let shape = PeerBufferLayout::new(nranks, 64 << 20, 64).unwrap();
    Limits {
        nranks,
        slot_bytes: 0,
        slots: 2,
        channels: 64,
        algorithm: None,
        machine: MachineFacts {
            transport: TransportKind::Cuda,
            inside: TransportKind::Cuda,
            oversubscribed: false,
            measured: None,
        },
        hosts: Groups::ONE,
        topology: None,
        gpu: Some(GpuLimits {
            ll128: true,
            ..GpuLimits::new(&shape, Resident::both(resident), 64)
        }),
    }
}

pub(super) fn request(collective: Collective, count: usize, codec: &str) -> Request {
    Request {
        collective,
        dtype: DType::F32,
        op: ReduceOp::Sum,
        count,
        root: 0,
        peer: usize::from(collective == Collective::SendRecv),
        codec: codec.parse().unwrap(),
        algorithm: None,
        tensor: None,
        feedback: None,
        fused: Fused::ALONE,
    }
}

fn plan(limits: Limits, request: &Request) -> std::sync::Arc<Plan> {
    Planner::new(limits, 0, Isa::Scalar).plan(request).unwrap()
}

#[test]
fn sizes_choose_protocol_and_algorithm() {
    let chosen = |bytes: usize, codec: &str| {
        let plan = plan(
            limits(8, 132),
            &request(Collective::AllReduce, bytes / 4, codec),
        );
        (plan.algorithm, plan.kernel)
    };
    for bytes in [8, 1 << 10, 4 << 10] {
        assert_eq!(
            chosen(bytes, "raw"),
            (Algorithm::OneShot, KernelProtocol::FUSED_LL)
        );
    }
    assert_eq!(
        chosen(64 << 10, "raw"),
        (Algorithm::OneShot, KernelProtocol::FUSED_LL128)
    );
    for bytes in [256 << 10, 2 << 20] {
        let wanted = (Algorithm::Direct, KernelProtocol::FUSED_LL128);
        assert_eq!(chosen(bytes, "raw"), wanted);
    }
    for bytes in [4 << 20, 16 << 20] {
        assert_eq!(
            chosen(bytes, "raw"),
            (Algorithm::Direct, KernelProtocol::SIMPLE)
        );
    }
    for bytes in [64 << 20, 1 << 30] {
        assert_eq!(
            chosen(bytes, "raw"),
            (Algorithm::Ring, KernelProtocol::SIMPLE)
        );
    }
    for bytes in [16 << 20, 1 << 30] {
        let wanted = (Algorithm::Direct, KernelProtocol::SIMPLE);
        assert_eq!(chosen(bytes, "linear8"), wanted);
    }
}

/// Tests the size from which the planner prefers slots. With a codec, messages up to a medium size use the
/// fused kernel, if they fit in the area for ll128 lines. Larger messages use slots, where more thread blocks
/// share the codec's arithmetic.
#[test]
fn codecs_have_fused_kernels_up_to_some_size() {
    let chosen = |nranks: usize, collective, bytes: usize, codec: &str| {
        let request = request(collective, bytes / 4, codec);
        let plan = plan(limits(nranks, 132), &request);
        (plan.algorithm, plan.kernel)
    };
    use Algorithm::{Direct, OneShot};
    use KernelProtocol as K;
    for nranks in [2, 4, 8] {
        for codec in ["linear8", "dynamic8", "minmax4:block=512"] {
            let sum = |bytes| chosen(nranks, Collective::AllReduce, bytes, codec);
            for bytes in [4, 4 << 10, 64 << 10] {
                assert_eq!(sum(bytes), (OneShot, K::FUSED_LL128), "{nranks} {bytes}");
            }
            assert_eq!(sum(4 << 20).1, K::FUSED_LL128, "{nranks}");
            if nranks > 2 {
                assert_eq!(sum(4 << 20), (Direct, K::FUSED_LL128), "{nranks}");
            }
            assert_eq!(sum(64 << 20), (Direct, K::SIMPLE), "{nranks}");
            for collective in [Collective::AllGather, Collective::ReduceScatter] {
                let block = |bytes| chosen(nranks, collective, bytes, codec).1;
                assert_eq!(
                    [block(4 << 10), block(64 << 20)],
                    [K::FUSED_LL128, K::SIMPLE]
                );
            }
        }
        // Only the schedule kernel runs scale blocks larger than a tile, stochastic rounding, and
        // codecs without a fused kernel.
        for codec in [
            "linear8:block=1024",
            "minmax4:seed=3",
            "static8",
            "cast_bf16",
        ] {
            for collective in [Collective::AllReduce, Collective::AllToAll] {
                let (_, protocol) = chosen(nranks, collective, 4 << 10, codec);
                assert_eq!(protocol, K::SIMPLE, "{codec}");
            }
        }
        assert_eq!(
            chosen(nranks, Collective::AllToAll, 4 << 10, "linear8").1,
            K::SIMPLE
        );
    }
    // Residuals of error feedback do not change the selected kernel.
    let mut call = request(Collective::AllReduce, 1 << 14, "linear8");
    call.feedback = Some(7);
    assert_eq!(plan(limits(8, 132), &call).kernel, K::FUSED_LL128);
    // No kernel uses ll128 on links that may deliver a 128-byte line in parts.
    let mut limits = limits(8, 132);
    limits.gpu.as_mut().unwrap().ll128 = false;
    let call = request(Collective::AllReduce, 1 << 14, "linear8");
    assert_eq!(plan(limits, &call).kernel, K::SIMPLE);
}

/// For every layout of peer buffers, the largest message of a fused kernel fits in the area for ll128 lines.
/// Each phase of the kernel gets an equal part of that area. A message that is larger by a tile would not
/// fit.
#[test]
fn encoded_tiles_stay_within_the_line_area() {
    let mut areas = HashSet::new();
    for nranks in 2..=32 {
        for kib in (64..64 << 10).step_by(997) {
            let Ok(shape) = PeerBufferLayout::new(nranks, kib << 10, 64) else {
                continue;
            };
            let (_, half) = shape.lines_area();
            if !areas.insert((nranks, half)) {
                continue;
            }
            let mut limits = limits(nranks, 132);
            limits.gpu = Some(GpuLimits {
                ll128: true,
                protocol: Some(KernelProtocol::FUSED_LL128.protocol),
                kernel: Some(KernelProtocol::FUSED_LL128.kernel),
                ..GpuLimits::new(&shape, Resident::both(132), 64)
            });
            for codec in ["linear8", "minmax4", "minmax4:block=32"] {
                for (algorithm, trips) in [(Algorithm::OneShot, 1), (Algorithm::Direct, 2)] {
                    let plan = |count: usize| {
                        let mut request = request(Collective::AllReduce, count, codec);
                        request.algorithm = Some(algorithm);
                        plan(limits.clone(), &request)
                    };
                    let is_fused = |count| plan(count).kernel == KernelProtocol::FUSED_LL128;
                    let most = partition_point(1, 1 << 25, is_fused);
                    if most == 0 {
                        assert!(half < 1 << 12, "{nranks} {half}");
                        continue;
                    }
                    let plan = plan(most);
                    let elements = [most, plan.geometry.chunk()][trips - 1];
                    let images = EncodedTiles::new(&**plan.codec.as_ref().unwrap(), elements);
                    let bytes = (images.count * images.lines * 128) as u64;
                    let what = format!("{nranks} {half} {codec} {algorithm}: {most}");
                    assert!(bytes <= half / trips as u64, "{what}");
                    // The area for ll128 lines has no room for another tile.
                    assert!(
                        bytes + images.lines as u64 * 128 > half / trips as u64,
                        "{what}"
                    );
                }
            }
        }
    }
    assert!(areas.len() > 60, "{}", areas.len());
}

/// Returns the largest number from `first` to `end` - 1 for which `holds` is true; `first` - 1 if there is
/// none. `holds` must be true up to some number and false beyond it.
fn partition_point(first: usize, end: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut yes, mut no) = (first - 1, end);
    while no - yes > 1 {
        let middle = yes + (no - yes) / 2;
        match holds(middle) {
            true => yes = middle,
            false => no = middle,
        }
    }
    yes
}

/// Fused kernels have larger thread blocks than schedule kernels, so fewer of them are resident at
/// once.
#[test]
fn blocks_of_a_fused_kernel_fit_the_gpu_too() {
    let mut limits = limits(7, 28);
    let gpu = limits.gpu.as_mut().unwrap();
    *gpu = gpu.forced(KernelProtocol::FUSED_LL);
    let asked = request(Collective::AllReduce, 24_000, "raw");
    let blocks = |limits: &Limits| {
        let mut asked = asked;
        asked.algorithm = Some(Algorithm::OneShot);
        let plan = plan(limits.clone(), &asked);
        assert_eq!(plan.kernel, KernelProtocol::FUSED_LL);
        plan.channels
    };
    assert!(blocks(&limits) > 14);
    limits.gpu.as_mut().unwrap().resident.fused = 14;
    assert_eq!(blocks(&limits), 14);
}

#[test]
fn chunks_fit_slots_and_channels_fit_the_gpu() {
    for nranks in [2, 3, 8, 32] {
        for resident in [4, 16, 132] {
            for collective in Collective::ALL {
                for codec in ["raw", "linear8", "cast16"] {
                    for count in [0, 1, 1000, 65_537, 20_000_003] {
                        let limits = limits(nranks, resident);
                        let gpu = limits.gpu.unwrap();
                        let plan = plan(limits, &request(collective, count, codec));
                        let geometry = plan.geometry;
                        assert!(plan.channels <= resident.min(64) && plan.channels >= 1);
                        assert!(plan.channels <= geometry.passes() || plan.kernel.is_fused());
                        if !plan.kernel.is_fused() {
                            let (slot, channels) = gpu.fifos[plan.kernel.protocol as usize];
                            assert!(plan.wire_bytes(geometry.chunk()) <= slot);
                            assert!(plan.channels <= channels);
                        }
                        if collective == Collective::SendRecv {
                            let bytes = 4 * count;
                            let blocks = 2 * plan.channels * gpu.peers_at_once(nranks, bytes);
                            assert!(blocks <= resident.max(2));
                        }
                    }
                }
            }
        }
    }
}

/// Larger send/recv messages have more channels, and fewer of these messages share a launch. Both ranks of a
/// pair compute equal numbers.
#[test]
fn a_large_message_has_the_blocks_of_several_peers() {
    let limits = limits(8, 66);
    let gpu = limits.gpu.unwrap();
    let channels = |bytes: usize| {
        let request = request(Collective::SendRecv, bytes / 4, "raw");
        plan(limits.clone(), &request).channels
    };
    let cases = [
        (1 << 20, 7, 4),
        (2 << 20, 4, 8),
        (4 << 20, 2, 16),
        (8 << 20, 1, 32),
        (1 << 30, 1, 33),
    ];
    for (bytes, peers, most) in cases {
        assert_eq!(gpu.peers_at_once(8, bytes), peers, "{bytes}");
        assert_eq!(channels(bytes), most, "{bytes}");
    }
    assert_eq!(gpu.peers_at_once(8, 0), 7);
}

#[test]
fn large_messages_load_all_channels_alike() {
    let plan = plan(
        limits(8, 132),
        &request(Collective::AllReduce, 1 << 26, "linear8"),
    );
    assert_eq!((plan.channels, plan.geometry.passes() % 64), (64, 0));
    let one_gpu = self::plan(
        limits(8, 16),
        &request(Collective::AllReduce, 1 << 20, "raw"),
    );
    assert_eq!((one_gpu.channels, one_gpu.geometry.passes() % 16), (16, 0));
}

#[test]
fn a_protocol_that_is_asked_for_is_taken_where_it_can_be() {
    let asking = |kernel| {
        let mut limits = limits(4, 132);
        limits.gpu = limits.gpu.map(|gpu| GpuLimits {
            ll128: false,
            ..gpu.forced(kernel)
        });
        limits
    };
    let all_reduce = |count, codec: &str| request(Collective::AllReduce, count, codec);
    let cases = [
        (
            KernelProtocol::LL,
            all_reduce(1 << 20, "raw"),
            KernelProtocol::LL,
        ),
        (
            KernelProtocol::SIMPLE,
            all_reduce(1, "raw"),
            KernelProtocol::SIMPLE,
        ),
        (
            KernelProtocol::FUSED_LL,
            all_reduce(32 << 10, "raw"),
            KernelProtocol::FUSED_LL,
        ),
        (
            KernelProtocol::FUSED_LL,
            all_reduce(1 << 20, "raw"),
            KernelProtocol::SIMPLE,
        ),
        (
            KernelProtocol::FUSED_LL,
            request(Collective::Broadcast, 1, "raw"),
            KernelProtocol::LL,
        ),
        (
            KernelProtocol::LL,
            all_reduce(1 << 20, "linear8"),
            KernelProtocol::SIMPLE,
        ),
    ];
    for (asked, request, taken) in cases {
        assert_eq!(plan(asking(asked), &request).kernel, taken, "{asked}");
    }
    // The receive area limits the data that a rank sends to another. A two-shot all_reduce has two phases, so
    // each phase gets half of the area.
    let block = limits(4, 132).gpu.unwrap().oneshot_bytes / 4;
    for (collective, most) in [
        (Collective::AllReduce, 4 * block / 2),
        (Collective::AllGather, block),
        (Collective::ReduceScatter, block),
        (Collective::AllToAll, block),
    ] {
        let taken = |count| {
            let request = request(collective, count, "raw");
            plan(asking(KernelProtocol::FUSED_LL), &request).kernel
        };
        assert_eq!(taken(most), KernelProtocol::FUSED_LL, "{collective}");
        assert_ne!(taken(most + 1), KernelProtocol::FUSED_LL, "{collective}");
    }
    // Fused kernels with ll128 need links that never deliver a 128-byte line in parts, and types
    // that the kernels reduce.
    let in_lines = |collective, dtype, count, ll128| {
        let mut limits = asking(KernelProtocol::FUSED_LL128);
        limits.gpu.as_mut().unwrap().ll128 = ll128;
        let mut request = request(collective, count, "raw");
        request.dtype = dtype;
        plan(limits, &request).kernel == KernelProtocol::FUSED_LL128
    };
    let block = limits(4, 132).gpu.unwrap().lines_bytes / 4;
    for (collective, most) in [
        (Collective::AllReduce, 4 * block / 2),
        (Collective::AllGather, block),
        (Collective::ReduceScatter, block),
        (Collective::AllToAll, block),
        (Collective::Broadcast, block),
        (Collective::Reduce, block),
    ] {
        let of_floats = |count, ll128| in_lines(collective, DType::F32, count, ll128);
        assert!(of_floats(most, true), "{collective}");
        assert!(
            !of_floats(most + 1, true) && !of_floats(most, false),
            "{collective}"
        );
        let of_integers = in_lines(collective, DType::I32, 1000, true);
        assert_eq!(of_integers, !collective.reduces(), "{collective}");
    }
    // The links of these limits may deliver a 128-byte line in parts, so ll128 is not selected.
    let plan = plan(asking(KernelProtocol::LL128), &all_reduce(1 << 18, "raw"));
    assert_ne!(plan.kernel, KernelProtocol::LL128);
}

#[test]
fn the_table_names_protocols() {
    let planner = Planner::new(limits(8, 132), 0, Isa::Scalar);
    let text = planner
        .explain(&request(Collective::AllReduce, 256, "raw"))
        .unwrap();
    for word in ["kernel", "protocol", "fused", "ll128", "cheapest", "cuda"] {
        assert!(text.contains(word), "{text}");
    }
}

/// A host communicator that copies the limits of a GPU communicator divides messages alike and gives right
/// results.
#[test]
fn a_host_planner_with_copied_limits_cuts_like_a_gpu() {
    use crate::comm::Call;
    use crate::config::Config;
    use crate::mem::UserBuffers;
    use crate::testing::{Data, Pattern, Problem, local_world};

    let asked = request(Collective::AllReduce, 300_007, "linear8");
    let wanted = plan(limits(3, 132), &asked);
    let host = Limits {
        slot_bytes: 1 << 20,
        slots: 4,
        channels: 2,
        topology: None,
        gpu: None,
        ..limits(3, 132)
    };
    let mut planner = Planner::new(host, 0, Isa::Scalar);
    let before = planner.plan(&asked).unwrap().geometry;
    planner.copy_limits(limits(3, 132));
    let imitated = planner.plan(&asked).unwrap();
    assert_eq!(imitated.geometry, wanted.geometry);
    assert_eq!((imitated.channels, wanted.channels > 2), (2, true));
    assert_ne!(before, wanted.geometry);

    let problem = Problem::new(Collective::AllReduce, DType::F32, 3, 300_007);
    let data = Data {
        pattern: Pattern::Small,
        dtype: DType::F32,
        seed: 3,
    };
    let config = Config {
        slot_bytes: 1 << 20,
        ..Config::default()
    };
    let wrong = local_world(3, &config, |comm| {
        comm.copy_limits(limits(3, 132)).unwrap();
        assert!(comm.copy_limits(limits(4, 132)).is_err());
        let input = data.vec(comm.rank(), problem.count);
        let mut output = vec![0; input.len()];
        let call = Call::new(Collective::AllReduce, DType::F32, problem.count);
        comm.call(&call, UserBuffers::new(&input, &mut output))
            .unwrap();
        problem
            .check(&data, comm.rank(), &output, 0.0)
            .unwrap()
            .wrong
    });
    assert_eq!(wrong, [0, 0, 0]);
}

#[test]
fn a_codec_left_to_the_model_runs_where_it_is_predicted_to_pay() {
    let chosen = |bytes: usize, codec: &str| {
        let codec = format!("auto:{codec}");
        let request = request(Collective::AllReduce, bytes / 4, &codec);
        let mut planner = Planner::new(limits(8, 132), 0, Isa::Scalar);
        let best = |planner: &Planner, request: &Request| {
            let codec = crate::codec::build(request.codec.inter, Isa::Scalar).unwrap();
            let all = super::candidates(request, planner.limits(), [codec.as_deref(); 2]);
            let times = all.unwrap().into_iter().map(|candidate| candidate.seconds);
            times.fold(f64::INFINITY, f64::min)
        };
        let plan = planner.plan(&request).unwrap();
        let explained = planner.explain(&request).unwrap();
        assert!(
            explained.contains(&format!("so {} runs", plan.specs.inter)),
            "{explained}"
        );
        // The planner chooses the cheaper of the codec and raw; `explain` lists the table of the
        // winner first.
        let (coded, raw) = (
            best(&planner, &request),
            best(&planner, &request.without_codec()),
        );
        assert_eq!(plan.specs.inter.is_lossy(), coded < raw, "{bytes} {codec}");
        assert!(
            explained
                .lines()
                .next()
                .unwrap()
                .contains(&format!("codec {},", plan.specs.inter))
        );
        assert_eq!(plan.codec.is_some(), plan.specs.inter.is_lossy());
        assert_eq!(plan.decided(&request).codec.inter, plan.specs.inter);
        plan.specs.inter
    };
    for codec in ["linear8", "dynamic8", "cast_bf16"] {
        assert_eq!(chosen(4 << 10, codec), CodecSpec::RAW, "{codec}");
        assert_eq!(
            chosen(256 << 20, codec).to_string(),
            codec.parse::<CodecSpec>().unwrap().to_string()
        );
    }
}

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
fn a_kernel_has_one_codec_for_both_levels() {
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
    let plan = planner.plan(&asked("linear8")).unwrap();
    assert_eq!(plan.algorithm, Algorithm::Hierarchical);
    let error = planner.plan(&asked("raw")).unwrap_err();
    for word in ["intra=raw", "inter=linear8", "one codec"] {
        assert!(error.message().contains(word), "{error}");
    }
}

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
        pairs,
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
        let depths = limits.gpu.unwrap().depths;
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
