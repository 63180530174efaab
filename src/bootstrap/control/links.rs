//! The framed connections of one rank's control thread, and the handling of their ends.

use super::frames::{ANNOUNCE, Assembly, LOST, rank_body};
use super::shared::SharedControl;
use crate::bootstrap::framed_stream::{self, Body, FramedStream, UNREACHABLE};
use crate::bootstrap::raise_reported;
use crate::error::{Error, ErrorKind};
use crate::sys::socket;
use crate::wire::Wire;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The connection to one rank.
pub(super) struct ControlLink {
    pub(super) rank: usize,
    /// `None` once the connection has ended.
    pub(super) stream: Option<FramedStream>,
    /// Whether the rank has closed or left: the end of its connection is no failure.
    pub(super) has_closed: bool,
    /// Why the connection ended before the rank closed, as a sentence that names the rank.
    pub(super) death: Option<String>,
    pub(super) assembly: Assembly,
    pub(super) last_received: Instant,
    pub(super) last_heartbeat: Instant,
    /// Whether the silence of the rank has been reported.
    pub(super) warned: bool,
}

impl ControlLink {
    fn new(rank: usize, stream: FramedStream) -> ControlLink {
        let now = Instant::now();
        ControlLink {
            rank,
            stream: Some(stream),
            has_closed: false,
            death: None,
            assembly: Assembly::default(),
            last_received: now,
            last_heartbeat: now,
            warned: false,
        }
    }

    /// Returns whether the other end's kernel has acknowledged nothing for `limit`, although data waits.
    pub(super) fn is_unacknowledged(&self, limit: Duration) -> bool {
        let socket = self.stream.as_ref().map(FramedStream::socket);
        let silence = socket.and_then(|socket| socket::unacknowledged_time(socket));
        silence.is_some_and(|silence| silence >= limit)
    }

    pub(super) fn send(&mut self, kind: u8, body: &Arc<Body>) {
        if let Some(stream) = &mut self.stream {
            stream.queue(kind, body);
        }
    }
}

/// All connections of a rank: of the root to every member, of a member to the root.
pub(super) struct ControlLinks {
    pub(super) shared: Arc<SharedControl>,
    pub(super) links: Vec<ControlLink>,
    /// Whether this rank makes no more calls.
    pub(super) closed: bool,
    /// Deadline of the attempts to send [`super::frames::LEFT`].
    pub(super) leave_deadline: Option<Instant>,
    /// Whether the root has left and its connection has ended.
    pub(super) lost_root: bool,
    /// Whether all ranks know of a failure.
    pub(super) failed: bool,
}

impl ControlLinks {
    pub(super) fn new(shared: Arc<SharedControl>, streams: Vec<(usize, FramedStream)>) -> Self {
        let links = streams.into_iter();
        ControlLinks {
            shared,
            links: links
                .map(|(rank, stream)| ControlLink::new(rank, stream))
                .collect(),
            closed: false,
            leave_deadline: None,
            lost_root: false,
            failed: false,
        }
    }

    pub(super) fn is_root(&self) -> bool {
        self.shared.rank == 0
    }

    /// Returns the connections that have not ended.
    pub(super) fn streams(&mut self) -> impl Iterator<Item = &mut FramedStream> {
        self.links.iter_mut().flat_map(|link| &mut link.stream)
    }

    /// Returns whether the kernel has taken all frames.
    pub(super) fn is_flushed(&self) -> bool {
        let mut streams = self.links.iter().flat_map(|link| &link.stream);
        streams.all(FramedStream::is_flushed)
    }

    /// Sends a frame on every connection but the one at index `except`.
    pub(super) fn send_all_but(&mut self, except: Option<usize>, kind: u8, body: &Arc<Body>) {
        for (at, link) in self.links.iter_mut().enumerate() {
            if Some(at) != except {
                link.send(kind, body);
            }
        }
    }

    pub(super) fn send_all(&mut self, kind: u8, body: &Arc<Body>) {
        self.send_all_but(None, kind, body);
    }

    /// Handles connections that have ended, and connections of processes that have ended. Each
    /// comes with a phrase about its rank. A rank that neither closed nor left has failed.
    pub(super) fn handle_ends(&mut self, ends: Vec<(usize, String)>) {
        let (mut deaths, mut lost) = (Vec::new(), Vec::new());
        for (at, why) in ends {
            let shared = &self.shared;
            let link = &mut self.links[at];
            if link.stream.take().is_none() {
                continue;
            }
            if !link.has_closed {
                let death = format!("{} {why}", shared.peers[link.rank]);
                link.death = Some(death.clone());
                deaths.push(death);
                lost.push(link.rank);
            } else if link.rank == 0 {
                self.lost_root = true;
                let root = &shared.peers[0];
                let what = format!("{root} has left, and with it the control connections");
                shared.fail_gather(Error::new(ErrorKind::Remote, what));
            }
        }
        lost.into_iter()
            .for_each(|rank| self.record_lost(rank, None));
        // After this rank has left, failures concern only the ranks that stay.
        if !deaths.is_empty() && (self.is_root() || self.leave_deadline.is_none()) {
            deaths.sort();
            self.fail(Error::new(ErrorKind::Remote, deaths.join("; ")));
        }
    }

    /// Records that `rank` died or is unreachable, and sends that on every connection but the one at
    /// index `except`.
    pub(super) fn record_lost(&mut self, rank: usize, except: Option<usize>) {
        self.shared.set_lost(rank);
        self.send_all_but(except, LOST, &rank_body(rank));
    }

    /// Fails the communicator here and on all other ranks.
    pub(super) fn fail(&mut self, error: Error) {
        let body = Body::new(error.to_bytes());
        self.raise(error);
        self.send_all(ANNOUNCE, &body);
    }

    /// Fails the communicator on this rank. After this rank has closed or left, the error ends only
    /// a closing all-gather. The fault then stays as it is: a raise would also fail the
    /// communicators that were split from this communicator.
    pub(super) fn raise(&mut self, error: Error) {
        self.failed = true;
        if self.closed {
            self.shared.fail_gather(error);
        } else if self.leave_deadline.is_none() {
            raise_reported(&self.shared.fault, error, self.shared.heartbeat);
        }
        self.shared.changed.notify_all();
    }

    /// Announces an error to the other ranks, unless they know of a failure.
    pub(super) fn announce(&mut self, error: &Error) {
        if !self.failed && !self.closed {
            self.failed = true;
            self.send_all(ANNOUNCE, &Body::new(error.to_bytes()));
        }
    }

    /// Announces a fault that was raised elsewhere, such as by the parent communicator. Without
    /// this, other ranks could wait until another thread of this rank checks the fault.
    pub(super) fn announce_fault(&mut self) {
        if self.leave_deadline.is_none()
            && let Err(reason) = self.shared.fault.check()
        {
            let report = self.shared.report(&reason);
            self.announce(&report);
        }
    }
}

/// Describes the rank whose connection ended with `end`.
pub(super) fn describe_end(end: &str) -> String {
    match end {
        framed_stream::CLOSED => "died: its control connection closed".into(),
        UNREACHABLE => "is lost: its host does not answer, it is down or the link is cut".into(),
        other => format!("died: its control connection ended: {other}"),
    }
}
