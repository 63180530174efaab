//! Vector form of `cast_bf16`, in integer arithmetic.

use super::super::elementwise::VectorElementFormat;
use super::super::simd::{Lanes, abs_bits};
use super::{Bf16, INFINITE, LARGEST, QUIET};

impl VectorElementFormat for Bf16 {
    type Registers<'a, L: Lanes> = ();

    #[inline(always)]
    fn registers<L: Lanes>(&self, _: L) {}

    #[inline(always)]
    fn encode_lanes<L: Lanes>(lanes: L, _: (), x: L::F) -> L::I {
        let constant = |bits: u32| lanes.splat_i(bits as i32);
        let bits = abs_bits(lanes, x);
        let odd = lanes.and(lanes.shr::<16>(bits), constant(1));
        let rounded = lanes.add_i(bits, lanes.add_i(constant(0x7fff), odd));
        let rounded = lanes.min_i(rounded, constant(LARGEST));
        let nan = lanes.gt_i(bits, constant(INFINITE));
        let kept = lanes.select_i(nan, lanes.or(bits, constant(QUIET)), bits);
        let finite = lanes.gt_i(constant(INFINITE), bits);
        let result = lanes.select_i(finite, rounded, kept);
        let sign = lanes.and(lanes.bits(x), constant(0x8000_0000));
        lanes.shr::<16>(lanes.or(result, sign))
    }

    #[inline(always)]
    fn decode_lanes<L: Lanes>(lanes: L, _: (), code: L::I) -> L::F {
        lanes.float(lanes.shl::<16>(code))
    }
}
