//! Conformance tests: every codec keeps the contract of [`Codec`] on every instruction set of this machine.
//! `cinch codecs --check` and `cli/src/papers/figures_tests.rs` compare vector and scalar forms on many more
//! bit patterns.

mod draws;
mod vectors;

use super::*;
/// SplitMix64 generator, implemented without the library's code.
struct TestRandom(u64);

impl TestRandom {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from -1 to 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

fn codec(spec: &str, isa: Isa) -> Arc<dyn Codec> {
    build(spec.parse().unwrap(), isa).unwrap().unwrap()
}

/// Returns the specification of every codec with each of its parameters.
fn specs() -> Vec<String> {
    let samples = CodecSpec::samples();
    let mut texts: Vec<String> = samples.iter().map(CodecSpec::to_string).collect();
    texts.extend(["linear8:tensor=50:seed=7", "dynamic8:tensor=50:seed=7"].map(String::from));
    texts
}

/// Returns every codec with each of its parameters, for every instruction set.
fn all() -> Vec<(Isa, Arc<dyn Codec>)> {
    let pairs = Isa::available()
        .into_iter()
        .flat_map(|isa| specs().into_iter().map(move |spec| (isa, spec)));
    pairs.map(|(isa, spec)| (isa, codec(&spec, isa))).collect()
}

fn is_tensor(codec: &dyn Codec) -> bool {
    let spec = codec.spec();
    spec.kind.has_scale() && matches!(spec.scale, ScaleRule::Tensor { .. })
}

/// Returns the scale to pass to `encode`: the largest finite magnitude under a tensor rule, else
/// `None`.
fn scale_of(codec: &dyn Codec, x: &[f32]) -> Option<f32> {
    is_tensor(codec).then(|| abs_max(Isa::Scalar, x).0)
}

/// Encodes all elements in one span, with the scale from [`scale_of`].
fn encode(codec: &dyn Codec, x: &[f32]) -> (Vec<u8>, EncodeStats) {
    let mut wire = vec![0xee; codec.wire_bytes(x.len())];
    let mut stats = EncodeStats::default();
    let span = Span::whole(x.len());
    codec.encode(span, x, scale_of(codec, x), &mut wire, Some(&mut stats));
    // Without statistics, loops of some codecs leave out a scan.
    let mut bare = vec![0xee; wire.len()];
    codec.encode(span, x, scale_of(codec, x), &mut bare, None);
    assert!(
        wire == bare,
        "{} encodes differently without statistics",
        codec.spec()
    );
    (wire, stats)
}

fn decode(codec: &dyn Codec, wire: &[u8], n: usize) -> Vec<f32> {
    let mut y = vec![77.0; n];
    codec.decode(Span::whole(n), wire, &mut y);
    y
}

fn same(a: &[f32], b: &[f32]) -> bool {
    let bits = |x: &f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
    a.iter().map(bits).eq(b.iter().map(bits))
}

/// Returns inputs of `n` elements that are hard to encode, with their names.
fn inputs(n: usize, random: &mut TestRandom) -> Vec<(&'static str, Vec<f32>)> {
    let mut of = |what, make: &mut dyn FnMut(&mut TestRandom) -> f32| {
        (what, (0..n).map(|_| make(random)).collect::<Vec<f32>>())
    };
    vec![
        of("uniform", &mut |r| r.unit()),
        of("few levels", &mut |r| (r.unit() * 8.0).round() * 0.5),
        of("heavy tails", &mut |r| r.unit() * (r.unit() * 14.0).exp()),
        of("huge", &mut |r| r.unit() * f32::MAX),
        of("near 2^-100", &mut |r| r.unit() * 2f32.powi(-100) * 1.5),
        of("subnormal", &mut |r| {
            f32::from_bits(r.next() as u32 & 0x803f_ffff)
        }),
        of("last subnormals", &mut |r| {
            f32::from_bits(r.next() as u32 & 0x8000_0003)
        }),
        of("the largest", &mut |r| f32::MAX.copysign(r.unit())),
        of("the largest among others", &mut |r| {
            let x = r.unit();
            if x > 0.9 { f32::MAX } else { x * f32::MAX }
        }),
        of("zeros", &mut |r| 0.0f32.copysign(r.unit())),
    ]
}

#[test]
fn error_of_every_element_is_within_the_bound() {
    let mut random = TestRandom(1);
    for (isa, codec) in all() {
        for (what, x) in inputs(4097, &mut random) {
            let (wire, stats) = encode(&*codec, &x);
            let y = decode(&*codec, &wire, x.len());
            let block = match codec.granule() {
                1 => x.len(),
                block => block,
            };
            let mut saturated = 0;
            for (x, y) in x.chunks(block).zip(y.chunks(block)) {
                let s = abs_max(Isa::Scalar, x).0;
                for (&x, &y) in x.iter().zip(y) {
                    let law = codec.description().errors;
                    let beyond = f64::from(x.abs()) > law.largest;
                    saturated += u64::from(beyond);
                    let (error, bound) =
                        ((f64::from(x) - f64::from(y)).abs(), codec.error_bound(x, s));
                    assert!(
                        beyond || error <= f64::from(bound),
                        "{} {isa:?} {what}: {x:e} became {y:e}, off by {error:e} > {bound:e}",
                        codec.spec()
                    );
                    let magnitude = f64::from(x.abs());
                    let plain = law.of_scale * f64::from(s) + law.of_value * magnitude + law.floor;
                    assert!(
                        beyond || error <= plain + 1.5e-45,
                        "{} {isa:?} {what}: {x:e} became {y:e}, off by {error:e} > {plain:e}",
                        codec.spec()
                    );
                }
            }
            assert_eq!(
                stats.saturated,
                saturated,
                "{} {isa:?} {what}",
                codec.spec()
            );
            assert_eq!((stats.abs_max, stats.non_finite), abs_max(isa, &x));
            let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            assert!((stats.sum_squares - squares).abs() <= 1e-12 * squares);
        }
    }
}

#[test]
fn bounds_of_8_bit_codecs_equal_the_published_figures() {
    let linear = codec("linear8", Isa::Scalar);
    let dynamic = codec("dynamic8", Isa::Scalar);
    assert!(linear.error_bound(0.3, 1.0) < 1.0 / 254.0 * 1.0002);
    assert!(dynamic.error_bound(0.99, 1.0) < 0.00860);
    // Largest relative error in percent, by decade below the scale. The absolute bound is constant within a
    // gap between values, so the relative error is largest at the gap's lower end.
    for (decade, percent) in [(0, 5.0), (1, 9.0), (2, 15.3), (3, 25.0), (4, 45.5)] {
        let step = |i: usize| 10f32.powi(-decade) * (0.1 + 0.9 * i as f32 / 4096.0);
        let x: Vec<f32> = std::iter::once(1.0).chain((1..4096).map(step)).collect();
        let tensor = codec("dynamic8:tensor=1", Isa::Scalar);
        let y = decode(&*tensor, &encode(&*tensor, &x).0, x.len());
        let relative = x.iter().zip(y).map(|(x, y)| (x - y).abs() / x * 100.0);
        let worst = relative.fold(0.0, f32::max);
        assert!(
            (0.9 * percent..=percent).contains(&worst),
            "decade {decade}: {worst} %"
        );
    }
    let tiny: Vec<f32> = (0..=1000).map(|i| i as f32 * 1e-8).chain([1.0]).collect();
    let tensor = codec("dynamic8:tensor=1", Isa::Scalar);
    let y = decode(&*tensor, &encode(&*tensor, &tiny).0, tiny.len());
    let errors = tiny.iter().zip(&y).map(|(x, y)| (x - y).abs());
    assert!(errors.take(1001).fold(0.0, f32::max) <= 2.7501e-6);
}

#[test]
fn encoding_of_any_length_and_special_value_keeps_the_contract() {
    let mut random = TestRandom(2);
    for (isa, codec) in all() {
        let block = codec.granule().max(32);
        for n in [
            0,
            1,
            2,
            15,
            16,
            17,
            31,
            block - 1,
            block,
            block + 1,
            3 * block + 5,
        ] {
            let what = format!("{} {isa:?}, {n} elements", codec.spec());
            let mut x: Vec<f32> = (0..n).map(|_| random.unit()).collect();
            let (wire, _) = encode(&*codec, &x);
            let description = codec.description();
            let bytes = (n * description.code_bits).div_ceil(8);
            let blocks = if is_tensor(&*codec) {
                n.min(1)
            } else {
                n.div_ceil(block)
            };
            assert_eq!(
                wire.len(),
                bytes.next_multiple_of(16) + 4 * description.block_numbers * blocks,
                "{what}"
            );
            assert!(
                wire[bytes..bytes.next_multiple_of(16)]
                    .iter()
                    .all(|&b| b == 0),
                "{what}"
            );
            assert!(
                decode(&*codec, &wire, n).iter().all(|y| y.is_finite()),
                "{what}"
            );
            if n == 0 {
                continue;
            }
            for special in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let at = random.below(n);
                let kept = std::mem::replace(&mut x[at], special);
                let (wire, stats) = encode(&*codec, &x);
                assert_eq!(stats.non_finite, 1, "{what}");
                let y = decode(&*codec, &wire, n);
                for (i, y) in y.iter().enumerate() {
                    let hit = if description.poisons_block {
                        is_tensor(&*codec) || i / block == at / block
                    } else {
                        i == at
                    };
                    assert_eq!(
                        y.is_finite(),
                        !hit,
                        "{what}: {special} at {at}, element {i}"
                    );
                }
                if codec.spec().kind == CodecKind::Cast16 {
                    assert!(y[at] == special || special.is_nan() && y[at].is_nan());
                }
                x[at] = kept;
            }
        }
    }
}

#[test]
fn zeros_decode_as_described() {
    for (isa, codec) in all() {
        for x in [
            vec![-0.0f32; 300],
            [vec![-0.0f32; 300], vec![1.0, -1e-9]].concat(),
        ] {
            let (wire, _) = encode(&*codec, &x);
            let y = decode(&*codec, &wire, x.len());
            let zero = match codec.description().zero {
                Zero::Signed => -0.0f32,
                Zero::Inexact if x.len() > 300 => continue,
                _ => 0.0,
            };
            assert!(
                y[..300].iter().all(|y| y.to_bits() == zero.to_bits()),
                "{} {isa:?}",
                codec.spec()
            );
        }
    }
}

#[test]
fn encoding_in_spans_gives_the_bytes_of_one_span() {
    let mut random = TestRandom(3);
    for (isa, codec) in all() {
        let step = codec.granule();
        for n in [1, 3 * step + 7, 5 * step.max(100)] {
            for poison in [false, true] {
                let mut x: Vec<f32> = (0..n).map(|_| random.unit()).collect();
                if poison {
                    x[random.below(n)] = f32::NAN;
                }
                let (whole, stats) = encode(&*codec, &x);
                let mut parts = vec![0xdd; whole.len()];
                let mut sum = EncodeStats::default();
                let mut spans = Vec::new();
                let mut at = 0;
                while at < n {
                    let len = (step * (1 + random.below(4.max(70 / step)))).min(n - at);
                    let span = Span::new(n, at);
                    codec.encode(
                        span,
                        &x[at..at + len],
                        scale_of(&*codec, &x),
                        &mut parts,
                        Some(&mut sum),
                    );
                    spans.push((at, len));
                    at += len;
                }
                assert_eq!(whole, parts, "{} {isa:?}", codec.spec());
                assert_eq!(
                    (stats.abs_max, stats.non_finite, stats.saturated),
                    (sum.abs_max, sum.non_finite, sum.saturated)
                );
                let y = decode(&*codec, &whole, n);
                let mut z = vec![0.0; n];
                let mut added = vec![0.0; n];
                for (at, len) in spans {
                    let span = Span::new(n, at);
                    codec.decode(span, &whole, &mut z[at..at + len]);
                    codec.decode_reduce(span, &whole, &mut added[at..at + len]);
                }
                assert!(same(&y, &z), "{} {isa:?}", codec.spec());
                assert!(
                    same(&y, &added),
                    "adding to 0 is decoding: {} {isa:?}",
                    codec.spec()
                );
            }
        }
    }
}

#[test]
fn decode_reduce_rounds_the_sum_once() {
    let mut random = TestRandom(4);
    for (isa, codec) in all() {
        let x: Vec<f32> = (0..700).map(|_| random.unit()).collect();
        let start: Vec<f32> = (0..700).map(|_| random.unit() * 3.0).collect();
        let (wire, _) = encode(&*codec, &x);
        let mut sum = start.clone();
        codec.decode_reduce(Span::whole(700), &wire, &mut sum);
        let scale = |i: usize| {
            let at = 704
                + if is_tensor(&*codec) {
                    0
                } else {
                    4 * (i / codec.granule())
                };
            f32::from_le_bytes(wire[at..at + 4].try_into().unwrap())
        };
        let values = decode(&*codec, &wire, 700);
        for i in 0..700 {
            let exact = match codec.spec().kind {
                // Computes the expected sum in fp64, where products of two fp32 numbers are exact.
                CodecKind::Linear8 => {
                    let k = (f64::from(values[i]) / f64::from(scale(i)) * 127.0).round();
                    k * f64::from(scale(i) / 127.0) + f64::from(start[i])
                }
                _ if codec.description().block_numbers > 0 => continue,
                _ => f64::from(values[i]) + f64::from(start[i]),
            };
            assert_eq!(sum[i], exact as f32, "{} {isa:?}", codec.spec());
        }
    }
}

#[test]
fn decoded_code_encodes_to_itself() {
    for (isa, codec) in all() {
        let kind = codec.spec().kind;
        let tables = CodecKind::Linear8 as u8..=CodecKind::Mantissa8 as u8;
        if !tables.contains(&(kind as u8)) {
            continue;
        }
        let n = codec.granule().max(256);
        for scale in [1.0f32, 0.7, 3.1e-4, 2f32.powi(-101), 3e38] {
            let mut wire = vec![0u8; codec.wire_bytes(n)];
            for (i, code) in wire[..n].iter_mut().enumerate() {
                *code = i as u8;
            }
            if kind.has_scale() {
                for at in wire[n..].chunks_exact_mut(4) {
                    at.copy_from_slice(&scale.to_le_bytes());
                }
            }
            let y = decode(&*codec, &wire, n);
            let (again, _) = encode(&*codec, &y[..n.min(128)]);
            for i in 0..n.min(128) {
                match kind {
                    // Several codes of `mantissa8` have equal values, so the decoded values are
                    // compared instead of the codes.
                    CodecKind::Mantissa8 => {
                        let z = decode(&*codec, &again, n.min(128));
                        assert_eq!(y[i], z[i], "{} {isa:?} code {i:#x}", codec.spec());
                    }
                    // A block of 32 codes may lack the largest code; its scale and its codes then
                    // change, so they are not compared.
                    _ if codec.granule() == 32 => {}
                    _ => assert_eq!(again[i], i as u8, "{} {isa:?} {scale:e}", codec.spec()),
                }
                assert!(i == 0 || y[128..].is_empty() || y[i] == -y[128 + i]);
            }
            if kind.has_scale() {
                let top = if kind == CodecKind::Linear8 { 127 } else { 1 };
                assert_eq!(y[top.min(n - 1)], if n > top { scale } else { y[n - 1] });
                assert_eq!(y[128].to_bits(), 0, "a hostile -0");
            } else {
                assert!(y[128].is_nan());
            }
        }
    }
}

#[test]
fn stale_tensor_scale_saturates_and_counts() {
    for isa in Isa::available() {
        for spec in ["linear8:tensor=9", "dynamic8:tensor=9"] {
            let codec = codec(spec, isa);
            let x: Vec<f32> = (0..100).map(|i| i as f32 - 50.0).collect();
            for (scale, expected) in [(10.0f32, 79), (1e-38, 99), (0.0, 99), (50.0, 0)] {
                let mut wire = vec![0; codec.wire_bytes(100)];
                let mut stats = EncodeStats::default();
                let span = Span::whole(100);
                codec.encode(span, &x, Some(scale), &mut wire, Some(&mut stats));
                assert_eq!(
                    (stats.saturated, stats.abs_max),
                    (expected, 50.0),
                    "{spec} {scale}"
                );
                let y = decode(&*codec, &wire, 100);
                for (x, y) in x.iter().zip(y) {
                    let clipped = x.clamp(-scale, scale);
                    let bound = codec.error_bound(clipped, scale);
                    assert!(
                        (clipped - y).abs() <= bound,
                        "{spec} {scale}: {x} became {y}"
                    );
                }
            }
            // The chunk decodes to NaN if the scale is negative or not finite, or if any span has a
            // non-finite element.
            for (scale, at) in [
                (f32::NAN, 0),
                (f32::INFINITY, 0),
                (-1.0, 0),
                (60.0, 3),
                (60.0, 99),
            ] {
                let mut x = x.clone();
                x[at] = f32::INFINITY;
                let mut wire = vec![0; codec.wire_bytes(100)];
                for at in [0, 50] {
                    let span = Span::new(100, at);
                    codec.encode(span, &x[at..at + 50], Some(scale), &mut wire, None);
                }
                assert!(decode(&*codec, &wire, 100).iter().all(|y| y.is_nan()));
            }
        }
    }
}

#[test]
fn build_with_a_bad_spec_or_missing_instruction_set_fails() {
    let linear = CodecSpec::of(CodecKind::Linear8);
    for scale in [0, 16, 48, 8192].map(ScaleRule::Block) {
        assert!(build(CodecSpec { scale, ..linear }, Isa::Scalar).is_err());
    }
    let scale = ScaleRule::Tensor { refresh: 0 };
    assert!(build(CodecSpec { scale, ..linear }, Isa::Scalar).is_err());
    let fixed = CodecSpec::of(CodecKind::Static8);
    assert!(
        build(
            CodecSpec {
                offset: 31,
                ..fixed
            },
            Isa::Scalar
        )
        .is_err()
    );
    assert!(build(CodecSpec::RAW, Isa::Scalar).unwrap().is_none());
    let threshold = CodecSpec::of(CodecKind::Threshold2);
    for tau in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let scale = ScaleRule::Threshold(tau.to_bits());
        assert!(build(CodecSpec { scale, ..threshold }, Isa::Scalar).is_err());
        assert!(build(CodecSpec { scale, ..linear }, Isa::Scalar).is_err());
    }
    let scale = ScaleRule::Block(256);
    assert!(build(CodecSpec { scale, ..threshold }, Isa::Scalar).is_err());
    if Isa::detect() < Isa::Avx512 {
        assert!(build(linear, Isa::Avx512).is_err());
    }
    for spec in CodecSpec::samples() {
        assert_eq!(build(spec, Isa::Scalar).unwrap().unwrap().spec(), spec);
    }
}

/// Fused calls pad each tensor's last block with copies of its last element, and rely on this
/// property.
#[test]
fn repeated_last_element_changes_no_other_if_extremes_decide() {
    let mut random = TestRandom(77);
    for (isa, codec) in all() {
        let mut differs = false;
        for n in [1, 33, 100, 300] {
            for (what, x) in inputs(n, &mut random) {
                let whole = n.next_multiple_of(codec.granule());
                let mut filled = x.clone();
                filled.resize(whole, x[n - 1]);
                let [alone, among] = [&x, &filled].map(|x| {
                    let (wire, _) = encode(&*codec, x);
                    decode(&*codec, &wire, x.len())
                });
                let same = same(&alone, &among[..n]);
                differs |= !same;
                let fits = codec.description().fits_extremes;
                assert!(same || !fits, "{isa:?} {:?} {what} {n}", codec.spec());
            }
        }
        if !codec.description().fits_extremes {
            assert!(
                differs,
                "{isa:?} {:?} could set fits_extremes",
                codec.spec()
            );
        }
    }
}
