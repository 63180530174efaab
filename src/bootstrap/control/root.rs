//! The control thread of rank 0: completes all-gathers, compares calls, forwards reports.

use super::MAX_CONTRIBUTION;
use super::frames::*;
use super::links::ControlLinks;
use crate::bootstrap::call_log::{self, CallOrderChecker};
use crate::bootstrap::framed_stream::Frame;
use crate::error::{Error, ErrorKind, Result};
use crate::types::SIGNATURE_WORDS;
use crate::wire::{Damaged, Reader, Writer};
use std::time::Instant;

/// State of the root.
pub(super) struct ControlRoot {
    call_order: CallOrderChecker,
    /// Generation of the all-gather that is being collected.
    generation: u64,
    contributions: Vec<Option<Contribution>>,
    /// Error with which all later all-gathers fail.
    broken: Option<Error>,
    /// Time of the last request to members to look up silent ranks of their hosts.
    last_lookup: Instant,
}

/// A rank's part of an all-gather.
#[derive(Clone)]
struct Contribution {
    bytes: Vec<u8>,
    /// Whether the rank closes. Its contribution is then empty and serves only the closing
    /// all-gather.
    closes: bool,
}

impl ControlRoot {
    pub(super) fn new(nranks: usize) -> ControlRoot {
        ControlRoot {
            call_order: CallOrderChecker::new(),
            generation: 0,
            contributions: vec![None; nranks],
            broken: None,
            last_lookup: Instant::now(),
        }
    }

    /// Handles a frame of the member on the connection at index `at`.
    pub(super) fn handle(
        &mut self,
        node: &mut ControlLinks,
        at: usize,
        frame: &Frame,
    ) -> Result<()> {
        let rank = node.links[at].rank;
        let mut reader = Reader(&frame.body);
        match frame.kind {
            HEARTBEAT => {
                let count = usize::from(reader.u8()?);
                for _ in 0..count.min(call_log::KEPT) {
                    self.compare(node, rank, reader.take()?);
                }
                reader.end()?;
            }
            CONTRIBUTION => {
                let limit = MAX_CONTRIBUTION as u64;
                let whole = node.links[at].assembly.add(&frame.body, limit)?;
                if let Some((numbered, bytes)) = whole {
                    self.contribute(node, rank, numbered, bytes);
                }
            }
            LOST => {
                node.record_lost(reader.u32()? as usize, Some(at));
                reader.end()?;
            }
            CLOSED => {
                self.record_closed(node, at);
                reader.end()?;
            }
            LEFT => {
                self.record_closed(node, at);
                // The rank has sent its last byte and waits until the root closes the connection.
                node.links[at].stream = None;
            }
            _ => return Err(Damaged.into()),
        }
        Ok(())
    }

    /// Records that a member makes no more calls, so that the end of its connection is no failure.
    fn record_closed(&mut self, node: &mut ControlLinks, at: usize) {
        let link = &mut node.links[at];
        let rank = link.rank;
        if !std::mem::replace(&mut link.has_closed, true) {
            node.send_all_but(Some(at), HAS_LEFT, &rank_body(rank));
            self.leave_gather(node, rank);
        }
    }

    fn compare(&mut self, node: &mut ControlLinks, rank: usize, words: [u64; SIGNATURE_WORDS]) {
        let disagreement = self.call_order.enter(rank, words, &node.shared.peers);
        if let Some(error) = disagreement
            && !node.shared.fault.is_raised()
        {
            node.fail(error);
        }
    }

    /// Returns the heartbeat of the root: the ranks that have contributed to the all-gather under
    /// way.
    pub(super) fn heartbeat(&mut self, node: &mut ControlLinks) -> Vec<u8> {
        let rank = node.shared.rank;
        let fresh = node.shared.calls().take();
        for words in fresh {
            self.compare(node, rank, words);
        }
        let mut writer = Writer::default();
        let present = self.present();
        if present.contains(&true) {
            writer.u64(self.generation);
            for eight in present.chunks(8) {
                let bits = eight.iter().enumerate();
                let bits = bits.map(|(bit, &here)| u8::from(here) << bit);
                writer.u8(bits.sum());
            }
            let generation = self.generation;
            node.shared
                .update_present(generation, |known| *known = present);
        }
        writer.0
    }

    fn present(&self) -> Vec<bool> {
        self.contributions.iter().map(Option::is_some).collect()
    }

    fn is_begun(&self) -> bool {
        self.contributions.iter().any(Option::is_some)
    }

    /// Adds a contribution, and completes or fails the all-gather if it is the last one.
    pub(super) fn contribute(
        &mut self,
        node: &mut ControlLinks,
        rank: usize,
        numbered: u64,
        bytes: Vec<u8>,
    ) {
        let (generation, closes) = (numbered & !CLOSING, numbered & CLOSING != 0);
        if let Some(error) = self.broken.clone() {
            // The other ranks received the error when it happened.
            return fail_gather_of(node, rank, generation, error);
        }
        if generation != self.generation {
            let error = Error::internal(format!(
                "{} is at exchange {generation}, the others at {}",
                node.shared.peers[rank], self.generation
            ));
            self.broken = Some(error.clone());
            fail_gather(node, self.generation, &error);
            return fail_gather_of(node, rank, generation, error);
        }
        self.contributions[rank] = Some(Contribution { bytes, closes });
        // The root's own thread may have contributed after other ranks.
        let is_own = rank == node.shared.rank;
        let present = self.present();
        node.shared
            .update_present(generation, |known| match is_own {
                true => *known = present,
                false => known[rank] = true,
            });
        if let Some(absent) = self.left_rank(node).or(self.closing_rank()) {
            let error = self.break_gather(node, absent);
            fail_gather(node, generation, &error);
        } else if self.contributions.iter().all(Option::is_some) {
            self.complete(node);
        }
    }

    fn complete(&mut self, node: &mut ControlLinks) {
        let generation = self.generation;
        self.generation += 1;
        let contributions = self.contributions.iter_mut().filter_map(Option::take);
        let contributions: Vec<Vec<u8>> = contributions.map(|one| one.bytes).collect();
        let lengths = contributions.iter().map(|bytes| bytes.len() as u64 + 4);
        let total: u64 = lengths.sum();
        write_contributions(&contributions, |bytes| {
            node.send_all(RESULT, &piece(generation, total, bytes));
        });
        node.shared.finish_gather(generation, Ok(contributions));
    }

    /// Records that a rank takes part in no later all-gather. An all-gather without its
    /// contribution fails.
    pub(super) fn leave_gather(&mut self, node: &mut ControlLinks, rank: usize) {
        node.shared.set_left(rank);
        if self.is_begun() && self.broken.is_none() && self.contributions[rank].is_none() {
            let error = self.break_gather(node, rank);
            fail_gather(node, self.generation, &error);
        }
    }

    /// Returns a rank that has left without contributing to the all-gather under way.
    fn left_rank(&self, node: &ControlLinks) -> Option<usize> {
        let begun = self.broken.is_none() && self.is_begun();
        let mut ranks = 0..self.contributions.len();
        ranks
            .find(|&rank| begun && self.contributions[rank].is_none() && node.shared.has_left(rank))
    }

    /// Returns a rank that closes while other ranks take part in a normal all-gather.
    fn closing_rank(&self) -> Option<usize> {
        let closes = |one: &Option<Contribution>| one.as_ref().map(|one| one.closes);
        let kinds = || self.contributions.iter().map(closes);
        let others_exchange = kinds().any(|kind| kind == Some(false));
        kinds().position(|kind| others_exchange && kind == Some(true))
    }

    fn break_gather(&mut self, node: &ControlLinks, rank: usize) -> Error {
        let error = Error::new(
            ErrorKind::Remote,
            format!(
                "{} left before it took part in exchange {}",
                node.shared.peers[rank], self.generation
            ),
        );
        self.broken = Some(error.clone());
        self.contributions.iter_mut().for_each(|one| *one = None);
        error
    }

    /// Requests lookups of silent ranks from members of their hosts, because the root cannot see
    /// their processes.
    pub(super) fn request_lookups(&mut self, node: &mut ControlLinks, silent: &[usize]) {
        let peers = &node.shared.peers;
        let remote = silent.iter().copied();
        let remote: Vec<usize> = remote
            .filter(|&rank| peers[rank].host_id != peers[0].host_id)
            .collect();
        if remote.is_empty() || self.last_lookup.elapsed() < 2 * node.shared.heartbeat {
            return;
        }
        self.last_lookup = Instant::now();
        for rank in remote {
            let body = rank_body(rank);
            let host = peers[rank].host_id;
            let neighbours = node.links.iter_mut().filter(|link| {
                link.rank != rank
                    && !silent.contains(&link.rank)
                    && peers[link.rank].host_id == host
            });
            neighbours.for_each(|link| link.send(SILENT, &body));
        }
    }
}

/// Fails the all-gather `generation` on all ranks.
fn fail_gather(node: &mut ControlLinks, generation: u64, error: &Error) {
    node.send_all(GATHER_FAILED, &failed_gather(generation, error));
    node.shared.finish_gather(generation, Err(error.clone()));
}

/// Fails the all-gather `generation` on `rank` alone.
fn fail_gather_of(node: &mut ControlLinks, rank: usize, generation: u64, error: Error) {
    if rank == node.shared.rank {
        return node.shared.finish_gather(generation, Err(error));
    }
    let body = failed_gather(generation, &error);
    if let Some(link) = node.links.iter_mut().find(|link| link.rank == rank) {
        link.send(GATHER_FAILED, &body);
    }
}
