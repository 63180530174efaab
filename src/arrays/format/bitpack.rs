//! The Bitpack layout of ADT, "Reducing data motion to accelerate the training of deep neural
//! networks". An array has the upper bytes of each fp32 number, little endian, element after element,
//! and nothing else. See [`crate::codec::pack_upper`] for NaN and infinity.

use super::PublishedLayout;
use crate::codec::{EncodeStats, RoundingRandom, pack_upper, unpack_upper};
use crate::cpu::Isa;
use crate::error::{Error, Result};

/// Layout of arrays with `BITS` bits per element: 8, 16 or 24.
#[derive(Debug)]
pub(super) struct Bitpack<const BITS: usize> {
    pub isa: Isa,
}

impl<const BITS: usize> PublishedLayout for Bitpack<BITS> {
    fn bytes(&self, n: usize) -> usize {
        n * BITS / 8
    }

    fn count(&self, bytes: &[u8]) -> Result<usize> {
        let each = BITS / 8;
        if !bytes.len().is_multiple_of(each) {
            return Err(Error::invalid_argument(format!(
                "{} bytes are no whole number of elements of {each} bytes",
                bytes.len()
            )));
        }
        Ok(bytes.len() / each)
    }

    /// Encodes without adding to the statistics, because packing does not look at the values.
    fn encode(&self, x: &[f32], _: RoundingRandom, to: &mut [u8], _: &mut EncodeStats) {
        pack_upper::<BITS>(self.isa, x, to);
    }

    fn decode(&self, from: &[u8], y: &mut [f32]) {
        unpack_upper::<BITS>(self.isa, from, y);
    }

    fn packed_bytes(&self) -> Option<usize> {
        Some(BITS / 8)
    }
}
