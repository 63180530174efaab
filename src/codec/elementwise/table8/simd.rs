//! Vector form of [`Table8`] codecs: encodes with one gather, decodes from registers.

use super::super::super::simd::{Lanes, abs, apply_sign, with_sign};
use super::super::super::table::Buckets;
use super::super::VectorElementFormat;
use super::{NOT_FINITE, Table8};

impl VectorElementFormat for Table8 {
    type Registers<'a, L: Lanes> = (&'a Buckets, L::T128<'a>);

    #[inline(always)]
    fn registers<L: Lanes>(&self, lanes: L) -> Self::Registers<'_, L> {
        (
            self.magnitudes.buckets(),
            lanes.table128(self.magnitudes.values()),
        )
    }

    #[inline(always)]
    fn encode_lanes<L: Lanes>(lanes: L, (buckets, _): Self::Registers<'_, L>, x: L::F) -> L::I {
        let magnitude = abs(lanes, x);
        let code = with_sign(lanes, buckets.nearest(lanes, magnitude), x);
        let finite = lanes.splat_i(f32::MAX.to_bits() as i32);
        let wild = lanes.gt_i(lanes.bits(magnitude), finite);
        lanes.select_i(wild, lanes.splat_i(NOT_FINITE.into()), code)
    }

    #[inline(always)]
    fn decode_lanes<L: Lanes>(lanes: L, (_, table): Self::Registers<'_, L>, code: L::I) -> L::F {
        let value = apply_sign(lanes, lanes.lookup128(table, code), code);
        let wild = lanes.eq_i(code, lanes.splat_i(NOT_FINITE.into()));
        lanes.select(wild, lanes.splat(f32::NAN), value)
    }
}
