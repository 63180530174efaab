//! The fused kernels, run on the host with all ranks side by side (`tests/cuda/block.h`): what they give,
//! and that it stays right where the number of the call, of which packets carry 32 bits, comes round.
#![allow(unsafe_code)]

mod common;
#[path = "cuda/library.rs"]
mod library;

use cinch::engine::gpu::abi::{ALIGNED, OneshotArgs};
use cinch::mem::abi::{CommView, Control, Fifo, Trouble};
use common::Rng;
use library::{Library, starts};
use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

type Launch = unsafe extern "C" fn(*const c_char, u32, u32, *const OneshotArgs) -> bool;

/// Bytes of a half of the area: packets of as many payload bytes as half of it.
const HALF: usize = 8 << 10;

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
    fn kernel(self) -> &'static str {
        match self {
            Does::AllReduce => "",
            Does::AllReduceTwice => "twice",
            Does::ReduceScatter => "scatter",
            Does::AllGather => "move",
            Does::AllToAll => "scatter_move",
        }
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

    /// The most elements that there is room for.
    fn most(self, ranks: usize) -> usize {
        match self {
            // Two trips share a half, and each rank has a part in whole granules.
            Does::AllReduceTwice => HALF / 4 / 4 * ranks,
            _ => HALF / 2 / 4,
        }
    }

    /// What `rank` gets.
    fn expected(self, inputs: &[Vec<f32>], rank: usize, count: usize) -> Vec<f32> {
        let sum = |at: usize| {
            let terms = inputs.iter().map(|input| input[at]);
            terms.reduce(|sum, term| sum + term).unwrap()
        };
        match self {
            Does::AllReduce | Does::AllReduceTwice => (0..count).map(sum).collect(),
            Does::ReduceScatter => (rank * count..(rank + 1) * count).map(sum).collect(),
            Does::AllGather => inputs.concat(),
            Does::AllToAll => {
                let blocks = inputs.iter();
                let blocks = blocks.map(|input| &input[rank * count..(rank + 1) * count]);
                blocks.flatten().copied().collect()
            }
        }
    }
}

/// The memory of a communicator.
struct World {
    launch: Launch,
    ranks: usize,
    /// Box from -> to at `from * ranks + to`.
    boxes: Vec<Vec<u128>>,
    /// Of each rank: calls so far, and blocks that are done.
    epochs: Vec<[u64; 2]>,
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
            boxes: vec![vec![0; 2 * HALF / 16]; ranks * ranks],
            epochs: vec![[0; 2]; ranks],
            controls: vec![control; ranks],
            rng,
        }
    }

    /// As if so many calls had been made.
    fn jump(&mut self, calls: u64) {
        self.epochs.fill([calls, 0]);
    }

    /// Makes a call, and says whether all ranks got what they should.
    fn is_right(&mut self, does: Does, count: usize, blocks: u32) -> bool {
        let ranks = self.ranks;
        let [inputs, outputs] = does.blocks(ranks);
        let mut numbers = |len: usize| {
            let number = |_| self.rng.below(1 << 20) as f32;
            (0..len).map(number).collect::<Vec<f32>>()
        };
        let sent: Vec<Vec<f32>> = (0..ranks).map(|_| numbers(inputs * count)).collect();
        let mut got = vec![vec![f32::NAN; outputs * count]; ranks];
        let address = |from: usize, to: usize, boxes: &mut [Vec<u128>]| match from == to {
            true => 0,
            false => boxes[from * ranks + to].as_mut_ptr().addr() as u64,
        };
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
            let (input, output) = (sent[rank].as_ptr().addr(), got[rank].as_mut_ptr().addr());
            args.push(OneshotArgs {
                comm,
                area: 0,
                half: HALF as u64,
                epoch: self.epochs[rank].as_mut_ptr().addr() as u64,
                input: input as u64,
                output: output as u64,
                count: count as u64,
                factor: 0,
                signature: [0; 5],
                combine: 0,
                flags: match (input | output).is_multiple_of(16) {
                    true => ALIGNED,
                    false => 0,
                },
                element_bytes: 4,
                unused: [0; 5],
            });
        }
        let name = CString::new(does.kernel()).unwrap();
        // SAFETY: the arguments of as many ranks; what they point to lives through the call, and is as
        // large as they say.
        let known = unsafe { (self.launch)(name.as_ptr(), ranks as u32, blocks, args.as_ptr()) };
        assert!(known, "{does:?}");
        let expected = (0..ranks).map(|rank| does.expected(&sent, rank, count));
        expected.zip(&got).all(|(expected, got)| expected == *got)
    }

    fn call(&mut self, does: Does, count: usize, blocks: u32) {
        let before = self.epochs[0][0];
        let what = format!("{does:?} of {count} over {}, call {before}", self.ranks);
        assert!(self.is_right(does, count, blocks), "{what}");
        assert!(
            self.epochs.iter().all(|epoch| *epoch == [before + 1, 0]),
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
        for begin in [0, (1 << 30) - 6, (1 << 32) - 6, (3 << 32) - 6] {
            world.jump(begin);
            for _ in 0..12 {
                let does = rng.pick(&ALL);
                let most = does.most(ranks);
                let count = match rng.below(3) {
                    0 => 1 + rng.below(40),
                    1 => most - rng.below(40),
                    _ => 1 + rng.below(most),
                };
                world.call(does, count, 1 + rng.below(2) as u32);
            }
        }
    }
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
        for refreshes in [true, false] {
            let mut world = World::new(*kernels, 3, Rng(rng.next()));
            let most = long.most(3);
            world.jump(1000);
            world.call(long, most, 1);
            if refreshes {
                world.jump((1 << 30) - 3);
                for _ in 0..8 {
                    world.call(short, 1, 1);
                }
            }
            world.jump(1000 + ROUND);
            // Else the ranks take what is left of the message of a round ago.
            assert_eq!(
                world.is_right(long, most, 1),
                refreshes,
                "{short:?}, {long:?}"
            );
        }
    }
}
