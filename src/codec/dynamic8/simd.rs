//! Vector form of `dynamic8`. Vectors of 16 elements keep whole tables in registers; narrower
//! vectors gather.

use super::super::blocked::{VectorScaledFormat, VectorSteps, takes_upper};
use super::super::simd::{Lanes, WIDEST, apply_sign};
use super::super::table::Buckets;
use super::Dynamic;
use super::segments::SegmentRegisters;

/// Tables for both ways to encode, and the values for decoding. A loop loads only the tables that
/// it uses.
pub(in super::super) struct DynamicRegisters<'a, L: Lanes> {
    buckets: &'a Buckets,
    segments: SegmentRegisters<'a, L>,
    ranked: L::T128<'a>,
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
            ranked: lanes.table128(&self.ranked),
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

    /// Works on ranks: the r-th magnitude from below has rank r, and 0 has rank 0.
    #[inline(always)]
    fn draw_lanes<L: Lanes>(
        lanes: L,
        registers: DynamicRegisters<'_, L>,
        x: L::F,
        steps: VectorSteps<L>,
        u: L::F,
    ) -> L::I {
        let (zero, one, top) = (lanes.splat_i(0), lanes.splat_i(1), lanes.splat_i(127));
        let decoded = |rank| lanes.mul(lanes.lookup128(registers.ranked, rank), steps.unit);
        let code = Self::magnitude_lanes(lanes, registers, x, steps.factor);
        // Code 0 has rank 0, code 1 rank 127, and each other code the rank below its number.
        let is_top = lanes.eq_i(code, one);
        let rank = lanes.max_i(lanes.sub_i(code, one), zero);
        let nearest = lanes.select_i(is_top, top, rank);
        let near = decoded(nearest);
        let is_beyond = lanes.gt(near, x);
        let below = lanes.select_i(is_beyond, lanes.sub_i(nearest, one), nearest);
        let above = lanes.add_i(below, one);
        // The lookup of the other neighbour costs more than the selections.
        let far = decoded(lanes.select_i(is_beyond, below, above));
        let low = lanes.select(is_beyond, far, near);
        let high = lanes.select(is_beyond, near, far);
        let is_upper = takes_upper(lanes, x, low, high, u);
        // Above the largest magnitude there is none, and the rank stays.
        let rank = lanes.min_i(lanes.select_i(is_upper, above, below), top);
        let is_leaf = lanes.gt_i(rank, zero);
        let code = lanes.select_i(is_leaf, lanes.add_i(rank, one), zero);
        lanes.select_i(lanes.eq_i(rank, top), one, code)
    }

    #[inline(always)]
    fn value_lanes<L: Lanes>(lanes: L, registers: DynamicRegisters<'_, L>, code: L::I) -> L::F {
        apply_sign(lanes, lanes.lookup128(registers.values, code), code)
    }
}
