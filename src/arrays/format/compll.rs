//! The message layout of CompLL, the codec compiler of HiPress. The whole array is one block.
//!
//! A message has these parts, without alignment:
//! - a byte with the number of bits of a code,
//! - a byte with the number of unused codes in the last byte,
//! - the smallest and the largest element as fp32,
//! - the codes.

use super::PublishedLayout;
use crate::codec::{EncodeStats, RoundingRandom, decode_range, encode_range};
use crate::cpu::Isa;
use crate::error::{Error, Result};

/// Bytes of the header, which precedes the codes.
const HEADER: usize = 10;

/// Layout of messages with codes of `BITS` bits: 1, 2, 4 or 8.
#[derive(Debug)]
pub(super) struct CompLl<const BITS: usize> {
    /// Whether rounding is stochastic.
    pub draws: bool,
    pub isa: Isa,
}

impl<const BITS: usize> CompLl<BITS> {
    /// Number of codes in a byte.
    const PACKED: usize = 8 / BITS;
}

impl<const BITS: usize> PublishedLayout for CompLl<BITS> {
    fn bytes(&self, n: usize) -> usize {
        HEADER + n.div_ceil(Self::PACKED)
    }

    fn count(&self, bytes: &[u8]) -> Result<usize> {
        let Some((header, codes)) = bytes.split_first_chunk::<HEADER>() else {
            return Err(Error::invalid_argument(format!(
                "{} bytes are no min-max message: its header has {HEADER}",
                bytes.len()
            )));
        };
        let (bits, lacking) = (usize::from(header[0]), usize::from(header[1]));
        if bits != BITS {
            return Err(Error::invalid_argument(match bits {
                1 | 2 | 4 | 8 => format!(
                    "the message has codes of {bits} bits; decode it with minmax{bits}, not \
                     minmax{BITS}"
                ),
                _ => format!(
                    "these are no min-max message: its header gives codes of {bits} bits, and there \
                     are 1, 2, 4 and 8"
                ),
            }));
        }
        if lacking >= Self::PACKED || lacking > codes.len() * Self::PACKED {
            return Err(Error::invalid_argument(format!(
                "by its header the last byte of the message lacks {lacking} of {} codes, and has {} \
                 bytes of them",
                Self::PACKED,
                codes.len()
            )));
        }
        Ok(codes.len() * Self::PACKED - lacking)
    }

    fn encode(&self, x: &[f32], random: RoundingRandom, to: &mut [u8], stats: &mut EncodeStats) {
        let (header, codes) = to.split_at_mut(HEADER);
        let random = self.draws.then_some(random);
        let [low, high] = encode_range::<BITS>(self.isa, random, x, codes, stats);
        header[0] = BITS as u8;
        header[1] = (codes.len() * Self::PACKED - x.len()) as u8;
        header[2..6].copy_from_slice(&low.to_le_bytes());
        header[6..].copy_from_slice(&high.to_le_bytes());
    }

    fn decode(&self, from: &[u8], y: &mut [f32]) {
        let number = |at: usize| f32::from_le_bytes([0, 1, 2, 3].map(|i| from[at + i]));
        let numbers = [number(2), number(6)];
        decode_range::<BITS>(self.isa, numbers, &from[HEADER..], y);
    }
}
