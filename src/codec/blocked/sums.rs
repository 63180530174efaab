//! Sums over a block in fp64, with equal bits on every device. Element i is added to partial sum i mod 32, in
//! ascending order; the 32 partial sums are then folded in halves. Warps and vectors of up to 32 elements
//! form the partial sums without an extra step.

use super::super::simd::{Lanes, WIDEST};
use super::load_any;

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

/// Sums over the vectors of a block. Methods are `#[inline(always)]`.
pub(in super::super) trait VectorSums<L: Lanes> {
    /// Adds a vector whose number, modulo the number of vectors that hold the partial sums, is `index`.
    fn add(&mut self, lanes: L, index: usize, x: L::F);
}

/// Adds all vectors of a block; zeros pad the last. The compiler knows each index, which keeps the sums in
/// registers.
#[inline(always)]
pub(in super::super) fn add_all<L: Lanes>(lanes: L, x: &[f32], sums: &mut impl VectorSums<L>) {
    let mut whole = x.chunks_exact(PARTS);
    for part in &mut whole {
        for index in 0..PARTS / L::N {
            sums.add(lanes, index, lanes.load(&part[index * L::N..]));
        }
    }
    for (index, part) in whole.remainder().chunks(L::N).enumerate() {
        sums.add(lanes, index, load_any(lanes, part));
    }
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

    #[inline(always)]
    pub fn total(&self, lanes: L) -> f64 {
        let mut parts = [0.0; PARTS + WIDEST];
        for (index, &sum) in self.sums[..PARTS / L::N].iter().enumerate() {
            lanes.sums(sum, &mut parts[index * L::N..]);
        }
        fold(*parts.first_chunk().unwrap())
    }
}

/// Sum of the squares of the elements; fp64 holds each square exactly.
pub(in super::super) struct SquareSums<L: Lanes>(pub WideSum<L>);

impl<L: Lanes> VectorSums<L> for SquareSums<L> {
    #[inline(always)]
    fn add(&mut self, lanes: L, index: usize, x: L::F) {
        let sum = &mut self.0.sums[index % VECTORS];
        *sum = lanes.add_squares(*sum, x);
    }
}

/// Sum of the elements from 0 up, and sum and number of the elements below 0.
pub(in super::super) struct SignSums<L: Lanes> {
    pub above: WideSum<L>,
    pub below: WideSum<L>,
    pub negative: L::I,
}

impl<L: Lanes> VectorSums<L> for SignSums<L> {
    #[inline(always)]
    fn add(&mut self, lanes: L, index: usize, x: L::F) {
        let index = index % VECTORS;
        (self.above.sums[index], self.below.sums[index]) =
            lanes.add_by_sign(self.above.sums[index], self.below.sums[index], x);
        let less = lanes.gt(lanes.splat(0.0), x);
        let one = lanes.select_i(less, lanes.splat_i(1), lanes.splat_i(0));
        self.negative = lanes.add_i(self.negative, one);
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
