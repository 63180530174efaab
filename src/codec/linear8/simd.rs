//! Vector form of `linear8`, by arithmetic without a table.

use super::super::blocked::VectorScaledFormat;
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

    #[inline(always)]
    fn value_lanes<L: Lanes>(lanes: L, _: (), code: L::I) -> L::F {
        let k = lanes.convert(lanes.and(code, lanes.splat_i(0x7f)));
        apply_sign(lanes, k, code)
    }
}
