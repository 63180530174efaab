//! Ranks on several hosts, which this one stands for (`CINCH_HOST_ID`): what goes between those is
//! staged in pinned memory and carried by proxies over TCP on the loopback.

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

/// Hosts of ranks, and GPUs that they take turns on: two and four hosts of some ranks each, and hosts
/// of other sizes whose ranks do not follow one another.
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
    let runs: [(&str, Run, u64); 11] = [
        ("paths", paths, 60),
        ("collectives", collectives, 120),
        ("coded", in_codecs, 180),
        ("hierarchical", hierarchical, 180),
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
    checks.push(Check::new("hosts/codec-by-level-is-refused", 1, by_level));
    checks.push(Check::new("hosts/idle", 1, idle).within(60));
    checks
}

/// Each pair says what lies between it.
fn paths(_: &Setup, world: &World, _: usize) -> Verdict {
    let said = world.run(|comm| {
        let mut near = 0;
        for (peer, kind) in comm.info().transports.iter().enumerate() {
            let expected = match world.hosts[peer] == world.hosts[comm.rank()] {
                _ if peer == comm.rank() => None,
                true => Some(TransportKind::Cuda),
                false => Some(TransportKind::Tcp),
            };
            near += usize::from(expected == Some(TransportKind::Cuda));
            ensure(*kind == expected, || format!("{kind:?} to rank {peer}"))?;
        }
        let staged = |class: &&String| class.as_str() == "pinned staging through tcp";
        let far = comm.info().classes.iter().filter(staged).count();
        ensure(far == comm.nranks() - 1 - near, || {
            format!("{:?}", comm.info().classes)
        })?;
        Ok(comm.info().classes.join(", "))
    })?;
    Ok(said[0].clone())
}

/// Random cases of all collectives, types and operations, by what selection takes and by every flat
/// algorithm.
fn collectives(setup: &Setup, world: &World, gpus: usize) -> Verdict {
    let nranks = world.nranks();
    let mut rng = Rng::new(setup.options.seed ^ (nranks * 64 + gpus) as u64);
    let number = setup.options.either(120, 600);
    let mut cases = cover::random(&mut rng, nranks, number, 1 << 20);
    // Of several passes on each channel.
    for collective in Collective::ALL {
        let share = if collective.has_blocks() { nranks } else { 1 };
        let call = Call::new(collective, DType::F32, (6 << 20) / share + 13);
        cases.push(Case::new(call, Values::Of(Pattern::Small), rng.next()));
    }
    Ok(format!("{} cases", world.judge(&cases)?))
}

/// Cases of one algorithm, or of what selection takes.
fn by(algorithm: Option<Algorithm>, codecs: &[&str], rng: &mut Rng, nranks: usize) -> Vec<Case> {
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

fn in_codecs(setup: &Setup, world: &World, _: usize) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ 0xc0de);
    let nranks = world.nranks();
    let mut cases = by(None, &["linear8", "dynamic8"], &mut rng, nranks);
    for algorithm in [Algorithm::Ring, Algorithm::Tree, Algorithm::Direct] {
        let all = by(Some(algorithm), &["linear8", "dynamic8"], &mut rng, nranks);
        let sums = all.into_iter().filter(|case| {
            let collective = case.call.collective;
            cinch::schedule::algorithms(collective).contains(&algorithm)
        });
        cases.extend(sums);
    }
    coded::as_the_host_engine(world, &cases)?;
    Ok(format!("{} cases, bits as the host's", cases.len()))
}

fn hierarchical(setup: &Setup, world: &World, _: usize) -> Verdict {
    if world.nranks() == 2 {
        return Stop::skipped("hosts of one rank have one level");
    }
    let mut rng = Rng::new(setup.options.seed ^ 0x41e2);
    let codecs = ["raw", "linear8", "dynamic8"];
    let cases = by(
        Some(Algorithm::Hierarchical),
        &codecs,
        &mut rng,
        world.nranks(),
    );
    coded::as_the_host_engine(world, &cases)?;
    Ok(format!("{} cases, bits as the host's", cases.len()))
}

/// Graphs whose host hears nothing of their launches.
fn replays(setup: &Setup, world: &World, _: usize) -> Verdict {
    graphs::replays(setup, world, setup.options.either(100, 500))
}

/// The chain of collectives and groups of messages outside of graphs, on streams in turn.
fn groups(setup: &Setup, world: &World, _: usize) -> Verdict {
    graphs::streams(setup, world)
}

/// With few channels: all ranks are of one process here, whose descriptors may be few.
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

/// A kernel has one codec: the other one would be left out in silence.
fn by_level(setup: &Setup) -> Verdict {
    let mut world = World::on_hosts(setup, &[0, 1], 1);
    world.config.codec = "intra=linear8,inter=dynamic8".parse()?;
    match world.run(|_| Ok(())) {
        Err(Stop::Wrong(why)) if why.contains("one codec") && why.contains("CINCH_CODEC") => {
            Ok(why.chars().take(120).collect())
        }
        other => Stop::wrong(format!("{other:?}")),
    }
}

/// What the threads of two communicators take that nobody calls, and what the first call after that
/// waits: printed, not judged.
fn idle(setup: &Setup) -> Verdict {
    const QUIET: Duration = Duration::from_secs(3);
    let world = World::on_hosts(setup, &[0, 1], 1);
    let arenas = world.arenas(8192)?;
    let call = Call::new(Collective::AllReduce, DType::F32, 16);
    let said = world.run(|comm| {
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
    let (took, first, next) = said[0];
    Ok(format!(
        "idle, this process took {:.2} % of a core with 2 communicators; the first call {first:?}, \
         others {next:?}",
        100.0 * took.as_secs_f64() / QUIET.as_secs_f64()
    ))
}

/// Time that all threads of this process have had, in steps of 10 ms.
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
