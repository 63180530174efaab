//! Detects a lost contribution in sums of few bits, where no single element shows it.
//!
//! With few bits and many ranks the roundings of an element exceed what one rank adds to it, so any number
//! is within the bound. But roundings do not correlate with a contribution, and over many elements they
//! cancel: the difference from the exact sum, projected on a rank's contribution, is about 0 times the
//! contribution; -1 times if it is missing, and 1 time if it was added twice.

use cinch::DType;
use cinch::testing::unit_roundoff;

/// Elements that are tested together.
pub const STRETCH: usize = 4096;

/// Share of a contribution whose absence counts as a loss.
const LOST: f64 = 0.5;

/// How many standard deviations the share must exceed: a right sum does so in 1 of 10^9 cases.
const DEVIATIONS: f64 = 6.0;

/// Share of all contributions' magnitudes that roundings must reach to hide one contribution.
const HIDES: f64 = 0.125;

/// Returns whether roundings of this share of all magnitudes hide a contribution that this test would find. If
/// a partial sum is so large that adding a contribution changes nothing, its loss is no error: a sum of
/// independent numbers grows with the root of their number.
pub fn are_hidden(share: f64, dtype: DType, contributions: usize) -> bool {
    let n = contributions as f64;
    let unit = unit_roundoff(dtype);
    contributions > 1 && share * n > HIDES && n * unit * unit <= 1.0
}

/// Returns whether the differences from the exact sum correlate with one of these contributions, which is then
/// missing, wrong or added twice. Elements that are not finite are left out.
pub fn is_one_lost(differences: &[f64], contributions: &[Vec<f64>]) -> bool {
    contributions.iter().any(|given| {
        let (mut squares, mut products, mut deviation) = (0.0, 0.0, 0.0);
        for (&off, &x) in differences.iter().zip(given) {
            if off.is_finite() && x.is_finite() {
                squares += x * x;
                products += off * x;
                deviation += (off * x) * (off * x);
            }
        }
        products.abs() > LOST * squares && products.abs() > DEVIATIONS * deviation.sqrt()
    })
}
