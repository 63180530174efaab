//! The order of one communicator's calls over the caller's streams.
//!
//! All launches of a communicator run one after the other, whatever streams they are on: when the
//! stream changes, the new one waits for an event behind the last launch. Within a stream capture
//! the event becomes an edge of the graph. Between a captured launch and one outside, or of
//! another capture, the library adds nothing: when a graph runs is the caller's business, who
//! must order graph launches and other calls of a communicator, and alike on all ranks.

use crate::error::Result;
use crate::gpu::{Context, Event, Stream};
use std::sync::Arc;
use std::time::Duration;

/// Where the last launch was queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    stream: usize,
    /// The capture that recorded it.
    capture: Option<u64>,
}

/// The place of the last launch, and what later ones wait for.
#[derive(Debug)]
pub(super) struct Order {
    last: Option<Place>,
    /// Behind the last launch that was no capture's.
    launched: Event,
    /// Whether `launched` was ever recorded.
    used: bool,
    /// Behind the last captured launch.
    captured: Event,
}

impl Order {
    pub(super) fn new(context: &Arc<Context>) -> Result<Order> {
        Ok(Order {
            last: None,
            launched: Event::new(context)?,
            used: false,
            captured: Event::new(context)?,
        })
    }

    /// Lets what is queued on `stream` from here on run behind the last launch.
    pub(super) fn enter(&self, stream: &Stream, capture: Option<u64>) -> Result<()> {
        match self.last {
            Some(last) if last.capture == capture && last.stream != stream.handle().0 => {
                match capture {
                    None => stream.wait_event(&self.launched),
                    Some(_) => stream.wait_event(&self.captured),
                }
            }
            _ => Ok(()),
        }
    }

    /// Marks the launch that was just queued on `stream`.
    pub(super) fn leave(&mut self, stream: &Stream, capture: Option<u64>) -> Result<()> {
        match capture {
            None => {
                self.launched.record(stream)?;
                self.used = true;
            }
            Some(_) => self.captured.record(stream)?,
        }
        self.last = Some(Place {
            stream: stream.handle().0,
            capture,
        });
        Ok(())
    }

    /// Waits until all launches outside captures have ended, at most `deadline`.
    pub(super) fn wait(&self, deadline: Duration) -> Result<()> {
        if !self.used {
            return Ok(());
        }
        self.launched.wait(deadline)
    }
}
