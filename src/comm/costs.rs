//! Measurement of links and cores, or of calls on GPUs, for a communicator whose codec is optional (`auto:`).

use crate::bootstrap::{OutOfBandRef, PeerInfo};
use crate::codec::info;
use crate::config::CodecPolicy;
use crate::cpu::Isa;
use crate::engine::HostEngine;
use crate::engine::gpu::{CallTimer, GpuEngine};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::UserBuffers;
use crate::plan::{Affine, MeasuredCosts, TIMED_BYTES, TimedCall};
use crate::types::{Call, CodecKind, CodecSetting, CodecSpec, Collective, DType, ResolvedCall};
use std::time::{Duration, Instant};

/// Bytes of the timed messages. The largest exceeds the nearest caches and buffers; it is sent only
/// if the second was fast.
const MESSAGES: [usize; 3] = [64, 32 << 10, 256 << 10];

/// Longest trip of the second message, in seconds, after which the largest message is still sent.
/// The largest message then takes a few milliseconds at most.
const QUICK_TRIP: f64 = 200e-6;

/// Round trips of each size; the first only synchronises both sides and does not count.
const TRIPS: usize = 6;

/// Longest all_reduce on GPUs without a codec, in seconds, after which a larger one is timed. Over a slow network the
/// larger one would take long, and its time is known from this one.
const QUICK_CALL: f64 = 3e-3;

/// Times that the calls of a size are timed one after the other; the shortest time of each counts.
const TIMED_PASSES: usize = 2;

/// Returns the codecs that a communicator with this policy may skip, and whose calls it therefore times on GPUs: those of
/// its `auto:` rules, and with `auto:raw` all that have kernels.
pub(super) fn timed_codecs(policy: &CodecPolicy) -> Vec<CodecSetting> {
    let mut found: Vec<CodecSetting> = Vec::new();
    for one in policy.codecs.iter().filter(|one| one.codec.auto) {
        let has_kernels = |kind: &CodecKind| info(*kind).is_some_and(|info| info.kernels.is_some());
        let all = CodecKind::ALL.into_iter().filter(has_kernels);
        let codecs: Vec<CodecSetting> = match one.codec.is_lossy() {
            false => all.map(|kind| CodecSpec::of(kind).into()).collect(),
            true => vec![CodecSetting {
                auto: false,
                ..one.codec
            }],
        };
        for codec in codecs {
            if !found.contains(&codec) {
                found.push(codec);
            }
        }
    }
    found
}

/// Times all_reduces of `dtypes` on GPUs, without a codec and with each of `codecs`. Gives `engine` the times on which all
/// ranks agree. All ranks call it together, right after they have connected.
///
/// # Errors
/// Errors of a call; mismatch if a rank sends no times.
pub(super) fn time_calls(
    exchange: &OutOfBandRef,
    (codecs, dtypes): (&[CodecSetting], &[DType]),
    engine: &mut GpuEngine,
    timer: &CallTimer,
    deadline: Duration,
) -> Result<()> {
    let mut timed = Vec::new();
    for &dtype in dtypes {
        for bytes in TIMED_BYTES {
            let codecs = [CodecSetting::RAW]
                .into_iter()
                .chain(codecs.iter().copied());
            let mut calls: Vec<TimedCall> = codecs
                .map(|codec| TimedCall {
                    codec,
                    dtype,
                    bytes,
                    seconds: 0.0,
                })
                .collect();
            let mut graphs = Vec::with_capacity(calls.len());
            for call in &calls {
                graphs.push(timer.capture(engine, call)?);
            }
            exchange.barrier()?;
            let mut shortest = vec![f64::INFINITY; calls.len()];
            // The first kernels of a GPU that was idle run slowly.
            for _ in 0..TIMED_PASSES {
                for (seconds, graph) in shortest.iter_mut().zip(&graphs) {
                    *seconds = seconds.min(timer.time(engine, graph, deadline)?);
                }
            }
            let own: Vec<u8> = shortest
                .iter()
                .copied()
                .flat_map(f64::to_le_bytes)
                .collect();
            let longest = longest(&exchange.all_gather(&own)?, calls.len())?;
            for (call, seconds) in calls.iter_mut().zip(&longest) {
                call.seconds = *seconds;
            }
            timed.extend(calls);
            if longest.first().is_some_and(|raw| *raw > QUICK_CALL) {
                break;
            }
        }
    }
    engine.set_call_times(&timed)
}

/// Returns the longest of the times that all ranks sent, call by call.
fn longest(sent: &[Vec<u8>], calls: usize) -> Result<Vec<f64>> {
    let mut longest = vec![0.0; calls];
    for (rank, bytes) in sent.iter().enumerate() {
        let (words, rest) = bytes.as_chunks::<8>();
        let times: Vec<f64> = words.iter().map(|word| f64::from_le_bytes(*word)).collect();
        let is_time = |time: &f64| time.is_finite() && *time > 0.0;
        if times.len() != calls || !rest.is_empty() || !times.iter().all(is_time) {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "rank {rank} sent {} bytes that are not the times of {calls} calls: use one version of the \
                     library",
                    bytes.len()
                ),
            ));
        }
        for (most, time) in longest.iter_mut().zip(times) {
            *most = time.max(*most);
        }
    }
    Ok(longest)
}

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
    use crate::config::{CommFacts, Config, Origin};
    use crate::engine::gpu::tests::{Bench, Rank, WAIT};
    use crate::testing::plan_request;

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
    fn longest_time_of_all_ranks_counts() {
        let bytes = |times: &[f64]| times.iter().flat_map(|time| time.to_le_bytes()).collect();
        let sent: [Vec<u8>; 2] = [bytes(&[1.0, 4.0]), bytes(&[3.0, 2.0])];
        assert_eq!(longest(&sent, 2).unwrap(), [3.0, 4.0]);
        for spoilt in [bytes(&[1.0]), bytes(&[1.0, f64::NAN]), vec![1; 15], vec![]] {
            let error = longest(&[sent[0].clone(), spoilt], 2).unwrap_err();
            assert!(error.message().contains("rank 1"), "{error}");
        }
    }

    #[test]
    fn codecs_that_may_be_skipped_are_timed() {
        let timed = |value: &str| {
            let mut config = Config::default();
            config
                .set("CINCH_CODEC", value, Origin::Environment)
                .unwrap();
            let policy = CodecPolicy::new(&config, CommFacts::first(4, 1));
            let codecs = timed_codecs(&policy);
            codecs
                .iter()
                .map(CodecSetting::to_string)
                .collect::<Vec<_>>()
        };
        assert_eq!(timed("linear8"), [""; 0]);
        assert_eq!(timed("auto:minmax4:block=512"), ["minmax4:block=512"]);
        let all = timed("auto:raw");
        assert!(
            all.len() > 10 && all.contains(&"dynamic8:block=256".into()),
            "{all:?}"
        );
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

    /// All ranks time the same calls, and agree on the longest time of each.
    #[test]
    fn ranks_agree_on_the_times_of_calls() {
        let bench = Bench::new();
        let codecs: [CodecSetting; 1] = ["linear8".parse().unwrap()];
        let ranks = bench.ranks(2, 16, &Config::default());
        let request = plan_request(Collective::AllReduce, 1 << 20, "auto:linear8");
        let explain = |mut rank: Rank| {
            let unmeasured = rank.engine.explain(&request).unwrap();
            assert!(unmeasured.contains("not measured"), "{unmeasured}");
            let timer =
                CallTimer::new(&bench.context, TIMED_BYTES[TIMED_BYTES.len() - 1], WAIT).unwrap();
            let exchange: OutOfBandRef = rank.exchange.clone();
            let calls = (&codecs[..], &[DType::F32][..]);
            time_calls(&exchange, calls, &mut rank.engine, &timer, WAIT).unwrap();
            rank.engine.explain(&request).unwrap()
        };
        let texts: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .into_iter()
                .map(|rank| scope.spawn(|| explain(rank)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let costs = |text: &str| text.lines().last().unwrap().to_string();
        assert!(
            costs(&texts[0]).contains("linear8:block=256 f32 64K"),
            "{}",
            texts[0]
        );
        assert_eq!(costs(&texts[0]), costs(&texts[1]));
        // Two ranks, two passes, with the codec and without it, a graph that is launched four times; up to three sizes.
        let launches = bench.process.calls("cuGraphLaunch");
        assert!(
            launches > 0 && launches.is_multiple_of(2 * 2 * 2 * 4),
            "{launches}"
        );
    }
}
