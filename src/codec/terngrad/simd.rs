//! Vector form of `terngrad`.

use super::super::blocked::{Numbers, SquareSums, WideSum, add_all};
use super::super::simd::{Lanes, abs};
use super::Encoder;

#[inline(always)]
pub(super) fn fit<L: Lanes>(lanes: L, x: &[f32], largest: f32) -> Numbers {
    let mut squares = SquareSums(WideSum::new(lanes));
    add_all(lanes, x, &mut squares);
    super::scale(largest, squares.0.total(lanes), x.len())
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
