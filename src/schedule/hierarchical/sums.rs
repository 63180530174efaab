//! all_reduce in rings and two-shots between hosts. Chunk c is part `c / H` by rail, and part
//! `c % H` of that by host: the rank of that host on that rail owns it.

use super::Seat;
use crate::schedule::fan;
use crate::schedule::ir::{Op, Step};

/// Chunk k of a rail starts at host k+1 and is complete at host k, as in a flat ring. All steps but both
/// ends are in stage 1. The first sum, which waits for no other host, leaves in stage 0. Chunks that no
/// further host needs are received in stage 2. So a rank has begun the next pass when it waits for the end
/// of one, and the link to the next host is not idle between passes.
///
/// If contributions were sent and chunks received in the same turn, the rails of a host would run in
/// lockstep, each waiting for the slower one in every turn. So within stage 1 contributions are sent a
/// turn before they are summed, and chunks are received a turn after they were sent. Two messages travel
/// on each connection inside the host.
pub(super) fn ring(seat: &Seat<'_>) -> Vec<Step> {
    let hosts = seat.hosts.count();
    let mut steps = Vec::new();
    for back in 1..=hosts {
        let stage = usize::from(back > 1);
        if back <= 2 {
            contribute(seat, stage, seat.back(back), &mut steps);
        }
        if (2..hosts).contains(&back) {
            contribute(seat, stage, seat.back(back + 1), &mut steps);
        }
        let Some(rail) = rail(seat) else { continue };
        let chunk = chunk(seat, rail, seat.back(back));
        let before = (back > 1).then(|| seat.at(seat.back(1), rail));
        let next = seat.at(seat.ahead(1), rail);
        steps.extend(match back == hosts {
            false => seat.sum(stage, Op::RecvReduceSend, chunk, before, [next]),
            true => {
                let to = std::iter::once(next).chain(seat.others());
                seat.sum(stage, Op::RecvReduceCopySend, chunk, before, to)
            }
        });
    }
    for back in 1..hosts {
        // The host behind the owner's receives the chunk last.
        let last = back + 1 == hosts;
        let stage = if last { 2 } else { 1 };
        if last {
            collect(seat, 1, seat.back(back - 1), &mut steps);
        }
        if let Some(rail) = rail(seat) {
            let before = seat.at(seat.back(1), rail);
            let next = (!last).then(|| seat.at(seat.ahead(1), rail));
            let to = next.into_iter().chain(seat.others());
            let chunk = chunk(seat, rail, seat.back(back));
            steps.extend(fan::forward(stage, chunk, before, to));
        }
        let behind = if last { back } else { back - 1 };
        collect(seat, stage, seat.back(behind), &mut steps);
    }
    steps
}

/// Sends the sums of a host to the owners in stage 0, and the owners' sums to all ranks in stage 1, which
/// receive them in stage 2. Inside a host every message is received in the stage in which it is sent.
pub(super) fn direct(seat: &Seat<'_>) -> Vec<Step> {
    let hosts = seat.hosts.count();
    let mut steps = Vec::new();
    for ahead in 1..hosts {
        let owner = seat.ahead(ahead);
        contribute(seat, 0, owner, &mut steps);
        if let Some(rail) = rail(seat) {
            let (chunk, to) = (chunk(seat, rail, owner), seat.at(owner, rail));
            steps.extend(seat.sum(0, Op::RecvReduceSend, chunk, None, [to]));
        }
    }
    contribute(seat, 1, seat.host, &mut steps);
    if let Some(rail) = rail(seat) {
        let chunk = chunk(seat, rail, seat.host);
        let from = (0..hosts).filter(|&host| host != seat.host);
        let from = from.map(|host| seat.at(host, rail));
        let to = (1..hosts).map(|ahead| seat.at(seat.ahead(ahead), rail));
        let to = to.chain(seat.others());
        steps.extend(seat.sum(1, Op::RecvReduceCopySend, chunk, from, to));
    }
    collect(seat, 1, seat.host, &mut steps);
    for back in 1..hosts {
        let owner = seat.back(back);
        if let Some(rail) = rail(seat) {
            let (chunk, from) = (chunk(seat, rail, owner), seat.at(owner, rail));
            steps.extend(fan::forward(2, chunk, from, seat.others()));
        }
        collect(seat, 2, owner, &mut steps);
    }
    steps
}

/// Sends this rank's contributions to the chunks that the other rails sum for `owner`.
fn contribute(seat: &Seat<'_>, stage: usize, owner: usize, steps: &mut Vec<Step>) {
    for rail in other_rails(seat) {
        let to = seat.at(seat.host, rail);
        steps.push(seat.contribute(stage, chunk(seat, rail, owner), to));
    }
}

/// Receives the chunks that the other rails have from `owner`.
fn collect(seat: &Seat<'_>, stage: usize, owner: usize, steps: &mut Vec<Step>) {
    for rail in other_rails(seat) {
        let from = seat.at(seat.host, rail);
        let step = Step::new(stage, Op::Recv, chunk(seat, rail, owner));
        steps.push(step.from([from]));
    }
}

fn rail(seat: &Seat<'_>) -> Option<usize> {
    (seat.place < seat.hosts.rails()).then_some(seat.place)
}

fn other_rails(seat: &Seat<'_>) -> impl Iterator<Item = usize> + use<> {
    let place = seat.place;
    (0..seat.hosts.rails()).filter(move |&rail| rail != place)
}

fn chunk(seat: &Seat<'_>, rail: usize, owner: usize) -> usize {
    rail * seat.hosts.count() + owner
}
