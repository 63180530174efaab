//! The end of an engine: its kernels end first, which use what goes with it.

use super::GpuEngine;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::deferred_drop::drop_when;
use crate::sys::log::{self, Level};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the work of the caller's streams may take that his last calls wait for when a communicator
/// ends. The deadline of calls is not for that: it is for peers.
const QUEUED: Duration = Duration::from_secs(3600);

/// Time between two looks at the fault meanwhile.
const LOOK: Duration = Duration::from_millis(100);

/// How long a communicator that is closed waits for the driver and a thread to let go of graphs.
const LETTING_GO: Duration = Duration::from_millis(100);

/// Time between two looks at them.
const GLANCE: Duration = Duration::from_millis(1);

/// How long a communicator that is dropped waits for kernels that were told to stop.
const STOPPING: Duration = Duration::from_secs(2);

impl GpuEngine {
    /// Waits until the kernels of this rank have ended, which use memory that goes with it. One
    /// that waits for a peer ends by its own deadline, or because the fault is raised. False if one still
    /// runs all the same: what it uses must stay.
    pub fn end(&mut self) -> bool {
        if std::mem::replace(&mut self.ended, true) {
            return !self.outlived;
        }
        let mut ended = match self.fault.is_raised() {
            true => self.order.wait(STOPPING),
            false => self.drain(),
        };
        if let Err(error) = &ended {
            // Others may wait for what is ended here: it is no leave in good order.
            if error.kind() == ErrorKind::Timeout && self.fault.raise(error.clone()) {
                self.exchange.announce(error);
            }
            self.wiring.abort();
            ended = self.order.wait(STOPPING);
        }
        if let Some(mut proxy) = self.proxy.take() {
            // What the last kernels sent is still to leave.
            proxy.end(match self.fault.is_raised() {
                true => STOPPING,
                false => self.timeout,
            });
        }
        if let Err(error) = ended
            && error.kind() == ErrorKind::Timeout
        {
            // Freeing would wait for the kernel without a deadline, or pull memory from under it.
            log::line(
                Level::Warn,
                format_args!(
                    "rank {}: a call has not ended, so its memory is kept until it has: {error}",
                    self.rank
                ),
            );
            let (work_buffers, residuals) = (self.work_buffers.take(), self.residuals.take());
            self.leave((
                self.wiring.clone(),
                self.kernels.clone(),
                work_buffers,
                residuals,
            ));
            self.outlived = true;
        }
        !self.outlived
    }

    /// Waits until what this communicator launched has ended, however long other work of the caller's
    /// streams ahead of it takes: its kernels have a deadline of their own for each wait, and raise the
    /// fault, which ends this.
    ///
    /// # Errors
    /// The fault's reason; timeout after an hour, or the deadline of waits if that is longer; those
    /// of the driver.
    pub fn drain(&self) -> Result<()> {
        let begin = Instant::now();
        let patience = self.timeout.max(QUEUED);
        let mut is_said = false;
        loop {
            match self.order.wait(LOOK) {
                Err(error) if error.kind() == ErrorKind::Timeout => {}
                ended => return ended,
            }
            self.fault.ends_waits()?;
            let waited = begin.elapsed();
            let what = || {
                format!(
                    "rank {}: calls that wait for other work of their streams have not ended in {:.0} s",
                    self.rank,
                    waited.as_secs_f64()
                )
            };
            if waited >= patience {
                return Err(Error::new(ErrorKind::Timeout, what()));
            }
            if waited >= self.timeout && !std::mem::replace(&mut is_said, true) {
                log::line(Level::Warn, format_args!("{}; waiting on", what()));
            }
        }
    }

    /// Waits until what this communicator launched has ended, as [`GpuEngine::drain`] does, and what it
    /// sent to other hosts has left this process.
    ///
    /// # Errors
    /// As for [`GpuEngine::drain`]; timeout if what was sent does not leave.
    pub fn finish(&self) -> Result<()> {
        match self.drain() {
            // With the driver all has ended that ran; what it sent may still be here.
            Err(_) if self.context.driver().has_ended() => {}
            drained => drained?,
        }
        match &self.proxy {
            Some(proxy) => proxy.flush(self.timeout, &self.fault),
            None => Ok(()),
        }
    }

    /// Takes no more calls, and gives up what other processes own, unless graphs may still use it. When
    /// all ranks have done so and met, none frees memory that another one maps. Nothing that was launched
    /// may run any more.
    pub fn close(&mut self) {
        self.closed = true;
        // The driver lets go of a graph that was destroyed just now on a thread of its own.
        let until = Instant::now() + LETTING_GO;
        while !self.is_only_ours() && Instant::now() < until {
            std::thread::sleep(GLANCE);
        }
        if self.is_only_ours() {
            self.wiring.unmap();
        }
    }

    /// Takes no more calls, and gives up what ranks of this process own, of which it frees nothing. Returns
    /// whether there was any. Nothing that was launched may run any more.
    pub fn unmap_local_peers(&mut self) -> bool {
        self.closed = true;
        self.is_only_ours() && self.wiring.unmap_local_peers()
    }

    /// Whether ranks of this process have not given up yet what this one owns.
    pub fn is_mapped_by_peers(&self) -> bool {
        self.wiring.is_mapped_by_peers()
    }

    /// Whether no graph has the connections: this value and the watchdog do.
    fn is_only_ours(&self) -> bool {
        Arc::strong_count(&self.wiring) <= 2
    }

    /// Drops `thing`, which a kernel may still use, when that has ended.
    pub fn leave<T: Send + 'static>(&self, thing: T) {
        let launched = self.order.launched().clone();
        // One that failed is over.
        drop_when(thing, move || launched.has_happened().unwrap_or(true));
    }
}

impl Drop for GpuEngine {
    fn drop(&mut self) {
        self.end();
    }
}
