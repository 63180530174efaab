//! Events: points in the work of a stream.

use super::context::Relaxed;
use super::stream::poll;
use super::{Context, Stream};
use crate::error::Result;
use crate::sys::cuda::{CUevent, CUevent_flags, CUevent_st, CuResult, Handle};
use std::ffi::c_uint;
use std::sync::Arc;
use std::time::Duration;

/// A CUDA event: a point in the work of a stream, for which the host or another stream can wait.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: Handle<CUevent_st>,
}

impl Event {
    /// Creates an event that stores no time, which costs less than [`Event::timed`].
    ///
    /// # Errors
    /// The driver's errors.
    pub fn new(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Creates an event that stores the time at which it happens, for [`Event::since`].
    ///
    /// # Errors
    /// The driver's errors.
    pub fn timed(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with_flags(context: &Arc<Context>, flags: CUevent_flags) -> Result<Event> {
        let _bound = context.bind()?;
        let driver = context.driver();
        let mut handle: CUevent = std::ptr::null_mut();
        // SAFETY: the driver writes one handle to a local variable.
        driver.check("cuEventCreate", unsafe {
            driver.api().cuEventCreate(&mut handle, flags as c_uint)
        })?;
        Ok(Event {
            context: context.clone(),
            handle: Handle(handle),
        })
    }

    /// Returns the context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns the driver's handle.
    pub fn handle(&self) -> CUevent {
        self.handle.0
    }

    /// Records the event behind all work that is queued on `stream` so far.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        // SAFETY: the two values keep their driver objects.
        driver.check("cuEventRecord", unsafe {
            driver.api().cuEventRecord(self.handle(), stream.handle())
        })
    }

    /// Returns whether the work before the last recording has ended; true if the event was never recorded.
    ///
    /// # Errors
    /// The driver's errors, which include failures of the work before the recording.
    pub fn has_happened(&self) -> Result<bool> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        // SAFETY: `self` keeps the event.
        match unsafe { driver.api().cuEventQuery(self.handle()) } {
            CuResult::NOT_READY => Ok(false),
            result => driver.check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Waits until the work before the last recording has ended.
    ///
    /// # Errors
    /// Timeout after `deadline`; the errors of [`Event::has_happened`].
    pub fn wait(&self, deadline: Duration) -> Result<()> {
        poll(deadline, "the work before an event", || self.has_happened())
    }

    /// Returns the seconds from `earlier` to this event on the GPU's clock.
    ///
    /// # Errors
    /// The driver's errors, if an event is not timed or has not happened.
    pub fn since(&self, earlier: &Event) -> Result<f64> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        let mut milliseconds: f32 = 0.0;
        // SAFETY: both values keep their events; the driver writes one number to a local variable.
        driver.check("cuEventElapsedTime", unsafe {
            driver
                .api()
                .cuEventElapsedTime(&mut milliseconds, earlier.handle(), self.handle())
        })?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let driver = self.context.driver();
        let _relaxed = Relaxed::to_drop(driver);
        // SAFETY: `with_flags` created the event, and this destructor runs once. The driver keeps what queued
        // work needs.
        driver.log("cuEventDestroy", unsafe {
            driver.api().cuEventDestroy(self.handle())
        });
    }
}
