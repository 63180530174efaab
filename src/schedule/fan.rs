//! Builds steps that send to, or receive from, any number of peers, as chains of steps with at most
//! [`MAX_FAN`] peers each.

use super::ir::{MAX_FAN, Op, Own, Step};
use crate::types::Level;

/// Returns the other ranks in ascending order from `rank` + 1, modulo `nranks`. Every rank starts at another
/// rank, so that no rank receives from all others at once.
pub(super) fn after(rank: usize, nranks: usize) -> impl Iterator<Item = usize> + use<> {
    (1..nranks).map(move |i| (rank + i) % nranks)
}

/// Returns the other ranks in descending order from `rank` - 1, modulo `nranks`. Messages that all ranks send
/// in the order of [`after`] arrive in this order.
pub(super) fn before(rank: usize, nranks: usize) -> impl Iterator<Item = usize> + use<> {
    (1..nranks).map(move |i| (rank + nranks - i) % nranks)
}

/// Selects whether a rank adds its own contribution exactly, or encoded and decoded as its peers
/// receive it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OwnTerm {
    Exact,
    Coded,
}

/// Returns steps in which `rank` sums over all ranks, in rank order, and sends the sum to `to`. With this
/// order the result does not depend on how a message is divided into chunks.
pub(super) fn sum_in_rank_order(
    at: Step,
    rank: usize,
    nranks: usize,
    own: OwnTerm,
    to: impl IntoIterator<Item = usize>,
) -> Vec<Step> {
    let others: Vec<usize> = (0..nranks).filter(|&other| other != rank).collect();
    sum(at, &[(at.takes, &others)], (own, rank), to)
}

/// Returns steps that sum the messages of the ranks in each of `groups`, in this order. Messages of a group
/// are encoded by the codec for the group's [`Level`]. The rank's own contribution follows `before` terms of
/// the first group. The sum is sent to `to`.
pub(super) fn sum(
    at: Step,
    groups: &[(Level, &[usize])],
    (own, before): (OwnTerm, usize),
    to: impl IntoIterator<Item = usize>,
) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut first = 0;
    for (index, (level, from)) in groups.iter().enumerate() {
        let fans = fans(from.iter().copied());
        steps.extend(fans.map(|from| at.own(Own::Absent).takes(*level).from(from)));
        if index == 0 {
            first = steps.len();
        }
    }
    if steps.is_empty() {
        steps.push(at);
    }
    let home = (before / MAX_FAN).min(first.max(1) - 1);
    let after = (before - home * MAX_FAN) as u8;
    steps[home].own = match own {
        OwnTerm::Exact => Own::Exact { after },
        OwnTerm::Coded => Own::Coded { after },
    };
    let mut fans = fans(to);
    if let (Some(last), Some(fan)) = (steps.last_mut(), fans.next()) {
        *last = last.to(fan);
    }
    steps.extend(fans.map(|fan| at.own(Own::Absent).to(fan)));
    chain(steps)
}

/// Returns steps that send the input to all of `to`. They do not write the sender's output.
pub(super) fn send(stage: usize, chunk: usize, to: impl IntoIterator<Item = usize>) -> Vec<Step> {
    fans(to)
        .map(|fan| Step::new(stage, Op::Send, chunk).to(fan))
        .collect()
}

/// Returns steps that send the input to all of `to`, and write the decoded values to the output, so that it
/// equals the receivers' outputs. The write comes last, because in place the output is the input.
pub(super) fn source(stage: usize, chunk: usize, to: impl IntoIterator<Item = usize>) -> Vec<Step> {
    let mut steps = send(stage, chunk, to);
    if let Some(last) = steps.last_mut() {
        last.op = Op::RecvReduceCopySend;
        last.own = Own::FIRST;
    }
    steps
}

/// Returns steps that receive a message from `from`, write it to the output, and forward its bytes
/// unchanged to all of `to`.
pub(super) fn forward(
    stage: usize,
    chunk: usize,
    from: usize,
    to: impl IntoIterator<Item = usize>,
) -> Vec<Step> {
    let at = |op| Step::new(stage, op, chunk).from([from]);
    let mut steps: Vec<_> = fans(to).map(|fan| at(Op::RecvCopySend).to(fan)).collect();
    if steps.is_empty() {
        steps.push(at(Op::Recv));
    }
    chain(steps)
}

/// Divides peers into groups of at most [`MAX_FAN`].
fn fans(peers: impl IntoIterator<Item = usize>) -> impl Iterator<Item = Vec<usize>> {
    let mut peers = peers.into_iter();
    std::iter::from_fn(move || {
        let fan: Vec<_> = peers.by_ref().take(MAX_FAN).collect();
        (!fan.is_empty()).then_some(fan)
    })
}

fn chain(mut steps: Vec<Step>) -> Vec<Step> {
    if let Some((_, continued)) = steps.split_last_mut() {
        for step in continued {
            step.more = true;
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the ranks whose contributions a chain adds, in order; `usize::MAX` stands for the
    /// rank's own contribution.
    fn terms(steps: &[Step]) -> Vec<usize> {
        let mut terms = Vec::new();
        for step in steps {
            let at = terms.len();
            terms.extend(step.recv_from.iter().map(|&rank| rank as usize));
            if let Some(after) = step.own.after() {
                terms.insert(at + after, usize::MAX);
            }
        }
        terms
    }

    #[test]
    fn own_term_stands_at_its_rank() {
        for nranks in 1..=35 {
            for rank in 0..nranks {
                let at = Step::new(0, Op::RecvReduceCopySend, 0);
                let to: Vec<_> = after(rank, nranks).collect();
                let steps = sum_in_rank_order(at, rank, nranks, OwnTerm::Exact, to.iter().copied());
                let mut expected: Vec<_> = (0..nranks).collect();
                expected[rank] = usize::MAX;
                assert_eq!(terms(&steps), expected, "rank {rank} of {nranks}");
                let sent: Vec<_> = steps
                    .iter()
                    .flat_map(|s| s.send_to.iter().map(|&r| r as usize))
                    .collect();
                assert_eq!(sent, to);
                let more: Vec<_> = steps.iter().map(|step| step.more).collect();
                let last = steps.len() - 1;
                assert!((0..=last).all(|i| more[i] == (i < last)));
            }
        }
    }
}
