//! Formats of one byte over a fixed table: sign and magnitude code; 0x80, which a sign without a
//! magnitude would have, stands for an element that is not finite and decodes to NaN.

mod simd;

use super::super::table::Magnitudes;
use super::super::{ErrorLaw, Zero};
use super::ElementFormat;
use crate::types::{CodecKind, CodecSpec};

/// What a non-finite element becomes.
const NOT_FINITE: u8 = 0x80;

/// A table with its name.
#[derive(Debug)]
pub(in super::super) struct Table8 {
    kind: CodecKind,
    offset: i8,
    magnitudes: Magnitudes,
}

impl Table8 {
    /// A format whose magnitude of `code` is `decimal(code)`, a whole number and a power of ten,
    /// times 10^`offset`.
    pub fn new(kind: CodecKind, offset: i8, decimal: impl Fn(u32) -> (u32, i32)) -> Table8 {
        // The parser rounds to the nearest fp32 number, which products would not.
        let value = |code: usize| {
            let (digits, power) = decimal(code as u32);
            format!("{digits}e{}", power + i32::from(offset))
                .parse()
                .unwrap_or(0.0)
        };
        Table8 {
            kind,
            offset,
            magnitudes: Magnitudes::new(std::array::from_fn(value)),
        }
    }
}

impl ElementFormat for Table8 {
    const BITS: usize = 8;
    const ZERO: Zero = Zero::Positive;

    fn spec(&self) -> CodecSpec {
        CodecSpec {
            offset: self.offset,
            ..CodecSpec::of(self.kind)
        }
    }

    fn encode(&self, x: f32) -> u32 {
        if !x.is_finite() {
            return NOT_FINITE.into();
        }
        match self.magnitudes.nearest(x.abs()) {
            0 => 0,
            magnitude if x < 0.0 => (magnitude | 0x80).into(),
            magnitude => magnitude.into(),
        }
    }

    fn decode(&self, code: u32) -> f32 {
        let magnitude = self.magnitudes.values()[(code & 0x7f) as usize];
        match code as u8 {
            NOT_FINITE => f32::NAN,
            0x81.. => -magnitude,
            _ => magnitude,
        }
    }

    fn largest(&self) -> f32 {
        self.magnitudes.largest()
    }

    fn error_bound(&self, x: f32) -> f32 {
        (self.magnitudes.half_gap(f64::from(x.abs())) as f32).next_up()
    }

    /// Half of the smallest magnitude, and of wider gaps the widest relative to its middle.
    fn errors(&self) -> ErrorLaw {
        let sorted = self.magnitudes.sorted();
        let pairs = sorted
            .windows(2)
            .map(|w| (f64::from(w[0]), f64::from(w[1])));
        let wide = pairs.filter(|(low, high)| high - low > 1.001 * f64::from(sorted[1]));
        let gaps = wide.map(|(low, high)| (high - low) / (high + low));
        ErrorLaw {
            of_value: 1.00001 * gaps.fold(0.0, f64::max),
            floor: 0.50001 * f64::from(sorted[1]),
            largest: self.magnitudes.largest().into(),
            ..ErrorLaw::EXACT
        }
    }
}

#[cfg(test)]
impl Table8 {
    /// The table behind the codes.
    pub fn magnitudes(&self) -> &Magnitudes {
        &self.magnitudes
    }
}
