//! The thread behind a control plane: polls, never blocks, and alone touches the sockets.

use super::frames::{ANNOUNCE, CLOSED, HEARTBEAT, LEFT};
use super::links::{ControlLinks, describe_end};
use super::root::ControlRoot;
use super::shared::{ControlCommand, SharedControl};
use super::{CLOSE_TIMEOUT, member};
use crate::bootstrap::auth::poll_for;
use crate::bootstrap::framed_stream::{Body, Frame, FramedStream, UNREACHABLE};
use crate::bootstrap::process::ProcessState;
use crate::error::{Error, Result};
use crate::sys::clock;
use crate::sys::log::{self, LogLabel};
use crate::sys::process::block_signals;
use crate::wire::Wire;
use nix::poll::{PollFd, PollFlags};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Interval of heartbeats to a silent peer. A shorter interval would fill the socket buffers of a
/// stopped process.
const SLOW_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Silence after which a rank is reported if /proc does not explain the silence.
const SILENCE_WARNING_TIMEOUT: Duration = Duration::from_secs(4);

/// Longest time without an acknowledgement from the kernel of another host. The kernel of a stopped rank
/// answers, even if the rank does not read.
const CUT_LINK_TIMEOUT: Duration = Duration::from_secs(3);
/// Number of heartbeats after which a silent root's report of contributions is out of date.
const SILENT_HEARTBEATS: u32 = 5;

/// Serves the control connections of one rank.
pub(super) struct ControlThread {
    node: ControlLinks,
    /// State of rank 0; `None` on members.
    root: Option<ControlRoot>,
    next_heartbeat: Instant,
    /// Deadline of the last flush, after which the thread ends without announcing that this rank
    /// has left.
    end_deadline: Option<Instant>,
}

impl ControlThread {
    pub(super) fn new(
        shared: Arc<SharedControl>,
        streams: Vec<(usize, FramedStream)>,
    ) -> ControlThread {
        let root = (shared.rank == 0).then(|| ControlRoot::new(shared.peers.len()));
        ControlThread {
            node: ControlLinks::new(shared, streams),
            root,
            next_heartbeat: Instant::now(),
            end_deadline: None,
        }
    }

    /// Returns the connections of a thread that could not start.
    pub(super) fn into_streams(self) -> Vec<FramedStream> {
        let links = self.node.links.into_iter();
        links.filter_map(|link| link.stream).collect()
    }

    /// Serves until this rank has left or ended; see [`super`] for the root.
    pub(super) fn run(mut self) {
        block_signals();
        let _label = log::label(LogLabel {
            rank: self.node.shared.rank,
            communicator: self.node.shared.name.clone(),
        });
        while !self.is_finished() {
            let ready = self.poll();
            clock::tick();
            // Reports of failures that have arrived come before commands of this rank.
            self.receive(&ready);
            self.run_commands();
            if Instant::now() >= self.next_heartbeat {
                self.heartbeat();
            }
            self.flush();
        }
        self.node.shared.state().ended = true;
        self.node.shared.changed.notify_all();
    }

    /// Waits for frames, a command or the next heartbeat. Returns which links are ready.
    fn poll(&self) -> Vec<bool> {
        let limit = self
            .next_heartbeat
            .saturating_duration_since(Instant::now());
        let links = &self.node.links;
        let streams = links.iter().filter_map(|link| link.stream.as_ref());
        let streams = streams.map(|stream| PollFd::new(stream.descriptor(), stream.events()));
        let alarm = PollFd::new(self.node.shared.alarm(), PollFlags::POLLIN);
        let reconnect = self.node.shared.reconnect();
        let arrivals = reconnect.iter().flat_map(|listener| listener.descriptors());
        let own = std::iter::once(alarm).chain(streams);
        let mut fds: Vec<PollFd<'_>> = own.chain(arrivals).collect();
        poll_for(&mut fds, limit);
        if let Some(listener) = &reconnect {
            listener.drop_arrivals();
        }
        let mut polled = fds.iter().skip(1).map(|fd| fd.any().unwrap_or(true));
        let ready = links
            .iter()
            .map(|link| link.stream.is_some() && polled.next().unwrap_or(false))
            .collect();
        self.node.shared.clear_alarm();
        ready
    }

    /// Reads the ready links, and only then handles connections that have ended. Reports that a
    /// rank sent before its end explain more than the end. Connections that ended together are
    /// reported together.
    fn receive(&mut self, ready: &[bool]) {
        let mut ends = Vec::new();
        for at in (0..self.node.links.len()).filter(|&at| ready[at]) {
            let link = &mut self.node.links[at];
            let Some(stream) = &mut link.stream else {
                continue;
            };
            let mut frames = Vec::new();
            let end = stream.receive(&mut frames);
            if !frames.is_empty() {
                link.last_received = Instant::now();
                link.warned = false;
            }
            for frame in frames {
                if let Err(error) = self.handle(at, &frame) {
                    ends.push((
                        at,
                        describe_end(&format!("invalid data: {}", error.message())),
                    ));
                }
            }
            ends.extend(end.map(|end| (at, describe_end(&end))));
        }
        if !ends.is_empty() {
            // A rank that gave up for the same reason as this rank has not died.
            self.node.announce_fault();
        }
        self.node.handle_ends(ends);
    }

    fn handle(&mut self, at: usize, frame: &Frame) -> Result<()> {
        let node = &mut self.node;
        if frame.kind == ANNOUNCE {
            node.raise(Error::from_bytes(&frame.body)?);
            if node.is_root() {
                node.send_all_but(Some(at), ANNOUNCE, &Body::new(frame.body.clone()));
            }
            return Ok(());
        }
        match &mut self.root {
            Some(root) => root.handle(node, at, frame),
            None => member::handle(node, at, frame),
        }
    }

    fn run_commands(&mut self) {
        for command in self.node.shared.take_commands() {
            match command {
                ControlCommand::Contribute(numbered, bytes) => match &mut self.root {
                    Some(root) => root.contribute(&mut self.node, 0, numbered, bytes),
                    None => member::contribute(&mut self.node, numbered, &bytes),
                },
                ControlCommand::Announce(error) => self.node.announce(&error),
                ControlCommand::Close => {
                    self.node.closed = true;
                    self.end_calls(CLOSED);
                }
                ControlCommand::Leave => {
                    self.node.shared.set_reconnect(None);
                    self.node.leave_deadline = Some(Instant::now() + CLOSE_TIMEOUT);
                    self.end_calls(LEFT);
                }
                ControlCommand::Wake => {}
                #[cfg(test)]
                ControlCommand::Panic => panic!("a test asked for it"),
                ControlCommand::End => {
                    self.node.shared.set_reconnect(None);
                    self.end_deadline = Some(Instant::now() + CLOSE_TIMEOUT);
                }
            }
        }
    }

    /// Sends the calls since the last heartbeat, then a frame of `kind`, after which this rank
    /// makes no more calls.
    fn end_calls(&mut self, kind: u8) {
        self.heartbeat();
        self.node.send_all(kind, &Body::new(Vec::new()));
        if let Some(root) = &mut self.root {
            root.leave_gather(&mut self.node, 0);
        }
    }

    fn flush(&mut self) {
        self.node.streams().for_each(FramedStream::flush);
        let flushed = self.node.is_flushed();
        let shared = &self.node.shared;
        if self.node.closed && flushed && !std::mem::replace(&mut shared.state().closed_sent, true)
        {
            shared.changed.notify_all();
        }
        if let Some(deadline) = self.node.leave_deadline
            && (flushed || Instant::now() >= deadline)
            && !std::mem::replace(&mut shared.state().left_sent, true)
        {
            shared.changed.notify_all();
            if !self.node.is_root() {
                self.node.streams().for_each(FramedStream::finish);
            }
        }
        // Wakes the thread at the deadline, even if the heartbeat interval is a minute.
        if let Some(deadline) = self.node.leave_deadline.or(self.end_deadline)
            && deadline > Instant::now()
        {
            self.next_heartbeat = self.next_heartbeat.min(deadline);
        }
    }

    fn is_finished(&self) -> bool {
        let (now, node) = (Instant::now(), &self.node);
        if let Some(deadline) = self.end_deadline {
            return now >= deadline || node.is_flushed();
        }
        match node.leave_deadline {
            None => false,
            Some(_) if node.links.iter().all(|link| link.stream.is_none()) => true,
            // The root serves on until the communicator has failed.
            Some(deadline) if node.is_root() => {
                (node.failed || node.shared.fault.is_raised())
                    && (now >= deadline || node.is_flushed())
            }
            Some(deadline) => now >= deadline,
        }
    }

    /// Sends a heartbeat, and looks up the processes of silent ranks.
    fn heartbeat(&mut self) {
        self.node.announce_fault();
        let now = Instant::now();
        self.next_heartbeat = now + self.node.shared.heartbeat;
        let body = Body::new(match &mut self.root {
            Some(root) => root.heartbeat(&mut self.node),
            None => member::heartbeat(&self.node),
        });
        let (silent, ends) = self.check_silence(&body, now);
        self.node.handle_ends(ends);
        if let Some(root) = &mut self.root {
            root.request_lookups(&mut self.node, &silent);
        }
        if self.node.lost_root {
            member::find_ended_processes(&self.node);
        }
    }

    /// Sends the heartbeat `body` on each link whose next heartbeat is due. Returns the ranks whose
    /// silence is unexplained, and the links of ranks whose processes have ended.
    fn check_silence(
        &mut self,
        body: &Arc<Body>,
        now: Instant,
    ) -> (Vec<usize>, Vec<(usize, String)>) {
        let (mut silent, mut ends) = (Vec::new(), Vec::new());
        let shared = &self.node.shared;
        let heartbeat = shared.heartbeat;
        let me = &shared.members[shared.rank];
        for (at, link) in self.node.links.iter_mut().enumerate() {
            if link.stream.is_none() {
                continue;
            }
            let silence = now.duration_since(link.last_received);
            if link.rank == 0 {
                let is_silent = silence > SILENT_HEARTBEATS * heartbeat;
                shared.root_is_silent.store(is_silent, Ordering::Relaxed);
            }
            if silence < SLOW_HEARTBEAT_INTERVAL.max(10 * heartbeat)
                || now.duration_since(link.last_heartbeat) >= SLOW_HEARTBEAT_INTERVAL
            {
                link.last_heartbeat = now;
                link.send(HEARTBEAT, body);
            }
            if silence <= heartbeat + heartbeat / 2 {
                continue;
            }
            if silence >= CUT_LINK_TIMEOUT
                && shared.peers[link.rank].host_id != me.info.host_id
                && link.is_unacknowledged(CUT_LINK_TIMEOUT)
            {
                ends.push((at, describe_end(UNREACHABLE)));
                continue;
            }
            let peer = &shared.peers[link.rank];
            let warning = match me.state_of(&shared.members[link.rank]) {
                ProcessState::Ended(why) => {
                    ends.push((at, format!("died: {why}")));
                    continue;
                }
                // A rank that has closed is not reported as silent, because no call waits for it.
                _ if link.has_closed => continue,
                ProcessState::Stopped if !link.warned => {
                    format!("{peer} is stopped (state T); calls wait for it until their timeout")
                }
                ProcessState::Running
                    if !link.warned && silence >= SILENCE_WARNING_TIMEOUT.max(10 * heartbeat) =>
                {
                    let silence = silence.as_secs_f64();
                    format!("{peer} has been silent for {silence:.1} s; its connection stands")
                }
                _ => {
                    silent.push(link.rank);
                    continue;
                }
            };
            link.warned = true;
            shared.warnings.warn(&warning);
        }
        (silent, ends)
    }
}
