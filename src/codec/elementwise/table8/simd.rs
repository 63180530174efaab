//! Vector form of [`Table8`] codecs: encodes by linear functions, decodes from registers.

use super::super::super::lines::LineRegisters;
use super::super::super::simd::{Lanes, abs, apply_sign, four, with_sign};
use super::super::VectorElementFormat;
use super::{NOT_FINITE, Table8};

impl VectorElementFormat for Table8 {
    type Registers<'a, L: Lanes> = (LineRegisters<'a, L>, L::T128<'a>);

    #[inline(always)]
    fn registers<L: Lanes>(&self, lanes: L) -> Self::Registers<'_, L> {
        (
            self.lines.registers(lanes),
            lanes.table128(self.magnitudes.values()),
        )
    }

    #[inline(always)]
    fn encode_lanes<L: Lanes>(lanes: L, (lines, _): Self::Registers<'_, L>, x: L::F) -> L::I {
        let magnitude = abs(lanes, x);
        let code = with_sign(lanes, lines.nearest(lanes, magnitude), x);
        let finite = lanes.splat_i(f32::MAX.to_bits() as i32);
        let wild = lanes.gt_i(lanes.bits(magnitude), finite);
        lanes.select_i(wild, lanes.splat_i(NOT_FINITE.into()), code)
    }

    #[inline(always)]
    fn encode_packed<L: Lanes>(lanes: L, registers: Self::Registers<'_, L>, x: [L::F; 4]) -> L::I {
        let y = four!(i => abs(lanes, x[i]));
        let most = four!(i => lanes.bits(y[i]));
        let most = [lanes.max_i(most[0], most[1]), lanes.max_i(most[2], most[3])];
        let finite = lanes.splat_i(f32::MAX.to_bits() as i32);
        if lanes.any(lanes.gt_i(lanes.max_i(most[0], most[1]), finite)) {
            return lanes.pack_bytes(four!(i => Self::encode_lanes(lanes, registers, x[i])));
        }
        lanes.in_order(lanes.with_signs(registers.0.pack_nearest(lanes, y), x))
    }

    #[inline(always)]
    fn decode_lanes<L: Lanes>(lanes: L, (_, table): Self::Registers<'_, L>, code: L::I) -> L::F {
        let value = apply_sign(lanes, lanes.lookup128(table, code), code);
        let wild = lanes.eq_i(code, lanes.splat_i(NOT_FINITE.into()));
        lanes.select(wild, lanes.splat(f32::NAN), value)
    }
}
