//! What rank 0 does for the others: collects exchanges, compares notes, passes on news.

use super::control_thread::*;
use super::member::write_parts;
use super::*;
use crate::bootstrap::call_log::CallOrderChecker;
use crate::bootstrap::framed_stream::Frame;
use crate::bootstrap::wire::{Reader, Writer, damaged};

/// State of the hub. Idle on other ranks.
pub(super) struct ControlRoot {
    ledger: CallOrderChecker,
    /// The exchange that is being collected.
    generation: u64,
    parts: Vec<Option<Part>>,
    /// Why no exchange will complete any more.
    broken: Option<Error>,
    asked: Instant,
}

/// What one rank gives to an exchange.
#[derive(Clone)]
struct Part {
    bytes: Vec<u8>,
    /// Whether it comes because it has retired: whoever exchanges something is not to take it for an answer.
    retires: bool,
}

impl ControlRoot {
    pub(super) fn new(nranks: usize) -> ControlRoot {
        ControlRoot {
            ledger: CallOrderChecker::new(),
            generation: 0,
            parts: vec![None; nranks],
            broken: None,
            asked: Instant::now(),
        }
    }
}

impl ControlThread {
    pub(super) fn handle_as_hub(&mut self, at: usize, frame: Frame) -> Result<()> {
        let rank = self.links[at].rank;
        let mut reader = Reader(&frame.body);
        match frame.kind {
            BEAT => {
                let count = usize::from(reader.u8()?);
                for _ in 0..count.min(call_log::KEPT) {
                    let mut words = [0; SIGNATURE_WORDS];
                    for word in &mut words {
                        *word = reader.u64()?;
                    }
                    self.compare(rank, words);
                }
                reader.end()
            }
            CONTRIBUTION => {
                let limit = MAX_CONTRIBUTION as u64;
                if let Some((numbered, bytes)) = self.links[at].assembly.add(&frame.body, limit)? {
                    self.contribute(rank, numbered, bytes);
                }
                Ok(())
            }
            RETIRED => {
                self.see_off(at);
                reader.end()
            }
            GOODBYE => {
                self.see_off(at);
                // The rank has sent its last byte and waits for us to hang up.
                self.links[at].channel = None;
                Ok(())
            }
            _ => Err(damaged()),
        }
    }

    /// A rank takes no more part: what happens to its connection is no failure from here on.
    fn see_off(&mut self, at: usize) {
        let link = &mut self.links[at];
        let rank = link.rank;
        if !std::mem::replace(&mut link.goodbye, true) {
            let mut writer = Writer::default();
            writer.u32(rank as u32);
            self.tell_all_but(Some(at), DEPARTED, &Body::new(writer.0));
            self.leave_gather(rank);
        }
    }

    fn compare(&mut self, rank: usize, words: [u64; SIGNATURE_WORDS]) {
        let disagreement = self.hub.ledger.enter(rank, words, &self.shared.peers);
        if let Some(error) = disagreement
            && !self.shared.fault.is_raised()
        {
            self.fail(error);
        }
    }

    /// The hub's beat: who has come to the exchange under way.
    pub(super) fn hub_beat(&mut self) -> Vec<u8> {
        let fresh = self.shared.notes().take();
        for words in fresh {
            self.compare(self.shared.rank, words);
        }
        let mut writer = Writer::default();
        let here: Vec<bool> = self.hub.parts.iter().map(Option::is_some).collect();
        if here.contains(&true) {
            writer.u64(self.hub.generation);
            for eight in here.chunks(8) {
                let bits = eight
                    .iter()
                    .enumerate()
                    .map(|(bit, &here)| u8::from(here) << bit);
                writer.u8(bits.sum());
            }
            let mut state = self.shared.state();
            if let Some(gather) = &mut state.gather
                && gather.generation == self.hub.generation
            {
                gather.present = here;
            }
        }
        writer.0
    }

    pub(super) fn contribute(&mut self, rank: usize, numbered: u64, bytes: Vec<u8>) {
        let (generation, retires) = (numbered & !RETIRING, numbered & RETIRING != 0);
        if let Some(error) = self.hub.broken.clone() {
            // The others were told when it broke.
            return self.fail_gather_of(rank, generation, error);
        }
        if generation != self.hub.generation {
            let error = Error::internal(format!(
                "{} is at exchange {generation}, the others at {}",
                self.shared.peers[rank], self.hub.generation
            ));
            self.hub.broken = Some(error.clone());
            self.fail_gather(self.hub.generation, &error);
            return self.fail_gather_of(rank, generation, error);
        }
        self.hub.parts[rank] = Some(Part { bytes, retires });
        // The hub's own user may be waiting for an exchange that others have completed it for.
        self.mark_present(rank, generation);
        if let Some(absent) = self.departed_absentee().or(self.retired_among_others()) {
            let error = self.break_gather(absent);
            self.fail_gather(generation, &error);
        } else if self.hub.parts.iter().all(Option::is_some) {
            self.complete();
        }
    }

    fn mark_present(&self, rank: usize, generation: u64) {
        let mut state = self.shared.state();
        if let Some(gather) = &mut state.gather
            && gather.generation == generation
        {
            match rank == self.shared.rank {
                // Others may have come before.
                true => gather.present = self.hub.parts.iter().map(Option::is_some).collect(),
                false => gather.present[rank] = true,
            }
        }
    }

    fn complete(&mut self) {
        let generation = self.hub.generation;
        self.hub.generation += 1;
        let parts = self.hub.parts.iter_mut().filter_map(Option::take);
        let parts: Vec<Vec<u8>> = parts.map(|part| part.bytes).collect();
        let total: u64 = parts.iter().map(|part| part.len() as u64 + 4).sum();
        let mut pieces = Vec::new();
        write_parts(&parts, |piece| {
            let mut writer = Writer::default();
            writer.u64(generation).u64(total).bytes(piece);
            pieces.push(Body::new(writer.0));
        });
        for piece in &pieces {
            self.tell_all_but(None, RESULT, piece);
        }
        self.shared.finish_gather(generation, Ok(parts));
    }

    /// A rank has left: exchanges that lack it will never complete.
    pub(super) fn leave_gather(&mut self, rank: usize) {
        self.shared.depart(rank);
        let begun = self.hub.parts.iter().any(Option::is_some);
        if begun && self.hub.broken.is_none() && self.hub.parts[rank].is_none() {
            let error = self.break_gather(rank);
            self.fail_gather(self.hub.generation, &error);
        }
    }

    fn departed_absentee(&self) -> Option<usize> {
        let begun = self.hub.broken.is_none() && self.hub.parts.iter().any(Option::is_some);
        (0..self.hub.parts.len())
            .find(|&rank| begun && self.hub.parts[rank].is_none() && self.shared.is_departed(rank))
    }

    /// A rank that has retired where others exchange something.
    fn retired_among_others(&self) -> Option<usize> {
        let retires = |part: &Option<Part>| part.as_ref().map(|part| part.retires);
        let kinds = || self.hub.parts.iter().map(retires);
        let others_do = kinds().any(|kind| kind == Some(false));
        kinds().position(|kind| others_do && kind == Some(true))
    }

    fn break_gather(&mut self, rank: usize) -> Error {
        let error = Error::new(
            ErrorKind::Remote,
            format!(
                "{} left before it took part in exchange {}",
                self.shared.peers[rank], self.hub.generation
            ),
        );
        self.hub.broken = Some(error.clone());
        self.hub.parts.iter_mut().for_each(|part| *part = None);
        error
    }

    fn fail_gather(&mut self, generation: u64, error: &Error) {
        self.tell_all_but(None, GATHER_FAILED, &failed_gather(generation, error));
        self.shared.finish_gather(generation, Err(error.clone()));
    }

    /// The same for `rank` alone.
    fn fail_gather_of(&mut self, rank: usize, generation: u64, error: Error) {
        if rank == self.shared.rank {
            return self.shared.finish_gather(generation, Err(error));
        }
        let body = failed_gather(generation, &error);
        let mut links = self.links.iter_mut();
        if let Some(link) = links.find(|link| link.rank == rank) {
            link.send(GATHER_FAILED, &body);
        }
    }

    /// Ranks on other hosts that are silent: those who share a host with them may know more.
    pub(super) fn ask_about(&mut self, silent: &[usize]) {
        let hosts = |rank: usize| self.shared.peers[rank].host_id;
        let far: Vec<usize> = silent
            .iter()
            .copied()
            .filter(|&rank| hosts(rank) != hosts(0))
            .collect();
        if far.is_empty() || self.hub.asked.elapsed() < 2 * self.shared.beat {
            return;
        }
        self.hub.asked = Instant::now();
        for rank in far {
            let mut writer = Writer::default();
            writer.u32(rank as u32);
            let body = Body::new(writer.0);
            let shared = &self.shared;
            let host = shared.peers[rank].host_id;
            let near = self.links.iter_mut().filter(|link| {
                link.rank != rank
                    && !silent.contains(&link.rank)
                    && shared.peers[link.rank].host_id == host
            });
            near.for_each(|link| link.send(SILENT, &body));
        }
    }
}

fn failed_gather(generation: u64, error: &Error) -> Arc<Body> {
    let mut writer = Writer::default();
    writer.u64(generation).bytes(&write_error(error));
    Body::new(writer.0)
}
