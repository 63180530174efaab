//! One-shot: one message between any two ranks that exchange data; the least latency.
//! For N ranks and a message of S bytes:
//!
//! | collective | phases | bytes sent by a rank |
//! | --- | --- | --- |
//! | all_reduce | everyone sends all to everyone; everyone sums all | S (N-1) |
//! | broadcast | the root sends to everyone | root: S (N-1) |
//! | reduce | everyone sends to the root | S; root: 0 |
//!
//! In an all_reduce every rank forms the same sum for itself. The bits agree because all ranks add in
//! rank order, and decode their own contribution as the other ranks do.
//!
//! An all_reduce receives two stages after it sends: with two slots a rank may be a whole pass
//! ahead of its peers.

use super::chunks::SchedulePattern;
use super::fan::{self, OwnTerm};
use super::generator::Generator;
use super::ir::{Op, Step};
use crate::types::{Algorithm, Collective};

pub(super) const GENERATOR: Generator = Generator {
    algorithm: Algorithm::OneShot,
    collectives: &[
        Collective::AllReduce,
        Collective::Broadcast,
        Collective::Reduce,
    ],
    parts: |_| 1,
    slots: |_| 2,
    stages,
    hops: |pattern| pattern.flat_hops(1),
    steps,
};

fn stages(pattern: &SchedulePattern) -> usize {
    if pattern.collective == Collective::AllReduce {
        3
    } else {
        1
    }
}

fn steps(pattern: &SchedulePattern, rank: usize) -> Vec<Step> {
    let SchedulePattern { nranks, root, .. } = *pattern;
    let sum = |stage, own| {
        let at = Step::new(stage, Op::RecvReduceCopy, 0);
        fan::sum_in_rank_order(at, rank, nranks, own, [])
    };
    match pattern.collective {
        Collective::AllReduce => {
            let mut steps = fan::send(0, 0, fan::after(rank, nranks));
            steps.extend(sum(2, OwnTerm::Coded));
            steps
        }
        Collective::Broadcast if rank == root => fan::source(0, 0, fan::after(rank, nranks)),
        Collective::Broadcast => fan::forward(0, 0, root, []),
        Collective::Reduce if rank == root => sum(0, OwnTerm::Exact),
        Collective::Reduce => fan::send(0, 0, [root]),
        _ => Vec::new(),
    }
}
