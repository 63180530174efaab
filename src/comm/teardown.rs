//! The end of a communicator: together with the other ranks, or for this one alone.

use super::{Communicator, DeviceState};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::log::{self, Level};
use std::time::{Duration, Instant};

/// How long a rank keeps the memory that others may still write to when they cannot meet any more.
const PEER_MEMORY_TIMEOUT: Duration = Duration::from_secs(10);

/// Time between two looks at who is still there.
const PEER_POLL_INTERVAL: Duration = Duration::from_millis(20);

impl Communicator {
    /// Waits until every rank has finalized: no rank's data is lost by the drop that follows. On a GPU
    /// this rank's calls end first, however long the work takes that is ahead of them on their streams;
    /// it takes no more calls then, and no rank maps memory of another any more, unless a graph with its
    /// calls is left.
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
            // Whatever any rank has queued writes to the memory of others.
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

    /// Waits until the calls of this rank have ended, however long the work takes that is ahead of them
    /// on their streams, and says that it makes no more: from here on its end is no failure to the other
    /// ranks, nor theirs to it. Waits for no rank but where those calls do.
    ///
    /// # Errors
    /// The reason why the communicator has failed; but that other ranks are gone is none where it cut no
    /// call short.
    pub fn close(&self) -> Result<()> {
        self.owner.check()?;
        if let Err(error) = self.fault.check()
            && !is_peer_exit(&error)
        {
            return self.fail_on_error(Err(error));
        }
        // Of this rank's own calls: others may look at the engine for a moment.
        let (was_idle, ended) = match &self.state {
            DeviceState::Host(_) => (self.is_idle(), self.engine().map(drop)),
            DeviceState::Gpu(gpu) => match gpu.engine() {
                Ok(engine) => (gpu.is_over(&engine), engine.finish()),
                Err(error) => (false, Err(error)),
            },
        };
        // What has only been heard of so far has ended no call.
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

    /// Gives up the memory of other ranks ahead of the word that this one has retired, so that none of
    /// those which hear that all have frees what another still maps.
    ///
    /// The driver may wait for kernels of this GPU here. The engine is held meanwhile, which nobody needs
    /// any more: an abort does without it, and so do the threads that serve running kernels.
    fn unmap(&self) {
        if let DeviceState::Gpu(gpu) = &self.state
            && !gpu.context().driver().has_ended()
            && let Ok(mut engine) = gpu.engine()
        {
            engine.close();
        }
    }

    /// For a communicator that ends in a process that has others of its ranks: takes no more calls, and
    /// gives up the memory of those ranks, none of which it frees then. Returns whether there was any.
    /// Does nothing while calls of this rank go on.
    pub fn unmap_local_peers(&self) -> bool {
        match &self.state {
            DeviceState::Host(_) => false,
            DeviceState::Gpu(gpu) => gpu.unmap_local_peers(),
        }
    }

    /// Whether other ranks of this process have not given up the memory of this one's GPU yet. If it ends
    /// now, the last of them frees that, at whatever time it ends itself.
    pub fn is_mapped_by_peers(&self) -> bool {
        match &self.state {
            DeviceState::Host(_) => false,
            DeviceState::Gpu(gpu) => gpu.is_mapped_by_peers(),
        }
    }

    /// Behind [`Communicator::close`]: returns when the other ranks have retired, too, however late, or
    /// are gone, and nobody uses memory of this rank any more.
    pub fn wait_closed(&self) {
        self.wait_peers_closed(PEER_MEMORY_TIMEOUT);
    }

    /// The same, where others that cannot meet any more get so long.
    pub(super) fn wait_peers_closed(&self, timeout: Duration) {
        loop {
            match self.exchange.wait_closed() {
                Ok(()) => return,
                // Who has not come may have work queued that takes longer.
                Err(error) if error.kind() == ErrorKind::Timeout && self.peers_may_close() => {
                    std::thread::sleep(PEER_POLL_INTERVAL);
                }
                Err(_) => break,
            }
        }
        if self.gpu().is_none() {
            return;
        }
        // Nobody says any more when kernels of those that are left have ended.
        let until = Instant::now() + timeout;
        while self.owner.is_this() && self.has_live_peers() && Instant::now() < until {
            std::thread::sleep(PEER_POLL_INTERVAL);
        }
    }

    /// Whether ranks that have not left may still say that they have retired.
    fn peers_may_close(&self) -> bool {
        self.owner.is_this() && !self.fault.is_raised() && self.has_live_peers()
    }

    fn has_live_peers(&self) -> bool {
        let mut others = (0..self.nranks()).filter(|&rank| rank != self.rank());
        others.any(|rank| !self.exchange.has_left(rank))
    }
}

/// Whether `error` is the end of another rank, which is its own business unless something is missed.
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
            // Peers that still wait for this rank's part get it before they hear that it left.
            engine.end();
        }
        // The others must not take for a rank that left in good order one that failed unheard.
        if let Err(reason) = self.fault.check() {
            self.tell(&reason);
        }
        self.exchange.leave();
    }
}
