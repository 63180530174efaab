//! Bytes of the messages of kernels, which may be encoded otherwise inside groups than between them.

use super::Request;
use crate::codec::{self, Codec};
use crate::types::{KernelIntra, Level, ScaleRule};

/// Returns the bytes of a message of so many elements for a level. Only hierarchical schedules have messages for
/// [`Level::Intra`].
pub(super) fn message_bytes(
    request: &Request,
    codec: Option<&dyn Codec>,
    level: Level,
    elements: usize,
) -> usize {
    let own = Inside::of(request).filter(|_| level == Level::Intra);
    match (own, codec.filter(|_| request.codec.inter.is_lossy())) {
        (Some(own), _) => own.bytes(elements),
        (None, Some(codec)) => codec.wire_bytes(elements),
        (None, None) => elements * request.dtype.size(),
    }
}

/// Returns how many elements a message inside groups may have at most, so that it fits a slot.
pub(super) fn most_inside(request: &Request, slot_bytes: usize) -> usize {
    match Inside::of(request) {
        None => usize::MAX,
        Some(Inside::Plain(each)) => slot_bytes / each,
        // Codes of whole blocks need no padding.
        Some(Inside::Linear8 { block }) => slot_bytes / (block + SCALE_BYTES) * block,
    }
}

/// Bytes of the scale of a block of linear8.
const SCALE_BYTES: usize = 4;

/// Encoding of messages inside groups that differs from that of all others.
#[derive(Clone, Copy)]
enum Inside {
    /// Elements of so many bytes.
    Plain(usize),
    /// Codes of 8 bits and a scale for each block of so many elements.
    Linear8 { block: usize },
}

impl Inside {
    fn of(request: &Request) -> Option<Inside> {
        match (KernelIntra::of(request.codec)?, request.codec.intra.scale) {
            (KernelIntra::Raw, _) => Some(Inside::Plain(request.dtype.size())),
            (KernelIntra::Cast16 | KernelIntra::CastBf16, _) => Some(Inside::Plain(2)),
            (KernelIntra::Linear8, ScaleRule::Block(block)) => Some(Inside::Linear8 {
                block: block as usize,
            }),
            _ => None,
        }
    }

    fn bytes(self, elements: usize) -> usize {
        match self {
            Inside::Plain(each) => elements * each,
            Inside::Linear8 { block } => codec::chunk_bytes(elements, 8, elements.div_ceil(block)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::testing::plan_request;
    use crate::types::Collective;

    #[test]
    fn messages_of_linear8_have_the_bytes_of_the_codec_and_fit_a_slot() {
        for block in [32, 256, 512] {
            let text = format!("intra=linear8:block={block},inter=minmax1");
            let request = plan_request(Collective::AllReduce, 1, &text);
            let codec = codec::build(request.codec.intra, Isa::Scalar);
            let codec = codec.unwrap().unwrap();
            for n in [0, 1, 15, 511, 512, 10_001] {
                let bytes = message_bytes(&request, None, Level::Intra, n);
                assert_eq!(
                    bytes,
                    codec.wire_bytes(n),
                    "{n} elements, blocks of {block}"
                );
            }
            for slot in [0, 100, 1 << 10, 5000, 66 << 10] {
                let most = most_inside(&request, slot);
                assert!(
                    codec.wire_bytes(most) <= slot,
                    "{slot} bytes, blocks of {block}"
                );
                assert!(
                    codec.wire_bytes(most + block) > slot,
                    "{slot} bytes, blocks of {block}"
                );
            }
        }
    }
}
