//! Tests that no codec makes a finite value infinite: all 16-bit patterns in f16 and bf16, and numbers near every
//! limit in f32.

use cinch::DType;
use cinch::codec::{Codec, EncodeStats, Span, abs_max, build_for};
use cinch::cpu::Isa;
use cinch::reduce::{narrow, widen};
use cinch::testing::Random;
use cinch::types::{CodecKind, CodecSpec, ScaleRule};

/// Returns the sample specs, every offset, and some thresholds.
fn specs() -> Vec<CodecSpec> {
    let mut specs = CodecSpec::samples();
    for kind in [CodecKind::Static8, CodecKind::Mantissa8] {
        specs.extend((-30..=30).map(|offset| CodecSpec {
            offset,
            ..CodecSpec::of(kind)
        }));
    }
    for tau in ["0.5", "65504", "65519", "65520", "3e38"] {
        specs.push(format!("threshold2:tau={tau}").parse().unwrap());
    }
    specs
}

/// Encodes and decodes elements of `dtype`, and returns them with their statistics.
fn pass(codec: &dyn Codec, dtype: DType, elements: &[u8]) -> (Vec<f32>, Vec<f32>, EncodeStats) {
    let n = elements.len() / dtype.size();
    let mut x = vec![0.0; n];
    widen(dtype, Isa::Scalar, elements, &mut x);
    let spec = codec.spec();
    let has_tensor_scale = spec.kind.has_scale() && matches!(spec.scale, ScaleRule::Tensor { .. });
    let scale = has_tensor_scale.then(|| abs_max(Isa::Scalar, &x).0);
    let mut wire = vec![0; codec.wire_bytes(n)];
    let mut stats = EncodeStats::default();
    codec.encode(Span::whole(n), &x, scale, &mut wire, Some(&mut stats));
    let mut y = vec![0.0; n];
    codec.decode(Span::whole(n), &wire, &mut y);
    let mut stored = vec![0; elements.len()];
    narrow(dtype, Isa::Scalar, &y, &mut stored);
    widen(dtype, Isa::Scalar, &stored, &mut y);
    (x, y, stats)
}

/// Returns all finite elements of a 16-bit type, and for f32 all upper halves with some lower halves.
fn finite(dtype: DType) -> Vec<u8> {
    let lower: &[u32] = match dtype {
        DType::F32 => &[0, 0xffff],
        _ => &[0],
    };
    let mut elements = Vec::new();
    for upper in 0..=u16::MAX {
        for &lower in lower {
            let bytes = match dtype {
                DType::F32 => (u32::from(upper) << 16 | lower).to_le_bytes().to_vec(),
                _ => upper.to_le_bytes().to_vec(),
            };
            let mut x = [0.0];
            widen(dtype, Isa::Scalar, &bytes, &mut x);
            if x[0].is_finite() {
                elements.extend(bytes);
            }
        }
    }
    elements
}

fn shuffled(elements: &[u8], size: usize) -> Vec<u8> {
    let mut order: Vec<&[u8]> = elements.chunks(size).collect();
    let mut random = Random::new(7);
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i + 1));
    }
    order.concat()
}

#[test]
fn no_codec_makes_a_finite_element_infinite() {
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let ascending = finite(dtype);
        for elements in [shuffled(&ascending, dtype.size()), ascending] {
            for spec in specs() {
                let isas = [Isa::detect(), Isa::Scalar];
                // Scalar code searches tables, which takes long.
                for &isa in &isas[..1 + usize::from(CodecSpec::samples().contains(&spec))] {
                    let codec = build_for(spec, dtype, isa).unwrap().unwrap();
                    let (x, y, stats) = pass(&*codec, dtype, &elements);
                    assert_eq!(stats.non_finite, 0);
                    assert_eq!(
                        stats.abs_max,
                        abs_max(Isa::Scalar, &x).0,
                        "{spec} of {dtype}"
                    );
                    for (x, y) in x.iter().zip(y) {
                        assert!(
                            y.is_finite(),
                            "{spec} of {dtype} on {}: {x} became {y}",
                            isa.name()
                        );
                    }
                }
            }
        }
    }
}

/// Only codecs with this property carry a limit to GPUs.
#[test]
fn codecs_that_limit_elements_are_those_that_tell_kernels() {
    for spec in specs() {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let codec = build_for(spec, dtype, Isa::Scalar).unwrap().unwrap();
            let limits = codec.element_limit().is_some();
            assert!(
                !limits || spec.kind.has_limit() && dtype == DType::F16,
                "{spec} of {dtype}"
            );
        }
    }
    let limit = |text: &str| {
        let codec = build_for(text.parse().unwrap(), DType::F16, Isa::Scalar).unwrap();
        codec.unwrap().element_limit()
    };
    assert_eq!(limit("cast_bf16"), Some(65_408f32.next_down()));
    assert_eq!(limit("mantissa8:offset=3"), Some(65_000.0));
    assert_eq!(limit("mantissa8"), None);
}

/// Limited elements have the codes of the limit; a magnitude that overflows f16 does not become finite.
#[test]
fn limit_keeps_the_error_bound_and_the_overflow_of_sums() {
    for isa in Isa::available() {
        for text in ["cast_bf16", "mantissa8:offset=3", "mantissa8:offset=4"] {
            let spec: CodecSpec = text.parse().unwrap();
            let codec = build_for(spec, DType::F16, isa).unwrap().unwrap();
            let x: Vec<f32> = (0..1003).map(|i| 60_000.0 + 20.0 * i as f32).collect();
            let mut wire = vec![0; codec.wire_bytes(x.len())];
            codec.encode(Span::whole(x.len()), &x, None, &mut wire, None);
            let mut y = vec![0.0; x.len()];
            codec.decode(Span::whole(x.len()), &wire, &mut y);
            for (&x, y) in x.iter().zip(y) {
                assert_eq!(x < 65_520.0, y < 65_520.0, "{text}: {x} became {y}");
                assert!(
                    (x - y).abs() <= codec.error_bound(x, 0.0),
                    "{text}: {x} became {y}"
                );
            }
        }
    }
}
