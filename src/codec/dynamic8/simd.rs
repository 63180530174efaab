//! Vector form: table lookups.

use super::super::scaled::VectorFormat;
use super::super::simd::{Lanes, apply_sign};
use super::super::table::Buckets;
use super::Dynamic;

impl VectorFormat for Dynamic {
    type Registers<'a, L: Lanes> = (&'a Buckets, L::T128<'a>);

    #[inline(always)]
    fn registers<L: Lanes>(&self, lanes: L) -> Self::Registers<'_, L> {
        (
            self.magnitudes.buckets(),
            lanes.table(self.magnitudes.values()),
        )
    }

    #[inline(always)]
    fn magnitude_lanes<L: Lanes>(
        lanes: L,
        (buckets, _): Self::Registers<'_, L>,
        x: L::F,
        factor: L::F,
    ) -> L::I {
        buckets.nearest(lanes, lanes.mul(x, factor))
    }

    #[inline(always)]
    fn value_lanes<L: Lanes>(lanes: L, (_, table): Self::Registers<'_, L>, code: L::I) -> L::F {
        apply_sign(lanes, lanes.lookup(table, code), code)
    }
}
