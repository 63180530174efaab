//! Scales averages so that no sum overflows before it is divided.
//!
//! Contributions are multiplied by 2^-shift, and the sum of N contributions is divided by N * 2^-shift. Both
//! are exact but for subnormals of the messages' format, so the scale costs no accuracy where nothing overflows.
//! A factor of 1/N instead would round every contribution.
//!
//! | messages | shift |
//! | --- | --- |
//! | f16, f8e4m3, f8e5m2 without a codec; any type in `cast16` | ceil(log2 N) if partial sums travel, else 0 |
//! | bf16, raw or in a codec with the range of fp32 | ceil(log2 N) + 1: the fp32 accumulator overflows too |
//! | all others | 0 |
//!
//! Partial sums travel by ring, tree and hierarchical. By direct, one-shot and flat tree, contributions travel and the
//! divided sum. The extra 1 leaves room for the errors of a codec.

use super::Plan;
use crate::codec::{MessageRange, message_range};
use crate::types::{Algorithm, DType, Level, ReduceOp};

impl Plan {
    /// Returns the shift of an average; 0 for all other calls.
    pub fn average_shift(&self, op: ReduceOp) -> u32 {
        let nranks = self.pattern.nranks;
        if op != ReduceOp::Avg || !self.collective.reduces() || nranks < 2 {
            return 0;
        }
        let kinds = [Level::Intra, Level::Inter].map(|level| self.spec_of(level).kind);
        let shift = |kind| shift(self.dtype, message_range(kind), self.algorithm, nranks);
        let shifts = kinds.map(shift);
        shifts[0].max(shifts[1])
    }
}

fn shift(dtype: DType, range: Option<MessageRange>, algorithm: Algorithm, nranks: usize) -> u32 {
    let least = nranks.next_power_of_two().ilog2();
    let sums_travel = !matches!(
        algorithm,
        Algorithm::Direct | Algorithm::OneShot | Algorithm::FlatTree
    );
    let narrow = match (range, dtype) {
        (None, DType::F16 | DType::F8E4M3 | DType::F8E5M2) => true,
        (range, _) => range == Some(MessageRange::Half),
    };
    if dtype == DType::BF16 && matches!(range, None | Some(MessageRange::Full)) {
        least + 1
    } else if narrow && sums_travel {
        least
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shift_follows_the_range_of_messages_and_whether_sums_travel() {
        let raw = |dtype, algorithm, nranks| shift(dtype, None, algorithm, nranks);
        for (nranks, least) in [(2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7)] {
            for dtype in [DType::F16, DType::F8E4M3, DType::F8E5M2] {
                assert_eq!(raw(dtype, Algorithm::Ring, nranks), least);
                assert_eq!(raw(dtype, Algorithm::Tree, nranks), least);
                assert_eq!(raw(dtype, Algorithm::Direct, nranks), 0);
                assert_eq!(raw(dtype, Algorithm::FlatTree, nranks), 0);
                let full = Some(MessageRange::Full);
                assert_eq!(shift(dtype, full, Algorithm::Ring, nranks), 0);
            }
            assert_eq!(raw(DType::BF16, Algorithm::OneShot, nranks), least + 1);
            for algorithm in [Algorithm::Ring, Algorithm::Hierarchical] {
                assert_eq!(raw(DType::F32, algorithm, nranks), 0);
                let half = Some(MessageRange::Half);
                let cast = |dtype| shift(dtype, half, algorithm, nranks);
                assert_eq!([cast(DType::F32), cast(DType::BF16)], [least; 2]);
            }
        }
    }
}
