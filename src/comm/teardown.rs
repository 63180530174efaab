//! The end of a communicator, together with the other ranks or on this rank alone.

use super::{Communicator, DeviceState};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::log::{self, Level};
use std::time::{Duration, Instant};

/// Longest time that a rank keeps memory that peers may still write, after the control plane has
/// failed.
const PEER_MEMORY_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval of checks which peers have not left.
const PEER_POLL_INTERVAL: Duration = Duration::from_millis(20);

impl Communicator {
    /// Waits until every rank has finalized, so that the drop that follows loses no rank's data. On
    /// a GPU this rank's calls end first, after the earlier work on their streams. Then the
    /// communicator takes no more calls. No rank maps memory of another rank any more, unless a
    /// graph with such calls exists.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn finalize(&self) -> Result<()> {
        self.check_fault()?;
        let result = match &self.state {
            DeviceState::Host(_) => {
                let _engine = self.engine()?;
                self.exchange.barrier()
            }
            // Queued kernels of any rank write to the memory of other ranks, so all ranks drain
            // before a rank unmaps.
            DeviceState::Gpu(gpu) => {
                let mut engine = gpu.engine()?;
                let ended = engine.drain().and_then(|()| self.exchange.barrier());
                ended.and_then(|()| {
                    engine.close();
                    self.exchange.barrier()
                })
            }
        };
        self.fail_on_error(result)
    }

    /// Waits until the calls of this rank have ended, after the earlier work on their streams, and
    /// announces that no more will come. From then on the exit of this rank is no failure to other
    /// ranks, and their exit no failure to this rank. Waits for other ranks only as far as the
    /// calls do.
    ///
    /// # Errors
    /// The reason why the communicator has failed; the exit of other ranks is no error if it ended no
    /// call.
    pub fn close(&self) -> Result<()> {
        self.owner.check()?;
        if let Err(error) = self.fault.check()
            && !is_peer_exit(&error)
        {
            return self.fail_on_error(Err(error));
        }
        // `is_idle` may be false for a moment because another thread reads the engine.
        let (was_idle, ended) = match &self.state {
            DeviceState::Host(_) => (self.is_idle(), self.engine().map(drop)),
            DeviceState::Gpu(gpu) => match gpu.engine() {
                Ok(engine) => (gpu.is_over(&engine), engine.finish()),
                Err(error) => (false, Err(error)),
            },
        };
        // An exit that was reported but ended no call is no error.
        match ended.and_then(|()| self.fault.ends_waits()) {
            Err(error) if !(was_idle && is_peer_exit(&error)) => {
                return self.fail_on_error(Err(error));
            }
            _ => {}
        }
        self.unmap();
        self.exchange.close();
        Ok(())
    }

    /// Unmaps the memory of other ranks before this rank announces its close. A rank that learns
    /// that all have closed frees its memory, which no rank may map any more.
    ///
    /// The driver may wait for kernels of this GPU here, with the engine locked. Neither an abort nor the
    /// threads that serve running kernels need the engine.
    fn unmap(&self) {
        if let DeviceState::Gpu(gpu) = &self.state
            && !gpu.context().driver().has_ended()
            && let Ok(mut engine) = gpu.engine()
        {
            engine.close();
        }
    }

    /// Unmaps the memory of other ranks in this process, so that their teardown does not wait for
    /// this rank. The communicator takes no more calls. Returns whether any memory was mapped. Does
    /// nothing while calls of this rank run.
    pub fn unmap_local_peers(&self) -> bool {
        match &self.state {
            DeviceState::Host(_) => false,
            DeviceState::Gpu(gpu) => gpu.unmap_local_peers(),
        }
    }

    /// Returns whether other ranks of this process map this rank's GPU memory. If this rank ends
    /// before them, the last of them frees the memory.
    pub fn is_mapped_by_peers(&self) -> bool {
        match &self.state {
            DeviceState::Host(_) => false,
            DeviceState::Gpu(gpu) => gpu.is_mapped_by_peers(),
        }
    }

    /// Waits, after [`Communicator::close`], until the other ranks have closed or exited and use no
    /// memory of this rank any more.
    pub fn wait_closed(&self) {
        self.wait_peers_closed(PEER_MEMORY_TIMEOUT);
    }

    /// Waits as [`Communicator::wait_closed`], at most `timeout` for peers that the control plane has
    /// lost.
    pub(super) fn wait_peers_closed(&self, timeout: Duration) {
        loop {
            match self.exchange.wait_closed() {
                Ok(()) => return,
                // A rank that has not closed may have queued work that takes longer.
                Err(error) if error.kind() == ErrorKind::Timeout && self.peers_may_close() => {
                    std::thread::sleep(PEER_POLL_INTERVAL);
                }
                Err(_) => break,
            }
        }
        if self.gpu().is_none() {
            return;
        }
        // Ranks of a failed control plane do not report the end of their kernels.
        let until = Instant::now() + timeout;
        while self.owner.is_this() && self.has_live_peers() && Instant::now() < until {
            std::thread::sleep(PEER_POLL_INTERVAL);
        }
    }

    /// Returns whether ranks that have not left may still announce their close.
    fn peers_may_close(&self) -> bool {
        self.owner.is_this() && !self.fault.is_raised() && self.has_live_peers()
    }

    fn has_live_peers(&self) -> bool {
        let mut others = (0..self.nranks()).filter(|&rank| rank != self.rank());
        others.any(|rank| !self.exchange.has_left(rank))
    }
}

/// Returns whether `error` reports the exit of another rank.
fn is_peer_exit(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Remote | ErrorKind::Aborted)
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.owner.is_this() {
            return;
        }
        if log::enabled(Level::Info) {
            log::line(
                Level::Info,
                format_args!(
                    "{}: calls of communicator \"{}\": {}",
                    self.peers()[self.rank()],
                    self.config.comm_name,
                    self.codec_stats()
                ),
            );
        }
        if let DeviceState::Gpu(gpu) = &self.state
            && let Ok(mut engine) = gpu.engine()
        {
            // Peers that wait for this rank's part of a call receive it before they learn that this
            // rank has left.
            engine.end();
        }
        // Without the announcement the other ranks would treat this failed rank as a rank that left.
        if let Err(reason) = self.fault.check() {
            self.announce(&reason);
        }
        self.exchange.leave();
    }
}
