//! `mantissa8`: sign, 3-bit decimal exponent e, 4-bit integer m.
//!
//! Source: the mantissa type of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning". A
//! magnitude is m * 10^(1-e), times 10^offset. At offset 0 the values are 0 and 1e-6 to 150. The 128
//! magnitude codes have 114 distinct values: eight codes stand for 0, and m = 10 equals m = 1 of the
//! next decade. Encoding uses the smallest of equal codes.
//!
//! Dettmers writes a magnitude as EEE MMMM with e = 0 for the largest decade. On the wire the three
//! exponent bits are inverted, as in [`super::static8`], so that 0 has code 0.

use super::elementwise::{Elementwise, Table8, decimal, kernel_words};
use super::feedback::Contraction;
use super::{CodecInfo, KernelInfo, MessageRange};
use crate::types::CodecKind;
use std::sync::Arc;

pub(super) const INFO: CodecInfo = CodecInfo {
    kind: CodecKind::Mantissa8,
    encode_seconds: 0.5e-9,
    decode_seconds: 0.1e-9,
    range: MessageRange::Fixed,
    contraction: |_| Contraction::relative(1.0 / 3.0),
    kernels: Some(KernelInfo {
        array_family: "mantissa8_tabled",
        encode_seconds: 0.7e-12,
        decode_seconds: 0.4e-12,
        words: |spec, words| {
            let offset = i32::from(spec.offset);
            let units = [decimal(1, offset - 2), decimal(1, offset - 6)];
            kernel_words(spec.offset, units, decimal(1, -(offset + 1)), words);
        },
        ..KernelInfo::new("mantissa8")
    }),
    build: |spec, isa| Arc::new(Elementwise::new(format(spec.offset), isa)),
};

/// Numbers of equally distant magnitudes: 0 to 15 units, then 2 to 15 units of each decade.
const REGIONS: [usize; 8] = [16, 14, 14, 14, 14, 14, 14, 14];

/// Creates the format whose values are multiplied by 10^`offset`.
pub(super) fn format(offset: i8) -> Table8 {
    Table8::new(CodecKind::Mantissa8, offset, &REGIONS, |code| {
        // The decimal exponent e, as Dettmers defines it, is 7 - decade.
        let (decade, m) = (code >> 4, code & 15);
        (m, decade as i32 - 6)
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
        assert_eq!(nearest(0.2345678), 0.2);
        assert_eq!(nearest(-0.26), -0.3);
        assert_eq!(nearest(2.0), 2.0);
        assert_eq!(nearest(1e9), 150.0);
        assert_eq!(nearest(1e-6), 1e-6);
        assert_eq!(format.encode(0.4e-6), 0);
        assert_eq!(format.encode(-0.0), 0);
        assert_eq!(format.encode(f32::NEG_INFINITY), 0x80);
    }

    #[test]
    fn value_of_several_codes_encodes_as_the_smallest() {
        let format = format(0);
        assert_eq!(format.magnitudes().sorted().len(), 114);
        assert_eq!(format.decode(0x1a), format.decode(0x21));
        assert_eq!(format.encode(1e-4), 0x1a);
        for zero in [0x00, 0x10, 0x70] {
            assert_eq!(format.encode(format.decode(zero)), 0);
        }
    }
}
