//! Defines the symbolic contents of a chunk.

use crate::types::Level;
use std::ops::Range;

/// An expression over the ranks' contributions to one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Value {
    /// Hash of the expression. It covers the order of additions, the encodings, and the division.
    pub identity: u64,
    /// Sum of the weights of all contributors, which distinguishes multisets of contributors.
    weight: u64,
    /// Number of contributions in the value.
    count: u32,
    /// Length of the longest chain of dependent messages that led to the value.
    pub hops: u32,
    /// Whether the value has been divided as an average.
    pub divided: bool,
}

impl Value {
    /// Creates the contribution of `rank`.
    pub fn of(rank: usize) -> Value {
        Value {
            identity: mix(rank as u64, 1),
            weight: weight(rank),
            count: 1,
            hops: 0,
            divided: false,
        }
    }

    /// Returns dec(enc(value)) in the codec for `level`. The codecs inside and between groups count as
    /// different; a proof for two codecs also holds if both are equal.
    pub fn coded(self, level: Level) -> Value {
        let identity = mix(self.identity, [5, 2][level as usize]);
        Value { identity, ..self }
    }

    /// Returns value + term; the order matters to `identity`.
    pub fn plus(self, term: Value) -> Value {
        Value {
            identity: mix(mix(self.identity, 3), term.identity),
            weight: self.weight.wrapping_add(term.weight),
            count: self.count + term.count,
            hops: self.hops.max(term.hops),
            divided: self.divided || term.divided,
        }
    }

    /// Returns the value divided as an average.
    pub fn divided(self) -> Value {
        Value {
            identity: mix(self.identity, 4),
            divided: true,
            ..self
        }
    }

    /// Returns the value after one more message.
    pub fn sent(self) -> Value {
        let hops = self.hops + 1;
        Value { hops, ..self }
    }
}

/// Finds which contributions a value lacks or holds too often.
#[derive(Debug)]
pub(super) struct Census {
    nranks: usize,
    /// For each rank, the sum of the weights of all ranks below it.
    below: Vec<u64>,
}

impl Census {
    pub fn new(nranks: usize) -> Census {
        let mut below = vec![0u64];
        below.extend((0..nranks).map(weight).scan(0u64, |sum, weight| {
            *sum = sum.wrapping_add(weight);
            Some(*sum)
        }));
        Census { nranks, below }
    }

    /// Returns `None` if `value` holds the contribution of each rank in `expected` exactly once. Otherwise
    /// returns the end of a sentence, which names one or two ranks that cause the error.
    pub fn wrong(&self, value: &Value, expected: Range<usize>) -> Option<String> {
        let wanted = self.below[expected.end].wrapping_sub(self.below[expected.start]);
        let count = expected.len();
        let found = value.count as usize;
        if value.weight == wanted && found == count {
            return None;
        }
        let surplus = value.weight.wrapping_sub(wanted);
        let rank_of = |w: u64| (0..self.nranks).find(|&rank| weight(rank) == w);
        let mut why = None;
        if found + 1 == count {
            why = rank_of(surplus.wrapping_neg()).map(|r| format!("rank {r}'s is missing"));
        } else if found == count + 1 {
            why = rank_of(surplus).map(|r| format!("rank {r}'s is there once too often"));
        } else if found == count {
            why = (0..self.nranks).find_map(|missing| {
                let extra = rank_of(surplus.wrapping_add(weight(missing)))?;
                Some(format!(
                    "rank {missing}'s is missing and rank {extra}'s is there instead"
                ))
            });
        }
        Some(format!(
            "holds {found} contributions instead of {count}{}",
            why.map_or(String::new(), |why| format!(": {why}"))
        ))
    }
}

fn weight(rank: usize) -> u64 {
    mix(rank as u64, 0)
}

/// Mixes two words into a hash that depends on their order, by SplitMix64's finaliser.
fn mix(a: u64, b: u64) -> u64 {
    let mut x = a
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .rotate_left(23)
        .wrapping_add(b)
        .wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
