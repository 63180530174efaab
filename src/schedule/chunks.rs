//! What a chunk is: how many a pass has, where each lies in the buffers, and whose contributions
//! its result holds. Generators, verifier and plan all read it here.
//!
//! | collective | chunks of a pass | chunk c |
//! | --- | --- | --- |
//! | all_reduce, reduce, broadcast | ring: N for all_reduce, else 1; tree 2; oneshot 1; direct N; hierarchical: see there | part c of the pass's range; of N parts, rank c owns part c; of 2, tree c carries it |
//! | all_gather, gather | N | rank c's block |
//! | reduce_scatter, scatter | N | the block of rank c |
//! | all_to_all | N * N | c = source * N + destination |
//! | send_recv | 1 | the message |
//!
//! With one rank there is one chunk.

use super::hierarchical;
use super::hosts::Hosts;
use crate::types::{Algorithm, Collective};
use std::ops::Range;

/// Where a chunk lies in one buffer of one rank, within the range of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The buffer holds `count` elements; a pass takes a range of them, and the chunk is part
    /// `index` of the `of` parts of that range.
    Part {
        /// Which part.
        index: usize,
        /// How many there are.
        of: usize,
    },
    /// The buffer holds one block of `count` elements a rank; a pass takes the same range of
    /// each, and the chunk is all of the range in this block.
    Block(usize),
}

/// Whose contributions a finished chunk holds, each exactly once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contributors {
    /// Every rank's.
    All,
    /// One rank's.
    One(usize),
}

/// Which schedule: what all ranks agree on before they generate their part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pattern {
    /// What is done.
    pub collective: Collective,
    /// By which family of schedules.
    pub algorithm: Algorithm,
    /// Ranks that take part.
    pub nranks: usize,
    /// Root; of a send/recv, the sender. Not used where the collective has none.
    pub root: usize,
    /// Receiver of a send/recv. Not used otherwise.
    pub peer: usize,
    /// Which ranks share a host. Not used by algorithms that treat all ranks alike.
    pub hosts: Hosts,
    /// What a hierarchical schedule does between hosts. Not used otherwise.
    pub between: Algorithm,
}

const WHOLE: Place = Place::Part { index: 0, of: 1 };

impl Pattern {
    /// A pattern of ranks of one host, with rank 0 as root and peer.
    pub const fn flat(collective: Collective, algorithm: Algorithm, nranks: usize) -> Pattern {
        Pattern {
            collective,
            algorithm,
            nranks,
            root: 0,
            peer: 0,
            hosts: Hosts::ONE,
            between: Algorithm::Direct,
        }
    }

    /// Parts into which a pass divides its range of a buffer of `count` elements; 1 where chunks
    /// are blocks.
    pub fn parts(&self) -> usize {
        match (self.collective, self.algorithm) {
            _ if self.nranks == 1 => 1,
            (_, Algorithm::Hierarchical) => hierarchical::parts(self),
            (Collective::AllReduce, Algorithm::Ring | Algorithm::Direct) => self.nranks,
            (Collective::Broadcast | Collective::Reduce, Algorithm::Direct) => self.nranks,
            (
                Collective::AllReduce | Collective::Broadcast | Collective::Reduce,
                Algorithm::Tree,
            ) => 2,
            _ => 1,
        }
    }

    /// Chunks of a pass, over all ranks.
    pub fn chunks(&self) -> usize {
        match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => self.parts(),
            Collective::AllGather
            | Collective::Gather
            | Collective::ReduceScatter
            | Collective::Scatter => self.nranks,
            Collective::AllToAll => self.nranks * self.nranks,
            Collective::SendRecv => 1,
        }
    }

    /// Where `chunk` lies in the input of `rank`; `None` if that rank contributes nothing to it.
    pub fn input(&self, rank: usize, chunk: usize) -> Option<Place> {
        let (holds, place) = match self.collective {
            Collective::AllReduce | Collective::Reduce => (true, self.part(chunk)),
            Collective::Broadcast => (rank == self.root, self.part(chunk)),
            Collective::AllGather | Collective::Gather => (rank == chunk, WHOLE),
            Collective::ReduceScatter => (true, Place::Block(chunk)),
            Collective::Scatter => (rank == self.root, Place::Block(chunk)),
            Collective::AllToAll => (
                rank == chunk / self.nranks,
                Place::Block(chunk % self.nranks),
            ),
            Collective::SendRecv => (rank == self.root, WHOLE),
        };
        holds.then_some(place)
    }

    /// Where `chunk` lies in the output of `rank`; `None` if that rank does not get it.
    pub fn output(&self, rank: usize, chunk: usize) -> Option<Place> {
        let (gets, place) = match self.collective {
            Collective::AllReduce | Collective::Broadcast => (true, self.part(chunk)),
            Collective::Reduce => (rank == self.root, self.part(chunk)),
            Collective::AllGather => (true, Place::Block(chunk)),
            Collective::Gather => (rank == self.root, Place::Block(chunk)),
            Collective::ReduceScatter | Collective::Scatter => (rank == chunk, WHOLE),
            Collective::AllToAll => (
                rank == chunk % self.nranks,
                Place::Block(chunk / self.nranks),
            ),
            Collective::SendRecv => (rank == self.peer, WHOLE),
        };
        gets.then_some(place)
    }

    /// The chunks that `rank` gets, without looking at those that it does not get.
    pub fn outputs(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let (range, step): (Range<usize>, usize) = match self.collective {
            Collective::AllToAll => (rank..self.chunks(), self.nranks),
            Collective::ReduceScatter | Collective::Scatter => (rank..rank + 1, 1),
            Collective::Reduce | Collective::Gather if rank != self.root => (0..0, 1),
            Collective::SendRecv if rank != self.peer => (0..0, 1),
            _ => (0..self.chunks(), 1),
        };
        range.step_by(step)
    }

    /// Whose contributions the finished `chunk` holds.
    pub fn contributors(&self, chunk: usize) -> Contributors {
        match self.collective {
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => {
                Contributors::All
            }
            Collective::Broadcast | Collective::Scatter | Collective::SendRecv => {
                Contributors::One(self.root)
            }
            Collective::AllGather | Collective::Gather => Contributors::One(chunk),
            Collective::AllToAll => Contributors::One(chunk / self.nranks),
        }
    }

    /// Whether several ranks get the same chunk, and must get the same bits.
    pub fn is_shared(&self) -> bool {
        matches!(
            self.collective,
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast
        )
    }

    fn part(&self, index: usize) -> Place {
        Place::Part {
            index,
            of: self.parts(),
        }
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
                for nranks in 1..=6 {
                    let pattern = Pattern {
                        root: nranks / 2,
                        peer: nranks - 1,
                        hosts: Hosts::new((0..nranks).map(|rank| rank % 2)),
                        ..Pattern::flat(collective, algorithm, nranks)
                    };
                    for rank in 0..nranks {
                        check(&pattern, rank);
                    }
                }
            }
        }
    }

    fn check(pattern: &Pattern, rank: usize) {
        let is_root = rank == pattern.root;
        let chunks = 0..pattern.chunks();
        let inputs = chunks.clone().filter_map(|c| pattern.input(rank, c));
        let extent = pattern.collective.input_extent(is_root);
        assert_eq!(sorted(inputs), tiles(pattern, extent), "input: {pattern:?}");

        let outputs = chunks.clone().filter_map(|c| pattern.output(rank, c));
        let mut extent = pattern.collective.output_extent(is_root);
        if pattern.collective == Collective::SendRecv {
            // A pattern knows the receiver; an extent knows only who does not send.
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

    fn sorted(places: impl Iterator<Item = Place>) -> Vec<Place> {
        let mut places: Vec<_> = places.collect();
        places.sort_by_key(|place| match *place {
            Place::Part { index, .. } => index,
            Place::Block(block) => block,
        });
        places
    }

    fn tiles(pattern: &Pattern, extent: Extent) -> Vec<Place> {
        let of = pattern.parts();
        match extent {
            Extent::Unused => Vec::new(),
            Extent::Count => (0..of).map(|index| Place::Part { index, of }).collect(),
            Extent::CountPerRank => (0..pattern.nranks).map(Place::Block).collect(),
        }
    }
}
