//! ADT's Bitpack and Bitunpack (compression.md 1.4): the upper bytes of each fp32 number, little
//! endian, element after element, and nothing else. Bits are taken as they are: with one byte
//! infinity and NaN come back as 1.7e38, with more a NaN that had its bits below as infinity.
//!
//! Nothing is read or written past the ends, whatever the count.

use super::super::pack::{code_bytes, load, load_part, put, store, store_part, take};
use super::super::simd::{Available, Kernel, Lanes, WIDEST, launch, load_part as load_floats};
use super::super::{EncodeStats, Random};
use super::Published;
use crate::error::{Error, Result};

/// Arrays of `BITS` bits an element.
#[derive(Debug)]
pub(super) struct Bitpack<const BITS: usize> {
    isa: Available,
}

impl<const BITS: usize> Bitpack<BITS> {
    pub fn new(isa: Available) -> Bitpack<BITS> {
        Bitpack { isa }
    }
}

impl<const BITS: usize> Published for Bitpack<BITS> {
    fn bytes(&self, n: usize) -> usize {
        code_bytes(n, BITS)
    }

    fn count(&self, bytes: &[u8]) -> Result<usize> {
        let each = BITS / 8;
        if !bytes.len().is_multiple_of(each) {
            return Err(Error::invalid_argument(format!(
                "{} bytes are no whole number of elements of {each} bytes",
                bytes.len()
            )));
        }
        Ok(bytes.len() / each)
    }

    /// Statistics are not taken: packing moves bytes and looks at none.
    fn encode(&self, x: &[f32], _: Random, to: &mut [u8], _: &mut EncodeStats) {
        launch(self.isa, Pack::<BITS> { x, to });
    }

    fn decode(&self, from: &[u8], y: &mut [f32]) {
        launch(self.isa, Unpack::<BITS> { from, y });
    }

    fn packed_bytes(&self) -> Option<usize> {
        Some(BITS / 8)
    }
}

struct Pack<'a, const BITS: usize> {
    x: &'a [f32],
    to: &'a mut [u8],
}

impl<const BITS: usize> Kernel for Pack<'_, BITS> {
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

impl<const BITS: usize> Kernel for Unpack<'_, BITS> {
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
