//! Ring: neighbour to neighbour. For N ranks and a message of S bytes:
//!
//! | collective | messages in sequence for a chunk | bytes sent by a rank |
//! | --- | --- | --- |
//! | all_reduce | N-1 of partial sums, N-1 of the result | 2 S (N-1)/N |
//! | reduce_scatter, all_gather | N-1 | (N-1) blocks |
//! | broadcast, reduce (a chain from or to the root) | N-1 | S; the last rank of the chain: 0 |
//!
//! Each rank sends to the next rank in the ring's order of [`SchedulePattern::orders`], which is rank r+1 for rank
//! r unless another order suits the machine's links better. The chunk of rank c starts at the rank after c and is
//! complete at rank c. So the order changes who sends to whom, but not who owns what. A chain goes round the order
//! from, or to, the root.
//!
//! With W rings per channel, each ring carries a W-th of what every rank owns as a chunk of its own. Odd
//! rings run the other way, to the rank before, if there are more than two ranks. Pairs of rings may have orders of
//! their own, so that together they use links that no single order uses. All ranks do a step for
//! all rings before the next step, so that W messages can move while one travels. A chain (broadcast, reduce)
//! has one ring: its passes follow each other as closely, and with two directions its ends would wait for
//! one another.
//!
//! A connection needs two slots for one ring, and one more for each further ring that crosses it, whatever the orders
//! are. Number the operations of all ranks by (step, ring). When every operation before (s, j) is done, each message of
//! an earlier step has arrived, and a connection that R rings cross holds at most R messages: one of each ring. So the
//! operations (s, j) of all ranks can run with R + 1 slots.
//!
//! All steps have one stage. Receiving message m and sending message m+1 are one fused step, and a
//! connection is first in, first out: a cut between two stages at any m would make the neighbour receive in
//! another order than this rank sends. A chain of one step per rank overlaps passes by itself; the other
//! collectives keep every rank busy in every step.

use super::chunks::SchedulePattern;
use super::generator::Generator;
use super::ir::{Op, Step};
use super::rank_order::RankOrder;
use super::ring_count::{self, directions};
use crate::types::{Algorithm, Collective};

pub(super) const GENERATOR: Generator = Generator {
    algorithm: Algorithm::Ring,
    collectives: &[
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast,
        Collective::Reduce,
    ],
    parts: |pattern| match pattern.collective {
        Collective::AllReduce => pattern.nranks * pattern.ring_count(),
        _ => pattern.ring_count(),
    },
    slots: |pattern| ring_count::slots(&pattern.orders, pattern.ring_count(), pattern.nranks),
    stages: |_| 1,
    hops: |pattern| {
        let rounds = 1 + usize::from(pattern.collective == Collective::AllReduce);
        pattern.flat_hops(rounds * (pattern.nranks - 1))
    },
    steps,
};

/// Returns the steps of `rank`: step i of every ring, in ring order, then step i + 1 of every ring.
fn steps(pattern: &SchedulePattern, rank: usize) -> Vec<Step> {
    let rings: Vec<_> = (0..pattern.ring_count())
        .map(|index| Ring::new(pattern, rank, index).steps(pattern.collective, pattern.root))
        .collect();
    // All rings have equally many steps.
    let nth = |at| rings.iter().map(move |steps: &Vec<Step>| steps[at]);
    (0..rings[0].len()).flat_map(nth).collect()
}

/// A ring as one rank sees it.
struct Ring<'a> {
    nranks: usize,
    order: &'a RankOrder,
    /// Place of the rank in the order.
    place: usize,
    index: usize,
    rings: usize,
}

impl<'a> Ring<'a> {
    fn new(pattern: &'a SchedulePattern, rank: usize, index: usize) -> Ring<'a> {
        let order = pattern.orders.of_ring(index);
        Ring {
            nranks: pattern.nranks,
            order,
            place: order.place(rank),
            index,
            rings: pattern.ring_count(),
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

    /// Passes on the partial sums of all chunks but the rank's own. The chunk of rank c travels
    /// from the rank after c towards c.
    fn scatter_sums(&self) -> Vec<Step> {
        let mut steps = vec![self.begin(Op::Send, self.chunk(1))];
        steps.extend((2..self.nranks).map(|back| {
            let chunk = self.chunk(back);
            self.pass_on(Op::RecvReduceSend, chunk)
        }));
        steps
    }

    /// Passes on the finished chunks of all other ranks, after the rank has sent its own chunk.
    fn spread(&self) -> Vec<Step> {
        let last = self.nranks - 1;
        let mut steps: Vec<_> = (1..last)
            .map(|back| self.pass_on(Op::RecvCopySend, self.chunk(back)))
            .collect();
        steps.push(self.end(Op::Recv, self.chunk(last)));
        steps
    }

    /// Returns this ring's chunk that is owned by the rank `back` positions earlier in the ring.
    fn chunk(&self, back: usize) -> usize {
        self.before(back) * self.rings + self.index
    }

    fn distance_from(&self, root: usize) -> usize {
        (self.place + self.nranks - self.order.place(root)) % self.nranks
    }

    /// Returns the rank `back` positions earlier in the ring; `back` is below the number of ranks.
    fn before(&self, back: usize) -> usize {
        let ahead = match self.index % directions(self.nranks) {
            0 => self.nranks - back,
            _ => back,
        };
        self.order.at((self.place + ahead) % self.nranks)
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
