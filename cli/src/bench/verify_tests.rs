use super::super::data::Distribution;
use super::super::row::factor;
use super::*;
use cinch::testing::set_value;

fn sums(source: &InputSource, count: usize) -> Vec<f32> {
    let mut sums = vec![0f64; count];
    let mut bytes = vec![0; 4 * count];
    for rank in 0..4 {
        source
            .stream(DType::F32, Some(ReduceOp::Sum), rank, 0)
            .fill(0, &mut bytes);
        for (sum, x) in sums.iter_mut().zip(bytes.chunks(4)) {
            *sum += value(DType::F32, x);
        }
    }
    sums.into_iter().map(|x| x as f32).collect()
}

fn check(codec: &str, count: usize, spoil: impl Fn(usize, f32) -> f32) -> CheckOutcome {
    let source = InputSource::generated(5, Distribution::Gaussian, 4);
    let row = Row::new(Collective::AllReduce, DType::F32, count);
    let output: Vec<f32> = sums(&source, count)
        .into_iter()
        .enumerate()
        .map(|(i, x)| spoil(i, x))
        .collect();
    Check {
        source: &source,
        row: &row,
        rank: 1,
        nranks: 4,
        set: 0,
        shift: 0,
        codec: codec.parse::<CodecSetting>().unwrap().into(),
        algorithm: Algorithm::Direct,
    }
    .run(cinch::mem::bytes_of(&output))
}

#[test]
fn raw_sums_have_a_tight_bound() {
    let exact = check("raw", 70_001, |_, x| x);
    assert_eq!(exact.wrong, 0);
    assert!(exact.max_abs_err < 1e-6);
    assert_eq!(check("raw", 70_001, |_, x| x + 1e-5).wrong, 70_001);
    let one = check("raw", 70_001, |i, x| if i == 69_999 { f32::NAN } else { x });
    assert_eq!(one.wrong, 1);
}

#[test]
fn lossy_sums_have_the_codecs_bound() {
    // The largest magnitude of a block is about 2.8. A two-shot sum of 4 ranks may be off by about
    // (2 * 4 * 3) / 254, so an offset of 1 is no rounding error.
    for (codec, small, large) in [
        ("linear8", 0.05, 1.0),
        ("dynamic8:block=4096", 0.1, 2.0),
        ("linear8:tensor=1", 0.05, 1.0),
        ("cast16", 1e-4, 0.1),
    ] {
        let good = check(codec, 70_001, |i, x| {
            x + if i % 2 == 0 { small } else { -small }
        });
        assert_eq!(good.wrong, 0, "{codec}");
        assert!((good.max_abs_err / f64::from(small) - 1.0).abs() < 0.01);
        let relative = (good.error_squares / good.exact_squares).sqrt();
        assert!(
            (relative / (f64::from(small) / 2.0) - 1.0).abs() < 0.05,
            "{relative}"
        );
        assert_eq!(
            check(codec, 70_001, |_, x| x + large).wrong,
            70_001,
            "{codec}"
        );
    }
}

/// All elements must be compared, wherever pieces and the blocks of ranks begin.
#[test]
fn pieces_together_compare_every_element() {
    let source = InputSource::generated(5, Distribution::Gaussian, 4);
    for (codec, off) in [("raw", 1e-3), ("linear8", 1.0), ("linear8:block=4096", 1.0)] {
        let row = Row::new(Collective::AllGather, DType::F32, 5001);
        let check = Check {
            source: &source,
            row: &row,
            rank: 1,
            nranks: 4,
            set: 0,
            shift: 0,
            codec: codec.parse::<CodecSetting>().unwrap().into(),
            algorithm: Algorithm::Ring,
        };
        let mut exact = vec![0; 4 * 5001 * 4];
        for (rank, block) in exact.chunks_mut(4 * 5001).enumerate() {
            check.inputs(rank, 0, block);
        }
        for (by, wrong) in [(0.0, 0), (off, 4 * 5001)] {
            let mut held = exact.clone();
            for element in held.chunks_mut(4) {
                set_value(DType::F32, value(DType::F32, element) + by, element);
            }
            let mut outcome = CheckOutcome::default();
            for (piece, held) in held.chunks(4 * 1117).enumerate() {
                check.piece(1117 * piece, held, &mut outcome);
            }
            assert_eq!(outcome.wrong, wrong, "{codec} off by {by}");
        }
    }
}

#[test]
fn hashes_tell_outputs_apart() {
    let hash = |spoil: fn(usize, f32) -> f32| check("raw", 1000, spoil).hash;
    assert_eq!(hash(|_, x| x), hash(|_, x| x));
    assert_ne!(hash(|_, x| x), hash(|i, x| if i == 999 { -x } else { x }));
}

/// Returns a sum of `held` contributions of `ranks` ranks. It is rounded wherever a partial sum
/// leaves a rank under `algorithm`.
fn rounded_sum(
    check: &Check<'_>,
    held: impl Iterator<Item = usize> + Clone,
    ranks: usize,
) -> Vec<u8> {
    let (dtype, count) = (check.row.dtype, check.row.count);
    let size = dtype.size();
    let round = |x: f64| {
        let mut bytes = vec![0; size];
        set_value(dtype, x, &mut bytes);
        value(dtype, &bytes)
    };
    let given: Vec<Vec<f64>> = held
        .map(|rank| {
            let mut bytes = vec![0; count * size];
            check.inputs(rank, 0, &mut bytes);
            let by = match check.row.op {
                ReduceOp::PreMulSum(_) => factor(rank).0,
                _ => 1.0,
            };
            let values = bytes.chunks(size).map(|x| by * value(dtype, x));
            match check.algorithm {
                Algorithm::Direct | Algorithm::Tree => values.map(round).collect(),
                _ => values.collect(),
            }
        })
        .collect();
    let mut output = vec![0; count * size];
    for (i, element) in output.chunks_mut(size).enumerate() {
        let mut terms: Vec<f64> = given.iter().map(|values| values[i]).collect();
        let sum = match check.algorithm {
            Algorithm::Ring => terms.into_iter().fold(0.0, |sum, x| round(sum + x)),
            Algorithm::Tree => {
                while terms.len() > 1 {
                    let pairs = terms.chunks(2);
                    terms = pairs.map(|pair| round(pair.iter().sum())).collect();
                }
                terms.into_iter().sum()
            }
            _ => terms.into_iter().sum(),
        };
        let sum = match check.row.op {
            ReduceOp::Avg => sum / ranks as f64,
            _ => sum,
        };
        set_value(dtype, sum, element);
    }
    output
}

/// In types of few bits, the roundings of many hops exceed a rank's contribution. A single element
/// then proves nothing, but all elements together do.
#[test]
fn sums_of_few_bits_without_a_rank_are_wrong() {
    for (algorithm, ranks) in [
        (Algorithm::Direct, 8),
        (Algorithm::FlatTree, 8),
        (Algorithm::OneShot, 2),
        (Algorithm::Tree, 8),
        (Algorithm::Tree, 16),
        (Algorithm::Ring, 2),
        (Algorithm::Ring, 8),
        (Algorithm::Ring, 48),
    ] {
        for op in [
            ReduceOp::Sum,
            ReduceOp::Avg,
            ReduceOp::PreMulSum(cinch::types::Scalar::Int(1)),
        ] {
            for (dtype, distribution) in [
                (DType::F8E5M2, Distribution::Gaussian),
                (DType::F8E5M2, Distribution::Uniform),
                (DType::F8E4M3, Distribution::Gaussian),
                (DType::F8E4M3, Distribution::Heavy),
                (DType::BF16, Distribution::Gaussian),
            ] {
                let source = InputSource::generated(ranks as u64, distribution, ranks);
                let row = Row {
                    op,
                    ..Row::new(Collective::AllReduce, dtype, 5000)
                };
                let check = Check {
                    source: &source,
                    row: &row,
                    rank: 0,
                    nranks: ranks,
                    set: 0,
                    shift: 0,
                    codec: CodecSetting::of(CodecSpec::RAW).into(),
                    algorithm,
                };
                let what = format!("{op} of {dtype} over {ranks} by {algorithm}, {distribution:?}");
                let right = rounded_sum(&check, 0..ranks, ranks);
                assert_eq!(check.run(&right).wrong, 0, "{what}");
                let zeros = vec![0; right.len()];
                assert!(check.run(&zeros).wrong > 2500, "{what}: zeros");
                for missing in [0, ranks - 1] {
                    let others = (0..ranks).filter(|&rank| rank != missing);
                    let wrong = check.run(&rounded_sum(&check, others, ranks)).wrong;
                    assert!(wrong > 500, "{what}: {wrong} without {missing}");
                }
            }
        }
    }
}

/// Small elements beside large ones lose more to one codec, others to the other.
#[test]
fn codecs_by_level_have_the_bounds_of_both() {
    let both = |text: &str| BothCodecs::from(text.parse::<CodecSetting>().unwrap());
    let [one, other] = ["linear8", "fp8_e4m3:block=512"].map(both);
    assert!(one.law.of_scale > other.law.of_scale && one.law.of_value < other.law.of_value);
    for (text, block) in [
        ("intra=linear8,inter=fp8_e4m3:block=512", 512),
        ("intra=fp8_e4m3:block=512,inter=linear8", 512),
        ("intra=linear8:block=1024,inter=cast16", 1024),
    ] {
        let found = both(text);
        assert_eq!(found.spec.scale, ScaleRule::Block(block), "{text}");
        assert!(found.law.of_scale >= one.law.of_scale, "{text}");
    }
    let found = both("intra=linear8,inter=fp8_e4m3:block=512").law;
    assert_eq!(
        (found.of_scale, found.of_value),
        (one.law.of_scale, other.law.of_value)
    );
    assert!(both("intra=raw,inter=cast16").spec.is_lossy());
}
