//! Defines chunks: how many a pass has, where each lies in the buffers, and which ranks contribute to
//! it. Generators, verifier and planner all read them here.
//!
//! | collective | chunks of a pass | chunk c |
//! | --- | --- | --- |
//! | all_reduce, reduce, broadcast | ring: W N for all_reduce, else 1; tree 2; oneshot and flat_tree 1; direct N; hierarchical: see `hierarchical` | part c of the pass's range; with W N parts rank c / W owns it, with 2 parts tree c carries it |
//! | all_gather, gather | W N | part c mod W of rank c / W's block |
//! | reduce_scatter, scatter | W N | part c mod W of the block of rank c / W |
//! | all_to_all | N * N | c = source * N + destination |
//! | send_recv | 1 | the message |
//!
//! N is the number of ranks. W is the number of rings per channel, and 1 for chains and other algorithms.
//! A single rank has one chunk.

use super::groups::Groups;
use super::ring_orders::RingOrders;
use super::{generator_of, ring_count};
use crate::types::{Algorithm, Collective};
use std::ops::Range;

/// The position of a chunk in one buffer of one rank, within the range of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkPlace {
    /// Block that holds the chunk, if the buffer has a block of `count` elements for each rank. A
    /// pass covers an equal range of each block. `None` if the buffer has `count` elements, of
    /// which a pass covers a range.
    pub block: Option<usize>,
    /// Index of the chunk among the [`SchedulePattern::parts`] of the pass's range.
    pub part: usize,
}

/// Selects a schedule. All ranks must have equal patterns; each then generates only its own steps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SchedulePattern {
    /// Collective whose data movement the schedule implements.
    pub collective: Collective,
    /// Algorithm that generates the schedule.
    pub algorithm: Algorithm,
    /// Number of ranks that take part.
    pub nranks: usize,
    /// Root of the collective, or sender of a send/recv. Ignored by collectives without a root.
    pub root: usize,
    /// Receiver of a send/recv; ignored by other collectives.
    pub peer: usize,
    /// Group of each rank. Ignored by algorithms that treat all ranks alike.
    pub groups: Groups,
    /// Algorithm between groups of a hierarchical schedule; ignored by other algorithms.
    pub between: Algorithm,
    /// Rings per channel. Each ring carries a part of the data that a rank owns, so that one chunk
    /// is processed while others travel. At least 1; ignored by chains and by other algorithms.
    pub rings: usize,
    /// Orders in which rings and chains pass the ranks; ignored by algorithms other than ring. Equal on all
    /// channels that run the schedule.
    pub orders: RingOrders,
}

impl SchedulePattern {
    /// Creates a pattern of ranks on one host, with rank 0 as root and peer.
    pub const fn flat(
        collective: Collective,
        algorithm: Algorithm,
        nranks: usize,
    ) -> SchedulePattern {
        SchedulePattern {
            collective,
            algorithm,
            nranks,
            root: 0,
            peer: 0,
            groups: Groups::ONE,
            between: Algorithm::Direct,
            rings: 1,
            orders: RingOrders::BY_RANK,
        }
    }

    /// Returns the number of parts into which a pass divides its range of `count` elements.
    pub fn parts(&self) -> usize {
        match self.nranks {
            1 => 1,
            _ => (generator_of(self.algorithm).parts)(self),
        }
    }

    /// Returns the rings per channel for the ring algorithm; 1 for chains.
    pub(super) fn ring_count(&self) -> usize {
        ring_count::rings(self.collective, self.rings)
    }

    /// Returns the number of chunks of a pass, over all ranks.
    pub fn chunks(&self) -> usize {
        match (
            self.collective.splits_input(),
            self.collective.joins_output(),
        ) {
            (true, true) => self.nranks * self.nranks,
            (false, false) => self.parts(),
            _ => self.nranks * self.parts(),
        }
    }

    /// Returns the index of the block that holds `chunk`, in an input and in an output that have a block for
    /// each rank.
    fn blocks(&self, chunk: usize) -> (usize, usize) {
        if self.collective.splits_input() && self.collective.joins_output() {
            return (chunk % self.nranks, chunk / self.nranks);
        }
        let block = chunk / self.parts();
        (block, block)
    }

    /// Returns the index of `chunk` among the parts of the pass's range. It is equal in every
    /// buffer that holds the chunk.
    pub fn part(&self, chunk: usize) -> usize {
        chunk % self.parts()
    }

    /// Returns the number of slots that each connection needs for freedom from deadlock.
    pub fn slots(&self) -> usize {
        (generator_of(self.algorithm).slots)(self)
    }

    /// Returns the position of `chunk` in the input of `rank`; `None` if the rank contributes
    /// nothing to it.
    pub fn input(&self, rank: usize, chunk: usize) -> Option<ChunkPlace> {
        let collective = self.collective;
        let (of_input, of_output) = self.blocks(chunk);
        let holds = if collective.has_one_source() {
            rank == self.root
        } else {
            collective.reduces() || rank == of_output
        };
        holds.then_some(ChunkPlace {
            block: collective.splits_input().then_some(of_input),
            part: self.part(chunk),
        })
    }

    /// Returns the position of `chunk` in the output of `rank`; `None` if the chunk is not part of
    /// the output.
    pub fn output(&self, rank: usize, chunk: usize) -> Option<ChunkPlace> {
        let collective = self.collective;
        let (of_input, of_output) = self.blocks(chunk);
        let gets = self.has_output(rank) && (!collective.splits_input() || rank == of_input);
        gets.then_some(ChunkPlace {
            block: collective.joins_output().then_some(of_output),
            part: self.part(chunk),
        })
    }

    fn has_output(&self, rank: usize) -> bool {
        match self.collective {
            one if one.is_message() => rank == self.peer,
            one => !one.has_one_target() || rank == self.root,
        }
    }

    /// Returns the chunks in the output of `rank`, without a scan of all chunks.
    pub fn outputs(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let (splits, joins) = (
            self.collective.splits_input(),
            self.collective.joins_output(),
        );
        let (range, step): (Range<usize>, usize) = match (splits, joins) {
            _ if !self.has_output(rank) => (0..0, 1),
            (true, true) => (rank..self.chunks(), self.nranks),
            (true, false) => (rank * self.parts()..(rank + 1) * self.parts(), 1),
            (false, _) => (0..self.chunks(), 1),
        };
        range.step_by(step)
    }

    /// Returns the ranks whose contributions the finished `chunk` on `rank` must hold, each exactly once.
    pub fn contributors(&self, rank: usize, chunk: usize) -> Range<usize> {
        let (_, block) = self.blocks(chunk);
        self.collective
            .contributors(rank, block, self.root, self.nranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Extent;

    /// The chunks cover each part of each block of every buffer exactly once.
    #[test]
    fn chunks_tile_the_buffers() {
        for collective in Collective::ALL {
            for algorithm in Algorithm::ALL {
                for (nranks, rings) in (1..=6).flat_map(|n| [(n, 1), (n, 2), (n, 4)]) {
                    let pattern = SchedulePattern {
                        root: nranks / 2,
                        peer: nranks - 1,
                        groups: Groups::of_hosts((0..nranks).map(|rank| rank % 2)),
                        rings,
                        ..SchedulePattern::flat(collective, algorithm, nranks)
                    };
                    for rank in 0..nranks {
                        check(&pattern, rank);
                    }
                }
            }
        }
    }

    fn check(pattern: &SchedulePattern, rank: usize) {
        let is_root = rank == pattern.root;
        let chunks = 0..pattern.chunks();
        let inputs = chunks.clone().filter_map(|c| pattern.input(rank, c));
        let extent = pattern.collective.input_extent(is_root);
        assert_eq!(sorted(inputs), tiles(pattern, extent), "input: {pattern:?}");

        let outputs = chunks.clone().filter_map(|c| pattern.output(rank, c));
        let mut extent = pattern.collective.output_extent(is_root);
        if pattern.collective == Collective::SendRecv {
            // A pattern knows the receiver of a send/recv, but `output_extent` knows only the
            // sender.
            extent = [Extent::Unused, Extent::Count][usize::from(rank == pattern.peer)];
        }
        assert_eq!(
            sorted(outputs),
            tiles(pattern, extent),
            "output: {pattern:?}"
        );
        let got: Vec<_> = chunks
            .filter(|&c| pattern.output(rank, c).is_some())
            .collect();
        assert_eq!(
            pattern.outputs(rank).collect::<Vec<_>>(),
            got,
            "{pattern:?}"
        );
    }

    fn sorted(places: impl Iterator<Item = ChunkPlace>) -> Vec<ChunkPlace> {
        let mut places: Vec<_> = places.collect();
        places.sort_unstable();
        places
    }

    fn tiles(pattern: &SchedulePattern, extent: Extent) -> Vec<ChunkPlace> {
        let blocks: Vec<_> = match extent {
            Extent::Unused => Vec::new(),
            Extent::Count => vec![None],
            Extent::CountPerRank => (0..pattern.nranks).map(Some).collect(),
        };
        let places = |block| (0..pattern.parts()).map(move |part| ChunkPlace { block, part });
        blocks.into_iter().flat_map(places).collect()
    }
}
