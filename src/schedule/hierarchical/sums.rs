//! Generates all_reduce with rings, or with a two-shot, between groups. A rail has one rank of each
//! group, and G is the number of groups. Chunk c belongs to rail
//! `c / G` and to group `c % G`: the rank of that group on that rail owns the chunk.

use super::Position;
use crate::schedule::fan;
use crate::schedule::ir::{Op, Step};

/// Generates a ring between groups on each rail. Chunk k of a rail starts at group k+1 and is complete at
/// group k, as in a flat ring. The first sum, which waits for no other group, is sent in stage 0. Chunks that
/// no further group needs are received in stage 2. All other steps are in stage 1. So a rank begins the next
/// pass before it waits for the end of this pass. Its link to the next group stays busy between passes.
///
/// If contributions were sent and chunks received in the same iteration, each rail of a group would wait for
/// the slowest rail in every iteration. So within stage 1 contributions are sent an iteration before they are
/// summed, and chunks are received an iteration after they were sent. Each connection inside the group then
/// has up to two messages of a rail in flight.
pub(super) fn ring(position: &Position<'_>) -> Vec<Step> {
    let groups = position.groups.count();
    let mut steps = Vec::new();
    for back in 1..=groups {
        let stage = usize::from(back > 1);
        if back <= 2 {
            contribute(position, stage, position.back(back), &mut steps);
        }
        if (2..groups).contains(&back) {
            contribute(position, stage, position.back(back + 1), &mut steps);
        }
        for rail in position.rails(true) {
            let chunk = chunk(position, rail, position.back(back));
            let before = (back > 1).then(|| position.at(position.back(1), rail));
            let next = position.at(position.ahead(1), rail);
            steps.extend(match back == groups {
                false => position.sum(stage, Op::RecvReduceSend, chunk, before, [next]),
                true => {
                    let to = std::iter::once(next).chain(position.others());
                    position.sum(stage, Op::RecvReduceCopySend, chunk, before, to)
                }
            });
        }
    }
    spread(position, &mut steps);
    steps
}

/// Adds steps that pass finished chunks from group to group, after each group has sent its own to the next.
fn spread(position: &Position<'_>, steps: &mut Vec<Step>) {
    let groups = position.groups.count();
    for back in 1..groups {
        // The group after the chunk's owner receives the chunk last.
        let last = back + 1 == groups;
        let stage = if last { 2 } else { 1 };
        if last {
            collect(position, 1, position.back(back - 1), steps);
        }
        for rail in position.rails(true) {
            let before = position.at(position.back(1), rail);
            let next = (!last).then(|| position.at(position.ahead(1), rail));
            let to = next.into_iter().chain(position.others());
            let chunk = chunk(position, rail, position.back(back));
            steps.extend(fan::forward(stage, chunk, before, to));
        }
        let behind = if last { back } else { back - 1 };
        collect(position, stage, position.back(behind), steps);
    }
}

/// Generates a two-shot between groups on each rail. Each group sends its sums to the owners in stage 0, and
/// the owners send the total to all ranks in stage 1. Ranks receive the total in stage 2. Inside a group every
/// message is received in the stage in which it is sent.
///
/// Inside a host, owners send the total to the next group only, and it goes round as in [`ring`]: a group
/// sends to one other group at a time, and as many bytes. Each rank receives the bytes that the owner
/// encoded, so a codec rounds no more than if the owner sent them.
pub(super) fn direct(position: &Position<'_>) -> Vec<Step> {
    let groups = position.groups.count();
    let goes_round = position.groups.are_inside_host();
    let mut steps = Vec::new();
    for ahead in 1..groups {
        let owner = position.ahead(ahead);
        contribute(position, 0, owner, &mut steps);
        for rail in position.rails(true) {
            let (chunk, to) = (chunk(position, rail, owner), position.at(owner, rail));
            steps.extend(position.sum(0, Op::RecvReduceSend, chunk, None, [to]));
        }
    }
    contribute(position, 1, position.group, &mut steps);
    for rail in position.rails(true) {
        let chunk = chunk(position, rail, position.group);
        let from = (0..groups).filter(|&group| group != position.group);
        let from = from.map(|group| position.at(group, rail));
        let last = if goes_round { 1 } else { groups - 1 };
        let to = (1..=last).map(|ahead| position.at(position.ahead(ahead), rail));
        let to = to.chain(position.others());
        steps.extend(position.sum(1, Op::RecvReduceCopySend, chunk, from, to));
    }
    if goes_round {
        spread(position, &mut steps);
        return steps;
    }
    collect(position, 1, position.group, &mut steps);
    for back in 1..groups {
        let owner = position.back(back);
        for rail in position.rails(true) {
            let (chunk, from) = (chunk(position, rail, owner), position.at(owner, rail));
            steps.extend(fan::forward(2, chunk, from, position.others()));
        }
        collect(position, 2, owner, &mut steps);
    }
    steps
}

/// Adds steps that send this rank's contributions to the other rails of its group. These rails sum
/// the chunks that group `owner` owns.
fn contribute(position: &Position<'_>, stage: usize, owner: usize, steps: &mut Vec<Step>) {
    for rail in position.rails(false) {
        let to = position.at(position.group, rail);
        steps.push(position.contribute(stage, chunk(position, rail, owner), to));
    }
}

/// Adds steps that receive, from the other rails of this group, the finished chunks that group
/// `owner` owns.
fn collect(position: &Position<'_>, stage: usize, owner: usize, steps: &mut Vec<Step>) {
    for rail in position.rails(false) {
        let from = position.at(position.group, rail);
        let step = Step::new(stage, Op::Recv, chunk(position, rail, owner));
        steps.push(step.from([from]));
    }
}

fn chunk(position: &Position<'_>, rail: usize, owner: usize) -> usize {
    rail * position.groups.count() + owner
}
