//! Vector form of `onebit`.

use super::super::blocked::{Numbers, SignSums, WideSum, add_all};
use super::super::simd::Lanes;

/// Returns the mean of the elements from 0 up, and the mean of those below 0. The zeros that pad the last
/// vector do not change the sum of the former; only elements below 0 are counted.
#[inline(always)]
pub(super) fn fit<L: Lanes>(lanes: L, x: &[f32]) -> Numbers {
    let mut sums = SignSums {
        above: WideSum::new(lanes),
        below: WideSum::new(lanes),
        negative: lanes.splat_i(0),
    };
    add_all(lanes, x, &mut sums);
    let (above, below) = (sums.above.total(lanes), sums.below.total(lanes));
    let negative = lanes.reduce_sum(sums.negative) as usize;
    super::means(above, below, negative, x.len())
}

#[inline(always)]
pub(super) fn code<L: Lanes>(lanes: L, x: L::F) -> L::I {
    let less = lanes.gt(lanes.splat(0.0), x);
    lanes.select_i(less, lanes.splat_i(0), lanes.splat_i(1))
}
