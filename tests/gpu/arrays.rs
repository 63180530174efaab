//! Tests codecs for whole arrays on a GPU: encoding and decoding in both layouts at any alignment. For equal elements the GPU's bytes must equal the host's.

#![allow(unsafe_code)] // kernels take raw addresses

use crate::arena::{PATIENCE, context};
use crate::codecs::{both_nan, mixture};
use crate::cover::Rng;
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::options::Options;
use cinch::arrays::{CodecKernels, CopyTarget, DeviceCodec, Elements, HostCopier};
use cinch::arrays::{Layout, StandAlone};
use cinch::cpu::Isa;
use cinch::gpu::{CaptureMode, DeviceMemory, Graph, Stream};
use cinch::reduce::{narrow, widen};
use cinch::testing::{Random, has_near_ties};
use cinch::types::{CodecKind, CodecSpec, ScaleRule};
use cinch::{DType, ErrorKind, Result};
use std::sync::Arc;

pub const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Byte that fills the memory around arrays.
pub const PADDING: u8 = 0xee;
/// Padding bytes before and behind an array. An array may begin up to 15 bytes later.
const MARGIN: usize = 64;
const PUBLISHED: [&str; 11] = [
    "minmax1",
    "minmax2",
    "minmax4",
    "minmax8",
    "minmax1:seed=2",
    "minmax2:seed=9",
    "minmax4:seed=7",
    "minmax8:seed=3",
    "trunc8",
    "trunc16",
    "trunc24",
];

pub fn checks(options: &Options) -> Vec<Check> {
    let limit = options.either(60, 240);
    vec![
        Check::new("arrays/chunks", 1, chunks).within(limit),
        Check::new("arrays/near-ties", 1, near_ties),
        Check::new("arrays/published", 1, published).within(limit),
        Check::new("arrays/corrupt-headers", 1, corrupt_headers),
        Check::new("arrays/refusals", 1, refusals),
        Check::new("arrays/graph", 1, graph),
        Check::new("sanitize/arrays", 1, sanitized).within(280),
    ]
}

/// Returns the codec settings that arrays support on a GPU: all but tensor scales.
pub fn specs() -> Vec<CodecSpec> {
    let kept =
        |spec: &CodecSpec| spec.kind.has_scale() && matches!(spec.scale, ScaleRule::Tensor { .. });
    let mut all = CodecSpec::samples();
    all.retain(|spec| !kept(spec));
    all
}

/// GPU memory for an array and its encoding.
pub struct Bench {
    pub kernels: Arc<CodecKernels>,
    pub stream: Stream,
    wire: DeviceMemory,
    pub elements: DeviceMemory,
}

impl Bench {
    pub fn new(most: usize) -> Result<Bench> {
        let context = context(0)?;
        Ok(Bench {
            kernels: Arc::new(CodecKernels::new(&context)?),
            stream: Stream::new(&context)?,
            wire: DeviceMemory::new(&context, 5 * most + 4096)?,
            elements: DeviceMemory::new(&context, 4 * most + 4096)?,
        })
    }

    /// Writes `bytes` at offset `at` of `memory` and fills the memory around with padding. The
    /// array is `room` bytes long.
    fn put(&self, memory: &DeviceMemory, at: usize, bytes: &[u8], room: usize) -> Result<()> {
        let mut all = vec![PADDING; at + room + MARGIN];
        all[at..at + bytes.len()].copy_from_slice(bytes);
        memory.write(0, &all, &self.stream, PATIENCE)
    }

    /// Reads the array of `bytes` bytes at offset `at`. Fails if the padding around it has changed.
    fn take(
        &self,
        memory: &DeviceMemory,
        at: usize,
        bytes: usize,
    ) -> std::result::Result<Vec<u8>, Stop> {
        let mut all = vec![0; at + bytes + MARGIN];
        memory.read(0, &mut all, &self.stream, PATIENCE)?;
        let outside = all[..at].iter().chain(&all[at + bytes..]);
        ensure(outside.copied().all(|byte| byte == PADDING), || {
            "something beside the array was written".into()
        })?;
        Ok(all[at..at + bytes].to_vec())
    }

    /// Encodes and decodes `values` as `dtype` on GPU and host and compares the bytes. The wire
    /// begins `wire_at` bytes behind a 16-byte boundary, the array `element_at` elements behind
    /// one.
    fn check(
        &self,
        spec: CodecSpec,
        layout: Layout,
        dtype: DType,
        values: &[f32],
        (wire_at, element_at): (usize, usize),
    ) -> std::result::Result<(), Stop> {
        let (n, size) = (values.len(), dtype.size());
        let (wire_at, at) = (MARGIN + wire_at, MARGIN + element_at * size);
        let what = || format!("{spec} {layout:?} of {n} {dtype} at {wire_at} and {at}");
        let mut bytes = vec![0; n * size];
        narrow(dtype, Isa::Scalar, values, &mut bytes);
        let mut values = vec![0f32; n];
        widen(dtype, Isa::Scalar, &bytes, &mut values);
        let host = StandAlone::new(spec, layout, Isa::Scalar)?;
        let device = DeviceCodec::new(&self.kernels, spec, layout)?;
        let need = host.bytes(n);
        ensure(device.bytes(n) == need, || {
            format!("{}: other sizes", what())
        })?;
        let mut wire = vec![0; need];
        host.encode(&values, n as u64, &mut wire)?;

        let elements = Elements {
            address: self.elements.address() + at as u64,
            count: n,
            dtype,
        };
        let place = (self.wire.address() + wire_at as u64, need);
        self.put(&self.elements, at, &bytes, bytes.len())?;
        self.put(&self.wire, wire_at, &[], need)?;
        // SAFETY: `Bench` owns the memory, and `take` waits for every use of it.
        unsafe { device.encode(elements, n as u64, place, &self.stream)? };
        let found = self.take(&self.wire, wire_at, need)?;
        if let Some(byte) = (0..need).find(|&byte| wire[byte] != found[byte]) {
            return Stop::wrong(format!(
                "{}: byte {byte} of {need} is {:#04x}, on the host {:#04x}",
                what(),
                found[byte],
                wire[byte]
            ));
        }

        let mut decoded = vec![0f32; n];
        host.decode(&wire, &mut decoded)?;
        let mut expected = vec![0; n * size];
        narrow(dtype, Isa::Scalar, &decoded, &mut expected);
        self.put(&self.elements, at, &[], bytes.len())?;
        // SAFETY: `Bench` owns the memory, and `take` waits for every use of it.
        unsafe { device.decode(place, elements, &self.stream)? };
        let found = self.take(&self.elements, at, bytes.len())?;
        for element in 0..n {
            let range = element * size..(element + 1) * size;
            let (got, wanted) = (&found[range.clone()], &expected[range]);
            if got != wanted && !both_nan(dtype, got, wanted) {
                return Stop::wrong(format!(
                    "{}: element {element} decodes to {got:02x?}, on the host to {wanted:02x?}",
                    what()
                ));
            }
        }
        Ok(())
    }
}

fn chunks(setup: &Setup) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ 0xa1);
    let most = 300_000;
    let bench = Bench::new(most)?;
    let mut ran = 0;
    for spec in specs() {
        for n in [0, 1, 15, 17, 255, 513, 4097, 40_003, most] {
            for dtype in TYPES {
                for element_at in [0, 1] {
                    let values = mixture(&mut rng, n);
                    bench.check(spec, Layout::Chunk, dtype, &values, (0, element_at))?;
                    ran += 1;
                }
            }
        }
    }
    Ok(format!("{ran} arrays"))
}

/// The elements of each block are near ties, so that a wrong order of the sums changes the block's numbers.
fn near_ties(setup: &Setup) -> Verdict {
    let mut random = Random::new(setup.options.seed ^ 0xa5);
    let most = 300_000;
    let bench = Bench::new(most)?;
    let mut ran = 0;
    for (kind, blocks) in [
        (CodecKind::OneBit, &[32, 64, 256, 512, 4096][..]),
        (CodecKind::TernGrad, &[64, 256, 1024, 4096]),
    ] {
        for &block in blocks {
            let scale = ScaleRule::Block(block);
            let spec = CodecSpec {
                scale,
                ..CodecSpec::of(kind)
            };
            for dtype in TYPES {
                if !has_near_ties(kind, dtype) {
                    continue;
                }
                for element_at in [0, 1] {
                    let values = random.near_ties(kind, block as usize, most / block as usize);
                    bench.check(spec, Layout::Chunk, dtype, &values, (0, element_at))?;
                    ran += 1;
                }
            }
        }
    }
    Ok(format!("{ran} arrays"))
}

fn published(setup: &Setup) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ 0xa2);
    let most = 300_000;
    let bench = Bench::new(most)?;
    let mut ran = 0;
    for text in PUBLISHED {
        let spec: CodecSpec = text.parse()?;
        for n in (0..40).chain([255, 256, 257, 4097, 70_001, most]) {
            let dtype = rng.pick(&TYPES);
            for wire_at in [0, 1, 2, 3, 6, 10] {
                let values = mixture(&mut rng, n);
                let at = (wire_at, n % 3);
                bench.check(spec, Layout::Published, dtype, &values, at)?;
                ran += 1;
            }
        }
        let mut poisoned = mixture(&mut rng, 5000);
        poisoned[4321] = f32::NEG_INFINITY;
        bench.check(spec, Layout::Published, DType::F32, &poisoned, (0, 0))?;
    }
    Ok(format!("{ran} arrays"))
}

/// Decoding must give NaN for every element if the header names another element count or code
/// width.
fn corrupt_headers(_: &Setup) -> Verdict {
    let bench = Bench::new(1000)?;
    let n = 333;
    let spec: CodecSpec = "minmax2".parse()?;
    let host = StandAlone::new(spec, Layout::Published, Isa::Scalar)?;
    let device = DeviceCodec::new(&bench.kernels, spec, Layout::Published)?;
    let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let mut wire = vec![0; host.bytes(n)];
    host.encode(&values, 0, &mut wire)?;
    let nan = f32::NAN.to_le_bytes();
    let changes: [(usize, u8); 4] = [(0, 4), (1, 0), (1, 255), (5, nan[3])];
    for (number, (at, byte)) in changes.into_iter().enumerate() {
        let mut wire = wire.clone();
        wire[at] = byte;
        if at == 5 {
            wire[2..6].copy_from_slice(&nan);
        }
        bench.put(&bench.wire, MARGIN, &wire, wire.len())?;
        bench.put(&bench.elements, MARGIN, &[], 4 * n)?;
        let place = (bench.wire.address() + MARGIN as u64, wire.len());
        let elements = Elements {
            address: bench.elements.address() + MARGIN as u64,
            count: n,
            dtype: DType::F32,
        };
        // SAFETY: `Bench` owns the memory, and `take` waits for every use of it.
        unsafe { device.decode(place, elements, &bench.stream)? };
        let found = bench.take(&bench.elements, MARGIN, 4 * n)?;
        let all = found
            .chunks_exact(4)
            .all(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]).is_nan());
        ensure(all, || {
            format!("change {number} of the header was accepted")
        })?;
    }
    Ok(format!("{} headers", changes.len()))
}

fn refusals(_: &Setup) -> Verdict {
    let bench = Bench::new(1000)?;
    let mut count = 0;
    let mut refuses = |done: Result<()>, kind: ErrorKind, word: &str| {
        count += 1;
        match done {
            Err(error) if error.kind() == kind && error.message().contains(word) => Ok(()),
            other => Stop::wrong(format!("expected {kind:?} with {word:?}: {other:?}")),
        }
    };
    let new =
        |text: &str, layout| DeviceCodec::new(&bench.kernels, text.parse::<CodecSpec>()?, layout);
    let unsupported = ErrorKind::Unsupported;
    refuses(
        new("linear8:tensor=1", Layout::Chunk).map(drop),
        unsupported,
        "block=B",
    )?;
    refuses(
        new("linear8", Layout::Published).map(drop),
        unsupported,
        "published",
    )?;
    let codec = new("minmax4", Layout::Chunk)?;
    let (wire, address) = (bench.wire.address(), bench.elements.address());
    let wrong = ErrorKind::InvalidArgument;
    for (at, element, dtype, room, kind, word) in [
        (wire, address, DType::F32, 10, wrong, "bytes when encoded"),
        (wire + 8, address, DType::F32, 4000, wrong, "aligned to 16"),
        (wire, address + 2, DType::F32, 4000, wrong, "aligned to 4"),
        (wire, address, DType::I32, 4000, unsupported, "i32"),
        (address + 16, address, DType::F32, 4000, wrong, "overlap"),
    ] {
        let elements = Elements {
            address: element,
            count: 1000,
            dtype,
        };
        // SAFETY: the codec checks its arguments first and refuses them, so no kernel uses the
        // addresses.
        unsafe {
            let stream = &bench.stream;
            refuses(codec.encode(elements, 0, (at, room), stream), kind, word)?;
            refuses(codec.decode((at, room), elements, stream), kind, word)?;
        }
    }
    let copier = HostCopier::new(bench.kernels.context(), 2, PATIENCE)?;
    let host = vec![0u8; 4000];
    let other = Stream::new(bench.kernels.context())?;
    let spec: CodecSpec = "trunc16".parse()?;
    Graph::capture(&bench.stream, CaptureMode::Relaxed, |stream| {
        let target = |stream| CopyTarget {
            copier: &copier,
            address,
            stream,
        };
        let targets = [target(stream), target(&other)];
        // SAFETY: the copier compares the streams first and refuses the call, so nothing uses the
        // address.
        let done = unsafe { HostCopier::to_devices(spec, DType::F32, 0, &host, &targets) };
        refuses(done, ErrorKind::InvalidUsage, "several streams")
            .map_err(|_| cinch::Error::internal("a captured copy was not refused"))
    })?;
    Ok(format!("{count} refusals"))
}

/// Each replay of a captured call must encode the elements that are in memory at that time.
fn graph(setup: &Setup) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ 0xa3);
    let n = 10_000;
    let bench = Bench::new(n)?;
    for (text, layout) in [("minmax4", Layout::Published), ("dynamic8", Layout::Chunk)] {
        let spec: CodecSpec = text.parse()?;
        let host = StandAlone::new(spec, layout, Isa::Scalar)?;
        let device = DeviceCodec::new(&bench.kernels, spec, layout)?;
        let elements = Elements {
            address: bench.elements.address(),
            count: n,
            dtype: DType::F32,
        };
        let place = (bench.wire.address(), host.bytes(n));
        let graph = Graph::capture(&bench.stream, CaptureMode::Relaxed, |stream| {
            // SAFETY: `bench` owns the memory and outlives the graph, and the loop waits for each
            // replay.
            unsafe { device.encode(elements, 0, place, stream) }
        })?;
        for _ in 0..3 {
            let values = mixture(&mut rng, n);
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            bench.elements.write(0, &bytes, &bench.stream, PATIENCE)?;
            graph.launch(&bench.stream)?;
            bench.stream.wait(PATIENCE)?;
            let (mut found, mut wire) = (vec![0; host.bytes(n)], vec![0; host.bytes(n)]);
            bench.wire.read(0, &mut found, &bench.stream, PATIENCE)?;
            host.encode(&values, 0, &mut wire)?;
            ensure(found == wire, || {
                format!("{text}: a replay gave other bytes")
            })?;
        }
    }
    Ok("6 replays".into())
}

/// compute-sanitizer runs this check; see scripts/test-gpu.
fn sanitized(_: &Setup) -> Verdict {
    let mut rng = Rng::new(2);
    let bench = Bench::new(10_000)?;
    let mut ran = 0;
    for text in PUBLISHED {
        for n in [1, 37, 4999] {
            let values = mixture(&mut rng, n);
            bench.check(
                text.parse()?,
                Layout::Published,
                DType::F32,
                &values,
                (3, 1),
            )?;
            ran += 1;
        }
    }
    Ok(format!("{ran} arrays"))
}
