//! The order of one communicator's calls over the caller's streams, and over graphs.
//!
//! All launches of a communicator run one after the other, whatever streams they are on: when the
//! stream changes, the new one waits for an event behind the last launch. Within a stream capture
//! the event becomes an edge of the graph. Each replay of a graph takes its place among the calls
//! when it is launched: its first call waits for that event as it is then, and it records the event
//! behind its last call. `CINCH_GRAPH_MIXING=0` leaves that to the caller, and saves each replay the
//! two nodes.

use crate::error::Result;
use crate::gpu::{Context, EndMark, Event, Stream};
use crate::sys::cuda::CuStream;
use std::sync::Arc;
use std::time::Duration;

/// Where the last launches were queued, and what later ones wait for.
#[derive(Debug)]
pub(super) struct Order {
    /// Whether replays are ordered with what is outside of their graph.
    mixes: bool,
    /// The stream of the last launch that was no capture's.
    stream: Option<usize>,
    /// Behind that launch, or behind the last replay if it was launched later.
    launched: Arc<Event>,
    /// What was captured last.
    capture: Option<Captured>,
    /// Behind the last captured launch.
    captured: Event,
}

#[derive(Debug)]
struct Captured {
    id: u64,
    /// That of the last launch.
    stream: usize,
    /// Where replays record `launched`.
    end: Option<EndMark>,
}

impl Order {
    pub(super) fn new(context: &Arc<Context>, mixes: bool) -> Result<Order> {
        Ok(Order {
            mixes,
            stream: None,
            launched: Arc::new(Event::new(context)?),
            capture: None,
            captured: Event::new(context)?,
        })
    }

    /// The event behind the last launch outside captures, or the last replay. A graph that was
    /// captured needs it.
    pub(super) fn launched(&self) -> &Arc<Event> {
        &self.launched
    }

    /// Whether replays may have been launched, with other calls that are to be ordered with them.
    fn is_replayed(&self) -> bool {
        self.mixes && self.capture.is_some()
    }

    /// Lets what is queued on `stream` from here on run behind the last launch.
    pub(super) fn enter(&self, stream: &Stream, capture: Option<u64>) -> Result<()> {
        let own = stream.handle().0;
        match (capture, &self.capture) {
            (None, _) => {
                // The last replay's stream is not known.
                let follows = self.stream.is_some_and(|last| !is_one(last, own));
                match follows || self.is_replayed() {
                    true => stream.wait_event(&self.launched),
                    false => Ok(()),
                }
            }
            (Some(id), Some(last)) if last.id == id => match is_one(last.stream, own) {
                true => Ok(()),
                false => stream.wait_event(&self.captured),
            },
            (Some(_), _) if self.mixes => stream.wait_event_in_replays(&self.launched),
            (Some(_), _) => Ok(()),
        }
    }

    /// Marks the launch that was just queued on `stream`.
    pub(super) fn leave(&mut self, stream: &Stream, capture: Option<u64>) -> Result<()> {
        let own = stream.handle().0;
        let Some(id) = capture else {
            self.launched.record(stream)?;
            self.stream = Some(own);
            return Ok(());
        };
        self.captured.record(stream)?;
        let last = self.capture.take().filter(|last| last.id == id);
        let mut end = last.and_then(|last| last.end);
        if self.mixes {
            end = Some(stream.mark_end(&self.launched, end)?);
        }
        self.capture = Some(Captured {
            id,
            stream: own,
            end,
        });
        Ok(())
    }

    /// Waits until all launches outside captures have ended, and replays if they are ordered with
    /// those, at most `deadline`.
    pub(super) fn wait(&self, deadline: Duration) -> Result<()> {
        match self.stream.is_some() || self.is_replayed() {
            true => self.launched.wait(deadline),
            false => Ok(()),
        }
    }
}

/// Whether two handles are surely of one stream. That of a thread's own default stream is the same
/// in every thread.
fn is_one(last: usize, own: usize) -> bool {
    last == own && own != CuStream::PER_THREAD.0
}
