//! Streams: the caller's, and our own.

use super::context::Relaxed;
use super::{Context, Event};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::cuda::{CuResult, CuStream, flags};
use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A queue of work of one context.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: CuStream,
    owned: bool,
}

impl Stream {
    /// A stream that does not wait for the legacy default stream, nor that one for it.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        Stream::with_priority(context, 0)
    }

    /// The same before (lower) or behind other streams; a number outside the GPU's range counts
    /// as the nearest inside, by the driver's rule.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn with_priority(context: &Arc<Context>, priority: i32) -> Result<Stream> {
        let _bound = context.bind()?;
        let driver = context.driver();
        let mut handle = CuStream::default();
        // SAFETY: writes one handle.
        driver.check("cuStreamCreateWithPriority", unsafe {
            driver.api().cuStreamCreateWithPriority(
                &mut handle,
                flags::STREAM_NON_BLOCKING,
                priority as c_int,
            )
        })?;
        Ok(Stream {
            context: context.clone(),
            handle,
            owned: true,
        })
    }

    /// The caller's stream `handle`, which is not destroyed with this value.
    ///
    /// # Safety
    /// The handle is of a live stream of `context`, or 0 or 2 (default streams), until this value
    /// is gone.
    pub unsafe fn borrowed(context: &Arc<Context>, handle: CuStream) -> Stream {
        Stream {
            context: context.clone(),
            handle,
            owned: false,
        }
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The driver's handle of it.
    pub fn handle(&self) -> CuStream {
        self.handle
    }

    /// The driver's number of it, which no other stream of the process has, before or after: its
    /// handle another stream may get as soon as this one is destroyed, while its work still runs.
    /// `None` where the driver does not say.
    pub fn id(&self) -> Option<u64> {
        let _bound = self.context.bind().ok()?;
        let mut id = 0;
        // SAFETY: a live stream; writes one number.
        let asked = unsafe {
            let api = self.context.driver().api();
            api.cuStreamGetId(self.handle, &mut id)
        };
        (asked == CuResult::SUCCESS).then_some(id)
    }

    /// Whether all its work is done.
    ///
    /// # Errors
    /// Those of the driver, among them failures of the work itself.
    pub fn is_idle(&self) -> Result<bool> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        // SAFETY: a live stream.
        match unsafe { driver.api().cuStreamQuery(self.handle) } {
            CuResult::NOT_READY => Ok(false),
            result => driver.check("cuStreamQuery", result).map(|()| true),
        }
    }

    /// Waits until all its work is done.
    ///
    /// # Errors
    /// Timeout, with `deadline`, if it is not done by then; it goes on. Otherwise as
    /// [`Stream::is_idle`].
    pub fn wait(&self, deadline: Duration) -> Result<()> {
        poll(deadline, "a stream's work", || self.is_idle())
    }

    /// Holds later work of this stream back until `event` has happened. No host thread waits.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        self.wait_event_as(event, 0)
    }

    /// The same in every replay of the capture that the stream is in, for the last mark that was
    /// made outside of it, or by a replay, when the graph is launched.
    ///
    /// # Errors
    /// Those of the driver, among them that the stream is in no capture.
    pub fn wait_event_in_replays(&self, event: &Event) -> Result<()> {
        self.wait_event_as(event, flags::EVENT_WAIT_EXTERNAL)
    }

    fn wait_event_as(&self, event: &Event, flags: c_uint) -> Result<()> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        // SAFETY: live handles; whoever waits in replays keeps the event for them.
        driver.check("cuStreamWaitEvent", unsafe {
            driver
                .api()
                .cuStreamWaitEvent(self.handle, event.handle(), flags)
        })
    }

    /// Whether work that is queued now is recorded into a graph instead of run.
    ///
    /// # Errors
    /// Invalid usage if a capture has failed and not been ended; those of the driver.
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
        // SAFETY: made by `with_priority`, destroyed once. Work that is queued still runs; the
        // call does not wait for it.
        driver.log("cuStreamDestroy", unsafe {
            driver.api().cuStreamDestroy(self.handle)
        });
    }
}

/// CompletionPoller `done` again and again, first at once, then at growing distances, until it is or
/// `deadline` has passed. The driver's own waits have no deadline.
pub(super) fn poll(
    deadline: Duration,
    what: &str,
    mut done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let begin = Instant::now();
    let mut nap = Duration::from_micros(1);
    while !done()? {
        let waited = begin.elapsed();
        if waited >= deadline {
            return Err(Error::new(
                ErrorKind::Timeout,
                format!("{what} did not end within {deadline:?}; it may still"),
            ));
        }
        // Short waits, which most are, stay on the core.
        if waited < Duration::from_micros(200) {
            std::thread::yield_now();
        } else {
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(1));
        }
    }
    Ok(())
}
