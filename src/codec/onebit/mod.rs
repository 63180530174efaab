//! `onebit`: each element becomes the mean of the elements of its block with the same sign.
//!
//! Source: Seide et al., "1-Bit Stochastic Gradient Descent" (2014), with a block in the place of a
//! column. A bit is 1 where x >= 0. The numbers of a block are the mean of its elements from 0 up and
//! the mean of its elements below 0; an empty side has the mean 0. Seide's two-pass exchange is the
//! `direct` schedule here: the owner of a chunk encodes the sum, whose means cover all ranks.
//!
//! Use it with error feedback: without, differences between elements of one sign are lost.
//!
//! Means are formed in fp64 in the order of [`super::blocked::total`] and rounded to fp32 once.

mod simd;

use super::blocked::{BlockFormat, Blocked, Draws, Numbers, total};
use super::feedback::Contraction;
use super::simd::Lanes;
use super::{CodecInfo, ErrorLaw, KernelInfo, MessageRange, Zero};
use crate::types::{CodecKind, CodecSpec, ScaleRule};
use std::sync::Arc;

pub(super) const INFO: CodecInfo = CodecInfo {
    kind: CodecKind::OneBit,
    encode_seconds: 0.3e-9,
    decode_seconds: 0.15e-9,
    range: MessageRange::Full,
    contraction,
    kernels: Some(KernelInfo::new("onebit")),
    build: |spec, isa| Arc::new(Blocked::new(Signs, spec, isa)),
};

/// The block format of `onebit`.
#[derive(Debug)]
pub(super) struct Signs;

impl BlockFormat for Signs {
    const KIND: CodecKind = CodecKind::OneBit;
    const BITS: usize = 1;
    const NUMBERS: usize = 2;
    const FITS_EXTREMES: bool = false;
    const FIT_FINDS_NON_FINITE: bool = true;
    const ZERO: Zero = Zero::Inexact;
    const DRAWS: Draws = Draws::Never;

    type Encoder = ();
    type Decoder = Numbers;
    type Registers<'a, L: Lanes> = ();

    /// An element and the mean that replaces it have one sign, so their difference is at most the
    /// largest magnitude.
    fn errors() -> ErrorLaw {
        ErrorLaw {
            of_scale: 1.0,
            ..ErrorLaw::EXACT
        }
    }

    #[inline(always)]
    fn registers<L: Lanes>(&self, _: L) {}

    fn fit(x: &[f32], _: f32) -> Numbers {
        let above = total(x.iter().map(|&x| if x < 0.0 { 0.0 } else { x.into() }));
        let below = total(x.iter().map(|&x| if x < 0.0 { x.into() } else { 0.0 }));
        means(
            above,
            below,
            x.iter().filter(|&&x| x < 0.0).count(),
            x.len(),
        )
    }

    #[inline(always)]
    fn fit_lanes<L: Lanes>(lanes: L, x: &[f32], _: f32) -> Numbers {
        simd::fit(lanes, x)
    }

    #[inline(always)]
    fn encoder(_: Numbers) {}

    #[inline(always)]
    fn decoder(numbers: Numbers) -> Numbers {
        numbers
    }

    #[inline(always)]
    fn code(&self, _: (), x: f32) -> u32 {
        u32::from(x >= 0.0)
    }

    #[inline(always)]
    fn code_lanes<L: Lanes>(lanes: L, _: (), _: (), x: L::F) -> L::I {
        simd::code(lanes, x)
    }

    #[inline(always)]
    fn value(&self, [above, below]: Numbers, code: u32) -> f32 {
        if code == 0 { below } else { above }
    }

    #[inline(always)]
    fn value_lanes<L: Lanes>(lanes: L, _: (), [above, below]: Numbers, code: L::I) -> L::F {
        let zero = lanes.eq_i(code, lanes.splat_i(0));
        lanes.select(zero, lanes.splat(below), lanes.splat(above))
    }
}

/// Returns the contraction in the Euclidean norm of a block of n elements.
///
/// C(v) is the projection of v onto the blocks that are constant on each of the two signs, so ‖v - C(v)‖² is
/// ‖v‖² - ‖C(v)‖². The k elements of one sign have ‖C(v)‖² = ‖v‖₁² / k >= ‖v‖² / k, and k <= n: δ is 1/n. A
/// single spike among zeros attains it. Normal numbers have δ = 2/π.
fn contraction(spec: CodecSpec) -> Contraction {
    let block = match spec.scale {
        ScaleRule::Block(block) => f64::from(block),
        _ => 4096.0,
    };
    Contraction::euclidean(1.0 / block, 1.0, 1.0)
}

/// Returns the mean of the elements from 0 up and the mean of the elements below 0, from their
/// sums. `negative` of the `n` elements are below 0.
#[inline(always)]
fn means(above: f64, below: f64, negative: usize, n: usize) -> Numbers {
    let mean = |sum: f64, n: usize| match n {
        0 => 0.0,
        // Adding 0 turns -0, the sum of negative zeros, into +0.
        _ => (sum / n as f64) as f32 + 0.0,
    };
    [mean(above, n - negative), mean(below, negative)]
}

#[cfg(test)]
mod tests {
    use super::super::{Span, build};
    use crate::cpu::Isa;

    #[test]
    fn element_decodes_to_the_mean_of_its_sign() {
        let x = [1.0f32, -2.0, 3.0, 0.0, -0.0, -4.0, 8.0, -6.0, 1e-40];
        for isa in Isa::available() {
            let codec = build("onebit".parse().unwrap(), isa).unwrap().unwrap();
            let mut wire = vec![0xee; codec.wire_bytes(x.len())];
            let mut y = [0.0; 9];
            codec.encode(Span::whole(9), &x, None, &mut wire, None);
            codec.decode(Span::whole(9), &wire, &mut y);
            assert_eq!(wire[..2], [0b0101_1101, 1], "{isa:?}");
            assert_eq!(y, [2.0, -4.0, 2.0, 2.0, 2.0, -4.0, 2.0, -4.0, 2.0]);
        }
    }

    #[test]
    fn block_of_one_sign_keeps_its_value() {
        for isa in Isa::available() {
            let codec = build("onebit".parse().unwrap(), isa).unwrap().unwrap();
            for x in [[f32::MAX; 40], [-f32::MAX; 40], [0.0; 40], [-1e-45; 40]] {
                let mut wire = vec![0xee; codec.wire_bytes(40)];
                let mut y = [7.0; 40];
                codec.encode(Span::whole(40), &x, None, &mut wire, None);
                codec.decode(Span::whole(40), &wire, &mut y);
                assert_eq!(y.map(f32::to_bits), x.map(f32::to_bits), "{isa:?}");
            }
        }
    }
}
