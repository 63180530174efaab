//! Emulates the ranks of a communicator, which run the fused kernels on the host side by side
//! (`block.h`).

use super::fused_coded;
use super::fused_work::{Protocol, Type, Work, half};
use super::library::{Library, starts};
use crate::support::Rng;
use cinch::gpu::abi::{ALIGNED, OneshotArgs, RESIDUALS_BYTES};
use cinch::gpu::abi::{CommView, Control, Fifo, Trouble};
use std::ffi::{CString, c_char, c_void};
use std::mem;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The type of `test_fused` in `fused.cpp`. Its parameters are the number of calls, kernel names,
/// ranks, blocks, arguments and pauses, the slow rank, and its extra turns. Arguments and pauses
/// are for each rank of each call.
type Launch = unsafe extern "C" fn(
    u32,
    *const *const c_char,
    u32,
    u32,
    *const OneshotArgs,
    *const u32,
    u32,
    u32,
) -> bool;

/// The function `test_fused` of the shared library that is compiled from `fused.cpp`.
#[derive(Clone, Copy)]
pub struct Kernels {
    launch: Launch,
}

/// Compiles the kernels to a library and returns it, locked, because it has static memory: one test
/// at a time uses it. Returns `None`, with a message, if there is no g++.
pub fn kernels() -> Option<MutexGuard<'static, Kernels>> {
    static KERNELS: OnceLock<Option<Mutex<Kernels>>> = OnceLock::new();
    let kernels = KERNELS.get_or_init(|| {
        if !starts("g++") {
            println!("skipped: no g++ is here to compile the kernels");
            return None;
        }
        Some(Mutex::new(compile()))
    });
    let kernels = kernels.as_ref()?;
    Some(kernels.lock().unwrap_or_else(PoisonError::into_inner))
}

fn compile() -> Kernels {
    // -Wno-unused-function is needed because only schedule kernels use some functions of the
    // headers.
    let options = ["-O1", "-Wno-unknown-pragmas", "-Wno-unused-function"];
    let library = Library::compile("g++", "fused", &options, &["tests/cuda_host/host"]);
    // SAFETY: `fused.cpp` defines `test_fused` with the parameters of `Launch`.
    let launch = unsafe { std::mem::transmute::<*mut c_void, Launch>(library.find("test_fused")) };
    Kernels { launch }
}

/// Memory of one rank, aligned to 16 bytes.
struct Memory(Vec<u128>);

impl Memory {
    pub fn new(bytes: usize) -> Memory {
        Memory(vec![u128::MAX / 255 * 0xa5; bytes.div_ceil(16) + 1])
    }

    pub fn address(&mut self) -> usize {
        self.0.as_mut_ptr().addr()
    }

    pub fn write(&mut self, at: usize, size: usize, elements: &[u64]) {
        for (index, bits) in elements.iter().enumerate() {
            for byte in 0..size {
                let place = at + index * size + byte;
                let shift = 8 * (place % 16);
                let value = u128::from(bits >> (8 * byte) & 0xff);
                let word = &mut self.0[place / 16];
                *word = *word & !(0xff << shift) | value << shift;
            }
        }
    }

    pub fn byte(&self, place: usize) -> u64 {
        (self.0[place / 16] >> (8 * (place % 16)) & 0xff) as u64
    }

    pub fn read(&self, at: usize, size: usize, count: usize) -> Vec<u64> {
        let element = |index: usize| {
            let bytes = (0..size).map(|byte| self.byte(at + index * size + byte) << (8 * byte));
            bytes.sum()
        };
        (0..count).map(element).collect()
    }
}

/// The memory of all ranks of a communicator: peer buffers, sequence numbers and control words.
pub struct World {
    kernels: Kernels,
    ranks: usize,
    /// Size in bytes of each of the two halves of an area, which calls use alternately.
    half: usize,
    /// The peer buffer that rank `from` writes and rank `to` reads is element `from * ranks + to`.
    /// It has an area for ll, then an area for ll128.
    peer_buffers: Vec<Vec<u128>>,
    /// For each rank and protocol: the sequence number of the call, and the number of blocks that
    /// have finished the call.
    epochs: Vec<[[u64; 2]; 2]>,
    controls: Vec<Control>,
    rng: Rng,
    /// If set, the rank whose next call differs from that of the other ranks.
    pub other_call: Option<usize>,
}

impl World {
    pub fn new(kernels: Kernels, ranks: usize, rng: Rng) -> World {
        World::with(kernels, ranks, half(ranks), rng)
    }

    /// Creates the memory of `ranks` ranks. The areas of a peer buffer have two halves of `half`
    /// bytes.
    pub fn with(kernels: Kernels, ranks: usize, half: usize, rng: Rng) -> World {
        let control = Control {
            abort: 0,
            unused: [0; 31],
            trouble: Trouble::default(),
        };
        World {
            kernels,
            ranks,
            half,
            peer_buffers: vec![vec![0; 4 * half / 16]; ranks * ranks],
            epochs: vec![[[0; 2]; 2]; ranks],
            controls: vec![control; ranks],
            rng,
            other_call: None,
        }
    }

    /// Sets the sequence number to its value after `calls` calls.
    pub fn jump(&mut self, calls: u64) {
        self.epochs.fill([[calls, 0]; 2]);
    }

    /// Returns how many ranks have reported a failure since `failures` was last called.
    pub fn failures(&mut self) -> usize {
        let states = self.controls.iter_mut();
        let states = states.map(|one| mem::take(&mut one.trouble.state));
        states.filter(|&state| state != 0).count()
    }

    /// Makes a call on all ranks. Returns whether all ranks have the right output and no other
    /// memory changed.
    pub fn is_correct(&mut self, work: &Work) -> bool {
        let made = [self.prepare(work)];
        self.launch(&made, work.blocks, &vec![0; self.ranks], None)
    }

    /// Makes several calls of one block on all ranks. Each rank makes them one after the other,
    /// without waiting for other ranks in between. `pauses` has, for each rank of each call, how
    /// often it switches to the other ranks before the call. Rank `slow` is slow to poll lines.
    pub fn are_correct(&mut self, works: &[Work], pauses: &[u32], slow: Option<usize>) -> bool {
        let made: Vec<Made> = works.iter().map(|work| self.prepare(work)).collect();
        self.launch(&made, 1, pauses, slow)
    }

    fn launch(&self, made: &[Made], blocks: u32, pauses: &[u32], slow: Option<usize>) -> bool {
        assert_eq!(pauses.len(), made.len() * self.ranks);
        let names: Vec<_> = made.iter().map(|made| made.name.as_ptr()).collect();
        let args: Vec<OneshotArgs> = made.iter().flat_map(|made| made.args.clone()).collect();
        // SAFETY: there are names for each call, and arguments for each rank of each call. `made`
        // owns all memory that the arguments point to, with the sizes that they state.
        let known = unsafe {
            (self.kernels.launch)(
                made.len() as u32,
                names.as_ptr(),
                self.ranks as u32,
                blocks,
                args.as_ptr(),
                pauses.as_ptr(),
                slow.map_or(u32::MAX, |rank| rank as u32),
                200,
            )
        };
        assert!(known, "{names:?}");
        let in_time = self.controls.iter().all(|one| one.trouble.state == 0);
        in_time && made.iter().all(Made::is_correct)
    }

    fn prepare(&mut self, work: &Work) -> Made {
        let (ranks, size) = (self.ranks, work.dtype.size());
        let data = work
            .codec
            .map(|codec| fused_coded::data(work, codec, ranks, &mut self.rng));
        let (inputs, expected, mut residuals) = match data {
            None => {
                let [inputs, expected] = work.data(ranks, &mut self.rng);
                (inputs, expected, Vec::new())
            }
            Some(data) => {
                let kept = data.now.into_iter().zip(data.next);
                let kept = kept.map(|(now, next)| Residuals::new(&now, next, self.rng.below(2)));
                (data.inputs, data.outputs, kept.collect())
            }
        };
        let [sent, got] = work.does.blocks(ranks).map(|blocks| blocks * work.count);
        let apart = (sent * size).next_multiple_of(16) + 16;
        // Returns the offsets in bytes at which the input and the output of `rank` begin.
        let places = |rank: usize| match work.in_place {
            true => work
                .does
                .places(rank)
                .map(|block| (work.shift + block * work.count) * size),
            false => [work.shift * size, apart + work.shift * size],
        };
        let outputs = (0..ranks).zip(expected).map(|(rank, expected)| {
            let mut memory = Memory::new(apart + (got + work.shift) * size + 16);
            memory.write(places(rank)[0], size, &inputs[rank]);
            let at = places(rank)[1];
            let end = at + got * size;
            // If a rank receives nothing, the kernel must leave its whole output unchanged.
            let begin = if expected.is_empty() { at } else { end };
            let around = (at.saturating_sub(16)..at).chain(begin..end + 8);
            let around = around.map(|place| (place, memory.byte(place))).collect();
            Output {
                memory,
                at,
                size,
                expected,
                nan: work.codec.map(|_| work.dtype),
                around,
            }
        });
        let mut outputs: Vec<Output> = outputs.collect();
        let args = (0..ranks).map(|rank| {
            let base = outputs[rank].memory.address();
            let mut args = self.args(work, rank, places(rank).map(|at| base + at));
            if let Some(kept) = residuals.get_mut(rank).filter(|kept| !kept.now.is_empty()) {
                args.residuals = kept.memory.as_mut_ptr().addr() as u64;
                args.span = kept.next.len() as u64;
            }
            args
        });
        Made {
            name: CString::new(work.kernel()).unwrap(),
            args: args.collect(),
            outputs,
            residuals,
        }
    }

    fn args(&mut self, work: &Work, rank: usize, [input, output]: [usize; 2]) -> OneshotArgs {
        let ranks = self.ranks;
        let words = work.words(ranks);
        let mut comm = CommView {
            inbox: [0; 32],
            outbox: [0; 32],
            cursors: 0,
            control: (&raw mut self.controls[rank]).addr() as u64,
            // Nanoseconds of the emulated clock, which each poll of any rank advances.
            timeout_ns: 400_000_000,
            rank: rank as u32,
            nranks: ranks as u32,
            fifo: Fifo::default(),
            protocol: 0,
            npeers: ranks as u32,
            ranks: std::array::from_fn(|rank| rank as u8),
        };
        for peer in (0..ranks).filter(|&peer| peer != rank) {
            let mut address = |from: usize, to: usize| {
                self.peer_buffers[from * ranks + to].as_mut_ptr().addr() as u64
            };
            comm.inbox[peer] = address(peer, rank);
            comm.outbox[peer] = address(rank, peer);
        }
        let aligned = match (input | output).is_multiple_of(16) {
            true => ALIGNED,
            false => 0,
        };
        OneshotArgs {
            comm,
            area: match work.protocol {
                Protocol::Ll => 0,
                Protocol::Ll128 => 2 * self.half as u64,
            },
            half: self.half as u64,
            epoch: self.epochs[rank][work.protocol as usize]
                .as_mut_ptr()
                .addr() as u64,
            input: input as u64,
            output: output as u64,
            count: work.count as u64,
            factor: u64::from(0.5f32.to_bits()),
            // Calls that differ in bits which the flags of their protocol have, or only in other bits.
            signature_hash: match (self.other_call == Some(rank), work.protocol) {
                (true, Protocol::Ll) => 7 << 48 | 6,
                (true, Protocol::Ll128) => 7 << 48 | 1 << 40,
                (false, _) => 7 << 48 | 5,
            },
            signature: [0; 5],
            words: words as u32,
            share: work.share(words) as u32,
            combine: work.op.combine(),
            flags: aligned | work.op.flags(),
            element_bytes: work.dtype.size() as u8,
            root: work.root as u8,
            phases: fused_coded::phases(work.does),
            tile_lines: work
                .codec
                .map_or(0, |spec| fused_coded::tile_lines(spec, work.protocol))
                as u8,
            unused: [0; 2],
            codec: fused_coded::words(work.codec),
            residuals: 0,
            span: 0,
        }
    }

    pub fn call(&mut self, work: &Work) {
        let before = self.epochs[0][work.protocol as usize][0];
        let what = format!("{work:?} over {}, call {before}", self.ranks);
        assert!(self.is_correct(work), "{what}");
        assert!(
            self.epochs
                .iter()
                .all(|epochs| epochs[work.protocol as usize] == [before + 1, 0]),
            "{what}"
        );
    }
}

/// A call for which arguments and memory are prepared.
struct Made {
    name: CString,
    args: Vec<OneshotArgs>,
    outputs: Vec<Output>,
    residuals: Vec<Residuals>,
}

impl Made {
    fn is_correct(&self) -> bool {
        let mut kept = self.residuals.iter().filter(|kept| !kept.now.is_empty());
        let kept = kept.all(Residuals::are_correct);
        kept && self.outputs.iter().all(Output::is_correct)
    }
}

/// The residuals of one rank: before its kernel, and as expected after it.
struct Residuals {
    /// The header that kernels expect, then two arrays of residuals.
    memory: Vec<u32>,
    /// Index of the array that the previous call wrote: 0 or 1.
    turn: usize,
    now: Vec<u32>,
    /// Expected residuals in the array that the call writes; the call reads the other array.
    next: Vec<u32>,
}

impl Residuals {
    const HEADER: usize = RESIDUALS_BYTES / 4;

    fn new(now: &[f32], next: Vec<f32>, turn: usize) -> Residuals {
        let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        let (now, next) = (bits(now), bits(&next));
        let mut memory = vec![0; Residuals::HEADER];
        memory[0] = turn as u32;
        let untouched = vec![fused_coded::UNTOUCHED.to_bits(); now.len()];
        let arrays = if turn == 0 {
            [&now, &untouched]
        } else {
            [&untouched, &now]
        };
        memory.extend(arrays.into_iter().flatten());
        Residuals {
            memory,
            turn,
            now,
            next,
        }
    }

    fn are_correct(&self) -> bool {
        let array = |number: usize| {
            let at = Residuals::HEADER + number * self.now.len();
            &self.memory[at..at + self.now.len()]
        };
        let is_turned = self.memory[..2] == [1 - self.turn as u32, 0];
        is_turned && array(self.turn) == self.now && array(1 - self.turn) == self.next
    }
}

/// The expected output of one rank.
struct Output {
    memory: Memory,
    at: usize,
    size: usize,
    expected: Vec<u64>,
    /// Element type of an output in which an expected NaN may have any payload; `None` if all bits
    /// must be equal.
    nan: Option<Type>,
    /// Positions and values of the bytes around the output, which the kernel must not change.
    around: Vec<(usize, u64)>,
}

impl Output {
    fn is_correct(&self) -> bool {
        let got = self.memory.read(self.at, self.size, self.expected.len());
        let mut around = self.around.iter();
        let is_nan = |bits: u64| self.nan.is_some_and(|dtype| dtype.is_nan(bits));
        let mut pairs = got.iter().zip(&self.expected);
        let are_same = pairs.all(|(&a, &b)| a == b || is_nan(a) && is_nan(b));
        are_same && around.all(|&(place, byte)| self.memory.byte(place) == byte)
    }
}
