//! Runs the schedule kernels of all files of `kernels/entry/` on the host, and compares their
//! outputs with those of the host engine, bit for bit. Both cut messages alike.
//!
//! Collectives, algorithms, codecs, protocols and element types are combined completely. Operators,
//! numbers of ranks, sizes, alignment, blocks of a scale, overlap and error feedback vary from call
//! to call.

use super::interpreter::{Kernels, RankMemory, World};
use super::interpreter_work::{Buffers, Residuals, Scales, Work, shapes};
use super::library::starts;
use crate::support::{self, Rng};
use cinch::codec::{KERNEL_CODECS, kernel_family};
use cinch::config::FileChoice;
use cinch::engine::gpu::kernels::{KERNEL_PREFIX, name_for, takes_verdict};
use cinch::gpu::abi::MAX_PEERS;
use cinch::mem::PeerBufferLayout;
use cinch::plan::{GpuLimits, Limits, MachineFacts, Plan, Resident};
use cinch::schedule::Groups;
use cinch::testing::{Data, Pattern, local_world, value};
use cinch::transport::HostLoad;
use cinch::types::{
    Algorithm, Call, CodecKind, CodecSetting, CodecSpec, Collective, DType, KernelIntra,
    KernelProtocol, Scalar, ScaleRule, TransportKind,
};
use cinch::{CallStatistics, Config, ReduceOp, UserBuffers};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Numbers of ranks of the calls.
const RANKS: [usize; 4] = [2, 3, 4, 5];
/// More ranks than a launch has peers.
const MANY: usize = 34;
/// Channels of a pair of ranks.
const CHANNELS: usize = 4;

/// Returns the files of `kernels/entry/` that have kernels of the interpreter.
fn entries() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/entry");
    let names = fs::read_dir(folder).unwrap().filter_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.strip_suffix(".cu").map(str::to_string)
    });
    let is_interpreter =
        |name: &String| name == "move" || name.starts_with("raw_") || name.starts_with("coded_");
    let mut names: Vec<String> = names.filter(is_interpreter).collect();
    names.sort();
    names
}

/// Returns the limits of `nranks` ranks on GPUs, and the layout of their peer buffers: as small as
/// possible, so that small messages take several passes.
fn limits(nranks: usize) -> (Limits, PeerBufferLayout) {
    let least = |shape: &PeerBufferLayout| shape.bytes();
    let shape = PeerBufferLayout::within(nranks, 1 << 20, CHANNELS, true, least).unwrap();
    let resident = Resident {
        channels: 2,
        fused: 2,
    };
    let gpu = GpuLimits {
        ll128: true,
        pairs: cinch::gpu_links::PairLinks::NVLINK,
        ..GpuLimits::new(&shape, resident, CHANNELS)
    };
    let limits = Limits {
        nranks,
        slot_bytes: gpu.fifos[0].0,
        slots: 4,
        channels: CHANNELS,
        algorithm: None,
        machine: MachineFacts {
            transport: TransportKind::Cuda,
            inside: TransportKind::Cuda,
            load: HostLoad::LIGHT,
            measured: None,
        },
        hosts: Groups::ONE,
        topology: None,
        gpu: Some(gpu),
    };
    (limits, shape)
}

/// Returns the calls for the kernels of one file.
fn works(entry: &str, kernels: &Kernels, rng: &mut Rng) -> Vec<Work> {
    let mut works = Vec::new();
    if let Some(family) = entry.strip_prefix("coded_") {
        let kinds = KERNEL_CODECS.into_iter();
        for kind in kinds.filter(|&kind| kernel_family(kind) == family) {
            let mut specs = CodecSpec::samples();
            specs.retain(|spec| spec.kind == kind);
            let keeps = |spec: &CodecSpec| matches!(spec.scale, ScaleRule::Tensor { .. });
            let (kept, blocks): (Vec<CodecSpec>, Vec<CodecSpec>) =
                specs.into_iter().partition(keeps);
            let dtypes = DType::ALL.into_iter().filter(|dtype| dtype.has_codecs());
            for (dtype, shape) in dtypes.flat_map(|dtype| {
                shapes(|_| true)
                    .into_iter()
                    .map(move |shape| (dtype, shape))
            }) {
                let spec = rng.pick(&blocks);
                let coded = work(shape, dtype, spec, KernelProtocol::SIMPLE, rng);
                let own: Vec<CodecSpec> = KernelIntra::own_codecs().collect();
                let (plain, with_blocks) = own.split_at(3);
                let mut inside = plain.to_vec();
                inside.push(rng.pick(with_blocks));
                works.extend(
                    inside
                        .into_iter()
                        .filter_map(|intra| intra_by(&coded, intra, spec)),
                );
                works.push(coded);
                if !kept.is_empty() && rng.below(2) == 0 {
                    works.push(work(
                        shape,
                        dtype,
                        rng.pick(&kept),
                        KernelProtocol::SIMPLE,
                        rng,
                    ));
                }
            }
        }
        return works;
    }
    let protocols = [
        KernelProtocol::SIMPLE,
        KernelProtocol::LL,
        KernelProtocol::LL128,
    ];
    let moves = entry == "move";
    for dtype in DType::ALL {
        if !moves && !kernels.has(&format!("{KERNEL_PREFIX}raw_{dtype}")) {
            continue;
        }
        for shape in shapes(|collective| collective.reduces() != moves) {
            for kernel in protocols {
                works.push(work(shape, dtype, CodecSpec::RAW, kernel, rng));
            }
        }
    }
    works
}

/// Returns the call with another codec inside groups, if it has groups and communicators have such a default codec for it.
fn intra_by(work: &Work, intra: CodecSpec, inter: CodecSpec) -> Option<Work> {
    let is_default = matches!(
        work.call.collective,
        Collective::AllReduce | Collective::ReduceScatter
    );
    let mut by_level = work.clone();
    by_level.call.codec = Some(CodecSetting {
        intra,
        inter,
        auto: false,
    });
    let is_hierarchical = work.call.algorithm == Some(Algorithm::Hierarchical);
    (is_default && is_hierarchical && intra != inter).then_some(by_level)
}

fn is_by_level(work: &Work) -> bool {
    work.call.codec.is_some_and(|codec| codec.is_by_level())
}

/// Returns a call whose other properties are random.
fn work(
    shape: (Collective, Algorithm),
    dtype: DType,
    spec: CodecSpec,
    kernel: KernelProtocol,
    rng: &mut Rng,
) -> Work {
    let nranks = match shape.1 {
        Algorithm::Hierarchical => rng.pick(&[3, 4, 5]),
        _ => rng.pick(&RANKS),
    };
    work_of(nranks, shape, dtype, spec, kernel, rng)
}

/// Returns a call of [`MANY`] ranks by each algorithm of the file's collectives that can run on so many.
fn works_of_many(entry: &str, rng: &mut Rng) -> Vec<Work> {
    let (spec, kernels) = match entry {
        "move" | "raw_float" => ("raw", &[KernelProtocol::SIMPLE, KernelProtocol::LL][..]),
        "coded_linear8" => ("linear8", &[KernelProtocol::SIMPLE][..]),
        _ => return Vec::new(),
    };
    let shapes = shapes(|collective| spec != "raw" || collective.reduces() == (entry != "move"));
    let flat = |shape: &(Collective, Algorithm)| shape.1 != Algorithm::Hierarchical;
    let mut works = Vec::new();
    for shape in shapes.into_iter().filter(flat) {
        let spec: CodecSpec = spec.parse().unwrap();
        let kernel = rng.pick(kernels);
        let mut work = work_of(MANY, shape, DType::F32, spec, kernel, rng);
        work.blocks = 1;
        work.call.count = rng.pick(&[31, 700]);
        works.push(work);
    }
    works
}

fn work_of(
    nranks: usize,
    (collective, algorithm): (Collective, Algorithm),
    dtype: DType,
    spec: CodecSpec,
    kernel: KernelProtocol,
    rng: &mut Rng,
) -> Work {
    let is_lossy = spec.is_lossy();
    let factor = match dtype.is_float() {
        true => Scalar::Float(rng.pick(&[0.5, -1.25, 3.0])),
        false => Scalar::Int(2),
    };
    let mut ops = vec![ReduceOp::Sum, ReduceOp::Avg, ReduceOp::PreMulSum(factor)];
    if !is_lossy {
        ops.extend([ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min]);
    }
    let op = match collective.reduces() {
        true => rng.pick(&ops),
        false => ReduceOp::Sum,
    };
    let counts: &[usize] = match kernel {
        KernelProtocol::SIMPLE => &[1, 31, 700, 2048, 5000, 9000],
        _ => &[1, 5, 31, 700, 2050],
    };
    let root = match collective.has_root() || collective.is_message() {
        true => rng.below(nranks),
        false => 0,
    };
    // Residuals of stochastic rounding could grow without bound, so some codecs refuse them.
    let feeds = is_lossy && collective.reduces() && spec.seed == 0 && rng.below(4) == 0;
    let patterns = match is_lossy {
        true => [Pattern::Gaussian, Pattern::HeavyTailed],
        false => [Pattern::Uniform, Pattern::Small],
    };
    let mut spec = spec;
    let keeps = matches!(spec.scale, ScaleRule::Tensor { .. });
    if keeps {
        spec.scale = ScaleRule::Tensor {
            refresh: rng.pick(&[1, 2, 3]),
        };
    }
    Work {
        call: Call {
            op,
            root,
            peer: match collective.is_message() {
                true => (root + 1 + rng.below(nranks - 1)) % nranks,
                false => 0,
            },
            codec: Some(CodecSetting {
                intra: spec,
                inter: spec,
                auto: false,
            }),
            algorithm: Some(algorithm),
            feedback: feeds.then_some(1),
            tensor: keeps.then_some(1),
            wrapping_average: true,
            ..Call::new(collective, dtype, rng.pick(counts))
        },
        nranks,
        kernel,
        blocks: 1 + rng.below(2),
        in_place: collective != Collective::AllToAll && rng.below(2) == 0,
        shift: rng.pick(&[0, 0, 0, 1]),
        data: Data {
            pattern: rng.pick(&patterns),
            dtype,
            seed: rng.next(),
        },
        times: match (keeps, feeds) {
            (true, _) => 4,
            (false, true) => 2,
            (false, false) => 1,
        },
        is_poisoned: dtype.is_float() && rng.below(if keeps { 2 } else { 4 }) == 0,
    }
}

/// Returns the outputs of all ranks of the host engine, by call and time. A call names one codec; a codec by level is the default of
/// a communicator whose ranks have groups, so a call with one is alone.
fn by_host(works: &[Work], limits: &Limits) -> Vec<Vec<Vec<u8>>> {
    let mut config = Config {
        slot_bytes: 256 << 10,
        buffer_bytes: 1 << 30,
        ..support::config(TransportKind::Loopback)
    };
    if let [Work { call, .. }] = works
        && let Some(codec) = call.codec.filter(|codec| codec.is_by_level())
    {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/topology/B.xml");
        (config.codec, config.topology) = (codec, FileChoice::File(file.into()));
    }
    let mut by_rank = local_world(limits.nranks, &config, |comm| {
        let rank = comm.rank();
        let run = |(index, work): (usize, &Work)| {
            comm.copy_limits(work.limits(limits)).unwrap();
            let mut output = vec![0; work.bytes(rank)[1]];
            let mut outputs = Vec::new();
            for time in 0..work.times {
                let call = Call {
                    op: work.op(rank),
                    codec: work.call.codec.filter(|_| !is_by_level(work)),
                    feedback: work.call.feedback.map(|_| index as u64),
                    tensor: work.call.tensor.map(|_| index as u64),
                    ..work.call
                };
                if work.takes_part(rank) {
                    let input = work.input(rank, time);
                    let buffers = UserBuffers::new(&input, &mut output);
                    let run = comm.call(&call, buffers);
                    run.unwrap_or_else(|error| panic!("{work}: {error}"));
                }
                outputs.extend_from_slice(&output);
            }
            outputs
        };
        works.iter().enumerate().map(run).collect::<Vec<_>>()
    });
    let mut outputs: Vec<Vec<Vec<u8>>> = vec![Vec::new(); works.len()];
    for by_call in &mut by_rank {
        for (outputs, output) in outputs.iter_mut().zip(by_call.drain(..)) {
            outputs.push(output);
        }
    }
    outputs
}

/// Returns the index of the first element that differs; all NaNs count as equal.
fn difference(dtype: DType, a: &[u8], b: &[u8]) -> Option<usize> {
    let elements = a.chunks(dtype.size()).zip(b.chunks(dtype.size()));
    let is_nan = |element: &[u8]| dtype.is_float() && value(dtype, element).is_nan();
    let differ = |(a, b): (&[u8], &[u8])| a != b && !(is_nan(a) && is_nan(b));
    elements.map(differ).position(|differs| differs)
}

/// Makes all calls of one number of ranks; returns how many have a plan. Adds a sentence to `wrong`
/// for each call whose output differs.
fn check(kernels: &Kernels, nranks: usize, mut works: Vec<Work>, wrong: &mut Vec<String>) -> usize {
    let (limits, shape) = limits(nranks);
    let mut world = World::new(limits.clone(), shape);
    let mut plans = Vec::new();
    works.retain(|work| {
        let found: Option<Vec<_>> = (0..nranks).map(|rank| world.plan(work, rank)).collect();
        let is_there = found.is_some();
        plans.extend(found);
        is_there
    });
    if works.is_empty() {
        return 0;
    }
    let expected = by_host(&works, &limits);
    for ((work, plans), expected) in works.iter().zip(&plans).zip(&expected) {
        let memory = |rank: usize| RankMemory {
            buffers: Buffers::new(work, rank),
            residuals: work.call.feedback.map(|_| Residuals::new(work)),
            scales: work.call.tensor.map(|_| Scales::new(work, &plans[rank])),
            // Messages take no statistics.
            statistics: (takes_verdict(&plans[rank]) && !work.call.collective.is_message())
                .then_some(OLD_STATISTICS),
        };
        let mut memory: Vec<_> = (0..nranks).map(memory).collect();
        for time in 0..work.times {
            for (rank, one) in memory.iter_mut().enumerate() {
                one.buffers.reset(&work.input(rank, time));
            }
            let run = world.run(kernels, work, plans, &mut memory);
            run.unwrap_or_else(|trouble| panic!("{work}: {trouble:?}"));
            let mut outputs = memory.iter_mut().zip(expected).enumerate();
            let differs = outputs.find_map(|(rank, (memory, expected))| {
                let output = memory.buffers.output(work);
                if let Some(wrong) = verdict_of(work, &output, memory) {
                    return Some(format!("{work}: call {time}, rank {rank}: {wrong}"));
                }
                let expected = &expected[time * output.len()..][..output.len()];
                let at = difference(work.call.dtype, &output, expected)?;
                let size = work.call.dtype.size();
                let [found, expected] = [&output[..], expected].map(|all| &all[at * size..][..size]);
                Some(format!(
                    "{work}: call {time}, rank {rank}, element {at} is {found:x?}, not {expected:x?}"
                ))
            });
            if let Some(differs) = differs {
                wrong.push(differs);
                break;
            }
        }
    }
    // The host engine has numbered its calls in the order of those above.
    let checked = Checked {
        works: &works,
        plans: &plans,
        expected: &expected,
    };
    check_together(kernels, &mut world, checked, wrong);
    works.len()
}

/// Statistics of another call, which the next one replaces.
const OLD_STATISTICS: CallStatistics = CallStatistics {
    saturated: 77,
    non_finite: 77,
    sum_squares: 77.0,
    abs_max: 77.0,
    verdict: 77,
    known: 77,
    has_input: 77,
    unused: [77; 5],
};

/// Returns what is wrong with the statistics that a call's kernel has written.
fn verdict_of(work: &Work, output: &[u8], memory: &mut RankMemory) -> Option<String> {
    let found = memory.statistics?;
    memory.statistics = Some(OLD_STATISTICS);
    let elements = output.chunks(work.call.dtype.size());
    let is_finite = |element| value(work.call.dtype, element).is_finite();
    let expected = CallStatistics {
        verdict: u32::from(!elements.into_iter().all(is_finite)),
        known: CallStatistics::NON_FINITE,
        ..CallStatistics::default()
    };
    (found != expected).then(|| format!("{found:?}, not {expected:?}"))
}

/// Launches of several calls that are checked for each number of ranks and file.
const TOGETHER: usize = 6;

/// Calls with the plans of all ranks, and with the outputs of all ranks on the host.
struct Checked<'a> {
    works: &'a [Work],
    plans: &'a [Vec<Arc<Plan>>],
    expected: &'a [Vec<Vec<u8>>],
}

/// Makes neighbouring calls of one kernel in one launch. Calls with state, or with random numbers by their place in the
/// order of calls, take no part.
fn check_together(
    kernels: &Kernels,
    world: &mut World,
    Checked {
        works,
        plans,
        expected,
    }: Checked<'_>,
    wrong: &mut Vec<String>,
) {
    let takes_part = |at: &usize| {
        let Work { call, .. } = &works[*at];
        let spec = call.codec.unwrap().inter;
        let is_random = spec.seed != 0 || spec.kind == CodecKind::TernGrad;
        works[*at].times == 1
            && works[*at].nranks <= MAX_PEERS
            && !call.collective.is_message()
            && !is_random
            && !is_by_level(&works[*at])
    };
    let all: Vec<usize> = (0..works.len()).filter(takes_part).collect();
    let name = |at: usize| (name_for(&plans[at][0]), works[at].kernel);
    let mut rest = &all[..];
    for _ in 0..TOGETHER {
        let mut channels = 0;
        let fits = |at: &&usize| {
            channels += plans[**at][0].channels;
            name(**at) == name(rest[0]) && channels <= CHANNELS
        };
        let (together, others) = rest.split_at(rest.iter().take_while(fits).count());
        if together.is_empty() {
            return;
        }
        rest = others;
        let calls: Vec<(&Work, &[Arc<Plan>])> = together
            .iter()
            .map(|&at| (&works[at], &plans[at][..]))
            .collect();
        let memory = |work: &Work| {
            let rank = |rank| RankMemory {
                buffers: Buffers::new(work, rank),
                residuals: None,
                scales: None,
                statistics: None,
            };
            (0..work.nranks).map(rank).collect::<Vec<_>>()
        };
        let mut memory: Vec<Vec<RankMemory>> =
            together.iter().map(|&at| memory(&works[at])).collect();
        let run = world.run_together(kernels, &calls, &mut memory);
        run.unwrap_or_else(|trouble| panic!("{} and others: {trouble:?}", works[together[0]]));
        for (&at, memory) in together.iter().zip(&mut memory) {
            for (rank, (memory, expected)) in memory.iter_mut().zip(&expected[at]).enumerate() {
                let output = memory.buffers.output(&works[at]);
                if difference(works[at].call.dtype, &output, expected).is_some() {
                    wrong.push(format!(
                        "{}: rank {rank} in a launch of several calls",
                        works[at]
                    ));
                }
            }
        }
    }
}

/// Compiles one file and makes all its calls, as [`check`] does.
fn check_entry(entry: &str, seed: u64, wrong: &mut Vec<String>) -> usize {
    let begin = Instant::now();
    let Some(kernels) = Kernels::compile(entry) else {
        return 0;
    };
    let compiled = begin.elapsed();
    let mut rng = Rng(seed);
    let works = works(entry, &kernels, &mut rng);
    let mut ran = 0;
    for nranks in RANKS {
        let alike = works.iter().filter(|work| work.nranks == nranks).cloned();
        let (by_level, alike): (Vec<Work>, Vec<Work>) = alike.partition(is_by_level);
        ran += check(&kernels, nranks, alike, wrong);
        for one in by_level {
            ran += check(&kernels, nranks, vec![one], wrong);
        }
    }
    ran += check(&kernels, MANY, works_of_many(entry, &mut rng), wrong);
    println!(
        "{entry}: {ran} calls, {compiled:.1?} to compile, {:.1?} in all",
        begin.elapsed()
    );
    ran
}

#[test]
fn schedule_kernels_equal_the_host_engine() {
    let seed = support::seed();
    let left = Mutex::new(entries());
    let found = Mutex::new((0, 0, Vec::new()));
    let next = || left.lock().unwrap().pop();
    // Each file has a library with memory of its own, so the files are tested side by side.
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(4)
        {
            scope.spawn(|| {
                while let Some(entry) = next() {
                    let mut wrong = Vec::new();
                    let ran = check_entry(&entry, seed, &mut wrong);
                    let mut found = found.lock().unwrap();
                    found.0 += ran;
                    found.1 += usize::from(ran > 0);
                    found.2.append(&mut wrong);
                }
            });
        }
    });
    let (ran, files, wrong) = found.into_inner().unwrap();
    println!("{ran} calls by kernels of {files} files equal the host engine");
    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(!starts("g++") || files == entries().len(), "{files} files");
}
