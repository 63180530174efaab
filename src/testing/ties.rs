//! Blocks of elements for codecs that sum a block in fp64 and round to fp32: onebit (the elements of each
//! sign) and terngrad (the squares). Each sum is a tie of the rounding to fp32, or just above it. Which of both
//! depends on the order of the additions, and so does the stored number.
//!
//! The summands are a large one, others that make the tie with it, and a few small ones of about half an ulp of the
//! large one in fp64. A small one is lost if it is added alone, and kept if the order adds two of them first.

use super::random::Random;
use crate::types::{CodecKind, DType};

/// Returns whether elements of a type can be near ties of `kind`. fp64 holds each sum of f16 elements exactly, so onebit's
/// sums of them have no order.
pub fn has_near_ties(kind: CodecKind, dtype: DType) -> bool {
    (kind, dtype) != (CodecKind::OneBit, DType::F16)
}

impl Random {
    /// Returns `blocks` blocks of `block` elements near ties of `kind`, onebit or terngrad. They are exact in bf16;
    /// terngrad's are exact in f16 too ([`has_near_ties`]).
    ///
    /// # Panics
    /// Panics for other codecs, if `block` is no power of two from 32 up, or if it is no power of four for terngrad,
    /// whose mean would then lie off the tie.
    pub fn near_ties(&mut self, kind: CodecKind, block: usize, blocks: usize) -> Vec<f32> {
        assert!(block.is_power_of_two() && block >= 32, "block={block}");
        let one: fn(&mut Random, usize) -> Vec<f32> = match kind {
            CodecKind::OneBit => Random::near_ties_by_sign,
            CodecKind::TernGrad => Random::near_tie_of_squares,
            kind => panic!("{} adds no rows", kind.name()),
        };
        (0..blocks).flat_map(|_| one(self, block)).collect()
    }

    /// Returns elements of which all, half or none are negative: a mean over a power of two of elements is exact.
    fn near_ties_by_sign(&mut self, block: usize) -> Vec<f32> {
        let all: Vec<usize> = (0..block).collect();
        let bit = 1 << self.below(block.ilog2() as usize);
        let (above, below): (Vec<usize>, Vec<usize>) = match self.below(3) {
            0 => (all, vec![]),
            1 => (vec![], all),
            _ => all.iter().partition(|&i| i & bit == 0),
        };
        // Each element below 0 must count. Sums with the others lose 2^-60.
        let mut x = vec![0.0; block];
        below.iter().for_each(|&i| x[i] = -2f32.powi(-60));
        for (sign, places) in [(1.0, above), (-1.0, below)] {
            if !places.is_empty() {
                // Half an ulp of 2^60 is 2^36 in fp32, and 2^7 in fp64.
                let tie = [60, 36].map(|exponent| sign * 2f32.powi(exponent));
                self.place(&mut x, &places, &tie, sign * 2f32.powi(7));
            }
        }
        x
    }

    /// Returns elements whose root mean square is 2^15 (1 + 2^-22) / sqrt(block), or a little more. Its product by
    /// 2.5 is a tie.
    fn near_tie_of_squares(&mut self, block: usize) -> Vec<f32> {
        assert!(block.ilog2().is_multiple_of(2), "block={block}");
        let mut x = vec![0.0; block];
        let places: Vec<usize> = (0..block).collect();
        // (1 + 2^-22)^2 is the sum of the squares of 1, 2^-11, 2^-11 and 2^-22. The root still loses the square of
        // 2^-26, an ulp of 1 in fp64, but not two ulps. The small square is 0.47 ulp.
        let tie = [15, 4, 4, -7, -11].map(|exponent| 2f32.powi(exponent));
        self.place(&mut x, &places, &tie, 1.375 * 2f32.powi(-12));
        x.iter_mut().for_each(|x| *x *= [1.0, -1.0][self.below(2)]);
        x
    }

    /// Writes `tie` and two to four times `small` to random `places`. The indices of the small elements differ from
    /// that of `tie[0]` in three random bits at most, so that any two steps of the order often meet there.
    fn place(&mut self, x: &mut [f32], places: &[usize], tie: &[f32], small: f32) {
        let at = self.below(places.len());
        let mut bits = 0usize;
        while bits.count_ones() < 3 {
            bits |= 1 << self.below(places.len().ilog2() as usize);
        }
        let mut others: Vec<usize> = (0..places.len()).filter(|&i| i != at).collect();
        for i in 1..others.len() {
            others.swap(i, self.below(i + 1));
        }
        others.sort_by_key(|i| (i ^ at) & !bits != 0);
        let count = 2 + self.below(3);
        x[places[at]] = tie[0];
        others[..count].iter().for_each(|&i| x[places[i]] = small);
        let far = others.iter().rev();
        far.zip(&tie[1..]).for_each(|(&i, &tie)| x[places[i]] = tie);
    }
}
