//! The end of a communicator: together with the other ranks, or for this one alone.

use super::{Communicator, Side};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::log::{self, Level};
use std::time::{Duration, Instant};

/// How long a rank keeps the memory that others may still write to when they cannot meet any more.
const LINGER: Duration = Duration::from_secs(10);

/// Time between two looks at who is still there.
const LOOK: Duration = Duration::from_millis(20);

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
        let result = match &self.side {
            Side::Host(_) => {
                let _engine = self.engine()?;
                self.exchange.barrier()
            }
            // Whatever any rank has queued writes to the memory of others.
            Side::Gpu(side) => {
                let mut engine = side.engine()?;
                let ended = engine.drain().and_then(|()| self.exchange.barrier());
                ended.and_then(|()| {
                    engine.close();
                    self.exchange.barrier()
                })
            }
        };
        self.settle(result)
    }

    /// Waits until the calls of this rank have ended, however long the work takes that is ahead of them
    /// on their streams, and says that it makes no more: from here on its end is no failure to the other
    /// ranks, nor theirs to it. Waits for no rank but where those calls do.
    ///
    /// # Errors
    /// The reason why the communicator has failed; but that other ranks are gone is none where it cut no
    /// call short.
    pub fn retire(&self) -> Result<()> {
        self.owner.check()?;
        if let Err(error) = self.fault.check()
            && !tells_of_an_end(&error)
        {
            return self.settle(Err(error));
        }
        // Of this rank's own calls: others may look at the engine for a moment.
        let (was_idle, ended) = match &self.side {
            Side::Host(_) => (self.is_idle(), self.engine().map(drop)),
            Side::Gpu(side) => match side.engine() {
                Ok(engine) => (side.is_over(&engine), engine.finish()),
                Err(error) => (false, Err(error)),
            },
        };
        // What has only been heard of so far has ended no call.
        match ended.and_then(|()| self.fault.ends_waits()) {
            Err(error) if !(was_idle && tells_of_an_end(&error)) => return self.settle(Err(error)),
            _ => {}
        }
        self.unmap();
        self.exchange.retire();
        Ok(())
    }

    /// Gives up the memory of other ranks ahead of the word that this one has retired, so that none of
    /// those which hear that all have frees what another still maps.
    ///
    /// The driver may wait for kernels of this GPU here. The engine is held meanwhile, which nobody needs
    /// any more: an abort does without it, and so do the threads that serve running kernels.
    fn unmap(&self) {
        if let Side::Gpu(side) = &self.side
            && !side.context().driver().has_ended()
            && let Ok(mut engine) = side.engine()
        {
            engine.close();
        }
    }

    /// For a communicator that ends in a process that has others of its ranks: takes no more calls, and
    /// gives up the memory of those ranks, none of which it frees then. Returns whether there was any.
    /// Does nothing while calls of this rank go on.
    pub fn part_from_near(&self) -> bool {
        match &self.side {
            Side::Host(_) => false,
            Side::Gpu(side) => side.part_from_near(),
        }
    }

    /// Whether other ranks of this process have not given up the memory of this one's GPU yet. If it ends
    /// now, the last of them frees that, at whatever time it ends itself.
    pub fn is_lent(&self) -> bool {
        match &self.side {
            Side::Host(_) => false,
            Side::Gpu(side) => side.is_lent(),
        }
    }

    /// Behind [`Communicator::retire`]: returns when the other ranks have retired, too, however late, or
    /// are gone, and nobody uses memory of this rank any more.
    pub fn outlast(&self) {
        self.outlast_others(LINGER);
    }

    /// The same, where others that cannot meet any more get so long.
    pub(super) fn outlast_others(&self, linger: Duration) {
        loop {
            match self.exchange.await_retired() {
                Ok(()) => return,
                // Who has not come may have work queued that takes longer.
                Err(error) if error.kind() == ErrorKind::Timeout && self.may_still_meet() => {
                    std::thread::sleep(LOOK);
                }
                Err(_) => break,
            }
        }
        if self.gpu().is_none() {
            return;
        }
        // Nobody says any more when kernels of those that are left have ended.
        let until = Instant::now() + linger;
        while self.owner.is_this() && self.others_are_there() && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
    }

    /// Whether ranks that have not left may still say that they have retired.
    fn may_still_meet(&self) -> bool {
        self.owner.is_this() && !self.fault.is_raised() && self.others_are_there()
    }

    fn others_are_there(&self) -> bool {
        let mut others = (0..self.nranks()).filter(|&rank| rank != self.rank());
        others.any(|rank| !self.exchange.departed(rank))
    }
}

/// Whether `error` is the end of another rank, which is its own business unless something is missed.
fn tells_of_an_end(error: &Error) -> bool {
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
        if let Side::Gpu(side) = &self.side
            && let Ok(mut engine) = side.engine()
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
