//! Vector form of `cast16`: saturation, then the machine's conversion instruction.

use super::super::elementwise::VectorElementFormat;
use super::super::simd::{Lanes, abs};
use super::{Fp16, LARGEST};

impl VectorElementFormat for Fp16 {
    type Registers<'a, L: Lanes> = ();

    #[inline(always)]
    fn registers<L: Lanes>(&self, _: L) {}

    #[inline(always)]
    fn encode_lanes<L: Lanes>(lanes: L, _: (), x: L::F) -> L::I {
        let magnitude = abs(lanes, x);
        let bits = lanes.bits(magnitude);
        let sign = lanes.and(lanes.bits(x), lanes.splat_i(i32::MIN));
        let most = lanes.splat(LARGEST);
        let beyond = lanes.gt(magnitude, most);
        let finite = lanes.gt_i(lanes.splat_i(f32::INFINITY.to_bits() as i32), bits);
        let saturated = lanes.select(beyond, most, magnitude);
        let kept = lanes.select(finite, saturated, magnitude);
        lanes.narrow_f16(lanes.float(lanes.or(lanes.bits(kept), sign)))
    }

    #[inline(always)]
    fn decode_lanes<L: Lanes>(lanes: L, _: (), code: L::I) -> L::F {
        lanes.widen_f16(code)
    }
}
