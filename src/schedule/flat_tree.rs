//! Flat tree: rank 0 forms the sum of all contributions and sends it to everyone. For N ranks and a message of S
//! bytes:
//!
//! | collective | phases | bytes sent by a rank |
//! | --- | --- | --- |
//! | all_reduce | everyone's contribution to rank 0; rank 0's sum to everyone | S; rank 0: S (N-1) |
//!
//! It has the fewest messages of all algorithms, and each rank waits once. So it is for hosts with many ranks for
//! a core, where a wait costs a turn of all of them. Reduce and broadcast by one-shot are flat trees, too.
//!
//! The sum is formed in rank order. Stage i sends phase i, for which two slots are enough.

use super::chunks::SchedulePattern;
use super::fan::{self, OwnTerm};
use super::generator::Generator;
use super::ir::{Op, Step};
use crate::types::{Algorithm, Collective};

/// The rank that forms the sum.
const ROOT: usize = 0;

pub(super) const GENERATOR: Generator = Generator {
    algorithm: Algorithm::FlatTree,
    collectives: &[Collective::AllReduce],
    parts: |_| 1,
    slots: |_| 2,
    stages: |_| 3,
    hops: |pattern| pattern.flat_hops(2),
    steps,
};

fn steps(pattern: &SchedulePattern, rank: usize) -> Vec<Step> {
    let SchedulePattern {
        collective, nranks, ..
    } = *pattern;
    match (collective, rank) {
        (Collective::AllReduce, ROOT) => {
            let at = Step::new(1, Op::RecvReduceCopySend, 0);
            let others = fan::after(rank, nranks);
            fan::sum_in_rank_order(at, rank, nranks, OwnTerm::Exact, others)
        }
        (Collective::AllReduce, _) => {
            let mut steps = fan::send(0, 0, [ROOT]);
            steps.extend(fan::forward(2, 0, ROOT, []));
            steps
        }
        _ => Vec::new(),
    }
}
