//! Generates hierarchical schedules of collectives with a block for each rank. Each block has an owner, whose
//! place is its index among its host's ranks. On every other host, the rank at that place, modulo the host's
//! number of ranks, relays the block.
//!
//! Each host handles the blocks of another host in rounds of as many blocks as it has ranks. Each rank relays
//! one block per round, so that each connection inside the host carries one message.

use super::Position;
use crate::schedule::fan;
use crate::schedule::ir::{Op, Step};
use std::iter::empty;

/// Sends this host's sum of each block to the block's owner in stage 0. The owner adds the sums in stage 2,
/// together with the contributions of its own host.
pub(super) fn reduce_scatter(position: &Position<'_>) -> Vec<Step> {
    let hosts = position.hosts.count();
    let mut steps = Vec::new();
    for ahead in 1..hosts {
        for blocks in rounds(position, position.ahead(ahead)) {
            for (place, &block) in blocks.iter().enumerate() {
                if place != position.local_rank {
                    let relay = position.at(position.host, place);
                    steps.push(position.contribute(0, block as usize, relay));
                }
            }
            if let Some(&block) = blocks.get(position.local_rank) {
                let block = block as usize;
                steps.extend(position.sum(0, Op::RecvReduceSend, block, None, [block]));
            }
        }
    }
    let mine = |other| position.contribute(2, other, other);
    steps.extend(position.others().map(mine));
    let elsewhere = (0..hosts).filter(|&host| host != position.host);
    let relays = elsewhere.map(|host| relay(position, host));
    steps.extend(position.sum(2, Op::RecvReduceCopy, position.rank, relays, empty()));
    steps
}

/// Sends this rank's block to its relays on other hosts, and to the other ranks of its host, in stage 0.
/// Relays forward it inside their hosts in stage 2.
pub(super) fn all_gather(position: &Position<'_>) -> Vec<Step> {
    let hosts = position.hosts.count();
    let relays = (1..hosts).map(|ahead| relay(position, position.ahead(ahead)));
    let mut steps = fan::source(0, position.rank, relays.chain(position.others()));
    let recv = |stage, block: usize, from: usize| Step::new(stage, Op::Recv, block).from([from]);
    steps.extend(position.others().map(|other| recv(0, other, other)));
    for back in 1..hosts {
        for blocks in rounds(position, position.back(back)) {
            if let Some(&block) = blocks.get(position.local_rank) {
                let block = block as usize;
                steps.extend(fan::forward(2, block, block, position.others()));
            }
            for (place, &block) in blocks.iter().enumerate() {
                if place != position.local_rank {
                    steps.push(recv(2, block as usize, position.at(position.host, place)));
                }
            }
        }
    }
    steps
}

/// Returns the blocks of `host`, in rounds of as many blocks as this rank's host has ranks.
fn rounds<'a>(position: &Position<'a>, host: usize) -> std::slice::Chunks<'a, u32> {
    let ranks = position.hosts.ranks(position.host).len();
    position.hosts.ranks(host).chunks(ranks)
}

/// Returns the rank of `host` that relays this rank's block.
fn relay(position: &Position<'_>, host: usize) -> usize {
    let ranks = position.hosts.ranks(host);
    ranks[position.local_rank % ranks.len()] as usize
}
