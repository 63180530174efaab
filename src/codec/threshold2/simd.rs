//! Vector form of `threshold2`, by comparisons.

use super::super::elementwise::VectorElementFormat;
use super::super::simd::{Lanes, abs, apply_sign};
use super::{ABOVE, BELOW, BETWEEN, NOT_FINITE, Threshold};

impl VectorElementFormat for Threshold {
    type Registers<'a, L: Lanes> = L::F;

    #[inline(always)]
    fn registers<L: Lanes>(&self, lanes: L) -> L::F {
        lanes.splat(self.tau)
    }

    /// Tests `!(tau > |x|)`, which is also true for NaN; NaN is then found by its bits.
    #[inline(always)]
    fn encode_lanes<L: Lanes>(lanes: L, tau: L::F, x: L::F) -> L::I {
        let magnitude = abs(lanes, x);
        let negative = lanes.gt(lanes.splat(0.0), x);
        let side = lanes.select_i(
            negative,
            lanes.splat_i(BELOW as i32),
            lanes.splat_i(ABOVE as i32),
        );
        let short = lanes.gt(tau, magnitude);
        let code = lanes.select_i(short, lanes.splat_i(BETWEEN as i32), side);
        let finite = lanes.splat_i(f32::MAX.to_bits() as i32);
        let wild = lanes.gt_i(lanes.bits(magnitude), finite);
        lanes.select_i(wild, lanes.splat_i(NOT_FINITE as i32), code)
    }

    #[inline(always)]
    fn decode_lanes<L: Lanes>(lanes: L, tau: L::F, code: L::I) -> L::F {
        let below = lanes.eq_i(code, lanes.splat_i(BELOW as i32));
        let sign = lanes.select_i(below, lanes.splat_i(0x80), lanes.splat_i(0));
        let far = apply_sign(lanes, tau, sign);
        let between = lanes.eq_i(code, lanes.splat_i(BETWEEN as i32));
        let value = lanes.select(between, lanes.splat(0.0), far);
        let wild = lanes.eq_i(code, lanes.splat_i(NOT_FINITE as i32));
        lanes.select(wild, lanes.splat(f32::NAN), value)
    }
}
