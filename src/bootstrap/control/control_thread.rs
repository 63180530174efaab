//! The thread behind a control: polls, never blocks, and is the only one that touches the sockets.

use super::member::Assembly;
use super::root::ControlRoot;
use super::*;
use crate::bootstrap::auth::poll_for;
use crate::bootstrap::framed_stream::{CLOSED, Frame, UNREACHABLE};
use crate::bootstrap::wire::{Reader, read_error};
use nix::poll::{PollFd, PollFlags};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Condvar;
use std::sync::atomic::AtomicBool;

// Kinds of control frames.
pub(super) const BEAT: u8 = 16;
pub(super) const CONTRIBUTION: u8 = 17;
pub(super) const RESULT: u8 = 18;
pub(super) const GATHER_FAILED: u8 = 19;
pub(super) const ANNOUNCE: u8 = 20;
pub(super) const GOODBYE: u8 = 21;
pub(super) const DEPARTED: u8 = 22;
pub(super) const SILENT: u8 = 23;
pub(super) const RETIRED: u8 = 24;

/// In the number of an exchange that a rank gives its part to: it has retired, and takes part in no other.
pub(super) const RETIRING: u64 = 1 << 63;

/// A silent peer is sent beats this often only: its buffers must not fill while it is stopped.
const SLOW_BEAT: Duration = Duration::from_secs(1);
/// Silence that is reported, where /proc cannot tell why.
const LONG_SILENCE: Duration = Duration::from_secs(5);

/// What the control and its monitor share.
pub(super) struct Shared {
    pub(super) rank: usize,
    pub(super) peers: Vec<PeerInfo>,
    pub(super) members: Vec<RankEntry>,
    pub(super) fault: Arc<Fault>,
    pub(super) has_left: Vec<AtomicBool>,
    pub(super) changed: Condvar,
    pub(super) beat: Duration,
    pub(super) notice: WarningHook,
    notes: Mutex<CallLog>,
    state: Mutex<State>,
    /// Writing to the first wakes the monitor, which polls the second.
    wake: (UnixStream, UnixStream),
}

#[derive(Default)]
pub(super) struct State {
    commands: Vec<Command>,
    /// The exchange that this rank waits for.
    pub(super) gather: Option<Gather>,
    /// The word that this rank has retired is with the kernel.
    pub(super) retired: bool,
    /// The goodbye is with the kernel.
    pub(super) farewell: bool,
    /// The monitor is gone.
    pub(super) ended: bool,
}

pub(super) struct Gather {
    pub(super) generation: u64,
    pub(super) outcome: Option<Result<Vec<Vec<u8>>>>,
    /// Ranks that have contributed, as the hub knows it; empty on others until it has said so.
    pub(super) present: Vec<bool>,
}

impl Gather {
    /// Ranks that have not contributed, seen from `rank`, which has; `None` if nobody has said.
    pub(super) fn missing(&self, rank: usize) -> Option<Vec<usize>> {
        let present = self.present.iter().enumerate();
        let absent = present.filter(|&(other, &here)| !here && other != rank);
        (!self.present.is_empty()).then(|| absent.map(|(other, _)| other).collect())
    }
}

/// What the control asks of its monitor.
pub(super) enum Command {
    Contribute(u64, Vec<u8>),
    Announce(Error),
    Retire,
    Leave,
    Close,
}

impl Shared {
    pub(super) fn new(
        rank: usize,
        members: Vec<RankEntry>,
        fault: Arc<Fault>,
        config: &Config,
        notice: WarningHook,
    ) -> Result<Shared> {
        let wake = UnixStream::pair()
            .and_then(|(a, b)| {
                a.set_nonblocking(true)?;
                b.set_nonblocking(true)?;
                Ok((a, b))
            })
            .map_err(|cause| Error::system("cannot make the control thread's alarm", cause))?;
        Ok(Shared {
            rank,
            peers: members.iter().map(|member| member.info.clone()).collect(),
            has_left: members.iter().map(|_| AtomicBool::new(false)).collect(),
            members,
            fault,
            changed: Condvar::new(),
            beat: config.heartbeat,
            notice,
            notes: Mutex::new(CallLog::new()),
            state: Mutex::default(),
            wake,
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    pub(super) fn notes(&self) -> MutexGuard<'_, CallLog> {
        self.notes
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    pub(super) fn command(&self, command: Command) {
        self.state().commands.push(command);
        // A full buffer wakes just as well.
        let _ = (&self.wake.0).write(&[1]);
    }

    /// Gives this rank's part to an exchange. That of one that retires has [`RETIRING`] in its number.
    pub(super) fn start_gather(&self, numbered: u64, bytes: Vec<u8>) {
        let present = match self.rank {
            0 => vec![false; self.peers.len()],
            _ => Vec::new(),
        };
        self.state().gather = Some(Gather {
            generation: numbered & !RETIRING,
            outcome: None,
            present,
        });
        self.command(Command::Contribute(numbered, bytes));
    }

    pub(super) fn finish_gather(&self, generation: u64, outcome: Result<Vec<Vec<u8>>>) {
        let mut state = self.state();
        if let Some(gather) = &mut state.gather
            && gather.generation == generation
            && gather.outcome.is_none()
        {
            gather.outcome = Some(outcome);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the exchange that this rank waits for, if it does.
    pub(super) fn fail_gather(&self, error: Error) {
        let generation = self.state().gather.as_ref().map(|gather| gather.generation);
        if let Some(generation) = generation {
            self.finish_gather(generation, Err(error));
        }
    }

    /// What the others are told of a reason that this rank gives.
    pub(super) fn report(&self, reason: &Error) -> Error {
        let me = &self.peers[self.rank];
        reason.clone().context(format!("{me} reports"))
    }

    pub(super) fn depart(&self, rank: usize) {
        if let Some(has_left) = self.has_left.get(rank) {
            // SYNC POINT has_left: what the rank sent before it left is on its way already.
            has_left.store(true, Ordering::Release);
        }
        self.changed.notify_all();
    }

    pub(super) fn is_departed(&self, rank: usize) -> bool {
        self.has_left[rank].load(Ordering::Relaxed)
    }
}

/// The connection to one rank.
pub(super) struct Link {
    pub(super) rank: usize,
    /// None once it is over.
    pub(super) channel: Option<FramedStream>,
    pub(super) goodbye: bool,
    pub(super) assembly: Assembly,
    heard: Instant,
    spoke: Instant,
    noticed: bool,
}

impl Link {
    pub(super) fn send(&mut self, kind: u8, body: &Arc<Body>) {
        if let Some(channel) = &mut self.channel {
            channel.queue(kind, body);
        }
    }
}

pub(super) struct ControlThread {
    pub(super) shared: Arc<Shared>,
    pub(super) links: Vec<Link>,
    /// What only rank 0 keeps.
    pub(super) hub: ControlRoot,
    next_beat: Instant,
    /// This rank takes no more part in anything.
    retired: bool,
    /// When to give up saying goodbye.
    leaving: Option<Instant>,
    closing: Option<Instant>,
    /// The hub left in good order and is gone.
    orphaned: bool,
    /// Every rank has been told of a failure.
    failed: bool,
}

impl ControlThread {
    pub(super) fn new(shared: Arc<Shared>) -> ControlThread {
        ControlThread {
            hub: ControlRoot::new(shared.peers.len()),
            shared,
            links: Vec::new(),
            next_beat: Instant::now(),
            retired: false,
            leaving: None,
            closing: None,
            orphaned: false,
            failed: false,
        }
    }

    pub(super) fn add_link(&mut self, rank: usize, channel: FramedStream) {
        let now = Instant::now();
        self.links.push(Link {
            rank,
            channel: Some(channel),
            goodbye: false,
            assembly: Assembly::default(),
            heard: now,
            spoke: now,
            noticed: false,
        });
    }

    pub(super) fn is_hub(&self) -> bool {
        self.shared.rank == 0
    }

    pub(super) fn run(mut self) {
        block_signals();
        while !self.is_finished() {
            let ready = self.sleep();
            // Reading comes before obeying: a failure that has arrived goes first.
            self.listen(&ready);
            self.obey();
            if Instant::now() >= self.next_beat {
                self.beat();
            }
            self.flush();
        }
        self.shared.state().ended = true;
        self.shared.changed.notify_all();
    }

    /// Waits for news or the next beat. Returns which links have some.
    fn sleep(&mut self) -> Vec<bool> {
        let limit = self.next_beat.saturating_duration_since(Instant::now());
        let ready = {
            let links = self.links.iter().filter_map(|link| link.channel.as_ref());
            let links = links.map(|channel| PollFd::new(channel.descriptor(), channel.events()));
            let wake = PollFd::new(self.shared.wake.1.as_fd(), PollFlags::POLLIN);
            let mut fds: Vec<PollFd<'_>> = std::iter::once(wake).chain(links).collect();
            poll_for(&mut fds, limit);
            let mut polled = fds.iter().skip(1).map(|fd| fd.any().unwrap_or(true));
            let links = self.links.iter();
            links
                .map(|link| link.channel.is_some() && polled.next().unwrap_or(false))
                .collect()
        };
        let mut alarm = [0; 64];
        while matches!((&self.shared.wake.1).read(&mut alarm), Ok(1..)) {}
        ready
    }

    /// Reads what has come on the ready links. Ends are dealt with last: what a rank reported
    /// before it went, and who else went at the same time, says more than the first end found.
    fn listen(&mut self, ready: &[bool]) {
        let mut ends = Vec::new();
        for at in (0..self.links.len()).filter(|&at| ready[at]) {
            let link = &mut self.links[at];
            let Some(channel) = &mut link.channel else {
                continue;
            };
            let mut frames = Vec::new();
            let end = channel.receive(&mut frames);
            if !frames.is_empty() {
                link.heard = Instant::now();
                link.noticed = false;
            }
            for frame in frames {
                if let Err(error) = self.handle(at, frame) {
                    ends.push((at, describe_end(&format!("nonsense: {}", error.message()))));
                }
            }
            if let Some(end) = end {
                ends.push((at, describe_end(&end)));
            }
        }
        self.lose(ends.into_iter());
    }

    fn handle(&mut self, at: usize, frame: Frame) -> Result<()> {
        if frame.kind == ANNOUNCE {
            let error = read_error(&frame.body)?;
            self.raise(error);
            if self.is_hub() {
                self.tell_all_but(Some(at), ANNOUNCE, &Body::new(frame.body));
            }
            return Ok(());
        }
        if self.is_hub() {
            self.handle_as_hub(at, frame)
        } else {
            self.handle_as_leaf(at, frame)
        }
    }

    /// Connections that are over, or processes that are, with what to say of the rank. Those
    /// without goodbye are failures.
    pub(super) fn lose(&mut self, ends: impl Iterator<Item = (usize, String)>) {
        let mut deaths = Vec::new();
        for (at, why) in ends {
            let shared = &self.shared;
            let link = &mut self.links[at];
            if link.channel.take().is_none() {
                continue;
            }
            if !link.goodbye {
                deaths.push(format!("{} {why}", shared.peers[link.rank]));
            } else if link.rank == 0 {
                self.orphaned = true;
                let error = Error::new(
                    ErrorKind::Remote,
                    format!(
                        "{} has left, and with it the control connections",
                        shared.peers[0]
                    ),
                );
                shared.fail_gather(error);
            }
        }
        // After our own goodbye, the others' ends are none of our business.
        if !deaths.is_empty() && (self.is_hub() || self.leaving.is_none()) {
            deaths.sort();
            self.fail(Error::new(ErrorKind::Remote, deaths.join("; ")));
        }
    }

    /// The communicator has failed: here, and everywhere.
    pub(super) fn fail(&mut self, error: Error) {
        let body = Body::new(write_error(&error));
        self.raise(error);
        self.tell_all_but(None, ANNOUNCE, &body);
    }

    /// After a rank's own goodbye its fault stays as it is: communicators split from this one
    /// watch it too. So it does when the rank has retired: only its last meeting ends.
    fn raise(&mut self, error: Error) {
        self.failed = true;
        if self.retired {
            self.shared.fail_gather(error);
        } else if self.leaving.is_none() {
            pass_on(&self.shared.fault, error, self.shared.beat);
        }
        self.shared.changed.notify_all();
    }

    /// Tells the others of a fault that came from elsewhere, from the communicator that this one was
    /// split from for instance: nobody else here may look at it for a long time.
    fn report_own(&mut self) {
        if self.failed || self.retired || self.leaving.is_some() {
            return;
        }
        if let Err(reason) = self.shared.fault.check() {
            self.failed = true;
            let told = self.shared.report(&reason);
            self.tell_all_but(None, ANNOUNCE, &Body::new(write_error(&told)));
        }
    }

    pub(super) fn tell_all_but(&mut self, at: Option<usize>, kind: u8, body: &Arc<Body>) {
        for (_, link) in self
            .links
            .iter_mut()
            .enumerate()
            .filter(|(i, _)| Some(*i) != at)
        {
            link.send(kind, body);
        }
    }

    fn obey(&mut self) {
        let commands = std::mem::take(&mut self.shared.state().commands);
        for command in commands {
            match command {
                Command::Contribute(numbered, bytes) if self.is_hub() => {
                    self.contribute(self.shared.rank, numbered, bytes);
                }
                Command::Contribute(numbered, bytes) => self.send_contribution(numbered, &bytes),
                // What this rank was told, or has told, the others know. What becomes of a rank that
                // has retired is none of their business.
                Command::Announce(_) if self.failed || self.retired => {}
                Command::Announce(error) => {
                    self.failed = true;
                    self.tell_all_but(None, ANNOUNCE, &Body::new(write_error(&error)));
                }
                Command::Retire => {
                    self.retired = true;
                    // Calls made since the last beat are compared all the same.
                    self.beat();
                    self.tell_all_but(None, RETIRED, &Body::new(Vec::new()));
                    if self.is_hub() {
                        self.leave_gather(0);
                    }
                }
                Command::Leave => {
                    self.leaving = Some(Instant::now() + CLOSE_TIMEOUT);
                    // Calls made since the last beat are compared all the same.
                    self.beat();
                    self.tell_all_but(None, GOODBYE, &Body::new(Vec::new()));
                    if self.is_hub() {
                        self.leave_gather(0);
                    }
                }
                Command::Close => self.closing = Some(Instant::now() + CLOSE_TIMEOUT),
            }
        }
    }

    fn flush(&mut self) {
        let mut flushed = true;
        for channel in self
            .links
            .iter_mut()
            .filter_map(|link| link.channel.as_mut())
        {
            channel.flush();
            flushed &= channel.is_flushed();
        }
        if self.retired && flushed && !std::mem::replace(&mut self.shared.state().retired, true) {
            self.shared.changed.notify_all();
        }
        let late = self.leaving.is_some_and(|until| Instant::now() >= until);
        if self.leaving.is_some() && (flushed || late) {
            let farewell = std::mem::replace(&mut self.shared.state().farewell, true);
            if !farewell {
                self.shared.changed.notify_all();
                if !self.is_hub() {
                    let channels = self
                        .links
                        .iter_mut()
                        .filter_map(|link| link.channel.as_mut());
                    channels.for_each(FramedStream::finish);
                }
            }
        }
        // The next look at whether this is the end must not wait for a beat of a minute.
        if let Some(until) = self.leaving.or(self.closing)
            && until > Instant::now()
        {
            self.next_beat = self.next_beat.min(until);
        }
    }

    fn is_finished(&self) -> bool {
        let now = Instant::now();
        let mut channels = self.links.iter().filter_map(|link| link.channel.as_ref());
        if let Some(until) = self.closing {
            return now >= until || channels.all(FramedStream::is_flushed);
        }
        match self.leaving {
            None => false,
            Some(_) if self.links.iter().all(|link| link.channel.is_none()) => true,
            // The hub serves on, unless there is nothing left to watch over.
            Some(until) if self.is_hub() => {
                (self.failed || self.shared.fault.is_raised())
                    && (now >= until || channels.all(FramedStream::is_flushed))
            }
            Some(until) => now >= until,
        }
    }

    fn beat(&mut self) {
        self.report_own();
        let now = Instant::now();
        let beat = self.shared.beat;
        self.next_beat = now + beat;
        let body = Body::new(if self.is_hub() {
            self.hub_beat()
        } else {
            self.leaf_beat()
        });
        let mut ends = Vec::new();
        let mut silent = Vec::new();
        let me = &self.shared.members[self.shared.rank];
        for (at, link) in self.links.iter_mut().enumerate() {
            if link.channel.is_none() {
                continue;
            }
            let silence = now.duration_since(link.heard);
            if silence < SLOW_BEAT.max(10 * beat) || now.duration_since(link.spoke) >= SLOW_BEAT {
                link.spoke = now;
                link.send(BEAT, &body);
            }
            if silence <= beat + beat / 2 {
                continue;
            }
            let peer = &self.shared.peers[link.rank];
            match look(me, &self.shared.members[link.rank]) {
                Fate::Dead(why) => ends.push((at, format!("died: {why}"))),
                // Nobody waits for it.
                _ if link.goodbye => {}
                Fate::Stopped if !link.noticed => {
                    link.noticed = true;
                    self.shared.notice.say(&format!(
                        "{peer} is stopped (state T); calls wait for it until their timeout"
                    ));
                }
                Fate::Alive if !link.noticed && silence >= LONG_SILENCE.max(10 * beat) => {
                    link.noticed = true;
                    self.shared.notice.say(&format!(
                        "{peer} has been silent for {:.1} s; its connection stands",
                        silence.as_secs_f64()
                    ));
                }
                _ => silent.push(link.rank),
            }
        }
        self.lose(ends.into_iter());
        if self.is_hub() {
            self.ask_about(&silent);
        }
        if self.orphaned {
            self.look_around();
        }
    }
}

/// What the end of a connection says about its rank.
fn describe_end(end: &str) -> String {
    match end {
        CLOSED => "died: its control connection closed".into(),
        UNREACHABLE => "is lost: its host does not answer, it is down or the link is cut".into(),
        other => format!("died: its control connection ended: {other}"),
    }
}

/// The first 8 bytes of a frame about an exchange.
pub(super) fn read_generation<'a>(body: &'a [u8]) -> Result<(u64, Reader<'a>)> {
    let mut reader = Reader(body);
    Ok((reader.u64()?, reader))
}
