use super::*;
use crate::cpu::Isa;
use crate::reduce::{Reducer, Tile};
use crate::testing::{Data, Pattern, set_value};

fn i32_bytes(numbers: &[i32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn f32_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Compares all collectives with handwritten results for three ranks and blocks of two elements.
#[test]
fn every_collective_puts_blocks_where_they_belong() {
    let small = [[1, 2], [30, 40], [500, 600]]
        .map(|x| i32_bytes(&x))
        .to_vec();
    let large = [
        [1, 2, 3, 4, 5, 6],
        [10, 20, 30, 40, 50, 60],
        [100, 200, 300, 400, 500, 600],
    ];
    let large = large.map(|x| i32_bytes(&x)).to_vec();
    let all: &[i32] = &[1, 2, 30, 40, 500, 600];
    let none: &[i32] = &[];
    // A collective, its inputs, and the result of each rank. The root is rank 1; in a send/recv
    // rank 1 sends to rank 2.
    type Case<'a> = (Collective, &'a Vec<Vec<u8>>, [&'a [i32]; 3]);
    let cases: [Case; 9] = [
        (Collective::AllReduce, &small, [&[531, 642]; 3]),
        (Collective::AllGather, &small, [all; 3]),
        (
            Collective::ReduceScatter,
            &large,
            [&[111, 222], &[333, 444], &[555, 666]],
        ),
        (Collective::Broadcast, &small, [&[30, 40]; 3]),
        (Collective::Reduce, &small, [none, &[531, 642], none]),
        (Collective::Gather, &small, [none, all, none]),
        (
            Collective::Scatter,
            &large,
            [&[10, 20], &[30, 40], &[50, 60]],
        ),
        (
            Collective::AllToAll,
            &large,
            [
                &[1, 2, 10, 20, 100, 200],
                &[3, 4, 30, 40, 300, 400],
                &[5, 6, 50, 60, 500, 600],
            ],
        ),
        (Collective::SendRecv, &small, [none, none, &[30, 40]]),
    ];
    for (collective, inputs, outputs) in cases {
        let problem = Problem {
            root: 1,
            ..Problem::new(collective, DType::I32, 3, 2)
        };
        for (rank, output) in outputs.into_iter().enumerate() {
            let mut bytes = i32_bytes(output);
            let expected = problem.expected(inputs, rank).unwrap();
            assert_eq!(expected.bytes, bytes, "{collective} of rank {rank}");
            let values: Vec<f64> = output.iter().map(|&x| x.into()).collect();
            assert_eq!(expected.values, values);
            let found = problem.check(inputs, rank, &bytes, 0.0).unwrap();
            assert_eq!((found.elements as usize, found.wrong), (output.len(), 0));
            assert_eq!((found.max_abs_err, found.rms_rel_err()), (0.0, 0.0));
            if let Some(byte) = bytes.get_mut(4) {
                *byte ^= 1;
                let found = problem.check(inputs, rank, &bytes, 0.0).unwrap();
                assert_eq!((found.wrong, found.first_wrong), (1, Some(1)));
                assert_eq!(found.max_abs_err, 1.0);
            }
        }
    }
}

#[test]
fn integers_are_exact() {
    let inputs = vec![vec![200u8, 7, 255], vec![100, 7, 2], vec![3, 8, 0]];
    let expect = |op, factors: &[i128], output: [u8; 3]| {
        let problem = Problem {
            op,
            factors: factors.iter().map(|&factor| Scalar::Int(factor)).collect(),
            ..Problem::new(Collective::AllReduce, DType::U8, 3, 3)
        };
        assert_eq!(problem.expected(&inputs, 1).unwrap().bytes, output, "{op}");
    };
    expect(ReduceOp::Sum, &[], [47, 22, 1]);
    expect(ReduceOp::Prod, &[], [(60_000u32 % 256) as u8, 136, 0]);
    expect(ReduceOp::Max, &[], [200, 8, 255]);
    expect(ReduceOp::Min, &[], [3, 7, 0]);
    expect(ReduceOp::Avg, &[], [15, 7, 0]);
    let op = ReduceOp::PreMulSum(Scalar::Int(2));
    expect(op, &[], [94, 44, 2]);
    expect(op, &[1, -1, 10], [130, 80, 253]);
    // Negative averages truncate towards zero.
    let inputs = vec![i32_bytes(&[-7, i32::MIN]), i32_bytes(&[0, -1])];
    let problem = Problem {
        op: ReduceOp::Avg,
        ..Problem::new(Collective::AllReduce, DType::I32, 2, 2)
    };
    let expected = problem.expected(&inputs, 0).unwrap().bytes;
    assert_eq!(expected, i32_bytes(&[-3, i32::MAX / 2]));
}

/// Runs a ring without a codec in the library's own arithmetic, which rounds to the element type at
/// every hop.
fn ring(problem: &Problem, inputs: &[Vec<u8>], start: usize) -> Vec<u8> {
    let mut tile = Tile::new(problem.count);
    let mut wire = vec![0; problem.count * problem.dtype.size()];
    for hop in 0..problem.nranks {
        let rank = (start + hop) % problem.nranks;
        let op = problem.factor(rank).map_or(problem.op, ReduceOp::PreMulSum);
        let reducer = match (op, problem.dtype.size()) {
            (ReduceOp::Avg, 1 | 2) if problem.dtype.is_float() => {
                let shift = problem.nranks.next_power_of_two().ilog2() + 1;
                Reducer::averaging(problem.dtype, shift, Isa::detect()).unwrap()
            }
            _ => Reducer::new(problem.dtype, op, Isa::detect()).unwrap(),
        };
        reducer.load(&inputs[rank], &mut tile);
        if hop > 0 {
            reducer.combine(&wire, &mut tile);
        }
        if hop + 1 == problem.nranks {
            reducer.finish(&mut tile, problem.count, problem.nranks);
        } else {
            reducer.limit(&mut tile, problem.count);
        }
        reducer.store(&tile, &mut wire);
    }
    wire
}

#[test]
fn a_raw_ring_lies_within_the_bound_and_damage_does_not() {
    for dtype in DType::ALL {
        let factor = |x: i8| match dtype.is_float() {
            true => Scalar::Float(f64::from(x) * 0.3),
            false => Scalar::Int(x.into()),
        };
        let ops = [
            ReduceOp::Sum,
            ReduceOp::Prod,
            ReduceOp::Max,
            ReduceOp::Min,
            ReduceOp::Avg,
            ReduceOp::PreMulSum(factor(3)),
        ];
        for pattern in Pattern::ALL {
            for (op, nranks) in ops.into_iter().flat_map(|op| [1, 2, 5, 8].map(|n| (op, n))) {
                let data = Data {
                    pattern,
                    dtype,
                    seed: 11,
                };
                let problem = Problem {
                    op,
                    factors: (0..nranks).map(|rank| factor(rank as i8 - 3)).collect(),
                    ..Problem::new(Collective::AllReduce, dtype, nranks, 5000)
                };
                let inputs: Vec<_> = (0..nranks).map(|rank| data.vec(rank, 5000)).collect();
                let mut output = ring(&problem, &inputs, 1);
                let found = problem.check(&inputs, 0, &output, 0.0).unwrap();
                let what = format!("{op} of {dtype} {pattern:?} x {nranks}: {found:?}");
                assert_eq!((found.elements, found.wrong), (5000, 0), "{what}");
                assert_eq!(problem.check(&data, 0, &output, 0.0).unwrap(), found);
                // Damages the last element: an integer is off by one; a float becomes NaN if the
                // exact result cannot overflow.
                let overflows = dtype.size() == 1 || op == ReduceOp::Prod;
                let last = &mut output[4999 * dtype.size()..];
                if !dtype.is_float() {
                    last[0] ^= 1;
                } else if !overflows {
                    set_value(dtype, f64::NAN, &mut last[..dtype.size()]);
                } else {
                    continue;
                }
                let found = problem.check(&data, 0, &output, 0.0).unwrap();
                assert_eq!((found.wrong, found.first_wrong), (1, Some(4999)), "{what}");
            }
        }
    }
}

#[test]
fn a_missing_contribution_is_seen() {
    for dtype in DType::ALL {
        let data = Data {
            pattern: Pattern::Gaussian,
            dtype,
            seed: 12,
        };
        let whole = Problem::new(Collective::AllReduce, dtype, 3, 1000);
        let part = Problem::new(Collective::AllReduce, dtype, 2, 1000);
        let inputs: Vec<_> = (0..2).map(|rank| data.vec(rank, 1000)).collect();
        let found = whole
            .check(&data, 0, &ring(&part, &inputs, 0), 0.0)
            .unwrap();
        let least = if dtype.size() == 1 && dtype.is_float() {
            300
        } else {
            950
        };
        assert!(found.wrong > least, "{dtype}: {found:?}");
    }
}

#[test]
fn the_bound_is_near_the_error() {
    // An error of 1 in 10,000 exceeds the bound on nearly all elements of an fp32 sum.
    let data = Data {
        pattern: Pattern::Gaussian,
        dtype: DType::F32,
        seed: 5,
    };
    let problem = Problem::new(Collective::AllReduce, DType::F32, 4, 2000);
    let expected = problem.expected(&data, 0).unwrap();
    let off: Vec<f32> = expected
        .values
        .iter()
        .map(|x| (x * 1.0001) as f32)
        .collect();
    let found = problem.check(&data, 0, &f32_bytes(&off), 0.0).unwrap();
    assert!(found.wrong > 1900, "{found:?}");
    assert!((found.rms_rel_err() / 1e-4 - 1.0).abs() < 0.01, "{found:?}");
    // An extra bound as large as the error accepts the output.
    let extra = found.max_abs_err;
    assert_eq!(
        problem
            .check(&data, 0, &f32_bytes(&off), extra)
            .unwrap()
            .wrong,
        0
    );
    let judged = problem
        .check(&data, 0, &f32_bytes(&off), f64::INFINITY)
        .unwrap();
    assert_eq!((judged.wrong, judged.max_abs_err), (0, extra));
}

#[test]
fn non_finite_inputs_must_arrive() {
    let inputs = vec![
        f32_bytes(&[f32::NAN, f32::INFINITY, f32::INFINITY, 3e38, 1.0]),
        f32_bytes(&[1.0, 1.0, f32::NEG_INFINITY, 3e38, 1.0]),
    ];
    let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 5);
    let wrong = |output: [f32; 5]| {
        let found = problem.check(&inputs, 0, &f32_bytes(&output), 0.0).unwrap();
        (found.wrong, found.first_wrong)
    };
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    assert_eq!(wrong([nan, infinity, nan, infinity, 2.0]), (0, None));
    assert_eq!(wrong([1.0, infinity, nan, infinity, 2.0]), (1, Some(0)));
    assert_eq!(wrong([nan, 1.0, 0.0, infinity, 2.0]), (2, Some(1)));
    assert_eq!(wrong([nan, infinity, nan, f32::MAX, 2.0]), (1, Some(3)));
    assert_eq!(wrong([nan, infinity, nan, infinity, nan]), (1, Some(4)));
}

#[test]
fn impossible_problems_are_refused() {
    let inputs = vec![vec![0; 8], vec![0; 8]];
    let good = Problem::new(Collective::AllReduce, DType::F32, 2, 2);
    let refused = |problem: Problem, rank, output: usize, what: &str| {
        let error = problem
            .check(&inputs, rank, &vec![0; output], 0.0)
            .unwrap_err();
        assert!(error.message().contains(what), "{error}");
    };
    refused(good.clone(), 2, 8, "rank 2 of 2");
    refused(good.clone(), 0, 7, "7 bytes");
    let with = |change: fn(&mut Problem)| {
        let mut problem = good.clone();
        change(&mut problem);
        problem
    };
    refused(with(|p| p.root = 5), 0, 8, "root 5");
    refused(with(|p| p.count = 3), 0, 12, "rank 0 has 8 bytes, not 12");
    refused(with(|p| p.count = usize::MAX), 0, 8, "rank 0 has 8 bytes");
    refused(
        with(|p| p.op = ReduceOp::PreMulSum(Scalar::Int(1))),
        0,
        8,
        "f32 of rank 0",
    );
    refused(
        with(|p| p.factors = vec![Scalar::Float(1.0)]),
        0,
        8,
        "1 factors for 2 ranks",
    );
}
