//! Measuring what links and cores cost, when a communicator is made whose codec is left to the
//! model of costs.

use crate::bootstrap::{OutOfBandRef, PeerInfo};
use crate::cpu::Isa;
use crate::engine::HostEngine;
use crate::error::Result;
use crate::mem::UserBuffers;
use crate::plan::{Affine, MeasuredCosts, Request};
use crate::types::{CodecSpec, Collective, DType, Fused, ReduceOp};
use std::time::Instant;

/// Bytes of the smallest message, of a larger one, and of one that no longer fits the nearest
/// caches and buffers, which is sent where the larger one was quick.
const MESSAGES: [usize; 3] = [64, 32 << 10, 256 << 10];

/// Seconds of a trip of the larger message below which it was quick: else the largest one would
/// take more than a few milliseconds.
const QUICK: f64 = 200e-6;

/// Trips there and back of each size; the first brings both sides in step and does not count.
const TRIPS: usize = 6;

/// Measures this rank's core, which encodes with `spec` among others, and its link to a partner, and
/// gives `engine` what all ranks agreed on. All ranks call it together, right after they have
/// connected: it makes the same calls on both ranks of a pair and two exchanges on all.
///
/// # Errors
/// What stops a message between two ranks; mismatch if a rank says no costs.
pub(super) fn measure(
    exchange: &OutOfBandRef,
    spec: CodecSpec,
    engine: &mut HostEngine,
    isa: Isa,
) -> Result<()> {
    // One after the other: cores are busy with codecs while no message is timed.
    let core = MeasuredCosts::of_core(Affine::default(), spec, isa)?;
    exchange.barrier()?;
    let send = link(exchange, engine)?;
    let said = exchange.all_gather(&MeasuredCosts { send, ..core }.to_bytes())?;
    engine.set_costs(MeasuredCosts::agreed(&said)?);
    Ok(())
}

/// What a message to the partner costs. Zero on the second of a pair, which answers only, and on
/// a rank without a partner: the largest of all ranks counts.
fn link(exchange: &OutOfBandRef, engine: &mut HostEngine) -> Result<Affine> {
    let rank = exchange.rank();
    let Some((first, second)) = pairs(exchange.peers())
        .into_iter()
        .find(|&(first, second)| rank == first || rank == second)
    else {
        return Ok(Affine::default());
    };
    let mut trips = |bytes: usize, trips: usize, mark: u8| -> Result<(f64, u8)> {
        let mut buffer = vec![mark; bytes];
        let mut shortest = f64::INFINITY;
        for trip in 0..trips {
            let start = Instant::now();
            for (from, to) in [(first, second), (second, first)] {
                let buffers = match rank == from {
                    true => UserBuffers::new(&buffer, &mut []),
                    false => UserBuffers::new(&[], &mut buffer),
                };
                let run = engine.prepare(message(from, to, bytes), buffers)?;
                engine.run(run)?;
            }
            if trip > 0 {
                shortest = shortest.min(start.elapsed().as_secs_f64() / 2.0);
            }
        }
        Ok((shortest, buffer[0]))
    };
    let [small, large, largest] = MESSAGES;
    let short = (small, trips(small, TRIPS, 0)?.0);
    let mut long = (large, trips(large, TRIPS, 0)?.0);
    // The first of the pair decides for both, and says so in what it sends.
    let quick = u8::from(rank == first && long.1 < QUICK);
    if trips(small, 1, quick)?.1 == 1 {
        long = (largest, trips(largest, TRIPS, 0)?.0);
    }
    if rank == second {
        return Ok(Affine::default());
    }
    Ok(Affine::through(short, long))
}

/// Disjoint pairs of ranks that all ranks know alike: on different hosts as far as each host has
/// no more than half of all ranks, because the slowest link is the one to know.
fn pairs(peers: &[PeerInfo]) -> Vec<(usize, usize)> {
    let mut by_host: Vec<(usize, usize)> = peers
        .iter()
        .map(|peer| {
            let host = peers.iter().position(|other| other.host_id == peer.host_id);
            (host.unwrap_or(peer.rank), peer.rank)
        })
        .collect();
    by_host.sort_unstable();
    let half = peers.len() / 2;
    (0..half)
        .map(|at| (by_host[at].1, by_host[peers.len() - half + at].1))
        .collect()
}

fn message(from: usize, to: usize, bytes: usize) -> Request {
    Request {
        collective: Collective::SendRecv,
        dtype: DType::U8,
        op: ReduceOp::Sum,
        count: bytes,
        root: from,
        peer: to,
        codec: CodecSpec::RAW,
        intra: CodecSpec::RAW,
        auto: false,
        algorithm: None,
        tensor: None,
        feedback: None,
        fused: Fused::ALONE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(hosts: &[u8]) -> Vec<PeerInfo> {
        let peer = |(rank, &host): (usize, &u8)| PeerInfo {
            rank,
            pid: 1,
            uid: 1,
            host: String::new(),
            host_id: [host; 16],
            process_id: [rank as u8; 16],
            address: [127, 0, 0, 1].into(),
        };
        hosts.iter().enumerate().map(peer).collect()
    }

    #[test]
    fn pairs_are_disjoint_and_cross_hosts() {
        assert_eq!(pairs(&peers(&[7])), []);
        assert_eq!(pairs(&peers(&[7, 7, 7])), [(0, 2)]);
        for hosts in [
            &[1, 1, 2, 2][..],
            &[1, 2, 1, 2],
            &[2, 1, 3, 1, 2, 3],
            &[1, 1, 2, 2, 3],
        ] {
            let found = pairs(&peers(hosts));
            let mut ranks: Vec<usize> = found.iter().flat_map(|&(a, b)| [a, b]).collect();
            ranks.sort_unstable();
            ranks.dedup();
            assert_eq!(ranks.len(), hosts.len() / 2 * 2, "{hosts:?}: {found:?}");
            for (a, b) in found {
                assert_ne!(hosts[a], hosts[b], "{hosts:?}");
            }
        }
    }
}
