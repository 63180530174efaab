//! Division of messages into chunks, channels and blocks.

use super::*;

/// For every layout of peer buffers, the largest message of a fused kernel fits in the area of its protocol. Each phase of
/// the kernel gets an equal part of that area. A message that is larger by a tile would not fit. Packets leave the last
/// line to the signature of raw calls, and one at the end of the first of two phases.
#[test]
fn encoded_tiles_stay_within_their_areas() {
    for kernel in [KernelProtocol::FUSED_LL, KernelProtocol::FUSED_LL128] {
        stay_within_the_area(kernel);
    }
}

fn stay_within_the_area(kernel: KernelProtocol) {
    let packets = kernel == KernelProtocol::FUSED_LL;
    let mut areas = HashSet::new();
    for nranks in 2..=32 {
        for kib in (64..64 << 10).step_by(997) {
            let Ok(shape) = PeerBufferLayout::new(nranks, kib << 10, 64) else {
                continue;
            };
            let (_, half) = match packets {
                true => shape.oneshot_area(),
                false => shape.lines_area(),
            };
            if !areas.insert((nranks, half)) {
                continue;
            }
            let mut limits = limits(nranks, 132);
            limits.gpu = Some(GpuLimits {
                ll128: true,
                ..GpuLimits::new(&shape, Resident::both(132), 64).forced(kernel)
            });
            for codec in ["linear8", "minmax4", "minmax4:block=32"] {
                for (algorithm, trips) in [(Algorithm::OneShot, 1), (Algorithm::Direct, 2)] {
                    let plan = |count: usize| {
                        let mut request = request(Collective::AllReduce, count, codec);
                        request.algorithm = Some(algorithm);
                        plan(limits.clone(), &request)
                    };
                    let is_fused = |count| plan(count).kernel == kernel;
                    let most = partition_point(1, 1 << 25, is_fused);
                    if most == 0 {
                        assert!(half < 1 << 12, "{nranks} {half}");
                        continue;
                    }
                    let plan = plan(most);
                    let elements = [most, plan.geometry.chunk()][trips - 1];
                    let images = EncodedTiles::new(
                        &**plan.codec.as_ref().unwrap(),
                        elements,
                        plan.kernel.protocol,
                    );
                    let bytes = (images.count * images.lines * 128) as u64;
                    let what = format!("{nranks} {half} {codec} {algorithm}: {most}");
                    let room = half / trips as u64 - 128 * u64::from(packets);
                    assert!(bytes <= room, "{what}");
                    // The area has no room for another tile, but for the line of a phase that is not used.
                    let left = 128 * u64::from(packets);
                    assert!(bytes + images.lines as u64 * 128 + left > room, "{what}");
                }
            }
        }
    }
    assert!(areas.len() > 60, "{kernel}: {}", areas.len());
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
    *gpu = gpu.clone().forced(KernelProtocol::FUSED_LL);
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
                        let gpu = limits.gpu.clone().unwrap();
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
    let gpu = limits.gpu.clone().unwrap();
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
