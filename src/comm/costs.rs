//! Measurement of links and cores for a communicator on host memory whose codec is optional (`auto:`).

use crate::bootstrap::{OutOfBandRef, PeerInfo};
use crate::cpu::Isa;
use crate::engine::HostEngine;
use crate::error::Result;
use crate::mem::UserBuffers;
use crate::plan::{Affine, MeasuredCosts};
use crate::types::{Call, CodecSetting, CodecSpec, Collective, DType, ResolvedCall};
use std::time::Instant;

/// Bytes of the timed messages. The largest exceeds the nearest caches and buffers; it is sent only
/// if the second was fast.
const MESSAGES: [usize; 3] = [64, 32 << 10, 256 << 10];

/// Longest trip of the second message, in seconds, after which the largest message is still sent.
/// The largest message then takes a few milliseconds at most.
const QUICK_TRIP: f64 = 200e-6;

/// Round trips of each size; the first only synchronises both sides and does not count.
const TRIPS: usize = 6;

/// Measures this rank's core, with `specs` and the other codecs, and its link to a partner. Gives
/// `engine` the costs on which all ranks agree.
///
/// All ranks call it together, right after they have connected. Both ranks of a pair send the same
/// messages, and all ranks take part in two exchanges.
///
/// # Errors
/// Errors of a message between two ranks; mismatch if a rank sends no costs.
pub(super) fn measure(
    exchange: &OutOfBandRef,
    specs: &[CodecSpec],
    engine: &mut HostEngine,
    isa: Isa,
) -> Result<()> {
    // Without the barrier codecs could run on a core while messages are timed on another core.
    let core = MeasuredCosts::of_core(Affine::default(), specs, isa)?;
    exchange.barrier()?;
    let send = link(exchange, engine)?;
    let parts = exchange.all_gather(&MeasuredCosts { send, ..core }.to_bytes())?;
    engine.set_costs(MeasuredCosts::agreed(&parts)?);
    Ok(())
}

/// Measures the time of messages to the partner of this rank. Returns zero on the second rank of a pair and
/// on a rank without a partner, because the largest cost of all ranks counts.
fn link(exchange: &OutOfBandRef, engine: &mut HostEngine) -> Result<Affine> {
    let rank = exchange.rank();
    let Some((first, second)) = pairs(exchange.peers())
        .into_iter()
        .find(|&(first, second)| rank == first || rank == second)
    else {
        return Ok(Affine::default());
    };
    let mut trips = |bytes: usize, trips: usize, content: u8| -> Result<(f64, u8)> {
        let mut buffer = vec![content; bytes];
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
    // The first rank of the pair decides for both ranks, by the content of its message.
    let quick = u8::from(rank == first && long.1 < QUICK_TRIP);
    if trips(small, 1, quick)?.1 == 1 {
        long = (largest, trips(largest, TRIPS, 0)?.0);
    }
    if rank == second {
        return Ok(Affine::default());
    }
    Ok(Affine::through(short, long))
}

/// Returns disjoint pairs of ranks, equal on all ranks. The ranks of a pair are on different hosts, if
/// no host has more than half of all ranks, because the slowest link decides.
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

fn message(from: usize, to: usize, bytes: usize) -> ResolvedCall {
    let call = Call {
        root: from,
        peer: to,
        ..Call::new(Collective::SendRecv, DType::U8, bytes)
    };
    call.resolve(CodecSetting::RAW)
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
