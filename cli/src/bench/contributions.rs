//! Whether a sum has every rank's contribution in it, where no single element tells.
//!
//! Of few bits and many ranks the roundings on the way of an element exceed what one rank adds to it: any
//! number is within the bound. But roundings know nothing of a contribution, and over many elements they
//! cancel: the difference from the exact sum, projected on what a rank has given, is about 0 times that,
//! -1 times if it is not there, and 1 time if it is there twice.

use super::number::unit_roundoff;
use cinch::DType;

/// Elements that are looked at together.
pub const STRETCH: usize = 4096;

/// Share of a contribution from which on it counts as lost.
const LOST: f64 = 0.5;

/// How many times its standard deviation the share must be: of sums as they should be it is so in 1 of
/// 10^9 cases.
const DEVIATIONS: f64 = 6.0;

/// Share of the magnitudes of all contributions that roundings must reach before they hide one of them.
const HIDES: f64 = 0.125;

/// Whether roundings of this share of all magnitudes hide a contribution, and this test would find it.
/// Where a sum so far is so large that adding a contribution to it changes nothing, a lost one is no error:
/// of independent numbers a sum grows with the root of their number.
pub fn are_hidden(share: f64, dtype: DType, contributions: usize) -> bool {
    let n = contributions as f64;
    let unit = unit_roundoff(dtype);
    contributions > 1 && share * n > HIDES && n * unit * unit <= 1.0
}

/// Whether the differences from the exact sum are what is left of one of these contributions where
/// it is missing, wrong or there twice. What is not finite counts for nothing.
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
