//! Formats with one-byte codes and a fixed table of magnitudes: bit 7 is the sign, the others are the
//! magnitude code. Code 0x80, which would be -0, stands for a non-finite element and decodes to NaN.

mod simd;

use super::super::lines::Lines;
use super::super::table::Magnitudes;
use super::super::{ErrorLaw, Zero};
use super::ElementFormat;
use crate::types::{CodecKind, CodecSpec};

/// Code of a non-finite element.
const NOT_FINITE: u8 = 0x80;

/// A table of 128 magnitudes, with the codec that uses it.
#[derive(Debug)]
pub(in super::super) struct Table8 {
    kind: CodecKind,
    offset: i8,
    magnitudes: Magnitudes,
    lines: Lines,
}

impl Table8 {
    /// Creates the format in which magnitude code c has the value `decimal(c)` times 10^`offset`. `decimal`
    /// returns a whole number and a power of ten. `regions` are as [`Lines::new`] takes them.
    pub fn new(
        kind: CodecKind,
        offset: i8,
        regions: &[usize],
        decimal: impl Fn(u32) -> (u32, i32),
    ) -> Table8 {
        // Uses the float parser, which rounds to the nearest fp32 number; a product would not.
        let value = |code: usize| {
            let (digits, power) = decimal(code as u32);
            format!("{digits}e{}", power + i32::from(offset))
                .parse()
                .unwrap_or(0.0)
        };
        let magnitudes = Magnitudes::new(std::array::from_fn(value));
        Table8 {
            kind,
            offset,
            lines: Lines::new(&magnitudes, regions),
            magnitudes,
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

    /// The floor is half of the smallest magnitude. The relative error is the largest ratio of half
    /// a gap to the gap's middle, over all gaps wider than the smallest magnitude.
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

/// Sets the parameter words of a table for CUDA kernels. They hold the unit of decade 4, the unit of decade
/// 0, and the value that a kernel counts as 1 in the largest decade.
///
/// A unit is a sum of two fp32 numbers, so that a kernel rounds table values as the parser does.
/// `tests/cuda_host/codecs.rs` compares all values for every offset.
pub(in super::super) fn kernel_words(offset: i8, units: [f64; 2], top: f64, words: &mut [u32; 8]) {
    // Small units are multiplied by 2^64; otherwise their second number would be subnormal and lose
    // bits.
    let raise = if offset < 0 { 64 } else { 0 };
    let two = |unit: f64| {
        let raised = unit * 2f64.powi(raise);
        let first = raised as f32;
        [first, (raised - f64::from(first)) as f32].map(f32::to_bits)
    };
    words[2..4].copy_from_slice(&two(units[0]));
    words[4..6].copy_from_slice(&two(units[1]));
    words[6] = 2f32.powi(-raise).to_bits();
    words[7] = (top as f32).to_bits();
}

/// Returns `digits` times 10^`power`, correctly rounded by the float parser; a product would not
/// be.
pub(in super::super) fn decimal(digits: u32, power: i32) -> f64 {
    format!("{digits}e{power}").parse().unwrap_or(0.0)
}

#[cfg(test)]
impl Table8 {
    /// Returns the table of magnitudes.
    pub fn magnitudes(&self) -> &Magnitudes {
        &self.magnitudes
    }

    /// Compares the linear functions with the table.
    pub fn check_lines(&self) {
        let every = self.offset == 0 && !cfg!(debug_assertions);
        super::super::lines::check(&self.magnitudes, &self.lines, every);
    }
}
