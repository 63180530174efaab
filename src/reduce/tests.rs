use super::*;
use crate::testing::{largest, set_value, smallest, value};
use half::{bf16, f16};

const SEED: u64 = 0x5eed_0001;

/// SplitMix64 generator, implemented without the library's code.
struct Random(u64);

impl Random {
    fn new(salt: u64) -> Random {
        println!("seed {SEED:#x} salt {salt}");
        Random(SEED ^ salt << 32)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

fn widened(dtype: DType, isa: Isa, bytes: &[u8]) -> Vec<f32> {
    let mut wide = vec![0.0; bytes.len() / dtype.size()];
    widen(dtype, isa, bytes, &mut wide);
    wide
}

fn narrowed(dtype: DType, isa: Isa, numbers: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; numbers.len() * dtype.size()];
    narrow(dtype, isa, numbers, &mut bytes);
    bytes
}

fn halves(bytes: &[u8]) -> Vec<u16> {
    let pairs = bytes.chunks_exact(2);
    pairs.map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
}

/// Returns numbers that are hard to round. They are random bit patterns, and all 16-bit patterns as upper
/// halves, with lower halves around the tie. Every boundary of an 8- or 16-bit format, with its neighbours,
/// is also included.
fn hard_numbers() -> Vec<f32> {
    let mut random = Random::new(1);
    let mut patterns: Vec<u32> = (0..300_000).map(|_| random.next() as u32).collect();
    for upper in 0..=0xffffu32 {
        for lower in [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
            patterns.push(upper << 16 | lower);
        }
    }
    for edge in [
        65504.0f32,
        65520.0,
        61440.0,
        57344.0,
        448.0,
        464.0,
        480.0,
        5.9604645e-8,
    ] {
        for scale in [0.5, 1.0, 1.5, 2.0] {
            let bits = (edge * scale).to_bits();
            patterns.extend([bits - 1, bits, bits + 1, bits | 1 << 31]);
        }
    }
    patterns.into_iter().map(f32::from_bits).collect()
}

#[test]
fn conversions_of_16_bit_floats_equal_the_half_crate() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let bytes: Vec<u8> = all.iter().flat_map(|h| h.to_le_bytes()).collect();
    let numbers = hard_numbers();
    for isa in Isa::available() {
        for (&h, wide) in all.iter().zip(widened(DType::F16, isa, &bytes)) {
            let expected = f16::from_bits(h).to_f32_const();
            assert_eq!(wide.to_bits(), expected.to_bits(), "f16 {h:#x}");
        }
        for (&h, wide) in all.iter().zip(widened(DType::BF16, isa, &bytes)) {
            // The `half` crate makes a NaN quiet when it widens; `BF16` does so only when it
            // rounds. So its bits are compared with `h`.
            assert_eq!(wide.to_bits(), u32::from(h) << 16, "bf16 {h:#x}");
            let expected = bf16::from_bits(h).to_f32();
            assert!(wide == expected || wide.is_nan() && expected.is_nan());
        }
        let ours = halves(&narrowed(DType::F16, isa, &numbers));
        for (x, h) in numbers.iter().zip(ours) {
            let expected = f16::from_f32_const(*x).to_bits();
            assert_eq!(h, expected, "{x:e} {:#x} to f16", x.to_bits());
        }
        let ours = halves(&narrowed(DType::BF16, isa, &numbers));
        for (x, h) in numbers.iter().zip(ours) {
            let expected = bf16::from_f32(*x).to_bits();
            assert_eq!(h, expected, "{x:e} {:#x} to bf16", x.to_bits());
        }
    }
}

/// Returns the float types of 8 bits.
fn f8_types() -> impl Iterator<Item = DType> {
    let is_f8 = |dtype: &DType| dtype.is_float() && dtype.size() == 1;
    DType::ALL.into_iter().filter(is_f8)
}

/// Returns the value of an 8-bit code by the definition of its format.
fn f8_value(dtype: DType, code: u8) -> f64 {
    value(dtype, &[code])
}

/// Returns the code whose value is nearest to `x`, by comparison with all codes. A tie goes to the even code;
/// between two zeros the sign of `x` decides. More than half a step beyond the largest finite value, numbers
/// become infinity or NaN.
fn f8_nearest(dtype: DType, x: f32) -> u8 {
    let x = f64::from(x);
    let top = f8_code(dtype, largest(dtype));
    let step = f8_value(dtype, top) - f8_value(dtype, top - 1);
    let limit = largest(dtype) + step / 2.0;
    if x.is_nan() {
        return f8_code(dtype, x);
    }
    if x.abs() > limit || x.abs() == limit && top % 2 == 1 {
        return f8_code(dtype, f64::INFINITY.copysign(x));
    }
    let rank = |code: u8| {
        let value = f8_value(dtype, code);
        let has_other_sign = value.is_sign_negative() != x.is_sign_negative();
        ((value - x).abs(), code % 2, has_other_sign)
    };
    let finite = (0..=u8::MAX).filter(|&code| f8_value(dtype, code).is_finite());
    let nearest = finite.min_by(|&a, &b| {
        let ((a, a_odd, a_sign), (b, b_odd, b_sign)) = (rank(a), rank(b));
        a.total_cmp(&b).then((a_odd, a_sign).cmp(&(b_odd, b_sign)))
    });
    nearest.unwrap()
}

fn f8_code(dtype: DType, x: f64) -> u8 {
    let mut code = [0];
    set_value(dtype, x, &mut code);
    code[0]
}

#[test]
fn tie_of_negative_number_and_zero_goes_to_even_code() {
    for dtype in f8_types() {
        let tie = (-smallest(dtype) / 2.0) as f32;
        assert_eq!(f8_value(dtype, f8_nearest(dtype, tie)), 0.0, "{dtype}");
        assert_eq!(
            f8_code(dtype, tie.into()),
            f8_nearest(dtype, tie),
            "{dtype}"
        );
    }
}

#[test]
fn f8_widened_equals_the_definition() {
    let codes: Vec<u8> = (0..=255).collect();
    for dtype in f8_types() {
        for isa in Isa::available() {
            for (&code, wide) in codes.iter().zip(widened(dtype, isa, &codes)) {
                let expected = f8_value(dtype, code);
                assert!(
                    f64::from(wide).to_bits() == expected.to_bits()
                        || wide.is_nan() && expected.is_nan(),
                    "{dtype} {code:#x}: {wide} is not {expected}"
                );
                assert_eq!(wide.is_sign_negative(), expected.is_sign_negative());
            }
        }
    }
}

#[test]
fn f8_narrowed_is_the_nearest_code() {
    let mut numbers: Vec<f32> = (0..=u16::MAX)
        .map(|h| f16::from_bits(h).to_f32_const())
        .collect();
    for dtype in f8_types() {
        // Tests the midpoints of adjacent values, where rounding changes direction, and the numbers
        // next to them.
        for code in 0..0x7e {
            let middle = (f8_value(dtype, code) + f8_value(dtype, code + 1)) as f32 / 2.0;
            if middle.is_finite() {
                let bits = middle.to_bits();
                for bits in [bits.saturating_sub(1), bits, bits + 1] {
                    numbers.extend([f32::from_bits(bits), -f32::from_bits(bits)]);
                }
            }
        }
    }
    numbers.extend([
        464.0,
        464.00003,
        61439.996,
        61440.0,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-45,
    ]);
    for dtype in f8_types() {
        let expected: Vec<u8> = numbers.iter().map(|&x| f8_nearest(dtype, x)).collect();
        for isa in Isa::available() {
            let ours = narrowed(dtype, isa, &numbers);
            for ((x, ours), expected) in numbers.iter().zip(ours).zip(&expected) {
                let both_nan = x.is_nan() && f8_value(dtype, ours).is_nan();
                assert!(
                    ours == *expected || both_nan && (ours ^ expected) < 0x80,
                    "{dtype}: {x:e} became {ours:#x}, not {expected:#x}"
                );
            }
        }
    }
}

const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Avg,
];

/// Returns all operators; pre-multiplied sums have a factor that fits the type.
fn ops(dtype: DType) -> Vec<ReduceOp> {
    let factor = if dtype.is_float() {
        Scalar::Float(-1.7)
    } else {
        Scalar::Int(-3)
    };
    OPS.into_iter()
        .chain([ReduceOp::PreMulSum(factor)])
        .collect()
}

/// Returns random elements, of which a quarter are special values.
fn elements(random: &mut Random, dtype: DType, n: usize) -> Vec<u8> {
    let mut bytes = random.bytes(n * dtype.size());
    let top = 1u64 << (dtype.size() * 8 - 1);
    let code = |x: f64| {
        let mut word = [0; 8];
        set_value(dtype, x, &mut word[..dtype.size()]);
        u64::from_le_bytes(word)
    };
    let (infinity, one) = match dtype.is_float() {
        true => (code(f64::INFINITY), code(1.0)),
        false => (top - 1, 1),
    };
    // Special values: zeros, infinities, quiet and signalling NaNs, and the smallest and largest
    // numbers; for integers the extremes.
    let specials = [
        0,
        top,
        infinity,
        infinity | top,
        infinity | 1,
        top - 1,
        1,
        infinity - 1,
        one,
    ];
    for element in bytes.chunks_exact_mut(dtype.size()) {
        let pick = random.next();
        if pick.is_multiple_of(4) {
            let special = specials[(pick >> 8) as usize % specials.len()];
            element.copy_from_slice(&special.to_le_bytes()[..dtype.size()]);
        }
    }
    bytes
}

/// Runs one tile through load, combine, finish and store. Returns the stored bytes and the bytes of the
/// accumulators.
fn chain(reducer: &Reducer, inputs: &[&[u8]]) -> (Vec<u8>, Vec<u8>) {
    let size = reducer.dtype().size();
    let n = inputs[0].len() / size;
    let mut tile = Tile::new(n);
    reducer.load(inputs[0], &mut tile);
    for input in &inputs[1..] {
        reducer.combine(input, &mut tile);
    }
    reducer.finish(&mut tile, n, inputs.len());
    // The output begins one byte after an aligned address, to test unaligned stores.
    let mut out = vec![0xa5; n * size + 2];
    reducer.store(&tile, &mut out[1..1 + n * size]);
    assert_eq!(
        (out[0], out[n * size + 1]),
        (0xa5, 0xa5),
        "written beyond the elements"
    );
    out.pop();
    let accumulators = tile.bytes(n * reducer.dtype().accumulator().size());
    (out.split_off(1), accumulators.to_vec())
}

#[test]
fn reduction_on_every_instruction_set_equals_the_scalar_form() {
    let mut random = Random::new(2);
    for dtype in DType::ALL {
        for op in ops(dtype) {
            let scalar = Reducer::new(dtype, op, Isa::Scalar).unwrap();
            for n in (0..=130).chain([255, 256, 257, 700]) {
                let at = random.next() as usize % 9;
                let inputs: Vec<Vec<u8>> = (0..3)
                    .map(|_| [vec![0; at], elements(&mut random, dtype, n)].concat())
                    .collect();
                let inputs: Vec<&[u8]> = inputs.iter().map(|input| &input[at..]).collect();
                let expected = chain(&scalar, &inputs);
                for isa in Isa::available() {
                    let reducer = Reducer::new(dtype, op, isa).unwrap();
                    assert_eq!(
                        chain(&reducer, &inputs),
                        expected,
                        "{reducer:?}, {n} at {at}"
                    );
                }
            }
        }
    }
}

/// Returns the elements as f64, converted without the functions under test.
fn values(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let value = |b: &[u8]| match dtype {
        DType::F16 => f16::from_le_bytes([b[0], b[1]]).to_f64(),
        DType::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f64(),
        DType::F32 => f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::F64 => f64::from_le_bytes(b.try_into().unwrap()),
        _ => f8_value(dtype, b[0]),
    };
    bytes.chunks_exact(dtype.size()).map(value).collect()
}

/// Applies one operator to two floats, by its definition.
fn float_oracle(op: ReduceOp, a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        return f64::NAN;
    }
    match op {
        ReduceOp::Prod => a * b,
        ReduceOp::Max if a.total_cmp(&b).is_gt() => a,
        ReduceOp::Max => b,
        ReduceOp::Min if a.total_cmp(&b).is_lt() => a,
        ReduceOp::Min => b,
        _ => a + b,
    }
}

#[test]
fn two_floats_combine_with_one_rounding() {
    let mut random = Random::new(3);
    let n = 3000;
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_float()) {
        let a = elements(&mut random, dtype, n);
        let b = elements(&mut random, dtype, n);
        for op in ops(dtype) {
            let reducer = Reducer::new(dtype, op, Isa::detect()).unwrap();
            let mut tile = Tile::new(n);
            reducer.load(&a, &mut tile);
            reducer.combine(&b, &mut tile);
            reducer.finish(&mut tile, n, 2);
            let wide = dtype == DType::F64;
            let round = |x: f64| if wide { x } else { f64::from(x as f32) };
            for (i, (a, b)) in values(dtype, &a)
                .into_iter()
                .zip(values(dtype, &b))
                .enumerate()
            {
                let a = if op.number() == 5 {
                    round(a * round(-1.7))
                } else {
                    a
                };
                // Computing in f64 and then rounding to f32 equals exact rounding, because f64 has
                // more than twice as many digits.
                let expected = round(float_oracle(op, a, b));
                let expected = if op == ReduceOp::Avg {
                    round(expected / 2.0)
                } else {
                    expected
                };
                let (bits, expected_bits) = if wide {
                    (tile.view::<u64>(n)[i], expected.to_bits())
                } else {
                    let bits = (expected as f32).to_bits();
                    (tile.view::<u32>(n)[i].into(), bits.into())
                };
                let nan = if wide {
                    0x7ff8_0000_0000_0000
                } else {
                    0x7fc0_0000
                };
                let expected_bits = if expected.is_nan() {
                    nan
                } else {
                    expected_bits
                };
                assert_eq!(bits, expected_bits, "{reducer:?}: {a:e}, {b:e}");
            }
        }
    }
}

#[test]
fn max_and_min_of_zeros_and_nans_follow_ieee_754() {
    let pair = |op, a: f32, b: f32| {
        let reducer = Reducer::new(DType::F32, op, Isa::detect()).unwrap();
        let (out, _) = chain(&reducer, &[&a.to_le_bytes(), &b.to_le_bytes()]);
        u32::from_le_bytes(out.try_into().unwrap())
    };
    for (a, b) in [(0.0, -0.0), (-0.0, 0.0)] {
        assert_eq!(pair(ReduceOp::Max, a, b), 0);
        assert_eq!(pair(ReduceOp::Min, a, b), 0x8000_0000);
    }
    for nan in [0x7f80_0001, 0xffc1_2345].map(f32::from_bits) {
        for op in OPS {
            assert_eq!(pair(op, nan, 1.0), 0x7fc0_0000);
            assert_eq!(pair(op, f32::NEG_INFINITY, nan), 0x7fc0_0000);
        }
    }
}

/// Returns element `i` as a 128-bit integer.
fn integer(dtype: DType, bytes: &[u8], i: usize) -> i128 {
    let element = &bytes[i * dtype.size()..][..dtype.size()];
    let mut wide = [0u8; 16];
    wide[..dtype.size()].copy_from_slice(element);
    wrapped(dtype, i128::from_le_bytes(wide))
}

fn wrapped(dtype: DType, x: i128) -> i128 {
    let modulus = 1i128 << (dtype.size() * 8);
    let low = x.rem_euclid(modulus);
    if dtype.is_signed() && low >= modulus / 2 {
        low - modulus
    } else {
        low
    }
}

#[test]
fn integer_results_wrap_and_averages_truncate() {
    let mut random = Random::new(4);
    let n = 400;
    for dtype in DType::ALL.into_iter().filter(|dtype| !dtype.is_float()) {
        // 300 ranks do not fit i8: the divisor must not wrap as the elements do.
        for nranks in [1, 2, 3, 7, 300] {
            let inputs: Vec<Vec<u8>> = (0..nranks)
                .map(|_| elements(&mut random, dtype, n))
                .collect();
            let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
            for op in ops(dtype) {
                let reducer = Reducer::new(dtype, op, Isa::detect()).unwrap();
                let (out, _) = chain(&reducer, &inputs);
                for i in 0..n {
                    let numbers = inputs.iter().map(|input| integer(dtype, input, i));
                    let expected = match op {
                        ReduceOp::Sum => wrapped(dtype, numbers.sum()),
                        ReduceOp::Prod => {
                            numbers.fold(1, |a: i128, b| wrapped(dtype, a.wrapping_mul(b)))
                        }
                        ReduceOp::Max => numbers.max().unwrap(),
                        ReduceOp::Min => numbers.min().unwrap(),
                        ReduceOp::Avg => wrapped(dtype, numbers.sum()) / nranks as i128,
                        ReduceOp::PreMulSum(_) => {
                            let first = integer(dtype, inputs[0], i) * -4;
                            wrapped(dtype, first + numbers.sum::<i128>())
                        }
                    };
                    assert_eq!(integer(dtype, &out, i), expected, "{reducer:?} x {nranks}");
                }
            }
        }
    }
}

#[test]
fn factor_of_the_wrong_kind_is_an_error() {
    for dtype in DType::ALL {
        let wrong = if dtype.is_float() {
            Scalar::Int(2)
        } else {
            Scalar::Float(2.0)
        };
        let error = Reducer::new(dtype, ReduceOp::PreMulSum(wrong), Isa::Scalar).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains(dtype.name()), "{error}");
    }
}

#[test]
fn observe_on_every_instruction_set_equals_a_plain_loop() {
    let mut random = Random::new(5);
    for n in (0..=70).chain([1000, 4099]) {
        let bytes = elements(&mut random, DType::F32, n);
        // Reduces magnitudes to less than 1024, so that f64 sums are accurate enough to compare
        // with a plain loop.
        let tame: Vec<f32> = bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .map(|x| if x.is_finite() { x % 1024.0 } else { x })
            .collect();
        let expected = observe(Isa::Scalar, &tame);
        let finite: Vec<f64> = tame
            .iter()
            .filter(|x| x.is_finite())
            .map(|&x| x.into())
            .collect();
        assert_eq!(expected.non_finite as usize, n - finite.len());
        let largest = finite.iter().fold(0f64, |a, b| a.max(b.abs()));
        assert_eq!(f64::from(expected.abs_max), largest);
        let squares: f64 = finite.iter().map(|x| x * x).sum();
        assert!((expected.sum_squares - squares).abs() <= squares * 1e-12);
        for isa in Isa::available() {
            assert_eq!(observe(isa, &tame), expected, "{isa:?}");
        }
    }
}

#[test]
fn pair_and_assign_equal_load_combine_and_store() {
    let mut random = Random::new(77);
    let ops = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min];
    for dtype in DType::ALL {
        for op in ops {
            for isa in Isa::available() {
                let reducer = Reducer::new(dtype, op, isa).unwrap();
                for n in [0, 1, 7, 64, 129, 1000] {
                    let (a, b) = (
                        random.bytes(n * dtype.size()),
                        random.bytes(n * dtype.size()),
                    );
                    let mut tile = Tile::new(n);
                    let mut expected = vec![0; a.len()];
                    reducer.load(&a, &mut tile);
                    reducer.combine(&b, &mut tile);
                    reducer.store(&tile, &mut expected);
                    let mut pair = vec![0xaa; a.len()];
                    reducer.pair(&a, &b, &mut pair);
                    assert_eq!(pair, expected, "{dtype} {op} {} {n}", isa.name());
                    reducer.pair(&b, &a, &mut pair);
                    assert_eq!(pair, expected, "{dtype} {op} {} {n}, swapped", isa.name());
                    pair.copy_from_slice(&a);
                    reducer.assign(&mut pair, &b);
                    assert_eq!(pair, expected, "{dtype} {op} {} {n}, in place", isa.name());
                }
            }
        }
    }
}
