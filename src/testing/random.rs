//! A seeded sequence of random numbers and of fp32 bit patterns.

use super::data::random_word;

/// A seeded sequence of random words: SplitMix64.
pub struct Random(u64);

impl Random {
    /// Creates the sequence of `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Returns the next word.
    pub fn word(&mut self) -> u64 {
        let word = random_word(self.0, 0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        word
    }

    /// Returns a number from 0 to `n` - 1.
    pub fn below(&mut self, n: usize) -> usize {
        (self.word() % n as u64) as usize
    }

    /// Returns a number in (0, 1], never 0: [`Random::gaussian`] takes its logarithm.
    fn open_unit(&mut self) -> f64 {
        ((self.word() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Returns `n` numbers of U(0, 1), rounded to fp32.
    pub fn uniform(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.open_unit() as f32).collect()
    }

    /// Returns `n` numbers of N(0, `sigma`^2) by Box-Muller in fp64, rounded to fp32.
    pub fn gaussian(&mut self, n: usize, sigma: f64) -> Vec<f32> {
        let mut x = Vec::with_capacity(n + 1);
        while x.len() < n {
            let radius = sigma * (-2.0 * self.open_unit().ln()).sqrt();
            let (sin, cos) = (std::f64::consts::TAU * self.open_unit()).sin_cos();
            x.extend([(radius * cos) as f32, (radius * sin) as f32]);
        }
        x.truncate(n);
        x
    }

    /// Returns `n` bit patterns in runs of one kind: any pattern, finite values, subnormals, values
    /// of similar size, and values of similar size with rare special values. Runs of similar size
    /// test codecs on blocks where not only the largest element survives encoding.
    pub fn patterns(&mut self, n: usize) -> Vec<f32> {
        const SPECIAL: [f32; 6] = [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            0.0,
            -0.0,
            f32::MIN_POSITIVE,
        ];
        let mut x = Vec::with_capacity(n);
        while x.len() < n {
            let (kind, run) = (self.word() % 8, 1 + self.below(2000));
            // Covers all exponents, from subnormal numbers to infinity.
            let exponent = self.below(256) as u32;
            let spread = 1 << self.below(6);
            for _ in 0..run.min(n - x.len()) {
                let bits = self.word();
                let pattern = bits as u32;
                let lowered = exponent.saturating_sub((bits >> 32) as u32 % spread);
                let similar = f32::from_bits(pattern & 0x807f_ffff | lowered << 23);
                x.push(match kind {
                    0 => f32::from_bits(pattern),
                    1 => f32::from_bits(pattern & 0xff7f_ffff),
                    2 => f32::from_bits(pattern & 0x807f_ffff),
                    3 if bits >> 32 & 0x3ff == 0 => SPECIAL[(bits >> 42) as usize % 6],
                    _ => similar,
                });
            }
        }
        x
    }
}
