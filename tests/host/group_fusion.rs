//! Tests the fusion of small all_reduces of a group into one transfer. Results must equal separate
//! calls, and each call has its own report. Calls that cannot be fused run separately.

// Several calls have buffers in one allocation, as in C programs.
#![allow(unsafe_code)]

use cinch::comm::{Call, Group};
use cinch::cpu::Isa;
use cinch::mem::{UserBuffers, bytes_of, bytes_of_mut};
use cinch::testing::{gaussian, local_world, random_word};
use cinch::types::{CodecKind, Element, Scalar, ScaleRule};
use cinch::{
    Algorithm, CodecSpec, Collective, Communicator, Config, DType, ErrorKind, ReduceOp, Report,
    Result,
};

/// Element counts next to the sizes of scale blocks and cache lines.
const COUNTS: [usize; 9] = [1, 15, 16, 17, 255, 256, 257, 1000, 4096];

fn unfused() -> Config {
    Config {
        fuse_bytes: 0,
        ..Config::default()
    }
}

/// Runs all calls in one group, every third one in place. Returns outputs and reports.
fn group<T: Element>(
    comm: &Communicator,
    calls: &[Call],
    inputs: &[Vec<T>],
) -> Result<(Vec<Vec<T>>, Vec<Report>)> {
    let mut outputs: Vec<Vec<T>> = inputs.to_vec();
    let mut group = Group::new();
    for (at, (call, output)) in calls.iter().zip(&mut outputs).enumerate() {
        let input = bytes_of(&inputs[at]);
        let output = bytes_of_mut(output);
        let buffers = match at % 3 {
            0 => UserBuffers::in_place(output, 0, input.len())?,
            _ => UserBuffers::new(input, output),
        };
        group.add(comm, call, buffers)?;
    }
    let reports = group.run()?;
    Ok((outputs, reports))
}

fn calls(dtype: DType, op: ReduceOp, codec: &str) -> Vec<Call> {
    let call = |count| Call {
        op,
        codec: Some(codec.parse().unwrap()),
        wrapping_average: true,
        ..Call::new(Collective::AllReduce, dtype, count)
    };
    COUNTS.map(call).to_vec()
}

fn floats(rank: usize) -> Vec<Vec<f32>> {
    let draw = |tensor: usize, at: usize| {
        let word = random_word((10 * rank + tensor) as u64, at as u64);
        // Magnitudes differ by powers of ten between tensors. If two tensors shared a scale block,
        // results would differ visibly.
        gaussian(word) as f32 * 10f32.powi(tensor as i32 - 4)
    };
    let tensors = COUNTS.iter().enumerate();
    tensors
        .map(|(tensor, &count)| (0..count).map(|at| draw(tensor, at)).collect())
        .collect()
}

#[test]
fn fused_exact_results_equal_separate_calls() {
    for nranks in [1, 2, 3, 5] {
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Avg, ReduceOp::Prod] {
            let run = |config: &Config| {
                local_world(nranks, config, |comm| {
                    let integers: Vec<Vec<i32>> = COUNTS
                        .map(|count| {
                            (0..count)
                                .map(|at| (at % 7) as i32 - comm.rank() as i32)
                                .collect()
                        })
                        .to_vec();
                    let whole: Vec<Vec<f32>> = integers
                        .iter()
                        .map(|x| x.iter().map(|&x| x as f32).collect())
                        .collect();
                    let (a, ran) = group(comm, &calls(DType::I32, op, "raw"), &integers).unwrap();
                    let (b, _) = group(comm, &calls(DType::F32, op, "raw"), &whole).unwrap();
                    let fused: Vec<usize> = ran.iter().map(|report| report.fused).collect();
                    (a, b, fused)
                })
            };
            let (together, separate) = (run(&Config::default()), run(&unfused()));
            for (one, other) in together.iter().zip(&separate) {
                assert_eq!(
                    (&one.0, &one.1),
                    (&other.0, &other.1),
                    "{nranks} ranks, {op}"
                );
                assert_eq!(one.2, [COUNTS.len(); COUNTS.len()]);
                assert_eq!(other.2, [1; COUNTS.len()]);
            }
        }
    }
}

/// Between two ranks there is only one order of addition, so even rounded sums are equal with and without
/// fusion. With a codec, each tensor has blocks of its own, whichever tensors are fused with it.
#[test]
fn fused_tensors_share_no_codec_block() {
    for codec in ["raw", "linear8:block=64", "minmax4", "cast_bf16", "static8"] {
        let run = |config: &Config| {
            local_world(2, config, |comm| {
                let calls = calls(DType::F32, ReduceOp::Sum, codec);
                let mut calls = calls;
                // One-shot encodes each contribution once, so results do not depend on the division
                // into chunks.
                calls
                    .iter_mut()
                    .for_each(|call| call.algorithm = Some(Algorithm::OneShot));
                group(comm, &calls, &floats(comm.rank())).unwrap()
            })
        };
        let (together, separate) = (run(&Config::default()), run(&unfused()));
        for ((a, ran), (b, alone)) in together.iter().zip(&separate) {
            assert_eq!(a, b, "{codec}");
            for (ran, alone) in ran.iter().zip(alone) {
                assert_eq!((ran.codec, ran.fused), (alone.codec, COUNTS.len()));
                let (ran, alone) = (ran.input, alone.input);
                assert_eq!(ran.is_some(), codec != "raw", "{codec}");
                let (ran, alone) = (ran.unwrap_or_default(), alone.unwrap_or_default());
                assert_eq!(
                    (ran.abs_max, ran.non_finite),
                    (alone.abs_max, alone.non_finite)
                );
                let off = (ran.sum_squares - alone.sum_squares).abs();
                assert!(
                    off <= 1e-9 * alone.sum_squares,
                    "{codec}: {ran:?} {alone:?}"
                );
            }
        }
    }
}

#[test]
fn non_finite_input_stays_in_its_tensor() {
    local_world(3, &Config::default(), |comm| {
        let mut inputs = floats(comm.rank());
        if comm.rank() == 1 {
            inputs[4][7] = f32::NAN;
        }
        let calls = calls(DType::F32, ReduceOp::Sum, "linear8");
        let (outputs, reports) = group(comm, &calls, &inputs).unwrap();
        for (tensor, output) in outputs.iter().enumerate() {
            assert_eq!(
                output.iter().any(|x| !x.is_finite()),
                tensor == 4,
                "{tensor}"
            );
            let found = reports[tensor].input.unwrap().non_finite;
            assert_eq!(found, u64::from(tensor == 4 && comm.rank() == 1));
        }
    });
}

#[test]
fn large_and_unlike_calls_keep_their_order_and_stay_unfused() {
    local_world(4, &Config::default(), |comm| {
        let small = Call::new(Collective::AllReduce, DType::F32, 100);
        let scaled = Call {
            op: ReduceOp::PreMulSum(Scalar::Float(0.5)),
            ..small
        };
        let large = Call {
            count: 20_000,
            ..small
        };
        let other = Call {
            op: ReduceOp::Max,
            ..small
        };
        let stateful = Call {
            feedback: Some(3),
            ..small
        };
        let shape = [
            small, small, large, small, other, other, other, scaled, scaled, stateful, stateful,
            small, small, small,
        ];
        let inputs: Vec<Vec<f32>> = shape.iter().map(|call| vec![2.0; call.count]).collect();
        let (outputs, reports) = group(comm, &shape, &inputs).unwrap();
        let fused: Vec<usize> = reports.iter().map(|report| report.fused).collect();
        assert_eq!(fused, [2, 2, 1, 1, 3, 3, 3, 1, 1, 1, 1, 3, 3, 3]);
        for (call, output) in shape.iter().zip(&outputs) {
            let expected = match call.op {
                ReduceOp::Max => 2.0,
                ReduceOp::PreMulSum(_) => 4.0,
                _ => 8.0,
            };
            assert!(output.iter().all(|&x| x == expected), "{call:?}");
        }
        // The sum of the bytes in all reports must include the bytes of the large call.
        let sent: u64 = reports.iter().map(|report| report.wire_bytes).sum();
        assert!(sent > 20_000 * 4);
    });
}

#[test]
fn calls_above_the_fusion_limit_are_fused_in_several_parts() {
    local_world(2, &Config::default(), |comm| {
        let calls = [Call::new(Collective::AllReduce, DType::F32, 16 << 10); 40];
        let inputs = vec![vec![1f32; 16 << 10]; 40];
        let (outputs, reports) = group(comm, &calls, &inputs).unwrap();
        let fused: Vec<usize> = reports.iter().map(|report| report.fused).collect();
        let expected = [[16; 16].as_slice(), &[16; 16], &[8; 8]].concat();
        assert_eq!(fused, expected);
        assert!(outputs.iter().flatten().all(|&x| x == 2.0));
    });
}

/// A single thread holds the communicators of all ranks, and must be able to fuse the calls of
/// each.
#[test]
fn one_thread_fuses_calls_of_several_communicators() {
    let comms: Vec<_> = {
        let config = Config::default();
        let faults: Vec<_> = (0..3).map(|_| cinch::sync::Fault::new()).collect();
        let exchanges = cinch::bootstrap::LocalOutOfBand::world(3, &faults);
        let threads: Vec<_> = exchanges
            .into_iter()
            .zip(faults)
            .map(|(exchange, fault)| {
                let config = config.clone();
                std::thread::spawn(move || Communicator::over(exchange, fault, config).unwrap())
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    };
    let call = Call::new(Collective::AllReduce, DType::I32, 33);
    let mut data = vec![vec![vec![1i32; 33]; 5]; comms.len()];
    let mut group = Group::new();
    for (comm, data) in comms.iter().zip(&mut data) {
        for x in data {
            let bytes = bytes_of_mut(x);
            let n = bytes.len();
            group
                .add(comm, &call, UserBuffers::in_place(bytes, 0, n).unwrap())
                .unwrap();
        }
    }
    let reports = group.run().unwrap();
    assert!(reports.iter().all(|report| report.fused == 5));
    assert!(data.iter().flatten().flatten().all(|&x| x == 3));
}

/// Runs `calls` in one group whose buffers are ranges of `memory`. Each entry is a call, and where
/// its input and its output begin, in elements.
fn chain(
    comm: &Communicator,
    calls: &[(Call, usize, usize)],
    memory: &mut [i32],
) -> Result<Vec<Report>> {
    let bytes = bytes_of_mut(memory);
    let (base, nranks, rank) = (bytes.as_mut_ptr(), comm.nranks(), comm.rank());
    let mut group = Group::new();
    for (call, input, output) in calls {
        let is_root = call.root == rank;
        let count = |extent: cinch::types::Extent| extent.elements(call.count, nranks).unwrap() * 4;
        let ins = count(call.collective.input_extent(is_root));
        let outs = count(call.collective.output_extent(is_root));
        assert!((input * 4 + ins).max(output * 4 + outs) <= bytes.len());
        // SAFETY: the assertion keeps both ranges within `memory`, which outlives the group. One
        // thread runs the calls, so ranges that they share have no data race.
        let buffers =
            unsafe { UserBuffers::from_raw(base.add(input * 4), ins, base.add(output * 4), outs) };
        group.add(comm, call, buffers)?;
    }
    group.run()
}

/// A call may read the output of an earlier call in its group, unless the two are fused. Results
/// must be equal with and without fusion.
#[test]
fn calls_read_the_output_of_earlier_calls() {
    const N: usize = 40;
    let sum = Call::new(Collective::AllReduce, DType::I32, N);
    let max = Call {
        op: ReduceOp::Max,
        ..sum
    };
    let of = |collective| Call { collective, ..sum };
    let (broadcast, gather) = (of(Collective::Broadcast), of(Collective::AllGather));
    let (first, second) = (
        Call {
            root: 0,
            peer: 1,
            ..of(Collective::SendRecv)
        },
        Call {
            root: 1,
            peer: 0,
            ..of(Collective::SendRecv)
        },
    );
    let large = Call {
        count: 16 << 10,
        ..sum
    };
    // 18 sums of 64 KiB exceed the size limit of one fused call.
    let mut many: Vec<_> = (0..18).map(|at| (large, at << 14, at << 14)).collect();
    many.push((large, 0, 18 << 14));
    for (what, calls, elements) in [
        (
            "a broadcast before",
            vec![(broadcast, 0, 0), (sum, 0, N), (sum, 2 * N, 2 * N)],
            3 * N,
        ),
        (
            "a gather behind",
            vec![(sum, 0, 0), (sum, N, N), (gather, 0, 2 * N)],
            4 * N,
        ),
        (
            "other sums before",
            vec![(sum, 0, 0), (sum, N, N), (max, 0, 2 * N), (max, N, 3 * N)],
            4 * N,
        ),
        ("more than one fused call", many, 19 << 14),
        (
            "messages behind",
            vec![
                (sum, 0, 0),
                (sum, N, N),
                (first, 0, 2 * N),
                (second, 0, 2 * N),
            ],
            3 * N,
        ),
        (
            "messages before",
            vec![
                (first, 0, 2 * N),
                (second, 0, 2 * N),
                (sum, 2 * N, 2 * N),
                (sum, N, N),
            ],
            3 * N,
        ),
    ] {
        let run = |config: &Config| {
            local_world(2, config, |comm| {
                let mut memory: Vec<i32> = (0..elements as i32)
                    .map(|at| at % 1000 * (1 + comm.rank() as i32))
                    .collect();
                let reports = chain(comm, &calls, &mut memory).unwrap();
                (memory, reports.iter().any(|report| report.fused > 1))
            })
        };
        for (together, separate) in run(&Config::default()).iter().zip(run(&unfused())) {
            assert_eq!((together.1, separate.1), (true, false), "{what}");
            assert!(together.0 == separate.0, "{what}");
        }
    }
}

#[test]
fn fused_calls_that_depend_on_each_other_are_refused() {
    local_world(2, &Config::default(), |comm| {
        let sum = Call::new(Collective::AllReduce, DType::I32, 40);
        let mut memory = vec![1; 80];
        let error = chain(comm, &[(sum, 0, 0), (sum, 0, 40)], &mut memory).unwrap_err();
        assert!(error.message().contains("calls 0 and 1"), "{error}");
        assert!(memory.iter().all(|&x| x == 1));
    });
}

/// Ranks that fuse different calls into transfers of equal length must still report a mismatch.
#[test]
fn ranks_that_fuse_different_calls_report_a_mismatch() {
    let shapes: [[&[usize]; 2]; 4] = [
        [&[10, 6], &[6, 10]],
        [&[5, 5], &[7, 7]],
        [&[16, 16], &[32]],
        [&[16, 16, 16], &[32, 16]],
    ];
    for shape in shapes {
        let errors = local_world(2, &Config::default(), |comm| {
            let call = |&count| Call::new(Collective::AllReduce, DType::F32, count);
            let calls: Vec<Call> = shape[comm.rank()].iter().map(call).collect();
            let inputs: Vec<Vec<f32>> = calls.iter().map(|call| vec![1.0; call.count]).collect();
            group(comm, &calls, &inputs).map(drop)
        });
        let said: Vec<String> = errors
            .into_iter()
            .map(|error| {
                let error = error.expect_err("ranks disagree");
                assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                error.message().to_string()
            })
            .collect();
        let calls = shape[0].len();
        let told = format!("in {calls} fused calls (counts #");
        assert!(said.iter().all(|said| said.contains(&told)), "{said:?}");
    }
}

#[test]
fn group_of_one_call_equals_the_call() {
    local_world(2, &Config::default(), |comm| {
        let mut data = vec![0.5f32; 2000];
        for round in 0..4 {
            let report = coded_sum(comm, &mut data, (comm.rank() + round) % 3 > 0, None);
            assert_eq!(report.fused, 1);
            assert!(data.iter().all(|&x| x == 2f32.powi(round as i32)));
        }
    });
}

/// In a pipeline the group of rank 0 has only the sum; the groups of other ranks also have a message, unknown
/// to rank 0. All ranks must still agree not to sample.
#[test]
fn compressed_sum_in_a_group_is_not_sampled() {
    let config = Config {
        codec_sample: 1,
        ..Config::default()
    };
    local_world(3, &config, |comm| {
        let mut data = vec![0.5f32; 2000];
        let message = (comm.rank() > 0).then(|| Call {
            root: 1,
            peer: 2,
            ..Call::new(Collective::SendRecv, DType::F32, 10)
        });
        for round in 1..4 {
            coded_sum(comm, &mut data, true, message);
            assert!(data.iter().all(|&x| x == 0.5 * 3f32.powi(round)));
        }
        assert_eq!(comm.codec_stats().sampled, 0);
        coded_sum(comm, &mut data, false, None);
        assert_eq!(comm.codec_stats().sampled, 1);
    });
}

/// Runs a compressed sum, alone or in a group; the group may also have a message.
fn coded_sum(
    comm: &Communicator,
    data: &mut [f32],
    grouped: bool,
    message: Option<Call>,
) -> Report {
    let call = Call {
        codec: Some("linear8".parse().unwrap()),
        ..Call::new(Collective::AllReduce, DType::F32, data.len())
    };
    let bytes = bytes_of_mut(data);
    let end = bytes.len();
    let buffers = UserBuffers::in_place(bytes, 0, end).unwrap();
    if !grouped {
        return comm.call(&call, buffers).unwrap();
    }
    let mut received = [0u8; 40];
    let mut group = Group::new();
    group.add(comm, &call, buffers).unwrap();
    if let Some(message) = message {
        let buffers = if comm.rank() == message.root {
            UserBuffers::new(&[0; 40], &mut [])
        } else {
            UserBuffers::new(&[], &mut received)
        };
        group.add(comm, &message, buffers).unwrap();
    }
    group.run().unwrap()[0]
}

/// Runs every codec with each of its parameters, except tensor scales, which belong to a single tensor. A
/// result must depend neither on other tensors in a fused call nor on padding of the tensor's last block.
#[test]
fn fused_calls_of_every_codec_equal_separate_calls() {
    const COUNTS: [usize; 11] = [64, 64, 100, 256, 512, 4096, 4096, 33, 1, 8192, 8192];
    for spec in CodecSpec::samples() {
        if matches!(spec.scale, ScaleRule::Tensor { .. }) && spec.kind.has_scale() {
            continue;
        }
        let codec = cinch::codec::build(spec, Isa::Scalar).unwrap().unwrap();
        let fits = codec.description().fits_extremes;
        let run = |config: &Config| {
            local_world(2, config, |comm| {
                let calls = COUNTS.map(|count| Call {
                    codec: Some(spec.into()),
                    // One-shot encodes each contribution once, so results do not depend on the
                    // division into chunks.
                    algorithm: Some(Algorithm::OneShot),
                    ..Call::new(Collective::AllReduce, DType::F32, count)
                });
                let draw = |tensor: usize, at: usize| {
                    let word = random_word((50 * comm.rank() + tensor) as u64, at as u64);
                    gaussian(word) as f32 * 10f32.powi(tensor as i32 % 5 - 2)
                };
                let inputs: Vec<Vec<f32>> = (0..COUNTS.len())
                    .map(|tensor| (0..COUNTS[tensor]).map(|at| draw(tensor, at)).collect())
                    .collect();
                group(comm, &calls, &inputs).unwrap()
            })
        };
        // Fusion changes the position and the call of an element, and random rounding depends on both.
        let draws = spec.seed != 0 || spec.kind == CodecKind::TernGrad;
        for (together, separate) in run(&Config::default()).iter().zip(run(&unfused())) {
            for (at, (a, b)) in together.0.iter().zip(&separate.0).enumerate() {
                assert!(draws || a == b, "{spec}: tensor {at} of {}", a.len());
                let whole = COUNTS[at].is_multiple_of(codec.granule());
                let fused = together.1[at].fused;
                assert!(fused == 1 || fits || whole, "{spec}: tensor {at}");
                assert_eq!(separate.1[at].fused, 1);
            }
            assert!(together.1.iter().any(|report| report.fused > 1), "{spec}");
        }
    }
}

/// A sum above the format's largest value counts as saturated, in a fused call as in a separate
/// one.
#[test]
fn sums_that_saturate_are_counted() {
    let run = |config: &Config| {
        let reports = local_world(2, config, |comm| {
            let call = |count| Call {
                codec: Some("cast16".parse().unwrap()),
                algorithm: Some(Algorithm::Direct),
                ..Call::new(Collective::AllReduce, DType::F32, count)
            };
            // In the last tensor one element is saturated before it is summed.
            let inputs = vec![vec![1f32; 300], vec![40_000.0; 100], {
                let mut last = vec![2f32; 500];
                last[499] = 1e6;
                last
            }];
            let calls = [call(300), call(100), call(500)];
            let (outputs, reports) = group(comm, &calls, &inputs).unwrap();
            assert!(outputs[1].iter().all(|&x| x == 65_504.0));
            reports
        });
        let saturated = |report: &Report| report.input.unwrap().saturated;
        let total: u64 = reports.iter().flatten().map(saturated).sum();
        let spared: u64 = reports.iter().map(|reports| saturated(&reports[0])).sum();
        (total, spared, reports[0][0].fused)
    };
    // In the second tensor 100 sums saturate. In the last tensor two values count as saturated: the
    // element when its rank sends it, and the sum.
    assert_eq!(run(&unfused()), (100 + 2, 0, 1));
    assert_eq!(run(&Config::default()), (100 + 2, 0, 3));
}
