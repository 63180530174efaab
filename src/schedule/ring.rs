//! Ring: neighbour to neighbour. For N ranks and a message of S bytes:
//!
//! | collective | messages on the way of a chunk | bytes sent by a rank |
//! | --- | --- | --- |
//! | all_reduce | N-1 of partial sums, N-1 of the result | 2 S (N-1)/N |
//! | reduce_scatter, all_gather | N-1 | (N-1) blocks |
//! | broadcast, reduce (a chain from or to the root) | N-1 | S; the last rank none |
//!
//! Rank r sends to r+1. What rank c owns starts at rank c+1 and is complete at rank c.
//!
//! Of W rings each carries a W-th of what every rank owns, a chunk of its own: odd ones the other way
//! round, from r to r-1, where there are more than two ranks. All ranks do the same step of all rings,
//! then the next: so they have W messages to move while one travels. A connection of a ring of one strand
//! needs two slots, and one more for each further strand in its direction. A chain has one: its passes
//! follow each other as closely, and in two directions its ends would wait for one another.
//!
//! All steps stand in one stage. Receiving message m and sending message m+1 are one fused step,
//! and a connection is first in, first out: a cut between two stages at any m would have the
//! neighbour receive in another order than this rank sends. A chain of one step a rank overlaps
//! passes by itself; the others keep every rank busy in every step.

use super::chunks::Pattern;
use super::ir::{Op, Step};
use crate::types::Collective;

pub(super) const STAGES: usize = 1;

/// Slots that each connection needs.
pub(super) fn slots(pattern: &Pattern) -> usize {
    1 + rings(pattern).div_ceil(directions(pattern.nranks))
}

/// Strands of this ring.
pub(super) fn rings(pattern: &Pattern) -> usize {
    match has_several_rings(pattern.collective) {
        true => pattern.rings,
        false => 1,
    }
}

/// Whether a ring of `collective` may have several rings: it is no chain.
pub const fn has_several_rings(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter
    )
}

/// Directions that lead to different ranks.
pub const fn directions(nranks: usize) -> usize {
    if nranks > 2 { 2 } else { 1 }
}

/// Steps of a strand in a pass, at most: those of an all_reduce.
pub const fn ring_steps(nranks: usize) -> usize {
    2 * nranks - 1
}

pub(super) fn steps(pattern: &Pattern, rank: usize) -> Vec<Step> {
    let rings: Vec<_> = (0..rings(pattern))
        .map(|index| Ring::new(pattern, rank, index).steps(pattern.collective, pattern.root))
        .collect();
    // All rings have as many.
    let nth = |at| rings.iter().map(move |steps: &Vec<Step>| steps[at]);
    (0..rings[0].len()).flat_map(nth).collect()
}

/// One strand of a ring as one rank sees it.
struct Ring {
    nranks: usize,
    rank: usize,
    index: usize,
    rings: usize,
}

impl Ring {
    fn new(pattern: &Pattern, rank: usize, index: usize) -> Ring {
        Ring {
            nranks: pattern.nranks,
            rank,
            index,
            rings: rings(pattern),
        }
    }

    fn steps(&self, collective: Collective, root: usize) -> Vec<Step> {
        match collective {
            Collective::AllReduce => {
                let mut steps = self.scatter_sums();
                steps.push(self.pass_on(Op::RecvReduceCopySend, self.chunk(0)));
                steps.extend(self.spread());
                steps
            }
            Collective::ReduceScatter => {
                let mut steps = self.scatter_sums();
                steps.push(self.end(Op::RecvReduceCopy, self.chunk(0)));
                steps
            }
            Collective::AllGather => {
                let mut steps = vec![self.begin(Op::RecvReduceCopySend, self.chunk(0))];
                steps.extend(self.spread());
                steps
            }
            Collective::Broadcast => vec![match self.distance_from(root) {
                0 => self.begin(Op::RecvReduceCopySend, 0),
                d if d < self.nranks - 1 => self.pass_on(Op::RecvCopySend, 0),
                _ => self.end(Op::Recv, 0),
            }],
            Collective::Reduce => vec![match self.distance_from(root) {
                0 => self.end(Op::RecvReduceCopy, 0),
                1 => self.begin(Op::Send, 0),
                _ => self.pass_on(Op::RecvReduceSend, 0),
            }],
            _ => Vec::new(),
        }
    }

    /// Partial sums of all chunks but the own, from c+1 towards c.
    fn scatter_sums(&self) -> Vec<Step> {
        let mut steps = vec![self.begin(Op::Send, self.chunk(1))];
        steps.extend((2..self.nranks).map(|back| {
            let chunk = self.chunk(back);
            self.pass_on(Op::RecvReduceSend, chunk)
        }));
        steps
    }

    /// Finished chunks of all other ranks, after the own one has left.
    fn spread(&self) -> Vec<Step> {
        let last = self.nranks - 1;
        let mut steps: Vec<_> = (1..last)
            .map(|back| self.pass_on(Op::RecvCopySend, self.chunk(back)))
            .collect();
        steps.push(self.end(Op::Recv, self.chunk(last)));
        steps
    }

    /// This strand's chunk of the rank that stands so many places before.
    fn chunk(&self, back: usize) -> usize {
        self.before(back) * self.rings + self.index
    }

    fn distance_from(&self, root: usize) -> usize {
        (self.rank + self.nranks - root) % self.nranks
    }

    /// The rank that stands so many places before; fewer than there are ranks.
    fn before(&self, back: usize) -> usize {
        match self.index % directions(self.nranks) {
            0 => (self.rank + self.nranks - back) % self.nranks,
            _ => (self.rank + back) % self.nranks,
        }
    }

    fn begin(&self, op: Op, chunk: usize) -> Step {
        Step::new(0, op, chunk).to([self.before(self.nranks - 1)])
    }

    fn end(&self, op: Op, chunk: usize) -> Step {
        Step::new(0, op, chunk).from([self.before(1)])
    }

    fn pass_on(&self, op: Op, chunk: usize) -> Step {
        let end = self.end(op, chunk);
        end.to([self.before(self.nranks - 1)])
    }
}
