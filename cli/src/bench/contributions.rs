//! Detects a rank's contribution that is missing from a sum in a type of few bits, such as f8e4m3.
//!
//! With few bits and many ranks, the rounding errors of an element exceed what one rank adds to it.
//! The element alone then proves nothing. But rounding errors do not correlate with a contribution,
//! and they cancel over many elements. The test projects the differences from the exact sum onto
//! each rank's contribution. The projected share is about 0 for a correct sum, -1 if the
//! contribution is missing, and 1 if it was added twice.

use cinch::DType;
use cinch::testing::unit_roundoff;

/// Number of consecutive elements that are tested together.
pub const STRETCH: usize = 4096;

/// A contribution counts as lost or wrong if its projected share exceeds this in magnitude.
const LOST: f64 = 0.5;

/// Number of standard deviations that the projected share must exceed. A correct sum exceeds it in
/// 1 of 10^9 cases.
const DEVIATIONS: f64 = 6.0;

/// Rounding errors can hide the loss of one contribution if they exceed this share of the
/// contribution's mean magnitude.
const HIDES: f64 = 0.125;

/// Returns whether rounding errors hide the loss of one contribution from a check of single
/// elements. `share` is the largest rounding error divided by the sum of all contributions'
/// magnitudes.
///
/// Returns false also if a correct partial sum is so large that adding a contribution does not
/// change it. The loss of that contribution is then no error. Partial sums of independent numbers
/// grow with the square root of their count.
pub fn are_hidden(share: f64, dtype: DType, contributions: usize) -> bool {
    let n = contributions as f64;
    let unit = unit_roundoff(dtype);
    contributions > 1 && share * n > HIDES && n * unit * unit <= 1.0
}

/// Returns whether the differences from the exact sum correlate with one of the contributions. That
/// contribution is then missing, wrong or added twice. Non-finite elements are left out.
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
