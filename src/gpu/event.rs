//! Events: marks in a stream.

use super::context::Relaxed;
use super::stream::poll;
use super::{Context, Stream};
use crate::error::Result;
use crate::sys::cuda::{CuEvent, CuResult, flags};
use std::ffi::c_uint;
use std::sync::Arc;
use std::time::Duration;

/// A mark that a stream passes.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: CuEvent,
}

impl Event {
    /// An event for order alone; the cheaper kind.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, flags::EVENT_DISABLE_TIMING)
    }

    /// An event that keeps its time, for [`Event::since`].
    ///
    /// # Errors
    /// Those of the driver.
    pub fn timed(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, flags::EVENT_DEFAULT)
    }

    fn with_flags(context: &Arc<Context>, flags: c_uint) -> Result<Event> {
        let _bound = context.bind()?;
        let driver = context.driver();
        let mut handle = CuEvent::default();
        // SAFETY: writes one handle.
        driver.check("cuEventCreate", unsafe {
            driver.api().cuEventCreate(&mut handle, flags)
        })?;
        Ok(Event {
            context: context.clone(),
            handle,
        })
    }

    /// The GPU's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The driver's handle of it.
    pub fn handle(&self) -> CuEvent {
        self.handle
    }

    /// Marks the place behind all work that is in `stream` now.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        // SAFETY: live handles.
        driver.check("cuEventRecord", unsafe {
            driver.api().cuEventRecord(self.handle, stream.handle())
        })
    }

    /// Whether the last mark was passed, or none was made.
    ///
    /// # Errors
    /// Those of the driver, among them failures of the work before the mark.
    pub fn has_happened(&self) -> Result<bool> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        // SAFETY: a live event.
        match unsafe { driver.api().cuEventQuery(self.handle) } {
            CuResult::NOT_READY => Ok(false),
            result => driver.check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Waits until the last mark was passed.
    ///
    /// # Errors
    /// Timeout, with `deadline`; otherwise as [`Event::has_happened`].
    pub fn wait(&self, deadline: Duration) -> Result<()> {
        poll(deadline, "the work before an event", || self.has_happened())
    }

    /// Seconds from `earlier` to this one on the GPU's clock; both are timed and have happened.
    ///
    /// # Errors
    /// Those of the driver: not ready, or not timed.
    pub fn since(&self, earlier: &Event) -> Result<f64> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        let mut milliseconds: f32 = 0.0;
        // SAFETY: live events; writes one number.
        driver.check("cuEventElapsedTime", unsafe {
            driver
                .api()
                .cuEventElapsedTime(&mut milliseconds, earlier.handle, self.handle)
        })?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let driver = self.context.driver();
        let _relaxed = Relaxed::to_drop(driver);
        // SAFETY: made by `with_flags`, destroyed once; the driver keeps what queued work needs.
        driver.log("cuEventDestroy", unsafe {
            driver.api().cuEventDestroy(self.handle)
        });
    }
}
