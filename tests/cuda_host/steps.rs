//! Runs single steps of schedule kernels with a codec on the host (`block.h`) where messages inside groups are encoded otherwise.
//! Compares messages and outputs byte for byte with the scalar codec.

use super::library::{Library, starts};
use crate::support::{self, Rng};
use cinch::codec::{self, Codec, RoundingRandom, Span, kernel_params};
use cinch::cpu::Isa;
use cinch::gpu::abi::{INTRA_CAST_BF16, INTRA_CAST16, INTRA_LINEAR8, INTRA_RAW};
use cinch::reduce::{narrow, widen};
use cinch::schedule::Op;
use cinch::testing::{Random, has_near_ties};
use cinch::types::{CodecKind, ScaleRule};
use cinch::{CodecSpec, DType};
use std::ffi::{CString, c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Mirrors `Step` of `steps.cpp`.
#[repr(C)]
struct Step {
    input: *const u8,
    output: *mut u8,
    sources: [*const u8; 4],
    targets: [*mut u8; 4],
    elements: u32,
    nranks: u32,
    codec: [u32; 8],
    op: u8,
    own: u8,
    own_after: u8,
    nrecv: u8,
    nsend: u8,
    intra: u8,
    intra_recv: u8,
    intra_send: u8,
    aligned: u8,
}

/// The type of `test_step` in `steps.cpp`.
type Run = unsafe extern "C" fn(*const c_char, *const Step) -> bool;

/// Value of memory that a step must not change.
const AROUND: u8 = 0xee;

/// Memory whose first byte is aligned to 16.
struct Memory {
    words: Vec<u128>,
    bytes: usize,
}

impl Memory {
    fn new(contents: &[u8], bytes: usize) -> Memory {
        let words = vec![u128::from_ne_bytes([AROUND; 16]); bytes.div_ceil(16) + 2];
        let mut memory = Memory { words, bytes };
        memory.all()[..contents.len()].copy_from_slice(contents);
        memory
    }

    fn all(&mut self) -> &mut [u8] {
        let bytes = 16 * self.words.len();
        // SAFETY: `words` owns `bytes` initialised bytes, and the result borrows `self` mutably.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), bytes) }
    }

    /// Returns the contents; panics if bytes behind them changed.
    fn take(mut self, what: &str) -> Vec<u8> {
        let bytes = self.bytes;
        let all = self.all();
        assert!(all[bytes..].iter().all(|&byte| byte == AROUND), "{what}");
        all[..bytes].to_vec()
    }
}

/// Chunk of `n` elements of a type, with a codec.
struct Case {
    codec: Arc<dyn Codec>,
    spec: CodecSpec,
    /// How messages inside groups are encoded.
    intra: u8,
    dtype: DType,
    n: usize,
    /// Bytes by which the user's buffers are off a multiple of 16.
    off: usize,
}

impl Case {
    fn what(&self) -> String {
        let Case {
            spec,
            intra,
            n,
            dtype,
            off,
            ..
        } = self;
        format!("{spec} of {n} {dtype}, intra {intra}, {off} bytes off")
    }

    fn raw(&self, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; self.n * self.dtype.size()];
        narrow(self.dtype, Isa::Scalar, values, &mut bytes);
        bytes
    }

    /// Returns random elements of the type.
    fn values(&self, rng: &mut Rng) -> Vec<f32> {
        let values: Vec<f32> = (0..self.n).map(|_| rng.normal() as f32).collect();
        self.rounded(&values)
    }

    /// Returns the values as elements of the type.
    fn rounded(&self, values: &[f32]) -> Vec<f32> {
        let mut rounded = vec![0.0; self.n];
        widen(self.dtype, Isa::Scalar, &self.raw(values), &mut rounded);
        rounded
    }

    fn encode(&self, values: &[f32]) -> Vec<u8> {
        let mut wire = vec![0; self.codec.wire_bytes(self.n)];
        let span = Span::whole(self.n);
        self.codec.encode(span, values, None, &mut wire, None);
        wire
    }

    fn decode(&self, wire: &[u8]) -> Vec<f32> {
        let mut values = vec![0.0; self.n];
        self.codec.decode(Span::whole(self.n), wire, &mut values);
        values
    }

    /// Returns a message inside a group with these values.
    fn intra_message(&self, values: &[f32]) -> Vec<u8> {
        let Some(codec) = self.intra_codec() else {
            return self.raw(values);
        };
        let mut wire = vec![0; codec.wire_bytes(self.n)];
        codec.encode(Span::whole(self.n), values, None, &mut wire, None);
        wire.truncate(self.intra_bytes());
        wire
    }

    /// Returns the bytes of a message inside a group, without padding behind it.
    fn intra_bytes(&self) -> usize {
        match (self.intra, self.intra_codec()) {
            (INTRA_LINEAR8.., Some(codec)) => codec.wire_bytes(self.n),
            (_, Some(_)) => 2 * self.n,
            (_, None) => self.n * self.dtype.size(),
        }
    }

    /// Adds a message inside a group to `sum`.
    fn add_intra(&self, message: &[u8], sum: &mut [f32]) {
        match self.intra_codec() {
            Some(codec) => {
                // Kernels store no padding behind casts.
                let mut wire = message.to_vec();
                wire.resize(codec.wire_bytes(self.n), 0);
                codec.decode_reduce(Span::whole(self.n), &wire, sum);
            }
            None => {
                let mut values = vec![0.0; self.n];
                widen(self.dtype, Isa::Scalar, message, &mut values);
                sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
            }
        }
    }

    fn intra_codec(&self) -> Option<Arc<dyn Codec>> {
        let spec = match self.intra {
            INTRA_RAW => return None,
            INTRA_CAST16 => CodecSpec::of(CodecKind::Cast16),
            INTRA_CAST_BF16 => CodecSpec::of(CodecKind::CastBf16),
            number => CodecSpec {
                scale: ScaleRule::Block(1 << (number - INTRA_LINEAR8)),
                ..CodecSpec::of(CodecKind::Linear8)
            },
        };
        codec::build_for(spec, self.dtype, Isa::Scalar).unwrap()
    }

    /// Runs a step with this contribution and these messages, of which the first `intra_recv` are for the level inside
    /// groups. Returns the messages that it sends and its output.
    fn run(
        &self,
        run: Run,
        op: Op,
        input: &[f32],
        (sources, intra_recv, own_after): (&[Vec<u8>], usize, usize),
        (sends, intra_send): (usize, bool),
    ) -> (Vec<Vec<u8>>, Vec<u8>) {
        let (what, size) = (self.what(), self.dtype.size());
        let message = match intra_send {
            false => self.codec.wire_bytes(self.n),
            true => self.intra_bytes(),
        };
        let padding = vec![AROUND; self.off];
        let mut input = Memory::new(
            &[padding, self.raw(input)].concat(),
            self.off + self.n * size,
        );
        let mut output = Memory::new(&[], self.off + self.n * size);
        let mut sources: Vec<Memory> = sources
            .iter()
            .map(|one| Memory::new(one, one.len()))
            .collect();
        let mut targets: Vec<Memory> = (0..sends).map(|_| Memory::new(&[], message)).collect();
        let mut step = Step {
            input: input.all()[self.off..].as_ptr(),
            output: output.all()[self.off..].as_mut_ptr(),
            sources: [std::ptr::null(); 4],
            targets: [std::ptr::null_mut(); 4],
            elements: self.n as u32,
            nranks: 4,
            codec: kernel_params(self.spec, 0.0, [RoundingRandom::NONE; 2]),
            op: op as u8,
            own: 1,
            own_after: own_after as u8,
            nrecv: sources.len() as u8,
            nsend: sends as u8,
            intra: self.intra,
            intra_recv: intra_recv as u8,
            intra_send: u8::from(intra_send),
            aligned: u8::from(self.off == 0),
        };
        for (place, source) in step.sources.iter_mut().zip(&mut sources) {
            *place = source.all().as_ptr();
        }
        for (place, target) in step.targets.iter_mut().zip(&mut targets) {
            *place = target.all().as_mut_ptr();
        }
        let name = CString::new(format!("{}_{}", self.spec.kind.name(), self.dtype)).unwrap();
        // SAFETY: the step names memory of this function with room for n elements, or for an encoded chunk of them.
        assert!(unsafe { run(name.as_ptr(), &step) }, "{what}");
        let sent = targets.into_iter().map(|target| target.take(&what));
        (sent.collect(), output.take(&what)[self.off..].to_vec())
    }

    fn check(&self, run: Run, rng: &mut Rng) {
        let what = self.what();
        let own = self.values(rng);
        // A contribution travels in the encoding of messages inside groups. Casts of the largest elements saturate.
        let mut large = own.clone();
        large[0] = if self.dtype == DType::F16 {
            65504.0
        } else {
            -3.3e38
        };
        large[self.n - 1] = f32::NEG_INFINITY;
        let large = self.rounded(&large);
        for own in [&own, &large] {
            let (sent, _) = self.run(run, Op::Send, own, (&[], 0, 0), (2, true));
            let expected = self.intra_message(own);
            assert!(sent.iter().all(|sent| *sent == expected), "{what}");
        }
        // Two messages from the group and an encoded message, with the own contribution between the first ones.
        let [first, second, third] = [(); 3].map(|()| self.values(rng));
        let third = self.encode(&third);
        let [one, two] = [&first, &second].map(|values| self.intra_message(values));
        let mut sum = vec![-0.0; self.n];
        self.add_intra(&one, &mut sum);
        sum.iter_mut().zip(&own).for_each(|(sum, x)| *sum += x);
        self.add_intra(&two, &mut sum);
        let sources = [one, two, third.clone()];
        self.codec
            .decode_reduce(Span::whole(self.n), &third, &mut sum);
        let encoded = self.encode(&sum);
        let (sent, _) = self.run(run, Op::RecvReduceSend, &own, (&sources, 2, 1), (1, false));
        assert!(sent[0] == encoded, "{what}: encoded sum");
        // The owner stores the values that its peers decode.
        let op = Op::RecvReduceCopySend;
        let (sent, output) = self.run(run, op, &own, (&sources, 2, 1), (2, false));
        assert!(sent.iter().all(|sent| *sent == encoded), "{what}");
        assert!(
            output == self.raw(&self.decode(&encoded)),
            "{what}: stored sum"
        );
        let (_, output) = self.run(run, Op::RecvReduceCopy, &own, (&sources, 2, 1), (0, false));
        assert!(output == self.raw(&sum), "{what}: sum");
        // Encoded messages in their place give another sum, unless they have the same values.
        let mut alone = vec![-0.0; self.n];
        self.add_intra(&sources[0], &mut alone);
        let sources = [self.encode(&first), self.encode(&second), third];
        let (other, _) = self.run(run, Op::RecvReduceSend, &own, (&sources, 0, 1), (1, false));
        let differs = self.decode(&self.encode(&first)) != alone;
        assert!(self.n < 64 || !differs || other[0] != encoded, "{what}");
    }
}

/// Compiles the steps to a library and returns its launch function, once for all tests. Returns `None`, with a
/// message, if there is no g++. The steps share static memory, so tests must run them one at a time.
fn steps() -> Option<MutexGuard<'static, Run>> {
    static STEPS: OnceLock<Option<Mutex<Run>>> = OnceLock::new();
    let compile = || {
        if !starts("g++") {
            println!("skipped: no g++ is here to compile the kernels");
            return None;
        }
        let options = [
            "-O1",
            "-Wno-unknown-pragmas",
            "-Wno-unused-function",
            "-Wno-extra",
            "-Wno-parentheses",
        ];
        let library = Library::compile("g++", "steps", &options, &["tests/cuda_host/host"]);
        // SAFETY: `steps.cpp` defines `test_step` with the parameters of `Run`.
        let run = unsafe { std::mem::transmute::<*mut c_void, Run>(library.find("test_step")) };
        Some(Mutex::new(run))
    };
    let steps = STEPS.get_or_init(compile).as_ref()?;
    Some(steps.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The elements of each block are near ties, so that a wrong order of the sums changes the block's numbers.
#[test]
fn steps_near_ties_equal_the_scalar_codec() {
    let Some(run) = steps() else { return };
    let mut random = Random::new(support::seed());
    for name in [
        "onebit:block=32",
        "onebit",
        "onebit:block=4096",
        "terngrad:block=64",
        "terngrad",
        "terngrad:block=1024",
    ] {
        let spec: CodecSpec = name.parse().unwrap();
        let codec = codec::build(spec, Isa::Scalar).unwrap().unwrap();
        let block = codec.granule();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            if !has_near_ties(spec.kind, dtype) {
                continue;
            }
            for off in [0, dtype.size()] {
                let own = random.near_ties(spec.kind, block, (1 << 15) / block + 37);
                let case = Case {
                    codec: codec.clone(),
                    spec,
                    intra: INTRA_RAW,
                    dtype,
                    n: own.len(),
                    off,
                };
                let expected = case.encode(&own);
                let (sent, _) = case.run(*run, Op::Send, &own, (&[], 0, 0), (1, false));
                assert!(sent[0] == expected, "{}: contribution", case.what());
                // The sum with zeros has the elements of the contribution.
                let zeros = [case.raw(&vec![0.0; own.len()])];
                let op = Op::RecvReduceSend;
                let (sent, _) = case.run(*run, op, &own, (&zeros, 1, 1), (1, false));
                assert!(sent[0] == expected, "{}: sum", case.what());
            }
        }
    }
}

#[test]
fn steps_with_messages_of_another_encoding_inside_groups_equal_the_scalar_codec() {
    let Some(run) = steps() else { return };
    let mut rng = Rng(support::seed());
    for name in ["linear8", "linear8:block=1024", "dynamic8", "cast_bf16"] {
        let spec: CodecSpec = name.parse().unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for n in [1, 15, 16, 500, 512, 1024, 1543] {
                for (off, intra) in [
                    (0, INTRA_RAW),
                    (dtype.size(), INTRA_RAW),
                    (0, INTRA_CAST16),
                    (dtype.size(), INTRA_CAST_BF16),
                    (0, INTRA_LINEAR8 + 8),
                    (dtype.size(), INTRA_LINEAR8 + 5),
                ] {
                    let codec = codec::build(spec, Isa::Scalar).unwrap().unwrap();
                    Case {
                        codec,
                        spec,
                        intra,
                        dtype,
                        n,
                        off,
                    }
                    .check(*run, &mut rng);
                }
            }
        }
    }
}
