//! Selection of algorithms, kernels and protocols.

use super::*;

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
    assert_eq!(plan(limits, &call).kernel, K::FUSED_LL);
}

/// Where lines arrive whole, coded calls take packets only if ll is asked for: not if fused kernels are, although the model
/// gives packets the shorter hop.
#[test]
fn coded_calls_take_packets_beside_whole_lines_on_request_alone() {
    for nranks in [2, 4, 8] {
        let kernel = |protocol, kernel| {
            let mut limits = limits(nranks, 132);
            limits.gpu = limits.gpu.map(|gpu| GpuLimits {
                ll128: true,
                protocol,
                kernel,
                ..gpu
            });
            plan(limits, &request(Collective::AllReduce, 64, "linear8")).kernel
        };
        for asked in [None, Some(Kernel::Fused)] {
            assert_eq!(kernel(None, asked), KernelProtocol::FUSED_LL128, "{nranks}");
            assert_eq!(
                kernel(Some(Protocol::Ll), asked),
                KernelProtocol::FUSED_LL,
                "{nranks}"
            );
        }
    }
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
            KernelProtocol::FUSED_LL,
            all_reduce(16 << 10, "linear8"),
            KernelProtocol::FUSED_LL,
        ),
        (
            KernelProtocol::FUSED_LL,
            all_reduce(1 << 20, "linear8"),
            KernelProtocol::SIMPLE,
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
fn protocol_and_channels_of_a_call_are_taken_where_they_can_be() {
    let by_ring = |count, codec: &str, protocol, most| Request {
        algorithm: Some(Algorithm::Ring),
        tuning: CallTuning {
            protocol,
            kernel: None,
            max_channels: std::num::NonZeroU8::new(most),
        },
        ..request(Collective::AllReduce, count, codec)
    };
    // A call precedes the settings, and its protocol has no limit of size.
    for settings in [None, Some(KernelProtocol::LL)] {
        let mut limits = limits(4, 132);
        limits.gpu = limits.gpu.map(|gpu| match settings {
            None => gpu,
            Some(kernel) => gpu.forced(kernel),
        });
        for protocol in Protocol::ALL {
            for count in [1 << 8, 1 << 14, 8 << 20] {
                let call = by_ring(count, "raw", Some(protocol), 3);
                let plans = [0, 1, 3].map(|rank| {
                    let mut planner = Planner::new(limits.clone(), rank, Isa::Scalar);
                    planner.plan(&call).unwrap()
                });
                for plan in &plans {
                    let taken = (plan.algorithm, plan.kernel.kernel, plan.kernel.protocol);
                    assert_eq!(
                        taken,
                        (Algorithm::Ring, Kernel::Schedule, protocol),
                        "{count}"
                    );
                    assert!(
                        (1..=3).contains(&plan.channels),
                        "{count}: {}",
                        plan.channels
                    );
                    assert_eq!(plan.channels, plans[0].channels);
                    assert_eq!(plan.geometry, plans[0].geometry);
                }
            }
        }
    }
    let plan = |call: &Request| plan(limits(4, 132), call);
    let channels = |most| plan(&by_ring(8 << 20, "raw", None, most)).channels;
    assert_eq!(
        [channels(1), channels(3), channels(255)],
        [1, 3, channels(0)]
    );
    assert!(channels(0) > 3);
    // Coded chunks travel in slots, and links that may deliver lines in parts have no ll128.
    let coded = plan(&by_ring(1 << 20, "linear8", Some(Protocol::Ll), 2));
    assert_eq!((coded.kernel, coded.channels), (KernelProtocol::SIMPLE, 2));
    let mut torn = limits(4, 132);
    torn.gpu.as_mut().unwrap().ll128 = false;
    let call = by_ring(1 << 14, "raw", Some(Protocol::Ll128), 0);
    let kernel = super::plan(torn, &call).kernel;
    assert_ne!(kernel.protocol, Protocol::Ll128);
    // A bound applies to the blocks of fused kernels, and a protocol to calls that name no algorithm.
    let mut small = by_ring(64 << 10, "raw", None, 2);
    small.algorithm = None;
    let fused = plan(&small);
    assert!(
        fused.kernel.is_fused() && fused.channels == 2,
        "{}",
        fused.channels
    );
    small.tuning.protocol = Some(Protocol::Simple);
    assert_eq!(plan(&small).kernel, KernelProtocol::SIMPLE);
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

#[test]
fn a_codec_left_to_the_model_runs_where_it_is_predicted_to_pay() {
    let chosen = |bytes: usize, codec: &str| {
        let mut planner = Planner::new(limits(8, 132), 0, Isa::Scalar);
        planner.trust_predictions(codec);
        let codec = format!("auto:{codec}");
        let request = request(Collective::AllReduce, bytes / 4, &codec);
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
