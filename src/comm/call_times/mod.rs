//! Times of all_reduces on GPUs, by which a communicator decides about codecs that are optional (`auto:`).

mod saved;

pub(super) use saved::SavedTimes;

use crate::bootstrap::OutOfBandRef;
use crate::codec::info;
use crate::config::{CodecPolicy, Config, Knob};
use crate::engine::gpu::{CallTimer, GpuEngine};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::kernels::{self, State};
use crate::gpu::{Context, Device};
use crate::plan::{TIMED_BYTES, TimedCall};
use crate::types::{CodecKind, CodecSetting, CodecSpec, DType};
use std::time::Duration;

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

/// Settings that may differ between ranks, and that change the times of calls.
const OF_TIMES: [&str; 8] = [
    "CINCH_EARLY_LAUNCH",
    "CINCH_SOCKET_IFNAME",
    "CINCH_SOCKET_FAMILY",
    "CINCH_IB_DISABLE",
    "CINCH_IB_HCA",
    "CINCH_IB_GID",
    "CINCH_IB_SL",
    "CINCH_IB_TC",
];

/// Describes what the times of calls on this rank depend on: its GPU, `known`, settings, and the library. `known` has what
/// the caller knows as text: links, topology, blocks, settings on which all ranks agreed.
pub(super) fn facts(context: &Context, config: &Config, known: &str) -> String {
    let Device { name, uuid, .. } = context.device();
    let driver = context.driver().version();
    let settings = OF_TIMES.map(|name| Knob::find(name).map(|knob| (knob.show)(config)));
    let kernels = match kernels::STATE {
        State::Built { hash, .. } => hash,
        State::Missing { .. } => 0,
    };
    let version = env!("CARGO_PKG_VERSION");
    format!("{uuid:?} {name} {driver}\n{known}\n{settings:?}\n{version} {kernels}")
}

/// Returns the calls that decide about `codecs`, each with its time. `time` sets the times of calls of one type and size,
/// of which the first has no codec. Larger calls are left out once that one is slow.
fn all_calls(
    codecs: &[CodecSetting],
    dtypes: &[DType],
    mut time: impl FnMut(&mut [TimedCall]) -> Result<()>,
) -> Result<Vec<TimedCall>> {
    let mut timed = Vec::new();
    for &dtype in dtypes {
        for bytes in TIMED_BYTES {
            let codecs = [CodecSetting::RAW].iter().chain(codecs);
            let mut calls: Vec<TimedCall> = codecs
                .map(|&codec| TimedCall {
                    codec,
                    dtype,
                    bytes,
                    seconds: 0.0,
                })
                .collect();
            time(&mut calls)?;
            let is_slow = calls[0].seconds > QUICK_CALL;
            timed.extend(calls);
            if is_slow {
                break;
            }
        }
    }
    Ok(timed)
}

/// Times all_reduces of `dtypes` on GPUs, without a codec and with each of `codecs`, and returns the times on which all ranks agree.
/// All ranks call it together, right after they have connected.
///
/// # Errors
/// Errors of a call; mismatch if a rank sends no times.
pub(super) fn measure(
    exchange: &OutOfBandRef,
    (codecs, dtypes): (&[CodecSetting], &[DType]),
    engine: &mut GpuEngine,
    timer: &CallTimer,
    deadline: Duration,
) -> Result<Vec<TimedCall>> {
    all_calls(codecs, dtypes, |calls| {
        let mut graphs = Vec::with_capacity(calls.len());
        for call in &*calls {
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
        for (call, seconds) in calls.iter_mut().zip(longest) {
            call.seconds = seconds;
        }
        Ok(())
    })
}

/// Returns the longest of the times that all ranks sent, call by call.
fn longest(sent: &[Vec<u8>], calls: usize) -> Result<Vec<f64>> {
    let mut longest = vec![0.0; calls];
    for (rank, bytes) in sent.iter().enumerate() {
        let (words, rest) = bytes.as_chunks::<8>();
        let times: Vec<f64> = words.iter().map(|word| f64::from_le_bytes(*word)).collect();
        if times.len() != calls || !rest.is_empty() || !times.iter().copied().all(is_time) {
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

/// Returns whether a number is a time that a call may take.
fn is_time(seconds: f64) -> bool {
    seconds.is_finite() && seconds > 0.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{CommFacts, Origin};
    use crate::engine::gpu::tests::{Bench, Rank, WAIT};
    use crate::testing::plan_request;
    use crate::types::Collective;

    #[test]
    fn facts_differ_with_what_times_depend_on() {
        let bench = Bench::new();
        let facts = |known: &str, settings: &[(&str, &str)]| {
            let mut config = Config::default();
            for (name, value) in settings {
                config.set(name, value, Origin::Environment).unwrap();
            }
            facts(&bench.context, &config, known)
        };
        let here = facts("links", &[]);
        assert_eq!(here, facts("links", &[("CINCH_LOG", "info")]));
        assert_ne!(here, facts("other links", &[]));
        for name in OF_TIMES {
            let value = match name {
                "CINCH_SOCKET_IFNAME" | "CINCH_IB_HCA" => "other0",
                "CINCH_SOCKET_FAMILY" => "ipv6",
                "CINCH_IB_GID" => "3",
                "CINCH_EARLY_LAUNCH" => "0",
                _ => "1",
            };
            assert_ne!(here, facts("links", &[(name, value)]), "{name}");
        }
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
            let timed = measure(&exchange, calls, &mut rank.engine, &timer, WAIT).unwrap();
            rank.engine.set_call_times(&timed).unwrap();
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
