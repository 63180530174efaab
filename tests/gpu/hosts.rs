//! Tests ranks on several simulated hosts of this machine (`CINCH_HOST_ID`). Proxy threads stage
//! data between hosts in pinned memory and send it over TCP on the loopback interface.

use crate::case::{Case, Values};
use crate::cover::{self, Rng};
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::options::Options;
use crate::world::World;
use crate::{coded, failures, graphs};
use cinch::comm::Call;
use cinch::testing::Pattern;
use cinch::types::TransportKind;
use cinch::{Algorithm, Collective, DType, ReduceOp};
use std::time::{Duration, Instant};

/// Name, host of each rank, and number of GPUs. In some rows hosts have different numbers of ranks,
/// and consecutive ranks are on different hosts.
const WORLDS: [(&str, &[usize], usize); 10] = [
    ("2x1-gpus1", &[0, 1], 1),
    ("2x2-gpus1", &[0, 0, 1, 1], 1),
    ("2x4-gpus1", &[0, 0, 0, 0, 1, 1, 1, 1], 1),
    ("uneven-gpus1", &[0, 1, 0, 2, 1, 1], 1),
    ("2x1-gpus2", &[0, 1], 2),
    ("2x4-gpus2", &[0, 0, 0, 0, 1, 1, 1, 1], 2),
    ("4x2-gpus2", &[0, 0, 1, 1, 2, 2, 3, 3], 2),
    ("2x2-gpus4", &[0, 0, 1, 1], 4),
    ("2x4-gpus8", &[0, 0, 0, 0, 1, 1, 1, 1], 8),
    ("4x2-gpus8", &[0, 0, 1, 1, 2, 2, 3, 3], 8),
];

pub fn checks(options: &Options) -> Vec<Check> {
    type Run = fn(&Setup, &World, usize) -> Verdict;
    let runs: [(&str, Run, u64); 12] = [
        ("paths", paths, 60),
        ("collectives", collectives, 120),
        ("coded", with_codecs, 180),
        ("hierarchical", hierarchical, 180),
        ("levels", levels, 180),
        ("replays", replays, 180),
        ("groups", groups, 120),
        ("communicators", communicators, 180),
        ("kill", kill, 180),
        ("abort", abort, 60),
        ("never-calls", never_calls, 60),
        ("counts-differ", counts_differ, 60),
    ];
    let mut checks = Vec::new();
    for (world, hosts, gpus) in WORLDS {
        for (what, run, seconds) in runs {
            let check = Check::new(format!("hosts/{what}-{world}"), gpus, move |setup| {
                run(setup, &World::on_hosts(setup, hosts, gpus), gpus)
            });
            checks.push(check.within(options.either(seconds, 3 * seconds)));
        }
    }
    checks.push(Check::new(
        "hosts/codec-by-level-is-refused",
        1,
        codec_by_level,
    ));
    checks.push(Check::new("hosts/idle", 1, idle).within(60));
    checks
}

/// Checks the transport that each rank reports for every peer.
fn paths(_: &Setup, world: &World, _: usize) -> Verdict {
    let results = world.run(|comm| {
        let mut local = 0;
        for (peer, kind) in comm.info().transports.iter().enumerate() {
            let expected = match world.hosts[peer] == world.hosts[comm.rank()] {
                _ if peer == comm.rank() => None,
                true => Some(TransportKind::Cuda),
                false => Some(TransportKind::Tcp),
            };
            local += usize::from(expected == Some(TransportKind::Cuda));
            ensure(*kind == expected, || format!("{kind:?} to rank {peer}"))?;
        }
        let staged = |class: &&String| class.as_str() == "pinned staging through tcp";
        let remote = comm.info().classes.iter().filter(staged).count();
        ensure(remote == comm.nranks() - 1 - local, || {
            format!("{:?}", comm.info().classes)
        })?;
        Ok(comm.info().classes.join(", "))
    })?;
    Ok(results[0].clone())
}

/// Runs random cases of all collectives, types and operations. Algorithms are left to the library,
/// or set to an algorithm that ignores hosts.
fn collectives(setup: &Setup, world: &World, gpus: usize) -> Verdict {
    let nranks = world.nranks();
    let mut rng = Rng::new(setup.options.seed ^ (nranks * 64 + gpus) as u64);
    let number = setup.options.either(120, 600);
    let mut cases = cover::random(&mut rng, nranks, number, 1 << 20);
    // Adds messages so large that each channel takes several passes.
    for collective in Collective::ALL {
        let share = if collective.has_blocks() { nranks } else { 1 };
        let call = Call::new(collective, DType::F32, (6 << 20) / share + 13);
        cases.push(Case::new(call, Values::Of(Pattern::Small), rng.next()));
    }
    Ok(format!("{} cases", world.judge(&cases)?))
}

/// Returns cases with `algorithm`; `None` leaves the choice to the library.
pub(crate) fn cases_of(
    algorithm: Option<Algorithm>,
    codecs: &[&str],
    rng: &mut Rng,
    nranks: usize,
) -> Vec<Case> {
    let mut cases = Vec::new();
    for collective in [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast,
        Collective::Reduce,
    ] {
        for &codec in codecs {
            for dtype in [DType::F32, DType::BF16] {
                for count in [1, 1000, 700_001 / nranks] {
                    let mut call = Call::new(collective, dtype, count);
                    call.algorithm = algorithm;
                    call.codec = (codec != "raw").then(|| codec.parse().ok()).flatten();
                    if collective.has_root() {
                        call.root = rng.below(nranks);
                    }
                    if collective.reduces() && count == 1000 {
                        call.op = ReduceOp::Avg;
                    }
                    cases.push(Case::new(call, Values::Of(Pattern::Gaussian), rng.next()));
                }
            }
        }
    }
    cases
}

fn with_codecs(setup: &Setup, world: &World, _: usize) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ 0xc0de);
    let nranks = world.nranks();
    let mut cases = cases_of(None, &["linear8", "dynamic8"], &mut rng, nranks);
    for algorithm in [Algorithm::Ring, Algorithm::Tree, Algorithm::Direct] {
        let all = cases_of(Some(algorithm), &["linear8", "dynamic8"], &mut rng, nranks);
        let sums = all.into_iter().filter(|case| {
            let collective = case.call.collective;
            cinch::schedule::algorithms(collective).contains(&algorithm)
        });
        cases.extend(sums);
    }
    coded::matches_host_engine(world, &cases)?;
    Ok(format!("{} cases, equal to the host engine", cases.len()))
}

fn hierarchical(setup: &Setup, world: &World, _: usize) -> Verdict {
    if world.nranks() == 2 {
        return Stop::skipped("hosts of one rank have one level");
    }
    let mut rng = Rng::new(setup.options.seed ^ 0x41e2);
    let codecs = ["raw", "linear8", "dynamic8"];
    let cases = cases_of(
        Some(Algorithm::Hierarchical),
        &codecs,
        &mut rng,
        world.nranks(),
    );
    coded::matches_host_engine(world, &cases)?;
    Ok(format!("{} cases, equal to the host engine", cases.len()))
}

/// Sums with messages of another encoding inside hosts.
fn levels(setup: &Setup, world: &World, _: usize) -> Verdict {
    if world.nranks() == 2 {
        return Stop::skipped("hosts of one rank have one level");
    }
    let mut rng = Rng::new(setup.options.seed ^ 0x1e7e);
    let mut ran = 0;
    for codec in [
        "intra=raw,inter=linear8",
        "intra=cast16,inter=linear8",
        "intra=cast_bf16,inter=dynamic8",
        "intra=linear8,inter=dynamic8",
        "intra=linear8:block=64,inter=linear8:block=1024",
    ] {
        let mut world = world.clone();
        world.config.codec = codec.parse()?;
        let all = cases_of(
            Some(Algorithm::Hierarchical),
            &["raw"],
            &mut rng,
            world.nranks(),
        );
        let sums = [Collective::AllReduce, Collective::ReduceScatter];
        let kept = all
            .into_iter()
            .filter(|case| sums.contains(&case.call.collective));
        let mut cases: Vec<Case> = kept.collect();
        let (done, _) = coded::outputs(&world, &cases, None)?;
        for (case, done) in cases.iter_mut().zip(&done) {
            // The calls have the codec of the communicator, which decides their errors.
            case.call.codec = Some(codec.parse()?);
            case.judge(&case.inputs(world.nranks()), done, 0.0)
                .map_err(|why| Stop::Wrong(format!("{codec}: {why}")))?;
        }
        ran += cases.len();
    }
    Ok(format!("{ran} cases"))
}

/// Replays graphs. A graph launch calls no function of cinch, so the proxies must notice its
/// transfers by themselves.
fn replays(setup: &Setup, world: &World, _: usize) -> Verdict {
    graphs::replays(setup, world, setup.options.either(100, 500))
}

/// Runs the chain of collectives and send/recv groups outside of graphs and changes streams with
/// every step.
fn groups(setup: &Setup, world: &World, _: usize) -> Verdict {
    graphs::streams(setup, world)
}

/// Runs several communicators with two channels each. All ranks share this process, whose limit of
/// file descriptors may be low.
fn communicators(setup: &Setup, world: &World, _: usize) -> Verdict {
    let mut world = world.clone();
    world.config.gpu_channels = Some(2);
    graphs::communicators(setup, &world)
}

fn kill(setup: &Setup, world: &World, gpus: usize) -> Verdict {
    failures::kill(setup, world, gpus)
}

fn abort(_: &Setup, world: &World, _: usize) -> Verdict {
    failures::abort(world)
}

fn never_calls(_: &Setup, world: &World, _: usize) -> Verdict {
    failures::never_calls(world)
}

fn counts_differ(_: &Setup, world: &World, _: usize) -> Verdict {
    failures::counts_differ(world)
}

/// Setting two lossy codecs within and between hosts must fail on a GPU, unless kernels have both.
fn codec_by_level(setup: &Setup) -> Verdict {
    let mut world = World::on_hosts(setup, &[0, 1], 1);
    world.config.codec = "intra=dynamic8,inter=linear8".parse()?;
    match world.run(|_| Ok(())) {
        Err(Stop::Wrong(why)) if why.contains("one codec") && why.contains("CINCH_CODEC") => {
            Ok(why.chars().take(120).collect())
        }
        other => Stop::wrong(format!("{other:?}")),
    }
}

/// Measures the CPU time of two idle communicators and the latency of the first call after idling.
/// The check prints both and sets no limit.
fn idle(setup: &Setup) -> Verdict {
    const QUIET: Duration = Duration::from_secs(3);
    let world = World::on_hosts(setup, &[0, 1], 1);
    let arenas = world.arenas(8192)?;
    let call = Call::new(Collective::AllReduce, DType::F32, 16);
    let results = world.run(|comm| {
        let arena = &arenas[comm.rank()];
        let place = (0, 64);
        let one = || -> Result<Duration, Stop> {
            comm.barrier()?;
            let begin = Instant::now();
            comm.call_on(&call, arena.buffers(place, place, arena.stream()?)?)?;
            arena.wait(comm)?;
            Ok(begin.elapsed())
        };
        one()?;
        comm.barrier()?;
        let before = process_time();
        std::thread::sleep(QUIET);
        let took = process_time() - before;
        let first = one()?;
        let mut next = (0..20).map(|_| one()).collect::<Result<Vec<_>, _>>()?;
        next.sort();
        Ok((took, first, next[10]))
    })?;
    let (took, first, next) = results[0];
    Ok(format!(
        "idle, this process took {:.2} % of a core with 2 communicators; the first call {first:?}, \
         others {next:?}",
        100.0 * took.as_secs_f64() / QUIET.as_secs_f64()
    ))
}

/// Returns the CPU time of all threads of this process, in steps of 10 ms.
fn process_time() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(')').next().unwrap_or_default();
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    Duration::from_millis(10 * ticks)
}
