//! Defines chunks: how many a pass has, where each lies in the buffers, and which ranks contribute to
//! it. Generators, verifier and planner all read them here.
//!
//! | collective | chunks of a pass | chunk c |
//! | --- | --- | --- |
//! | all_reduce, reduce, broadcast | ring: W N for all_reduce, else 1; tree 2; oneshot 1; direct N; hierarchical: see there | part c of the pass's range; of W N parts, rank c / W owns part c; of 2, tree c carries it |
//! | all_gather, gather | W N | part c mod W of rank c / W's block |
//! | reduce_scatter, scatter | W N | part c mod W of the block of rank c / W |
//! | all_to_all | N * N | c = source * N + destination |
//! | send_recv | 1 | the message |
//!
//! W is the number of rings per channel, and 1 for chains and other algorithms. One rank has one chunk.

use super::hosts::Hosts;
use super::{generator_of, ring_count};
use crate::types::{Algorithm, Collective};
use std::ops::Range;

/// The place of a chunk in one buffer of one rank, within the range of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkPlace {
    /// The block, in a buffer with a block of `count` elements for each rank; a pass takes the same
    /// range of each block. `None` in a buffer of `count` elements, of which a pass takes a range.
    pub block: Option<usize>,
    /// Index among the [`SchedulePattern::parts`] of the range.
    pub part: usize,
}

/// Selects a schedule. All ranks agree on it before each generates its own part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SchedulePattern {
    /// The collective.
    pub collective: Collective,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Ranks that take part.
    pub nranks: usize,
    /// Root; sender of a send/recv. Unused where the collective has none.
    pub root: usize,
    /// Receiver of a send/recv; unused otherwise.
    pub peer: usize,
    /// Ranks of each host. Unused by algorithms that treat all ranks alike.
    pub hosts: Hosts,
    /// Algorithm between hosts of a hierarchical schedule; unused otherwise.
    pub between: Algorithm,
    /// Rings per channel: each carries a part of what a rank owns, so that one chunk moves while
    /// others travel. At least 1; unused by chains and by other algorithms.
    pub rings: usize,
}

impl SchedulePattern {
    /// Returns a pattern of ranks on one host, with rank 0 as root and peer.
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
            hosts: Hosts::ONE,
            between: Algorithm::Direct,
            rings: 1,
        }
    }

    /// Returns the parts into which a pass divides its range of `count` elements.
    pub fn parts(&self) -> usize {
        match self.nranks {
            1 => 1,
            _ => (generator_of(self.algorithm).parts)(self),
        }
    }

    /// Returns the rings per channel of algorithm ring; chains have one.
    pub(super) fn ring_count(&self) -> usize {
        ring_count::rings(self.collective, self.rings)
    }

    /// Returns the chunks of a pass, over all ranks.
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

    /// Returns the blocks that `chunk` is part of: in an input and in an output that have a block for each
    /// rank.
    fn blocks(&self, chunk: usize) -> (usize, usize) {
        if self.collective.splits_input() && self.collective.joins_output() {
            return (chunk % self.nranks, chunk / self.nranks);
        }
        let block = chunk / self.parts();
        (block, block)
    }

    /// Returns the part of the range that `chunk` is, in every buffer that has it.
    pub fn part(&self, chunk: usize) -> usize {
        chunk % self.parts()
    }

    /// Returns the slots that each connection needs to be free of deadlock.
    pub fn slots(&self) -> usize {
        (generator_of(self.algorithm).slots)(self)
    }

    /// Returns the place of `chunk` in the input of `rank`; `None` if the rank contributes nothing
    /// to it.
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

    /// Returns the place of `chunk` in the output of `rank`; `None` if the rank does not receive
    /// it.
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

    /// Returns the chunks that `rank` receives, without a scan of the others.
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

    /// Returns the ranks whose contributions the finished `chunk` holds on `rank`, each exactly once.
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

    /// Chunks tile each buffer: every part and block of it exactly once.
    #[test]
    fn chunks_tile_the_buffers() {
        for collective in Collective::ALL {
            for algorithm in Algorithm::ALL {
                for (nranks, rings) in (1..=6).flat_map(|n| [(n, 1), (n, 2), (n, 4)]) {
                    let pattern = SchedulePattern {
                        root: nranks / 2,
                        peer: nranks - 1,
                        hosts: Hosts::new((0..nranks).map(|rank| rank % 2)),
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
            // A pattern knows the receiver of a send/recv; an extent knows only the sender.
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
