//! Vector form of `onebit`.

use super::super::blocked::{Numbers, WideSum, load_any};
use super::super::simd::Lanes;

/// Returns the mean of the elements from 0 up, and the mean of those below 0. The zeros that pad the last
/// vector do not change the sum of the former; only elements below 0 are counted.
#[inline(always)]
pub(super) fn fit<L: Lanes>(lanes: L, x: &[f32]) -> Numbers {
    let (zero, none) = (lanes.splat(0.0), lanes.splat_i(0));
    let (mut above, mut below) = (WideSum::new(lanes), WideSum::new(lanes));
    let mut negative = none;
    for (index, part) in x.chunks(L::N).enumerate() {
        let part = load_any(lanes, part);
        let less = lanes.gt(zero, part);
        above.add(lanes, index, lanes.select(less, zero, part));
        below.add(lanes, index, lanes.select(less, part, zero));
        let one = lanes.select_i(less, lanes.splat_i(1), none);
        negative = lanes.add_i(negative, one);
    }
    let negative = lanes.reduce_sum(negative) as usize;
    super::means(above.total(lanes), below.total(lanes), negative, x.len())
}

#[inline(always)]
pub(super) fn code<L: Lanes>(lanes: L, x: L::F) -> L::I {
    let less = lanes.gt(lanes.splat(0.0), x);
    lanes.select_i(less, lanes.splat_i(0), lanes.splat_i(1))
}
