//! Vector form of `linear8`, by arithmetic without a table.

use super::super::blocked::{VectorScaledFormat, VectorSteps, takes_upper};
use super::super::simd::{Lanes, apply_sign};
use super::{LEVELS, Linear};

impl VectorScaledFormat for Linear {
    type Registers<'a, L: Lanes> = ();

    #[inline(always)]
    fn registers<L: Lanes>(&self, _: L) {}

    #[inline(always)]
    fn magnitude_lanes<L: Lanes>(lanes: L, _: (), x: L::F, factor: L::F) -> L::I {
        let above = lanes.ceil(lanes.fma(x, factor, lanes.splat(-0.5)));
        lanes.truncate(lanes.min(above, lanes.splat(LEVELS)))
    }

    /// The nearest integer is computed as [`VectorScaledFormat::magnitude_lanes`] does.
    #[inline(always)]
    fn draw_lanes<L: Lanes>(lanes: L, _: (), x: L::F, steps: VectorSteps<L>, u: L::F) -> L::I {
        let (one, top) = (lanes.splat(1.0), lanes.splat(LEVELS));
        let decoded = |k| lanes.mul(k, steps.unit);
        let nearest = lanes.ceil(lanes.fma(x, steps.factor, lanes.splat(-0.5)));
        let nearest = lanes.min(nearest, top);
        let is_beyond = lanes.gt(decoded(nearest), x);
        let below = lanes.select(is_beyond, lanes.sub(nearest, one), nearest);
        let above = lanes.add(below, one);
        let is_upper = takes_upper(lanes, x, decoded(below), decoded(above), u);
        // Above the largest magnitude there is none, and the code stays.
        lanes.truncate(lanes.min(lanes.select(is_upper, above, below), top))
    }

    #[inline(always)]
    fn value_lanes<L: Lanes>(lanes: L, _: (), code: L::I) -> L::F {
        let k = lanes.convert(lanes.and(code, lanes.splat_i(0x7f)));
        apply_sign(lanes, k, code)
    }
}
