//! Tests minmax codecs: golden vectors of the codes of CompLL (HiPress), extreme ranges, and
//! stochastic rounding.

use super::super::{Codec, RoundingRandom, Span, build};
use crate::cpu::Isa;
use std::sync::Arc;

fn codec(text: &str, isa: Isa) -> Arc<dyn Codec> {
    build(text.parse().unwrap(), isa).unwrap().unwrap()
}

fn round_trip(codec: &dyn Codec, x: &[f32], random: RoundingRandom) -> (Vec<u8>, Vec<f32>) {
    let span = Span::whole(x.len()).drawing(random);
    let mut wire = vec![0xee; codec.wire_bytes(x.len())];
    let mut y = vec![0.0; x.len()];
    codec.encode(span, x, None, &mut wire, None);
    codec.decode(span, &wire, &mut y);
    (wire, y)
}

#[test]
fn golden_vectors_have_the_published_bytes() {
    let x = [-5.0, 2.0, -3.0, 7.0, -1.0, 5.0, 3.0];
    for isa in Isa::available() {
        for (text, codes) in [
            ("minmax1", &[0x6a][..]),
            ("minmax2", &[0xc8, 0x29]),
            ("minmax4", &[0x90, 0xf2, 0xc5, 0x0a]),
            ("minmax8", &[0x00, 0x95, 0x2a, 0xff, 0x55, 0xd4, 0xaa]),
        ] {
            let (wire, y) = round_trip(&*codec(text, isa), &x, RoundingRandom::default());
            assert_eq!(&wire[..codes.len()], codes, "{text} {isa:?}");
            assert!(wire[codes.len()..16].iter().all(|&byte| byte == 0));
            assert_eq!(
                wire[16..],
                [[0, 0, 0xa0, 0xc0], [0, 0, 0xe0, 0x40]].concat()
            );
            assert_eq!((y[0], y[3]), (-5.0, 7.0), "{text} {isa:?}");
        }
    }
}

#[test]
fn ends_of_any_range_decode_to_themselves() {
    let tiny = f32::from_bits(1);
    for isa in Isa::available() {
        for [low, high] in [
            [-f32::MAX, f32::MAX],
            [0.0, f32::MAX],
            [-f32::MAX, -1.0],
            [f32::MAX / 2.0, f32::MAX],
            [-tiny, tiny],
            [0.0, tiny],
            [-3.0 * tiny, 5.0 * tiny],
            [2f32.powi(-101), 2f32.powi(-100)],
            [1.0, 1.0f32.next_up()],
            [1e-30, 1e30],
            [0.25, 0.25],
            [-3e38, -3e38],
        ] {
            for text in ["minmax1", "minmax2", "minmax4", "minmax8"] {
                let (_, y) = round_trip(
                    &*codec(text, isa),
                    &[low, high, low],
                    RoundingRandom::default(),
                );
                let range = f64::from(high) - f64::from(low);
                let near = |a: f32, b: f32| {
                    (f64::from(a) - f64::from(b)).abs() <= range * 1e-6 + f64::from(b).abs() * 1e-7
                };
                let what = format!("{text} {isa:?} [{low:e}, {high:e}] became {y:?}");
                assert!(y.iter().all(|y| y.is_finite()), "{what}");
                assert!(
                    near(y[0], low) && near(y[1], high) && y[2] == y[0],
                    "{what}"
                );
            }
        }
    }
}

/// The mean of many stochastic encodes lies within four standard errors of the element.
#[test]
fn mean_of_drawn_codes_is_unbiased() {
    const DRAWS: u64 = 20_000;
    let x: Vec<f32> = (0..61)
        .map(|i| ((i * 37) % 61) as f32 / 60.0 - 0.4)
        .collect();
    for isa in [Isa::Scalar, Isa::detect()] {
        for (text, levels) in [
            ("minmax1", 1.0),
            ("minmax2", 3.0),
            ("minmax4", 15.0),
            ("minmax8", 255.0),
        ] {
            let codec = codec(&format!("{text}:seed=3"), isa);
            let mut sums = vec![0f64; x.len()];
            for operation in 0..DRAWS {
                let (_, y) = round_trip(&*codec, &x, RoundingRandom::new(3, operation, 1));
                sums.iter_mut()
                    .zip(y)
                    .for_each(|(sum, y)| *sum += f64::from(y));
            }
            for (x, sum) in x.iter().zip(sums) {
                let (x, mean) = (f64::from(*x), sum / DRAWS as f64);
                let place = (x + 0.4) * levels;
                let fraction = place - place.floor();
                let deviation = (fraction * (1.0 - fraction) / DRAWS as f64).sqrt() / levels;
                assert!(
                    (mean - x).abs() <= 4.2 * deviation + 2e-6,
                    "{text} {isa:?}: {x} became {mean} on average, standard error {deviation}"
                );
            }
        }
    }
}

#[test]
fn draws_depend_on_the_index_not_on_the_span() {
    let x: Vec<f32> = (0..700).map(|i| (i as f32 * 0.7).sin()).collect();
    let random = RoundingRandom::new(9, 1, 2);
    for isa in Isa::available() {
        let codec = codec("minmax2:block=32:seed=9", isa);
        let (_, whole) = round_trip(&*codec, &x, random);
        let (_, rest) = round_trip(&*codec, &x[64..], random.from(64));
        assert_eq!(whole[64..], rest);
        let (_, other) = round_trip(&*codec, &x, RoundingRandom::new(9, 2, 2));
        assert_ne!(whole, other);
    }
}
