//! Calls the CUDA headers of codecs and element types, which are compiled to a shared library for
//! the host.

use super::library::{Library, starts};
use cinch::codec::{Codec, RoundingRandom, Span, build, kernel_params};
use cinch::cpu::Isa;
use cinch::types::{CodecKind, CodecSpec, ScaleRule};
use cinch::{DType, codec};
use std::ffi::{CString, c_char, c_void};
use std::sync::{Arc, OnceLock};

type WireBytes = unsafe extern "C" fn(u32, *const [u32; 8], u64) -> u64;
type Encode = unsafe extern "C" fn(u32, *const [u32; 8], *const f32, u64, u32, *mut u8);
type Decode = unsafe extern "C" fn(u32, *const [u32; 8], *const u8, u64, *mut f32, bool);
type Divided = unsafe extern "C" fn(u32, f32) -> f32;
type Element =
    unsafe extern "C" fn(*const c_char, u32, u64, *const c_void, *const c_void, *mut c_void, u64);
type Convert = unsafe extern "C" fn(*const c_char, bool, *const c_void, *mut c_void, u64);

/// The functions that `codecs.cpp` exports.
#[derive(Clone, Copy)]
pub struct Host {
    /// Selects the second implementation of codecs that have two: tables for dynamic8, static8 and
    /// mantissa8, and the kernel for all widths for minmax4.
    pub second: bool,
    wire_bytes: WireBytes,
    encode: Encode,
    decode: Decode,
    divided: Divided,
    element: Element,
    convert: Convert,
}

/// Returns the library as built by each available compiler, twice: for the first and the second
/// implementation of codecs.
pub fn all() -> &'static [(String, Host)] {
    static HOSTS: OnceLock<Vec<(String, Host)>> = OnceLock::new();
    HOSTS.get_or_init(|| {
        let compilers = ["g++", "clang++"];
        let found = compilers.into_iter().filter(|name| starts(name));
        let mut hosts = Vec::new();
        for name in found {
            let host = Host::compile(name);
            hosts.push((name.to_string(), host));
            hosts.push((
                format!("{name}, second forms"),
                Host {
                    second: true,
                    ..host
                },
            ));
        }
        if hosts.is_empty() {
            println!("skipped: neither g++ nor clang++ is here to compile the CUDA headers");
        }
        hosts
    })
}

impl Host {
    fn compile(compiler: &str) -> Host {
        let library = Library::compile(compiler, "codecs", &["-O2"], &[]);
        let find = |name: &str| library.find(name);
        // SAFETY: `codecs.cpp` defines the functions with these parameters; f32 and u32 words have
        // no padding.
        unsafe {
            Host {
                second: false,
                wire_bytes: std::mem::transmute::<*mut c_void, WireBytes>(find("test_wire_bytes")),
                encode: std::mem::transmute::<*mut c_void, Encode>(find("test_encode")),
                decode: std::mem::transmute::<*mut c_void, Decode>(find("test_decode")),
                divided: std::mem::transmute::<*mut c_void, Divided>(find("test_divided")),
                element: std::mem::transmute::<*mut c_void, Element>(find("test_element")),
                convert: std::mem::transmute::<*mut c_void, Convert>(find("test_convert")),
            }
        }
    }

    fn kind(&self, spec: CodecSpec) -> u32 {
        match spec.kind {
            CodecKind::Dynamic8 if self.second => 19,
            CodecKind::MinMax4 if self.second => 20,
            CodecKind::Static8 if self.second => 21,
            CodecKind::Mantissa8 if self.second => 22,
            kind => kind as u32,
        }
    }

    /// Returns the number of bytes of a chunk on the wire.
    pub fn wire_bytes(&self, spec: CodecSpec, n: usize) -> usize {
        // SAFETY: the function reads eight words, which this expression owns until it returns.
        unsafe {
            (self.wire_bytes)(
                self.kind(spec),
                &kernel_params(spec, 0.0, NOTHING),
                n as u64,
            ) as usize
        }
    }

    /// Encodes a chunk as the kernels do.
    pub fn encode(
        &self,
        spec: CodecSpec,
        x: &[f32],
        scale: Option<f32>,
        (random, first): (RoundingRandom, u32),
    ) -> Bytes {
        let params = kernel_params(
            spec,
            scale.unwrap_or(0.0),
            [RoundingRandom::default(), random],
        );
        let mut wire = Bytes::new(self.wire_bytes(spec, x.len()), 0xee);
        let to = wire.slice_mut().as_mut_ptr();
        // SAFETY: `x` has `x.len()` elements. `wire` is aligned to 16 bytes and has the length that
        // `wire_bytes` returned for them.
        unsafe {
            (self.encode)(
                self.kind(spec),
                &params,
                x.as_ptr(),
                x.len() as u64,
                first,
                to,
            )
        };
        wire
    }

    /// Decodes a chunk into `out` as the kernels do; with `reduce`, adds the values to `out`.
    pub fn decode(&self, spec: CodecSpec, wire: &Bytes, out: &mut [f32], reduce: bool) {
        let (params, n) = (kernel_params(spec, 0.0, NOTHING), out.len());
        assert!(wire.slice().len() >= self.wire_bytes(spec, n));
        let (from, to) = (wire.slice().as_ptr(), out.as_mut_ptr());
        // SAFETY: the assertion ensures that `wire` is long enough for the `n` elements of `out`.
        unsafe { (self.decode)(self.kind(spec), &params, from, n as u64, to, reduce) };
    }

    /// Returns x divided by n, as kernels divide by 3, 7, 15, 127 and 255.
    pub fn divided(&self, n: u32, x: f32) -> f32 {
        // SAFETY: `test_divided` takes numbers only and accesses no memory.
        unsafe { (self.divided)(n, x) }
    }

    /// Computes a op b on 16-byte vectors; `codecs.cpp` lists the numbers of the operations.
    pub fn element(&self, dtype: DType, op: u32, word: u64, a: &Bytes, b: &Bytes) -> Bytes {
        let n = a.slice().len();
        assert!(n.is_multiple_of(16) && b.slice().len() == n);
        let mut out = Bytes::new(n, 0);
        let (from, with) = (a.slice().as_ptr().cast(), b.slice().as_ptr().cast());
        let to = out.slice_mut().as_mut_ptr().cast();
        let name = name_of(dtype);
        // SAFETY: `Bytes` aligns both inputs and the output to 16 bytes, and each has `n` bytes.
        unsafe { (self.element)(name.as_ptr(), op, word, from, with, to, n as u64 / 16) };
        out
    }

    /// Widens elements of `dtype` to fp32.
    pub fn widen(&self, dtype: DType, src: &Bytes) -> Vec<f32> {
        let n = src.slice().len() / dtype.size();
        let mut out = vec![0f32; n];
        let (from, to) = (src.slice().as_ptr().cast(), out.as_mut_ptr().cast());
        let name = name_of(dtype);
        // SAFETY: `src`, which `Bytes` aligns to 16 bytes, has `n` elements, and so has `out`.
        unsafe { (self.convert)(name.as_ptr(), false, from, to, n as u64) };
        out
    }

    /// Rounds fp32 numbers to `dtype`.
    pub fn narrow(&self, dtype: DType, src: &[f32]) -> Bytes {
        let mut out = Bytes::new(src.len() * dtype.size(), 0);
        let (from, to) = (src.as_ptr().cast(), out.slice_mut().as_mut_ptr().cast());
        let name = name_of(dtype);
        // SAFETY: `out` has room for `src.len()` elements.
        unsafe { (self.convert)(name.as_ptr(), true, from, to, src.len() as u64) };
        out
    }
}

/// Returns the name by which `codecs.cpp` looks up the type.
fn name_of(dtype: DType) -> CString {
    CString::new(dtype.name()).unwrap()
}

/// Random numbers for calls that only decode, which draw none.
const NOTHING: [RoundingRandom; 2] = [RoundingRandom::NONE; 2];

/// An array of bytes, aligned to 16.
#[derive(Clone)]
pub struct Bytes {
    vectors: Vec<u128>,
    length: usize,
}

impl Bytes {
    pub fn new(length: usize, fill: u8) -> Bytes {
        let vectors = vec![u128::from_ne_bytes([fill; 16]); length.div_ceil(16).max(1)];
        Bytes { vectors, length }
    }

    pub fn from(bytes: &[u8]) -> Bytes {
        let mut all = Bytes::new(bytes.len(), 0);
        all.slice_mut().copy_from_slice(bytes);
        all
    }

    pub fn slice(&self) -> &[u8] {
        // SAFETY: `new` initialises all vectors, and `length` bytes fit in them.
        unsafe { std::slice::from_raw_parts(self.vectors.as_ptr().cast(), self.length) }
    }

    pub fn slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: `new` initialises all vectors, and `length` bytes fit in them. `self` is borrowed
        // mutably.
        unsafe { std::slice::from_raw_parts_mut(self.vectors.as_mut_ptr().cast(), self.length) }
    }
}

/// The scalar specification of a codec, with which tests compare the headers.
pub struct Reference {
    pub spec: CodecSpec,
    codec: Arc<dyn Codec>,
}

impl Reference {
    pub fn new(spec: &str) -> Reference {
        let spec: CodecSpec = spec.parse().unwrap();
        let codec = build(spec, Isa::Scalar).unwrap().unwrap();
        Reference { spec, codec }
    }

    pub fn is_tensor(&self) -> bool {
        self.spec.kind.has_scale() && matches!(self.spec.scale, ScaleRule::Tensor { .. })
    }

    pub fn wire_bytes(&self, n: usize) -> usize {
        self.codec.wire_bytes(n)
    }

    /// Returns the number of bytes of the codes on the wire, with their padding.
    pub fn code_bytes(&self, n: usize) -> usize {
        (n * self.codec.description().code_bits)
            .div_ceil(8)
            .next_multiple_of(16)
    }

    /// Returns the number of fp32 numbers that each block stores.
    pub fn numbers(&self) -> usize {
        self.codec.description().block_numbers
    }

    pub fn encode(&self, x: &[f32], scale: Option<f32>, random: RoundingRandom) -> Bytes {
        let mut wire = Bytes::new(self.wire_bytes(x.len()), 0xee);
        let span = Span::whole(x.len()).drawing(random);
        self.codec.encode(span, x, scale, wire.slice_mut(), None);
        wire
    }

    pub fn decode(&self, wire: &Bytes, out: &mut [f32], reduce: bool) {
        let span = Span::whole(out.len());
        match reduce {
            true => self.codec.decode_reduce(span, wire.slice(), out),
            false => self.codec.decode(span, wire.slice(), out),
        }
    }

    /// Encodes and decodes `x` by the headers, as compiled into `host`. Panics if a result differs
    /// from the specification.
    pub fn check(&self, host: &Host, x: &[f32], scale: Option<f32>, what: &str) {
        let spec = self.spec;
        // Each chunk has another index in its message, so that it draws random numbers of its own.
        let sum = x.iter().fold(x.len() as u64, |sum, x| {
            sum.rotate_left(7) ^ u64::from(x.to_bits())
        });
        let (random, first) = (
            RoundingRandom::new(spec.seed.into(), sum, 3),
            (sum >> 20) as u32,
        );
        let wire = self.encode(x, scale, random.from(first as usize));
        let found = host.encode(spec, x, scale, (random, first));
        let same = |i: &usize| wire.slice()[*i] != found.slice()[*i];
        if let Some(i) = (0..wire.slice().len()).find(same) {
            let (a, b) = (wire.slice()[i], found.slice()[i]);
            let element = x.get(i).map_or(0, |x| x.to_bits());
            panic!("{spec} {what}: wire byte {i} is {b:#x}, not {a:#x}; x[{i}] {element:#x}");
        }
        self.check_decode(host, &wire, x, what);
    }

    /// Decodes the bytes `wire`, and adds them to `acc`. Panics if a result of the headers differs
    /// from the specification.
    pub fn check_decode(&self, host: &Host, wire: &Bytes, acc: &[f32], what: &str) {
        for reduce in [false, true] {
            let (mut out, mut found) = (acc.to_vec(), acc.to_vec());
            self.decode(wire, &mut out, reduce);
            host.decode(self.spec, wire, &mut found, reduce);
            if let Some(i) = difference(&out, &found) {
                let (a, b) = (out[i].to_bits(), found[i].to_bits());
                panic!(
                    "{} {what}: element {i} is {b:#x}, not {a:#x}, reduce {reduce}",
                    self.spec
                );
            }
        }
    }
}

/// Returns the index of the first element with different bits; all NaNs count as equal.
pub fn difference(a: &[f32], b: &[f32]) -> Option<usize> {
    assert_eq!(a.len(), b.len());
    let bits = |x: f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
    (0..a.len()).find(|&i| bits(a[i]) != bits(b[i]))
}

/// Returns the largest magnitude in `x`, which a caller would pass as the tensor scale.
pub fn abs_max(x: &[f32]) -> f32 {
    codec::abs_max(Isa::Scalar, x).0
}
