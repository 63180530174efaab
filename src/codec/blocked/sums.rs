//! Sums over a block in fp64, with equal bits on every device. Element i is added to partial sum i mod 32, in
//! ascending order; the 32 partial sums are then folded in halves. Warps and vectors of up to 32 elements
//! form the partial sums without an extra step.

use super::super::simd::{Lanes, WIDEST};

/// Number of partial sums.
const PARTS: usize = 32;
/// Number of vectors that hold the partial sums, for the narrowest vectors (eight elements).
const VECTORS: usize = PARTS / 8;

/// Sums the numbers of an iterator in this order, and so specifies the result.
pub(in super::super) fn total(x: impl Iterator<Item = f64>) -> f64 {
    let mut parts = [0.0; PARTS];
    for (i, x) in x.enumerate() {
        parts[i % PARTS] += x;
    }
    fold(parts)
}

/// Vector form of [`total`], for vectors that are added in the order of the block.
#[derive(Clone, Copy)]
pub(in super::super) struct WideSum<L: Lanes> {
    sums: [L::D; VECTORS],
}

impl<L: Lanes> WideSum<L> {
    #[inline(always)]
    pub fn new(lanes: L) -> WideSum<L> {
        WideSum {
            sums: [lanes.zero_sum(); VECTORS],
        }
    }

    /// Adds vector number `index` of the block.
    #[inline(always)]
    pub fn add(&mut self, lanes: L, index: usize, x: L::F) {
        let sum = &mut self.sums[index % (PARTS / L::N)];
        *sum = lanes.add_wide(*sum, x);
    }

    /// Adds the squares of the elements of vector number `index`; fp64 holds each square exactly.
    #[inline(always)]
    pub fn add_squares(&mut self, lanes: L, index: usize, x: L::F) {
        let sum = &mut self.sums[index % (PARTS / L::N)];
        *sum = lanes.add_squares(*sum, x);
    }

    #[inline(always)]
    pub fn total(&self, lanes: L) -> f64 {
        let mut parts = [0.0; PARTS + WIDEST];
        for (index, &sum) in self.sums[..PARTS / L::N].iter().enumerate() {
            lanes.sums(sum, &mut parts[index * L::N..]);
        }
        fold(*parts.first_chunk().unwrap())
    }
}

#[inline(always)]
fn fold(mut parts: [f64; PARTS]) -> f64 {
    let mut half = PARTS / 2;
    while half > 0 {
        for i in 0..half {
            parts[i] += parts[i + half];
        }
        half /= 2;
    }
    parts[0]
}
