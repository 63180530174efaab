//! `onebit`: one of two numbers for each element, the mean of those of its sign.
//!
//! Source: Seide et al. 2014, as told in compression.md 1.2, a block in the place of a column. A
//! bit is 1 where x >= 0; a block's numbers are the mean of its elements from 0 up and the mean of
//! those below, 0 where there are none. The source's two-pass exchange is the `direct` schedule:
//! the owner of a chunk encodes the sum anew, which makes means of one rank into means of all.
//!
//! Meant to be used with feedback of its error: alone it loses what distinguishes the elements.
//!
//! Means are formed in fp64 in the order of [`super::blocked::total`] and rounded to fp32 once.

mod simd;

use super::blocked::{BlockFormat, Blocked, Numbers, total};
use super::simd::Lanes;
use super::{ErrorLaw, Zero};
use crate::types::CodecKind;

/// The codec.
pub(super) type OneBit = Blocked<Signs>;

/// Meaning of the codes.
#[derive(Debug)]
pub(super) struct Signs;

impl BlockFormat for Signs {
    const BITS: usize = 1;
    const NUMBERS: usize = 2;
    const FITS_EXTREMES: bool = false;
    const ZERO: Zero = Zero::Inexact;
    const ALWAYS_RANDOM: bool = false;

    type Encoder = ();
    type Decoder = Numbers;

    fn kind() -> CodecKind {
        CodecKind::OneBit
    }

    /// From one end to the mean at the other.
    fn errors() -> ErrorLaw {
        ErrorLaw {
            of_scale: 1.0,
            ..ErrorLaw::EXACT
        }
    }

    fn fit(x: &[f32]) -> Numbers {
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
    fn fit_lanes<L: Lanes>(lanes: L, x: &[f32]) -> Numbers {
        simd::fit(lanes, x)
    }

    #[inline(always)]
    fn encoder(_: Numbers) {}

    #[inline(always)]
    fn decoder(numbers: Numbers) -> Numbers {
        numbers
    }

    #[inline(always)]
    fn code(_: (), x: f32) -> u32 {
        u32::from(x >= 0.0)
    }

    #[inline(always)]
    fn code_lanes<L: Lanes>(lanes: L, _: (), x: L::F) -> L::I {
        simd::code(lanes, x)
    }

    #[inline(always)]
    fn draw(_: (), x: f32, _: f32) -> u32 {
        u32::from(x >= 0.0)
    }

    #[inline(always)]
    fn draw_lanes<L: Lanes>(lanes: L, _: (), x: L::F, _: L::F) -> L::I {
        simd::code(lanes, x)
    }

    #[inline(always)]
    fn value([above, below]: Numbers, code: u32) -> f32 {
        if code == 0 { below } else { above }
    }

    #[inline(always)]
    fn value_lanes<L: Lanes>(lanes: L, [above, below]: Numbers, code: L::I) -> L::F {
        let zero = lanes.eq_i(code, lanes.splat_i(0));
        lanes.select(zero, lanes.splat(below), lanes.splat(above))
    }
}

/// The means of the elements from 0 up and of the `negative` ones, of `n` in all.
#[inline(always)]
fn means(above: f64, below: f64, negative: usize, n: usize) -> Numbers {
    let mean = |sum: f64, n: usize| match n {
        0 => 0.0,
        // Adding 0: a sum of -0 alone is none.
        _ => (sum / n as f64) as f32 + 0.0,
    };
    [mean(above, n - negative), mean(below, negative)]
}

#[cfg(test)]
mod tests {
    use super::super::{Span, build};
    use crate::cpu::Isa;

    #[test]
    fn elements_become_the_mean_of_their_side() {
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
    fn sides_may_be_empty_or_huge() {
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
