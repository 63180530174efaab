//! Runs all collectives through `Communicator`, with ranks as threads, and compares the results
//! with the definitions in `oracle`.

use crate::support::oracle::worlds::run;
use crate::support::oracle::{Case, Data, factor};
use crate::support::{self, OPS, Rng, config, seed, world};
use cinch::comm::{Call, Group};
use cinch::mem::UserBuffers;
use cinch::schedule::algorithms;
use cinch::types::{CodecKind, TransportKind};
use cinch::{Algorithm, CodecSpec, Collective, DType, ErrorKind, ReduceOp};
use std::collections::BTreeSet;

const COUNTS: [usize; 7] = [0, 1, 3, 17, 257, 4096 + 5, 100_003];
/// Returns cases of every collective with every type and, where it reduces, every operation.
/// Counts, in-place buffers, alignments and roots are random.
fn every_combination(nranks: usize, rng: &mut Rng, counts: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for collective in Collective::ALL {
        if collective == Collective::SendRecv {
            continue; // not a call of all ranks: tested below
        }
        let ops = if collective.reduces() {
            &OPS[..]
        } else {
            &OPS[..1]
        };
        for dtype in DType::ALL {
            for &op in ops {
                let mut call = Call::new(collective, dtype, rng.pick(counts));
                call.op = op;
                if let ReduceOp::PreMulSum(_) = op {
                    call.op = ReduceOp::PreMulSum(factor(dtype, 0));
                }
                if collective.has_root() {
                    call.root = rng.below(nranks);
                }
                let mut case = Case::new(call, rng.next());
                case.in_place = rng.below(2) == 0;
                case.align = [rng.below(17), rng.below(17)];
                cases.push(case);
            }
        }
    }
    cases
}

#[test]
fn every_collective_type_and_operation_is_right_among_threads() {
    let mut rng = Rng(seed());
    for nranks in [1, 2, 3, 4, 5, 8] {
        let cases = every_combination(nranks, &mut rng, &COUNTS[..6]);
        assert_eq!(
            run(TransportKind::Loopback, nranks, &cases).ran,
            cases.len()
        );
    }
}

#[test]
fn every_collective_type_and_operation_is_right_over_shm_and_tcp() {
    let mut rng = Rng(seed() + 1);
    for (transport, nranks) in [
        (TransportKind::Shm, 2),
        (TransportKind::Shm, 5),
        (TransportKind::Tcp, 2),
        (TransportKind::Tcp, 3),
    ] {
        let cases = every_combination(nranks, &mut rng, &COUNTS[..6]);
        assert_eq!(run(transport, nranks, &cases).ran, cases.len());
    }
}

/// The first calls with large outputs compare ways to store them, two of each way in turn.
#[test]
fn large_outputs_are_right_by_both_ways_to_store_them() {
    let mut rng = Rng(seed() + 7);
    for transport in [TransportKind::Loopback, TransportKind::Shm] {
        let mut cases = Vec::new();
        for collective in &Collective::OF_ALL_RANKS {
            for algorithm in Algorithm::FLAT {
                let dtype = rng.pick(&[DType::F64, DType::I64]);
                // Outputs of 4 MiB and more.
                let mut call = Call::new(*collective, dtype, 530_000);
                call.algorithm = Some(algorithm);
                let mut case = Case::new(call, rng.next());
                case.in_place = rng.below(4) == 0;
                case.align = [rng.below(17), rng.below(17)];
                cases.push(case);
            }
        }
        // With two ranks some collectives have one algorithm only.
        assert!(run(transport, 2, &cases).ran >= 2 * Collective::OF_ALL_RANKS.len());
    }
}

#[test]
fn every_count_and_algorithm_is_right_in_and_out_of_place() {
    // Cases skip algorithms that the table lacks, so the table itself must list these.
    for algorithm in Algorithm::FLAT {
        assert!(
            algorithms(Collective::AllReduce).contains(&algorithm),
            "{algorithm}"
        );
    }
    let mut rng = Rng(seed() + 2);
    let mut refused = BTreeSet::new();
    for nranks in [1, 2, 3, 4, 5, 8] {
        let mut cases = Vec::new();
        for collective in &Collective::OF_ALL_RANKS {
            for count in COUNTS {
                for algorithm in Algorithm::FLAT {
                    let mut call = Call::new(*collective, DType::F32, count);
                    if rng.below(4) == 0 {
                        call.dtype = rng.pick(&[DType::I64, DType::BF16, DType::U8]);
                    }
                    if collective.has_root() {
                        call.root = rng.below(nranks);
                    }
                    call.algorithm = Some(algorithm);
                    let mut case = Case::new(call, rng.next());
                    case.in_place = rng.below(2) == 0;
                    case.align = [4 * rng.below(5), 4 * rng.below(5)];
                    cases.push(case);
                }
            }
        }
        refused.extend(run(TransportKind::Loopback, nranks, &cases).refused);
    }
    for collective in Collective::ALL {
        let of = |(name, _): &&(&str, &str)| *name == collective.name();
        let without = refused.iter().filter(of).count();
        assert!(
            without < Algorithm::FLAT.len(),
            "{collective} has no algorithm: {refused:?}"
        );
    }
    println!("not offered: {refused:?}");
}

fn lossy_codecs() -> Vec<CodecSpec> {
    let texts = [
        "linear8:block=32",
        "dynamic8:block=4096",
        "static8:offset=1",
    ];
    let special = texts.iter().map(|text| text.parse().unwrap());
    let plain = CodecKind::ALL[1..].iter().map(|&kind| CodecSpec::of(kind));
    plain.chain(special).collect()
}

fn codec_cases(nranks: usize, rng: &mut Rng, counts: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for codec in lossy_codecs() {
        for &algorithm in algorithms(Collective::AllReduce) {
            for &count in counts {
                for collective in [
                    Collective::AllReduce,
                    rng.pick(&[Collective::AllGather, Collective::Broadcast]),
                    rng.pick(&Collective::OF_ALL_RANKS),
                ] {
                    let dtype = rng.pick(&[DType::F32, DType::F32, DType::BF16, DType::F16]);
                    let mut call = Call::new(collective, dtype, count);
                    if collective.reduces() {
                        call.op = rng.pick(&[OPS[0], OPS[0], OPS[4], OPS[5]]);
                    }
                    if collective.has_root() {
                        call.root = rng.below(nranks);
                    }
                    call.codec = Some(codec.into());
                    call.algorithm = (collective == Collective::AllReduce).then_some(algorithm);
                    let mut case = Case::new(call, rng.next());
                    case.in_place = rng.below(2) == 0;
                    cases.push(case);
                }
            }
        }
    }
    cases
}

#[test]
fn codecs_stay_within_their_bounds() {
    let mut rng = Rng(seed() + 3);
    for (transport, nranks) in [
        (TransportKind::Loopback, 1),
        (TransportKind::Loopback, 2),
        (TransportKind::Loopback, 3),
        (TransportKind::Loopback, 8),
        (TransportKind::Shm, 4),
        (TransportKind::Tcp, 2),
    ] {
        let cases = codec_cases(nranks, &mut rng, &[1, 257, 4096 + 5]);
        run(transport, nranks, &cases);
    }
    let cases = codec_cases(3, &mut rng, &[100_003]);
    run(TransportKind::Loopback, 3, &cases);
}

#[test]
fn values_that_a_codec_represents_arrive_exactly() {
    let mut cases = Vec::new();
    for &algorithm in algorithms(Collective::AllReduce) {
        let mut call = Call::new(Collective::AllReduce, DType::F32, 4101);
        call.codec = Some(CodecSpec::of(CodecKind::Mantissa8).into());
        call.algorithm = Some(algorithm);
        let mut case = Case::new(call, 5);
        case.data = Data::Units;
        cases.push(case);
    }
    assert_eq!(run(TransportKind::Loopback, 5, &cases).ran, cases.len());
}

#[test]
fn results_have_the_same_bits_in_repeated_runs_and_over_all_transports() {
    let nranks = 4;
    let mut cases = Vec::new();
    let mut codecs = lossy_codecs();
    codecs.push(CodecSpec::RAW);
    let seeded = ["minmax2:seed=5", "linear8:seed=5", "dynamic8:seed=6"];
    codecs.extend(seeded.map(|text| text.parse::<CodecSpec>().unwrap()));
    for codec in codecs {
        for &algorithm in algorithms(Collective::AllReduce) {
            for count in [257, 40_009] {
                let mut call = Call::new(Collective::AllReduce, DType::F32, count);
                call.codec = Some(codec.into());
                call.algorithm = Some(algorithm);
                cases.push(Case::new(call, 77 + count as u64));
            }
        }
        for collective in [Collective::AllGather, Collective::Broadcast] {
            let mut call = Call::new(collective, DType::BF16, 5001);
            call.codec = Some(codec.into());
            cases.push(Case::new(call, 78));
        }
    }
    // Runs the cases once, then each case twice in a row on one communicator, then all on fresh
    // communicators.
    let first = run(TransportKind::Loopback, nranks, &cases);
    let twice: Vec<Case> = cases.iter().flat_map(|case| [*case, *case]).collect();
    let repeated = run(TransportKind::Loopback, nranks, &twice);
    for ((pair, &a), case) in repeated
        .hashes
        .chunks_exact(2)
        .zip(&first.hashes)
        .zip(&cases)
    {
        let spec = case.call.codec.unwrap().inter;
        if spec.seed != 0 || spec.kind == CodecKind::TernGrad {
            assert_ne!(pair[0], pair[1], "two operations drew alike: {case:?}");
        } else {
            assert_eq!([a; 2], *pair, "another run gave other bits: {case:?}");
        }
    }
    for transport in support::TRANSPORTS {
        let again = run(transport, nranks, &cases);
        for (at, case) in cases.iter().enumerate() {
            let (a, b) = (first.hashes[at], again.hashes[at]);
            // If no algorithm is forced, the planner may choose another one on each transport.
            if case.call.algorithm.is_some() || transport == TransportKind::Loopback {
                assert_eq!(
                    a, b,
                    "{transport} gave other bits than the first run: {case:?}"
                );
            }
        }
    }
}

/// A source with more peers than a step has targets sends in several steps. All steps must round
/// with equal random numbers, or ranks would receive different values.
#[test]
fn many_peers_receive_equally_rounded_values() {
    let mut cases = Vec::new();
    for codec in [
        "minmax2:seed=5",
        "terngrad",
        "linear8:seed=5",
        "dynamic8:seed=6",
    ] {
        for collective in [Collective::AllGather, Collective::Broadcast] {
            let mut call = Call::new(collective, DType::F32, 1500);
            call.codec = codec.parse().ok();
            call.algorithm = Some(Algorithm::Direct);
            cases.push(Case::new(call, 79));
        }
    }
    // `run` also checks that all ranks have equal outputs.
    assert_eq!(run(TransportKind::Loopback, 11, &cases).ran, cases.len());
}

#[test]
fn non_finite_input_reaches_every_rank() {
    let (nranks, count) = (3, 2000);
    for codec in CodecKind::ALL.map(CodecSpec::of) {
        for (what, poison) in [("NaN", f32::NAN), ("infinity", f32::INFINITY)] {
            for &algorithm in algorithms(Collective::AllReduce) {
                let outputs = world(nranks, &config(TransportKind::Loopback), |comm| {
                    let mut data = vec![0.5f32; count];
                    if comm.rank() == 1 {
                        data[700] = poison;
                    }
                    let mut call = Call::new(Collective::AllReduce, DType::F32, count);
                    call.codec = Some(codec.into());
                    call.algorithm = Some(algorithm);
                    let mut output = vec![0f32; count];
                    let buffers = UserBuffers::new(
                        cinch::mem::bytes_of(&data),
                        cinch::mem::bytes_of_mut(&mut output),
                    );
                    let report = comm.call(&call, buffers).unwrap();
                    (output, report.input.map_or(0, |stats| stats.non_finite))
                });
                for (rank, (output, non_finite)) in outputs.iter().enumerate() {
                    let what = format!("{codec}, {algorithm}, {what}, rank {rank}");
                    assert!(!output[700].is_finite(), "{what}: {}", output[700]);
                    // In the scale block of the damaged element, others may become non-finite too;
                    // elements of all other blocks must not.
                    for at in (0..256).chain(1024..count) {
                        assert!(output[at].is_finite(), "{what}: element {at}");
                    }
                    let lossy = codec.is_lossy() && rank == 1;
                    assert_eq!(
                        *non_finite,
                        u64::from(lossy),
                        "{what}: the report's counter"
                    );
                }
            }
        }
    }
}

#[test]
fn min_and_max_keep_nan_and_refuse_lossy_codecs() {
    let outputs = world(2, &config(TransportKind::Loopback), |comm| {
        let linear8 = Some("linear8".parse().unwrap());
        let mut refused = Vec::new();
        for (dtype, op) in [
            (DType::F32, ReduceOp::Max),
            (DType::F32, ReduceOp::Min),
            (DType::F32, ReduceOp::Prod),
            (DType::I32, ReduceOp::Sum),
            (DType::U64, ReduceOp::Avg),
        ] {
            let mut call = Call::new(Collective::AllReduce, dtype, 300);
            (call.op, call.codec) = (op, linear8);
            call.wrapping_average = true;
            let bytes = 300 * dtype.size();
            let (input, mut output) = (vec![0; bytes], vec![0; bytes]);
            refused.push(
                comm.call(&call, UserBuffers::new(&input, &mut output))
                    .err(),
            );
        }
        // The refused calls sent nothing, so the communicator still works.
        let input = if comm.rank() == 0 {
            [f32::NAN, 1.0]
        } else {
            [1.0, 2.0]
        };
        let (mut max, mut min) = ([0.0; 2], [0.0; 2]);
        comm.all_reduce(&input, &mut max, ReduceOp::Max).unwrap();
        comm.all_reduce(&input, &mut min, ReduceOp::Min).unwrap();
        (refused, max, min)
    });
    for (refused, max, min) in outputs {
        for (at, error) in refused.iter().enumerate() {
            let error = error
                .as_ref()
                .unwrap_or_else(|| panic!("call {at} was not refused"));
            assert!(
                matches!(
                    error.kind(),
                    ErrorKind::InvalidArgument | ErrorKind::InvalidUsage | ErrorKind::Unsupported
                ) && error.message().contains("linear8"),
                "{error}"
            );
        }
        assert!(max[0].is_nan() && max[1] == 2.0 && min[0].is_nan() && min[1] == 1.0);
    }
}

#[test]
fn sends_and_receives_of_a_group_form_a_ring() {
    for (transport, nranks) in [
        (TransportKind::Loopback, 2),
        (TransportKind::Loopback, 5),
        (TransportKind::Shm, 3),
        (TransportKind::Tcp, 3),
    ] {
        for count in [0, 1, 257, 100_003] {
            world(nranks, &config(transport), |comm| {
                let (rank, next) = (comm.rank(), (comm.rank() + 1) % nranks);
                let before = (rank + nranks - 1) % nranks;
                let of = |rank: usize| (0..count as u32).map(move |at| at * 7 + rank as u32);
                let input: Vec<u32> = of(rank).collect();
                let mut output = vec![u32::MAX; count];
                let mut send = Call::new(Collective::SendRecv, DType::U32, count);
                (send.root, send.peer) = (rank, next);
                let mut recv = send;
                (recv.root, recv.peer) = (before, rank);
                let mut group = Group::new();
                let bytes = cinch::mem::bytes_of(&input);
                group
                    .add(&comm, &send, UserBuffers::new(bytes, &mut []))
                    .unwrap();
                let bytes = cinch::mem::bytes_of_mut(&mut output);
                group
                    .add(&comm, &recv, UserBuffers::new(&[], bytes))
                    .unwrap();
                assert_eq!(group.run().unwrap().len(), 2);
                assert!(
                    output.iter().copied().eq(of(before)),
                    "{transport}, rank {rank}"
                );
            });
        }
    }
}
