//! Vector form of the trunc codecs: a shift between a load and a store of adjacent codes.

use super::super::elementwise::VectorElementFormat;
use super::super::simd::{Lanes, abs_bits};
use super::{INFINITE, LARGEST8, NOT_FINITE, QUIET, Upper};

impl<const BITS: usize> VectorElementFormat for Upper<BITS> {
    type Registers<'a, L: Lanes> = ();

    #[inline(always)]
    fn registers<L: Lanes>(&self, _: L) {}

    #[inline(always)]
    fn encode_lanes<L: Lanes>(lanes: L, _: (), x: L::F) -> L::I {
        let (bits, magnitude) = (lanes.bits(x), abs_bits(lanes, x));
        match BITS {
            8 => {
                let wild = lanes.gt_i(magnitude, lanes.splat_i(INFINITE as i32 - 1));
                let finite = lanes.min_i(magnitude, lanes.splat_i(LARGEST8 as i32));
                let marked = lanes.splat_i((NOT_FINITE << 24) as i32);
                let kept = lanes.select_i(wild, marked, finite);
                let sign = lanes.and(bits, lanes.splat_i(i32::MIN));
                lanes.shr::<24>(lanes.or(kept, sign))
            }
            16 => lanes.shr::<16>(quieted(lanes, bits, magnitude)),
            _ => lanes.shr::<8>(quieted(lanes, bits, magnitude)),
        }
    }

    #[inline(always)]
    fn decode_lanes<L: Lanes>(lanes: L, _: (), code: L::I) -> L::F {
        match BITS {
            8 => {
                let magnitude = lanes.and(code, lanes.splat_i(0x7f));
                let wild = lanes.eq_i(magnitude, lanes.splat_i(NOT_FINITE as i32));
                let value = lanes.float(lanes.shl::<24>(code));
                lanes.select(wild, lanes.splat(f32::NAN), value)
            }
            16 => lanes.float(lanes.shl::<16>(code)),
            _ => lanes.float(lanes.shl::<8>(code)),
        }
    }
}

#[inline(always)]
fn quieted<L: Lanes>(lanes: L, bits: L::I, magnitude: L::I) -> L::I {
    let nan = lanes.gt_i(magnitude, lanes.splat_i(INFINITE as i32));
    let quiet = lanes.or(bits, lanes.splat_i(QUIET as i32));
    lanes.select_i(nan, quiet, bits)
}
