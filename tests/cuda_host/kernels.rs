//! Runs the kernels that encode and decode whole arrays on the host, block by block (`block.h`).
//! Compares their output with the host's encoding byte for byte. Many lengths and alignments of
//! both wire layouts cover how the lanes of a warp cooperate.

use super::library::{Library, starts};
use crate::support;
use cinch::DType;
use cinch::arrays::{Layout, StandAlone};
use cinch::codec::{KERNEL_CODECS, RoundingRandom, array_family, kernel_params};
use cinch::cpu::Isa;
use cinch::reduce::{narrow, widen};
use cinch::testing::{Random, gaussian, has_near_ties, random_word};
use cinch::types::{CodecSpec, ScaleRule};
use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Mirrors the kernel argument `cinch_codec_args` of `kernels/abi.h`.
#[repr(C)]
struct Args {
    wire: *mut u8,
    elements: *mut u8,
    n: u64,
    params: [u32; 8],
    first: u32,
    unused: u32,
}

type Launch = unsafe extern "C" fn(*const c_char, u32, u32, *const Args) -> bool;

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Value of the bytes around arrays, which kernels must not change.
const AROUND: u8 = 0xee;
const MARGIN: usize = 64;

/// Compiles the kernels to a library and returns its launch function. Returns `None`, with a
/// message, if there is no g++.
fn kernels() -> Option<&'static Mutex<Launch>> {
    static KERNELS: OnceLock<Option<Mutex<Launch>>> = OnceLock::new();
    KERNELS
        .get_or_init(|| {
            if !starts("g++") {
                println!("skipped: no g++ is here to compile the kernels");
                return None;
            }
            Some(Mutex::new(compile()))
        })
        .as_ref()
}

fn compile() -> Launch {
    let options = ["-O1", "-Wno-unknown-pragmas"];
    let library = Library::compile("g++", "kernels", &options, &[]);
    // SAFETY: `kernels.cpp` defines `test_launch` with the parameters of `Launch`.
    unsafe { std::mem::transmute::<*mut c_void, Launch>(library.find("test_launch")) }
}

/// An array of some alignment, with a margin of [`AROUND`] bytes on both sides.
struct Array {
    memory: Vec<u128>,
    at: usize,
    bytes: usize,
}

impl Array {
    /// Allocates an array that begins `at` bytes behind a multiple of 16.
    fn new(at: usize, contents: &[u8], bytes: usize) -> Array {
        let at = MARGIN + at;
        let vectors = (at + bytes + MARGIN).div_ceil(16);
        let mut array = Array {
            memory: vec![u128::from_ne_bytes([AROUND; 16]); vectors],
            at,
            bytes,
        };
        array.all()[at..at + contents.len()].copy_from_slice(contents);
        array
    }

    fn all(&mut self) -> &mut [u8] {
        let bytes = 16 * self.memory.len();
        // SAFETY: `memory` owns `bytes` initialised bytes, and the result borrows `self` mutably.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), bytes) }
    }

    fn address(&mut self) -> *mut u8 {
        let at = self.at;
        self.all()[at..].as_mut_ptr()
    }

    /// Returns the bytes of the array; panics if the margin changed.
    fn take(&mut self, what: &str) -> Vec<u8> {
        let (at, bytes) = (self.at, self.bytes);
        let all = self.all();
        let mut outside = all[..at].iter().chain(&all[at + bytes..]);
        assert!(outside.all(|&byte| byte == AROUND), "{what}: wrote beside");
        all[at..at + bytes].to_vec()
    }
}

struct Case {
    spec: CodecSpec,
    layout: Layout,
    dtype: DType,
    /// Number of blocks in the grid.
    blocks: u32,
    wire_at: usize,
    element_at: usize,
}

impl Case {
    fn run(&self, launch: Launch, kernel: &str, n: usize, wire: &mut Array, elements: &mut Array) {
        self.run_with_shares(launch, kernel, n, wire, elements, None);
    }

    fn run_with_shares(
        &self,
        launch: Launch,
        kernel: &str,
        n: usize,
        wire: &mut Array,
        elements: &mut Array,
        shares: Option<u32>,
    ) {
        let draws = [RoundingRandom::new(self.spec.seed.into(), n as u64, 0); 2];
        let mut params = kernel_params(self.spec, 0.0, draws);
        params[0] = shares.unwrap_or(params[0]);
        let args = Args {
            wire: wire.address(),
            elements: elements.address(),
            n: n as u64,
            params,
            first: 0,
            unused: 0,
        };
        let blocks = if kernel == "cinch_header" {
            1
        } else {
            shares.unwrap_or(self.blocks)
        };
        let name = CString::new(kernel).unwrap();
        // SAFETY: `args` has the type of the kernel's parameter, and both arrays in it have room
        // for n elements.
        let known = unsafe { launch(name.as_ptr(), blocks, 256, &args) };
        assert!(known, "{kernel}");
    }

    /// Encodes and decodes `values` by kernels and on the host, and compares the results.
    fn check(&self, launch: Launch, values: &[f32]) {
        let (spec, dtype, n, size) = (self.spec, self.dtype, values.len(), self.dtype.size());
        let what = format!(
            "{spec} {:?} of {n} {dtype} at {} and {}, {} blocks",
            self.layout, self.wire_at, self.element_at, self.blocks
        );
        let mut bytes = vec![0; n * size];
        narrow(dtype, Isa::Scalar, values, &mut bytes);
        let mut values = vec![0f32; n];
        widen(dtype, Isa::Scalar, &bytes, &mut values);
        let host = StandAlone::new(spec, self.layout, Isa::Scalar).unwrap();
        let need = host.bytes(n);
        let mut expected = vec![0; need];
        host.encode(&values, n as u64, &mut expected).unwrap();

        let mut wire = Array::new(self.wire_at, &[], need);
        let mut elements = Array::new(self.element_at * size, &bytes, n * size);
        let family = array_family(spec.kind);
        let message = self.layout == Layout::Published && spec.kind.has_scale();
        let [encode, decode] = match self.layout {
            Layout::Chunk => {
                ["encode", "decode"].map(|way| format!("cinch_{way}_{family}_{dtype}"))
            }
            _ if message => ["message", "unmessage"].map(|way| format!("cinch_{way}_{dtype}")),
            _ => ["pack", "unpack"].map(|way| format!("cinch_{way}_{dtype}")),
        };
        if message {
            let room = (need - 3) as u32 / 8;
            let shares = if n == 0 { 0 } else { self.blocks.min(room) };
            if shares > 0 {
                let kernel = format!("cinch_extent_{dtype}");
                self.run_with_shares(launch, &kernel, n, &mut wire, &mut elements, Some(shares));
            }
            self.run_with_shares(
                launch,
                "cinch_header",
                n,
                &mut wire,
                &mut elements,
                Some(shares),
            );
        }
        self.run(launch, &encode, n, &mut wire, &mut elements);
        let found = wire.take(&what);
        if let Some(at) = (0..need).find(|&at| found[at] != expected[at]) {
            panic!(
                "{what}: byte {at} is {:#x}, not {:#x}",
                found[at], expected[at]
            );
        }
        assert_eq!(elements.take(&what), bytes, "{what}: the elements changed");

        let mut decoded = vec![0f32; n];
        host.decode(&expected, &mut decoded).unwrap();
        let mut expected = vec![0; n * size];
        narrow(dtype, Isa::Scalar, &decoded, &mut expected);
        let mut elements = Array::new(self.element_at * size, &[], n * size);
        self.run(launch, &decode, n, &mut wire, &mut elements);
        let found = elements.take(&what);
        let (mut a, mut b) = (vec![0f32; n], vec![0f32; n]);
        widen(dtype, Isa::Scalar, &found, &mut a);
        widen(dtype, Isa::Scalar, &expected, &mut b);
        // NaNs count as equal, whatever their bits.
        let same =
            |i: &usize| a[*i].to_bits() == b[*i].to_bits() || a[*i].is_nan() && b[*i].is_nan();
        if let Some(i) = (0..n).find(|i| !same(i)) {
            panic!("{what}: element {i} is {:e}, not {:e}", a[i], b[i]);
        }
    }
}

/// Returns numbers of a few magnitudes; for some seeds also numbers with random bits.
fn values(seed: u64, n: usize) -> Vec<f32> {
    let word = |at: usize| random_word(seed, at as u64);
    let scale = 2f32.powi((random_word(seed, u64::MAX) % 60) as i32 - 40);
    let wild = seed.is_multiple_of(4);
    let one = |at: usize| match word(at) % 61 {
        0 => 0.0,
        1 => -0.0,
        2 if wild => f32::from_bits((word(at) >> 32) as u32),
        _ => scale * gaussian(word(at)) as f32,
    };
    (0..n).map(one).collect()
}

#[test]
fn chunks_at_any_length_equal_the_host() {
    let Some(kernels) = kernels() else { return };
    // Kernels of this library share static memory, so tests must run them one at a time.
    let kernels = kernels.lock().unwrap_or_else(PoisonError::into_inner);
    let launch = *kernels;
    let seed = support::seed();
    let mut ran = 0u64;
    let mut specs = CodecSpec::samples();
    specs.retain(|spec| !matches!(spec.scale, ScaleRule::Tensor { .. }));
    for block in [64, 128, 512, 1024] {
        for kind in KERNEL_CODECS.into_iter().filter(|kind| kind.has_scale()) {
            let scale = ScaleRule::Block(block);
            specs.push(CodecSpec {
                scale,
                ..CodecSpec::of(kind)
            });
        }
    }
    for spec in specs {
        for n in [1, 16, 31, 255, 513, 700, 4097, 9000] {
            let case = Case {
                spec,
                layout: Layout::Chunk,
                dtype: TYPES[(ran % 3) as usize],
                blocks: 1 + (ran % 2) as u32,
                wire_at: 0,
                element_at: (ran % 5 / 4) as usize,
            };
            case.check(launch, &values(seed + ran, n));
            ran += 1;
        }
    }
    println!("{ran} chunks");
}

/// The elements of each block are near ties, so that a wrong order of the sums changes the block's numbers.
#[test]
fn blocks_near_ties_equal_the_host() {
    let Some(kernels) = kernels() else { return };
    // Kernels of this library share static memory, so tests must run them one at a time.
    let kernels = kernels.lock().unwrap_or_else(PoisonError::into_inner);
    let launch = *kernels;
    let mut random = Random::new(support::seed());
    for text in [
        "onebit:block=32",
        "onebit:block=64",
        "onebit",
        "onebit:block=512",
        "onebit:block=4096",
        "terngrad:block=64",
        "terngrad",
        "terngrad:block=1024",
    ] {
        let spec: CodecSpec = text.parse().unwrap();
        let ScaleRule::Block(block) = spec.scale else {
            unreachable!("{text} has blocks")
        };
        for dtype in TYPES {
            if !has_near_ties(spec.kind, dtype) {
                continue;
            }
            for element_at in [0, 1] {
                let case = Case {
                    spec,
                    layout: Layout::Chunk,
                    dtype,
                    blocks: 2,
                    wire_at: 0,
                    element_at,
                };
                let values =
                    random.near_ties(spec.kind, block as usize, (1 << 15) / block as usize + 37);
                case.check(launch, &values);
            }
        }
    }
}

#[test]
fn published_layouts_at_any_alignment_equal_the_host() {
    let Some(kernels) = kernels() else { return };
    // Kernels of this library share static memory, so tests must run them one at a time.
    let kernels = kernels.lock().unwrap_or_else(PoisonError::into_inner);
    let launch = *kernels;
    let seed = support::seed();
    let mut ran = 0u64;
    for text in [
        "minmax1",
        "minmax2",
        "minmax4",
        "minmax8",
        "minmax1:seed=2",
        "minmax2:seed=3",
        "minmax4:seed=4",
        "minmax8:seed=5",
        "trunc8",
        "trunc16",
        "trunc24",
    ] {
        for n in (0..20).chain([31, 100, 257, 5000]) {
            let case = Case {
                spec: text.parse().unwrap(),
                layout: Layout::Published,
                dtype: TYPES[(ran % 3) as usize],
                blocks: 1 + (ran % 3) as u32,
                wire_at: [0, 1, 2, 3, 6, 10][(ran % 6) as usize],
                element_at: (ran % 2) as usize,
            };
            case.check(launch, &values(seed + ran, n));
            ran += 1;
        }
    }
    println!("{ran} arrays");
}
