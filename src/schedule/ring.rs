//! Ring: neighbour to neighbour. For N ranks and a message of S bytes:
//!
//! | collective | messages on the way of a chunk | bytes sent by a rank |
//! | --- | --- | --- |
//! | all_reduce | N-1 of partial sums, N-1 of the result | 2 S (N-1)/N |
//! | reduce_scatter, all_gather | N-1 | (N-1) blocks |
//! | broadcast, reduce (a chain from or to the root) | N-1 | S; the last rank none |
//!
//! Rank r sends to r+1. Chunk c starts at rank c+1 and is complete at rank c, which owns it.
//!
//! All steps stand in one stage. Receiving message m and sending message m+1 are one fused step,
//! and a connection is first in, first out: a cut between two stages at any m would have the
//! neighbour receive in another order than this rank sends. A chain of one step a rank overlaps
//! passes by itself; the others keep every rank busy in every step.

use super::chunks::Pattern;
use super::ir::{Op, Step};
use crate::types::Collective;

pub(super) const STAGES: usize = 1;

pub(super) fn steps(pattern: &Pattern, rank: usize) -> Vec<Step> {
    let ring = Ring {
        nranks: pattern.nranks,
        rank,
    };
    match pattern.collective {
        Collective::AllReduce => {
            let mut steps = ring.scatter_sums();
            steps.push(ring.pass_on(Op::RecvReduceCopySend, ring.chunk(0)));
            steps.extend(ring.spread());
            steps
        }
        Collective::ReduceScatter => {
            let mut steps = ring.scatter_sums();
            steps.push(ring.end(Op::RecvReduceCopy, ring.chunk(0)));
            steps
        }
        Collective::AllGather => {
            let mut steps = vec![ring.begin(Op::RecvReduceCopySend, ring.chunk(0))];
            steps.extend(ring.spread());
            steps
        }
        Collective::Broadcast => vec![match ring.distance_from(pattern.root) {
            0 => ring.begin(Op::RecvReduceCopySend, 0),
            d if d < ring.nranks - 1 => ring.pass_on(Op::RecvCopySend, 0),
            _ => ring.end(Op::Recv, 0),
        }],
        Collective::Reduce => vec![match ring.distance_from(pattern.root) {
            0 => ring.end(Op::RecvReduceCopy, 0),
            1 => ring.begin(Op::Send, 0),
            _ => ring.pass_on(Op::RecvReduceSend, 0),
        }],
        _ => Vec::new(),
    }
}

struct Ring {
    nranks: usize,
    rank: usize,
}

impl Ring {
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

    fn chunk(&self, back: usize) -> usize {
        (self.rank + self.nranks - back) % self.nranks
    }

    fn distance_from(&self, root: usize) -> usize {
        (self.rank + self.nranks - root) % self.nranks
    }

    fn begin(&self, op: Op, chunk: usize) -> Step {
        Step::new(0, op, chunk).to([(self.rank + 1) % self.nranks])
    }

    fn end(&self, op: Op, chunk: usize) -> Step {
        Step::new(0, op, chunk).from([(self.rank + self.nranks - 1) % self.nranks])
    }

    fn pass_on(&self, op: Op, chunk: usize) -> Step {
        let end = self.end(op, chunk);
        end.to([(self.rank + 1) % self.nranks])
    }
}
