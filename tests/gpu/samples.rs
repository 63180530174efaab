//! Tests `CINCH_CODEC_SAMPLE`, which measures the errors of some encoded sums, and
//! `CINCH_CODEC_BOUND`, the error above which codecs are switched off.

use crate::case::{Case, Done, Values};
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::world::World;
use cinch::comm::{Call, CodecStats};
use cinch::testing::Pattern;
use cinch::{CodecSetting, Collective, DType, ReduceOp};

/// Sampling interval: the first of every 3 encoded sums is sampled. Its error is evaluated when the
/// next sample is due.
const EVERY: usize = 3;
const CALLS: usize = 3 * EVERY;
/// Elements of a rank's input. Sums of at least 1 MiB are encoded.
const COUNT: usize = 1 << 19;
/// Error bounds below and above the relative error of `linear8` on this data, which is about 1 %.
const SMALL_BOUND: f64 = 1e-6;
const AMPLE_BOUND: f64 = 0.05;

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for (nranks, gpus) in [(2, 1), (5, 1), (2, 2), (8, 8)] {
        for collective in [Collective::AllReduce, Collective::ReduceScatter] {
            let name = format!("samples/{collective}-n{nranks}-gpus{gpus}");
            let check = Check::new(name, gpus, move |setup| {
                samples(setup, nranks, gpus, collective)
            });
            checks.push(check.within(120).also_on_host());
        }
    }
    checks
}

/// With a bound above the codec's error all sums must be encoded. With a bound below it, all ranks must
/// switch to exact sums at the call that evaluates the first sample.
fn samples(setup: &Setup, nranks: usize, gpus: usize, collective: Collective) -> Verdict {
    let mut world = World::new(setup, nranks, gpus);
    world.config.codec = "linear8".parse()?;
    world.config.codec_sample = EVERY as u32;
    // On host memory a sample is evaluated within its call.
    let until = if setup.options.host { 1 } else { EVERY };
    let mut worst = 0f64;
    for (bound, coded) in [(AMPLE_BOUND, CALLS), (SMALL_BOUND, until)] {
        world.config.codec_bound = bound;
        let cases = cases(collective, nranks, setup.options.seed);
        let ranks = run(&world, &cases)?;
        for (number, case) in cases.iter().enumerate() {
            let done: Vec<Done> = ranks.iter().map(|(done, _)| done[number].clone()).collect();
            let what = |why: String| Stop::Wrong(format!("bound {bound}, call {number}: {why}"));
            judge(case, &done, number < coded).map_err(what)?;
        }
        for (rank, (_, stats)) in ranks.iter().enumerate() {
            let has_ended = coded < CALLS;
            // On a GPU a later call evaluates a sample, so the last sample may not be counted when
            // the test ends.
            let sampled = stats.sampled as usize;
            let is_counted = match has_ended {
                true => sampled == 1,
                false => [CALLS / EVERY - 1, CALLS / EVERY].contains(&sampled),
            };
            ensure(
                is_counted
                    && stats.switched_off == has_ended
                    && stats.worst_error == ranks[0].1.worst_error
                    && (1e-3..AMPLE_BOUND).contains(&stats.worst_error),
                || format!("bound {bound}: rank {rank} has {stats:?}"),
            )?;
            worst = worst.max(stats.worst_error);
        }
    }
    Ok(format!(
        "{CALLS} calls of {COUNT} elements, off by {worst:.1e}"
    ))
}

fn cases(collective: Collective, nranks: usize, seed: u64) -> Vec<Case> {
    let count = match collective {
        Collective::ReduceScatter => COUNT / nranks,
        _ => COUNT,
    };
    let call = |number: usize| Call {
        op: [ReduceOp::Sum, ReduceOp::Avg][number % 2],
        ..Call::new(collective, DType::F32, count)
    };
    let case = |number| {
        let values = Values::Of(Pattern::Gaussian);
        Case::new(call(number), values, seed ^ number as u64)
    };
    (0..CALLS).map(case).collect()
}

fn run(world: &World, cases: &[Case]) -> Result<Vec<(Vec<Done>, CodecStats)>, Stop> {
    let nranks = world.nranks();
    let bytes = cases.iter().map(|case| case.bytes(nranks)).max();
    let arenas = world.arenas(bytes.unwrap_or(0))?;
    world.run(|comm| {
        let arena = &arenas[comm.rank()];
        let one = |case: &Case| {
            let input = case.input(comm.rank(), nranks);
            let outcome = arena.run(case, comm, &input);
            outcome.map_err(|error| Stop::from(error).context(case))
        };
        let done = cases.iter().map(one).collect::<Result<_, _>>()?;
        Ok((done, comm.codec_stats()))
    })
}

/// Checks that the ranks agree and that the call was encoded or exact, as `coded` demands.
fn judge(case: &Case, done: &[Done], coded: bool) -> Result<(), String> {
    let inputs = case.inputs(done.len());
    let codec: CodecSetting = match coded {
        true => "linear8".parse().map_err(|error| format!("{error}"))?,
        false => CodecSetting::RAW,
    };
    for (rank, one) in done.iter().enumerate() {
        if one.report.codec != codec {
            return Err(format!("{case}: rank {rank} ran {}", one.report.codec));
        }
    }
    let exact = case.judge(&inputs, done, 0.0);
    if !coded {
        return exact;
    }
    if exact.is_ok() {
        return Err(format!("{case}: {codec}, and yet exact"));
    }
    let mut lossy = *case;
    lossy.call.codec = Some(codec);
    lossy.judge(&inputs, done, 0.0)
}
