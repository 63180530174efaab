//! The fused kernels, run on the host with all ranks side by side (`tests/cuda/block.h`): what they give,
//! and that it stays right where the number of the call, of which packets carry 32 bits, comes round.
#![allow(unsafe_code)]

mod common;
#[path = "cuda/library.rs"]
mod library;

use cinch::engine::gpu::abi::{ALIGNED, AVERAGE, OneshotArgs, PREMULTIPLY};
use cinch::mem::abi::{CommView, Control, Fifo, Trouble};
use common::Rng;
use library::{Library, starts};
use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

type Launch = unsafe extern "C" fn(*const c_char, u32, u32, *const OneshotArgs) -> bool;

/// Bytes of a half of an area: more packets than a block has threads, and more tiles than it has warps.
const HALF: usize = 12 << 10;

/// The kernels as a library, for one test at a time: it has one of everything. `None`, with a word, where
/// there is no g++.
fn kernels() -> Option<MutexGuard<'static, Launch>> {
    static KERNELS: OnceLock<Option<Mutex<Launch>>> = OnceLock::new();
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

fn compile() -> Launch {
    // Of the interpreter that is in the same headers nothing is used here.
    let options = ["-O1", "-Wno-unknown-pragmas", "-Wno-unused-function"];
    let library = Library::compile("g++", "fused", &options, &["tests/cuda/host"]);
    // SAFETY: this is the type of the function in `fused.cpp`.
    unsafe { std::mem::transmute::<*mut c_void, Launch>(library.find("test_fused")) }
}

/// What a kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    AllReduce,
    AllReduceTwice,
    ReduceScatter,
    AllGather,
    AllToAll,
}

const ALL: [Does; 5] = [
    Does::AllReduce,
    Does::AllReduceTwice,
    Does::ReduceScatter,
    Does::AllGather,
    Does::AllToAll,
];

impl Does {
    fn reduces(self) -> bool {
        !matches!(self, Does::AllGather | Does::AllToAll)
    }

    /// Elements of the input and of the output for a count, in units of it.
    fn blocks(self, ranks: usize) -> [usize; 2] {
        match self {
            Does::AllReduce | Does::AllReduceTwice => [1, 1],
            Does::ReduceScatter => [ranks, 1],
            Does::AllGather => [1, ranks],
            Does::AllToAll => [ranks, ranks],
        }
    }

    /// Where input and output of `rank` begin, in units of the count, if one lies inside the other.
    fn places(self, rank: usize) -> [usize; 2] {
        match self {
            Does::ReduceScatter => [0, rank],
            Does::AllGather => [rank, 0],
            _ => [0, 0],
        }
    }
}

/// In what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Packets,
    Lines,
}

impl By {
    /// Payload bytes of so much memory: half of a packet, 480 of the 512 of a tile.
    fn payload(self, memory: usize) -> usize {
        match self {
            By::Packets => memory / 2,
            By::Lines => memory / 512 * 480,
        }
    }

    /// What each of `blocks` does of `words`: packets of one, tiles of 60.
    fn share(self, words: usize, blocks: usize) -> usize {
        match self {
            By::Packets => words.div_ceil(blocks).next_multiple_of(32),
            By::Lines => words.div_ceil(60).div_ceil(blocks),
        }
    }
}

/// Of what type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    F32,
    F16,
    Bf16,
    /// Of so many bytes, which are only moved.
    Bytes(usize),
}

const FLOATS: [Type; 3] = [Type::F32, Type::F16, Type::Bf16];

impl Type {
    fn size(self) -> usize {
        match self {
            Type::F32 => 4,
            Type::F16 | Type::Bf16 => 2,
            Type::Bytes(size) => size,
        }
    }

    /// The bits of a number that the type has, or of the NaN that arithmetic makes.
    fn bits(self, number: f32) -> u64 {
        let bits = u64::from(number.to_bits());
        match self {
            Type::F32 if number.is_nan() => 0x7fc0_0000,
            Type::F16 if number.is_nan() => 0x7e00,
            Type::Bf16 if number.is_nan() => 0x7fc0,
            Type::F16 if number == 0.0 => 0,
            Type::F32 => bits,
            Type::Bf16 => bits >> 16,
            Type::F16 => bits >> 16 & 0x8000 | ((bits >> 13 & 0x3ffff) - (112 << 10)),
            Type::Bytes(_) => unreachable!("bytes are no numbers"),
        }
    }

    /// A NaN with a payload of its own.
    fn any_nan(self, rng: &mut Rng) -> u64 {
        let payload = 1 + rng.below(100) as u64;
        match self {
            Type::F32 => 0xff80_0000 | payload,
            Type::F16 => 0xfc00 | payload,
            _ => 0xff80 | payload,
        }
    }
}

/// How contributions are put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
    HalfSum,
}

const OPS: [Op; 6] = [Op::Sum, Op::Prod, Op::Max, Op::Min, Op::Avg, Op::HalfSum];

impl Op {
    /// A number of which that of many is exact in all types.
    fn number(self, dtype: Type, ranks: usize, rng: &mut Rng) -> f32 {
        match self {
            Op::Sum if dtype == Type::F32 => rng.below(1 << 20) as f32,
            Op::Sum | Op::HalfSum => rng.below(16) as f32,
            Op::Prod => rng.pick(&[0.5, 1.0, 2.0]),
            Op::Max | Op::Min => rng.below(200) as f32 - 100.0,
            Op::Avg => (ranks * rng.below(16)) as f32,
        }
    }

    fn of(self, terms: impl Iterator<Item = f32>, ranks: usize) -> f32 {
        let terms: Vec<f32> = terms.collect();
        if terms.iter().any(|term| term.is_nan()) {
            return f32::NAN;
        }
        let sum = terms.iter().sum::<f32>();
        match self {
            Op::Sum => sum,
            Op::HalfSum => sum / 2.0,
            Op::Avg => sum / ranks as f32,
            Op::Prod => terms.iter().product(),
            Op::Max => terms.into_iter().reduce(f32::max).unwrap(),
            Op::Min => terms.into_iter().reduce(f32::min).unwrap(),
        }
    }

    fn combine(self) -> u8 {
        match self {
            Op::Sum | Op::Avg | Op::HalfSum => 0,
            Op::Prod => 1,
            Op::Max => 2,
            Op::Min => 3,
        }
    }

    fn flags(self) -> u8 {
        match self {
            Op::Avg => AVERAGE,
            Op::HalfSum => PREMULTIPLY,
            _ => 0,
        }
    }
}

/// A call.
#[derive(Clone, Copy, Debug)]
struct Work {
    does: Does,
    by: By,
    dtype: Type,
    op: Op,
    count: usize,
    blocks: u32,
    in_place: bool,
    /// Elements from an address that is a multiple of 16 to the input and the output.
    shift: usize,
}

impl Work {
    fn new(does: Does, by: By, count: usize, blocks: u32) -> Work {
        Work {
            does,
            by,
            dtype: Type::F32,
            op: Op::Sum,
            count,
            blocks,
            in_place: false,
            shift: 0,
        }
    }

    fn kernel(&self) -> String {
        let does = match self.does {
            Does::AllReduce => "",
            Does::AllReduceTwice => "twice_",
            Does::ReduceScatter => "scatter_",
            Does::AllGather => "move",
            Does::AllToAll => "scatter_move",
        };
        let dtype = match self.dtype {
            _ if !self.does.reduces() => "",
            Type::F16 => "f16",
            Type::Bf16 => "bf16",
            _ => "f32",
        };
        let by = match self.by {
            By::Packets => "",
            By::Lines => "_ll128",
        };
        format!("{does}{dtype}{by}")
    }

    /// The most elements that there is room for.
    fn most(&self, ranks: usize) -> usize {
        let bytes = match self.does {
            // Two trips share a half, and each rank has a part in whole granules.
            Does::AllReduceTwice => self.by.payload(HALF / 2) / 64 * 64 * ranks,
            _ => self.by.payload(HALF),
        };
        bytes / self.dtype.size()
    }

    /// Words of 8 bytes from a rank to another on a trip.
    fn words(&self, ranks: usize) -> usize {
        let bytes = self.count * self.dtype.size();
        match self.does {
            Does::AllReduceTwice => bytes.div_ceil(64 * ranks) * 8,
            _ => bytes.div_ceil(8),
        }
    }

    /// Inputs of all ranks, and the outputs that they make: the bits of elements.
    fn data(&self, ranks: usize, rng: &mut Rng) -> [Vec<Vec<u64>>; 2] {
        let count = self.count;
        let len = self.does.blocks(ranks)[0] * count;
        if !self.does.reduces() {
            let mask = u64::MAX >> (64 - 8 * self.dtype.size());
            let inputs: Vec<Vec<u64>> = (0..ranks)
                .map(|_| (0..len).map(|_| rng.next() & mask).collect())
                .collect();
            let block = |rank: usize| match self.does {
                Does::AllGather => 0..count,
                _ => rank * count..(rank + 1) * count,
            };
            let outputs = (0..ranks).map(|rank| {
                let blocks = inputs.iter().map(|input| &input[block(rank)]);
                blocks.flatten().copied().collect()
            });
            let outputs = outputs.collect();
            return [inputs, outputs];
        }
        let numbers: Vec<Vec<f32>> = (0..ranks)
            .map(|_| {
                let number = |_| match rng.below(40) {
                    0 => f32::NAN,
                    _ => self.op.number(self.dtype, ranks, rng),
                };
                (0..len).map(number).collect()
            })
            .collect();
        let result = |at: usize| {
            let terms = numbers.iter().map(|numbers| numbers[at]);
            self.dtype.bits(self.op.of(terms, ranks))
        };
        let outputs = (0..ranks)
            .map(|rank| match self.does {
                Does::ReduceScatter => (rank * count..(rank + 1) * count).map(result).collect(),
                _ => (0..count).map(result).collect(),
            })
            .collect();
        let bits = |number: &f32| match number.is_nan() {
            true => self.dtype.any_nan(rng),
            false => self.dtype.bits(*number),
        };
        let inputs = numbers.iter().flatten().map(bits).collect::<Vec<u64>>();
        let inputs = inputs.chunks(len).map(<[u64]>::to_vec).collect();
        [inputs, outputs]
    }
}

/// Memory of a rank, from a multiple of 16 on.
struct Memory(Vec<u128>);

impl Memory {
    fn new(bytes: usize) -> Memory {
        Memory(vec![u128::MAX / 255 * 0xa5; bytes.div_ceil(16) + 1])
    }

    fn address(&mut self) -> usize {
        self.0.as_mut_ptr().addr()
    }

    fn write(&mut self, at: usize, size: usize, elements: &[u64]) {
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

    fn byte(&self, place: usize) -> u64 {
        (self.0[place / 16] >> (8 * (place % 16)) & 0xff) as u64
    }

    fn read(&self, at: usize, size: usize, count: usize) -> Vec<u64> {
        let element = |index: usize| {
            let bytes = (0..size).map(|byte| self.byte(at + index * size + byte) << (8 * byte));
            bytes.sum()
        };
        (0..count).map(element).collect()
    }
}

/// The memory of a communicator.
struct World {
    launch: Launch,
    ranks: usize,
    /// Box from -> to at `from * ranks + to`: the area for packets, and that for lines.
    boxes: Vec<Vec<u128>>,
    /// Of each rank, for packets and for lines: calls so far, and blocks that are done.
    epochs: Vec<[[u64; 2]; 2]>,
    controls: Vec<Control>,
    rng: Rng,
}

impl World {
    fn new(launch: Launch, ranks: usize, rng: Rng) -> World {
        let control = Control {
            abort: 0,
            unused: [0; 31],
            trouble: Trouble::default(),
        };
        World {
            launch,
            ranks,
            boxes: vec![vec![0; 4 * HALF / 16]; ranks * ranks],
            epochs: vec![[[0; 2]; 2]; ranks],
            controls: vec![control; ranks],
            rng,
        }
    }

    /// As if so many calls had been made.
    fn jump(&mut self, calls: u64) {
        self.epochs.fill([[calls, 0]; 2]);
    }

    /// Makes a call, and says whether all ranks got what they should, and nothing beside it.
    fn is_right(&mut self, work: &Work) -> bool {
        let (ranks, size) = (self.ranks, work.dtype.size());
        let [inputs, expected] = work.data(ranks, &mut self.rng);
        let [sent, got] = work.does.blocks(ranks).map(|blocks| blocks * work.count);
        let apart = (sent * size).next_multiple_of(16) + 16;
        let mut memories: Vec<Memory> = (0..ranks)
            .map(|_| Memory::new(apart + (got + work.shift) * size + 16))
            .collect();
        // Input and output of each.
        let places = |rank: usize| match work.in_place {
            true => work
                .does
                .places(rank)
                .map(|block| (work.shift + block * work.count) * size),
            false => [work.shift * size, apart + work.shift * size],
        };
        let address = |from: usize, to: usize, boxes: &mut [Vec<u128>]| match from == to {
            true => 0,
            false => boxes[from * ranks + to].as_mut_ptr().addr() as u64,
        };
        let words = work.words(ranks);
        let mut args = Vec::new();
        for rank in 0..ranks {
            let mut comm = CommView {
                inbox: [0; 32],
                outbox: [0; 32],
                cursors: 0,
                control: (&raw mut self.controls[rank]).addr() as u64,
                timeout_ns: 1,
                rank: rank as u32,
                nranks: ranks as u32,
                fifo: Fifo::default(),
                protocol: 0,
                unused: 0,
            };
            for peer in 0..ranks {
                comm.inbox[peer] = address(peer, rank, &mut self.boxes);
                comm.outbox[peer] = address(rank, peer, &mut self.boxes);
            }
            memories[rank].write(places(rank)[0], size, &inputs[rank]);
            let [input, output] = places(rank).map(|at| memories[rank].address() + at);
            let aligned = match (input | output).is_multiple_of(16) {
                true => ALIGNED,
                false => 0,
            };
            args.push(OneshotArgs {
                comm,
                area: match work.by {
                    By::Packets => 0,
                    By::Lines => 2 * HALF as u64,
                },
                half: HALF as u64,
                epoch: self.epochs[rank][work.by as usize].as_mut_ptr().addr() as u64,
                input: input as u64,
                output: output as u64,
                count: work.count as u64,
                factor: u64::from(0.5f32.to_bits()),
                mark: 7 << 48,
                signature: [0; 5],
                words: words as u32,
                share: work.by.share(words, work.blocks as usize) as u32,
                combine: work.op.combine(),
                flags: aligned | work.op.flags(),
                element_bytes: size as u8,
                unused: [0; 5],
            });
        }
        let name = CString::new(work.kernel()).unwrap();
        let untouched = |rank: usize, memory: &Memory| {
            let [_, at] = places(rank);
            let around = (at.saturating_sub(16)..at).chain(at + got * size..at + got * size + 8);
            let bytes = around.map(|place| memory.byte(place));
            bytes.collect::<Vec<u64>>()
        };
        let before: Vec<_> = (0..ranks)
            .map(|rank| untouched(rank, &memories[rank]))
            .collect();
        // SAFETY: the arguments of as many ranks; what they point to lives through the call, and is as
        // large as they say.
        let known =
            unsafe { (self.launch)(name.as_ptr(), ranks as u32, work.blocks, args.as_ptr()) };
        assert!(known, "{work:?}");
        (0..ranks).all(|rank| {
            let memory = &memories[rank];
            // In place of a reduce-scatter, the blocks of the others beside the own one are input still.
            memory.read(places(rank)[1], size, got) == expected[rank]
                && untouched(rank, memory) == before[rank]
        })
    }

    fn call(&mut self, work: &Work) {
        let before = self.epochs[0][work.by as usize][0];
        let what = format!("{work:?} over {}, call {before}", self.ranks);
        assert!(self.is_right(work), "{what}");
        assert!(
            self.epochs
                .iter()
                .all(|epochs| epochs[work.by as usize] == [before + 1, 0]),
            "{what}"
        );
    }
}

#[test]
fn calls_give_the_reference_wherever_their_number_stands() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(common::seed());
    // More ranks than are polled at once, too.
    for ranks in [2, 3, 9] {
        let mut world = World::new(*kernels, ranks, Rng(rng.next()));
        // From the beginning, where every packet is sent anew, across the numbers whose 32 bits are 0.
        for begin in [0, (1 << 30) - 6, (1 << 32) - 6] {
            world.jump(begin);
            for call in 0..22 {
                let by = [By::Packets, By::Lines][call % 2];
                world.call(&any(&mut rng, by, ranks));
            }
        }
    }
}

/// Any call that there is a kernel for.
fn any(rng: &mut Rng, by: By, ranks: usize) -> Work {
    let mut work = Work::new(rng.pick(&ALL), by, 0, 1 + rng.below(2) as u32);
    work.dtype = match work.does.reduces() {
        true => rng.pick(&FLOATS),
        false => Type::Bytes(rng.pick(&[1, 2, 4, 8])),
    };
    work.op = rng.pick(&OPS);
    let most = work.most(ranks);
    work.count = match rng.below(3) {
        0 => 1 + rng.below(40),
        1 => most - rng.below(40),
        _ => 1 + rng.below(most),
    };
    work.in_place = rng.below(2) == 0;
    work.shift = rng.pick(&[0, 0, 1, 3]);
    work
}

/// A packet that only long messages have keeps its flag from the last of them. When the flags have come
/// round, it must not pass for one of a new message: every 2^30 calls all packets are sent anew.
#[test]
fn packets_of_long_ago_are_not_taken_for_new_ones() {
    let Some(kernels) = kernels() else { return };
    let mut rng = Rng(common::seed());
    for (short, long) in [
        (Does::AllReduce, Does::AllReduce),
        (Does::AllReduceTwice, Does::AllReduceTwice),
        (Does::AllGather, Does::AllToAll),
        (Does::AllReduceTwice, Does::ReduceScatter),
        (Does::AllReduce, Does::AllReduceTwice),
    ] {
        const ROUND: u64 = 1 << 32;
        let short = Work::new(short, By::Packets, 1, 1);
        let mut long = Work::new(long, By::Packets, 1, 1);
        long.count = long.most(3);
        for refreshes in [true, false] {
            let mut world = World::new(*kernels, 3, Rng(rng.next()));
            world.jump(1000);
            world.call(&long);
            if refreshes {
                world.jump((1 << 30) - 3);
                for _ in 0..8 {
                    world.call(&short);
                }
            }
            world.jump(1000 + ROUND);
            // Else the ranks take what is left of the message of a round ago.
            assert_eq!(world.is_right(&long), refreshes, "{short:?}, {long:?}");
        }
    }
}
