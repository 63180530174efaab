//! Statistics of one call on one rank, as kernels write them.

/// Statistics of one call: of this rank's contribution, and of this rank's output.
///
/// The contribution is the input, or for a pre-multiplied sum its products. The L2 norm comes from sums of 16 squares
/// in fp32, so about six digits are right.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct CallStatistics {
    /// Count of finite elements of the contribution beyond the codec's largest number, which saturate. In an average
    /// the codec encodes the contribution times a power of two.
    pub saturated: u64,
    /// Count of NaN and infinite elements of the contribution.
    pub non_finite: u64,
    /// Sum of squares of the finite elements of the contribution.
    pub sum_squares: f64,
    /// Largest magnitude among the finite elements of the contribution.
    pub abs_max: f64,
    /// Verdict of the output: bit [`CallStatistics::NON_FINITE`].
    pub verdict: u32,
    /// Bits of `verdict` that were taken.
    pub known: u32,
    /// 1 if the fields of the contribution were taken; 0 if the call took the verdict alone.
    pub has_input: u32,
    /// Reserved, always 0.
    pub unused: [u32; 5],
}

impl CallStatistics {
    /// Bit of the verdict: at least one element of this rank's output is NaN or infinite. Outputs of an all_reduce are
    /// equal on all ranks, and so is this bit.
    pub const NON_FINITE: u32 = 1;

    /// Returns the L2 norm of the finite elements of the contribution.
    pub fn l2_norm(&self) -> f64 {
        self.sum_squares.sqrt()
    }

    /// Returns whether this rank's output has a NaN or infinite element; `None` if no call has written the statistics.
    pub fn has_non_finite_output(&self) -> Option<bool> {
        let is_known = self.known & CallStatistics::NON_FINITE != 0;
        is_known.then_some(self.verdict & CallStatistics::NON_FINITE != 0)
    }

    /// Returns the statistics that a kernel wrote as these bytes.
    pub fn from_bytes(bytes: &[u8; size_of::<CallStatistics>()]) -> CallStatistics {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * at..][..8]);
            u64::from_le_bytes(word)
        };
        CallStatistics {
            saturated: word(0),
            non_finite: word(1),
            sum_squares: f64::from_bits(word(2)),
            abs_max: f64::from_bits(word(3)),
            verdict: word(4) as u32,
            known: (word(4) >> 32) as u32,
            has_input: word(5) as u32,
            unused: [0; 5],
        }
    }
}

const _: () = assert!(size_of::<CallStatistics>() == 64);
