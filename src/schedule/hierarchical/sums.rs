//! Generates all_reduce with rings, or with a two-shot, between hosts. A rail has one rank of each
//! host, and H is the number of hosts. Chunk c belongs to rail
//! `c / H` and to host `c % H`: the rank of that host on that rail owns the chunk.

use super::Position;
use crate::schedule::fan;
use crate::schedule::ir::{Op, Step};

/// Generates a ring between hosts on each rail. Chunk k of a rail starts at host k+1 and is complete at host
/// k, as in a flat ring. The first sum, which waits for no other host, is sent in stage 0. Chunks that no
/// further host needs are received in stage 2. All other steps are in stage 1. So a rank begins the next pass
/// before it waits for the end of this pass. Its link to the next host stays busy between passes.
///
/// If contributions were sent and chunks received in the same iteration, each rail of a host would wait for
/// the slowest rail in every iteration. So within stage 1 contributions are sent an iteration before they are
/// summed, and chunks are received an iteration after they were sent. Each connection inside the host then
/// has up to two messages in flight.
pub(super) fn ring(position: &Position<'_>) -> Vec<Step> {
    let hosts = position.hosts.count();
    let mut steps = Vec::new();
    for back in 1..=hosts {
        let stage = usize::from(back > 1);
        if back <= 2 {
            contribute(position, stage, position.back(back), &mut steps);
        }
        if (2..hosts).contains(&back) {
            contribute(position, stage, position.back(back + 1), &mut steps);
        }
        let Some(rail) = rail(position) else { continue };
        let chunk = chunk(position, rail, position.back(back));
        let before = (back > 1).then(|| position.at(position.back(1), rail));
        let next = position.at(position.ahead(1), rail);
        steps.extend(match back == hosts {
            false => position.sum(stage, Op::RecvReduceSend, chunk, before, [next]),
            true => {
                let to = std::iter::once(next).chain(position.others());
                position.sum(stage, Op::RecvReduceCopySend, chunk, before, to)
            }
        });
    }
    for back in 1..hosts {
        // The host after the chunk's owner receives the chunk last.
        let last = back + 1 == hosts;
        let stage = if last { 2 } else { 1 };
        if last {
            collect(position, 1, position.back(back - 1), &mut steps);
        }
        if let Some(rail) = rail(position) {
            let before = position.at(position.back(1), rail);
            let next = (!last).then(|| position.at(position.ahead(1), rail));
            let to = next.into_iter().chain(position.others());
            let chunk = chunk(position, rail, position.back(back));
            steps.extend(fan::forward(stage, chunk, before, to));
        }
        let behind = if last { back } else { back - 1 };
        collect(position, stage, position.back(behind), &mut steps);
    }
    steps
}

/// Generates a two-shot between hosts on each rail. Each host sends its sums to the owners in stage 0, and
/// the owners send the total to all ranks in stage 1. Ranks receive the total in stage 2. Inside a host every
/// message is received in the stage in which it is sent.
pub(super) fn direct(position: &Position<'_>) -> Vec<Step> {
    let hosts = position.hosts.count();
    let mut steps = Vec::new();
    for ahead in 1..hosts {
        let owner = position.ahead(ahead);
        contribute(position, 0, owner, &mut steps);
        if let Some(rail) = rail(position) {
            let (chunk, to) = (chunk(position, rail, owner), position.at(owner, rail));
            steps.extend(position.sum(0, Op::RecvReduceSend, chunk, None, [to]));
        }
    }
    contribute(position, 1, position.host, &mut steps);
    if let Some(rail) = rail(position) {
        let chunk = chunk(position, rail, position.host);
        let from = (0..hosts).filter(|&host| host != position.host);
        let from = from.map(|host| position.at(host, rail));
        let to = (1..hosts).map(|ahead| position.at(position.ahead(ahead), rail));
        let to = to.chain(position.others());
        steps.extend(position.sum(1, Op::RecvReduceCopySend, chunk, from, to));
    }
    collect(position, 1, position.host, &mut steps);
    for back in 1..hosts {
        let owner = position.back(back);
        if let Some(rail) = rail(position) {
            let (chunk, from) = (chunk(position, rail, owner), position.at(owner, rail));
            steps.extend(fan::forward(2, chunk, from, position.others()));
        }
        collect(position, 2, owner, &mut steps);
    }
    steps
}

/// Adds steps that send this rank's contributions to the other rails of its host. These rails sum
/// the chunks that host `owner` owns.
fn contribute(position: &Position<'_>, stage: usize, owner: usize, steps: &mut Vec<Step>) {
    for rail in other_rails(position) {
        let to = position.at(position.host, rail);
        steps.push(position.contribute(stage, chunk(position, rail, owner), to));
    }
}

/// Adds steps that receive, from the other rails of this host, the finished chunks that host
/// `owner` owns.
fn collect(position: &Position<'_>, stage: usize, owner: usize, steps: &mut Vec<Step>) {
    for rail in other_rails(position) {
        let from = position.at(position.host, rail);
        let step = Step::new(stage, Op::Recv, chunk(position, rail, owner));
        steps.push(step.from([from]));
    }
}

fn rail(position: &Position<'_>) -> Option<usize> {
    (position.local_rank < position.hosts.rails()).then_some(position.local_rank)
}

fn other_rails(position: &Position<'_>) -> impl Iterator<Item = usize> + use<> {
    let place = position.local_rank;
    (0..position.hosts.rails()).filter(move |&rail| rail != place)
}

fn chunk(position: &Position<'_>, rail: usize, owner: usize) -> usize {
    rail * position.hosts.count() + owner
}
