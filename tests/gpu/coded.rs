//! Collectives with codecs. Their outputs must be equal on all ranks, and equal to the host
//! engine's outputs for the same schedule and chunk sizes.

use crate::case::{Case, Done, Values};
use crate::cover::Rng;
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::options::Options;
use crate::world::World;
use cinch::codec;
use cinch::comm::Call;
use cinch::cpu::Isa;
use cinch::gpu::{CaptureMode, Graph};
use cinch::plan::{EncodedTiles, Limits};
use cinch::testing::{Pattern, gaussian};
use cinch::types::{KernelProtocol, Protocol};
use cinch::{Algorithm, Collective, DType, ReduceOp, schedule};

const SPECS: [&str; 33] = [
    "linear8",
    "linear8:block=32",
    "linear8:block=4096",
    "linear8:seed=3",
    "linear8:block=2048:seed=9",
    "dynamic8",
    "dynamic8:seed=4",
    "dynamic8:block=1024",
    "static8",
    "static8:offset=-3",
    "mantissa8",
    "cast_bf16",
    "cast16",
    "minmax1",
    "minmax2:seed=5",
    "minmax4",
    "minmax4:block=32",
    "minmax4:block=2048",
    "minmax4:seed=7",
    "minmax8:block=64",
    "minmax8:block=4096:seed=1",
    "trunc8",
    "trunc16",
    "trunc24",
    "fp8_e4m3",
    "fp8_e5m2:block=1024",
    "terngrad",
    "terngrad:block=32",
    "terngrad:block=2048:seed=2",
    "onebit",
    "onebit:block=4096",
    "threshold2:tau=0.7",
    "threshold2:tau=1e-3",
];

pub fn checks(options: &Options) -> Vec<Check> {
    let worlds = [
        (2, 1),
        (3, 1),
        (5, 1),
        (8, 1),
        (2, 2),
        (8, 2),
        (4, 4),
        (8, 8),
    ];
    let check = |(nranks, gpus): (usize, usize)| {
        let name = format!("coded/n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| compare(setup, nranks, gpus));
        check.within(options.either(60, 240)).also_on_host()
    };
    let mut checks: Vec<Check> = worlds.into_iter().map(check).collect();
    // 12 ranks are more peers than a warp polls at once.
    for (nranks, gpus) in worlds.into_iter().chain([(12, 1)]) {
        for kernel in [KernelProtocol::FUSED_LL128, KernelProtocol::FUSED_LL] {
            let name = format!("coded/fused-{}-n{nranks}-gpus{gpus}", kernel.protocol);
            let check = Check::new(name, gpus, move |setup| {
                compare_fused(setup, kernel, nranks, gpus)
            });
            checks.push(check.within(options.either(60, 240)));
        }
    }
    checks.push(Check::new(
        "coded/replays-draw-new-numbers",
        1,
        replays_draw_new_numbers,
    ));
    checks
}

/// Replays of a graph share a call number. Stochastic rounding must still draw new random numbers
/// for each replay, equal on all ranks.
fn replays_draw_new_numbers(setup: &Setup) -> Verdict {
    const COUNT: usize = 20_000;
    let world = World::new(setup, 2, 1);
    let arenas = world.arenas(8 * COUNT + 512)?;
    let mut call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    call.codec = "minmax1:seed=3".parse().ok();
    let outputs = world.run(|comm| {
        let arena = &arenas[comm.rank()];
        let number = |at: usize| {
            gaussian(((at + comm.rank() * COUNT) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
        };
        let bytes: Vec<u8> = (0..COUNT)
            .flat_map(|at| (number(at) as f32).to_le_bytes())
            .collect();
        arena.write(0, &bytes)?;
        let stream = arena.stream()?;
        let output = (4 * COUNT).next_multiple_of(256);
        let graph = Graph::capture(stream, CaptureMode::Relaxed, |stream| {
            let buffers = arena.buffers((0, 4 * COUNT), (output, 4 * COUNT), stream)?;
            comm.call_on(&call, buffers).map(drop)
        })?;
        let mut replays = Vec::new();
        for _ in 0..4 {
            graph.launch(stream)?;
            arena.wait(comm)?;
            let mut found = vec![0; 4 * COUNT];
            arena.read(output, &mut found)?;
            replays.push(found);
        }
        Ok(replays)
    })?;
    for replay in 0..4 {
        ensure(outputs[0][replay] == outputs[1][replay], || {
            format!("replay {replay}: the ranks have other bits")
        })?;
        ensure(
            replay == 0 || outputs[0][replay] != outputs[0][replay - 1],
            || format!("replay {replay} drew the random numbers of the replay before it"),
        )?;
    }
    Ok("4 replays".into())
}

/// Returns cases of every codec with every type and every all_reduce algorithm. The other choices
/// are random.
pub fn cases(rng: &mut Rng, nranks: usize, rounds: usize, most: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for _ in 0..rounds {
        for text in SPECS {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for algorithm in schedule::algorithms(Collective::AllReduce) {
                    let mut case = one(rng, nranks, text, dtype, most);
                    case.call.collective = Collective::AllReduce;
                    case.call.algorithm = Some(*algorithm);
                    cases.push(case);
                }
                cases.push(one(rng, nranks, text, dtype, most));
            }
        }
    }
    cases
}

fn one(rng: &mut Rng, nranks: usize, codec: &str, dtype: DType, most: usize) -> Case {
    let collective = rng.pick(&Collective::OF_ALL_RANKS);
    let largest = rng.pick(&[3, 300, 5000, 5000, most / nranks]);
    let mut call = Call::new(collective, dtype, 1 + rng.below(largest));
    call.codec = codec.parse().ok();
    call.op = rng.pick(&[
        ReduceOp::Sum,
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::PreMulSum(cinch::types::Scalar::Float(1.0)),
    ]);
    if collective.has_root() {
        call.root = rng.below(nranks);
    }
    let values = Values::Of(rng.pick(&[Pattern::Gaussian, Pattern::HeavyTailed, Pattern::Uniform]));
    // Some inputs contain infinities and NaN, which must reach all ranks alike.
    let values = if rng.below(8) == 0 {
        Values::Bits
    } else {
        values
    };
    let mut case = Case::new(call, values, rng.next());
    case.in_place = rng.below(2) == 0;
    case.shifted = rng.below(2) == 0;
    case
}

/// Returns cases of the collectives that fused kernels run with codecs.
fn fused_cases(rng: &mut Rng, nranks: usize, rounds: usize, most: usize) -> Vec<Case> {
    const FUSED_CODECS: [&str; 11] = [
        "linear8",
        "linear8:block=32",
        "linear8:block=512",
        "dynamic8",
        "dynamic8:block=64",
        "minmax4",
        "minmax4:block=32",
        "minmax4:block=512",
        "fp8_e4m3",
        "fp8_e4m3:block=128",
        "fp8_e5m2",
    ];
    const FUSED_CALLS: [(Collective, Algorithm); 4] = [
        (Collective::AllReduce, Algorithm::OneShot),
        (Collective::AllReduce, Algorithm::Direct),
        (Collective::AllGather, Algorithm::Direct),
        (Collective::ReduceScatter, Algorithm::Direct),
    ];
    let mut cases = Vec::new();
    for _ in 0..rounds {
        for text in FUSED_CODECS {
            for (collective, algorithm) in FUSED_CALLS {
                for dtype in [DType::F32, DType::F16, DType::BF16] {
                    let mut case = one(rng, nranks, text, dtype, most);
                    (case.call.collective, case.call.algorithm) = (collective, Some(algorithm));
                    case.call.root = 0;
                    cases.push(case);
                }
            }
        }
    }
    cases
}

/// Returns all_reduces of the largest size that the direct algorithm can run with `protocol` in an area for `area_bytes`
/// bytes of payload.
fn largest_cases(
    rng: &mut Rng,
    nranks: usize,
    protocol: Protocol,
    area_bytes: usize,
) -> Result<Vec<Case>, Stop> {
    let mut cases = Vec::new();
    for (text, dtype) in [("linear8", DType::F32), ("minmax4:block=32", DType::BF16)] {
        let mut case = one(rng, nranks, text, dtype, 1 << 19);
        let tile_bytes = match codec::build(text.parse()?, Isa::Scalar)? {
            Some(codec) => EncodedTiles::new(&*codec, 1, protocol).room(),
            None => return Stop::wrong("there is no codec"),
        };
        case.call.collective = Collective::AllReduce;
        case.call.algorithm = Some(Algorithm::Direct);
        case.call.root = 0;
        case.call.count = area_bytes / 2 / tile_bytes * 512 * nranks - 3;
        case.values = Values::Of(Pattern::Gaussian);
        cases.push(case);
    }
    Ok(cases)
}

/// Compares fused kernels with the host engine: those of ll128 on peer memory, and those of ll on pinned host memory.
fn compare_fused(setup: &Setup, kernel: KernelProtocol, nranks: usize, gpus: usize) -> Verdict {
    let protocol = kernel.protocol;
    let mut rng = Rng::new(setup.options.seed ^ 0xf05e);
    let mut world = World::new(setup, nranks, gpus);
    world.config.force_kernel(Some(kernel));
    world.config.p2p_disable = protocol == Protocol::Ll;
    let all = world.run(|comm| Ok(comm.limits()?.gpu))?;
    let Some(gpu) = &all[0] else {
        return Stop::wrong("the ranks have no limits of GPUs");
    };
    let (area, most) = match protocol {
        // A tile of 512 codes fills at most nine lines of packets.
        Protocol::Ll => (gpu.oneshot_bytes, gpu.oneshot_bytes / (9 * 64) * 512),
        _ if gpu.ll128 => (gpu.lines_bytes, 1 << 19),
        _ => return Stop::skipped("lines do not arrive whole between these GPUs"),
    };
    let mut cases = fused_cases(&mut rng, nranks, setup.options.either(1, 4), most);
    // With 2 ranks the host engine would take too long for the largest cases.
    if nranks > 2 {
        cases.extend(largest_cases(&mut rng, nranks, protocol, area)?);
    }
    // With a single channel, one thread block must loop over the message several times.
    let few = fused_cases(&mut rng, nranks, 1, most.min(1 << 16));
    for (channels, cases) in [(None, &cases), (Some(1), &few)] {
        world.config.gpu_channels = channels;
        // Fails if cinch would run a case with a kernel other than the requested one. The
        // comparison alone could not reveal this.
        let explained = world.run(|comm| {
            let explain = |case: &Case| comm.explain(&case.call);
            Ok(cases.iter().map(explain).collect::<Result<Vec<_>, _>>()?)
        })?;
        for (case, text) in cases.iter().zip(&explained[0]) {
            ensure(text.contains(&format!("fused     {protocol} ")), || {
                format!("{case} is not fused:\n{text}")
            })?;
        }
        matches_host_engine(&world, cases)?;
    }
    Ok(format!(
        "{} cases, equal to the host engine",
        cases.len() + few.len()
    ))
}

fn compare(setup: &Setup, nranks: usize, gpus: usize) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ 0xc0de);
    let cases = cases(&mut rng, nranks, setup.options.either(1, 4), 1 << 19);
    matches_host_engine(&World::new(setup, nranks, gpus), &cases)?;
    Ok(format!("{} cases, equal to the host engine", cases.len()))
}

/// Runs `cases` in `world` and judges the outputs. Encoded outputs must have the bits of the host engine for
/// an equal schedule and equal chunk sizes.
pub fn matches_host_engine(world: &World, cases: &[Case]) -> Result<(), Stop> {
    let nranks = world.nranks();
    has_bits_of_host_engine(world, cases, |case, on_gpu| {
        case.judge(&case.inputs(nranks), on_gpu, 0.0)
            .map_err(Stop::Wrong)
    })
}

/// Compares with the host engine like [`matches_host_engine`]; `judge` judges a case's outputs.
pub fn has_bits_of_host_engine(
    world: &World,
    cases: &[Case],
    judge: impl Fn(&Case, &[Done]) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let nranks = world.nranks();
    let (on_gpu, limits) = outputs(world, cases, None)?;
    let mut host_world = world.on_host_memory(&limits);
    // A fused kernel encodes a rank's part as one chunk, so a host slot must hold it.
    let part = |case: &Case| match (case.call.collective, case.call.algorithm) {
        (Collective::AllReduce, Some(Algorithm::Direct)) => case.call.count.div_ceil(nranks),
        _ => case.call.count,
    };
    let most = cases.iter().map(part).max().unwrap_or(0);
    let slot = (most / 4 * 5 + 1024).next_multiple_of(64);
    host_world.config.slot_bytes = host_world.config.slot_bytes.max(slot);
    let (on_host, _) = outputs(&host_world, cases, Some(limits))?;
    for (case, (on_gpu, on_host)) in cases.iter().zip(on_gpu.iter().zip(&on_host)) {
        judge(case, on_gpu)?;
        for (rank, (on_gpu, on_host)) in on_gpu.iter().zip(on_host).enumerate() {
            world.judge_report(case, rank, on_gpu)?;
            // Without a codec, GPU and host may add in different orders.
            if !case.call.codec.is_some_and(|codec| codec.is_lossy()) {
                continue;
            }
            case.same_numbers(&on_gpu.output, &on_host.output, rank, nranks)
                .map_err(|why| {
                    Stop::Wrong(format!(
                        "{why} (expected is the host engine); {:?} on the GPU, {:?} on the host",
                        on_gpu.report.algorithm, on_host.report.algorithm
                    ))
                })?;
        }
    }
    Ok(())
}

/// Returns all ranks' outputs by case, and the limits that set the chunk sizes. `limits` replaces
/// the limits of the ranks.
pub fn outputs(
    world: &World,
    cases: &[Case],
    limits: Option<Limits>,
) -> Result<(Vec<Vec<Done>>, Limits), Stop> {
    let nranks = world.nranks();
    let bytes = cases.iter().map(|case| case.bytes(nranks)).max();
    let arenas = world.arenas(bytes.unwrap_or(0))?;
    let all = world.run(|comm| {
        if let Some(limits) = &limits {
            comm.copy_limits(limits.clone())?;
        }
        let mut done = Vec::new();
        for case in cases {
            let input = case.input(comm.rank(), nranks);
            let outcome = arenas[comm.rank()].run(case, comm, &input);
            done.push(outcome.map_err(|error| Stop::from(error).context(case))?);
        }
        Ok((done, comm.limits()?))
    })?;
    let limits = all[0].1.clone();
    let mut by_case: Vec<Vec<Done>> = cases.iter().map(|_| Vec::new()).collect();
    for (done, _) in all {
        for (case, one) in by_case.iter_mut().zip(done) {
            case.push(one);
        }
    }
    Ok((by_case, limits))
}
