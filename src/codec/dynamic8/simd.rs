//! Vector form of `dynamic8`: encodes by linear functions, decodes from a table.

use super::super::blocked::{VectorScaledFormat, VectorSteps, takes_upper};
use super::super::lines::LineRegisters;
use super::super::simd::{Lanes, apply_sign, four};
use super::Dynamic;

/// Tables for encoding, and the values for decoding. A loop loads only the tables that it uses.
pub(in super::super) struct DynamicRegisters<'a, L: Lanes> {
    lines: LineRegisters<'a, L>,
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
            lines: self.lines.registers(lanes),
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
        registers.lines.nearest(lanes, lanes.mul(x, factor))
    }

    #[inline(always)]
    fn pack_magnitudes<L: Lanes>(
        lanes: L,
        registers: DynamicRegisters<'_, L>,
        x: [L::F; 4],
        factor: L::F,
    ) -> L::I {
        let y = four!(i => lanes.mul(x[i], factor));
        registers.lines.pack_nearest(lanes, y)
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
