//! Waits of the host engine: when they sleep, when they fail, and which error names the cause.

use super::engine::{HostEngine, RECENT, is_collective};
use crate::error::{Error, ErrorKind, Result};
use crate::recorder::{SHORTEST_WAIT, WaitRecord};
use crate::schedule::Step;
use crate::sync::CAUSE_TIMEOUT;
use crate::sys::clock::monotonic_nanoseconds;
use crate::transport::{self, Caps, Links};
use crate::types::{CallSignature, SEQUENCE_WORD, SIGNATURE_WORDS};
use std::time::{Duration, Instant};

/// Longest sleep in one wait of a thread that drives a single batch.
pub(super) const MAX_SLEEP: Duration = Duration::from_millis(5);

/// Number of scans between two readings of the clock while the thread spins.
const SCANS_PER_CLOCK: u32 = 64;

/// Least number of scans after which the ranks that a wait waits for are listed. Fewer would cost a rank that
/// shares its core a tenth of a short wait.
const LISTED_AFTER: u32 = 16;

/// Number of scans without progress after which a wait may sleep. From then on the clock is read at
/// every scan.
const SPINS: u32 = 2048;

/// Measures how long a call has waited without progress. Progress resets it.
#[derive(Debug, Default)]
pub(super) struct WaitClock {
    waited: Duration,
    last_reading: Option<Instant>,
    /// Ranks that had closed by the last check although messages from or to them were missing.
    closed: Vec<usize>,
    /// Whether one more scan has run since the fault was raised.
    scanned_after_fault: bool,
    /// Whether the flight recorder shows the wait.
    is_shown: bool,
    /// Ranks whose messages were missing when the thread stopped spinning; `None` before.
    waits_for: Option<Vec<usize>>,
    /// Number of scans before which the thread is known to spin.
    listed_after: u32,
}

impl WaitClock {
    /// Returns the time waited until `now`. The time between two readings counts as [`CAUSE_TIMEOUT`] at
    /// most. So a process that was stopped for longer reads the messages that arrived meanwhile before it
    /// times out.
    fn waited(&mut self, now: Instant) -> Duration {
        let last = self.last_reading.replace(now).unwrap_or(now);
        self.waited += now.duration_since(last).min(CAUSE_TIMEOUT);
        self.waited
    }
}

impl HostEngine {
    /// Waits once, at most `limit`, after `scans` scans in a row without progress. `missing` lists the ranks
    /// and messages that the caller waits for; it is called only if the list matters.
    ///
    /// A raised fault, a closed peer and the timeout fail the wait only if one more scan finds nothing. So
    /// data that arrived before the failure is still used.
    pub(super) fn wait(
        &mut self,
        scans: u32,
        limit: Duration,
        clock: &mut WaitClock,
        missing: impl Fn(&mut Links) -> Vec<(usize, String)>,
    ) -> Result<()> {
        if self.fault.is_raised()
            && let Err(reason) = self.fault.ends_waits()
        {
            let scanned = std::mem::replace(&mut clock.scanned_after_fault, true);
            return if scanned { Err(reason) } else { Ok(()) };
        }
        // Before the thread sleeps or yields for long, because the messages that end this are not missing afterwards.
        if scans == LISTED_AFTER.max(clock.listed_after) {
            match self.links.waiter.leaves_core(scans) {
                true => {
                    let missing = missing(&mut self.links);
                    let mut ranks: Vec<usize> = missing.iter().map(|it| it.0).collect();
                    ranks.sort_unstable();
                    ranks.dedup();
                    clock.waits_for = Some(ranks);
                }
                false => clock.listed_after = scans + SCANS_PER_CLOCK,
            }
        }
        self.links.waiter.idle(scans, limit)?;
        if scans < SPINS && !scans.is_multiple_of(SCANS_PER_CLOCK) {
            return Ok(());
        }
        let waited = clock.waited(Instant::now());
        let expired = waited >= self.timeout;
        if !expired && waited < CAUSE_TIMEOUT {
            return Ok(());
        }
        let missing = missing(&mut self.links);
        self.record_wait(&missing, waited);
        clock.is_shown = true;
        // A rank publishes all its messages before it closes. Shared memory shows them at once; a network
        // delivers them before the connection ends. The previous scan may have run before the close, so
        // only messages that are still missing after one more scan will never arrive.
        if let Some((rank, what)) = missing.iter().find(|(rank, _)| clock.closed.contains(rank)) {
            return Err(Error::new(
                ErrorKind::Remote,
                self.closed_sentence(*rank, what),
            ));
        }
        let closed = missing
            .iter()
            .map(|(rank, _)| *rank)
            .filter(|&rank| self.exchange.has_left(rank) && (expired || self.shares_memory(rank)));
        clock.closed = closed.collect();
        // If nothing is missing, the messages have arrived since the last scan, and there is no
        // timeout.
        if expired && clock.closed.is_empty() && !missing.is_empty() {
            return Err(self.timed_out(&missing));
        }
        Ok(())
    }

    /// Begins a new wait after progress.
    pub(super) fn end_wait(&self, clock: &mut WaitClock) {
        if let (Some(ranks), Some(recorder)) = (clock.waits_for.take(), self.recorder()) {
            let waited = clock.waited(Instant::now());
            for rank in ranks.into_iter().filter(|_| waited >= SHORTEST_WAIT) {
                recorder.metrics().add_wait(rank, waited);
            }
        }
        if let (true, Some(recorder)) = (clock.is_shown, self.recorder()) {
            recorder.set_waits(None);
        }
        *clock = WaitClock::default();
    }

    /// Shows in the flight recorder what this rank waits for.
    fn record_wait(&self, missing: &[(usize, String)], waited: Duration) {
        let Some(recorder) = self.recorder() else {
            return;
        };
        let waits = WaitRecord {
            missing: missing.to_vec(),
            since: monotonic_nanoseconds().saturating_sub(waited.as_nanos() as u64),
        };
        recorder.set_waits(Some(waits).filter(|waits| !waits.missing.is_empty()));
    }

    fn timed_out(&self, missing: &[(usize, String)]) -> Error {
        let peers = self.exchange.peers();
        let whom: Vec<String> = missing
            .iter()
            .map(|(rank, what)| format!("{}: {what}", peers[*rank]))
            .collect();
        Error::new(
            ErrorKind::Timeout,
            format!(
                "rank {} has waited {:.1} s (CINCH_TIMEOUT) for {}",
                self.links.rank,
                self.timeout.as_secs_f64(),
                whom.join("; ")
            ),
        )
    }

    /// Returns whether messages that `rank` has published are visible to this rank without delay.
    fn shares_memory(&self, rank: usize) -> bool {
        let caps = self.links.kinds[rank].and_then(transport::caps);
        caps.is_some_and(Caps::shares_memory)
    }

    fn closed_sentence(&self, rank: usize, what: impl std::fmt::Display) -> String {
        format!(
            "{} left the communicator, and rank {} still waits for it: {what}",
            self.exchange.peers()[rank],
            self.links.rank
        )
    }

    /// Returns the mismatch error for a message with signature `theirs` from rank `from`, where this rank
    /// runs `mine`.
    pub(super) fn disagreement(
        &self,
        from: usize,
        theirs: &[u64; SIGNATURE_WORDS],
        mine: &[u64; SIGNATURE_WORDS],
    ) -> Error {
        let peers = self.exchange.peers();
        // Sends and receives of a pair are numbered separately, so their numbers do not compare with those of
        // collectives.
        let comparable = is_collective(theirs) && is_collective(mine);
        let recent = &self.recent[theirs[SEQUENCE_WORD] as usize % RECENT];
        // A peer that is behind is compared with this rank's call of the same number. For a peer that is
        // ahead, only the control plane knows the call of the same number, and compares all ranks.
        let behind = comparable
            && theirs[SEQUENCE_WORD] < mine[SEQUENCE_WORD]
            && recent[SEQUENCE_WORD] == theirs[SEQUENCE_WORD];
        let ours = if behind { recent } else { mine };
        let error = Error::new(
            ErrorKind::Mismatch,
            format!(
                "ranks disagree: {} runs {}, {} runs {}",
                peers[from],
                CallSignature::describe(theirs),
                peers[self.links.rank],
                CallSignature::describe(ours)
            ),
        );
        if comparable && theirs[SEQUENCE_WORD] > mine[SEQUENCE_WORD] {
            self.root_cause(error)
        } else {
            error
        }
    }

    /// Returns the cause of a connection that broke in `step`, if the control plane reports a cause in time.
    /// Otherwise returns `error`.
    pub(super) fn explain_break(&self, error: Error, step: &Step) -> Error {
        if error.kind() != ErrorKind::Remote {
            return error;
        }
        let error = self.root_cause(error);
        let mut peers = step.recv_from.iter().chain(step.send_to.iter());
        let closed = peers.find(|&&rank| self.exchange.has_left(rank as usize));
        match closed {
            Some(&rank) if !self.fault.is_raised() => Error::new(
                ErrorKind::Remote,
                self.closed_sentence(rank as usize, error.message()),
            ),
            _ => error,
        }
    }

    /// Returns the fault that the control plane reports within [`CAUSE_TIMEOUT`], or `error`.
    fn root_cause(&self, error: Error) -> Error {
        self.fault.reason_within(CAUSE_TIMEOUT).unwrap_or(error)
    }
}
