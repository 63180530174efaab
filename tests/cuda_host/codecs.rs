//! Compares the CUDA headers of codecs and element types with the scalar specification, bit for bit. The
//! headers are compiled for the host, where their arithmetic equals the device's.
//!
//! `CINCH_TEST_PATTERNS=100000000 cargo test --release --test host cuda_host::codecs -- --nocapture` tests
//! 10^8 fp32 patterns for each codec, and every pattern above dynamic8's first threshold.

use super::host::{self, Bytes, Reference, abs_max, all};
use crate::support;
use cinch::codec::{self, kernel_params};
use cinch::testing::Random;
use cinch::types::CodecSpec;

const SPECS: [&str; 47] = [
    "linear8:block=32",
    "linear8:block=64",
    "linear8",
    "linear8:block=1024",
    "linear8:block=4096",
    "linear8:tensor=1",
    "linear8:seed=7",
    "linear8:block=4096:seed=255",
    "linear8:tensor=1:seed=2",
    "dynamic8:block=32",
    "dynamic8",
    "dynamic8:block=2048",
    "dynamic8:tensor=50",
    "dynamic8:seed=7",
    "dynamic8:block=32:seed=9",
    "dynamic8:tensor=50:seed=4",
    "static8",
    "static8:offset=-7",
    "mantissa8",
    "cast_bf16",
    "cast16",
    "minmax1",
    "minmax1:block=4096",
    "minmax1:seed=1",
    "minmax2",
    "minmax2:block=32",
    "minmax2:seed=9",
    "minmax4",
    "minmax4:block=32",
    "minmax4:block=1024",
    "minmax4:seed=255",
    "minmax8",
    "minmax8:block=64",
    "minmax8:seed=3",
    "trunc8",
    "trunc16",
    "trunc24",
    "fp8_e4m3",
    "fp8_e4m3:tensor=1",
    "fp8_e5m2:block=32",
    "fp8_e5m2:tensor=1",
    "terngrad:block=32",
    "terngrad:block=512:seed=2",
    "onebit",
    "onebit:block=4096",
    "threshold2:tau=0.4",
    "threshold2:tau=1e-40",
];

/// SPECS must have a spec for each codec that has kernels.
#[test]
fn codec_with_kernels_is_compared() {
    for kind in cinch::codec::KERNEL_CODECS {
        let has = |text: &&str| text.parse::<CodecSpec>().unwrap().kind == kind;
        assert!(SPECS.iter().any(has), "{}", kind.name());
    }
}

fn patterns() -> u64 {
    support::number("CINCH_TEST_PATTERNS").unwrap_or(1_000_000)
}

fn for_all(check: impl Fn(&host::Host, &Reference, &str)) {
    for (compiler, host) in all() {
        for spec in SPECS {
            if !host.second || has_second(spec) {
                check(host, &Reference::new(spec), &format!("by {compiler}"));
            }
        }
    }
}

/// Elements of f16 have limits, which kernels take as a parameter.
#[test]
fn limit_of_f16_elements_equals_the_specification() {
    let x: Vec<f32> = (0..=u16::MAX)
        .map(|bits| half::f16::from_bits(bits).to_f32_const())
        .chain((0..4_000).map(|i| 50_000.0 + 5.0 * i as f32))
        .collect();
    for (compiler, host) in all() {
        for text in [
            "cast_bf16",
            "mantissa8:offset=3",
            "mantissa8:offset=4",
            "mantissa8:offset=11",
        ] {
            let spec: CodecSpec = text.parse().unwrap();
            let codec = codec::build_for(spec, cinch::DType::F16, cinch::cpu::Isa::Scalar);
            let codec = codec.unwrap().unwrap();
            let mut expected = vec![0; codec.wire_bytes(x.len())];
            let span = codec::Span::whole(x.len());
            codec.encode(span, &x, None, &mut expected, None);
            let nothing = (codec::RoundingRandom::default(), 0);
            let wire = host.encode(spec, &x, codec.element_limit(), nothing);
            assert!(codec.element_limit().is_some());
            assert_eq!(wire.slice(), expected, "{text} by {compiler}");
        }
    }
}

fn has_second(spec: &str) -> bool {
    let two = ["dynamic8", "static8", "mantissa8", "minmax4"];
    two.iter().any(|kind| spec.starts_with(kind))
}

#[test]
fn codec_on_random_patterns_equals_the_specification() {
    let (seed, patterns) = (support::seed(), patterns());
    for_all(|host, reference, what| {
        let mut random = Random::new(seed);
        let mut done = 0;
        while done < patterns {
            let n = (patterns - done).min(65_536 - done % 97) as usize;
            let x = random.patterns(n);
            // The tensor scale is an element's magnitude, so it may be NaN and other elements
            // exceed it.
            let scale = reference.is_tensor().then(|| x[n / 2].abs());
            reference.check(host, &x, scale, what);
            done += n as u64;
        }
        println!(
            "{:<18} {done} patterns equal, {what}",
            reference.spec.to_string()
        );
    });
}

#[test]
fn codec_on_all_16_bit_floats_equals_the_specification() {
    let bf16 = (0..=u16::MAX).map(|bits| half::bf16::from_bits(bits).to_f32());
    let f16 = (0..=u16::MAX).map(|bits| half::f16::from_bits(bits).to_f32_const());
    let all: Vec<f32> = bf16.chain(f16).collect();
    let mut finite = all.clone();
    finite.retain(|x| x.is_finite());
    // Sorts the elements, so that those of a block have similar magnitudes. Otherwise the largest
    // would round all others to 0.
    finite.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
    for_all(|host, reference, what| {
        for x in [&all, &finite] {
            let scale = reference.is_tensor().then(|| abs_max(x));
            reference.check(host, x, scale, what);
        }
    });
}

#[test]
fn codec_at_any_length_equals_the_specification() {
    for_all(|host, reference, what| {
        for n in [
            0, 1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 511, 512, 513, 4095, 4097, 9000,
        ] {
            assert_eq!(host.wire_bytes(reference.spec, n), reference.wire_bytes(n));
            let mut x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
            let what = format!("{n} elements, {what}");
            for special in [None, Some(f32::NAN), Some(f32::NEG_INFINITY), Some(0.0)] {
                if let (Some(special), true) = (special, n > 0) {
                    let at = n * 7 / 9;
                    x[at] = special;
                }
                let scale = reference.is_tensor().then(|| abs_max(&x));
                reference.check(host, &x, scale, &what);
            }
        }
    });
}

#[test]
fn decode_of_every_code_under_hard_scales_equals_the_specification() {
    let tiny = 2f32.powi(-100);
    let scales = [
        1.0,
        0.7,
        -1.5,
        0.0,
        -0.0,
        tiny,
        tiny.next_down(),
        -tiny,
        -tiny.next_down(),
        f32::from_bits(1),
        -f32::from_bits(77),
        1e-35,
        f32::MIN_POSITIVE,
        f32::MAX,
        f32::MIN,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
    ];
    let accumulators = [
        0.0,
        -0.0,
        1.0,
        -3e-39,
        1e30,
        f32::MIN,
        f32::INFINITY,
        f32::from_bits(1),
    ];
    for_all(|host, reference, what| {
        // n is large enough for all 16-bit codes, or for all pairs of neighbouring 8-bit codes.
        let n = 1
            << if reference.spec.kind.has_scale() {
                12
            } else {
                16
            };
        let scales = if reference.spec.kind.has_scale() {
            &scales[..]
        } else {
            &scales[..1]
        };
        for (place, &scale) in scales.iter().enumerate() {
            let mut wire = Bytes::new(reference.wire_bytes(n), 0);
            let codes = reference.code_bytes(n);
            for (i, byte) in wire.slice_mut()[..codes].iter_mut().enumerate() {
                // Counts through all 16-bit codes; as 8-bit codes, each value appears beside
                // several neighbours.
                *byte = if i & 1 == 0 { i >> 1 } else { i >> 9 } as u8;
            }
            // Each block gets a difficult scale. If blocks store two numbers, the second is another
            // difficult scale.
            for (i, bytes) in wire.slice_mut()[codes..].chunks_exact_mut(4).enumerate() {
                let other = scales[(place + i / 2 + 1) % scales.len()];
                let two = reference.numbers() == 2 && i % 2 == 1 && i % 6 != 1;
                let number = if two { other } else { scale };
                bytes.copy_from_slice(&number.to_le_bytes());
            }
            for shift in 0..accumulators.len() {
                let of = |i: usize| accumulators[(i / 16 + shift) % accumulators.len()];
                let acc: Vec<f32> = (0..n).map(of).collect();
                let what = format!("scale {place} ({scale:e}), {what}");
                reference.check_decode(host, &wire, &acc, &what);
            }
        }
    });
}

#[test]
fn encode_under_hard_scales_equals_the_specification() {
    for (compiler, host) in all() {
        for spec in [
            "linear8:block=32",
            "dynamic8:block=32",
            "linear8:tensor=1",
            "dynamic8:tensor=1",
            "fp8_e4m3:block=32",
            "fp8_e5m2:tensor=1",
            "minmax1:block=32",
            "minmax2:block=64",
            "minmax4:block=32",
            "minmax4:block=32:seed=4",
            "minmax8:block=32",
            "terngrad:block=32",
            "onebit:block=64",
            "trunc8",
        ] {
            let reference = Reference::new(spec);
            for exponent in -149..128 {
                let scale = 2f64.powi(exponent) as f32;
                for scale in [scale, scale * 1.37, scale.next_down(), scale.next_up()] {
                    let x: Vec<f32> = (-150..=150).map(|k| scale * (k as f32 / 150.0)).collect();
                    let given = reference.is_tensor().then_some(scale);
                    reference.check(host, &x, given, &format!("scale {scale:e}, {compiler}"));
                }
            }
            if reference.is_tensor() {
                let x: Vec<f32> = (0..40).map(|k| k as f32 - 20.0).collect();
                for scale in [f32::NAN, f32::INFINITY, -1.0, -0.0, 0.0, 3.0] {
                    reference.check(host, &x, Some(scale), &format!("scale {scale}, {compiler}"));
                }
            }
        }
    }
}

/// Returns the value of each code, decoded at a scale of 1.
fn values(reference: &Reference) -> Vec<f32> {
    let mut wire = Bytes::new(reference.wire_bytes(128), 0);
    let bytes = wire.slice_mut();
    (0..128).for_each(|code| bytes[code] = code as u8);
    for scale in bytes[128..].chunks_exact_mut(4) {
        scale.copy_from_slice(&1f32.to_le_bytes());
    }
    let mut out = vec![0.0; 128];
    reference.decode(&wire, &mut out, false);
    out
}

/// Returns numbers on both sides of every value and of every midpoint between two values.
fn around(values: &[f32]) -> Vec<f32> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f32::total_cmp);
    let middles = sorted
        .windows(2)
        .map(|w| ((f64::from(w[0]) + f64::from(w[1])) / 2.0) as f32);
    let centres: Vec<f32> = sorted.iter().copied().chain(middles).collect();
    let about = |x: f32| {
        (-40..=40).map(move |step| f32::from_bits((x.to_bits() as i32 + step).max(0) as u32))
    };
    centres
        .into_iter()
        .flat_map(about)
        .flat_map(|x| [x, -x])
        .collect()
}

#[test]
fn dynamic8_at_every_threshold_equals_the_specification() {
    let reference = Reference::new("dynamic8:tensor=1");
    let close: Vec<f32> = around(&values(&reference))
        .into_iter()
        .map(|x| x.clamp(-1.0, 1.0))
        .collect();
    // Tests every bit pattern from dynamic8's first decision threshold to 1, or a sample of these
    // patterns.
    let (first, last) = (2f32.powi(-21).to_bits(), 1f32.to_bits());
    let step = (u64::from(last - first) / patterns()).max(1) as usize;
    for (compiler, host) in all() {
        let mut x = close.clone();
        let mut done = 0;
        for bits in (first..=last).step_by(step) {
            x.push(f32::from_bits(bits));
            if x.len() >= 1 << 16 || bits as usize + step > last as usize {
                reference.check(host, &x, Some(1.0), compiler);
                done += x.len();
                x.clear();
            }
        }
        println!("{done} patterns equal by {compiler}, one in {step}");
    }
}

/// With a scale of 127, encoding multiplies by 1, so multiples of one half are rounding ties.
#[test]
fn linear8_at_every_tie_equals_the_specification() {
    let halves: Vec<f32> = (0..=254).map(|k| k as f32 / 2.0).collect();
    let x: Vec<f32> = around(&halves)
        .into_iter()
        .map(|x| x.clamp(-127.0, 127.0))
        .collect();
    for (compiler, host) in all().iter().filter(|(_, host)| !host.second) {
        let reference = Reference::new("linear8:tensor=1");
        reference.check(host, &x, Some(127.0), compiler);
    }
}

#[test]
fn decimal_codecs_at_every_offset_equal_the_specification() {
    // If two thresholds shared a bucket of the lookup table, the kernel would misplace one of them.
    for (compiler, host) in all() {
        for kind in ["static8", "mantissa8"] {
            for offset in -30..=30 {
                let reference = Reference::new(&format!("{kind}:offset={offset}"));
                reference.check(host, &around(&values(&reference)), None, compiler);
            }
        }
    }
}

/// The words of the parameters that the host prepares must have the order of the header's fields.
#[test]
fn kernel_params_have_the_header_layout() {
    let spec = |text: &str| text.parse::<CodecSpec>().unwrap();
    let draws = [
        codec::RoundingRandom::new(1, 2, 3),
        codec::RoundingRandom::new(4, 5, 6),
    ];
    let words = |text: &str, scale: f32| kernel_params(spec(text), scale, draws);
    assert_eq!(words("linear8:block=512", 3.0), [9, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(
        words("dynamic8:tensor=3", 3.0),
        [0, 3f32.to_bits(), 0, 0, 0, 0, 3, 0]
    );
    assert_eq!(
        words("mantissa8:offset=2", 0.0)[6..],
        [1f32.to_bits(), 1e-3f32.to_bits()]
    );
    let [[a, b], [c, d]] = draws.map(|random| random.parts().0);
    assert_eq!(words("linear8:seed=7", 0.0), [8, 0, a, b, c, d, 0, 1]);
    assert_eq!(
        words("dynamic8:tensor=3:seed=7", 3.0),
        [0, 3f32.to_bits(), a, b, c, d, 3, 1]
    );
    // The second word of minmax and terngrad is the damping of error feedback.
    let [all, half, quarter] = [1.0, 0.5, 0.25].map(f32::to_bits);
    assert_eq!(words("minmax2:block=64", 0.0), [6, half, 0, 0, 0, 0, 2, 0]);
    assert_eq!(words("minmax8:seed=7", 0.0), [8, all, a, b, c, d, 8, 1]);
    assert_eq!(words("terngrad", 0.0), [8, quarter, a, b, c, d, 0, 0]);
    assert_eq!(words("trunc24", 0.0), [0, 0, 0, 0, 0, 0, 24, 0]);
    assert_eq!(words("threshold2:tau=2", 0.0)[1], 2f32.to_bits());
}

/// The headers' divisions by constants equal true divisions for every mantissa.
#[test]
fn division_by_constants_equals_true_division() {
    for (compiler, host) in all().iter().filter(|(_, host)| !host.second) {
        for n in [3u32, 7, 15, 127, 255] {
            for exponent in [-100, -1, 0, 126] {
                let first = (2f64.powi(exponent) as f32).to_bits();
                let all = exponent == 0 || patterns() > 1 << 23;
                let wrong = (first..first + (1 << 23))
                    .step_by(if all { 1 } else { 997 })
                    .map(f32::from_bits)
                    .find(|&x| host.divided(n, x) != x / n as f32);
                assert_eq!(wrong, None, "by {n}, {compiler}");
            }
            for zero in [0.0, -0.0f32] {
                assert_eq!(host.divided(n, zero).to_bits(), zero.to_bits());
            }
        }
    }
}
