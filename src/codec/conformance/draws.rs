//! Tests stochastic rounding of `linear8` and `dynamic8` against the values that their codes decode to.

use super::*;
use std::collections::BTreeMap;

const NAMES: [&str; 2] = ["linear8", "dynamic8"];

/// Scales of all regimes: ordinary, with an inexact 127th, subnormal, below 2^-100, and up to the largest.
fn scales() -> [f32; 9] {
    [
        1.0,
        0.7,
        113.0,
        2f32.powi(-100),
        2f32.powi(-101),
        1.3e-36,
        f32::from_bits(5_000),
        2f32.powi(127),
        f32::MAX,
    ]
}

/// Encodes one chunk with random numbers of operation `draw`.
fn draw(codec: &dyn Codec, x: &[f32], draw: u64) -> Vec<u8> {
    let random = RoundingRandom::new(codec.spec().seed.into(), draw, 2);
    let mut wire = vec![0xee; codec.wire_bytes(x.len())];
    let span = Span::whole(x.len()).drawing(random);
    codec.encode(span, x, scale_of(codec, x), &mut wire, None);
    wire
}

/// Returns the magnitudes that the codes of a block decode to, each with its smallest code, ascending. They
/// come from decoding alone.
fn magnitudes(name: &str, scale: f32) -> BTreeMap<u32, u8> {
    let codec = codec(&format!("{name}:tensor=1"), Isa::Scalar);
    let mut wire: Vec<u8> = (0..128).collect();
    wire.extend(scale.to_le_bytes());
    let mut found = BTreeMap::new();
    for (code, y) in decode(&*codec, &wire, 128).into_iter().enumerate() {
        found.entry(y.to_bits()).or_insert(code as u8);
    }
    found
}

/// Returns the two decodable magnitudes around `x`; both are the largest from there on.
fn neighbours(magnitudes: &BTreeMap<u32, u8>, x: f32) -> [f32; 2] {
    let mut upper = magnitudes.range(x.abs().to_bits()..);
    let mut lower = magnitudes.range(..=x.abs().to_bits());
    let low = lower
        .next_back()
        .map_or(0.0, |(&bits, _)| f32::from_bits(bits));
    let high = upper.next().map_or(low, |(&bits, _)| f32::from_bits(bits));
    [low, high]
}

/// Returns a block with this scale: four elements in each gap between decodable magnitudes, next to both ends
/// and inside, with alternating signs.
fn across_all_gaps(name: &str, scale: f32) -> Vec<f32> {
    let ends: Vec<u32> = magnitudes(name, scale).into_keys().collect();
    let mut x = vec![scale];
    for pair in ends.windows(2) {
        let [low, high] = [pair[0], pair[1]].map(|bits| f64::from(f32::from_bits(bits)));
        for part in [0.003, 0.3, 0.5, 0.96] {
            let one = (low + part * (high - low)) as f32;
            x.push(one.min(scale) * if x.len() % 2 == 0 { 1.0 } else { -1.0 });
        }
    }
    x
}

/// Compares the mean of many encodes with each element, in units of its standard error. The probabilities
/// follow from the decodable magnitudes in fp64. The draws are the same in every run, on every instruction set.
#[test]
fn mean_of_draws_is_within_four_standard_errors() {
    const DRAWS: u64 = 20_000;
    for name in NAMES {
        let codec = codec(&format!("{name}:block=4096:seed=7"), Isa::detect());
        let (mut worst, mut elements) = (0f64, 0);
        for scale in scales() {
            let x = across_all_gaps(name, scale);
            let mut sums = vec![0f64; x.len()];
            for operation in 0..DRAWS {
                let y = decode(&*codec, &draw(&*codec, &x, operation), x.len());
                sums.iter_mut()
                    .zip(y)
                    .for_each(|(sum, y)| *sum += f64::from(y));
            }
            let magnitudes = magnitudes(name, scale);
            let (mut total, mut drawn) = (0.0, 0);
            for (&x, sum) in x.iter().zip(sums) {
                let [low, high] = neighbours(&magnitudes, x).map(f64::from);
                let mean = sum / DRAWS as f64;
                if low == high {
                    // A code decodes to the element, or it is beyond the largest by fp32 rounding. Sums of
                    // equal numbers are rounded by fp64.
                    let is_kept = (mean.abs() - low).abs() <= 1e-9 * low;
                    assert!(is_kept, "{name} {scale:e}: {x:e} became {mean:e}");
                    assert!((low - f64::from(x.abs())).abs() <= 2e-7 * low);
                    continue;
                }
                let error = mean - f64::from(x);
                let part = (f64::from(x.abs()) - low) / (high - low);
                let deviation = (high - low) * (part * (1.0 - part) / DRAWS as f64).sqrt();
                let z = error / deviation;
                assert!(
                    z.abs() <= 4.0,
                    "{name} {scale:e}: {x:e} is off by {z} standard errors"
                );
                worst = worst.max(z.abs());
                (total, drawn) = (total + z * f64::from(x.signum()), drawn + 1);
            }
            // All elements together: a common bias of 1 % of their standard errors would be found.
            let z = total / f64::from(drawn).sqrt();
            assert!(
                z.abs() <= 4.0,
                "{name} {scale:e}: the mean is off by {z} standard errors"
            );
            elements += drawn;
        }
        println!(
            "{name}: {elements} elements, {DRAWS} draws, largest deviation {worst:.2} standard errors"
        );
    }
}

/// Each code is the one that the definition selects: by the exact distances from the decodable neighbours, but
/// where these are within roundings of the random number.
#[test]
fn drawn_codes_follow_the_definition() {
    for name in NAMES {
        for text in [
            format!("{name}:block=4096:seed=7"),
            format!("{name}:tensor=1:seed=7"),
        ] {
            for isa in Isa::available() {
                let codec = codec(&text, isa);
                for (scale, operation) in scales().into_iter().zip(0..) {
                    let x = across_all_gaps(name, scale);
                    let magnitudes = magnitudes(name, scale);
                    let wire = draw(&*codec, &x, operation);
                    let y = decode(&*codec, &wire, x.len());
                    let random = RoundingRandom::new(7, operation, 2);
                    for (i, (&x, y)) in x.iter().zip(y).enumerate() {
                        let [low, high] = neighbours(&magnitudes, x);
                        let wide = f64::from(high) - f64::from(low);
                        let part = (f64::from(x.abs()) - f64::from(low)) / wide;
                        let u = f64::from(random.fraction(i));
                        let expected = if part > u { high } else { low };
                        let is_close = (part - u).abs() < 2f64.powi(-22);
                        assert!(
                            y.abs() == expected || is_close && (y.abs() == low || y.abs() == high),
                            "{text} {isa:?} {scale:e}: {x:e} became {y:e}, not {expected:e}"
                        );
                        assert!(y == 0.0 || y.is_sign_negative() == x.is_sign_negative());
                    }
                }
            }
        }
    }
}

#[test]
fn decodable_magnitudes_keep_their_value_under_every_draw() {
    for name in NAMES {
        for scale in scales() {
            let mut x: Vec<f32> = Vec::new();
            let values = magnitudes(name, scale).into_keys().map(f32::from_bits);
            values.for_each(|y| x.extend([y, -y]));
            // The largest decodes to itself if its 127th does; else the block would have another scale.
            if x[x.len() - 2] != scale {
                continue;
            }
            for isa in Isa::available() {
                let codec = codec(&format!("{name}:block=256:seed=9"), isa);
                for operation in 0..300 {
                    let y = decode(&*codec, &draw(&*codec, &x, operation), x.len());
                    assert_eq!(x, y, "{name} {isa:?} {scale:e}");
                }
            }
        }
    }
}

/// Values beyond a kept scale saturate, and a non-finite element draws like 0.
#[test]
fn tensor_scale_saturates_and_poisons_with_a_seed_as_without() {
    for (name, top) in NAMES.into_iter().zip([127u8, 1]) {
        for scale in [1f32, 0.7, 2f32.powi(-110)] {
            let x = [
                2.0 * scale,
                -f32::MAX,
                scale.next_up(),
                f32::INFINITY,
                f32::NAN,
                -0.0,
                scale / 3.0,
            ];
            for isa in Isa::available() {
                let codec = codec(&format!("{name}:tensor=9:seed=3"), isa);
                for operation in 0..50 {
                    let random = RoundingRandom::new(3, operation, 0);
                    let mut wire = vec![0xee; codec.wire_bytes(x.len())];
                    let mut stats = EncodeStats::default();
                    let span = Span::whole(x.len()).drawing(random);
                    codec.encode(span, &x, Some(scale), &mut wire, Some(&mut stats));
                    assert_eq!(wire[..2], [top, top | 0x80], "{name} {isa:?}");
                    assert_eq!(wire[3..6], [0, 0, 0], "{name} {isa:?}");
                    assert_eq!((stats.saturated, stats.non_finite), (3, 2));
                    assert!(decode(&*codec, &wire, x.len()).iter().all(|y| y.is_nan()));
                }
            }
        }
    }
}

#[test]
fn drawn_bytes_on_every_instruction_set_and_in_spans_equal_the_scalar_form() {
    let mut inputs_of = TestRandom(12);
    for text in [
        "linear8:block=32:seed=1",
        "linear8:seed=2",
        "linear8:tensor=4:seed=3",
        "dynamic8:block=64:seed=4",
        "dynamic8:seed=5",
        "dynamic8:tensor=4:seed=6",
    ] {
        for n in [1, 31, 700, 1024] {
            for (what, x) in inputs(n, &mut inputs_of) {
                let expected = draw(&*codec(text, Isa::Scalar), &x, n as u64);
                for isa in Isa::available() {
                    let codec = codec(text, isa);
                    assert_eq!(
                        draw(&*codec, &x, n as u64),
                        expected,
                        "{text} {isa:?} {what}"
                    );
                    let random = RoundingRandom::new(codec.spec().seed.into(), n as u64, 2);
                    let mut wire = vec![0xee; expected.len()];
                    for at in (0..n).step_by(256) {
                        let part = &x[at..n.min(at + 256)];
                        let span = Span::new(n, at).drawing(random);
                        codec.encode(span, part, scale_of(&*codec, &x), &mut wire, None);
                    }
                    assert_eq!(wire, expected, "{text} {isa:?} {what} in spans");
                }
            }
        }
    }
}
