//! Counts the encoded tiles that a fused kernel sends. Each tile occupies 128-byte ll128 lines that
//! it shares with no other tile.

use crate::codec::Codec;
use crate::gpu::abi::LINE_BYTES;

/// Elements of a tile: as many as a warp encodes at once.
pub const TILE: usize = 512;
/// Payload bytes of an ll128 line, without its flag.
const LINE_PAYLOAD: usize = LINE_BYTES - 8;

/// The encoded tiles that a rank sends to one other rank in one phase of a fused kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedTiles {
    /// Number of ll128 lines of one encoded tile.
    pub lines: usize,
    /// Number of encoded tiles; the last may have fewer than `TILE` elements.
    pub count: usize,
}

impl EncodedTiles {
    /// Computes the tiles of `elements` elements encoded by `codec`.
    pub fn new(codec: &dyn Codec, elements: usize) -> EncodedTiles {
        EncodedTiles {
            lines: codec.wire_bytes(TILE).div_ceil(LINE_PAYLOAD),
            count: elements.div_ceil(TILE),
        }
    }

    /// Returns the payload bytes of the lines of all tiles.
    pub fn room(&self) -> usize {
        self.count * self.lines * LINE_PAYLOAD
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;
    use crate::cpu::Isa;

    #[test]
    fn lines_hold_what_is_encoded() {
        for (text, lines) in [
            ("linear8", 5),
            ("linear8:block=32", 5),
            ("dynamic8:block=512", 5),
            ("minmax4", 3),
            ("minmax4:block=32", 4),
        ] {
            let codec = codec::build(text.parse().unwrap(), Isa::Scalar);
            let codec = codec.unwrap().unwrap();
            let tiles = EncodedTiles::new(&*codec, 5121);
            assert_eq!((tiles.lines, tiles.count), (lines, 11), "{text}");
            assert!(tiles.room() >= codec.wire_bytes(5121), "{text}");
        }
    }
}
