//! Vector form.

use super::super::blocked::{Numbers, WideSum, load_any};
use super::super::simd::{Lanes, abs, abs_bits};
use super::Encoder;

#[inline(always)]
pub(super) fn fit<L: Lanes>(lanes: L, x: &[f32]) -> Numbers {
    let mut most = lanes.splat_i(0);
    let mut squares = WideSum::new(lanes);
    for (index, part) in x.chunks(L::N).enumerate() {
        let part = load_any(lanes, part);
        most = lanes.max_i(most, abs_bits(lanes, part));
        squares.add_squares(lanes, index, part);
    }
    let most = f32::from_bits(lanes.reduce_max(most) as u32);
    super::scale(most, squares.total(lanes), x.len())
}

#[inline(always)]
pub(super) fn draw<L: Lanes>(lanes: L, encoder: Encoder, x: L::F, u: L::F) -> L::I {
    let raised = lanes.mul(abs(lanes, x), lanes.splat(encoder.raise));
    let probability = lanes.mul(raised, lanes.splat(encoder.factor));
    let sign = lanes.shr::<31>(lanes.bits(x));
    let code = lanes.add_i(sign, lanes.splat_i(1));
    lanes.select_i(lanes.gt(probability, u), code, lanes.splat_i(0))
}

#[inline(always)]
pub(super) fn value<L: Lanes>(lanes: L, scale: f32, code: L::I) -> L::F {
    let zero = lanes.splat(0.0);
    let plus = lanes.eq_i(code, lanes.splat_i(1));
    let minus = lanes.eq_i(code, lanes.splat_i(2));
    let value = lanes.select(plus, lanes.splat(scale), zero);
    lanes.select(minus, lanes.splat(-scale), value)
}
