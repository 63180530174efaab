//! Vector form. Vectors of 16 have registers for whole tables; narrower ones gather.

use super::super::scaled::VectorFormat;
use super::super::simd::{Lanes, WIDEST, apply_sign};
use super::super::table::Buckets;
use super::{Dynamic, segments};

/// Both ways to encode, and the values. A loop that uses one of them loads no other.
pub(in super::super) struct Registers<'a, L: Lanes> {
    buckets: &'a Buckets,
    segments: segments::Registers<'a, L>,
    values: L::T128<'a>,
}

impl<L: Lanes> Clone for Registers<'_, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: Lanes> Copy for Registers<'_, L> {}

impl VectorFormat for Dynamic {
    type Registers<'a, L: Lanes> = Registers<'a, L>;

    #[inline(always)]
    fn registers<L: Lanes>(&self, lanes: L) -> Registers<'_, L> {
        Registers {
            buckets: self.magnitudes.buckets(),
            segments: self.segments.registers(lanes),
            values: lanes.table128(self.magnitudes.values()),
        }
    }

    #[inline(always)]
    fn magnitude_lanes<L: Lanes>(
        lanes: L,
        registers: Registers<'_, L>,
        x: L::F,
        factor: L::F,
    ) -> L::I {
        let y = lanes.mul(x, factor);
        if L::N == WIDEST {
            registers.segments.nearest(lanes, y)
        } else {
            registers.buckets.nearest(lanes, y)
        }
    }

    #[inline(always)]
    fn value_lanes<L: Lanes>(lanes: L, registers: Registers<'_, L>, code: L::I) -> L::F {
        apply_sign(lanes, lanes.lookup128(registers.values, code), code)
    }
}
