//! Tests error feedback through the engine against a naive two-shot exchange. Values that lossy encodes drop
//! must not be lost: they arrive in later calls.

use cinch::codec::{Span, build};
use cinch::comm::Call;
use cinch::cpu::Isa;
use cinch::mem::{UserBuffers, bytes_of, bytes_of_mut};
use cinch::testing::{gaussian, local_world, random_word};
use cinch::{Algorithm, CodecSpec, Collective, Communicator, Config, DType, ReduceOp};

const TENSOR: u64 = 11;

/// Returns a configuration with small slots, so that a few thousand elements take several chunks
/// and passes.
fn config() -> Config {
    Config {
        slot_bytes: 4096,
        ..Config::default()
    }
}

fn input(rank: usize, call: usize, count: usize) -> Vec<f32> {
    let seed = 1000 * rank as u64 + call as u64;
    (0..count as u64)
        .map(|at| gaussian(random_word(seed, at)) as f32)
        .collect()
}

fn all_reduce(codec: &str, algorithm: Algorithm, count: usize, feedback: bool) -> Call {
    Call {
        codec: Some(codec.parse().unwrap()),
        algorithm: Some(algorithm),
        tensor: Some(TENSOR),
        feedback: feedback.then_some(TENSOR),
        ..Call::new(Collective::AllReduce, DType::F32, count)
    }
}

fn run(comm: &Communicator, call: &Call, input: &[f32]) -> Vec<f32> {
    let mut output = vec![0f32; input.len()];
    let buffers = UserBuffers::new(bytes_of(input), bytes_of_mut(&mut output));
    comm.call(call, buffers).unwrap();
    output
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns decode(encode(value + residual)) with the scalar codec, and updates the residual.
fn through(spec: CodecSpec, value: &[f32], residual: &mut [f32]) -> Vec<f32> {
    let v: Vec<f32> = value.iter().zip(&*residual).map(|(x, r)| x + r).collect();
    let codec = build(spec, Isa::Scalar).unwrap().unwrap();
    let span = Span::whole(v.len());
    let mut wire = vec![0; codec.wire_bytes(v.len())];
    codec.encode(span, &v, None, &mut wire, None);
    let mut back = vec![0.0; v.len()];
    codec.decode(span, &wire, &mut back);
    for ((r, v), back) in residual.iter_mut().zip(&v).zip(&back) {
        *r = v - back;
    }
    back
}

#[test]
fn direct_on_two_ranks_equals_a_naive_two_shot_bit_for_bit() {
    // These codecs have no scales. Received values are exact, and a sum of two values is rounded
    // once in any order.
    for codec in ["cast_bf16", "cast16", "static8", "mantissa8"] {
        let (count, calls) = (64, 20);
        let spec: CodecSpec = codec.parse().unwrap();
        let outputs = local_world(2, &Config::default(), |comm| {
            let call = all_reduce(codec, Algorithm::Direct, count, true);
            (0..calls)
                .map(|at| run(comm, &call, &input(comm.rank(), at, count)))
                .collect::<Vec<_>>()
        });
        // Rank r owns half r of the elements. It receives the other rank's encoded contribution to this half,
        // and sends the encoded sum back.
        let half = count / 2;
        let mut worker = [vec![0f32; half], vec![0f32; half]];
        let mut owner = [vec![0f32; half], vec![0f32; half]];
        for at in 0..calls {
            let mut expected = Vec::new();
            for rank in 0..2 {
                let part = rank * half..(rank + 1) * half;
                let own = &input(rank, at, count)[part.clone()];
                let other = &input(1 - rank, at, count)[part];
                let received = through(spec, other, &mut worker[1 - rank]);
                let sum: Vec<f32> = own.iter().zip(&received).map(|(a, b)| a + b).collect();
                expected.extend(through(spec, &sum, &mut owner[rank]));
            }
            for output in &outputs {
                assert_eq!(bits(&output[at]), bits(&expected), "{codec} call {at}");
            }
        }
    }
}

/// Returns the largest difference, over all elements, between the sum of all outputs and the sum of
/// all inputs.
fn drift(nranks: usize, call: &Call, calls: usize) -> f64 {
    let count = call.count;
    let outputs = local_world(nranks, &config(), |comm| {
        let mut sum = vec![0f64; count];
        for at in 0..calls {
            let output = run(comm, call, &input(comm.rank(), at, count));
            for (sum, value) in sum.iter_mut().zip(output) {
                *sum += f64::from(value);
            }
        }
        sum
    });
    let mut exact = vec![0f64; count];
    for rank in 0..nranks {
        for at in 0..calls {
            for (sum, value) in exact.iter_mut().zip(input(rank, at, count)) {
                *sum += f64::from(value);
            }
        }
    }
    for output in &outputs {
        assert_eq!(*output, outputs[0], "ranks differ");
    }
    let distance = |(a, b): (&f64, &f64)| (a - b).abs();
    outputs[0]
        .iter()
        .zip(&exact)
        .map(distance)
        .fold(0.0, f64::max)
}

#[test]
fn dropped_values_arrive_later_on_every_algorithm() {
    for nranks in [2, 3, 4, 10] {
        for algorithm in Algorithm::FLAT {
            for codec in ["linear8:block=32", "dynamic8", "mantissa8", "cast_bf16"] {
                let call = all_reduce(codec, algorithm, 3000, true);
                let (few, many) = (drift(nranks, &call, 4), drift(nranks, &call, 24));
                // At most one residual for each chunk and hop is pending, so the difference does not grow.
                assert!(
                    many < 2.5 * few,
                    "{codec} {algorithm} {nranks}: {few} {many}"
                );
                let plain = Call {
                    feedback: None,
                    ..call
                };
                let lost = drift(nranks, &plain, 24);
                assert!(
                    many < 0.75 * lost,
                    "{codec} {algorithm} {nranks}: {many} {lost}"
                );
            }
        }
    }
}

#[test]
fn averages_and_premultiplied_sums_have_feedback() {
    for codec in [
        "raw",
        "linear8",
        "dynamic8",
        "static8",
        "mantissa8",
        "cast_bf16",
        "cast16",
    ] {
        for op in [
            ReduceOp::Avg,
            ReduceOp::PreMulSum(cinch::types::Scalar::Float(0.5)),
        ] {
            let outputs = local_world(3, &config(), |comm| {
                let call = Call {
                    op,
                    ..all_reduce(codec, Algorithm::Direct, 3000, true)
                };
                let mut sum = vec![0f64; call.count];
                for _ in 0..64 {
                    let output = run(comm, &call, &input(comm.rank(), 0, call.count));
                    for (sum, value) in sum.iter_mut().zip(output) {
                        *sum += f64::from(value);
                    }
                }
                sum
            });
            let factor = if op == ReduceOp::Avg { 1.0 / 3.0 } else { 0.5 };
            let inputs: Vec<_> = (0..3).map(|rank| input(rank, 0, 3000)).collect();
            for at in 0..3000 {
                let exact: f64 = inputs.iter().map(|x| f64::from(x[at])).sum::<f64>() * factor;
                // The mean of 64 outputs is much closer than a single output.
                let mean = outputs[0][at] / 64.0;
                assert!(
                    (mean - exact).abs() < 0.03,
                    "{codec} {op:?} {at}: {mean} {exact}"
                );
            }
            assert!(outputs.iter().all(|output| *output == outputs[0]));
        }
    }
}

#[test]
fn tensor_scales_work_with_feedback() {
    let call = all_reduce("linear8:tensor=5", Algorithm::Direct, 3000, true);
    let (few, many) = (drift(4, &call, 4), drift(4, &call, 30));
    assert!(many < 4.0 * few, "{few} {many}");
}

#[test]
fn feedback_of_a_collective_that_does_not_reduce_fails() {
    let outputs = local_world(4, &config(), |comm| {
        let mut sums = [0f64; 2];
        for _ in 0..64 {
            let mut ones = vec![0.3f32; 4 * 500];
            // The largest value of a block rounds to itself; all others have an error.
            ones.iter_mut().step_by(100).for_each(|value| *value = 1.0);
            for (which, collective) in [Collective::ReduceScatter, Collective::Reduce]
                .into_iter()
                .enumerate()
            {
                let call = Call {
                    collective,
                    count: if which == 0 { 500 } else { 2000 },
                    feedback: Some(which as u64),
                    ..all_reduce("linear8", Algorithm::Ring, 0, true)
                };
                let mut output = vec![0f32; call.count];
                let buffers = UserBuffers::new(bytes_of(&ones), bytes_of_mut(&mut output));
                comm.call(&call, buffers).unwrap();
                sums[which] += f64::from(output[1]) / 64.0;
            }
        }
        let gather = Call {
            collective: Collective::AllGather,
            ..all_reduce("linear8", Algorithm::Ring, 2, true)
        };
        let mut output = [0f32; 8];
        let buffers = UserBuffers::new(bytes_of(&[1f32, 2.0]), bytes_of_mut(&mut output));
        let error = comm.call(&gather, buffers).unwrap_err();
        assert!(
            error.message().contains("collectives that reduce"),
            "{error}"
        );
        sums
    });
    for (rank, sums) in outputs.iter().enumerate() {
        assert!((sums[0] - 1.2).abs() < 5e-4, "rank {rank}: {sums:?}");
    }
    assert!((outputs[0][1] - 1.2).abs() < 5e-4, "{outputs:?}");
}

#[test]
fn nan_reaches_the_output_and_leaves_residuals_finite() {
    let outputs = local_world(3, &config(), |comm| {
        let call = all_reduce("linear8:block=32", Algorithm::Ring, 3000, true);
        let clean = input(comm.rank(), 0, call.count);
        let mut dirty = clean.clone();
        if comm.rank() == 1 {
            dirty[70] = f32::NAN;
        }
        run(comm, &call, &clean);
        let poisoned = run(comm, &call, &dirty);
        let residuals = comm.export_residuals().unwrap();
        (poisoned, run(comm, &call, &clean), residuals)
    });
    for (poisoned, clean, residuals) in &outputs {
        assert!(poisoned[70].is_nan());
        assert!(clean.iter().all(|value| value.is_finite()));
        assert_eq!(bits(clean), bits(&outputs[0].1));
        // The export holds a residual of 4 bytes for each element.
        assert!(residuals.len() > 3000 * 4);
    }
}

#[test]
fn report_with_feedback_describes_the_input() {
    local_world(2, &config(), |comm| {
        let mut x = vec![0.3f32; 1000];
        x[0] = 1.0;
        x[1] = f32::INFINITY;
        let mut reports = Vec::new();
        for feedback in [false, true, true, true] {
            let call = all_reduce("linear8:block=32", Algorithm::Direct, 1000, feedback);
            let mut output = vec![0f32; 1000];
            let buffers = UserBuffers::new(bytes_of(&x), bytes_of_mut(&mut output));
            reports.push(comm.call(&call, buffers).unwrap());
        }
        for report in &reports {
            let (a, b) = (report.input.unwrap(), reports[0].input.unwrap());
            assert_eq!((a.non_finite, a.abs_max), (1, 1.0));
            assert!((a.sum_squares / b.sum_squares - 1.0).abs() < 1e-9);
            assert_eq!(report.wire_bytes, reports[0].wire_bytes);
        }
    });
}

#[test]
fn imported_residuals_continue_the_exported_run() {
    let call = all_reduce("dynamic8", Algorithm::Tree, 3000, true);
    let step = |comm: &Communicator, at: usize| run(comm, &call, &input(comm.rank(), at, 3000));
    let whole = local_world(4, &config(), |comm| {
        (0..6).map(|at| step(comm, at)).collect::<Vec<_>>()
    });
    let stored = local_world(4, &config(), |comm| {
        (0..3).for_each(|at| drop(step(comm, at)));
        comm.export_residuals().unwrap()
    });
    let rest = local_world(4, &config(), |comm| {
        let rank = comm.rank();
        assert!(comm.import_residuals(&stored[(rank + 1) % 4]).is_err());
        comm.import_residuals(&stored[rank]).unwrap();
        (3..6).map(|at| step(comm, at)).collect::<Vec<_>>()
    });
    for rank in 0..4 {
        for at in 3..6 {
            assert_eq!(bits(&rest[rank][at - 3]), bits(&whole[rank][at]));
        }
    }
    // Forgetting, rescaling by 0 and a call with another count all reset residuals, so the next call equals
    // the first.
    local_world(4, &config(), |comm| {
        let first = step(comm, 0);
        assert_eq!(bits(&first), bits(&whole[comm.rank()][0]));
        let second = step(comm, 0);
        assert_ne!(bits(&second), bits(&first));
        comm.forget_residuals(Some(TENSOR)).unwrap();
        assert_eq!(bits(&step(comm, 0)), bits(&first));
        comm.rescale_residuals(0.0).unwrap();
        assert_eq!(bits(&step(comm, 0)), bits(&first));
        let other = all_reduce("dynamic8", Algorithm::Tree, 2999, true);
        run(comm, &other, &input(comm.rank(), 0, 2999));
        assert_eq!(bits(&step(comm, 0)), bits(&first));
    });
}

/// A residual that does not exist yet is +0 in every encode of a chunk. With 10 ranks an owner encodes its sum
/// twice, for eight ranks and for one rank.
#[test]
fn first_call_of_negative_zeros_gives_all_ranks_the_same_bits() {
    for codec in ["cast16", "cast_bf16", "trunc16", "linear8"] {
        for algorithm in Algorithm::FLAT {
            let outputs = local_world(10, &Config::default(), |comm| {
                let call = all_reduce(codec, algorithm, 100, true);
                let first = run(comm, &call, &[-0.0; 100]);
                (bits(&first), bits(&run(comm, &call, &[-0.0; 100])))
            });
            for (rank, (first, second)) in outputs.iter().enumerate() {
                assert_eq!(*first, outputs[0].0, "{codec} {algorithm} rank {rank}");
                assert_eq!(first, second, "{codec} {algorithm} rank {rank}");
            }
        }
    }
}

/// Calls with another codec or another algorithm, and also calls with the codec again, start without
/// residuals.
#[test]
fn change_of_codec_or_algorithm_drops_residuals() {
    local_world(3, &Config::default(), |comm| {
        let x = input(comm.rank(), 0, 500);
        let call = all_reduce("minmax2", Algorithm::Direct, 500, true);
        let others = [
            all_reduce("linear8", Algorithm::Direct, 500, true),
            all_reduce("minmax2", Algorithm::Ring, 500, true),
        ];
        let first = bits(&run(comm, &call, &x));
        assert_ne!(bits(&run(comm, &call, &x)), first);
        for other in others {
            run(comm, &other, &x);
            assert_eq!(bits(&run(comm, &call, &x)), first, "{other:?}");
        }
        // Parameters of a codec keep residuals.
        let seeded = all_reduce("minmax2:seed=3", Algorithm::Direct, 500, true);
        let norm = |call: &Call| {
            let mut output = vec![0f32; 500];
            let buffers = UserBuffers::new(bytes_of(&x), bytes_of_mut(&mut output));
            comm.call(call, buffers).unwrap().residual_norm
        };
        assert!(norm(&seeded).unwrap() > 0.0);
        assert_eq!(
            norm(&Call {
                feedback: None,
                ..call
            }),
            None
        );
    });
}

/// Rounding of a finished sum to 16 bits is part of the residual, so that the mean of many outputs is exact.
#[test]
fn rounding_of_16_bit_outputs_is_fed_back() {
    const CALLS: usize = 200;
    let element = |dtype, value: f32| match dtype {
        DType::BF16 => half::bf16::from_f32(value).to_bits(),
        _ => half::f16::from_f32(value).to_bits(),
    };
    let widened = |dtype, bits: u16| match dtype {
        DType::BF16 => f64::from(half::bf16::from_bits(bits).to_f32()),
        _ => f64::from(half::f16::from_bits(bits).to_f32()),
    };
    for dtype in [DType::BF16, DType::F16] {
        for codec in ["linear8", "cast_bf16", "minmax4"] {
            for algorithm in [Algorithm::Ring, Algorithm::Tree, Algorithm::Direct] {
                let outputs = local_world(3, &Config::default(), |comm| {
                    let own = [1.0, 0.0029, 0.00013][comm.rank()];
                    let x = element(dtype, own).to_le_bytes().repeat(64);
                    let number = |x: &[u8]| widened(dtype, u16::from_le_bytes([x[14], x[15]]));
                    let call = Call {
                        dtype,
                        ..all_reduce(codec, algorithm, 64, true)
                    };
                    let mut sum = 0.0;
                    for _ in 0..CALLS {
                        let mut output = [0u8; 128];
                        let buffers = UserBuffers::new(bytes_of(&x), bytes_of_mut(&mut output));
                        comm.call(&call, buffers).unwrap();
                        sum += number(&output);
                    }
                    (sum, CALLS as f64 * number(&x))
                });
                let exact: f64 = outputs.iter().map(|(_, exact)| exact).sum();
                for (sum, _) in &outputs {
                    let off = (sum - exact).abs();
                    assert!(off < 0.03, "{dtype} {codec} {algorithm}: off by {off}");
                }
            }
        }
    }
}
