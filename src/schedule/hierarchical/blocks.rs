//! Generates hierarchical schedules of collectives with a block for each rank. Each block has an owner, whose
//! place is its index among its group's ranks. In every other group, the rank at that place, modulo the group's
//! number of ranks, relays the block.
//!
//! Each group handles the blocks of another group in rounds of as many blocks as it has ranks. Each rank
//! relays one block per round, so that each connection inside the group carries one message.

use super::Position;
use crate::schedule::fan;
use crate::schedule::groups::Groups;
use crate::schedule::ir::{Op, Step};
use std::iter::empty;

/// Sends this group's sum of each block to the block's owner in stage 0, one group after the other. The owner
/// adds the sums in stage 2, together with the contributions of its own group.
pub(super) fn reduce_scatter(position: &Position<'_>) -> Vec<Step> {
    let groups = position.groups.count();
    let mut steps = Vec::new();
    for ahead in 1..groups {
        for blocks in rounds(position, position.ahead(ahead)) {
            for (place, &block) in blocks.iter().enumerate() {
                if place != position.place {
                    let relay = position.at(position.group, place);
                    steps.push(position.contribute(0, block as usize, relay));
                }
            }
            if let Some(&block) = blocks.get(position.place) {
                let block = block as usize;
                steps.extend(position.sum(0, Op::RecvReduceSend, block, None, [block]));
            }
        }
    }
    let mine = |other| position.contribute(2, other, other);
    steps.extend(position.others().map(mine));
    let elsewhere = (0..groups).filter(|&group| group != position.group);
    let relays = elsewhere.map(|group| position.at(group, position.place));
    steps.extend(position.sum(2, Op::RecvReduceCopy, position.rank, relays, empty()));
    steps
}

/// Returns the number of stages of an all_gather on `groups`.
pub(super) fn all_gather_stages(groups: &Groups) -> usize {
    match groups.are_inside_host() {
        true => groups.count() + 1,
        false => 3,
    }
}

/// Sends this rank's block to its relays in other groups, and to the other ranks of its group. Relays forward
/// it inside their groups, two stages after it was sent.
///
/// Hosts send to all relays in stage 0. Inside a host, a group sends to its nth neighbour in stage n-1, so that
/// it sends to one group at a stage. The block is then encoded once for each.
pub(super) fn all_gather(position: &Position<'_>) -> Vec<Step> {
    let groups = position.groups.count();
    let block = position.rank;
    let relay = |ahead| position.at(position.ahead(ahead), position.place);
    let stage_of = |ahead: usize| match position.groups.are_inside_host() {
        true => ahead - 1,
        false => 0,
    };
    let last = stage_of(groups - 1);
    let mut steps = Vec::new();
    for ahead in (1..groups).filter(|&ahead| stage_of(ahead) < last) {
        steps.extend(fan::send(stage_of(ahead), block, [relay(ahead)]));
    }
    // In place, the last send overwrites the input, so all others come before it.
    let relays = (1..groups).filter(|&ahead| stage_of(ahead) == last);
    let to = relays.map(relay).chain(position.others());
    steps.extend(fan::source(last, block, to));
    let recv = |stage, block: usize, from: usize| Step::new(stage, Op::Recv, block).from([from]);
    steps.extend(position.others().map(|other| recv(last, other, other)));
    for back in 1..groups {
        let stage = stage_of(back) + 2;
        for blocks in rounds(position, position.back(back)) {
            if let Some(&block) = blocks.get(position.place) {
                let block = block as usize;
                steps.extend(fan::forward(stage, block, block, position.others()));
            }
            for (place, &block) in blocks.iter().enumerate() {
                if place != position.place {
                    let relay = position.at(position.group, place);
                    steps.push(recv(stage, block as usize, relay));
                }
            }
        }
    }
    steps
}

/// Returns the blocks of `group`, in rounds of as many blocks as this rank's group has ranks.
fn rounds<'a>(position: &Position<'a>, group: usize) -> std::slice::Chunks<'a, u32> {
    let ranks = position.groups.ranks(position.group).len();
    position.groups.ranks(group).chunks(ranks)
}
