//! The frame of a message between hosts, which precedes the payload. Field lengths are in bytes:
//!
//! ```text
//! signature 40 | payload bytes 4 | magic 4 | message number 8 | CRC 4 | zero 4
//! ```

use super::Header;
use crate::error::{Error, ErrorKind, Result};

/// Bytes of a frame.
pub(super) const FRAME: usize = 64;

const MAGIC: u32 = 0x6331_6368; // "hc1c"

/// Returns the frame of message `number`.
pub(super) fn encode(header: &Header, number: u64) -> [u8; FRAME] {
    let mut frame = [0; FRAME];
    for (word, place) in header.signature.iter().zip(frame.chunks_exact_mut(8)) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    frame[40..44].copy_from_slice(&header.bytes.to_le_bytes());
    frame[44..48].copy_from_slice(&MAGIC.to_le_bytes());
    frame[48..56].copy_from_slice(&number.to_le_bytes());
    frame[56..60].copy_from_slice(&header.crc.to_le_bytes());
    frame
}

/// Reads the frame that `who` sent as message `number` of a connection with slots of `slot_bytes` bytes.
///
/// # Errors
/// Mismatch, with the numbers, if another number, magic or length was sent.
pub(super) fn decode(
    who: &str,
    frame: &[u8; FRAME],
    number: u64,
    slot_bytes: usize,
) -> Result<Header> {
    let long = |at: usize| u64::from_le_bytes(frame[at..at + 8].try_into().unwrap_or_default());
    let (bytes, magic) = (long(40) as u32, (long(40) >> 32) as u32);
    if magic != MAGIC || long(48) != number || bytes as usize > slot_bytes {
        return Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "{who} sent an impossible frame: magic {magic:#x} (expected {MAGIC:#x}), message \
                 {} (expected {number}), {bytes} bytes (a slot has {slot_bytes})",
                long(48)
            ),
        ));
    }
    Ok(Header {
        bytes,
        signature: std::array::from_fn(|word| long(8 * word)),
        crc: long(56) as u32,
    })
}
