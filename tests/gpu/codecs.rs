//! Tests codec kernels outside of collectives: their bytes must equal the bytes of the scalar
//! codecs on the host.

#![allow(unsafe_code)] // kernels take raw addresses

use crate::arena::{PATIENCE, context};
use crate::cover::Rng;
use crate::harness::{Check, Setup, Stop, Verdict};
use crate::options::Options;
use cinch::codec::{
    Codec, KERNEL_CODECS, RoundingRandom, Span, abs_max, array_family, build, kernel_params,
};
use cinch::cpu::Isa;
use cinch::gpu::{DeviceMemory, Function, Stream, kernels};
use cinch::reduce::{narrow, widen};
use cinch::testing::gaussian;
use cinch::types::{CodecKind, CodecSpec, ScaleRule};
use cinch::{DType, Result};
use std::sync::Arc;

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Number of elements in a chunk of the check of random bit patterns.
const CHUNK: usize = 1 << 18;
/// Byte that fills the memory behind the wire bytes and behind the elements.
const PADDING: u8 = 0xee;

pub fn checks(options: &Options) -> Vec<Check> {
    let mut checks = Vec::new();
    for kind in KERNEL_CODECS.map(CodecKind::name) {
        let limit = options.either(60, 240);
        let check = Check::new(format!("codec/{kind}/every-half"), 1, move |setup| {
            every_half(setup, kind)
        });
        checks.push(check.within(limit));
        let check = Check::new(format!("codec/{kind}/tails"), 1, move |setup| {
            tails(setup, kind)
        });
        checks.push(check.within(limit));
        let check = Check::new(format!("codec/{kind}/patterns"), 1, move |setup| {
            patterns(setup, kind)
        });
        checks.push(check.within(limit));
    }
    // compute-sanitizer runs these checks; see scripts/test-gpu.
    for kind in KERNEL_CODECS.map(CodecKind::name) {
        let name = format!("sanitize/codec-{kind}");
        checks.push(Check::new(name, 1, move |_| sanitized(kind)).within(280));
    }
    checks
}

fn sanitized(kind: &str) -> Verdict {
    let mut rng = Rng::new(1);
    let mut ran = 0;
    for spec in specs(kind).into_iter().step_by(3) {
        let bench = Bench::new(spec, 5000)?;
        for n in [1, 77, 4097] {
            let values = mixture(&mut rng, n);
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            bench.check(DType::F32, &bytes)?;
            ran += 1;
        }
    }
    Ok(format!("{ran} chunks"))
}

/// Returns codec settings of this kind with all parameters that kernels support.
fn specs(kind: &str) -> Vec<CodecSpec> {
    let mut texts = vec![kind.to_string()];
    let Some(known) = CodecKind::ALL.into_iter().find(|one| one.name() == kind) else {
        return Vec::new();
    };
    if known.has_scale() {
        texts = (5..=12)
            .map(|log| format!("{kind}:block={}", 1 << log))
            .collect();
    }
    if known.has_tensor_scale() {
        texts.push(format!("{kind}:tensor=1"));
    }
    if known.has_seed() {
        texts.push(format!("{kind}:seed=3"));
        texts.push(format!("{kind}:block=1024:seed=200"));
    }
    if known.has_offset() {
        let offsets = [-30, -7, -1, 2, 9, 30];
        texts.extend(offsets.iter().map(|e| format!("{kind}:offset={e}")));
    }
    if known.has_threshold() {
        texts = ["0.4", "1e-6", "1e-41", "3e38"]
            .map(|tau| format!("{kind}:tau={tau}"))
            .into();
    }
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

/// Mirrors `cinch_codec_args` of `kernels/codec/params.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CodecArgs {
    wire: u64,
    elements: u64,
    n: u64,
    params: [u32; 8],
    first: u32,
    unused: u32,
}

/// Kernels of a codec on GPU 0, with memory for chunks of a limited size.
struct Bench {
    spec: CodecSpec,
    codec: Arc<dyn Codec>,
    stream: Stream,
    wire: DeviceMemory,
    elements: DeviceMemory,
    /// Encode and decode kernels of arrays by type, in the order of [`TYPES`].
    functions: Vec<(Function, Function)>,
}

impl Bench {
    fn new(spec: CodecSpec, most: usize) -> std::result::Result<Bench, Stop> {
        let codec = build(spec, Isa::Scalar)?.ok_or_else(|| Stop::Wrong("no codec".into()))?;
        let context = context(0)?;
        let module = kernels::load(&context, "codec")?;
        let family = array_family(spec.kind);
        let find = |dtype: &DType| -> Result<(Function, Function)> {
            let name = |what: &str| format!("cinch_{what}_{family}_{dtype}");
            Ok((
                module.function(&name("encode"))?,
                module.function(&name("decode"))?,
            ))
        };
        Ok(Bench {
            spec,
            stream: Stream::new(&context)?,
            wire: DeviceMemory::new(&context, codec.wire_bytes(most) + 256)?,
            elements: DeviceMemory::new(&context, 4 * most + 256)?,
            functions: TYPES.iter().map(find).collect::<Result<_>>()?,
            codec,
        })
    }

    /// Encodes `bytes`, elements of `dtype`, decodes the result, and compares both with the host's
    /// bytes.
    fn check(&self, dtype: DType, bytes: &[u8]) -> std::result::Result<(), Stop> {
        let n = bytes.len() / dtype.size();
        let mut values = vec![0f32; n];
        widen(dtype, Isa::Scalar, bytes, &mut values);
        let tensor =
            self.spec.kind.has_scale() && matches!(self.spec.scale, ScaleRule::Tensor { .. });
        let scale = tensor.then(|| abs_max(Isa::Scalar, &values).0);
        let mut expected = vec![PADDING; self.codec.wire_bytes(n)];
        let span = Span::whole(n).drawing(random(self.spec));
        self.codec.encode(span, &values, scale, &mut expected, None);
        let wire = self.encode(&self.functions(dtype).0, n, bytes, scale, expected.len())?;
        let specified = |at: usize| *expected.get(at).unwrap_or(&PADDING);
        if let Some(at) = (0..wire.len()).find(|&at| wire[at] != specified(at)) {
            return Stop::wrong(format!(
                "{} of {n} {dtype}: wire byte {at} of {} is {:#04x}, specified {:#04x}; element {at} is {:#x}",
                self.spec,
                expected.len(),
                wire[at],
                specified(at),
                values.get(at).map_or(0, |x| x.to_bits())
            ));
        }
        self.check_decode(dtype, n, &expected)
    }

    /// Decodes any wire bytes and compares the elements with the host's.
    fn check_decode(&self, dtype: DType, n: usize, wire: &[u8]) -> std::result::Result<(), Stop> {
        let mut values = vec![0f32; n];
        self.codec.decode(Span::whole(n), wire, &mut values);
        let mut expected = vec![0; n * dtype.size()];
        narrow(dtype, Isa::Scalar, &values, &mut expected);
        expected.resize(n * dtype.size() + 64, PADDING);
        let size = dtype.size();
        let found = self.decode(&self.functions(dtype).1, dtype, n, wire)?;
        for at in (0..found.len()).step_by(size) {
            let (got, wanted) = (&found[at..at + size], &expected[at..at + size]);
            if got != wanted && (at >= n * size || !both_nan(dtype, got, wanted)) {
                return Stop::wrong(format!(
                    "{} of {n} {dtype}: element {} decodes to {got:02x?}, specified {wanted:02x?}",
                    self.spec,
                    at / size
                ));
            }
        }
        Ok(())
    }

    fn encode(
        &self,
        function: &Function,
        n: usize,
        bytes: &[u8],
        scale: Option<f32>,
        wire_bytes: usize,
    ) -> std::result::Result<Vec<u8>, Stop> {
        let mut wire = vec![PADDING; wire_bytes + 64];
        if scale.is_some() && wire_bytes >= 4 {
            // The kernel requires zeros in the bytes of the tensor scale.
            wire[wire_bytes - 4..wire_bytes].fill(0);
        }
        self.elements.write(0, bytes, &self.stream, PATIENCE)?;
        self.wire.write(0, &wire, &self.stream, PATIENCE)?;
        self.launch(function, n, scale)?;
        self.wire.read(0, &mut wire, &self.stream, PATIENCE)?;
        Ok(wire)
    }

    fn decode(
        &self,
        function: &Function,
        dtype: DType,
        n: usize,
        wire: &[u8],
    ) -> std::result::Result<Vec<u8>, Stop> {
        let mut elements = vec![PADDING; n * dtype.size() + 64];
        self.wire.write(0, wire, &self.stream, PATIENCE)?;
        self.elements.write(0, &elements, &self.stream, PATIENCE)?;
        self.launch(function, n, None)?;
        self.elements
            .read(0, &mut elements, &self.stream, PATIENCE)?;
        Ok(elements)
    }

    fn functions(&self, dtype: DType) -> &(Function, Function) {
        let place = TYPES.iter().position(|&one| one == dtype);
        &self.functions[place.unwrap_or(0)]
    }

    fn launch(&self, function: &Function, n: usize, scale: Option<f32>) -> Result<()> {
        let args = CodecArgs {
            wire: self.wire.address(),
            elements: self.elements.address(),
            n: n as u64,
            params: kernel_params(self.spec, scale.unwrap_or(0.0), [random(self.spec); 2]),
            first: 0,
            unused: 0,
        };
        // An odd limit makes some blocks take more tiles than others.
        let blocks = n.div_ceil(4096).clamp(1, 67) as u32;
        // SAFETY: `CodecArgs` is the kernel's parameter, `Bench` has room for n elements, and the
        // wait below ends every use of its memory.
        unsafe { function.launch(blocks, 256, 0, &self.stream, &args)? };
        self.stream.wait(PATIENCE)
    }
}

/// Returns the random numbers of stochastic rounding in every encode.
fn random(spec: CodecSpec) -> RoundingRandom {
    RoundingRandom::new(spec.seed.into(), 11, 0)
}

pub fn both_nan(dtype: DType, a: &[u8], b: &[u8]) -> bool {
    let is_nan = |bytes: &[u8]| {
        let mut value = [0f32];
        widen(dtype, Isa::Scalar, bytes, &mut value);
        value[0].is_nan()
    };
    is_nan(a) && is_nan(b)
}

/// Encodes all f16 and bf16 values in order, then the finite ones shuffled.
fn every_half(setup: &Setup, kind: &str) -> Verdict {
    let mut rng = Rng::new(setup.options.seed);
    let mut ran = 0;
    for spec in specs(kind) {
        let bench = Bench::new(spec, 1 << 16)?;
        for dtype in [DType::F16, DType::BF16] {
            let ordered: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
            bench.check(dtype, &ordered)?;
            let mask = if dtype == DType::F16 { 0x7c00 } else { 0x7f80 };
            let mut finite: Vec<u16> = (0..=u16::MAX).filter(|x| x & mask != mask).collect();
            for at in (1..finite.len()).rev() {
                finite.swap(at, rng.below(at + 1));
            }
            let mixed: Vec<u8> = finite.into_iter().flat_map(u16::to_le_bytes).collect();
            bench.check(dtype, &mixed)?;
            ran += 2;
        }
    }
    Ok(format!("{ran} times 65536 values"))
}

/// Encodes short chunks and lengths next to multiples of block sizes, and decodes random wire
/// bytes.
fn tails(setup: &Setup, kind: &str) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ 1);
    let mut lengths: Vec<usize> = (1..setup.options.either(35, 140)).collect();
    for power in [64, 256, 512, 1024, 4096, 8192] {
        lengths.extend([power - 1, power, power + 1]);
    }
    lengths.push(70_001);
    let mut ran = 0;
    for spec in specs(kind) {
        let bench = Bench::new(spec, 70_001)?;
        for &n in &lengths {
            for dtype in TYPES {
                let values = mixture(&mut rng, n);
                let mut bytes = vec![0; n * dtype.size()];
                narrow(dtype, Isa::Scalar, &values, &mut bytes);
                bench.check(dtype, &bytes)?;
                let wire = bench.codec.wire_bytes(n);
                let any: Vec<u8> = (0..wire).map(|_| rng.next() as u8).collect();
                bench.check_decode(dtype, n, &any)?;
                ran += 1;
            }
        }
    }
    Ok(format!("{ran} chunks"))
}

/// Returns values around a random magnitude: mostly Gaussian, some zero or much smaller. A quarter
/// of the returned arrays also contain random bit patterns.
pub fn mixture(rng: &mut Rng, n: usize) -> Vec<f32> {
    let scale = 2f32.powi(rng.below(60) as i32 - 40);
    let wild = rng.below(4) == 0;
    let one = |_| match rng.below(if wild { 64 } else { 16 }) {
        0 => 0.0,
        1 => scale * f32::from_bits(0x3f80_0000 | (rng.next() as u32 >> 9)) * 1e-3,
        63 => f32::from_bits(rng.next() as u32),
        _ => scale * gaussian(rng.next()) as f32,
    };
    (0..n).map(one).collect()
}

/// Encodes many fp32 bit patterns on several host threads, because the scalar codec takes most of
/// the time.
fn patterns(setup: &Setup, kind: &str) -> Verdict {
    let total = setup.options.either(1_000_000, 100_000_000);
    let chunks = usize::div_ceil(total, CHUNK);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16));
    let specs = specs(kind);
    let seed = setup.options.seed;
    let work = |thread: usize| -> std::result::Result<(), Stop> {
        let mut bench: Option<Bench> = None;
        // Consecutive chunks share a spec, so that a thread rarely changes it.
        for chunk in (thread..chunks).step_by(threads) {
            let spec = specs[chunk * specs.len() / chunks];
            if bench.as_ref().is_none_or(|bench| bench.spec != spec) {
                bench = Some(Bench::new(spec, CHUNK)?);
            }
            let mut rng = Rng::new(seed ^ 0x70617474 ^ (chunk as u64) << 32);
            let mut values = Vec::with_capacity(CHUNK);
            for piece in 0..CHUNK / 256 {
                match piece % 4 {
                    // Adds random bit patterns. An infinity or a NaN in them makes its whole block
                    // infinite or NaN.
                    0 => values.extend((0..256).map(|_| f32::from_bits(rng.next() as u32))),
                    // Adds random finite bit patterns.
                    1 => values.extend((0..256).map(|_| {
                        let bits = rng.next() as u32;
                        let finite = bits & 0x7f80_0000 != 0x7f80_0000;
                        f32::from_bits(if finite { bits } else { bits & !0x4000_0000 })
                    })),
                    _ => values.extend(mixture(&mut rng, 256)),
                }
            }
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            if let Some(bench) = &bench {
                bench.check(DType::F32, &bytes)?;
            }
        }
        Ok(())
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let work = &work;
        let spawn = |thread| scope.spawn(move || work(thread));
        let all: Vec<_> = (0..threads).map(spawn).collect();
        all.into_iter().map(|thread| thread.join()).collect()
    });
    for result in results {
        result.unwrap_or_else(|_| Stop::wrong("a thread panicked"))?;
    }
    Ok(format!("{} patterns", chunks * CHUNK))
}
