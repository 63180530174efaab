//! The end of a communicator, together with the other ranks or on this rank alone.

use super::{Communicator, DeviceState, grow};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::log::{self, Level};
use std::time::{Duration, Instant};

/// Longest time that a rank keeps memory that peers may still write, after the control plane has
/// failed.
pub(super) const PEER_MEMORY_TIMEOUT: Duration = Duration::from_secs(10);

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
        self.owner.check()?;
        self.started.wait_idle();
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

    /// Waits until the other ranks have closed or exited and use no memory of this rank any more. Waits at
    /// most `timeout` for peers that the control plane has lost.
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
        if self.gpu_context().is_none() {
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
pub(super) fn is_peer_exit(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Remote | ErrorKind::Aborted)
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.owner.is_this() {
            return;
        }
        if log::enabled(Level::Info) {
            let _label = self.label_log();
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
        grow::cancel_unused(self, self.fault.reason());
    }
}
