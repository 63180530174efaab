//! Counter-based random numbers for stochastic rounding. The number of element `i` depends only on the key
//! and `i`, not on the division of the message into chunks, tiles, vectors or threads. Every device computes
//! equal numbers, and runs are reproducible.
//!
//! A draw mixes the low 32 bits of the index with the 64 bits of the key by xor, shifts and two
//! multiplications. It keeps the upper 24 bits u, which stand for u/2^24 in [0, 1); fp32 holds them exactly.
//! For a fixed key the mixing is a bijection of the index, so that u is uniform.

use super::simd::Lanes;

/// The two multipliers of the integer hash lowbias32 (hash-prospector), on which the mixing of key and index
/// is based.
const MULTIPLIERS: [u32; 2] = [0x7feb_352d, 0x846c_a68b];
/// 2^-24, the distance between random numbers.
const UNIT: f32 = f32::from_bits((127 - 24) << 23);

/// The random numbers of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundingRandom {
    key: [u32; 2],
    first: u32,
}

impl RoundingRandom {
    /// Random numbers without a key, for encodes outside of an operation.
    pub const NONE: RoundingRandom = RoundingRandom {
        key: [0; 2],
        first: 0,
    };

    /// Creates the numbers of one encoder in one operation. `hop` distinguishes the encodes of an
    /// operation: every rank's contribution, and every partial sum of a rank, has its own `hop`.
    pub fn new(seed: u64, operation: u64, hop: u64) -> RoundingRandom {
        let mut key = 0;
        for word in [seed, operation, hop] {
            key = mix(key ^ word);
        }
        RoundingRandom {
            key: [key as u32, (key >> 32) as u32],
            first: 0,
        }
    }

    /// Returns the numbers of a chunk whose first element has index `first` in its message. Elements whose
    /// indices differ by a multiple of 2^32 draw equal numbers.
    pub fn from(self, first: usize) -> RoundingRandom {
        RoundingRandom {
            first: self.first.wrapping_add(first as u32),
            ..self
        }
    }

    /// Returns the two halves of the key, and the index of the first element, for a GPU kernel.
    pub fn parts(self) -> ([u32; 2], u32) {
        (self.key, self.first)
    }

    /// Returns the random number in [0, 1) of an element of the chunk.
    #[inline(always)]
    pub fn fraction(self, element: usize) -> f32 {
        let mut x = self.first.wrapping_add(element as u32) ^ self.key[0];
        x ^= x >> 16;
        x = x.wrapping_mul(MULTIPLIERS[0]);
        x ^= x >> 15;
        x ^= self.key[1];
        x = x.wrapping_mul(MULTIPLIERS[1]);
        x ^= x >> 16;
        (x >> 8) as f32 * UNIT
    }

    /// Returns the random numbers of [`Lanes::N`] successive elements.
    #[inline(always)]
    pub(super) fn fractions<L: Lanes>(self, lanes: L, element: usize) -> L::F {
        let first = self.first.wrapping_add(element as u32) as i32;
        let index = lanes.add_i(lanes.splat_i(first), lanes.count());
        let mut x = lanes.xor(index, lanes.splat_i(self.key[0] as i32));
        x = lanes.xor(x, lanes.shr::<16>(x));
        x = lanes.mul_i(x, lanes.splat_i(MULTIPLIERS[0] as i32));
        x = lanes.xor(x, lanes.shr::<15>(x));
        x = lanes.xor(x, lanes.splat_i(self.key[1] as i32));
        x = lanes.mul_i(x, lanes.splat_i(MULTIPLIERS[1] as i32));
        x = lanes.xor(x, lanes.shr::<16>(x));
        lanes.mul(lanes.convert(lanes.shr::<8>(x)), lanes.splat(UNIT))
    }
}

/// Mixes the bits of a word with the finaliser of SplitMix64.
fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Available, SimdKernel, launch};
    use super::*;
    use crate::cpu::Isa;

    struct Draw(RoundingRandom, usize);

    impl SimdKernel for Draw {
        type Output = Vec<f32>;

        fn scalar(self) -> Vec<f32> {
            (0..16).map(|i| self.0.fraction(self.1 + i)).collect()
        }

        #[inline(always)]
        fn vector<L: Lanes>(self, lanes: L) -> Vec<f32> {
            let mut all = vec![0.0; 16];
            for (at, to) in all.chunks_exact_mut(L::N).enumerate() {
                lanes.store(self.0.fractions(lanes, self.1 + at * L::N), to);
            }
            all
        }
    }

    #[test]
    fn draws_on_every_instruction_set_equal_the_scalar_form() {
        for hop in 0..50u64 {
            let random = RoundingRandom::new(7, 1 << hop, hop).from(1 << (hop % 33));
            let expected = Draw(random, 12345).scalar();
            for isa in Isa::available() {
                let isa = Available::new(isa).unwrap();
                assert_eq!(launch(isa, Draw(random, 12345)), expected, "{isa:?}");
            }
        }
    }

    /// Golden numbers, which GPU kernels and later versions must draw as well.
    #[test]
    fn draws_equal_the_golden_numbers() {
        let draws = Draw(RoundingRandom::new(1, 2, 3), 0).scalar();
        let numbers: Vec<u32> = draws[..4].iter().map(|u| (u / UNIT) as u32).collect();
        assert_eq!(numbers, GOLDEN);
        assert_eq!(
            Draw(RoundingRandom::new(1, 2, 3).from(2), 0).scalar()[..14],
            draws[2..]
        );
    }

    const GOLDEN: [u32; 4] = [1_789_920, 4_397_506, 10_047_920, 13_954_355];

    #[test]
    fn draws_are_uniform_and_uncorrelated() {
        const N: usize = 1 << 20;
        for (seed, operation, hop) in [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1)] {
            let random = RoundingRandom::new(seed, operation, hop);
            let other = RoundingRandom::new(seed, operation, hop + 2);
            let u = |i| f64::from(random.fraction(i)) - 0.5;
            let mean = (0..N).map(u).sum::<f64>() / N as f64;
            // Standard errors of the mean, and of the mean product of two independent numbers.
            let (single, double) = (
                (1.0 / 12.0 / N as f64).sqrt(),
                (1.0 / 144.0 / N as f64).sqrt(),
            );
            assert!(mean.abs() < 4.0 * single, "{mean}");
            for lag in [1, 2, 16, 256, 65_536] {
                let product = (0..N).map(|i| u(i) * u(i + lag)).sum::<f64>() / N as f64;
                assert!(product.abs() < 4.5 * double, "lag {lag}: {product}");
            }
            let v = |i| f64::from(other.fraction(i)) - 0.5;
            let product = (0..N).map(|i| u(i) * v(i)).sum::<f64>() / N as f64;
            assert!(product.abs() < 4.5 * double, "another hop: {product}");
            let mut buckets = [0u32; 256];
            (0..N).for_each(|i| buckets[((u(i) + 0.5) * 256.0) as usize] += 1);
            let expected = N as f64 / 256.0;
            let squares = buckets
                .iter()
                .map(|&n| (f64::from(n) - expected).powi(2) / expected);
            // Chi-squared statistic with 255 degrees of freedom: mean 255, standard deviation 22.6.
            assert!((100.0..400.0).contains(&squares.sum::<f64>()));
        }
    }
}
