//! `static8`: sign, 3-bit decimal exponent e, 4-bit tree.
//!
//! Source: the static tree of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning". A
//! magnitude is one of the sixteen nodes of a bisection of (0.1, 0.99), cut first at 0.45, times
//! 10^(2-e), times 10^offset. The smallest magnitude of all is replaced by 0. At offset 0 the values are
//! 0 and 1.4375e-6 to 92.25.
//!
//! Dettmers writes a magnitude as EEE MMMM with e = 0 for the largest decade. On the wire the three
//! exponent bits are inverted, so that 0 has code 0 and values ascend with the code.

use super::elementwise::{Elementwise, Table8, decimal, kernel_words};
use super::feedback::Contraction;
use super::{CodecInfo, KernelInfo, MessageRange};
use crate::types::CodecKind;
use std::sync::Arc;

pub(super) const INFO: CodecInfo = CodecInfo {
    kind: CodecKind::Static8,
    encode_seconds: 0.5e-9,
    decode_seconds: 0.1e-9,
    range: MessageRange::Fixed,
    contraction: |_| Contraction::relative(0.22),
    kernels: Some(KernelInfo {
        array_family: "static8_tabled",
        encode_seconds: 0.7e-12,
        decode_seconds: 0.4e-12,
        words: |spec, words| {
            let offset = i32::from(spec.offset);
            let units = [decimal(125, offset - 6), decimal(125, offset - 10)];
            kernel_words(spec.offset, units, decimal(1, -(offset + 2)), words);
        },
        ..KernelInfo::new("static8")
    }),
    build: |spec, isa| Arc::new(Elementwise::new(format(spec.offset), isa)),
};

/// The sixteen magnitudes of a decade, in units of 1e-5.
const NODES: [u32; 16] = [
    10_000, 14_375, 18_750, 23_125, 27_500, 31_875, 36_250, 40_625, 45_000, 51_750, 58_500, 65_250,
    72_000, 78_750, 85_500, 92_250,
];

/// Numbers of equally distant magnitudes: 0, and the nodes of each half of a decade.
const REGIONS: [usize; 17] = [1, 7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8];

/// Creates the format whose values are multiplied by 10^`offset`.
pub(super) fn format(offset: i8) -> Table8 {
    Table8::new(CodecKind::Static8, offset, &REGIONS, |code| {
        let (decade, node) = (code >> 4, NODES[(code & 15) as usize]);
        match code {
            0 => (0, 0),
            // The power is 2 - e for e = 7 - decade, minus 5 for the units of the nodes.
            _ => (node, decade as i32 - 5 - 5),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::elementwise::ElementFormat;
    use super::*;

    #[test]
    fn lines_and_nearest_magnitudes_agree() {
        for offset in [0, -30, 30, -7] {
            format(offset).check_lines();
        }
    }

    #[test]
    fn golden_inputs_become_the_published_values() {
        let format = format(0);
        let nearest = |x: f32| format.decode(format.encode(x));
        assert_eq!(nearest(0.2345678), 0.23125);
        assert_eq!(nearest(-0.2345678), -0.23125);
        assert_eq!(nearest(1e9), 92.25);
        assert_eq!(format.encode(0.7e-6), 0);
        assert_eq!(nearest(0.8e-6), 1.4375e-6);
        assert_eq!(format.encode(-0.7e-6), 0, "a zero has no sign");
        assert_eq!(format.encode(92.25), 0x7f);
        assert_eq!(format.encode(f32::NAN), 0x80);
        assert!(format.decode(0x80).is_nan());
    }

    #[test]
    fn nodes_equal_those_of_the_bisection() {
        let ends = [45_000u32, 99_000];
        for (half, low) in [10_000, 45_000].into_iter().enumerate() {
            for i in 0..8 {
                let width = (ends[half] - low) / 8;
                assert_eq!(NODES[8 * half + i], low + width * i as u32);
            }
        }
        let magnitudes = format(0);
        assert_eq!(magnitudes.magnitudes().sorted().len(), 128);
        assert!(magnitudes.magnitudes().values().is_sorted());
    }

    #[test]
    fn offset_multiplies_the_range() {
        for (offset, largest) in [(-30, 92.25e-30), (-2, 0.9225), (3, 92.25e3), (30, 92.25e30)] {
            let format = format(offset);
            assert_eq!(format.largest(), largest);
            assert_eq!(format.spec().offset, offset);
        }
    }
}
