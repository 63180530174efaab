//! The order of one communicator's calls over the caller's streams.
//!
//! All launches of a communicator run one after the other, whatever streams they are on: when the
//! stream changes, the new one waits for an event behind the last launch. Within a stream capture
//! the event becomes an edge of the graph. Between a captured launch and one outside, or of
//! another capture, the library adds nothing: when a graph runs is the caller's business, who
//! must order graph launches and other calls of a communicator, and alike on all ranks.

use crate::error::Result;
use crate::gpu::{Context, Event, Stream};
use crate::sys::cuda::CuStream;
use std::sync::Arc;
use std::time::Duration;

/// Where the last launches were queued, and what later ones wait for.
#[derive(Debug)]
pub(super) struct Order {
    /// The stream of the last launch that was no capture's.
    stream: Option<usize>,
    /// Behind that launch.
    launched: Arc<Event>,
    /// The capture of the last captured launch, and its stream.
    capture: Option<(u64, usize)>,
    /// Behind that launch.
    captured: Event,
}

impl Order {
    pub(super) fn new(context: &Arc<Context>) -> Result<Order> {
        Ok(Order {
            stream: None,
            launched: Arc::new(Event::new(context)?),
            capture: None,
            captured: Event::new(context)?,
        })
    }

    /// The event behind the last launch outside captures.
    pub(super) fn launched(&self) -> &Arc<Event> {
        &self.launched
    }

    /// Lets what is queued on `stream` from here on run behind the last launch.
    pub(super) fn enter(&self, stream: &Stream, capture: Option<u64>) -> Result<()> {
        let own = stream.handle().0;
        match (capture, self.stream, self.capture) {
            (None, Some(last), _) if !is_one(last, own) => stream.wait_event(&self.launched),
            (Some(id), _, Some((last_id, last))) if last_id == id && !is_one(last, own) => {
                stream.wait_event(&self.captured)
            }
            _ => Ok(()),
        }
    }

    /// Marks the launch that was just queued on `stream`.
    pub(super) fn leave(&mut self, stream: &Stream, capture: Option<u64>) -> Result<()> {
        let own = stream.handle().0;
        match capture {
            None => {
                self.launched.record(stream)?;
                self.stream = Some(own);
            }
            Some(id) => {
                self.captured.record(stream)?;
                self.capture = Some((id, own));
            }
        }
        Ok(())
    }

    /// Waits until all launches outside captures have ended, at most `deadline`.
    pub(super) fn wait(&self, deadline: Duration) -> Result<()> {
        match self.stream {
            Some(_) => self.launched.wait(deadline),
            None => Ok(()),
        }
    }
}

/// Whether two handles are surely of one stream. That of a thread's own default stream is the same
/// in every thread.
fn is_one(last: usize, own: usize) -> bool {
    last == own && own != CuStream::PER_THREAD.0
}
