//! Launch order: keeps one order of a communicator's calls over all of the caller's streams and graphs.
//!
//! All launches of a communicator run one after the other, whatever their streams. When the stream changes,
//! the new stream waits for an event behind the last launch. Within a stream capture the event becomes an
//! edge of the graph. A graph's replay joins the order when it is launched. Its first call waits for the last
//! recording of the event, and its end records the event. `CINCH_GRAPH_MIXING=0` leaves the order of replays
//! to the caller, and saves each replay two nodes.

use crate::error::{Error, Result};
use crate::gpu::{Context, EndMark, Event, Stream};
use crate::sys::cuda::PER_THREAD_STREAM;
use std::sync::Arc;
use std::time::Duration;

/// Streams of the last launches, and the events that later launches wait for.
#[derive(Debug)]
pub(super) struct LaunchOrder {
    context: Arc<Context>,
    /// Whether replays are ordered with calls outside their graph (`CINCH_GRAPH_MIXING`).
    mixes: bool,
    /// Stream of the last launch outside captures.
    last: Option<StreamIdentity>,
    /// Stream of the call that is being launched, if it is outside captures.
    entered: Option<StreamIdentity>,
    /// Event behind the last launch outside captures, or behind a replay that ran after it.
    launched: Arc<Event>,
    /// State of captures whose graphs exist. The capture of the last captured launch is the last
    /// entry.
    captures: Vec<CaptureState>,
    /// Whether any call was ever captured.
    is_captured: bool,
}

/// Identity of a stream outside captures.
#[derive(Clone, Copy, Debug)]
struct StreamIdentity {
    handle: usize,
    /// The driver's unique id; `None` for default streams, whose handles are unique.
    id: Option<u64>,
}

/// State of one stream capture.
#[derive(Debug)]
struct CaptureState {
    id: u64,
    /// Stream of the capture's last launch, and the event behind that launch.
    stream: Option<usize>,
    reached: Event,
    /// Graph node in which replays record `launched`.
    end: Option<EndMark>,
    /// Reference count of the graph: the graph holds a second reference until it is destroyed.
    kept: Arc<()>,
}

/// Resources that a graph holds, because its replays use them to join the launch order.
#[derive(Debug)]
pub(super) struct ReplayOrder {
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

    /// Returns the event behind the last launch outside captures, or behind a replay that ran after
    /// it.
    pub(super) fn launched(&self) -> &Arc<Event> {
        &self.launched
    }

    /// Returns the resources that the graph of `capture` must hold. [`LaunchOrder::enter`] has
    /// entered this capture.
    pub(super) fn kept_for_replays(&self, capture: u64) -> ReplayOrder {
        let captured = self.captures.iter().find(|one| one.id == capture);
        ReplayOrder {
            _launched: self.launched.clone(),
            _captured: captured.map(|one| one.kept.clone()),
        }
    }

    /// Returns whether a graph with this communicator's calls may have been replayed, so that later
    /// launches must wait for the replay.
    fn is_replayed(&self) -> bool {
        self.mixes && self.is_captured
    }

    /// Makes the next launch on `stream` run after the last launch. Call it before the launch, and
    /// [`LaunchOrder::leave`] after it.
    pub(super) fn enter(&mut self, stream: &Stream, capture: Option<u64>) -> Result<()> {
        let Some(id) = capture else {
            let own = StreamIdentity::of(stream);
            self.entered = Some(own);
            // A replay may have run on any stream, so even the last launch's stream must wait for
            // the event.
            let follows = self.last.is_some_and(|last| !last.is_same_stream(own));
            return match follows || self.is_replayed() {
                true => stream.wait_event(&self.launched),
                false => Ok(()),
            };
        };
        let own = stream.handle().addr();
        if let Some(found) = self.captures.iter().position(|one| one.id == id) {
            let captured = self.captures.remove(found);
            let follows = captured
                .stream
                .is_some_and(|last| !is_same_handle(last, own));
            let ordered = match follows {
                true => stream.wait_event(&captured.reached),
                false => Ok(()),
            };
            self.captures.push(captured);
            return ordered;
        }
        self.captures.retain(|one| Arc::strong_count(&one.kept) > 1);
        self.is_captured = true;
        self.captures.push(CaptureState {
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

    /// Records the launch that was just queued on `stream`, which [`LaunchOrder::enter`] was called
    /// with.
    pub(super) fn leave(&mut self, stream: &Stream, capture: Option<u64>) -> Result<()> {
        let own = stream.handle().addr();
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

    /// Waits at most `deadline` until all launches outside captures and all ordered replays have ended.
    pub(super) fn wait(&self, deadline: Duration) -> Result<()> {
        match self.last.is_some() || self.is_replayed() {
            true => self.launched.wait(deadline),
            false => Ok(()),
        }
    }
}

impl StreamIdentity {
    fn of(stream: &Stream) -> StreamIdentity {
        let handle = stream.handle().addr();
        let id = match handle {
            0..=2 => None,
            _ => stream.id(),
        };
        StreamIdentity { handle, id }
    }

    /// Returns whether both are certainly the same stream. Equal handles do not prove it, because the driver
    /// may reuse a destroyed stream's handle.
    fn is_same_stream(self, own: StreamIdentity) -> bool {
        let named = match self.handle {
            0 | 1 => true,
            _ => self.id.is_some() && self.id == own.id,
        };
        is_same_handle(self.handle, own.handle) && named
    }
}

/// Returns whether two valid handles certainly denote one stream. The per-thread default streams of all
/// threads share one handle, so that handle proves nothing.
fn is_same_handle(last: usize, own: usize) -> bool {
    last == own && own != PER_THREAD_STREAM.addr()
}
