//! Collectives with a block for each rank. On hosts other than its owner's, a block is relayed by the
//! rank at the owner's place, modulo the host's number of ranks.
//!
//! Blocks of a host come in rounds of as many as this host has ranks. Each rank relays one block per
//! round, so each connection inside the host carries one message.

use super::Seat;
use crate::schedule::fan;
use crate::schedule::ir::{Op, Step};
use std::iter::empty;

/// Sends the sums of this host to the blocks' owners in stage 0. The owner of a block adds them in stage 2,
/// together with the contributions of its own host.
pub(super) fn reduce_scatter(seat: &Seat<'_>) -> Vec<Step> {
    let hosts = seat.hosts.count();
    let mut steps = Vec::new();
    for ahead in 1..hosts {
        for blocks in rounds(seat, seat.ahead(ahead)) {
            for (place, &block) in blocks.iter().enumerate() {
                if place != seat.place {
                    let relay = seat.at(seat.host, place);
                    steps.push(seat.contribute(0, block as usize, relay));
                }
            }
            if let Some(&block) = blocks.get(seat.place) {
                let block = block as usize;
                steps.extend(seat.sum(0, Op::RecvReduceSend, block, None, [block]));
            }
        }
    }
    let mine = |other| seat.contribute(2, other, other);
    steps.extend(seat.others().map(mine));
    let elsewhere = (0..hosts).filter(|&host| host != seat.host);
    let relays = elsewhere.map(|host| relay(seat, host));
    steps.extend(seat.sum(2, Op::RecvReduceCopy, seat.rank, relays, empty()));
    steps
}

/// Sends this rank's block to its relays and to the ranks of its host in stage 0. Relays forward it in
/// stage 2.
pub(super) fn all_gather(seat: &Seat<'_>) -> Vec<Step> {
    let hosts = seat.hosts.count();
    let relays = (1..hosts).map(|ahead| relay(seat, seat.ahead(ahead)));
    let mut steps = fan::source(0, seat.rank, relays.chain(seat.others()));
    let recv = |stage, block: usize, from: usize| Step::new(stage, Op::Recv, block).from([from]);
    steps.extend(seat.others().map(|other| recv(0, other, other)));
    for back in 1..hosts {
        for blocks in rounds(seat, seat.back(back)) {
            if let Some(&block) = blocks.get(seat.place) {
                let block = block as usize;
                steps.extend(fan::forward(2, block, block, seat.others()));
            }
            for (place, &block) in blocks.iter().enumerate() {
                if place != seat.place {
                    steps.push(recv(2, block as usize, seat.at(seat.host, place)));
                }
            }
        }
    }
    steps
}

/// Returns the blocks of `host`, in rounds of as many as this host has ranks.
fn rounds<'a>(seat: &Seat<'a>, host: usize) -> std::slice::Chunks<'a, u32> {
    let ranks = seat.hosts.ranks(seat.host).len();
    seat.hosts.ranks(host).chunks(ranks)
}

/// Returns the rank of `host` that relays this rank's block.
fn relay(seat: &Seat<'_>, host: usize) -> usize {
    let ranks = seat.hosts.ranks(host);
    ranks[seat.place % ranks.len()] as usize
}
