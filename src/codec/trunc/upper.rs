//! Copies the upper bytes of fp32 numbers, whatever their values, for arrays in ADT's layout. ADT ("Reducing
//! data motion to accelerate the training of deep neural networks") calls this Bitpack and Bitunpack.
//!
//! With one byte, infinity and NaN decode to 1.7e38. With more bytes, a NaN whose set mantissa bits are all
//! dropped decodes to infinity.

use super::super::pack::{code_bytes, load, load_part, put, store, store_part, take};
use super::super::simd::{Available, Lanes, SimdKernel, WIDEST, launch, load_part as load_floats};
use crate::cpu::Isa;

/// Writes the upper `BITS` bits of each number, where `BITS` is 8, 16 or 24.
///
/// If the machine lacks `isa`, the scalar form runs, with an equal result.
pub(crate) fn pack_upper<const BITS: usize>(isa: Isa, x: &[f32], to: &mut [u8]) {
    let isa = Available::new(isa).unwrap_or(Available::SCALAR);
    launch(isa, Pack::<BITS> { x, to });
}

/// Reads numbers that [`pack_upper`] wrote; the lower bits of each number become 0.
pub(crate) fn unpack_upper<const BITS: usize>(isa: Isa, from: &[u8], y: &mut [f32]) {
    let isa = Available::new(isa).unwrap_or(Available::SCALAR);
    launch(isa, Unpack::<BITS> { from, y });
}

struct Pack<'a, const BITS: usize> {
    x: &'a [f32],
    to: &'a mut [u8],
}

impl<const BITS: usize> SimdKernel for Pack<'_, BITS> {
    type Output = ();

    fn scalar(self) {
        for (i, x) in self.x.iter().enumerate() {
            put(BITS, self.to, i, x.to_bits() >> (32 - BITS));
        }
    }

    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L) {
        let parts = self.to.chunks_mut(code_bytes(L::N, BITS));
        for (x, to) in self.x.chunks(L::N).zip(parts) {
            if x.len() == L::N {
                store(BITS, lanes, upper::<BITS, L>(lanes, lanes.load(x)), to);
            } else {
                let code = upper::<BITS, L>(lanes, load_floats(lanes, x));
                store_part(BITS, lanes, code, x.len(), to);
            }
        }
    }
}

#[inline(always)]
fn upper<const BITS: usize, L: Lanes>(lanes: L, x: L::F) -> L::I {
    match BITS {
        8 => lanes.shr::<24>(lanes.bits(x)),
        16 => lanes.shr::<16>(lanes.bits(x)),
        _ => lanes.shr::<8>(lanes.bits(x)),
    }
}

struct Unpack<'a, const BITS: usize> {
    from: &'a [u8],
    y: &'a mut [f32],
}

impl<const BITS: usize> SimdKernel for Unpack<'_, BITS> {
    type Output = ();

    fn scalar(self) {
        for (i, y) in self.y.iter_mut().enumerate() {
            *y = f32::from_bits(take(BITS, self.from, i) << (32 - BITS));
        }
    }

    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L) {
        let parts = self.from.chunks(code_bytes(L::N, BITS));
        for (from, y) in parts.zip(self.y.chunks_mut(L::N)) {
            if y.len() == L::N {
                lanes.store(value::<BITS, L>(lanes, load(BITS, lanes, from)), y);
            } else {
                let mut whole = [0.0; WIDEST];
                let code = load_part(BITS, lanes, from);
                lanes.store(value::<BITS, L>(lanes, code), &mut whole);
                y.copy_from_slice(&whole[..y.len()]);
            }
        }
    }
}

#[inline(always)]
fn value<const BITS: usize, L: Lanes>(lanes: L, code: L::I) -> L::F {
    lanes.float(match BITS {
        8 => lanes.shl::<24>(code),
        16 => lanes.shl::<16>(code),
        _ => lanes.shl::<8>(code),
    })
}
