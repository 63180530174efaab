//! CUDA streams, which the caller or this library has created.

use super::context::Relaxed;
use super::{Context, Event};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::cuda::{
    CUevent_wait_flags, CUstream, CUstream_flags, CUstream_st, CuResult, Handle,
};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A CUDA stream: a queue of work of one context.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: Handle<CUstream_st>,
    owned: bool,
}

impl Stream {
    /// Creates a stream that is not ordered with the legacy default stream.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        Stream::with_priority(context, 0)
    }

    /// Creates a stream with a priority; a lower number means a higher priority. The driver clamps the number
    /// to the GPU's range.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn with_priority(context: &Arc<Context>, priority: i32) -> Result<Stream> {
        let _bound = context.bind()?;
        let driver = context.driver();
        let mut handle: CUstream = std::ptr::null_mut();
        // SAFETY: the driver writes one handle to a local variable.
        driver.check("cuStreamCreateWithPriority", unsafe {
            driver.api().cuStreamCreateWithPriority(
                &mut handle,
                CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint,
                priority as c_int,
            )
        })?;
        Ok(Stream {
            context: context.clone(),
            handle: Handle(handle),
            owned: true,
        })
    }

    /// Wraps the caller's stream `handle`, which dropping the value does not destroy.
    ///
    /// # Safety
    /// Until the value is dropped, the handle is a stream of `context` that exists, or a default stream (0, 1
    /// or 2).
    pub unsafe fn borrowed(context: &Arc<Context>, handle: CUstream) -> Stream {
        Stream {
            context: context.clone(),
            handle: Handle(handle),
            owned: false,
        }
    }

    /// Returns the context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns the driver's handle.
    pub fn handle(&self) -> CUstream {
        self.handle.0
    }

    /// Returns the driver's id, which no other stream of the process ever has; `None` if the driver reports
    /// no id. A handle does not identify a stream: the driver reuses it once the stream is destroyed, while
    /// work of the stream still runs.
    pub fn id(&self) -> Option<u64> {
        let _bound = self.context.bind().ok()?;
        let mut id = 0;
        // SAFETY: the stream exists while `self` does; the driver writes one number to a local variable.
        let queried = unsafe {
            let api = self.context.driver().api();
            api.cuStreamGetId(self.handle(), &mut id)
        };
        (queried == CuResult::SUCCESS).then_some(id)
    }

    /// Returns whether all work of the stream has ended.
    ///
    /// # Errors
    /// The driver's errors, which include failures of the work.
    pub fn is_idle(&self) -> Result<bool> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        // SAFETY: the stream exists while `self` does.
        match unsafe { driver.api().cuStreamQuery(self.handle()) } {
            CuResult::NOT_READY => Ok(false),
            result => driver.check("cuStreamQuery", result).map(|()| true),
        }
    }

    /// Waits until all work of the stream has ended.
    ///
    /// # Errors
    /// Timeout after `deadline`, while the work continues; the errors of [`Stream::is_idle`].
    pub fn wait(&self, deadline: Duration) -> Result<()> {
        poll(deadline, "a stream's work", || self.is_idle())
    }

    /// Makes later work of this stream wait for `event`. No host thread waits.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        self.wait_event_as(event, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
    }

    /// Makes later work of the captured graph wait for `event` in every replay. A replay waits for the last
    /// recording before its launch, whether outside the graph or by another replay.
    ///
    /// # Errors
    /// The driver's errors, such as a stream that is in no capture.
    pub fn wait_event_in_replays(&self, event: &Event) -> Result<()> {
        self.wait_event_as(event, CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL)
    }

    fn wait_event_as(&self, event: &Event, flags: CUevent_wait_flags) -> Result<()> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        // SAFETY: the values keep their driver objects. A caller that waits in replays keeps the event for
        // them.
        driver.check("cuStreamWaitEvent", unsafe {
            driver
                .api()
                .cuStreamWaitEvent(self.handle(), event.handle(), flags as c_uint)
        })
    }

    /// Queues a call of `function` with `data` behind the stream's work. It runs on a thread of the driver.
    ///
    /// # Errors
    /// The driver's errors.
    ///
    /// # Safety
    /// `function` takes `data` whenever the call runs, in replays too. It calls no driver function.
    pub unsafe fn host_function(
        &self,
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Result<()> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        // SAFETY: the value keeps its stream, and the caller guarantees the call.
        let queued = unsafe {
            let api = driver.api();
            api.cuLaunchHostFunc(self.handle(), Some(function), data)
        };
        driver.check("cuLaunchHostFunc", queued)
    }

    /// Returns whether work that is queued now is recorded into a graph instead of executed.
    ///
    /// # Errors
    /// Invalid usage if a capture has failed and not been ended; the driver's errors.
    pub fn is_capturing(&self) -> Result<bool> {
        Ok(self.capture()?.is_some())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        let driver = self.context.driver();
        let _relaxed = Relaxed::to_drop(driver);
        // SAFETY: `with_priority` created the stream, and this destructor runs once. Queued work still runs,
        // and the call does not wait for it.
        driver.log("cuStreamDestroy", unsafe {
            driver.api().cuStreamDestroy(self.handle())
        });
    }
}

/// Calls `done` at growing intervals until it returns true or `deadline` has passed. The driver's own waits
/// have no deadline.
pub(super) fn poll(
    deadline: Duration,
    what: &str,
    mut done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let begin = Instant::now();
    let mut interval = Duration::from_micros(1);
    while !done()? {
        let waited = begin.elapsed();
        if waited >= deadline {
            return Err(Error::new(
                ErrorKind::Timeout,
                format!("{what} did not end within {deadline:?}; it may still"),
            ));
        }
        // Most waits are short: they yield instead of sleeping.
        if waited < Duration::from_micros(200) {
            std::thread::yield_now();
        } else {
            std::thread::sleep(interval);
            interval = (interval * 2).min(Duration::from_millis(1));
        }
    }
    Ok(())
}
