//! Tests packed copies between host memory and GPUs: to one and several arrays, and in graphs.

#![allow(unsafe_code)] // copies take raw addresses

use crate::arena::{PATIENCE, context};
use crate::arrays::{Bench, PADDING, TYPES, specs};
use crate::codecs::{both_nan, mixture};
use crate::cover::Rng;
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::options::Options;
use cinch::DType;
use cinch::arrays::{CopyTarget, HostCopier, Layout, StandAlone};
use cinch::cpu::Isa;
use cinch::gpu::{CaptureMode, Context, DeviceMemory, Graph, Stream};
use cinch::reduce::{narrow, widen};
use cinch::types::{CodecKind, CodecSpec};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub fn checks(options: &Options) -> Vec<Check> {
    let limit = options.either(60, 240);
    vec![
        Check::new("arrays/copies", 1, copies).within(limit),
        Check::new("arrays/captured-copies", 1, captured_copies).within(limit),
        Check::new("arrays/copies-to-several", 1, copies_to_several).within(limit),
        Check::new("arrays/copies-to-2-gpus", 2, copies_to_several).within(limit),
    ]
}

fn copies(setup: &Setup) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ 0xa4);
    let most = setup.options.either(3_000_000, 20_000_000);
    let bench = Bench::new(most)?;
    let (stream, memory) = (&bench.stream, &bench.elements);
    let mut ran = 0;
    for workers in [1, 3, 0] {
        let copier = HostCopier::new(bench.kernels.context(), workers, PATIENCE)?;
        let packs = |spec: &CodecSpec| spec.kind == CodecKind::Trunc16;
        for spec in specs().into_iter().filter(packs) {
            for dtype in TYPES {
                let size = dtype.size();
                // Covers sizes within a piece, sizes next to the end of a piece, and several pieces
                // per worker.
                let n = rng.pick(&[1, 1000, 262_143, 262_144, 262_145, most / 2, most]);
                let values = mixture(&mut rng, n);
                // Host memory may have any alignment, so the array begins one byte behind an
                // aligned address.
                let mut host = vec![0u8; n * size + 1];
                narrow(dtype, Isa::Scalar, &values, &mut host[1..]);
                let mut exact = vec![0f32; n];
                widen(dtype, Isa::Scalar, &host[1..], &mut exact);
                let (draw, what) = (ran as u64, || format!("{spec} of {n} {dtype}"));
                let expected = through_codec(spec, dtype, &exact, draw)?;
                let at = memory.address() + 16;
                memory.fill(PADDING, stream)?;
                // SAFETY: `bench` owns the memory, and the read below waits for the copy.
                unsafe { copier.to_device(spec, dtype, draw, &host[1..], at, stream)? };
                // The host's array may change as soon as `to_device` returns.
                host.fill(PADDING);
                let mut there = vec![0; n * size + 32];
                memory.read(0, &mut there, stream, PATIENCE)?;
                let (before, rest) = there.split_at(16);
                let (found, behind) = rest.split_at(n * size);
                ensure(before.iter().chain(behind).all(|&b| b == PADDING), || {
                    format!("{}: bytes beside the array were written", what())
                })?;
                same(dtype, found, &expected).map_err(|stop| stop.context(what()))?;

                // The elements on the GPU have passed the codec once, and a second pass might not
                // change them. Hence the copy to the host starts from fresh elements.
                let mut bytes = vec![0; n * size];
                narrow(dtype, Isa::Scalar, &exact, &mut bytes);
                memory.write(16, &bytes, stream, PATIENCE)?;
                // SAFETY: `bench` owns the memory, and `to_host` returns after the copy.
                unsafe { copier.to_host(spec, dtype, draw, at, &mut host[1..], stream)? };
                ensure(host[0] == PADDING, || format!("{}: wrote before", what()))?;
                same(dtype, &host[1..], &expected).map_err(|stop| stop.context(what()))?;
                ran += 1;
            }
        }
    }
    Ok(format!("{ran} copies there and back"))
}

/// Each replay of a captured copy must carry the elements that the host array has at that time, to two arrays of the
/// GPU or from one of them.
fn captured_copies(setup: &Setup) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ 0xa6);
    let most = setup.options.either(5_000_000, 20_000_000);
    let room = 4 * most + 64;
    let context = context(0)?;
    let (memory, stream) = (
        DeviceMemory::new(&context, 2 * room)?,
        Stream::new(&context)?,
    );
    let mut ran = 0;
    for (number, (codec, dtype)) in [
        ("trunc16", DType::F32),
        ("trunc8", DType::BF16),
        ("linear8:seed=3", DType::F32),
        ("minmax4", DType::F16),
    ]
    .into_iter()
    .enumerate()
    {
        let spec: CodecSpec = codec.parse()?;
        let copier = HostCopier::new(&context, [0, 1, 3, 2][number], PATIENCE)?;
        for n in [1, 524_289, most] {
            let bytes = n * dtype.size();
            let what = || format!("{spec} of {n} {dtype}");
            // The array begins one byte behind an aligned address in every other case.
            let shift = ran % 2;
            let mut host = vec![0u8; bytes + shift];
            let targets = [0, 1].map(|array| CopyTarget {
                copier: &copier,
                address: memory.address() + (array * room + 16) as u64,
                stream: &stream,
            });
            let draw = ran as u64;
            let modes = [
                CaptureMode::Relaxed,
                CaptureMode::ThreadLocal,
                CaptureMode::Global,
            ];
            let mode = modes[ran / 2 % 3];
            let there = Graph::capture(&stream, mode, |_| {
                // SAFETY: host array and memory outlive the graph, and nothing else uses them during a replay.
                unsafe { HostCopier::to_devices(spec, dtype, draw, &host[shift..], &targets) }
            })?;
            // A copy back behind one to the GPU, and before work that overwrites the array.
            let mut returned = vec![0u8; bytes + shift];
            let both = Graph::capture(&stream, mode, |_| {
                // SAFETY: as above.
                unsafe {
                    HostCopier::to_devices(spec, dtype, draw, &host[shift..], &targets)?;
                    let (from, to) = (targets[0].address, &mut returned[shift..]);
                    copier.to_host(spec, dtype, draw, from, to, &stream)?;
                }
                memory.fill(PADDING, &stream)
            })?;
            for _ in 0..2 {
                let values = mixture(&mut rng, n);
                narrow(dtype, Isa::Scalar, &values, &mut host[shift..]);
                let mut exact = vec![0f32; n];
                widen(dtype, Isa::Scalar, &host[shift..], &mut exact);
                let expected = through_codec(spec, dtype, &exact, draw)?;
                memory.fill(PADDING, &stream)?;
                there.launch(&stream)?;
                there.launch(&stream)?;
                stream.wait(PATIENCE)?;
                for array in 0..2 {
                    let mut found = vec![0; bytes + 32];
                    memory.read(array * room, &mut found, &stream, PATIENCE)?;
                    let outside = found[..16].iter().chain(&found[16 + bytes..]);
                    ensure(outside.copied().all(|byte| byte == PADDING), || {
                        format!("{}: bytes beside array {array} were written", what())
                    })?;
                    same(dtype, &found[16..][..bytes], &expected)
                        .map_err(|stop| stop.context(what()))?;
                }
                both.launch(&stream)?;
                stream.wait(PATIENCE)?;
                widen(dtype, Isa::Scalar, &expected, &mut exact);
                let twice = through_codec(spec, dtype, &exact, draw)?;
                same(dtype, &returned[shift..], &twice)
                    .map_err(|stop| stop.context(format!("{} and back", what())))?;
                ran += 1;
            }
        }
    }
    let times = captured_times(&context, &memory, &stream, most)?;
    Ok(format!("{ran} replays there and back; {times}"))
}

/// Returns the times of a copy to the GPU and back, without and with a graph.
fn captured_times(
    context: &Arc<Context>,
    memory: &DeviceMemory,
    stream: &Stream,
    n: usize,
) -> std::result::Result<String, Stop> {
    let (spec, dtype): (CodecSpec, _) = ("trunc16".parse()?, DType::F32);
    let copier = HostCopier::new(context, 0, PATIENCE)?;
    let address = memory.address();
    let mut host = vec![1u8; 4 * n];
    let mut line = format!("{n} {dtype} by {spec}, ms:");
    for back in [false, true] {
        let mut queue = |stream: &Stream| {
            // SAFETY: host array and memory outlive the copies, and nothing else uses them.
            unsafe {
                match back {
                    false => copier.to_device(spec, dtype, 0, &host, address, stream),
                    true => copier.to_host(spec, dtype, 0, address, &mut host, stream),
                }
            }
        };
        let graph = Graph::capture(stream, CaptureMode::Relaxed, &mut queue)?;
        let mut best = [Duration::MAX; 2];
        for _ in 0..10 {
            for (by_graph, best) in best.iter_mut().enumerate() {
                let begin = Instant::now();
                match by_graph {
                    0 => queue(stream)?,
                    _ => graph.launch(stream)?,
                }
                stream.wait(PATIENCE)?;
                *best = (*best).min(begin.elapsed());
            }
        }
        let [plain, replay] = best.map(|time| time.as_secs_f64() * 1e3);
        let way = if back { "back" } else { "there" };
        line += &format!(" {way} {plain:.2}, in a graph {replay:.2};");
    }
    Ok(line)
}

/// Copies an array to several arrays at once: two streams of the first GPU have three, the second GPU, if there is one,
/// has one.
fn copies_to_several(setup: &Setup) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ 0xa5);
    let most = setup.options.either(5_000_000, 20_000_000);
    let room = 4 * most + 64;
    let mut gpus = Vec::new();
    for gpu in 0..setup.gpus.clone().unwrap_or(1).min(2) {
        let context = context(gpu)?;
        let copier = HostCopier::new(&context, [0, 2][gpu], PATIENCE)?;
        let arrays = [4, 1][gpu];
        let memory = DeviceMemory::new(&context, arrays * room)?;
        gpus.push((
            copier,
            memory,
            [Stream::new(&context)?, Stream::new(&context)?],
        ));
    }
    let mut ran = 0;
    for (codec, dtype) in [
        ("trunc16", DType::F32),
        ("trunc8", DType::BF16),
        ("linear8:seed=3", DType::F32),
    ] {
        let spec: CodecSpec = codec.parse()?;
        for n in [1, 524_287, 524_289, most] {
            let values = mixture(&mut rng, n);
            let bytes = n * dtype.size();
            let mut host = vec![0u8; bytes];
            narrow(dtype, Isa::Scalar, &values, &mut host);
            let mut exact = vec![0f32; n];
            widen(dtype, Isa::Scalar, &host, &mut exact);
            let expected = through_codec(spec, dtype, &exact, ran)?;
            let mut targets = Vec::new();
            for (gpu, (copier, memory, streams)) in gpus.iter().enumerate() {
                memory.fill(PADDING, &streams[0])?;
                streams[0].wait(PATIENCE)?;
                for array in 0..[3, 1][gpu] {
                    targets.push(CopyTarget {
                        copier,
                        address: memory.address() + (array * room + 16) as u64,
                        stream: &streams[array % 2],
                    });
                }
            }
            // SAFETY: the memory outlives the waits below, and nothing else uses it.
            unsafe { HostCopier::to_devices(spec, dtype, ran, &host, &targets)? };
            host.fill(PADDING);
            // A copy of the first GPU uses the same staging memory at once.
            let (copier, memory, streams) = &gpus[0];
            let beside = memory.address() + (3 * room + 16) as u64;
            // SAFETY: the memory outlives the waits below, and nothing else uses this part of it.
            unsafe { copier.to_device(spec, dtype, ran, &host, beside, &streams[1])? };
            for (gpu, (_, memory, streams)) in gpus.iter().enumerate() {
                for array in 0..[3, 1][gpu] {
                    let mut there = vec![0; bytes + 32];
                    // The stream of the array orders the read behind the copy.
                    memory.read(array * room, &mut there, &streams[array % 2], PATIENCE)?;
                    let what = || format!("{spec} of {n} {dtype}, array {array} of GPU {gpu}");
                    let outside = there[..16].iter().chain(&there[16 + bytes..]);
                    ensure(outside.copied().all(|byte| byte == PADDING), || {
                        format!("{}: bytes beside the array were written", what())
                    })?;
                    same(dtype, &there[16..][..bytes], &expected)
                        .map_err(|stop| stop.context(what()))?;
                }
            }
            ran += 1;
        }
    }
    Ok(format!("{ran} copies to {} GPUs", gpus.len()))
}

/// Encodes and decodes elements on the host. A packed copy must change the elements in an equal
/// way.
fn through_codec(
    spec: CodecSpec,
    dtype: DType,
    values: &[f32],
    draw: u64,
) -> std::result::Result<Vec<u8>, Stop> {
    let host = StandAlone::new(spec, Layout::Chunk, Isa::detect())?;
    let mut wire = vec![0; host.bytes(values.len())];
    host.encode(values, draw, &mut wire)?;
    let mut decoded = vec![0f32; values.len()];
    host.decode(&wire, &mut decoded)?;
    let mut bytes = vec![0; values.len() * dtype.size()];
    narrow(dtype, Isa::Scalar, &decoded, &mut bytes);
    Ok(bytes)
}

fn same(dtype: DType, found: &[u8], expected: &[u8]) -> std::result::Result<(), Stop> {
    let size = dtype.size();
    let pairs = found.chunks_exact(size).zip(expected.chunks_exact(size));
    for (at, (found, expected)) in pairs.enumerate() {
        if found != expected && !both_nan(dtype, found, expected) {
            let text = format!("element {at} is {found:02x?}, expected {expected:02x?}");
            return Stop::wrong(text);
        }
    }
    Ok(())
}
