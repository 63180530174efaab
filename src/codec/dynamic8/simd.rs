//! Vector form of `dynamic8`. Vectors of 16 elements keep whole tables in registers; narrower
//! vectors gather.

use super::super::blocked::VectorScaledFormat;
use super::super::simd::{Lanes, WIDEST, apply_sign};
use super::super::table::Buckets;
use super::Dynamic;
use super::segments::SegmentRegisters;

/// Tables for both ways to encode, and the values for decoding. A loop loads only the tables that
/// it uses.
pub(in super::super) struct DynamicRegisters<'a, L: Lanes> {
    buckets: &'a Buckets,
    segments: SegmentRegisters<'a, L>,
    values: L::T128<'a>,
}

impl<L: Lanes> Clone for DynamicRegisters<'_, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: Lanes> Copy for DynamicRegisters<'_, L> {}

impl VectorScaledFormat for Dynamic {
    type Registers<'a, L: Lanes> = DynamicRegisters<'a, L>;

    #[inline(always)]
    fn registers<L: Lanes>(&self, lanes: L) -> DynamicRegisters<'_, L> {
        DynamicRegisters {
            buckets: self.magnitudes.buckets(),
            segments: self.segments.registers(lanes),
            values: lanes.table128(self.magnitudes.values()),
        }
    }

    #[inline(always)]
    fn magnitude_lanes<L: Lanes>(
        lanes: L,
        registers: DynamicRegisters<'_, L>,
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
    fn value_lanes<L: Lanes>(lanes: L, registers: DynamicRegisters<'_, L>, code: L::I) -> L::F {
        apply_sign(lanes, lanes.lookup128(registers.values, code), code)
    }
}
