//! Seeded input data, equal on every machine. Any part can be generated without the parts before
//! it. A rank can thus check its result against all ranks' inputs without storing them.

use super::numbers;
use super::reference::Inputs;
use crate::types::DType;

/// Number of values that are generated at a time.
const BLOCK: usize = 512;

/// A distribution of values. For integer types all bit patterns are equally likely, except with
/// [`Pattern::Small`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// Normal distribution N(0, 1).
    Gaussian,
    /// n1 * exp(1.5 * n2) for normal n1 and n2: few large and many small values, as in gradients.
    HeavyTailed,
    /// Uniform distribution on (-1, 1).
    Uniform,
    /// Integers from 1 to 8: every type except the 8-bit floats holds their sums exactly, in any
    /// order.
    Small,
}

impl Pattern {
    /// Every pattern.
    pub const ALL: [Pattern; 4] = [
        Pattern::Gaussian,
        Pattern::HeavyTailed,
        Pattern::Uniform,
        Pattern::Small,
    ];

    /// Returns the lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Pattern::Gaussian => "gaussian",
            Pattern::HeavyTailed => "heavy_tailed",
            Pattern::Uniform => "uniform",
            Pattern::Small => "small",
        }
    }

    /// Returns the pattern with this name.
    pub fn from_name(name: &str) -> Option<Pattern> {
        Pattern::ALL
            .into_iter()
            .find(|pattern| pattern.name() == name)
    }
}

/// The inputs of all ranks. Values beyond the range of a float type become its largest finite
/// value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data {
    /// Distribution of the values.
    pub pattern: Pattern,
    /// Type to which the values are rounded.
    pub dtype: DType,
    /// Seed of the generator; equal seeds give equal data.
    pub seed: u64,
}

impl Data {
    /// Fills `bytes` with elements of `rank`, from element `first` on.
    pub fn fill(&self, rank: usize, first: usize, bytes: &mut [u8]) {
        let stream = random_word(self.seed, rank as u64);
        let size = self.dtype.size();
        let exact_integers = !self.dtype.is_float() && self.pattern != Pattern::Small;
        let limit = numbers::FloatFormat::of(self.dtype).map_or(f64::MAX, |format| format.largest);
        let mut values = [0.0; BLOCK];
        for (block, bytes) in bytes.chunks_mut(BLOCK * size).enumerate() {
            let first = (first + block * BLOCK) as u64;
            if exact_integers {
                for (i, element) in bytes.chunks_mut(size).enumerate() {
                    let word = random_word(stream, first + i as u64);
                    // Setting bit 0 of the first element keeps an input from being all zeros.
                    let word = word | u64::from(first + i as u64 == 0);
                    element.copy_from_slice(&word.to_le_bytes()[..element.len()]);
                }
                continue;
            }
            let values = &mut values[..bytes.len() / size];
            for (i, value) in values.iter_mut().enumerate() {
                *value = self.value(stream, first + i as u64).clamp(-limit, limit);
            }
            numbers::round(self.dtype, values, bytes);
        }
    }

    /// Returns the first `count` elements of `rank`.
    pub fn vec(&self, rank: usize, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count * self.dtype.size()];
        self.fill(rank, 0, &mut bytes);
        bytes
    }

    #[inline(always)]
    fn value(&self, stream: u64, index: u64) -> f64 {
        match self.pattern {
            Pattern::Gaussian => gaussian(random_word(stream, index)),
            Pattern::HeavyTailed => {
                let size = exponential(1.5 * gaussian(random_word(stream, 2 * index + 1)));
                size * gaussian(random_word(stream, 2 * index))
            }
            Pattern::Uniform => 2.0 * uniform(random_word(stream, index)) - 1.0,
            Pattern::Small => (1 + (random_word(stream, index) & 7)) as f64,
        }
    }
}

impl Inputs for Data {
    fn bytes(&self, _: usize) -> usize {
        usize::MAX
    }

    fn read(&self, rank: usize, at: usize, bytes: &mut [u8]) {
        self.fill(rank, at / self.dtype.size(), bytes);
    }
}

/// Returns word `index` of the stream `seed`, by SplitMix64.
#[inline]
pub fn random_word(seed: u64, index: u64) -> u64 {
    let z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Converts a random word to a number of U(0, 1), never 0 or 1.
#[inline]
pub fn uniform(word: u64) -> f64 {
    ((word >> 12) as f64 + 0.5) * (1.0 / (1u64 << 52) as f64)
}

/// Converts a random word to a number of N(0, 1), by Acklam's rational approximation of the inverse
/// normal distribution, with a relative error below 1.2e-9. Only operations that are equal in all
/// mathematics libraries are used.
#[inline]
pub fn gaussian(word: u64) -> f64 {
    const CENTRE: [f64; 6] = [
        -3.969683028665376e1,
        2.209460984245205e2,
        -2.759285104469687e2,
        138.357_751_867_269,
        -3.066479806614716e1,
        2.506628277459239,
    ];
    const CENTRE_BELOW: [f64; 6] = [
        -5.447609879822406e1,
        1.615858368580409e2,
        -1.556989798598866e2,
        6.680131188771972e1,
        -1.328068155288572e1,
        1.0,
    ];
    const TAIL: [f64; 6] = [
        -7.784894002430293e-3,
        -3.223964580411365e-1,
        -2.400758277161838,
        -2.549732539343734,
        4.374664141464968,
        2.938163982698783,
    ];
    const TAIL_BELOW: [f64; 5] = [
        7.784695709041462e-3,
        3.224671290700398e-1,
        2.445134137142996,
        3.754408661907416,
        1.0,
    ];
    let p = uniform(word);
    let q = p - 0.5;
    if q.abs() <= 0.475_75 {
        let r = q * q;
        return q * polynomial(&CENTRE, r) / polynomial(&CENTRE_BELOW, r);
    }
    let r = (-2.0 * logarithm(p.min(1.0 - p))).sqrt();
    let size = polynomial(&TAIL, r) / polynomial(&TAIL_BELOW, r);
    if q < 0.0 { size } else { -size }
}

/// Evaluates a polynomial whose highest power comes first.
#[inline(always)]
fn polynomial<const N: usize>(coefficients: &[f64; N], x: f64) -> f64 {
    coefficients.iter().fold(0.0, |sum, &c| sum * x + c)
}

/// Returns the natural logarithm of a positive normal number, as 2 atanh((m - 1)
/// (m + 1)) of its mantissa m.
fn logarithm(x: f64) -> f64 {
    let exponent = (x.to_bits() >> 52) as i64 - 1023;
    let mantissa = f64::from_bits(x.to_bits() & ((1 << 52) - 1) | 1023 << 52);
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    // Since s is below 1/3, 16 terms leave an error of 1e-17.
    let series = (0..16)
        .rev()
        .fold(0.0, |sum, k| sum * s * s + 1.0 / f64::from(2 * k + 1));
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * s * series
}

/// Returns e^x for |x| below 700.
#[inline]
fn exponential(x: f64) -> f64 {
    const RECIPROCAL_FACTORIALS: [f64; 14] = {
        let mut table = [1.0; 14];
        let (mut k, mut factorial) = (1, 1.0);
        while k < 14 {
            factorial *= k as f64;
            table[13 - k] = 1.0 / factorial;
            k += 1;
        }
        table
    };
    let k = (x * std::f64::consts::LOG2_E).round_ties_even();
    let rest = x - k * std::f64::consts::LN_2;
    let scale = f64::from_bits(((k as i64 + 1023) as u64) << 52);
    scale * polynomial(&RECIPROCAL_FACTORIALS, rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(pattern: Pattern, count: usize) -> Vec<f64> {
        let data = Data {
            pattern,
            dtype: DType::F64,
            seed: 7,
        };
        let bytes = data.vec(3, count);
        bytes
            .as_chunks()
            .0
            .iter()
            .map(|&b| f64::from_le_bytes(b))
            .collect()
    }

    fn mean(values: impl Iterator<Item = f64> + Clone) -> f64 {
        values.clone().sum::<f64>() / values.count() as f64
    }

    #[test]
    fn elementary_functions_agree_with_the_standard_library() {
        for i in 1..2000 {
            let x = f64::from(i) * 7.1e-4;
            assert!(
                (logarithm(x) - x.ln()).abs() <= 1e-14 * (1.0 + x.ln().abs()),
                "{x}"
            );
            let y = (x - 0.7) * 20.0;
            assert!((exponential(y) / y.exp() - 1.0).abs() < 1e-14, "{y}");
        }
        // Applies the conversion to the word whose uniform number is nearest to p.
        let at = |p: f64| gaussian((p * 2f64.powi(64)) as u64);
        for (p, z) in [
            (0.5, 0.0),
            (0.975, 1.959963984540054),
            (0.01, -2.326347874040841),
            (0.999, 3.090232306167813),
        ] {
            assert!((at(p) - z).abs() < 5e-9, "{p}: {}", at(p));
        }
    }

    #[test]
    fn distributions_have_their_moments() {
        let count = 400_000;
        let near = |x: f64, expected: f64, error: f64| {
            assert!((x - expected).abs() < error, "{x} is not near {expected}");
        };
        let normal = floats(Pattern::Gaussian, count);
        near(mean(normal.iter().copied()), 0.0, 0.01);
        near(mean(normal.iter().map(|x| x * x)), 1.0, 0.01);
        near(mean(normal.iter().map(|x| x.powi(4))), 3.0, 0.1);
        let even = floats(Pattern::Uniform, count);
        near(mean(even.iter().copied()), 0.0, 0.005);
        near(mean(even.iter().map(|x| x * x)), 1.0 / 3.0, 0.003);
        // The logarithm of |n1| exp(1.5 n2) has the mean of ln|n1|, -0.635. Its variance is that of
        // ln|n1|, pi^2
        // 8, plus 1.5^2.
        let tails = floats(Pattern::HeavyTailed, count);
        let logs: Vec<f64> = tails.iter().map(|x| x.abs().ln()).collect();
        let centre = mean(logs.iter().copied());
        near(centre, -0.635, 0.02);
        near(
            mean(logs.iter().map(|x| (x - centre).powi(2))),
            3.4837,
            0.04,
        );
    }

    #[test]
    fn any_part_is_made_alone() {
        for dtype in DType::ALL {
            for pattern in Pattern::ALL {
                let data = Data {
                    pattern,
                    dtype,
                    seed: 1,
                };
                let whole = data.vec(2, 1500);
                let mut part = vec![0; 700 * dtype.size()];
                data.fill(2, 613, &mut part);
                assert_eq!(part, whole[613 * dtype.size()..][..part.len()]);
                assert_ne!(whole, data.vec(1, 1500), "ranks differ");
                assert_ne!(whole, Data { seed: 2, ..data }.vec(2, 1500), "seeds differ");
                assert!(whole[..64 * dtype.size()].iter().any(|&byte| byte != 0));
                let mut values = vec![0.0; 1500];
                numbers::values(dtype, &whole, &mut values);
                assert!(values.iter().all(|x| x.is_finite()));
                if pattern == Pattern::Small {
                    assert!(
                        values
                            .iter()
                            .all(|x| (1.0..=8.0).contains(x) && x.fract() == 0.0)
                    );
                }
                assert_eq!(Pattern::from_name(pattern.name()), Some(pattern));
            }
        }
    }
}
