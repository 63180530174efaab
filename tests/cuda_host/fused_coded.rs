//! Calls of the fused kernels through codecs, and their expected results, computed by the scalar
//! codec in the order of the schedules.

use super::fused_work::{Does, Op, Protocol, Type, Work};
use crate::support::Rng;
use cinch::codec::{self, Codec, RoundingRandom, Span, kernel_params};
use cinch::cpu::Isa;
use cinch::gpu::abi::{CodecWords, SENDS_PARTS, SENDS_SUMS, SUMS};
use cinch::reduce::{narrow, widen};
use cinch::{CodecSpec, DType};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

/// Returns the bytes in a half of an area. A round has room for more encoded tiles than a block has
/// warps, or for several tiles for each warp. Calls without a codec use halves of this size too.
pub fn half(ranks: usize) -> usize {
    match ranks {
        2 => 100 << 10,
        // 18 ranks have more peers than a block has warps. Halves are small, because so many fibers
        // are slow.
        18.. => 12 << 10,
        _ => 40 << 10,
    }
}

/// Codecs of the calls: all that have fused kernels.
pub const SPECS: [&str; 9] = [
    "linear8",
    "linear8:block=32",
    "dynamic8",
    "dynamic8:block=512",
    "minmax4",
    "minmax4:block=64",
    "fp8_e4m3",
    "fp8_e4m3:block=128",
    "fp8_e5m2",
];

pub fn phases(does: Does) -> u8 {
    match does {
        Does::AllReduce => SUMS,
        Does::TwoShotAllReduce => SENDS_PARTS | SUMS | SENDS_SUMS,
        Does::ReduceScatter => SENDS_PARTS | SUMS,
        _ => 0,
    }
}

pub fn words(spec: Option<CodecSpec>) -> CodecWords {
    CodecWords {
        word: spec.map_or([0; 8], |spec| {
            kernel_params(spec, 0.0, [RoundingRandom::NONE; 2])
        }),
    }
}

pub fn kernel(spec: CodecSpec, dtype: Type, protocol: Protocol) -> String {
    let protocol = match protocol {
        Protocol::Ll => "ll",
        Protocol::Ll128 => "ll128",
    };
    format!("{}_{}_{protocol}", spec.kind.name(), dtype_of(dtype))
}

fn dtype_of(dtype: Type) -> DType {
    match dtype {
        Type::F16 => DType::F16,
        Type::Bf16 => DType::BF16,
        _ => DType::F32,
    }
}

fn scalar(spec: CodecSpec) -> Arc<dyn Codec> {
    codec::build(spec, Isa::Scalar).unwrap().unwrap()
}

pub fn tile_lines(spec: CodecSpec, protocol: Protocol) -> usize {
    let payload = match protocol {
        Protocol::Ll => 64,
        Protocol::Ll128 => 120,
    };
    scalar(spec).wire_bytes(512).div_ceil(payload)
}

/// Returns the number of elements that a rank sends to each other rank in one round.
pub fn part(work: &Work, ranks: usize) -> usize {
    match work.does {
        Does::TwoShotAllReduce => work.count.div_ceil(ranks).next_multiple_of(512),
        _ => work.count,
    }
}

/// The inputs and residuals of one call.
pub struct Data {
    /// Inputs of all ranks, each element as its bits.
    pub inputs: Vec<Vec<u64>>,
    pub outputs: Vec<Vec<u64>>,
    /// Residuals of each rank, by element of the input, before the call (`now`) and after it
    /// (`next`). Both are empty for a rank without feedback.
    pub now: Vec<Vec<f32>>,
    pub next: Vec<Vec<f32>>,
}

/// Returns a residual: mostly small; rarely one that would make a finite element infinite.
fn residual(rng: &mut Rng) -> f32 {
    match rng.below(2000) {
        0 => f32::MAX,
        _ => (rng.normal() / 8.0) as f32,
    }
}

/// Value of residuals that the call must leave unchanged.
pub const UNTOUCHED: f32 = 7.25;

pub fn data(work: &Work, spec: CodecSpec, ranks: usize, rng: &mut Rng) -> Data {
    let (count, dtype) = (work.count, work.dtype);
    let len = work.does.blocks(ranks)[0] * count;
    let inputs: Vec<Vec<u64>> = (0..ranks).map(|_| elements(dtype, len, rng)).collect();
    let mut residuals = |_| match work.feeds && rng.below(4) > 0 {
        true => (0..len).map(|_| residual(rng)).collect(),
        false => Vec::new(),
    };
    let now: Vec<Vec<f32>> = (0..ranks).map(&mut residuals).collect();
    let oracle = Oracle {
        codec: scalar(spec),
        halves: work.op == Op::HalfSum,
        divides: work.op == Op::Avg,
        largest: cinch::reduce::narrow_largest(dtype_of(dtype)).unwrap_or(f32::INFINITY),
        inputs: inputs.iter().map(|input| numbers(dtype, input)).collect(),
        next: RefCell::new(now.iter().map(|now| vec![UNTOUCHED; now.len()]).collect()),
        now,
    };
    let outputs = (0..ranks).map(|rank| match work.does {
        Does::AllReduce => oracle.sum(0..count, None),
        Does::TwoShotAllReduce => {
            let part = part(work, ranks);
            let of = |owner: usize| {
                let end = count.min((owner + 1) * part);
                let range = count.min(owner * part)..end;
                let sum = oracle.sum(range.clone(), Some(owner));
                oracle.decoded(&oracle.encoded(owner, range, sum, Some(dtype)))
            };
            (0..ranks).flat_map(of).collect()
        }
        Does::ReduceScatter => oracle.sum(rank * count..(rank + 1) * count, Some(rank)),
        _ => {
            let block = |rank: usize| {
                let own = oracle.inputs[rank].clone();
                oracle.decoded(&oracle.encoded(rank, 0..count, own, None))
            };
            (0..ranks).flat_map(block).collect()
        }
    });
    let outputs = outputs
        .map(|output: Vec<f32>| bits(dtype, &output))
        .collect();
    Data {
        inputs,
        outputs,
        next: oracle.next.into_inner(),
        now: oracle.now,
    }
}

/// The bytes of an encoded range, and its number of elements.
type Encoded = (Vec<u8>, usize);

struct Oracle {
    codec: Arc<dyn Codec>,
    halves: bool,
    divides: bool,
    /// Limit of averages.
    largest: f32,
    inputs: Vec<Vec<f32>>,
    now: Vec<Vec<f32>>,
    next: RefCell<Vec<Vec<f32>>>,
}

impl Oracle {
    /// Encodes a range of elements as `rank` sends it, and updates the residuals of `rank`. Ranks round
    /// the decoded values of a finished sum to the type `rounded`.
    fn encoded(
        &self,
        rank: usize,
        range: Range<usize>,
        mut x: Vec<f32>,
        rounded: Option<Type>,
    ) -> Encoded {
        let now = Some(&self.now[rank]).filter(|now| !now.is_empty());
        let now = now.map(|now| &now[range.clone()]);
        for (x, now) in x.iter_mut().zip(now.into_iter().flatten()) {
            let sum = *x + now;
            *x = if sum.is_finite() { sum } else { *x };
        }
        let mut wire = vec![0; self.codec.wire_bytes(x.len())];
        let span = Span::whole(x.len());
        self.codec.encode(span, &x, None, &mut wire, None);
        let encoded = (wire, x.len());
        if let Some(now) = now {
            let next = &mut self.next.borrow_mut()[rank][range];
            let mut seen = self.decoded(&encoded);
            if let Some(dtype) = rounded {
                seen = numbers(dtype, &bits(dtype, &seen));
            }
            for (at, next) in next.iter_mut().enumerate() {
                let dropped = x[at] - seen[at];
                *next = if dropped.is_finite() {
                    dropped
                } else {
                    now[at]
                };
            }
        }
        encoded
    }

    fn decoded(&self, (wire, len): &Encoded) -> Vec<f32> {
        let mut seen = vec![0.0; *len];
        self.codec.decode(Span::whole(*len), wire, &mut seen);
        seen
    }

    /// Returns the sum over all ranks of a range of elements, in the order of ranks. The
    /// contribution of `owner` is not encoded.
    fn sum(&self, range: Range<usize>, owner: Option<usize>) -> Vec<f32> {
        let mut sum = vec![-0.0; range.len()];
        for (rank, input) in self.inputs.iter().enumerate() {
            let share = if self.halves { 0.5 } else { 1.0 };
            let own: Vec<f32> = input[range.clone()].iter().map(|x| x * share).collect();
            if owner == Some(rank) {
                sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
            } else {
                let (wire, len) = self.encoded(rank, range.clone(), own, None);
                self.codec.decode_reduce(Span::whole(len), &wire, &mut sum);
            }
        }
        if self.divides {
            let ranks = self.inputs.len() as f32;
            let most = self.largest * ranks;
            let limit = |sum: f32| match sum.is_finite() {
                true => sum.clamp(-most, most),
                false => sum,
            };
            sum.iter_mut().for_each(|sum| *sum = limit(*sum) / ranks);
        }
        sum
    }
}

/// Returns elements around zero, with a few zeros and rarely NaN or infinity. The elements of one
/// array have similar magnitudes; different arrays have different magnitudes.
fn elements(dtype: Type, len: usize, rng: &mut Rng) -> Vec<u64> {
    let scale = 2f64.powi(rng.below(9) as i32 - 4);
    let wild = rng.below(4) == 0;
    let one = |_| match rng.below(500) {
        0..5 => 0.0,
        5 if wild => f32::NAN,
        6 if wild => f32::INFINITY,
        _ => (scale * rng.normal()) as f32,
    };
    bits(dtype, &(0..len).map(one).collect::<Vec<f32>>())
}

fn numbers(dtype: Type, bits: &[u64]) -> Vec<f32> {
    let size = dtype.size();
    let bytes = bits
        .iter()
        .flat_map(|bits| bits.to_le_bytes().into_iter().take(size));
    let mut numbers = vec![0.0; bits.len()];
    widen(
        dtype_of(dtype),
        Isa::Scalar,
        &bytes.collect::<Vec<u8>>(),
        &mut numbers,
    );
    numbers
}

fn bits(dtype: Type, numbers: &[f32]) -> Vec<u64> {
    let size = dtype.size();
    let mut bytes = vec![0; numbers.len() * size];
    narrow(dtype_of(dtype), Isa::Scalar, numbers, &mut bytes);
    let word = |bytes: &[u8]| {
        let bytes = bytes.iter().rev();
        bytes.fold(0, |word, &byte| word << 8 | u64::from(byte))
    };
    bytes.chunks(size).map(word).collect()
}

/// Returns the largest count of a call through a codec over areas of [`half`].
pub fn most(does: Does, spec: CodecSpec, protocol: Protocol, ranks: usize) -> usize {
    let (rounds, parts) = match does {
        Does::TwoShotAllReduce => (2, ranks),
        _ => (1, 1),
    };
    // Packets leave the last line of a half to raw calls.
    let last = match protocol {
        Protocol::Ll => 128,
        Protocol::Ll128 => 0,
    };
    let tiles = (half(ranks) / rounds - last) / (128 * tile_lines(spec, protocol));
    tiles * 512 * parts
}

/// Returns a random call that a fused kernel with a codec supports, with `blocks` thread blocks.
pub fn any(rng: &mut Rng, ranks: usize, blocks: usize) -> Work {
    let does = rng.pick(&[
        Does::AllReduce,
        Does::TwoShotAllReduce,
        Does::ReduceScatter,
        Does::AllGather,
    ]);
    let spec: CodecSpec = rng.pick(&SPECS).parse().unwrap();
    let protocol = rng.pick(&[Protocol::Ll, Protocol::Ll128]);
    let mut work = Work::new(does, protocol, 0, blocks as u32);
    work.codec = Some(spec);
    work.dtype = rng.pick(&[Type::F32, Type::F16, Type::Bf16]);
    if does.reduces() {
        work.op = rng.pick(&[Op::Sum, Op::Avg, Op::HalfSum]);
    }
    let most = most(does, spec, protocol, ranks);
    work.count = match rng.below(3) {
        0 => 1 + rng.below(1500),
        1 => most - rng.below(600),
        _ => 1 + rng.below(most),
    };
    work.in_place = rng.below(2) == 0;
    work.feeds = rng.below(4) == 0;
    work.shift = rng.pick(&[0, 0, 1, 3]);
    work
}
