//! The thread behind a star: polls, never blocks, and is the only one that touches the sockets.

use super::hub::Hub;
use super::leaf::Assembly;
use super::news::Failure;
use super::*;
use crate::bootstrap::auth::poll_for;
use crate::bootstrap::channel::{CLOSED, Frame, UNREACHABLE};
use crate::bootstrap::wire::Reader;
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
pub(super) const MISSING: u8 = 24;

/// A silent peer is sent beats this often only: its buffers must not fill while it is stopped.
const SLOW_BEAT: Duration = Duration::from_secs(1);
/// Silence that is reported, where /proc cannot tell why.
const LONG_SILENCE: Duration = Duration::from_secs(5);

/// What the star and its monitor share.
pub(super) struct Shared {
    pub(super) rank: usize,
    pub(super) peers: Vec<PeerInfo>,
    pub(super) members: Vec<Member>,
    pub(super) fault: Arc<Fault>,
    pub(super) departed: Vec<AtomicBool>,
    pub(super) changed: Condvar,
    pub(super) beat: Duration,
    pub(super) notice: Notice,
    notes: Mutex<Notes>,
    state: Mutex<State>,
    /// Writing to the first wakes the monitor, which polls the second.
    wake: (UnixStream, UnixStream),
}

#[derive(Default)]
pub(super) struct State {
    commands: Vec<Command>,
    /// The exchange that this rank waits for.
    pub(super) gather: Option<Gather>,
    /// The goodbye is with the kernel.
    pub(super) farewell: bool,
    /// The monitor is gone.
    pub(super) ended: bool,
    /// This rank is the hub, and its monitor goes on after the goodbye.
    pub(super) serves: bool,
    /// None while this rank looks for one.
    pub(super) hub: Option<usize>,
}

impl State {
    /// Whether the monitor has still to be told to leave.
    pub(super) fn is_leaving(&self) -> bool {
        self.commands
            .iter()
            .any(|command| matches!(command, Command::Leave))
    }
}

pub(super) struct Gather {
    pub(super) generation: u64,
    pub(super) outcome: Option<Result<Vec<Vec<u8>>>>,
    /// Ranks that have contributed, as far as is known.
    pub(super) present: Vec<bool>,
}

impl Gather {
    pub(super) fn missing(&self) -> Vec<usize> {
        let absent = self.present.iter().enumerate().filter(|(_, here)| !**here);
        absent.map(|(rank, _)| rank).collect()
    }
}

/// What the star asks of its monitor.
pub(super) enum Command {
    Contribute(u64, Vec<u8>),
    Announce(Error),
    Leave,
    Close,
}

impl Shared {
    pub(super) fn new(
        rank: usize,
        members: Vec<Member>,
        fault: Arc<Fault>,
        config: &Config,
        notice: Notice,
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
            departed: members.iter().map(|_| AtomicBool::new(false)).collect(),
            members,
            fault,
            changed: Condvar::new(),
            beat: config.heartbeat,
            notice,
            notes: Mutex::new(Notes::new()),
            state: Mutex::new(State {
                serves: rank == 0,
                hub: Some(0),
                ..State::default()
            }),
            wake,
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    pub(super) fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    pub(super) fn command(&self, command: Command) {
        self.state().commands.push(command);
        // A full buffer wakes just as well.
        let _ = (&self.wake.0).write(&[1]);
    }

    pub(super) fn start_gather(&self, generation: u64, bytes: Vec<u8>) {
        let mut present = vec![false; self.peers.len()];
        present[self.rank] = true;
        self.state().gather = Some(Gather {
            generation,
            outcome: None,
            present,
        });
        self.command(Command::Contribute(generation, bytes));
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

    /// What the others are told of a reason that this rank gives.
    pub(super) fn report(&self, reason: &Error) -> Error {
        let me = &self.peers[self.rank];
        reason.clone().context(format!("{me} reports"))
    }

    pub(super) fn depart(&self, rank: usize) {
        if let Some(departed) = self.departed.get(rank) {
            // SYNC POINT departed: what the rank sent before it left is on its way already.
            departed.store(true, Ordering::Release);
        }
        self.changed.notify_all();
    }

    pub(super) fn is_departed(&self, rank: usize) -> bool {
        self.departed[rank].load(Ordering::Relaxed)
    }
}

/// The connection to one rank.
pub(super) struct Link {
    pub(super) rank: usize,
    /// None once it is over.
    pub(super) channel: Option<Channel>,
    pub(super) goodbye: bool,
    /// The other side knows that the connection stands. One that gave up before is no loss.
    pub(super) confirmed: bool,
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

pub(super) struct Monitor {
    pub(super) shared: Arc<Shared>,
    /// A hub's to the others; else one, to the hub.
    pub(super) links: Vec<Link>,
    /// What only the hub keeps.
    pub(super) hub: Hub,
    pub(super) succession: Succession,
    next_beat: Instant,
    /// When to give up saying goodbye.
    pub(super) leaving: Option<Instant>,
    closing: Option<Instant>,
    pub(super) failure: Option<Failure>,
}

impl Monitor {
    pub(super) fn new(shared: Arc<Shared>, succession: Succession) -> Monitor {
        Monitor {
            hub: Hub::new(shared.peers.len()),
            shared,
            links: Vec::new(),
            succession,
            next_beat: Instant::now(),
            leaving: None,
            closing: None,
            failure: None,
        }
    }

    pub(super) fn add_link(&mut self, rank: usize, channel: Channel, confirmed: bool) {
        let now = Instant::now();
        self.links.push(Link {
            rank,
            channel: Some(channel),
            goodbye: false,
            confirmed,
            assembly: Assembly::default(),
            heard: now,
            spoke: now,
            noticed: false,
        });
    }

    pub(super) fn is_hub(&self) -> bool {
        self.shared.rank == self.succession.hub
    }

    pub(super) fn run(mut self) {
        block_signals();
        while !self.is_finished() {
            let (ready, knocks) = self.sleep();
            // Reading comes before obeying: a failure that has arrived goes first.
            self.listen(&ready);
            self.admit(&knocks);
            self.obey();
            self.seek_hub();
            if Instant::now() >= self.next_beat {
                self.beat();
            }
            self.flush();
        }
        self.shared.state().ended = true;
        self.shared.changed.notify_all();
    }

    /// Waits for news or the next beat. Returns which links have some, and which of the doors.
    fn sleep(&mut self) -> (Vec<bool>, Vec<bool>) {
        let until = self.succession.next_or(self.next_beat);
        let limit = until.saturating_duration_since(Instant::now());
        let limit = self.patience().map_or(limit, |longest| limit.min(longest));
        let ready = {
            let links = self.links.iter().filter_map(|link| link.channel.as_ref());
            let links = links.map(|channel| PollFd::new(channel.descriptor(), channel.events()));
            let wake = PollFd::new(self.shared.wake.1.as_fd(), PollFlags::POLLIN);
            let doors = self.doors();
            let mut fds: Vec<PollFd<'_>> =
                std::iter::once(wake).chain(links).chain(doors).collect();
            poll_for(&mut fds, limit);
            let mut polled = fds.iter().skip(1).map(|fd| fd.any().unwrap_or(true));
            let links = self.links.iter();
            let links = links
                .map(|link| link.channel.is_some() && polled.next().unwrap_or(false))
                .collect();
            (links, polled.collect())
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
                link.confirmed = true;
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
            return self.hear_announcement(at, frame);
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
            let link = &mut self.links[at];
            if link.channel.take().is_none() || !link.confirmed {
                continue;
            }
            let (rank, goodbye) = (link.rank, link.goodbye);
            if !goodbye {
                deaths.push(format!("{} {why}", self.shared.peers[rank]));
            }
            if rank != self.succession.hub {
                continue;
            }
            if goodbye {
                let error = Error::new(ErrorKind::Remote, self.gone_hub(rank));
                let state = self.shared.state();
                let generation = state.gather.as_ref().map(|gather| gather.generation);
                drop(state);
                if let Some(generation) = generation {
                    self.shared.finish_gather(generation, Err(error));
                }
            }
            // The end of rank 0 without goodbye is seen by all; not all may have come to another.
            if goodbye || rank != 0 {
                self.lose_hub(rank);
            }
        }
        // After our own goodbye, the others' ends are none of our business.
        if !deaths.is_empty() && (self.is_hub() || self.leaving.is_none()) {
            deaths.sort();
            self.fail(Error::new(ErrorKind::Remote, deaths.join("; ")));
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
                Command::Contribute(generation, bytes) if self.is_hub() => {
                    self.contribute(self.shared.rank, generation, bytes);
                }
                Command::Contribute(generation, bytes) => {
                    self.send_contribution(generation, &bytes)
                }
                // What this rank was told, or has told, the others know.
                Command::Announce(_) if self.failure.is_some() => {}
                Command::Announce(error) => self.announce(&error),
                Command::Leave => {
                    self.leaving = Some(Instant::now() + FAREWELL);
                    // Calls made since the last beat are compared all the same.
                    self.beat();
                    self.tell_all_but(None, GOODBYE, &Body::new(Vec::new()));
                    if self.is_hub() {
                        self.leave_gather(self.shared.rank);
                    } else if self.failure.is_none() {
                        self.succession.close();
                    }
                }
                Command::Close => self.closing = Some(Instant::now() + FAREWELL),
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
        let late = self.leaving.is_some_and(|until| Instant::now() >= until);
        let done = flushed && !self.has_more_to_tell();
        if self.leaving.is_some() && (done || late) {
            let farewell = std::mem::replace(&mut self.shared.state().farewell, true);
            if !farewell {
                self.shared.changed.notify_all();
                if !self.is_hub() {
                    let channels = self
                        .links
                        .iter_mut()
                        .filter_map(|link| link.channel.as_mut());
                    channels.for_each(Channel::finish);
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
            return now >= until || channels.all(Channel::is_flushed);
        }
        match self.leaving {
            None => false,
            Some(until) if now < until && self.has_more_to_tell() => false,
            Some(_) if self.links.iter().all(|link| link.channel.is_none()) => true,
            // The hub serves on, unless there is nothing left to watch over.
            Some(until) if self.is_hub() && self.shared.state().serves => {
                (self.failure.is_some() || self.shared.fault.is_raised())
                    && (now >= until || channels.all(Channel::is_flushed))
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
            self.miss_absent();
        } else if self.succession.is_seeking() {
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
