//! How fused kernels cut what they encode: an image is a tile, in lines of its own.

use crate::codec::Codec;
use crate::gpu::abi::LINE_BYTES;

/// Elements that a warp encodes at a time.
pub const TILE: usize = 512;
/// Payload bytes of a line.
const LINE_PAYLOAD: usize = LINE_BYTES - 8;

/// What a rank sends to another on a trip of a fused kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedTiles {
    /// Lines that an image takes.
    pub lines: usize,
    /// EncodedTiles.
    pub count: usize,
}

impl EncodedTiles {
    /// Of `elements` through `codec`.
    pub fn new(codec: &dyn Codec, elements: usize) -> EncodedTiles {
        EncodedTiles {
            lines: codec.wire_bytes(TILE).div_ceil(LINE_PAYLOAD),
            count: elements.div_ceil(TILE),
        }
    }

    /// Payload bytes that their lines have room for.
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
            let images = EncodedTiles::new(&*codec, 5121);
            assert_eq!((images.lines, images.count), (lines, 11), "{text}");
            assert!(images.room() >= codec.wire_bytes(5121), "{text}");
        }
    }
}
