//! The control thread of every rank but 0: contributes, reports its calls, receives results.

use super::MAX_CONTRIBUTION;
use super::frames::*;
use super::links::ControlLinks;
use crate::bootstrap::framed_stream::Frame;
use crate::bootstrap::process::ProcessState;
use crate::error::{Error, ErrorKind, Result};
use crate::wire::{Damaged, Reader, Wire, Writer};

/// Handles a frame of the root, on the connection at index `at`.
pub(super) fn handle(node: &mut ControlLinks, at: usize, frame: &Frame) -> Result<()> {
    let nranks = node.shared.peers.len();
    let mut reader = Reader(&frame.body);
    match frame.kind {
        HEARTBEAT if frame.body.is_empty() => {}
        HEARTBEAT => {
            let generation = reader.u64()?;
            let bits = reader.bytes(nranks.div_ceil(8))?;
            reader.end()?;
            let is_present = |rank: usize| bits[rank / 8] >> (rank % 8) & 1 == 1;
            let present = (0..nranks).map(is_present).collect();
            node.shared
                .update_present(generation, |known| *known = present);
        }
        RESULT => {
            let limit = (nranks * (MAX_CONTRIBUTION + 4)) as u64;
            let whole = node.links[at].assembly.add(&frame.body, limit)?;
            if let Some((generation, bytes)) = whole {
                let contributions = read_contributions(&bytes, nranks)?;
                node.shared.finish_gather(generation, Ok(contributions));
            }
        }
        GATHER_FAILED => {
            let (generation, error) = (reader.u64()?, Error::from_bytes(reader.0)?);
            node.shared.finish_gather(generation, Err(error));
        }
        CLOSED | LEFT => {
            node.links[at].has_closed = true;
            node.shared.set_left(0);
            reader.end()?;
        }
        HAS_LEFT => {
            node.shared.set_left(reader.u32()? as usize);
            reader.end()?;
        }
        LOST => {
            node.shared.set_lost(reader.u32()? as usize);
            reader.end()?;
        }
        SILENT => {
            let rank = reader.u32()? as usize;
            let shared = &node.shared;
            let member = shared.members.get(rank).ok_or(Damaged)?;
            let state = shared.members[shared.rank].state_of(member);
            if !shared.has_left(rank)
                && let ProcessState::Ended(why) = state
            {
                let died = format!("{} died: {why}", member.info);
                node.record_lost(rank, None);
                node.fail(Error::new(ErrorKind::Remote, died));
            }
        }
        _ => return Err(Damaged.into()),
    }
    Ok(())
}

/// Returns the heartbeat of a member: the calls since the last heartbeat.
pub(super) fn heartbeat(node: &ControlLinks) -> Vec<u8> {
    let fresh = node.shared.calls().take();
    let mut writer = Writer::default();
    writer.u8(fresh.len() as u8);
    for word in fresh.iter().flatten() {
        writer.u64(*word);
    }
    writer.0
}

/// Sends this rank's contribution to the root.
pub(super) fn contribute(node: &mut ControlLinks, numbered: u64, bytes: &[u8]) {
    let link = &mut node.links[0];
    if link.stream.is_none() {
        let root = &node.shared.peers[0];
        let what = link
            .death
            .clone()
            .unwrap_or_else(|| format!("{root} is gone, and with it the control connections"));
        let error = Error::new(ErrorKind::Remote, what);
        return node.shared.finish_gather(numbered & !CLOSING, Err(error));
    }
    let mut rest = bytes;
    loop {
        let (now, later) = rest.split_at(rest.len().min(MAX_PIECE));
        link.send(CONTRIBUTION, &piece(numbered, bytes.len() as u64, now));
        rest = later;
        if rest.is_empty() {
            return;
        }
    }
}

/// Counts the ranks of this host whose processes have ended as having left. Without the root it is
/// unknown whether they left or died, and they send nothing more in either case.
pub(super) fn find_ended_processes(node: &ControlLinks) {
    let shared = &node.shared;
    let me = &shared.members[shared.rank];
    for (rank, member) in shared.members.iter().enumerate() {
        if !shared.has_left(rank) && matches!(me.state_of(member), ProcessState::Ended(_)) {
            shared.set_left(rank);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::control::shared::SharedControl;
    use crate::bootstrap::framed_stream;
    use crate::bootstrap::rank_entry::RankEntry;
    use crate::bootstrap::warning_hook::WarningHook;
    use crate::config::Config;
    use crate::sync::Fault;
    use std::sync::Arc;

    /// The control thread handles the end of the root's connection before this rank begins an all-gather.
    #[test]
    fn contribution_after_the_death_of_the_root_has_its_cause() {
        let config = Config::default();
        let entry = |rank| RankEntry::this(rank, [127, 0, 0, 1].into(), &config).unwrap();
        let members = vec![entry(0), entry(1)];
        let warnings = WarningHook::new(|_| {});
        let shared = SharedControl::new(1, members, Fault::new(), &config, warnings);
        let shared = Arc::new(shared.unwrap());
        let (stream, _root) = framed_stream::tests::pair();
        let mut links = ControlLinks::new(shared.clone(), vec![(0, stream)]);
        links.handle_ends(vec![(0, "died: its control connection closed".into())]);
        shared.start_gather(3, Vec::new());
        contribute(&mut links, 3, &[]);
        let outcome = shared.state().gather.as_mut().unwrap().outcome.take();
        let died = format!("{} died: its control connection closed", shared.peers[0]);
        assert_eq!(outcome.unwrap().unwrap_err().message(), died);
    }
}
