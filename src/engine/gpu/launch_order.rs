//! The order of one communicator's calls over the caller's streams, and over graphs.
//!
//! All launches of a communicator run one after the other, whatever streams they are on: when the
//! stream changes, the new one waits for an event behind the last launch. Within a stream capture
//! the event becomes an edge of the graph. Each replay of a graph takes its place among the calls
//! when it is launched: its first call waits for that event as it is then, and it records the event
//! behind its last call. `CINCH_GRAPH_MIXING=0` leaves that to the caller, and saves each replay the
//! two nodes.

use crate::error::{Error, Result};
use crate::gpu::{Context, EndMark, Event, Stream};
use crate::sys::cuda::CuStream;
use std::sync::Arc;
use std::time::Duration;

/// Where the last launches were queued, and what later ones wait for.
#[derive(Debug)]
pub(super) struct LaunchOrder {
    context: Arc<Context>,
    /// Whether replays are ordered with what is outside of their graph.
    mixes: bool,
    /// The stream of the last launch that was no capture's.
    last: Option<Queue>,
    /// The one that was entered last for one that is none.
    entered: Option<Queue>,
    /// Behind that launch, or behind the last replay if it was launched later.
    launched: Arc<Event>,
    /// Captures whose graphs there are, that of the last captured launch at the end.
    captures: Vec<Captured>,
    /// Whether there are or were any.
    is_captured: bool,
}

/// A stream outside captures, told from others.
#[derive(Clone, Copy, Debug)]
struct Queue {
    handle: usize,
    /// Of no default stream: those have handles that no other gets.
    id: Option<u64>,
}

/// What one capture has of the communicator.
#[derive(Debug)]
struct Captured {
    id: u64,
    /// The stream of the last launch in it, and an event behind that.
    stream: Option<usize>,
    reached: Event,
    /// Where replays record `launched`.
    end: Option<EndMark>,
    /// Others have it as long as there is the graph.
    kept: Arc<()>,
}

/// What a graph keeps, so that its replays have a place among the calls.
#[derive(Debug)]
pub(super) struct ReplayPlace {
    _launched: Arc<Event>,
    _captured: Option<Arc<()>>,
}

impl LaunchOrder {
    pub(super) fn new(context: &Arc<Context>, mixes: bool) -> Result<LaunchOrder> {
        Ok(LaunchOrder {
            context: context.clone(),
            mixes,
            last: None,
            entered: None,
            launched: Arc::new(Event::new(context)?),
            captures: Vec::new(),
            is_captured: false,
        })
    }

    /// The event behind the last launch outside captures, or the last replay.
    pub(super) fn launched(&self) -> &Arc<Event> {
        &self.launched
    }

    /// What the graph of a capture that a launch has just entered is to keep.
    pub(super) fn kept_for_replays(&self, capture: u64) -> ReplayPlace {
        let captured = self.captures.iter().find(|one| one.id == capture);
        ReplayPlace {
            _launched: self.launched.clone(),
            _captured: captured.map(|one| one.kept.clone()),
        }
    }

    /// Whether replays may have been launched that are to be ordered with other calls.
    fn is_replayed(&self) -> bool {
        self.mixes && self.is_captured
    }

    /// Lets what is queued on `stream` from here on run behind the last launch.
    pub(super) fn enter(&mut self, stream: &Stream, capture: Option<u64>) -> Result<()> {
        let Some(id) = capture else {
            let own = Queue::of(stream);
            self.entered = Some(own);
            // The last replay's stream is not known.
            let follows = self.last.is_some_and(|last| !last.is_surely(own));
            return match follows || self.is_replayed() {
                true => stream.wait_event(&self.launched),
                false => Ok(()),
            };
        };
        let own = stream.handle().0;
        if let Some(found) = self.captures.iter().position(|one| one.id == id) {
            let captured = self.captures.remove(found);
            let follows = captured.stream.is_some_and(|last| !is_one(last, own));
            let ordered = match follows {
                true => stream.wait_event(&captured.reached),
                false => Ok(()),
            };
            self.captures.push(captured);
            return ordered;
        }
        self.captures.retain(|one| Arc::strong_count(&one.kept) > 1);
        self.is_captured = true;
        self.captures.push(Captured {
            id,
            stream: None,
            reached: Event::new(&self.context)?,
            end: None,
            kept: Arc::default(),
        });
        match self.mixes {
            true => stream.wait_event_in_replays(&self.launched),
            false => Ok(()),
        }
    }

    /// Marks the launch that was just queued on `stream`, which it has entered.
    pub(super) fn leave(&mut self, stream: &Stream, capture: Option<u64>) -> Result<()> {
        let own = stream.handle().0;
        match (capture, self.captures.last_mut()) {
            (None, _) => {
                self.launched.record(stream)?;
                self.last = self.entered;
            }
            (Some(id), Some(captured)) if captured.id == id => {
                captured.reached.record(stream)?;
                captured.stream = Some(own);
                if self.mixes {
                    captured.end = Some(stream.mark_end(&self.launched, captured.end.take())?);
                }
            }
            (Some(_), _) => {
                return Err(Error::internal(
                    "a launch left a capture that none has entered",
                ));
            }
        }
        Ok(())
    }

    /// Waits until all launches outside captures have ended, and replays if they are ordered with
    /// those, at most `deadline`.
    pub(super) fn wait(&self, deadline: Duration) -> Result<()> {
        match self.last.is_some() || self.is_replayed() {
            true => self.launched.wait(deadline),
            false => Ok(()),
        }
    }
}

impl Queue {
    fn of(stream: &Stream) -> Queue {
        let handle = stream.handle().0;
        let id = match handle {
            0..=2 => None,
            _ => stream.id(),
        };
        Queue { handle, id }
    }

    /// Whether both are the same stream, so far as can be known: a handle alone may have been given to
    /// another stream meanwhile.
    fn is_surely(self, own: Queue) -> bool {
        let named = match self.handle {
            0 | 1 => true,
            _ => self.id.is_some() && self.id == own.id,
        };
        is_one(self.handle, own.handle) && named
    }
}

/// Whether two handles that are both in use are surely of one stream. That of a thread's own default
/// stream is the same in every thread.
fn is_one(last: usize, own: usize) -> bool {
    last == own && own != CuStream::PER_THREAD.0
}
