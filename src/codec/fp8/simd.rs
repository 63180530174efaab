//! Vector form of the fp8 codecs, by arithmetic without a table. Subnormals of the format are
//! normal fp32 numbers.

use super::super::blocked::VectorScaledFormat;
use super::super::simd::{Lanes, apply_sign};
use super::Fp8;

impl<const MANTISSA: usize> VectorScaledFormat for Fp8<MANTISSA> {
    type Registers<'a, L: Lanes> = ();

    #[inline(always)]
    fn registers<L: Lanes>(&self, _: L) {}

    #[inline(always)]
    fn magnitude_lanes<L: Lanes>(lanes: L, _: (), x: L::F, factor: L::F) -> L::I {
        let y = lanes.min(lanes.mul(x, factor), lanes.splat(Self::LARGEST));
        let bits = lanes.bits(y);
        let integers = lanes.splat(Self::INTEGERS);
        let steps = lanes.sub_i(lanes.bits(lanes.add(y, integers)), lanes.bits(integers));
        let odd = lanes.and(dropped::<MANTISSA, L>(lanes, bits), lanes.splat_i(1));
        let below_half = lanes.splat_i((1 << (Self::DROPPED - 1)) - 1);
        let rounded = lanes.add_i(lanes.add_i(bits, below_half), odd);
        let kept = dropped::<MANTISSA, L>(lanes, rounded);
        let normal = lanes.sub_i(kept, lanes.splat_i((Self::REBIAS << MANTISSA) as i32));
        let small = lanes.gt_i(lanes.splat_i(Self::NORMAL as i32), bits);
        lanes.select_i(small, steps, normal)
    }

    #[inline(always)]
    fn value_lanes<L: Lanes>(lanes: L, _: (), code: L::I) -> L::F {
        let magnitude = lanes.and(code, lanes.splat_i(0x7f));
        let steps = lanes.mul(lanes.convert(magnitude), lanes.splat(Self::STEP));
        let shifted = match MANTISSA {
            3 => lanes.shl::<20>(magnitude),
            _ => lanes.shl::<21>(magnitude),
        };
        let rebias = lanes.splat_i((Self::REBIAS << 23) as i32);
        let normal = lanes.float(lanes.add_i(shifted, rebias));
        let small = lanes.gt_i(lanes.splat_i(1 << MANTISSA), magnitude);
        let signed = apply_sign(lanes, lanes.select(small, steps, normal), code);
        let wild = lanes.gt_i(magnitude, lanes.splat_i(Self::TOP.into()));
        lanes.select(wild, lanes.splat(f32::NAN), signed)
    }
}

#[inline(always)]
fn dropped<const MANTISSA: usize, L: Lanes>(lanes: L, bits: L::I) -> L::I {
    match MANTISSA {
        3 => lanes.shr::<20>(bits),
        _ => lanes.shr::<21>(bits),
    }
}
