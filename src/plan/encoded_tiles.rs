//! Counts the encoded tiles that a fused kernel sends. Each tile occupies 128-byte lines that it
//! shares with no other tile.

use crate::codec::Codec;
use crate::gpu::abi::LINE_BYTES;
use crate::types::Protocol;

/// Elements of a tile: as many as a warp encodes at once.
pub const TILE: usize = 512;

/// The encoded tiles that a rank sends to one other rank in one phase of a fused kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedTiles {
    /// Number of lines of one encoded tile.
    pub lines: usize,
    /// Number of encoded tiles; the last may have fewer than `TILE` elements.
    pub count: usize,
    /// Payload bytes of a line.
    payload: usize,
}

impl EncodedTiles {
    /// Computes the tiles of `elements` elements encoded by `codec`, in a kernel with `protocol`. A line of ll128 has a
    /// flag of 8 bytes; half of a line of ll packets is flags.
    pub fn new(codec: &dyn Codec, elements: usize, protocol: Protocol) -> EncodedTiles {
        let payload = match protocol {
            Protocol::Ll128 => LINE_BYTES - 8,
            _ => LINE_BYTES / 2,
        };
        EncodedTiles {
            lines: codec.wire_bytes(TILE).div_ceil(payload),
            count: elements.div_ceil(TILE),
            payload,
        }
    }

    /// Returns the payload bytes of the lines of all tiles.
    pub fn room(&self) -> usize {
        self.count * self.lines * self.payload
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;
    use crate::cpu::Isa;

    #[test]
    fn lines_hold_what_is_encoded() {
        for (text, lines, lines_of_packets) in [
            ("linear8", 5, 9),
            ("linear8:block=32", 5, 9),
            ("dynamic8:block=512", 5, 9),
            ("minmax4", 3, 5),
            ("minmax4:block=32", 4, 6),
        ] {
            let codec = codec::build(text.parse().unwrap(), Isa::Scalar);
            let codec = codec.unwrap().unwrap();
            for (protocol, lines) in [(Protocol::Ll128, lines), (Protocol::Ll, lines_of_packets)] {
                let tiles = EncodedTiles::new(&*codec, 5121, protocol);
                assert_eq!((tiles.lines, tiles.count), (lines, 11), "{text}");
                assert!(tiles.room() >= codec.wire_bytes(5121), "{text}");
            }
        }
    }
}
