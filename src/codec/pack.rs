//! Packs codes of 1, 2, 4, 8, 16 and 24 bits. The code of element i begins at bit `BITS * i`, least
//! significant bit first, little endian.

use super::simd::{Lanes, WIDEST};

/// Bytes that suffice for the codes of a vector at any code width.
pub(super) const WIDEST_CODES: usize = 4 * WIDEST;

/// Returns the number of bytes of `n` codes.
#[inline(always)]
pub(super) const fn code_bytes(n: usize, bits: usize) -> usize {
    (n * bits).div_ceil(8)
}

/// Writes code number `i` into zeroed bytes. This scalar form specifies the layout.
#[inline(always)]
pub(super) fn put(bits: usize, codes: &mut [u8], i: usize, code: u32) {
    if bits < 8 {
        codes[i * bits / 8] |= (code << (i * bits % 8)) as u8;
    } else {
        let bytes = bits / 8;
        codes[i * bytes..(i + 1) * bytes].copy_from_slice(&code.to_le_bytes()[..bytes]);
    }
}

/// Reads code number `i`. This scalar form specifies the layout.
#[inline(always)]
pub(super) fn take(bits: usize, codes: &[u8], i: usize) -> u32 {
    if bits < 8 {
        u32::from(codes[i * bits / 8]) >> (i * bits % 8) & ((1 << bits) - 1)
    } else {
        let bytes = bits / 8;
        let mut whole = [0; 4];
        whole[..bytes].copy_from_slice(&codes[i * bytes..(i + 1) * bytes]);
        u32::from_le_bytes(whole)
    }
}

/// Writes [`Lanes::N`] codes, each below 2^`bits`.
#[inline(always)]
pub(super) fn store<L: Lanes>(bits: usize, lanes: L, code: L::I, to: &mut [u8]) {
    match bits {
        1 => store_small::<1, L>(lanes, code, to),
        2 => store_small::<2, L>(lanes, code, to),
        4 => store_small::<4, L>(lanes, code, to),
        8 => lanes.store_u8(code, to),
        16 => lanes.store_u16(code, to),
        _ => lanes.store_u24(code, to),
    }
}

/// Writes the codes of four vectors as [`Lanes::pack_bytes`] returns them, each below 2^`bits`, for `bits` up to 8.
#[inline(always)]
pub(super) fn store_packed<L: Lanes>(bits: usize, lanes: L, codes: L::I, to: &mut [u8]) {
    match bits {
        1 => lanes.store_bits::<1>(codes, to),
        2 => lanes.store_bits::<2>(codes, to),
        4 => lanes.store_bits::<4>(codes, to),
        _ => lanes.store_bytes(codes, to),
    }
}

/// Reads [`Lanes::N`] codes of `bits` bits each into the elements of an integer vector.
#[inline(always)]
pub(super) fn load<L: Lanes>(bits: usize, lanes: L, from: &[u8]) -> L::I {
    match bits {
        1 => load_small::<1, L>(lanes, from),
        2 => load_small::<2, L>(lanes, from),
        4 => load_small::<4, L>(lanes, from),
        8 => lanes.load_u8(from),
        16 => lanes.load_u16(from),
        _ => lanes.load_u24(from),
    }
}

/// Writes the first `n` codes of a vector as the last bytes of a span. Unused bits of the last byte
/// become zero.
#[inline(always)]
pub(super) fn store_part<L: Lanes>(bits: usize, lanes: L, code: L::I, n: usize, to: &mut [u8]) {
    let mut whole = [0; WIDEST_CODES];
    store(bits, lanes, code, &mut whole);
    let used = n * bits;
    if !used.is_multiple_of(8) {
        whole[used / 8] &= (1 << (used % 8)) - 1;
    }
    to.copy_from_slice(&whole[..code_bytes(n, bits)]);
}

/// Reads fewer codes than a vector holds, and pads the vector with zeros.
#[inline(always)]
pub(super) fn load_part<L: Lanes>(bits: usize, lanes: L, from: &[u8]) -> L::I {
    let mut whole = [0; WIDEST_CODES];
    whole[..from.len()].copy_from_slice(from);
    load(bits, lanes, &whole)
}

#[inline(always)]
fn store_small<const BITS: usize, L: Lanes>(lanes: L, code: L::I, to: &mut [u8]) {
    let mut bytes = [0; WIDEST];
    lanes.store_u8(code, &mut bytes);
    let wide = bytes[..L::N].chunks_exact(8);
    for (from, to) in wide.zip(to[..L::N * BITS / 8].chunks_exact_mut(BITS)) {
        let packed = squeeze::<BITS>(u64::from_le_bytes(from.try_into().unwrap()));
        to.copy_from_slice(&packed.to_le_bytes()[..BITS]);
    }
}

#[inline(always)]
fn load_small<const BITS: usize, L: Lanes>(lanes: L, from: &[u8]) -> L::I {
    let mut bytes = [0; WIDEST];
    let packed = from[..L::N * BITS / 8].chunks_exact(BITS);
    for (from, to) in packed.zip(bytes.chunks_exact_mut(8)) {
        let mut word = [0; 8];
        word[..BITS].copy_from_slice(from);
        let wide = spread::<BITS>(u64::from_le_bytes(word));
        to.copy_from_slice(&wide.to_le_bytes());
    }
    lanes.load_u8(&bytes)
}

/// Returns a mask in which the lowest `width` of every `every` bits are set.
const fn groups(width: usize, every: usize) -> u64 {
    let (mut mask, mut at) = (0, 0);
    while at < 64 {
        mask |= (u64::MAX >> (64 - width)) << at;
        at += every;
    }
    mask
}

/// Packs eight codes, each in its own byte, next to each other: first pairs, then pairs of pairs,
/// then all eight.
#[inline(always)]
fn squeeze<const BITS: usize>(x: u64) -> u64 {
    let x = (x | x >> (8 - BITS)) & const { groups(2 * BITS, 16) };
    let x = (x | x >> (16 - 2 * BITS)) & const { groups(4 * BITS, 32) };
    (x | x >> (32 - 4 * BITS)) & const { groups(8 * BITS, 64) }
}

/// Moves eight adjacent codes into a byte each: the inverse of [`squeeze`].
#[inline(always)]
fn spread<const BITS: usize>(x: u64) -> u64 {
    let x = (x | x << (32 - 4 * BITS)) & const { groups(4 * BITS, 32) };
    let x = (x | x << (16 - 2 * BITS)) & const { groups(2 * BITS, 16) };
    (x | x << (8 - BITS)) & const { groups(BITS, 8) }
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Available, SimdKernel, launch};
    use super::*;
    use crate::cpu::Isa;

    /// Writes codes as whole vectors and as a partial vector, and reads them back.
    struct RoundTrip<const BITS: usize>(Vec<u32>);

    impl<const BITS: usize> SimdKernel for RoundTrip<BITS> {
        type Output = Vec<u8>;

        fn scalar(self) -> Vec<u8> {
            let mut bytes = vec![0; code_bytes(self.0.len(), BITS)];
            for (i, &code) in self.0.iter().enumerate() {
                put(BITS, &mut bytes, i, code);
            }
            for (i, &code) in self.0.iter().enumerate() {
                assert_eq!(take(BITS, &bytes, i), code);
            }
            bytes
        }

        #[inline(always)]
        fn vector<L: Lanes>(self, lanes: L) -> Vec<u8> {
            let mut bytes = vec![0xee; code_bytes(self.0.len(), BITS)];
            if BITS <= 8 {
                let packed = bytes.chunks_mut(4 * L::N * BITS / 8);
                for (codes, to) in self.0.chunks_exact(4 * L::N).zip(packed) {
                    let vectors = std::array::from_fn(|i| {
                        let codes = codes[i * L::N..].iter().map(|&code| f32::from_bits(code));
                        let codes: Vec<f32> = codes.take(L::N).collect();
                        lanes.bits(lanes.load(&codes))
                    });
                    store_packed(BITS, lanes, lanes.pack_bytes(vectors), to);
                    let expected = RoundTrip::<BITS>(codes.to_vec()).scalar();
                    assert_eq!(*to, *expected);
                }
            }
            let step = L::N * BITS / 8;
            for (codes, to) in self.0.chunks(L::N).zip(bytes.chunks_mut(step)) {
                // Codes of the vector beyond the first `n` are not zero here, and must not be
                // written.
                let mut whole = [u32::MAX >> (32 - BITS); WIDEST];
                whole[..codes.len()].copy_from_slice(codes);
                let vector = lanes.bits(lanes.load(&whole.map(f32::from_bits)));
                if codes.len() == L::N {
                    store(BITS, lanes, vector, to);
                } else {
                    store_part(BITS, lanes, vector, codes.len(), to);
                }
                let mut back = [0.0; WIDEST];
                let read = if codes.len() == L::N {
                    load(BITS, lanes, to)
                } else {
                    load_part(BITS, lanes, to)
                };
                lanes.store(lanes.float(read), &mut back);
                assert_eq!(back.map(f32::to_bits)[..codes.len()], *codes);
            }
            bytes
        }
    }

    fn round<const BITS: usize>() {
        for n in [0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100] {
            let codes = (0..n as u32).map(|i| i.wrapping_mul(0x9e37_79b9) >> (32 - BITS));
            let codes: Vec<u32> = codes.collect();
            let expected = RoundTrip::<BITS>(codes.clone()).scalar();
            for isa in Isa::available() {
                let isa = Available::new(isa).unwrap();
                let found = launch(isa, RoundTrip::<BITS>(codes.clone()));
                assert_eq!(found, expected, "{BITS} bits, {n} codes, {isa:?}");
            }
        }
    }

    #[test]
    fn packed_codes_of_every_width_unpack_unchanged() {
        round::<1>();
        round::<2>();
        round::<4>();
        round::<8>();
        round::<16>();
        round::<24>();
    }
}
