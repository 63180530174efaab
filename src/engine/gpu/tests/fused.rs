//! Tests which calls use fused kernels, and the arguments of these kernels.

use super::*;
use crate::types::{Kernel, KernelProtocol, Protocol};

#[test]
fn small_allgather_and_alltoall_use_fused_kernels() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(4, 16, &Config::default());
    let memory = bench.memory(4 << 20);
    let mut run = |collective, dtype, count: usize| {
        let problem = Problem::new(collective, dtype, 4, count);
        let call = call(request(&problem, "raw"), &memory, &memory, &stream);
        let report = ranks[1].engine.run(&[call]).unwrap()[0];
        (report, bench.take())
    };
    for (collective, kernel) in [
        (Collective::AllGather, "ncclDevKernel_cinch_fused_move_ll"),
        (
            Collective::AllToAll,
            "ncclDevKernel_cinch_fused_scatter_move_ll",
        ),
        (
            Collective::ReduceScatter,
            "ncclDevKernel_cinch_fused_scatter_f32_ll",
        ),
    ] {
        let (report, seen) = run(collective, DType::F32, 1000);
        let [Seen::Fused(name, args, _)] = &seen[..] else {
            panic!("{collective} is not fused")
        };
        assert_eq!(name, kernel);
        assert_eq!((args.count, args.element_bytes), (1000, 4));
        assert_eq!(report.algorithm, Algorithm::Direct);
        // This rank sends its block to three peers.
        assert_eq!(report.wire_bytes, 3 * 4000);
        // A block that exceeds the area for ll packets uses the schedule kernel.
        let (_, seen) = run(collective, DType::F32, 65 << 10);
        assert!(!matches!(seen[0], Seen::Fused(..)), "{collective}");
    }
    // This rank sends a part, in granules of 64 bytes, to each of three peers. Then it sends its
    // finished sum to each.
    let (report, seen) = run(Collective::AllReduce, DType::F32, 60_000);
    let [Seen::Fused(name, _, _)] = &seen[..] else {
        panic!("all_reduce of 240 kB is not fused")
    };
    assert_eq!(name, "ncclDevKernel_cinch_fused_two_shot_f32_ll");
    assert_eq!(report.algorithm, Algorithm::Direct);
    assert_eq!(report.wire_bytes, (240_000 - 60_032) + 3 * 60_032);
    // In rooted calls not every rank waits for every other rank, so packets of a later call could
    // overwrite unread packets.
    for collective in [
        Collective::Broadcast,
        Collective::Reduce,
        Collective::Gather,
        Collective::Scatter,
    ] {
        let (_, seen) = run(collective, DType::F32, 1000);
        assert!(!matches!(seen[0], Seen::Fused(..)), "{collective}");
    }
}

fn in_lines() -> Config {
    Config {
        protocol: Some(Protocol::Ll128),
        kernel: Some(Kernel::Fused),
        ..Config::default()
    }
}

/// Fused kernels that send ll128 lines use their own area and their own call counter.
#[test]
fn small_calls_use_lines_when_lines_arrive_whole() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(4, 16, &in_lines());
    let memory = bench.memory(8 << 20);
    let mut run = |collective, algorithm, count: usize| {
        let problem = Problem::new(collective, DType::F32, 4, count);
        let mut request = request(&problem, "raw");
        request.algorithm = Some(algorithm);
        let call = call(request, &memory, &memory, &stream);
        let report = ranks[1].engine.run(&[call]).unwrap()[0];
        let seen = bench.take();
        let [Seen::Fused(name, args, grid)] = &seen[..] else {
            panic!("{collective} is not fused")
        };
        assert_eq!(*grid as usize, report.channels);
        (name.clone(), **args, report)
    };
    let shape = PeerBufferLayout::new(4, 64 << 20, 64).unwrap();
    let mut marks = Vec::new();
    for (collective, algorithm, count, kernel, words) in [
        (Collective::AllReduce, Algorithm::OneShot, 1001, "f32", 501),
        // Each rank reduces a quarter of the elements, in whole granules of 64 bytes.
        (
            Collective::AllReduce,
            Algorithm::Direct,
            60_000,
            "two_shot_f32",
            7504,
        ),
        (
            Collective::AllGather,
            Algorithm::Direct,
            10_000,
            "move",
            5000,
        ),
        (
            Collective::Broadcast,
            Algorithm::OneShot,
            1001,
            "from_root_move",
            501,
        ),
        (
            Collective::Reduce,
            Algorithm::OneShot,
            1001,
            "to_root_f32",
            501,
        ),
    ] {
        let (name, args, report) = run(collective, algorithm, count);
        assert_eq!(name, format!("ncclDevKernel_cinch_fused_{kernel}_ll128"));
        assert_eq!((args.area, args.half), shape.lines_area());
        assert_eq!((args.epoch, args.words), (0x1010, words));
        // The blocks cover all tiles of 60 words, and no block is superfluous.
        let tiles = words.div_ceil(60) as usize;
        let share = args.share as usize;
        assert!(share * report.channels >= tiles && (share - 1) * report.channels < tiles);
        assert_eq!(args.comm.protocol, KernelProtocol::FUSED_LL128.number());
        assert_eq!(report.algorithm, algorithm);
        marks.push(args.signature_hash);
    }
    marks.sort_unstable();
    marks.dedup();
    assert_eq!(marks.len(), 5, "calls that differ know each other's lines");
    // The hash leaves out the sequence number, which a graph's replay repeats.
    let again = [0; 2].map(|_| {
        run(Collective::AllGather, Algorithm::Direct, 10_000)
            .1
            .signature_hash
    });
    assert!(again.iter().all(|mark| marks.contains(mark)));
}

/// Where lines may arrive in parts, fused kernels with a codec send their tiles as ll packets, in the area and by the call
/// counter of raw calls.
#[test]
fn small_coded_calls_use_packets_where_lines_are_split() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(4, 16, &Config::default());
    let memory = bench.memory(1 << 20);
    let shape = PeerBufferLayout::new(4, 64 << 20, 64).unwrap();
    let problem = Problem::new(Collective::AllReduce, DType::F32, 4, 2000);
    let coded = call(request(&problem, "linear8"), &memory, &memory, &stream);
    ranks[1].engine.run(&[coded]).unwrap();
    let seen = bench.take();
    let [Seen::Fused(name, args, _)] = &seen[..] else {
        panic!("the call is not fused")
    };
    assert_eq!(name, "ncclDevKernel_cinch_fused_linear8_f32_ll");
    assert_eq!((args.area, args.half), shape.oneshot_area());
    assert_eq!(args.epoch, 0x1000);
    // 512 codes and two scales, 64 bytes to a line.
    assert_eq!(
        (args.phases, args.words, args.tile_lines),
        (abi::SUMS, 2000, 9)
    );
    assert_eq!(args.comm.protocol, KernelProtocol::FUSED_LL.number());
}

/// Fused kernels with a codec encode tiles of 512 elements, one per warp.
#[test]
fn small_coded_calls_use_fused_kernels() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(4, 16, &in_lines());
    let memory = bench.memory(8 << 20);
    let shape = PeerBufferLayout::new(4, 64 << 20, 64).unwrap();
    for (collective, algorithm, codec, dtype, phases, words, lines) in [
        (
            Collective::AllReduce,
            Algorithm::OneShot,
            "linear8",
            DType::F32,
            2,
            10_000,
            5,
        ),
        // Each rank reduces a quarter of the elements, in whole encoded tiles.
        (
            Collective::AllReduce,
            Algorithm::Direct,
            "dynamic8",
            DType::BF16,
            7,
            2560,
            5,
        ),
        (
            Collective::ReduceScatter,
            Algorithm::Direct,
            "minmax4",
            DType::F16,
            3,
            10_000,
            3,
        ),
        (
            Collective::AllGather,
            Algorithm::Direct,
            "linear8:block=32",
            DType::F32,
            0,
            10_000,
            5,
        ),
    ] {
        let problem = Problem::new(collective, dtype, 4, 10_000);
        let mut request = request(&problem, codec);
        request.algorithm = Some(algorithm);
        let plain = call(request, &memory, &memory, &stream);
        let report = ranks[1].engine.run(&[plain]).unwrap()[0];
        let seen = bench.take();
        let [Seen::Fused(name, args, grid)] = &seen[..] else {
            panic!("{collective} through {codec} is not fused")
        };
        let family = codec.split(':').next().unwrap();
        assert_eq!(
            *name,
            format!("ncclDevKernel_cinch_fused_{family}_{dtype}_ll128")
        );
        assert_eq!((args.area, args.half), shape.lines_area());
        assert_eq!(
            (args.phases, args.words, args.tile_lines),
            (phases, words, lines)
        );
        // The thread blocks cover all encoded tiles, and no block is superfluous.
        let images = words.div_ceil(512);
        assert_eq!(*grid as usize, report.channels);
        assert_eq!(*grid, images.div_ceil(4), "four warps for each peer's");
        assert!(args.share * grid >= images && args.share * (grid - 1) < images);
        assert_eq!((args.residuals, args.span), (0, 0));
        // Error feedback with one residual per input element changes neither the kernel nor the
        // part of the data that each block handles.
        let fed = Request {
            feedback: Some(7),
            ..request
        };
        let fed = call(fed, &memory, &memory, &stream);
        ranks[1].engine.run(&[fed]).unwrap();
        let seen = bench.take();
        let [Seen::Fused(_, with, _)] = &seen[..] else {
            panic!("{collective} with feedback is not fused")
        };
        let blocks = if collective == Collective::ReduceScatter {
            4
        } else {
            1
        };
        assert!(with.residuals != 0 && with.span == 10_000 * blocks);
        assert_eq!((with.words, with.share), (args.words, args.share));
        let spec = request.codec.inter;
        assert_eq!(
            args.codec.word[0],
            8 - 3 * u32::from(codec.ends_with("32")),
            "{spec}"
        );
        // The report counts encoded bytes; flags and padding of lines are left out.
        let wire = crate::codec::build(spec, crate::cpu::Isa::Scalar)
            .unwrap()
            .unwrap();
        let sent = match algorithm {
            Algorithm::Direct if collective == Collective::AllReduce => {
                [2560, 2560, 2320]
                    .map(|n| wire.wire_bytes(n))
                    .iter()
                    .sum::<usize>()
                    + 3 * wire.wire_bytes(2560)
            }
            _ => 3 * wire.wire_bytes(10_000),
        };
        assert_eq!(report.wire_bytes, sent as u64, "{collective}");
    }
}
