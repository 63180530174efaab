//! The links of all pairs of ranks of a host, as the planner needs them.

use super::paths::{GPUS_THAT_KEEP_LINES_WHOLE, LinkClass, PathFailures};
use super::round_messages::GpuInfo;
use crate::gpu::abi::MAX_RANKS;
use std::sync::Arc;

/// Bit r of row q is set if the pair of ranks q and r is in the set.
type Rows = [[u64; MAX_RANKS / 64]; MAX_RANKS];

/// A set of pairs of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RankPairs {
    /// Nearly all communicators have only the sets without, and with, all pairs.
    None,
    All,
    Some(Arc<Rows>),
}

impl RankPairs {
    fn add(&mut self, one: usize, other: usize) {
        if let RankPairs::None = self {
            *self = RankPairs::Some(Arc::new([[0; MAX_RANKS / 64]; MAX_RANKS]));
        }
        if let RankPairs::Some(rows) = self {
            let rows = Arc::make_mut(rows);
            for (row, bit) in [(one, other), (other, one)] {
                rows[row][bit / 64] |= 1 << (bit % 64);
            }
        }
    }

    fn has(&self, one: usize, other: usize) -> bool {
        match self {
            RankPairs::None => false,
            RankPairs::All => true,
            RankPairs::Some(rows) => rows[one][other / 64] >> (other % 64) & 1 == 1,
        }
    }
}

/// The class of the link of each pair of ranks of a host. Equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairLinks {
    /// Pairs between which an ll128 line of 128 bytes may arrive in pieces.
    split: RankPairs,
    pcie: RankPairs,
    pinned: RankPairs,
    /// Largest number of ranks that share a GPU.
    pub ranks_per_gpu: usize,
}

impl PairLinks {
    /// NVLink between all ranks, each on its own GPU. No line arrives in pieces.
    pub const NVLINK: PairLinks = PairLinks {
        split: RankPairs::None,
        pcie: RankPairs::None,
        pinned: RankPairs::None,
        ranks_per_gpu: 1,
    };
    /// Links as fast as NVLink, over which lines may arrive in pieces.
    pub const SPLITTING: PairLinks = PairLinks {
        split: RankPairs::All,
        ..PairLinks::NVLINK
    };

    /// Sets the class of the link between two ranks, which are below [`MAX_RANKS`]. Lines arrive in pieces over PCIe
    /// and through pinned host memory.
    pub fn set(&mut self, one: usize, other: usize, class: LinkClass) {
        if !class.keeps_lines_whole() {
            self.split.add(one, other);
        }
        match class {
            LinkClass::SameDevice | LinkClass::NvLink => {}
            LinkClass::Pcie => self.pcie.add(one, other),
            LinkClass::Host => self.pinned.add(one, other),
        }
    }

    /// Returns the class of the link between two ranks. Ranks of one GPU have the class of NVLink.
    pub fn class(&self, one: usize, other: usize) -> LinkClass {
        match (self.pinned.has(one, other), self.pcie.has(one, other)) {
            (true, _) => LinkClass::Host,
            (false, true) => LinkClass::Pcie,
            (false, false) => LinkClass::NvLink,
        }
    }

    /// Returns whether a line between two ranks may arrive in pieces.
    pub fn splits_lines(&self, one: usize, other: usize) -> bool {
        self.split.has(one, other)
    }

    /// Returns whether lines may arrive in pieces between all ranks.
    pub fn splits_all_lines(&self) -> bool {
        self.split == RankPairs::All
    }

    /// Returns the links of one host. `classes` has the class of each link by both of its ranks; `reporter` is the
    /// first index.
    pub(super) fn new(
        gpus: &[GpuInfo],
        classes: &[Vec<LinkClass>],
        failures: &PathFailures,
    ) -> PairLinks {
        let class = |reporter: usize, peer: usize| {
            let found = classes[reporter].get(peer).copied();
            found.unwrap_or(LinkClass::SameDevice)
        };
        let nranks = gpus.len();
        let ranks_on = |gpu: &GpuInfo| gpus.iter().filter(|one| one.uuid == gpu.uuid).count();
        let mut links = PairLinks {
            ranks_per_gpu: gpus.iter().map(ranks_on).max().unwrap_or(1),
            ..PairLinks::NVLINK
        };
        for one in 0..nranks {
            for other in failures.in_host_memory(one, nranks) {
                links.set(one, other, LinkClass::Host);
            }
            for other in failures.reachable(one, nranks) {
                links.set(one, other, class(one, other).max(class(other, one)));
                let capability = gpus[one].capability;
                let keep = capability == gpus[other].capability
                    && GPUS_THAT_KEEP_LINES_WHOLE.contains(&capability);
                if !keep {
                    links.split.add(one, other);
                }
            }
        }
        links
    }
}
