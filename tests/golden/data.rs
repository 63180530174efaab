//! Seeded inputs, and the hash function of outputs.

use half::{bf16, f16};
use std::collections::HashMap;

/// Seed of every input; another seed needs another golden file.
pub const SEED: u64 = 20_261_125;

/// Type of the elements of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DType {
    /// Number of the type in `cinch_dtype_t`.
    pub number: u32,
    pub name: &'static str,
    pub size: usize,
}

const fn dtype(number: u32, name: &'static str, size: usize) -> DType {
    DType { number, name, size }
}

pub const F32: DType = dtype(7, "f32", 4);
pub const F16: DType = dtype(6, "f16", 2);
pub const BF16: DType = dtype(9, "bf16", 2);

/// Every type, in numeric order.
pub const DTYPES: [DType; 12] = [
    dtype(0, "i8", 1),
    dtype(1, "u8", 1),
    dtype(2, "i32", 4),
    dtype(3, "u32", 4),
    dtype(4, "i64", 8),
    dtype(5, "u64", 8),
    F16,
    F32,
    dtype(8, "f64", 8),
    BF16,
    dtype(10, "f8e4m3", 1),
    dtype(11, "f8e5m2", 1),
];

/// Kind of the values of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// Approximately normal values with variance 1.
    Normal,
    /// Normal values times powers of two from 2^-24 to 2^24.
    Wide,
    /// Runs of 300 elements, one after the other: equal values, zeros, subnormals, some NaN, some
    /// infinities, huge values, tiny values, normal values.
    Special,
}

impl Pattern {
    pub const ALL: [Pattern; 3] = [Pattern::Normal, Pattern::Wide, Pattern::Special];
}

/// SplitMix64's mixing function.
fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns approximately normal values: the sum of four uniform numbers, which fp32 holds exactly. Functions
/// of the C library would differ in the last bits between machines.
fn normal(bits: u64) -> f32 {
    let sum: i64 = (0..4).map(|at| (bits >> (16 * at) & 0xffff) as i64).sum();
    (sum - 2 * 0xffff) as f32 / 65536.0 * 1.732_050_8
}

fn value(pattern: Pattern, at: usize, bits: u64) -> f32 {
    let x = normal(bits);
    let other = mix(bits);
    match pattern {
        Pattern::Normal => x,
        Pattern::Wide => x * f32::from_bits((127 - 24 + (other % 49) as u32) << 23),
        Pattern::Special => match at / 300 % 8 {
            0 => 0.75,
            1 => f32::from_bits((other as u32 & 1) << 31),
            2 => f32::from_bits(other as u32 & 0x807f_ffff),
            3 if at.is_multiple_of(97) => f32::from_bits(0x7fc0_0000 | other as u32 & 0x803f_ffff),
            4 if at.is_multiple_of(89) => f32::INFINITY.copysign(x),
            5 => x * 1e38,
            6 => x * 1e-37,
            _ => x,
        },
    }
}

/// Appends an element of `dtype`; `bits` are random.
fn push(to: &mut Vec<u8>, dtype: DType, pattern: Pattern, at: usize, bits: u64) {
    let x = || value(pattern, at, bits);
    match dtype.name {
        "f32" => to.extend(x().to_le_bytes()),
        "f16" => to.extend(f16::from_f32(x()).to_le_bytes()),
        "bf16" => to.extend(bf16::from_f32(x()).to_le_bytes()),
        "f64" => {
            let low = (mix(!bits) >> 32) as f64 * 2f64.powi(-64);
            to.extend((f64::from(x()) + low).to_le_bytes());
        }
        // Magnitudes near 1 keep sums of a few ranks finite.
        "f8e4m3" | "f8e5m2" if pattern == Pattern::Normal => {
            to.push((bits as u8 & 0x9f) | 0x20);
        }
        _ => to.extend(&bits.to_le_bytes()[..dtype.size]),
    }
}

/// Returns the bytes of a rank's factor in a pre-multiplied sum.
pub fn factor(dtype: DType, rank: usize) -> Vec<u8> {
    let x = 0.7 + 0.6 * rank as f32;
    match dtype.name {
        "f32" => x.to_le_bytes().into(),
        "f16" => f16::from_f32(x).to_le_bytes().into(),
        "bf16" => bf16::from_f32(x).to_le_bytes().into(),
        "f64" => (1.0 / (3.0 + rank as f64)).to_le_bytes().into(),
        "f8e4m3" => vec![0x36 + 3 * rank as u8],
        "f8e5m2" => vec![0x3a + 3 * rank as u8],
        _ => (2 + 3 * rank as u64).to_le_bytes()[..dtype.size].into(),
    }
}

/// Inputs of one rank. Each combination of type, pattern and salt is generated once.
pub struct Inputs {
    rank: usize,
    made: HashMap<(DType, Pattern, u64), Vec<u8>>,
}

impl Inputs {
    pub fn new(rank: usize) -> Inputs {
        Inputs {
            rank,
            made: HashMap::new(),
        }
    }

    /// Returns the first `count` elements. Different salts give different elements of a pattern.
    pub fn take(&mut self, dtype: DType, pattern: Pattern, salt: u64, count: usize) -> &[u8] {
        let key = mix(SEED ^ mix(self.rank as u64 | salt << 8 | u64::from(dtype.number) << 40));
        let made = self.made.entry((dtype, pattern, salt)).or_default();
        for at in made.len() / dtype.size..count {
            push(made, dtype, pattern, at, mix(key.wrapping_add(at as u64)));
        }
        &made[..count * dtype.size]
    }
}

/// A 64-bit hash like FNV-1a, over words of 8 bytes. Without its additional shift, changes of two
/// sign bits could cancel each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hash(pub u64);

impl Hash {
    pub const NEW: Hash = Hash(0xcbf2_9ce4_8422_2325);

    pub fn word(&mut self, word: u64) {
        let product = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        self.0 = product ^ product >> 29;
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.word(u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.word(u64::from_le_bytes(last));
    }
}
