//! Teardown of a GPU engine: kernels end before the memory and connections that they use.
//!
//! ```text
//! running --end()--> draining --all launches ended--> ended: drop frees everything
//!                       | fault raised, driver error, or QUEUED_WORK_TIMEOUT
//!                       v
//!                    aborting (abort word set) --within KERNEL_EXIT_TIMEOUT--> ended
//!                       | a kernel still runs
//!                       v
//!                    outlived: a deferred drop frees the memory when the kernel has ended
//! ```
//! `docs/teardown.md` describes the order of all parts of a communicator.

use super::GpuEngine;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::deferred_drop::drop_when;
use crate::sys::log::{self, Level};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long other work of the caller's streams may delay the last calls of a communicator. The deadline of
/// calls does not apply here, because it limits waits for peers.
const QUEUED_WORK_TIMEOUT: Duration = Duration::from_secs(3600);

/// Time between two checks of the fault while teardown waits for launches.
const FAULT_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long close() waits for the driver to release the resources of destroyed graphs.
const GRAPH_RELEASE_TIMEOUT: Duration = Duration::from_millis(100);

/// Time between two checks whether graphs still hold resources.
const GRAPH_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How long teardown waits for kernels after it has set the abort word.
const KERNEL_EXIT_TIMEOUT: Duration = Duration::from_secs(2);

impl GpuEngine {
    /// Waits until the kernels of this rank have ended, since they use its memory. A kernel that waits for a
    /// peer ends at its own deadline, or when the fault is raised. Returns false if a kernel still runs; its
    /// memory must then not be freed.
    pub fn end(&mut self) -> bool {
        if std::mem::replace(&mut self.ended, true) {
            return !self.outlived;
        }
        let mut ended = match self.fault.is_raised() {
            true => self.order.wait(KERNEL_EXIT_TIMEOUT),
            false => self.drain(),
        };
        if let Err(error) = &ended {
            // Peers may wait for the calls that are interrupted here, so the fault is announced.
            if error.kind() == ErrorKind::Timeout && self.fault.raise(error.clone()) {
                self.exchange.announce(error);
            }
            self.connections.abort();
            ended = self.order.wait(KERNEL_EXIT_TIMEOUT);
        }
        if let Some(mut proxy) = self.proxy.take() {
            // Messages of the last kernels may still be in this process.
            proxy.end(match self.fault.is_raised() {
                true => KERNEL_EXIT_TIMEOUT,
                false => self.timeout,
            });
        }
        if let Err(error) = ended
            && error.kind() == ErrorKind::Timeout
        {
            // Freeing this memory would wait for the kernel without a deadline, or unmap memory
            // that the kernel uses.
            log::line(
                Level::Warn,
                format_args!(
                    "rank {}: a call has not ended, so its memory is kept until it has: {error}",
                    self.rank
                ),
            );
            let (work_buffers, residuals) = (self.work_buffers.take(), self.residuals.take());
            let scales = self.scales.take();
            self.leave((
                self.connections.clone(),
                self.kernels.clone(),
                work_buffers,
                residuals,
                scales,
            ));
            self.outlived = true;
        }
        !self.outlived
    }

    /// Waits until all launches of this communicator have ended, even if other work of the caller's streams
    /// delays them. Kernels have a deadline for each wait; a kernel that fails raises the fault, which ends
    /// this wait.
    ///
    /// # Errors
    /// The fault's reason; timeout after an hour, or after the deadline of waits if that is longer; the
    /// driver's errors.
    pub fn drain(&self) -> Result<()> {
        let begin = Instant::now();
        let timeout = self.timeout.max(QUEUED_WORK_TIMEOUT);
        let mut warned = false;
        loop {
            match self.order.wait(FAULT_POLL_INTERVAL) {
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
            if waited >= timeout {
                return Err(Error::new(ErrorKind::Timeout, what()));
            }
            if waited >= self.timeout && !std::mem::replace(&mut warned, true) {
                log::line(Level::Warn, format_args!("{}; waiting on", what()));
            }
        }
    }

    /// Waits until all launches have ended, as [`GpuEngine::drain`] does, and all messages to other hosts have
    /// left this process.
    ///
    /// # Errors
    /// See [`GpuEngine::drain`]; timeout if messages do not leave.
    pub fn finish(&self) -> Result<()> {
        match self.drain() {
            // At process exit the driver has already ended all kernels, but their messages may
            // still be in this process.
            Err(_) if self.context.driver().has_ended() => {}
            drained => drained?,
        }
        match &self.proxy {
            Some(proxy) => proxy.flush(self.timeout, &self.fault),
            None => Ok(()),
        }
    }

    /// Stops accepting calls, and unmaps memory of other processes unless a graph may still use it. After all
    /// ranks have done this and synchronised, no rank frees memory that another rank maps. No launch may
    /// still run.
    pub fn close(&mut self) {
        self.closed = true;
        // The driver releases the resources of a destroyed graph on a thread of its own.
        let until = Instant::now() + GRAPH_RELEASE_TIMEOUT;
        while !self.is_held_by_no_graph() && Instant::now() < until {
            std::thread::sleep(GRAPH_POLL_INTERVAL);
        }
        if self.is_held_by_no_graph() {
            self.connections.unmap();
        }
    }

    /// Stops accepting calls, and unmaps memory of other ranks of this process without a driver call. Returns
    /// whether any was mapped. No launch may still run.
    pub fn unmap_local_peers(&mut self) -> bool {
        self.closed = true;
        self.is_held_by_no_graph() && self.connections.unmap_local_peers()
    }

    /// Returns whether ranks of this process still map memory of this rank.
    pub fn is_mapped_by_peers(&self) -> bool {
        self.connections.is_mapped_by_peers()
    }

    /// Returns whether no graph holds the connections: without graphs, only the engine and the watchdog hold
    /// a reference.
    fn is_held_by_no_graph(&self) -> bool {
        Arc::strong_count(&self.connections) <= 2
    }

    /// Drops `thing` in the background once all launches have ended, since a kernel may still use
    /// it.
    pub fn leave<T: Send + 'static>(&self, thing: T) {
        let launched = self.order.launched().clone();
        // If the query fails, the launches have failed, and no kernel uses `thing` any more.
        drop_when(thing, move || launched.has_happened().unwrap_or(true));
    }
}

impl Drop for GpuEngine {
    fn drop(&mut self) {
        self.end();
    }
}
