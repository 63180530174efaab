//! Tests that averages of 16- and 8-bit floats are finite and right whatever the algorithm, the codec and the
//! size, up to the largest number of the type.

use cinch::comm::Call;
use cinch::mem::UserBuffers;
use cinch::testing::{largest, local_world, set_value, value};
use cinch::types::Extent;
use cinch::{Algorithm, Collective, Config, DType, ReduceOp};

fn encode(dtype: DType, numbers: &[f64]) -> Vec<u8> {
    let mut bytes = vec![0; numbers.len() * dtype.size()];
    for (&number, element) in numbers.iter().zip(bytes.chunks_mut(dtype.size())) {
        set_value(dtype, number, element);
    }
    bytes
}

/// Runs an average of inputs whose element i is `input(rank, i)`. Returns the outputs of all ranks that have
/// one; `None` if no schedule fits.
fn run(
    nranks: usize,
    call: &Call,
    input: &(dyn Fn(usize, usize) -> f64 + Sync),
) -> Option<Vec<Vec<f64>>> {
    let elements = |extent: Extent| extent.elements(call.count, nranks).unwrap();
    let outputs = local_world(nranks, &Config::default(), |comm| {
        let is_root = comm.rank() == call.root;
        let numbers: Vec<f64> = (0..elements(call.collective.input_extent(is_root)))
            .map(|i| input(comm.rank(), i))
            .collect();
        let bytes = encode(call.dtype, &numbers);
        let n = elements(call.collective.output_extent(is_root));
        let mut output = vec![0; n * call.dtype.size()];
        let done = comm.call(call, UserBuffers::new(&bytes, &mut output));
        let elements = output.chunks(call.dtype.size());
        let numbers = elements.map(|element| value(call.dtype, element)).collect();
        done.is_ok().then_some(numbers)
    });
    outputs.into_iter().collect()
}

fn average(collective: Collective, dtype: DType, count: usize) -> Call {
    Call {
        op: ReduceOp::Avg,
        root: 1,
        ..Call::new(collective, dtype, count)
    }
}

const REDUCING: [Collective; 3] = [
    Collective::AllReduce,
    Collective::Reduce,
    Collective::ReduceScatter,
];

/// Returns the largest error relative to the inputs' common magnitude that some roundings may have.
fn tolerance(dtype: DType, codec: Option<&str>, nranks: usize) -> f64 {
    let element = match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        DType::F8E4M3 => 2f64.powi(-4),
        DType::F8E5M2 => 2f64.powi(-3),
        _ => 2f64.powi(-24),
    };
    let encode = match codec {
        None => 0.0,
        Some("linear8") => 1.0 / 254.0,
        Some("cast_bf16") => 2f64.powi(-8),
        Some("cast16") => 2f64.powi(-11),
        _ => 0.01,
    };
    (1.0 + element + encode).powi(nranks as i32 + 1) - 1.0
}

#[test]
fn averages_of_narrow_floats_are_finite_and_right_up_to_the_largest_number() {
    let narrow = [DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];
    for nranks in [2, 3, 5, 8] {
        for dtype in narrow {
            for codec in [None, Some("linear8"), Some("cast16"), Some("cast_bf16")] {
                if codec.is_some() && dtype.size() == 1
                    || codec == Some("cast16") && dtype != DType::F16
                {
                    continue;
                }
                let most = largest(dtype);
                for (collective, algorithm) in REDUCING
                    .iter()
                    .flat_map(|&c| Algorithm::FLAT.map(|algorithm| (c, algorithm)))
                {
                    let call = Call {
                        algorithm: Some(algorithm),
                        codec: codec.map(|codec| codec.parse().unwrap()),
                        ..average(collective, dtype, 700)
                    };
                    // Elements 0, 2, 4, ... are the largest number; the others alternate its sign.
                    let input = |rank: usize, i: usize| match i % 2 {
                        0 => most,
                        _ if rank.is_multiple_of(2) => most,
                        _ => -most,
                    };
                    let odd = (nranks % 2) as f64 / nranks as f64 * most;
                    let Some(outputs) = run(nranks, &call, &input) else {
                        continue;
                    };
                    let bound = tolerance(dtype, codec, nranks) * most;
                    for output in outputs {
                        for (i, &x) in output.iter().enumerate() {
                            let expected = if i % 2 == 0 { most } else { odd };
                            assert!(
                                (x - expected).abs() <= bound,
                                "{call:?} of {nranks} ranks: element {i} is {x}, not {expected}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// One-shot carries 1,000 elements, a ring 300,000: both give 40,000.
#[test]
fn average_does_not_depend_on_the_size_of_the_call() {
    for count in [1, 1_000, 30_000, 300_000] {
        let outputs = run(
            3,
            &average(Collective::AllReduce, DType::F16, count),
            &|_, _| 4e4,
        );
        assert!(
            outputs.unwrap().iter().flatten().all(|&x| x == 4e4),
            "{count} elements"
        );
    }
}

/// Owners that are not the root divide before they send.
#[test]
fn reduce_by_direct_divides_every_chunk_alike() {
    let cases = [
        (DType::F16, None),
        (DType::F16, Some("linear8")),
        (DType::F32, Some("cast16")),
    ];
    for (dtype, codec) in cases {
        for (nranks, count) in [(2, 4_000), (8, 20_000)] {
            let call = Call {
                algorithm: Some(Algorithm::Direct),
                codec: codec.map(|codec| codec.parse().unwrap()),
                ..average(Collective::Reduce, dtype, count)
            };
            let outputs = run(nranks, &call, &|_, _| 4e4).unwrap();
            assert!(
                outputs.iter().flatten().all(|&x| (x - 4e4).abs() < 2.0),
                "{dtype} with {codec:?}: {:?}",
                outputs.iter().flatten().find(|&&x| (x - 4e4).abs() >= 2.0)
            );
        }
    }
}

/// The report describes the input, not the scaled contributions.
#[test]
fn report_of_an_average_describes_the_input() {
    let call = Call {
        algorithm: Some(Algorithm::Ring),
        codec: Some("linear8".parse().unwrap()),
        ..average(Collective::AllReduce, DType::BF16, 512)
    };
    let reports = local_world(3, &Config::default(), |comm| {
        let input = encode(DType::BF16, &[3.0; 512]);
        let mut output = vec![0; input.len()];
        comm.call(&call, UserBuffers::new(&input, &mut output))
            .unwrap()
    });
    for report in reports {
        let input = report.input.unwrap();
        assert_eq!(input.abs_max, 3.0);
        assert_eq!(input.sum_squares, 9.0 * 512.0);
    }
}

/// The sum of i8 100 and 100 wraps to -56, and half of it is -28.
#[test]
fn average_of_integers_is_refused_unless_it_may_wrap() {
    for dtype in [
        DType::I8,
        DType::U8,
        DType::I32,
        DType::U32,
        DType::I64,
        DType::U64,
    ] {
        for collective in REDUCING {
            for algorithm in Algorithm::FLAT {
                let call = Call {
                    algorithm: Some(algorithm),
                    ..average(collective, dtype, 16)
                };
                assert_eq!(run(2, &call, &|_, _| 100.0), None, "{call:?}");
            }
        }
    }
    let call = Call {
        wrapping_average: true,
        ..average(Collective::AllReduce, DType::I8, 16)
    };
    assert_eq!(run(2, &call, &|_, _| 100.0), Some(vec![vec![-28.0; 16]; 2]));
}
