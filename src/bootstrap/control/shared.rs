//! State that a [`super::ControlPlane`] and its control thread share.

use super::frames::CLOSING;
use crate::bootstrap::call_log::CallLog;
use crate::bootstrap::process::ProcessState;
use crate::bootstrap::rank_entry::RankEntry;
use crate::bootstrap::warning_hook::WarningHook;
use crate::bootstrap::{PeerInfo, ReconnectListener};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::sync::Fault;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// State that a control plane and its thread share.
pub(super) struct SharedControl {
    pub(super) rank: usize,
    pub(super) peers: Vec<PeerInfo>,
    pub(super) members: Vec<RankEntry>,
    pub(super) fault: Arc<Fault>,
    pub(super) heartbeat: Duration,
    /// Name of the communicator, for the log.
    pub(super) name: String,
    pub(super) warnings: WarningHook,
    pub(super) changed: Condvar,
    has_left: Vec<AtomicBool>,
    /// Ranks that died or are unreachable.
    lost: Vec<AtomicBool>,
    /// Listener whose arrivals the control thread drops.
    reconnect: Mutex<Option<Arc<ReconnectListener>>>,
    /// Whether nothing has arrived from the root lately, which has perhaps stopped.
    pub(super) root_is_silent: AtomicBool,
    calls: Mutex<CallLog>,
    state: Mutex<ControlState>,
    /// Two ends of a socket pair: a write to the first wakes the control thread, which polls the
    /// second.
    wake: (UnixStream, UnixStream),
}

/// The part of the state that a lock protects.
#[derive(Default)]
pub(super) struct ControlState {
    commands: Vec<ControlCommand>,
    /// The all-gather that this rank waits for.
    pub(super) gather: Option<PendingGather>,
    /// Whether the kernel has taken the frame [`super::frames::CLOSED`].
    pub(super) closed_sent: bool,
    /// Whether the kernel has taken the frame [`super::frames::LEFT`].
    pub(super) left_sent: bool,
    /// Whether the control thread has ended.
    pub(super) ended: bool,
}

/// An all-gather that this rank waits for.
pub(super) struct PendingGather {
    pub(super) generation: u64,
    pub(super) outcome: Option<Result<Vec<Vec<u8>>>>,
    /// Ranks that have contributed, as the root knows; empty on a member before the root reports.
    pub(super) present: Vec<bool>,
}

impl PendingGather {
    /// Returns the ranks other than `rank` that have not contributed; `None` before the root
    /// reports.
    pub(super) fn missing(&self, rank: usize) -> Option<Vec<usize>> {
        let present = self.present.iter().enumerate();
        let absent = present.filter(|&(other, &here)| !here && other != rank);
        (!self.present.is_empty()).then(|| absent.map(|(other, _)| other).collect())
    }
}

/// A request of the control plane to its thread.
pub(super) enum ControlCommand {
    /// Sends a contribution with its generation, which may carry [`CLOSING`].
    Contribute(u64, Vec<u8>),
    /// Sends an error to all ranks.
    Announce(Error),
    /// Sends that this rank makes no more calls.
    Close,
    /// Sends that this rank has left, and ends the thread.
    Leave,
    /// Polls again, because the listener has changed.
    Wake,
    /// Panics.
    #[cfg(test)]
    Panic,
    /// Ends the thread without a frame, so that other ranks report the death of this rank.
    End,
}

impl SharedControl {
    pub(super) fn new(
        rank: usize,
        members: Vec<RankEntry>,
        fault: Arc<Fault>,
        config: &Config,
        warnings: WarningHook,
    ) -> Result<SharedControl> {
        let wake = UnixStream::pair()
            .and_then(|(a, b)| {
                a.set_nonblocking(true)?;
                b.set_nonblocking(true)?;
                Ok((a, b))
            })
            .map_err(|cause| Error::system("cannot make the control thread's alarm", cause))?;
        Ok(SharedControl {
            rank,
            peers: members.iter().map(|member| member.info.clone()).collect(),
            has_left: members.iter().map(|_| AtomicBool::new(false)).collect(),
            lost: members.iter().map(|_| AtomicBool::new(false)).collect(),
            reconnect: Mutex::default(),
            root_is_silent: AtomicBool::new(false),
            members,
            fault,
            changed: Condvar::new(),
            heartbeat: config.heartbeat,
            name: config.comm_name.clone(),
            warnings,
            calls: Mutex::new(CallLog::new()),
            state: Mutex::default(),
            wake,
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, ControlState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn calls(&self) -> MutexGuard<'_, CallLog> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a command to the control thread and wakes it.
    pub(super) fn command(&self, command: ControlCommand) {
        self.state().commands.push(command);
        // An error is ignored: a full socket wakes the thread as well.
        let _ = (&self.wake.0).write(&[1]);
    }

    pub(super) fn take_commands(&self) -> Vec<ControlCommand> {
        std::mem::take(&mut self.state().commands)
    }

    /// Returns the descriptor that is readable after a command.
    pub(super) fn alarm(&self) -> BorrowedFd<'_> {
        self.wake.1.as_fd()
    }

    /// Empties the descriptor of [`SharedControl::alarm`].
    pub(super) fn clear_alarm(&self) {
        let mut bytes = [0; 64];
        while matches!((&self.wake.1).read(&mut bytes), Ok(1..)) {}
    }

    /// Starts an all-gather with this rank's contribution. A rank that closes sets [`CLOSING`] in
    /// `numbered`.
    pub(super) fn start_gather(&self, numbered: u64, bytes: Vec<u8>) {
        let present = match self.rank {
            0 => vec![false; self.peers.len()],
            _ => Vec::new(),
        };
        self.state().gather = Some(PendingGather {
            generation: numbered & !CLOSING,
            outcome: None,
            present,
        });
        self.command(ControlCommand::Contribute(numbered, bytes));
    }

    /// Ends the all-gather `generation` on this rank, unless it has ended.
    pub(super) fn finish_gather(&self, generation: u64, outcome: Result<Vec<Vec<u8>>>) {
        let mut state = self.state();
        if let Some(gather) = &mut state.gather
            && gather.generation == generation
            && gather.outcome.is_none()
        {
            gather.outcome = Some(outcome);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the all-gather that this rank waits for, if any.
    pub(super) fn fail_gather(&self, error: Error) {
        let generation = self.state().gather.as_ref().map(|gather| gather.generation);
        if let Some(generation) = generation {
            self.finish_gather(generation, Err(error));
        }
    }

    /// Updates which ranks have contributed to the all-gather `generation`.
    pub(super) fn update_present(&self, generation: u64, update: impl FnOnce(&mut Vec<bool>)) {
        if let Some(gather) = &mut self.state().gather
            && gather.generation == generation
        {
            update(&mut gather.present);
        }
    }

    /// Returns the reason that this rank sends to the others, with this rank's name added.
    pub(super) fn report(&self, reason: &Error) -> Error {
        let me = &self.peers[self.rank];
        reason.clone().context(format!("{me} reports"))
    }

    /// Marks that a rank has closed or left.
    pub(super) fn set_left(&self, rank: usize) {
        if let Some(has_left) = self.has_left.get(rank) {
            // SYNC POINT has_left: publishes that the rank's earlier data is in its sockets.
            has_left.store(true, Ordering::Release);
        }
        self.changed.notify_all();
    }

    /// Marks that a rank died or is unreachable.
    pub(super) fn set_lost(&self, rank: usize) {
        if let Some(lost) = self.lost.get(rank) {
            lost.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether a rank has closed, left or died, or is unreachable, as far as this rank knows.
    pub(super) fn is_lost(&self, rank: usize) -> bool {
        let lost = self.lost.get(rank);
        let ended = |member| {
            let state = self.members[self.rank].state_of(member);
            matches!(state, ProcessState::Ended(_))
        };
        lost.is_some_and(|lost| lost.load(Ordering::Relaxed))
            || self.has_left(rank)
            || self.members.get(rank).is_some_and(ended)
    }

    /// Replaces the listener whose arrivals the control thread drops.
    pub(super) fn set_reconnect(&self, listener: Option<Arc<ReconnectListener>>) {
        *self.lock_reconnect() = listener;
    }

    /// Returns the listener whose arrivals the control thread drops.
    pub(super) fn reconnect(&self) -> Option<Arc<ReconnectListener>> {
        self.lock_reconnect().clone()
    }

    fn lock_reconnect(&self) -> MutexGuard<'_, Option<Arc<ReconnectListener>>> {
        self.reconnect
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a rank has closed or left.
    pub(super) fn has_left(&self, rank: usize) -> bool {
        let has_left = self.has_left.get(rank);
        // SYNC POINT has_left: pairs with the release in `set_left`.
        has_left.is_some_and(|has_left| has_left.load(Ordering::Acquire))
    }
}
