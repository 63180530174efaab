//! Figures that the codecs must show: Table 2 of the source, errors of block formats, vector
//! forms equal to the scalar one. With optimisation the sample sizes are the promised ones
//! (`cargo test --release --test codec_figures`), without it they are small.

#[path = "../src/bin/cinch/codecs.rs"]
mod codecs;

use cinch::codec::{Span, build};
use cinch::simd::Isa;

const SEED: u64 = 2015;

fn size(quick: usize, full: usize) -> usize {
    if cfg!(debug_assertions) { quick } else { full }
}

#[test]
fn table_agrees_with_true_nearest_rounding() {
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
fn vector_forms_equal_the_scalar_one() {
    let mut text = Vec::new();
    let verdict = codecs::check(size(1_000_000, 100_000_000) as u64, SEED, &mut text);
    println!("{}", String::from_utf8(text).unwrap());
    verdict.unwrap();
}

/// Reference: nearest rounding in fp64 on N(0,1), 2 %.
#[test]
fn block_formats_have_their_errors() {
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
    let x = codecs::Random::new(SEED).gaussian(n, 1.0);
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
