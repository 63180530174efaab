//! Kinds and bodies of control frames.
//!
//! | kind | from, to | body |
//! | --- | --- | --- |
//! | `HEARTBEAT` | member to root | call signatures since the last heartbeat |
//! | `HEARTBEAT` | root to members | generation and ranks that have contributed; empty between all-gathers |
//! | `CONTRIBUTION` | member to root | generation, total bytes, piece |
//! | `RESULT` | root to members | generation, total bytes, piece |
//! | `GATHER_FAILED` | root to members | generation, error |
//! | `ANNOUNCE` | both | error of the communicator |
//! | `CLOSED` | both | none: the rank makes no more calls |
//! | `LEFT` | both | none: the rank has left |
//! | `HAS_LEFT` | root to members | a rank that closed or left |
//! | `LOST` | both | a rank that died or is unreachable |
//! | `SILENT` | root to members | a silent rank of the member's host |

use crate::bootstrap::framed_stream::{Body, MAX_BODY};
use crate::error::{Error, Result};
use crate::wire::{Damaged, Reader, Wire, Writer};
use std::sync::Arc;

pub(super) const HEARTBEAT: u8 = 16;
pub(super) const CONTRIBUTION: u8 = 17;
pub(super) const RESULT: u8 = 18;
pub(super) const GATHER_FAILED: u8 = 19;
pub(super) const ANNOUNCE: u8 = 20;
pub(super) const LEFT: u8 = 21;
pub(super) const HAS_LEFT: u8 = 22;
pub(super) const SILENT: u8 = 23;
pub(super) const CLOSED: u8 = 24;
pub(super) const LOST: u8 = 25;

/// Bit of a generation: the contributing rank closes and takes part in no later all-gather.
pub(super) const CLOSING: u64 = 1 << 63;

/// Largest number of bytes of a contribution or result in one frame. Heartbeats are sent between
/// frames.
pub(super) const MAX_PIECE: usize = 1 << 20;
const _: () = assert!(MAX_PIECE + 16 <= MAX_BODY);

/// Returns the body of one piece of a contribution or result.
pub(super) fn piece(generation: u64, total: u64, bytes: &[u8]) -> Arc<Body> {
    let mut writer = Writer::default();
    writer.u64(generation).u64(total).bytes(bytes);
    Body::new(writer.0)
}

/// Returns the body of a frame that names a rank.
pub(super) fn rank_body(rank: usize) -> Arc<Body> {
    Body::new((rank as u32).to_bytes())
}

/// Returns the body of [`GATHER_FAILED`].
pub(super) fn failed_gather(generation: u64, error: &Error) -> Arc<Body> {
    let mut writer = Writer::default();
    writer.u64(generation).put(error);
    Body::new(writer.0)
}

/// A message that arrives in several frames.
#[derive(Default)]
pub(super) struct Assembly {
    /// Generation and total bytes of the message.
    expected: Option<(u64, u64)>,
    bytes: Vec<u8>,
}

impl Assembly {
    /// Adds a [`piece`]. Returns generation and bytes of the message once it is complete.
    ///
    /// # Errors
    /// Remote if the piece does not continue the message, or the message exceeds `limit` bytes.
    pub(super) fn add(&mut self, body: &[u8], limit: u64) -> Result<Option<(u64, Vec<u8>)>> {
        let mut reader = Reader(body);
        let (generation, total) = (reader.u64()?, reader.u64()?);
        let piece = reader.0;
        let expected = *self.expected.get_or_insert((generation, total));
        if expected != (generation, total)
            || total > limit
            || (self.bytes.len() + piece.len()) as u64 > total
        {
            return Err(Damaged.into());
        }
        self.bytes.extend_from_slice(piece);
        if self.bytes.len() as u64 == total {
            self.expected = None;
            Ok(Some((generation, std::mem::take(&mut self.bytes))))
        } else if piece.is_empty() {
            Err(Damaged.into())
        } else {
            Ok(None)
        }
    }
}

/// Writes all contributions, each preceded by its length, in pieces of at most [`MAX_PIECE`] bytes.
pub(super) fn write_contributions(contributions: &[Vec<u8>], mut emit: impl FnMut(&[u8])) {
    let mut piece = Vec::new();
    for contribution in contributions {
        for mut bytes in [&(contribution.len() as u32).to_le_bytes()[..], contribution] {
            while !bytes.is_empty() {
                let (now, later) = bytes.split_at(bytes.len().min(MAX_PIECE - piece.len()));
                piece.extend_from_slice(now);
                bytes = later;
                if piece.len() == MAX_PIECE {
                    emit(&piece);
                    piece.clear();
                }
            }
        }
    }
    if !piece.is_empty() {
        emit(&piece);
    }
}

/// Reads the `count` contributions that [`write_contributions`] wrote.
pub(super) fn read_contributions(bytes: &[u8], count: usize) -> Result<Vec<Vec<u8>>> {
    let mut reader = Reader(bytes);
    let contributions = (0..count).map(|_| reader.take());
    let contributions = contributions.collect::<crate::wire::WireResult<_>>()?;
    reader.end()?;
    Ok(contributions)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(generation: u64, total: u64, bytes: &[u8]) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u64(generation).u64(total).bytes(bytes);
        writer.0
    }

    #[test]
    fn contributions_arrive_whole_across_pieces() {
        let sizes = [0, 1, MAX_PIECE - 9, MAX_PIECE, 3 * MAX_PIECE + 5, 0];
        let contributions: Vec<Vec<u8>> = sizes
            .iter()
            .map(|&size| (0..size).map(|at| (at % 251) as u8).collect())
            .collect();
        let total = sizes.iter().map(|size| size + 4).sum::<usize>() as u64;
        let mut assembly = Assembly::default();
        let mut whole = None;
        write_contributions(&contributions, |piece| {
            assert!(whole.is_none() && piece.len() <= MAX_PIECE);
            whole = assembly.add(&bytes_of(3, total, piece), total).unwrap();
        });
        let (generation, bytes) = whole.unwrap();
        assert_eq!(generation, 3);
        assert!(read_contributions(&bytes, sizes.len()).unwrap() == contributions);
        assert!(read_contributions(&bytes, sizes.len() - 1).is_err());
        assert!(read_contributions(&bytes[1..], sizes.len()).is_err());
    }

    #[test]
    fn impossible_pieces_are_refused() {
        let mut assembly = Assembly::default();
        assert!(assembly.add(&bytes_of(0, 5, b"123"), 4).is_err());
        let mut assembly = Assembly::default();
        assert!(assembly.add(&bytes_of(0, 2, b"123"), 4).is_err());
        let mut assembly = Assembly::default();
        assert!(assembly.add(&bytes_of(0, 4, b"12"), 4).unwrap().is_none());
        assert!(assembly.add(&bytes_of(1, 4, b"34"), 4).is_err());
        assert!(assembly.add(&bytes_of(0, 4, b""), 4).is_err());
        assert!(assembly.add(b"short", 4).is_err());
    }
}
