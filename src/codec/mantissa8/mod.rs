//! `mantissa8`: sign, 3-bit decimal exponent e, 4-bit integer m.
//!
//! Source: compression.md 1.1, "mantissa": m * 10^(1-e), times 10^offset. At offset 0: 0 and
//! 1e-6 to 150. Of 128 magnitude codes 114 have values of their own: eight stand for 0, and
//! m = 10 equals m = 1 of the next decade. Encoding uses the smallest of equal codes.
//!
//! The source writes a magnitude as EEE MMMM with e = 0 for the largest decade. On the wire the
//! three exponent bits are inverted, as in [`super::static8`], so that 0 has code 0.

use super::elementwise::{Elementwise, Table8};
use crate::types::CodecKind;

/// The codec.
pub(super) type Mantissa8 = Elementwise<Table8>;

/// The format at an offset.
pub(super) fn format(offset: i8) -> Table8 {
    Table8::new(CodecKind::Mantissa8, offset, |code| {
        // e = 7 - decade.
        let (decade, m) = (code >> 4, code & 15);
        (m, decade as i32 - 6)
    })
}

#[cfg(test)]
mod tests {
    use super::super::elementwise::ElementFormat;
    use super::*;

    #[test]
    fn golden_values() {
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
    fn equal_codes_encode_as_the_smallest() {
        let format = format(0);
        assert_eq!(format.magnitudes().sorted().len(), 114);
        assert_eq!(format.decode(0x1a), format.decode(0x21));
        assert_eq!(format.encode(1e-4), 0x1a);
        for zero in [0x00, 0x10, 0x70] {
            assert_eq!(format.encode(format.decode(zero)), 0);
        }
    }
}
