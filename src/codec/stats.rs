//! Statistics of data that is not encoded.

use super::EncodeStats;
use super::simd::{Available, Lanes, SimdKernel, abs_bits, launch, load_part};
use crate::cpu::Isa;

/// Number of elements that one vector loop scans before it checks for non-finite elements.
const PIECE: usize = 1024;

/// Returns the largest finite magnitude, which becomes the new tensor scale, and the number of non-finite
/// elements.
///
/// If the machine lacks `isa`, the scalar form runs, with an equal result.
pub fn abs_max(isa: Isa, x: &[f32]) -> (f32, u64) {
    let isa = Available::new(isa).unwrap_or(Available::SCALAR);
    launch(isa, AbsMax { x })
}

/// Returns the statistics that encoding `x` would give with a codec whose largest value is `largest`. It
/// serves tensors that are encoded together with other data.
///
/// If the machine lacks `isa`, the scalar form runs. The last bits of the sum of squares may differ between
/// instruction sets.
pub fn look(isa: Isa, x: &[f32], largest: f64) -> EncodeStats {
    let isa = Available::new(isa).unwrap_or(Available::SCALAR);
    let mut stats = launch(isa, Statistics { x });
    if f64::from(stats.abs_max) > largest {
        let beyond = |x: &&f32| x.is_finite() && f64::from(x.abs()) > largest;
        stats.saturated = x.iter().filter(beyond).count() as u64;
    }
    stats
}

/// Returns the statistics of any elements. This scalar form specifies the result.
#[cold]
pub(super) fn scan_slowly(x: &[f32]) -> EncodeStats {
    let mut stats = EncodeStats::default();
    for &x in x {
        if x.is_finite() {
            stats.abs_max = stats.abs_max.max(x.abs());
            stats.sum_squares += f64::from(x) * f64::from(x);
        } else {
            stats.non_finite += 1;
        }
    }
    stats
}

struct AbsMax<'a> {
    x: &'a [f32],
}

impl SimdKernel for AbsMax<'_> {
    type Output = (f32, u64);

    fn scalar(self) -> (f32, u64) {
        let stats = scan_slowly(self.x);
        (stats.abs_max, stats.non_finite)
    }

    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L) -> (f32, u64) {
        let (mut most, mut non_finite) = (0f32, 0);
        for piece in self.x.chunks(PIECE) {
            let mut bits = [lanes.splat_i(0); 2];
            let mut pairs = piece.chunks_exact(2 * L::N);
            for pair in &mut pairs {
                bits[0] = lanes.max_i(bits[0], abs_bits(lanes, lanes.load(pair)));
                bits[1] = lanes.max_i(bits[1], abs_bits(lanes, lanes.load(&pair[L::N..])));
            }
            for rest in pairs.remainder().chunks(L::N) {
                bits[0] = lanes.max_i(bits[0], abs_bits(lanes, load_part(lanes, rest)));
            }
            let largest = f32::from_bits(lanes.reduce_max(lanes.max_i(bits[0], bits[1])) as u32);
            if largest.is_finite() {
                most = most.max(largest);
            } else {
                let stats = scan_slowly(piece);
                most = most.max(stats.abs_max);
                non_finite += stats.non_finite;
            }
        }
        (most, non_finite)
    }
}

struct Statistics<'a> {
    x: &'a [f32],
}

impl SimdKernel for Statistics<'_> {
    type Output = EncodeStats;

    fn scalar(self) -> EncodeStats {
        scan_slowly(self.x)
    }

    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L) -> EncodeStats {
        let mut stats = EncodeStats::default();
        for piece in self.x.chunks(PIECE) {
            let (mut bits, mut sum) = (lanes.splat_i(0), lanes.zero_sum());
            for part in piece.chunks(L::N) {
                let x = load_part(lanes, part);
                bits = lanes.max_i(bits, abs_bits(lanes, x));
                sum = lanes.add_squares(sum, x);
            }
            let largest = f32::from_bits(lanes.reduce_max(bits) as u32);
            if largest.is_finite() {
                stats.abs_max = stats.abs_max.max(largest);
                stats.sum_squares += lanes.total(sum);
            } else {
                stats.merge(&scan_slowly(piece));
            }
        }
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn look_on_every_instruction_set_equals_the_scalar_scan() {
        let mut x: Vec<f32> = (0..5000u32).map(|i| (i as f32 * 0.7).sin() * 9.0).collect();
        for spoil in [None, Some(f32::NAN), Some(f32::NEG_INFINITY)] {
            if let Some(bad) = spoil {
                x[3210] = bad;
            }
            for n in [0, 1, 7, 16, 33, 1024, 1025, 5000] {
                let expected = scan_slowly(&x[..n]);
                let beyond = x[..n]
                    .iter()
                    .filter(|x| x.is_finite() && x.abs() > 8.0)
                    .count();
                for isa in Isa::available() {
                    let found = look(isa, &x[..n], 8.0);
                    assert_eq!(found.abs_max, expected.abs_max, "{isa:?} {n}");
                    assert_eq!(found.non_finite, expected.non_finite, "{isa:?} {n}");
                    assert_eq!(found.saturated, beyond as u64, "{isa:?} {n}");
                    let off = (found.sum_squares - expected.sum_squares).abs();
                    assert!(off <= 1e-12 * expected.sum_squares, "{isa:?} {n}");
                    assert_eq!(look(isa, &x[..n], f64::INFINITY).saturated, 0);
                }
            }
        }
    }

    #[test]
    fn abs_max_finds_every_element_and_skips_non_finite_ones() {
        for isa in Isa::available() {
            assert_eq!(abs_max(isa, &[]), (0.0, 0));
            assert_eq!(abs_max(isa, &[f32::NAN, f32::INFINITY]), (0.0, 2));
            for n in [1, 15, 16, 17, 33, 1024, 1500] {
                for at in 0..n {
                    let mut x = vec![0.25; n];
                    x[at] = -2.0;
                    assert_eq!(abs_max(isa, &x), (2.0, 0), "{isa:?} {n} {at}");
                    x[at] = f32::NEG_INFINITY;
                    let rest = if n == 1 { 0.0 } else { 0.25 };
                    assert_eq!(abs_max(isa, &x), (rest, 1), "{isa:?} {n} {at}");
                }
            }
        }
    }
}
