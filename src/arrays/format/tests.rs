//! Tests encodings of whole arrays: the bytes that papers published, wrong element counts, and
//! arrays of any length.

use super::*;
use crate::cpu::{self, STRANGE};

fn stand_alone(text: &str, layout: Layout, isa: Isa) -> StandAlone {
    StandAlone::new(text.parse().unwrap(), layout, isa).unwrap()
}

fn published(text: &str, isa: Isa, x: &[f32]) -> Vec<u8> {
    let codec = stand_alone(text, Layout::Published, isa);
    let mut bytes = vec![0xee; codec.bytes(x.len())];
    codec.encode(x, 0, &mut bytes).unwrap();
    assert_eq!(codec.count(&bytes).unwrap(), x.len());
    bytes
}

#[test]
fn compll_message_equals_the_published_bytes() {
    let x = [-5.0, 2.0, -3.0, 7.0, -1.0, 5.0, 3.0];
    let ends = [0x00, 0x00, 0xa0, 0xc0, 0x00, 0x00, 0xe0, 0x40];
    for isa in Isa::available() {
        for (text, header, codes) in [
            ("minmax1", [1, 1], &[0x6a][..]),
            ("minmax2", [2, 1], &[0xc8, 0x29]),
            ("minmax4", [4, 1], &[0x90, 0xf2, 0xc5, 0x0a]),
            (
                "minmax8",
                [8, 0],
                &[0x00, 0x95, 0x2a, 0xff, 0x55, 0xd4, 0xaa],
            ),
        ] {
            let bytes = published(text, isa, &x);
            assert_eq!(
                bytes,
                [&header[..], &ends, codes].concat(),
                "{text} {isa:?}"
            );
            let mut y = [0.0; 7];
            let codec = stand_alone(text, Layout::Published, isa);
            codec.decode(&bytes, &mut y).unwrap();
            assert_eq!((y[0], y[3]), (-5.0, 7.0));
        }
    }
}

#[test]
fn bitpack_equals_the_published_bytes() {
    let pi = -std::f32::consts::PI;
    let faint = f32::from_bits(0x7f80_0001);
    for isa in Isa::available() {
        assert_eq!(published("trunc24", isa, &[1.23]), [0x70, 0x9d, 0x3f]);
        assert_eq!(
            published("trunc16", isa, &[1.23, pi]),
            [0x9d, 0x3f, 0x49, 0xc0]
        );
        assert_eq!(published("trunc8", isa, &[1.23]), [0x3f]);
        // trunc16 cuts off the lower bits. All set bits of this NaN's mantissa are lower bits, so
        // it decodes to infinity.
        assert_eq!(published("trunc16", isa, &[faint]), [0x80, 0x7f]);
        let codec = stand_alone("trunc8", Layout::Published, isa);
        let mut y = [0.0; 2];
        codec.decode(&[0x7f, 0xff], &mut y).unwrap();
        assert_eq!(y, [2f32.powi(127), -2f32.powi(127)]);
    }
}

/// Every instruction set gives equal bytes for every length, and writes nothing beyond the array.
#[test]
fn array_of_any_length_has_the_bytes_of_the_scalar_form() {
    for text in [
        "minmax1",
        "minmax2",
        "minmax4:seed=5",
        "minmax8",
        "trunc8",
        "trunc16",
        "trunc24",
    ] {
        for n in (0..70).chain([1000]) {
            let x: Vec<f32> = (0..n).map(|i| ((i * 7919) % 997) as f32 - 300.25).collect();
            let expected = published(text, Isa::Scalar, &x);
            let reference = stand_alone(text, Layout::Published, Isa::Scalar);
            let mut values = vec![0.0; n];
            reference.decode(&expected, &mut values).unwrap();
            for isa in Isa::available() {
                let codec = stand_alone(text, Layout::Published, isa);
                let mut bytes = vec![0xee; expected.len() + 9];
                codec.encode(&x, 0, &mut bytes).unwrap();
                assert!(bytes.starts_with(&expected), "{text} {isa:?} {n}");
                assert!(bytes[expected.len()..].iter().all(|&byte| byte == 0xee));
                let mut y = vec![77.0; n];
                codec.decode(&expected, &mut y).unwrap();
                assert_eq!(y, values, "{text} {isa:?} {n}");
                let longer = codec.decode(&bytes, &mut y).unwrap_err();
                assert!(longer.message().contains("the array has"), "{longer}");
            }
        }
    }
}

#[test]
fn message_with_a_non_finite_element_decodes_to_nan() {
    for isa in Isa::available() {
        let bytes = published("minmax4", isa, &[1.0, f32::NAN, 2.0]);
        let mut y = [0.0; 3];
        let codec = stand_alone("minmax4", Layout::Published, isa);
        codec.decode(&bytes, &mut y).unwrap();
        assert!(y.iter().all(|y| y.is_nan()));
    }
}

#[test]
fn decoding_of_a_malformed_message_fails() {
    let codec = stand_alone("minmax2", Layout::Published, Isa::detect());
    let good = published("minmax2", Isa::detect(), &[1.0, 2.0, 3.0]);
    let mut y = [5.0; 3];
    let mut fails = |bytes: &[u8], words: &str| {
        let error = codec.decode(bytes, &mut y).unwrap_err();
        assert!(error.message().contains(words), "{error}");
        assert_eq!(y, [5.0; 3]);
    };
    fails(&good[..9], "11 bytes");
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    fails(
        &[&good[..], &[0]].concat(),
        "3 elements are 11 bytes when encoded with minmax2:block=256, but the array has 12",
    );
    fails(&with(0, 4), "minmax4");
    fails(&with(1, 4), "lacks 4 of 4");
    fails(&with(1, 0), "holds 4");
    let error = codec.count(&with(1, 3)[..10]).unwrap_err();
    assert!(error.message().contains("lacks 3"), "{error}");
    let odd = stand_alone("trunc24", Layout::Published, Isa::detect()).count(&[0; 7]);
    assert!(odd.unwrap_err().message().contains("7 bytes"));
}

#[test]
fn chunk_layout_of_every_codec_round_trips() {
    let x: Vec<f32> = (0..1000).map(|i| (i as f32).sin()).collect();
    for spec in CodecSpec::samples() {
        let codec = StandAlone::new(spec, Layout::Chunk, Isa::detect()).unwrap();
        let mut bytes = vec![0; codec.bytes(x.len())];
        let stats = codec.encode(&x, 1, &mut bytes).unwrap();
        assert_eq!((stats.abs_max, stats.non_finite), abs_max(Isa::Scalar, &x));
        let mut y = vec![f32::NAN; x.len()];
        codec.decode(&bytes, &mut y).unwrap();
        assert!(y.iter().all(|y| y.is_finite()), "{spec}");
        let short = bytes.len() - 1;
        assert!(codec.encode(&x, 1, &mut bytes[..short]).is_err(), "{spec}");
        assert!(codec.decode(&bytes[..short], &mut y).is_err(), "{spec}");
        assert!(codec.count(&bytes).is_err(), "{spec}");
    }
    let raw = StandAlone::new(CodecSpec::RAW, Layout::Chunk, Isa::detect()).unwrap_err();
    assert!(raw.message().contains("copy them"));
    let none = StandAlone::new("linear8".parse().unwrap(), Layout::Published, Isa::detect());
    assert!(none.unwrap_err().message().contains("linear8"));
}

/// Bytes, values and statistics do not depend on the floating-point environment of the caller.
#[test]
fn floating_point_environment_of_the_caller_changes_nothing() {
    let mut x: Vec<f32> = (0..70_000)
        .map(|i| ((i * 7919) % 997) as f32 * 1e-39)
        .collect();
    x.extend((0..5000).map(|i| ((i * 104_729) % 99_991) as f32 * 0.1 - 5000.0));
    let mut looked_at = 0;
    for spec in CodecSpec::samples() {
        for layout in [Layout::Chunk, Layout::Published] {
            let run = |threads: usize| {
                let codec = StandAlone::new(spec, layout, Isa::detect()).ok()?;
                let codec = codec.with_threads(threads);
                let mut bytes = vec![0; codec.bytes(x.len())];
                let stats = codec.encode(&x, 3, &mut bytes).unwrap();
                let mut y = vec![0f32; x.len()];
                codec.decode(&bytes, &mut y).unwrap();
                let bits: Vec<u32> = y.into_iter().map(f32::to_bits).collect();
                Some((bytes, stats.abs_max, stats.saturated, bits))
            };
            for threads in [1, 2] {
                let expected = run(threads);
                for word in STRANGE {
                    let found = cpu::under(word, || run(threads));
                    assert!(found == expected, "{spec} {layout:?} under {word:#x}");
                    looked_at += usize::from(found.is_some());
                }
            }
        }
    }
    assert!(looked_at > 100, "{looked_at}");
}
