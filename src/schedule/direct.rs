//! Direct: every chunk goes straight to the ranks that need it, in two shots where one message is not
//! enough. For N ranks and a message (or block) of S bytes:
//!
//! | collective | phases | bytes sent by a rank |
//! | --- | --- | --- |
//! | all_reduce | each rank's contribution to every chunk to its owner; the owner's sum to everyone | 2 S (N-1)/N |
//! | reduce | each rank's contribution to every chunk to its owner; the owner's sum to the root | S (N-1)/N, then S/N |
//! | broadcast | the root sends each chunk to its owner; the owner to everyone else | root: S (2N-2)/N; else S (N-2)/N |
//! | reduce_scatter | each rank's contribution to every block to the block's rank, which sums | S (N-1) |
//! | all_gather | each rank's block to everyone | S (N-1) |
//! | all_to_all | a block to everyone | S (N-1) |
//! | gather, scatter | a block to, or from, the root | S; root of a scatter: S (N-1) |
//! | send_recv | the message | S |
//!
//! Sums are formed in rank order, so a result does not depend on the chunk's owner. A pre-multiplied sum
//! is the exception: the owner adds its own product without rounding it to the element type first. A rank
//! sends first to its neighbour, so that no rank receives from all others at once.
//!
//! With two phases, stage i sends phase i. With one phase, a rank receives two stages after it sends.
//! Both need two slots per connection, and let a rank run as far ahead of its peers as two slots allow.

use super::chunks::SchedulePattern;
use super::fan::{self, OwnTerm};
use super::generator::Generator;
use super::ir::{Op, Step};
use crate::types::{Algorithm, Collective};
use std::iter::{empty, once};

pub(super) const GENERATOR: Generator = Generator {
    algorithm: Algorithm::Direct,
    collectives: &Collective::ALL,
    parts: |pattern| match pattern.collective {
        Collective::AllReduce | Collective::Broadcast | Collective::Reduce => pattern.nranks,
        _ => 1,
    },
    slots: |_| 2,
    stages,
    hops: |pattern| {
        pattern.flat_hops(match pattern.collective {
            Collective::AllReduce | Collective::Reduce => 2,
            // With two ranks the owner of a chunk has no third rank to forward it to.
            Collective::Broadcast => 1 + usize::from(pattern.nranks > 2),
            _ => 1,
        })
    },
    steps,
};

fn stages(pattern: &SchedulePattern) -> usize {
    match pattern.collective {
        Collective::Gather | Collective::Scatter | Collective::SendRecv => 1,
        _ => 3,
    }
}

fn steps(pattern: &SchedulePattern, rank: usize) -> Vec<Step> {
    let SchedulePattern {
        nranks, root, peer, ..
    } = *pattern;
    let after = || fan::after(rank, nranks);
    let before = || fan::before(rank, nranks);
    let sum = |stage, op, to: &mut dyn Iterator<Item = usize>| {
        let at = Step::new(stage, op, rank);
        fan::sum_in_rank_order(at, rank, nranks, OwnTerm::Exact, to)
    };
    let send = |chunk, to| Step::new(0, Op::Send, chunk).to([to]);
    let recv = |stage, chunk, from| Step::new(stage, Op::Recv, chunk).from([from]);
    let copy = |chunk| Step::new(0, Op::Copy, chunk);
    // Sends each peer this rank's contribution to the part whose sum that peer owns.
    let parts = || after().map(|owner| send(owner, owner));

    let mut steps = Vec::new();
    match pattern.collective {
        Collective::AllReduce => {
            steps.extend(parts());
            steps.extend(sum(1, Op::RecvReduceCopySend, &mut after()));
            steps.extend(before().map(|owner| recv(2, owner, owner)));
        }
        Collective::ReduceScatter => {
            steps.extend(parts());
            steps.extend(sum(2, Op::RecvReduceCopy, &mut empty()));
        }
        Collective::Reduce => {
            steps.extend(parts());
            if rank != root {
                steps.extend(sum(1, Op::RecvReduceFinishSend, &mut once(root)));
            } else {
                steps.extend(sum(1, Op::RecvReduceCopy, &mut empty()));
                // Owners have divided an average, as the root has divided its own chunk.
                steps.extend(before().map(|owner| recv(2, owner, owner)));
            }
        }
        Collective::Broadcast if rank == root => {
            let to_owner = |owner| Step::new(0, Op::RecvReduceCopySend, owner).to([owner]);
            steps.extend(after().map(to_owner));
            steps.extend(fan::source(0, root, after()));
        }
        Collective::Broadcast => {
            let third = |other: &usize| *other != root;
            steps.extend(fan::forward(1, rank, root, after().filter(third)));
            // The root sends its own chunk last, to all ranks. They receive it in stage 1, as they
            // do all that the root sends in stage 0.
            steps.push(recv(1, root, root));
            let owners = before().filter(third);
            steps.extend(owners.map(|owner| recv(2, owner, owner)));
        }
        Collective::AllGather => {
            steps.extend(fan::source(0, rank, after()));
            steps.extend(before().map(|from| recv(2, from, from)));
        }
        Collective::Gather if rank == root => {
            steps.push(copy(rank));
            steps.extend(before().map(|from| recv(0, from, from)));
        }
        Collective::Gather => steps.push(send(rank, root)),
        Collective::Scatter if rank == root => {
            steps.extend(parts());
            steps.push(copy(rank));
        }
        Collective::Scatter => steps.push(recv(0, rank, root)),
        Collective::AllToAll => {
            steps.extend(after().map(|to| send(rank * nranks + to, to)));
            steps.push(copy(rank * nranks + rank));
            let chunks = before().map(|from| (from * nranks + rank, from));
            steps.extend(chunks.map(|(chunk, from)| recv(2, chunk, from)));
        }
        Collective::SendRecv if root == peer => steps.extend((rank == root).then(|| copy(0))),
        Collective::SendRecv if rank == root => steps.push(send(0, peer)),
        Collective::SendRecv => steps.extend((rank == peer).then(|| recv(0, 0, root))),
    }
    steps
}
