//! Pairs of ranks between which the ll128 protocol does not work.

use super::paths::{GPUS_THAT_KEEP_LINES_WHOLE, LinkClass, PathFailures};
use super::round_messages::GpuInfo;
use crate::gpu::abi::MAX_RANKS;

/// Pairs of ranks of one host between which an ll128 line of 128 bytes may arrive in pieces. Equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitPairs([u32; MAX_RANKS]);

impl SplitPairs {
    /// No pair.
    pub const NONE: SplitPairs = SplitPairs([0; MAX_RANKS]);
    /// Every pair.
    pub const ALL: SplitPairs = SplitPairs([u32::MAX; MAX_RANKS]);

    /// Adds the pair of two ranks, which are below [`MAX_RANKS`].
    pub fn add(&mut self, one: usize, other: usize) {
        self.0[one] |= 1 << other;
        self.0[other] |= 1 << one;
    }

    /// Returns whether a line between two ranks may arrive in pieces.
    pub fn has(&self, one: usize, other: usize) -> bool {
        self.0[one] >> other & 1 == 1
    }

    /// Returns the pairs of one host whose link or whose GPUs do not keep lines whole. `classes` has the class of
    /// each link by both of its ranks; `reporter` is the first index.
    pub(super) fn new(
        gpus: &[GpuInfo],
        classes: &[Vec<LinkClass>],
        failures: &PathFailures,
    ) -> SplitPairs {
        let class = |reporter: usize, peer: usize| {
            let found = classes[reporter].get(peer).copied();
            found.unwrap_or(LinkClass::SameDevice)
        };
        let nranks = gpus.len();
        let mut split = SplitPairs::NONE;
        for one in 0..nranks {
            for other in failures.in_host_memory(one, nranks) {
                split.add(one, other);
            }
            for other in failures.reachable(one, nranks) {
                let capability = gpus[one].capability;
                let keeps = class(one, other).max(class(other, one)).keeps_lines_whole()
                    && capability == gpus[other].capability
                    && GPUS_THAT_KEEP_LINES_WHOLE.contains(&capability);
                if !keeps {
                    split.add(one, other);
                }
            }
        }
        split
    }
}
