//! `dynamic8`: sign and a 7-bit dynamic tree, times the scale s.
//!
//! Source: the dynamic tree of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning".
//! The seven magnitude bits read as n zeros, a flag bit 1 and b = 6 - n tree bits. The tree bits
//! cut (0.1, 1) first at 0.45, then always at the middle, into 2^b leaves. The value is the
//! middle of the leaf, times 10^-n. Code 0 is 0 and
//! code 1, a flag without tree bits, is exactly 1. From code 2 up values ascend with the code:
//! 126 leaves from 2.75e-6 to 0.99140625.
//!
//! Table values are the fp32 numbers nearest to the exact decimal numbers.
//!
//! With a seed, rounding is stochastic and unbiased; see [`super::blocked::Scaled`].

mod simd;

use super::blocked::{Blocked, Draws, Scaled, ScaledFormat};
use super::feedback::Contraction;
use super::lines::Lines;
use super::table::Magnitudes;
use super::{CodecInfo, ErrorLaw, KernelInfo, MessageRange};
use crate::types::CodecKind;
use std::sync::Arc;

pub(super) const INFO: CodecInfo = CodecInfo {
    kind: CodecKind::Dynamic8,
    encode_seconds: 0.36e-9,
    decode_seconds: 0.08e-9,
    range: MessageRange::Full,
    // Half of the widest step, (1 - 0.45) / 32; with a seed all of it.
    contraction: |spec| Contraction::largest(if spec.seed == 0 { 0.0086 } else { 0.0172 }),
    kernels: Some(KernelInfo {
        array_family: "dynamic8_tabled",
        is_fused: true,
        ..KernelInfo::new("dynamic8")
    }),
    build: |spec, isa| Arc::new(Blocked::new(Scaled(Dynamic::new()), spec, isa)),
};

/// The block format of `dynamic8`.
#[derive(Debug)]
pub(super) struct Dynamic {
    magnitudes: Magnitudes,
    lines: Lines,
    /// Magnitudes in ascending order.
    ranked: [f32; 128],
}

/// Numbers of equally distant magnitudes: 0, the leaves of each half of a decade, and 1.
const REGIONS: [usize; 14] = [1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32, 1];

impl Dynamic {
    pub fn new() -> Dynamic {
        let magnitudes = Magnitudes::new(std::array::from_fn(|code| value_of(code as u32)));
        Dynamic {
            lines: Lines::new(&magnitudes, &REGIONS),
            ranked: std::array::from_fn(|rank| magnitudes.sorted()[rank]),
            magnitudes,
        }
    }
}

impl ScaledFormat for Dynamic {
    const KIND: CodecKind = CodecKind::Dynamic8;
    const DRAWS: Draws = Draws::Seeded;
    const TOP: u8 = 1;

    /// The error is at most half of the widest gap between values.
    const ERRORS: ErrorLaw = ErrorLaw {
        of_scale: 0.0086,
        ..ErrorLaw::EXACT
    };

    #[inline(always)]
    fn factor(scale: f32) -> f32 {
        1.0 / scale
    }

    #[inline(always)]
    fn unit(scale: f32) -> f32 {
        scale
    }

    #[inline(always)]
    fn magnitude(&self, x: f32, factor: f32) -> u8 {
        self.magnitudes.nearest(x * factor)
    }

    #[inline(always)]
    fn value(&self, code: u8) -> f32 {
        let magnitude = self.magnitudes.values()[usize::from(code & 0x7f)];
        if code & 0x80 == 0 {
            magnitude
        } else {
            -magnitude
        }
    }

    #[inline(always)]
    fn code_below(code: u8) -> u8 {
        match code {
            1 => 127,
            2 => 0,
            _ => code - 1,
        }
    }

    #[inline(always)]
    fn code_above(code: u8) -> u8 {
        match code {
            0 => 2,
            127 => 1,
            _ => code + 1,
        }
    }

    fn half_step(&self, x: f64, scale: f64) -> f64 {
        if scale > 0.0 {
            scale * self.magnitudes.half_gap(x / scale)
        } else {
            0.0
        }
    }
}

/// Returns the magnitude of a code. It is computed in units of 1e-8, because leaves have at most eight
/// decimal places.
fn value_of(code: u32) -> f32 {
    match code {
        0 => return 0.0,
        1 => return 1.0,
        _ => {}
    }
    let bits = code.ilog2();
    let zeros = 6 - bits;
    let (leaf, half) = (code - (1 << bits), 1 << (bits - 1));
    let (low, width, leaf) = if leaf < half {
        (10_000_000, 35_000_000, leaf)
    } else {
        (45_000_000, 55_000_000, leaf - half)
    };
    let value = low + (width >> bits) * (2 * leaf + 1);
    // Uses the float parser, which rounds correctly; a product with a rounded power of ten would
    // not.
    format!("{value}e-{}", 8 + zeros).parse().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_nearest_magnitudes_agree() {
        let dynamic = Dynamic::new();
        let every = !cfg!(debug_assertions);
        let left = super::super::lines::check(&dynamic.magnitudes, &dynamic.lines, every);
        // Functions that decide leave few numbers to the buckets.
        assert!(!every || left <= 20_000, "{left}");
    }

    fn magnitude(y: f32) -> f32 {
        let dynamic = Dynamic::new();
        dynamic.value(dynamic.magnitude(y, 1.0))
    }

    #[test]
    fn magnitude_of_golden_inputs_is_the_published_value() {
        assert_eq!(magnitude(0.2345678), 0.23671875);
        assert_eq!(magnitude(0.0000234), 0.00001875);
        assert_eq!(magnitude(0.0), 0.0);
        assert_eq!(magnitude(1.0), 1.0);
        assert_eq!(magnitude(1.374e-6), 0.0);
        assert_eq!(magnitude(1.376e-6), 2.75e-6);
        // The midpoint between the largest leaf and 1 lies between these two inputs.
        assert_eq!(magnitude(0.9957), 0.99140625);
        assert_eq!(magnitude(0.9958), 1.0);
    }

    #[test]
    fn values_equal_those_of_the_source() {
        let dynamic = Dynamic::new();
        let values = dynamic.magnitudes.values();
        assert_eq!(values[2..4], [2.75e-6, 7.25e-6]);
        assert_eq!(values[127], 0.99140625);
        assert!(values[2..].is_sorted_by(|a, b| a < b));
        assert_eq!(dynamic.magnitudes.sorted().len(), 128);
        // Derives the 64 leaves between 0.1 and 1 independently, by successive bisection.
        for code in 64u32..128 {
            let (mut low, mut high) = (0.1f64, 1.0f64);
            for bit in (0..6).rev() {
                let cut = if bit == 5 { 0.45 } else { (low + high) / 2.0 };
                match code >> bit & 1 {
                    0 => high = cut,
                    _ => low = cut,
                }
            }
            let error = f64::from(values[code as usize]) - (low + high) / 2.0;
            assert!(error.abs() < 4e-8, "{code}: off by {error}");
        }
    }
}
