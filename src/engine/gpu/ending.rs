//! The end of an engine: its kernels end first, which use what goes with it.

use super::GpuEngine;
use crate::error::ErrorKind;
use crate::sys::log::{self, Level};
use crate::sys::release::release_when;
use std::time::Duration;

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
        let patience = if self.fault.is_raised() {
            STOPPING
        } else {
            self.timeout
        };
        let mut ended = self.order.wait(patience);
        if ended.is_err() {
            self.wiring.abort();
            ended = self.order.wait(STOPPING);
        }
        if let Some(mut proxy) = self.proxy.take() {
            // What the last kernels sent is still to leave.
            proxy.end(patience);
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
            let (blobs, residuals) = (self.blobs.take(), self.residuals.take());
            self.leave((self.wiring.clone(), self.kernels.clone(), blobs, residuals));
            self.outlived = true;
        }
        !self.outlived
    }

    /// Drops `thing`, which a kernel may still use, when that has ended.
    pub fn leave<T: Send + 'static>(&self, thing: T) {
        let launched = self.order.launched().clone();
        // One that failed is over.
        release_when(thing, move || launched.has_happened().unwrap_or(true));
    }
}

impl Drop for GpuEngine {
    fn drop(&mut self) {
        self.end();
    }
}
