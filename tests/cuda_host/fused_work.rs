//! Calls of the fused kernels without a codec, and their expected results.

use super::fused_coded;
use crate::support::Rng;
use cinch::CodecSpec;
use cinch::gpu::abi::{AVERAGE, PREMULTIPLY};

/// Returns the bytes in a half of an area. It has room for more packets than a block has threads,
/// and for more tiles than a block has warps. With two ranks it has room for over four times as
/// many, because a kernel sends a tile before it polls for the last.
pub fn half(ranks: usize) -> usize {
    match ranks {
        2 => 40 << 10,
        _ => 12 << 10,
    }
}

/// The operation of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Does {
    AllReduce,
    TwoShotAllReduce,
    ReduceScatter,
    AllGather,
    AllToAll,
    Broadcast,
    Reduce,
}

pub const ALL: [Does; 7] = [
    Does::AllReduce,
    Does::TwoShotAllReduce,
    Does::ReduceScatter,
    Does::AllGather,
    Does::AllToAll,
    // Broadcast and reduce exist only as ll128 kernels.
    Does::Broadcast,
    Does::Reduce,
];

impl Does {
    pub fn reduces(self) -> bool {
        !matches!(self, Does::AllGather | Does::AllToAll | Does::Broadcast)
    }

    /// Returns the numbers of elements in the input and in the output, as multiples of the call's
    /// count.
    pub fn blocks(self, ranks: usize) -> [usize; 2] {
        match self {
            Does::AllReduce | Does::TwoShotAllReduce | Does::Broadcast | Does::Reduce => [1, 1],
            Does::ReduceScatter => [ranks, 1],
            Does::AllGather => [1, ranks],
            Does::AllToAll => [ranks, ranks],
        }
    }

    /// Returns where the input and the output of an in-place call of `rank` begin in the buffer, as
    /// multiples of the call's count.
    pub fn places(self, rank: usize) -> [usize; 2] {
        match self {
            Does::ReduceScatter => [0, rank],
            Does::AllGather => [rank, 0],
            _ => [0, 0],
        }
    }
}

/// The protocol of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Ll,
    Ll128,
}

impl Protocol {
    /// Returns how many bytes of payload `memory` bytes of an area hold: half of each ll packet but those of the
    /// last 128 bytes, 480 of the 512 bytes of an ll128 tile.
    pub fn payload(self, memory: usize) -> usize {
        match self {
            Protocol::Ll => (memory - 128) / 2,
            Protocol::Ll128 => memory / 512 * 480,
        }
    }

    /// Returns each block's share if `blocks` blocks send `words` words: a number of ll packets of
    /// one word, or of ll128 tiles of 60 words.
    pub fn share(self, words: usize, blocks: usize) -> usize {
        match self {
            Protocol::Ll => words.div_ceil(blocks).next_multiple_of(32),
            Protocol::Ll128 => words.div_ceil(60).div_ceil(blocks),
        }
    }
}

/// The element type of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    F32,
    F16,
    Bf16,
    /// Elements of this many bytes; kernels move them but do not compute with them.
    Bytes(usize),
}

const FLOATS: [Type; 3] = [Type::F32, Type::F16, Type::Bf16];

impl Type {
    pub fn size(self) -> usize {
        match self {
            Type::F32 => 4,
            Type::F16 | Type::Bf16 => 2,
            Type::Bytes(size) => size,
        }
    }

    /// Returns the bits of `number` in this type. For NaN it returns the canonical NaN, which
    /// arithmetic gives.
    pub fn bits(self, number: f32) -> u64 {
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

    pub fn is_nan(self, bits: u64) -> bool {
        match self {
            Type::F32 => bits & 0x7fff_ffff > 0x7f80_0000,
            Type::F16 => bits & 0x7fff > 0x7c00,
            Type::Bf16 => bits & 0x7fff > 0x7f80,
            Type::Bytes(_) => false,
        }
    }

    /// Returns a NaN with a random payload.
    pub fn any_nan(self, rng: &mut Rng) -> u64 {
        let payload = 1 + rng.below(100) as u64;
        match self {
            Type::F32 => 0xff80_0000 | payload,
            Type::F16 => 0xfc00 | payload,
            _ => 0xff80 | payload,
        }
    }
}

/// The reduction operator of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
    HalfSum,
}

const OPS: [Op; 6] = [Op::Sum, Op::Prod, Op::Max, Op::Min, Op::Avg, Op::HalfSum];

impl Op {
    /// Returns a random number; the reduction of such numbers over `ranks` ranks is exact in all
    /// types.
    pub fn number(self, dtype: Type, ranks: usize, rng: &mut Rng) -> f32 {
        match self {
            Op::Sum if dtype == Type::F32 => rng.below(1 << 20) as f32,
            Op::Sum | Op::HalfSum => rng.below(16) as f32,
            Op::Prod => rng.pick(&[0.5, 1.0, 2.0]),
            Op::Max | Op::Min => rng.below(200) as f32 - 100.0,
            Op::Avg => (ranks * rng.below(16)) as f32,
        }
    }

    pub fn of(self, terms: impl Iterator<Item = f32>, ranks: usize) -> f32 {
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

    pub fn combine(self) -> u8 {
        match self {
            Op::Sum | Op::Avg | Op::HalfSum => 0,
            Op::Prod => 1,
            Op::Max => 2,
            Op::Min => 3,
        }
    }

    pub fn flags(self) -> u8 {
        match self {
            Op::Avg => AVERAGE,
            Op::HalfSum => PREMULTIPLY,
            _ => 0,
        }
    }
}

/// A call of a fused kernel.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub does: Does,
    pub protocol: Protocol,
    pub dtype: Type,
    pub op: Op,
    pub count: usize,
    /// The root of a broadcast or reduce.
    pub root: usize,
    pub blocks: u32,
    pub in_place: bool,
    /// Distance of the input and of the output from a multiple of 16 bytes, in elements.
    pub shift: usize,
    /// The codec, if any.
    pub codec: Option<CodecSpec>,
    /// Whether some ranks use error feedback, which needs a codec.
    pub feeds: bool,
}

impl Work {
    pub fn new(does: Does, protocol: Protocol, count: usize, blocks: u32) -> Work {
        Work {
            does,
            protocol,
            dtype: Type::F32,
            op: Op::Sum,
            count,
            root: 0,
            blocks,
            in_place: false,
            shift: 0,
            codec: None,
            feeds: false,
        }
    }

    pub fn kernel(&self) -> String {
        if let Some(codec) = self.codec {
            return fused_coded::kernel(codec, self.dtype, self.protocol);
        }
        let does = match self.does {
            Does::AllReduce => "",
            Does::TwoShotAllReduce => "two_shot_",
            Does::ReduceScatter => "scatter_",
            Does::AllGather => "move",
            Does::AllToAll => "scatter_move",
            Does::Broadcast => "from_root_move",
            Does::Reduce => "to_root_",
        };
        let dtype = match self.dtype {
            _ if !self.does.reduces() => "",
            Type::F16 => "f16",
            Type::Bf16 => "bf16",
            _ => "f32",
        };
        let suffix = match self.protocol {
            Protocol::Ll => "_ll",
            Protocol::Ll128 => "_ll128",
        };
        format!("{does}{dtype}{suffix}")
    }

    /// Returns the largest count of the call that fits in an area.
    pub fn most(&self, ranks: usize) -> usize {
        let bytes = match self.does {
            // Both rounds share a half, so each has half of its bytes. Each rank's part is a
            // multiple of 64 bytes.
            Does::TwoShotAllReduce => self.protocol.payload(half(ranks) / 2) / 64 * 64 * ranks,
            _ => self.protocol.payload(half(ranks)),
        };
        bytes / self.dtype.size()
    }

    /// Returns how much a rank sends to each other rank in one round: words of 8 bytes or, with a
    /// codec, elements.
    pub fn words(&self, ranks: usize) -> usize {
        let bytes = self.count * self.dtype.size();
        match self.does {
            _ if self.codec.is_some() => fused_coded::part(self, ranks),
            Does::TwoShotAllReduce => bytes.div_ceil(64 * ranks) * 8,
            _ => bytes.div_ceil(8),
        }
    }

    /// Returns each block's share of `words`, in packets or tiles.
    pub fn share(&self, words: usize) -> usize {
        match self.codec {
            None => self.protocol.share(words, self.blocks as usize),
            // Encoded tiles have 512 elements.
            Some(_) => words.div_ceil(512).div_ceil(self.blocks as usize),
        }
    }

    /// Returns the inputs of all ranks and their expected outputs, each element as its bits. The
    /// expected output is empty if a rank has none.
    pub fn data(&self, ranks: usize, rng: &mut Rng) -> [Vec<Vec<u64>>; 2] {
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
                if self.does == Does::Broadcast {
                    return inputs[self.root].clone();
                }
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
                Does::Reduce if rank != self.root => Vec::new(),
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

/// Returns a random call that a fused kernel supports, with `blocks` thread blocks.
pub fn any(rng: &mut Rng, protocol: Protocol, ranks: usize, blocks: usize) -> Work {
    let does = match protocol {
        Protocol::Ll => rng.pick(&ALL[..5]),
        Protocol::Ll128 => rng.pick(&ALL),
    };
    let mut work = Work::new(does, protocol, 0, blocks as u32);
    work.dtype = match work.does.reduces() {
        true => rng.pick(&FLOATS),
        false => Type::Bytes(rng.pick(&[1, 2, 4, 8])),
    };
    work.op = rng.pick(&OPS);
    work.root = rng.below(ranks);
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
