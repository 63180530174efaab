//! What every rank but 0 does: contributes, reports its calls, hears the news.

use super::control_thread::*;
use super::*;
use crate::bootstrap::framed_stream::Frame;
use crate::bootstrap::wire::{Reader, Writer, damaged, read_error};

/// Bytes of a contribution or result in one frame: beats go in between.
pub(super) const MAX_PART: usize = 1 << 20;
const _: () = assert!(MAX_PART + 16 <= crate::bootstrap::framed_stream::MAX_BODY);

/// A message that comes in several frames.
#[derive(Default)]
pub(super) struct Assembly {
    under_way: Option<(u64, u64)>,
    bytes: Vec<u8>,
}

impl Assembly {
    /// Adds a frame `{generation, total bytes, bytes}`. The whole, once it is complete.
    pub(super) fn add(&mut self, frame: &[u8], limit: u64) -> Result<Option<(u64, Vec<u8>)>> {
        let (generation, mut reader) = read_generation(frame)?;
        let total = reader.u64()?;
        let piece = reader.0;
        let expected = *self.under_way.get_or_insert((generation, total));
        if expected != (generation, total)
            || total > limit
            || (self.bytes.len() + piece.len()) as u64 > total
        {
            return Err(damaged());
        }
        self.bytes.extend_from_slice(piece);
        if self.bytes.len() as u64 == total {
            self.under_way = None;
            Ok(Some((generation, std::mem::take(&mut self.bytes))))
        } else if piece.is_empty() {
            Err(damaged())
        } else {
            Ok(None)
        }
    }
}

/// The parts, each behind its length, in pieces of at most [`MAX_PART`] bytes.
pub(super) fn write_parts(parts: &[Vec<u8>], mut emit: impl FnMut(&[u8])) {
    let mut piece = Vec::new();
    for part in parts {
        for mut bytes in [&(part.len() as u32).to_le_bytes()[..], part] {
            while !bytes.is_empty() {
                let (now, later) = bytes.split_at(bytes.len().min(MAX_PART - piece.len()));
                piece.extend_from_slice(now);
                bytes = later;
                if piece.len() == MAX_PART {
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

/// What [`write_parts`] wrote, put together again.
fn read_parts(bytes: &[u8], count: usize) -> Result<Vec<Vec<u8>>> {
    let mut reader = Reader(bytes);
    let parts = (0..count)
        .map(|_| {
            let length = reader.u32()? as usize;
            reader.bytes(length).map(<[u8]>::to_vec)
        })
        .collect::<Result<_>>()?;
    reader.end()?;
    Ok(parts)
}

impl ControlThread {
    pub(super) fn handle_as_leaf(&mut self, at: usize, frame: Frame) -> Result<()> {
        let nranks = self.shared.peers.len();
        let mut reader = Reader(&frame.body);
        match frame.kind {
            BEAT if frame.body.is_empty() => Ok(()),
            BEAT => {
                let generation = reader.u64()?;
                let bits = reader.bytes(nranks.div_ceil(8))?;
                reader.end()?;
                if let Some(gather) = &mut self.shared.state().gather
                    && gather.generation == generation
                {
                    let is_here = |rank: usize| bits[rank / 8] >> (rank % 8) & 1 == 1;
                    gather.present = (0..nranks).map(is_here).collect();
                }
                Ok(())
            }
            RESULT => {
                let limit = (nranks * (MAX_CONTRIBUTION + 4)) as u64;
                if let Some((generation, bytes)) =
                    self.links[at].assembly.add(&frame.body, limit)?
                {
                    let parts = read_parts(&bytes, nranks)?;
                    self.shared.finish_gather(generation, Ok(parts));
                }
                Ok(())
            }
            GATHER_FAILED => {
                let (generation, reader) = read_generation(&frame.body)?;
                let error = read_error(reader.0)?;
                self.shared.finish_gather(generation, Err(error));
                Ok(())
            }
            RETIRED | GOODBYE => {
                self.links[at].goodbye = true;
                self.shared.depart(0);
                reader.end()
            }
            DEPARTED => {
                self.shared.depart(reader.u32()? as usize);
                reader.end()
            }
            SILENT => {
                let rank = reader.u32()? as usize;
                let member = self.shared.members.get(rank).ok_or_else(damaged)?;
                if !self.shared.is_departed(rank)
                    && let Fate::Dead(why) = look(&self.shared.members[self.shared.rank], member)
                {
                    let dead = format!("{} died: {why}", member.info);
                    self.fail(Error::new(ErrorKind::Remote, dead));
                }
                Ok(())
            }
            _ => Err(damaged()),
        }
    }

    /// A leaf's beat: the calls since the last one.
    pub(super) fn leaf_beat(&mut self) -> Vec<u8> {
        let fresh = self.shared.notes().take();
        let mut writer = Writer::default();
        writer.u8(fresh.len() as u8);
        for word in fresh.iter().flatten() {
            writer.u64(*word);
        }
        writer.0
    }

    pub(super) fn send_contribution(&mut self, numbered: u64, bytes: &[u8]) {
        let link = &mut self.links[0];
        if link.channel.is_none() {
            let error = Error::new(
                ErrorKind::Remote,
                format!(
                    "{} is gone, and with it the control connections",
                    self.shared.peers[0]
                ),
            );
            return self.shared.finish_gather(numbered & !RETIRING, Err(error));
        }
        let mut rest = bytes;
        loop {
            let (piece, later) = rest.split_at(rest.len().min(MAX_PART));
            let mut writer = Writer::default();
            writer.u64(numbered).u64(bytes.len() as u64).bytes(piece);
            link.send(CONTRIBUTION, &Body::new(writer.0));
            rest = later;
            if rest.is_empty() {
                return;
            }
        }
    }

    /// Without a hub, a process that ends on this host counts as has_left: whether it had said
    /// goodbye cannot be known, and nothing will come from it either way.
    pub(super) fn look_around(&mut self) {
        let me = &self.shared.members[self.shared.rank];
        for (rank, member) in self.shared.members.iter().enumerate() {
            if !self.shared.is_departed(rank) && matches!(look(me, member), Fate::Dead(_)) {
                self.shared.depart(rank);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(generation: u64, total: u64, bytes: &[u8]) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u64(generation).u64(total).bytes(bytes);
        writer.0
    }

    #[test]
    fn parts_come_back_whole_across_pieces() {
        let sizes = [0, 1, MAX_PART - 9, MAX_PART, 3 * MAX_PART + 5, 0];
        let parts: Vec<Vec<u8>> = sizes
            .iter()
            .map(|&size| (0..size).map(|at| (at % 251) as u8).collect())
            .collect();
        let total = sizes.iter().map(|size| size + 4).sum::<usize>() as u64;
        let mut assembly = Assembly::default();
        let mut whole = None;
        write_parts(&parts, |piece| {
            assert!(whole.is_none() && piece.len() <= MAX_PART);
            whole = assembly.add(&frame(3, total, piece), total).unwrap();
        });
        let (generation, bytes) = whole.unwrap();
        assert_eq!(generation, 3);
        assert!(read_parts(&bytes, sizes.len()).unwrap() == parts);
        assert!(read_parts(&bytes, sizes.len() - 1).is_err());
        assert!(read_parts(&bytes[1..], sizes.len()).is_err());
    }

    #[test]
    fn impossible_pieces_are_refused() {
        let mut assembly = Assembly::default();
        assert!(assembly.add(&frame(0, 5, b"123"), 4).is_err());
        let mut assembly = Assembly::default();
        assert!(assembly.add(&frame(0, 2, b"123"), 4).is_err());
        let mut assembly = Assembly::default();
        assert!(assembly.add(&frame(0, 4, b"12"), 4).unwrap().is_none());
        assert!(assembly.add(&frame(1, 4, b"34"), 4).is_err());
        assert!(assembly.add(&frame(0, 4, b""), 4).is_err());
        assert!(assembly.add(b"short", 4).is_err());
    }
}
