//! Error figures that the codecs must reach: a paper's Table 2, errors of block formats, and SIMD
//! code equal to scalar code. Optimised builds (`cargo test --release -p cinch-cli figures`) use
//! many samples, other builds few.

use super::{codecs, table2};
use cinch::codec::{Span, build};
use cinch::cpu::Isa;
use cinch::testing::Random;

const SEED: u64 = 2015;

fn size(quick: usize, full: usize) -> usize {
    if cfg!(debug_assertions) { quick } else { full }
}

#[test]
fn table_equals_nearest_rounding() {
    let mut text = Vec::new();
    let verdict = codecs::run(size(300_000, 10_000_000), SEED, &mut text);
    let text = String::from_utf8(text).unwrap();
    println!("{text}");
    verdict.unwrap();
    assert_eq!(
        text.lines().filter(|line| line.ends_with(" ok")).count(),
        16
    );
}

#[test]
fn table2_by_the_search_of_the_source_has_its_cells() {
    let mut text = Vec::new();
    let verdict = table2::run(size(500_000, 10_000_000), SEED, &mut text);
    let text = String::from_utf8(text).unwrap();
    println!("{text}");
    verdict.unwrap();
    assert_eq!(
        text.lines()
            .filter(|line| line.contains("squared;"))
            .count(),
        16
    );
}

#[test]
fn vector_forms_equal_the_scalar_form() {
    let mut text = Vec::new();
    let verdict = codecs::check(size(1_000_000, 100_000_000) as u64, SEED, &mut text);
    println!("{}", String::from_utf8(text).unwrap());
    verdict.unwrap();
}

/// The reference values come from rounding to the nearest in fp64 on N(0,1); the tolerance is 2 %.
#[test]
fn block_formats_have_the_reference_errors() {
    let references = [
        ("dynamic8", 128, [0.00718, 0.00920, 1.28]),
        ("dynamic8", 256, [0.00753, 0.00966, 1.32]),
        ("dynamic8", 1024, [0.00808, 0.01040, 1.39]),
        ("dynamic8", 4096, [0.00853, 0.01101, 1.45]),
        ("linear8", 128, [0.00552, 0.00646, 2.93]),
        ("linear8", 256, [0.00597, 0.00696, 3.13]),
        ("linear8", 1024, [0.00677, 0.00785, 3.47]),
        ("linear8", 4096, [0.00747, 0.00866, 3.77]),
    ];
    let n = size(1 << 20, 1 << 24);
    let x = Random::new(SEED).gaussian(n, 1.0);
    for (name, block, reference) in references {
        let spec = format!("{name}:block={block}").parse().unwrap();
        let codec = build(spec, Isa::detect()).unwrap().unwrap();
        let span = Span::whole(n);
        let mut wire = vec![0; codec.wire_bytes(n)];
        let mut y = vec![0.0; n];
        codec.encode(span, &x, None, &mut wire, None);
        codec.decode(span, &wire, &mut y);
        let mean = |f: &dyn Fn(f64, f64) -> f64| {
            let pairs = x.iter().zip(&y);
            pairs.map(|(&x, &y)| f(x.into(), y.into())).sum::<f64>() / n as f64
        };
        let found = [
            mean(&|x, y| (x - y).abs()),
            mean(&|x, y| (x - y).powi(2)).sqrt(),
            mean(&|x, y| 100.0 * ((x - y) / x).abs()),
        ];
        println!("{spec}: {found:.5?}, reference {reference:?}");
        for (found, reference) in found.iter().zip(reference) {
            assert!(
                (found / reference - 1.0).abs() < 0.02,
                "{spec}: {found} for {reference}"
            );
        }
    }
}

/// The data are N(0,1), and N(0,1) times exp(1.5 N(0,1)) with heavy tails. The relative RMS error
/// must be within 2 % of the reference, or half a unit of its last digit. Heavy tails converge
/// slowly, so their tolerance is 6 %.
#[test]
fn formats_have_the_reference_errors_on_normal_and_heavy_tailed_data() {
    let references: [(&str, [f64; 2], f64); 12] = [
        ("linear8:block=32", [0.0053, 0.0101], 5e-5),
        ("linear8:block=256", [0.0070, 0.0240], 5e-5),
        ("linear8:block=2048", [0.0083, 0.0503], 5e-5),
        ("dynamic8:block=256", [0.0097, 0.0079], 5e-5),
        ("dynamic8:block=2048", [0.0107, 0.0118], 5e-5),
        ("fp8_e4m3:block=128", [0.0257, 0.0138], 5e-5),
        ("fp8_e5m2:block=128", [0.0512, 0.0275], 5e-5),
        ("trunc16", [0.0033, 0.0033], 5e-5),
        ("trunc8", [0.528, 0.505], 5e-4),
        ("minmax2:block=512", [0.59, 2.2], 5e-2),
        ("cast_bf16", [0.00166, 0.00166], 5e-5),
        ("trunc24", [1.29e-5, 1.29e-5], 5e-7),
    ];
    let n = size(1 << 20, 1 << 24);
    let mut random = Random::new(SEED);
    let normal = random.gaussian(n, 1.0);
    let wide = random.gaussian(n, 1.5);
    let heavy: Vec<f32> = normal.iter().zip(&wide).map(|(a, b)| a * b.exp()).collect();
    for (text, reference, digit) in references {
        let codec = build(text.parse().unwrap(), Isa::detect())
            .unwrap()
            .unwrap();
        let mut wire = vec![0; codec.wire_bytes(n)];
        let mut y = vec![0.0; n];
        let found = [&normal, &heavy].map(|x| {
            codec.encode(Span::whole(n), x, None, &mut wire, None);
            codec.decode(Span::whole(n), &wire, &mut y);
            let squares = |f: &dyn Fn(f64, f64) -> f64| {
                let pairs = x.iter().zip(&y);
                pairs
                    .map(|(&x, &y)| f(x.into(), y.into()).powi(2))
                    .sum::<f64>()
            };
            (squares(&|x, y| x - y) / squares(&|x, _| x)).sqrt()
        });
        println!("{text}: {found:.6?}, reference {reference:?}");
        for ((found, reference), room) in found.iter().zip(reference).zip([0.02, 0.06]) {
            assert!(
                (found - reference).abs() < room * reference + digit,
                "{text}: {found} for {reference}"
            );
        }
    }
}

/// Truncation shrinks magnitudes by 0.28 % with two bytes and by 48 % with one.
#[test]
fn truncation_shrinks_magnitudes_by_the_published_shares() {
    let n = size(1 << 20, 1 << 24);
    let x = Random::new(SEED).gaussian(n, 1.0);
    for (text, shrinks) in [("trunc24", 1.1e-5), ("trunc16", 0.0028), ("trunc8", 0.48)] {
        let codec = build(text.parse().unwrap(), Isa::detect())
            .unwrap()
            .unwrap();
        let mut wire = vec![0; codec.wire_bytes(n)];
        let mut y = vec![0.0; n];
        codec.encode(Span::whole(n), &x, None, &mut wire, None);
        codec.decode(Span::whole(n), &wire, &mut y);
        let sum = |x: &[f32]| x.iter().map(|&x| f64::from(x.abs())).sum::<f64>();
        let found = 1.0 - sum(&y) / sum(&x);
        println!("{text}: mean magnitude shrinks by {found:.6}, reference {shrinks}");
        assert!((found / shrinks - 1.0).abs() < 0.02, "{text}: {found}");
    }
}
