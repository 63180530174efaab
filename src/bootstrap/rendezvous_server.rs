//! The rendezvous server: every rank registers an entry and receives the table of all.
//!
//! A thread of the process that created the id serves the rendezvous; for an address from the
//! environment, a thread of rank 0. It ends with the rendezvous: afterwards nothing listens at the
//! id's address.
//! [`super::join`] is the ranks' side.

use super::auth::{
    ConnectionRole, Encryption, HandshakeConfig, Listener, Peer, PeerIdentity, poll_for,
};
use super::framed_stream::{Body, Frame, FramedStream};
use super::rank_entry::{RankEntry, name_ranks};
use super::reconnect_listener::ServingGuard;
use super::{UniqueId, keys};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::fork::ProcessId;
use crate::sys::fork_safe::ForkSafe;
use crate::sys::process::{block_signals, thread_error};
use crate::wire::{Damaged, Reader, Wire, Writer};
use nix::poll::PollFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Largest number of ranks of a communicator: the table of all ranks must fit a frame.
pub(crate) const MAX_RANKS: usize = 4096;

/// Kind of a frame by which a rank registers: number of ranks, time that it can still wait, its
/// timeout of init, digest of the participants, its entry. Times are in milliseconds.
pub(super) const REGISTER: u8 = 1;
/// Kind of a frame for registered ranks: random bytes, and the entries of all ranks.
pub(super) const TABLE: u8 = 2;
/// Kind of a frame from the server with the reason why there will be no communicator.
pub(super) const REFUSED: u8 = 3;
/// Kind of a frame for a rank that reconnects with other participants than the server: the reason.
pub(super) const OTHER_PARTICIPANTS: u8 = 4;
/// Kind of a frame from a rank that cannot register or gives up: digest of the participants, the
/// reason.
pub(super) const GIVES_UP: u8 = 5;

/// Time for which a failed rendezvous sends its error to late ranks.
const FAILED_TIMEOUT: Duration = Duration::from_secs(3);
/// Time that ranks have to read the table and close their connections.
const HANG_UP_TIMEOUT: Duration = Duration::from_secs(2);
/// Time in which a rank registers after its proof. A connection beyond that only takes a descriptor.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of connections, beyond one for each rank, that may be about to register.
const SPARE_REGISTRANTS: usize = 64;
/// Longest poll between two checks of the requests of this process.
const REQUEST_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Servers of this process. In a forked child the list also holds the parent's servers.
static SERVERS: ForkSafe<Vec<RunningServer>> = ForkSafe::new(Vec::new());

struct RunningServer {
    owner: ProcessId,
    nonce: [u8; 16],
    requests: Arc<Requests>,
}

/// Requests of other threads to a server of their process.
#[derive(Default)]
struct Requests {
    stop: AtomicBool,
    /// Reason to fail the rendezvous.
    failure: OnceLock<Error>,
}

/// Ends the rendezvous of `id` in this process. Returns whether there was one.
pub(super) fn cancel(id: &UniqueId) -> bool {
    let cancelled = SERVERS.with(|servers| {
        let at = servers.iter().position(|server| server.serves(id));
        at.map(|at| servers.swap_remove(at).requests)
    });
    cancelled
        .inspect(|requests| requests.stop.store(true, Ordering::Relaxed))
        .is_some()
}

/// Fails the rendezvous of `id` in this process, if there is one.
pub(super) fn fail(id: &UniqueId, reason: &Error) {
    let found = SERVERS.with(|servers| {
        let found = servers.iter().find(|server| server.serves(id));
        found.map(|server| server.requests.clone())
    });
    if let Some(requests) = found {
        let _ = requests.failure.set(reason.clone());
    }
}

impl RunningServer {
    fn serves(&self, id: &UniqueId) -> bool {
        self.nonce == id.nonce() && self.owner.is_this()
    }
}

fn remove_server(requests: &Arc<Requests>) {
    SERVERS.with(|servers| servers.retain(|server| !Arc::ptr_eq(&server.requests, requests)));
}

/// Returns the handshake of the rendezvous of `id`, for its server.
pub(super) fn handshake(id: &UniqueId, rank: usize) -> HandshakeConfig {
    let identity = PeerIdentity {
        role: ConnectionRole::Rendezvous,
        rank,
        word: 0,
    };
    HandshakeConfig::new(&id.key(b"", "rendezvous"), identity)
        .with_encryption(Encryption::AsConnector)
}

/// Starts a thread that serves the rendezvous of `id` on `listener` for `timeout`. Drops `guard` when
/// the thread no longer accepts.
pub(super) fn serve(
    id: &UniqueId,
    listener: Listener,
    timeout: Duration,
    guard: Option<ServingGuard>,
) -> Result<()> {
    RendezvousServer::new(id, listener, timeout, guard).start()
}

/// State of the thread that serves a rendezvous.
pub(super) struct RendezvousServer {
    /// `None` once the rendezvous is over.
    listener: Option<(Listener, Option<ServingGuard>)>,
    /// Digest of the ranks that may register.
    participants: u32,
    handshake: HandshakeConfig,
    registrants: Vec<Registrant>,
    /// Number of ranks that the first rank registered; 0 before.
    nranks: usize,
    /// Number of ranks that have received the failure.
    refused: usize,
    failure: Option<Error>,
    deadline: Instant,
    /// Timeout of init from which the deadline follows, for the error.
    timeout: Duration,
    requests: Arc<Requests>,
}

/// A connection to the server.
struct Registrant {
    stream: FramedStream,
    /// Time of acceptance.
    accepted: Instant,
    /// Latest time at which the rank's frame had not arrived. The rank may have been stopped until
    /// then; later, this thread may have been.
    last_silent: Instant,
    rank: usize,
    /// `None` before the rank has registered.
    entry: Option<RankEntry>,
}

impl RendezvousServer {
    /// Makes the server of `id`, which takes requests from now on.
    pub(super) fn new(
        id: &UniqueId,
        listener: Listener,
        timeout: Duration,
        guard: Option<ServingGuard>,
    ) -> RendezvousServer {
        let requests = Arc::<Requests>::default();
        let running = RunningServer {
            owner: ProcessId::this(),
            nonce: std::array::from_fn(|at| id.nonce()[at]),
            requests: requests.clone(),
        };
        SERVERS.with(|servers| servers.push(running));
        RendezvousServer {
            listener: Some((listener, guard)),
            participants: id.participants(),
            handshake: handshake(id, 0),
            registrants: Vec::new(),
            nranks: 0,
            refused: 0,
            failure: None,
            deadline: Instant::now() + timeout,
            timeout,
            requests,
        }
    }

    /// Starts the thread that serves.
    pub(super) fn start(self) -> Result<()> {
        let requests = self.requests.clone();
        let spawned = std::thread::Builder::new()
            .name("cinch-rendezvous".into())
            .stack_size(256 << 10)
            .spawn(move || {
                block_signals();
                let requests = self.requests.clone();
                self.run();
                remove_server(&requests);
            });
        spawned.map(drop).map_err(|cause| {
            remove_server(&requests);
            thread_error("cannot start the rendezvous thread", cause)
        })
    }

    /// Returns the descriptors on which the first connection arrives.
    pub(super) fn arrivals(&self) -> impl Iterator<Item = PollFd<'_>> {
        let listener = self.listener.iter();
        listener.flat_map(|(listener, _)| listener.socket_descriptors())
    }

    /// Returns whether the rendezvous was cancelled.
    pub(super) fn is_cancelled(&self) -> bool {
        self.requests.stop.load(Ordering::Relaxed)
    }

    /// Returns whether the server has work before a connection arrives: it fails.
    pub(super) fn is_due(&self) -> bool {
        self.requests.failure.get().is_some() || Instant::now() >= self.deadline
    }

    /// Ends a server whose thread was not started.
    pub(super) fn discard(self) {
        remove_server(&self.requests);
    }

    fn run(mut self) {
        let is_stopped = |requests: &Requests| requests.stop.load(Ordering::Relaxed);
        while self.listener.is_some() {
            if is_stopped(&self.requests) {
                return;
            }
            self.poll();
            // After a stop no rank is served, because the id is used up.
            if is_stopped(&self.requests) {
                return;
            }
            if let Some(reason) = self.requests.failure.get() {
                self.fail(reason.clone());
            }
            self.advance();
        }
        // Registrants close their connections first. If the server closed first, it could cut off
        // unread frames.
        let until = Instant::now() + HANG_UP_TIMEOUT;
        while !self.registrants.is_empty() && Instant::now() < until {
            self.poll();
        }
    }

    /// Completes with the last rank, fails at the deadline, and stops listening after either.
    fn advance(&mut self) {
        let complete = self.nranks > 0 && self.entries().count() == self.nranks;
        match self.failure {
            Some(_) => {}
            // The last rank may come while this thread is stopped beyond the deadline.
            None if complete => self.send_tables(),
            None if Instant::now() < self.deadline => {}
            None => self.fail(Error::new(ErrorKind::Timeout, self.missing())),
        }
        let all_refused = self.refused > 0 && self.refused >= self.nranks;
        if self.failure.is_some() && (all_refused || Instant::now() >= self.deadline) {
            self.listener = None;
        }
    }

    /// Waits for frames and connections, and handles them.
    fn poll(&mut self) {
        let now = Instant::now();
        let mut limit = REQUEST_POLL_INTERVAL.min(self.deadline.saturating_duration_since(now));
        if let Some((listener, _)) = &self.listener {
            limit = limit.min(listener.poll_limit(now));
        }
        let (registrants, listener) = {
            let registrants = self.registrants.iter().map(|one| &one.stream);
            let registrants =
                registrants.map(|stream| PollFd::new(stream.descriptor(), stream.events()));
            let listener = self.listener.iter();
            let listener = listener.flat_map(|(listener, _)| listener.descriptors());
            let mut fds: Vec<PollFd<'_>> = registrants.chain(listener).collect();
            poll_for(&mut fds, limit.max(Duration::from_millis(1)));
            let ready = fds.iter().map(|fd| fd.any().unwrap_or(true));
            let mut ready: Vec<bool> = ready.collect();
            let listener = ready.split_off(self.registrants.len());
            (ready, listener)
        };
        // Goes backwards, so that removing a registrant does not move the registrants that follow.
        for at in (0..registrants.len()).rev() {
            match registrants[at] {
                true => self.receive(at),
                false => self.registrants[at].last_silent = now,
            }
        }
        self.accept(&listener);
        self.drop_unregistered();
    }

    /// Drops connections that hold a place and do not register: the late ones, and the oldest ones if
    /// there are too many.
    fn drop_unregistered(&mut self) {
        let now = Instant::now();
        let is_idle = |one: &Registrant| one.entry.is_none();
        let idle = self.registrants.iter().filter(|one| is_idle(one)).count();
        let ranks = match self.nranks {
            0 => MAX_RANKS,
            known => known.min(MAX_RANKS),
        };
        let mut excess = idle.saturating_sub(ranks + SPARE_REGISTRANTS);
        self.registrants.retain(|one| {
            let drops = is_idle(one) && (excess > 0 || now >= one.accepted + REGISTER_TIMEOUT);
            excess -= usize::from(drops && excess > 0);
            !drops
        });
    }

    fn accept(&mut self, ready: &[bool]) {
        let Some((listener, _)) = &mut self.listener else {
            return;
        };
        let accepted = Instant::now();
        let served = listener.serve(&self.handshake, ready);
        let arrivals: Vec<Result<Peer>> = std::iter::from_fn(|| listener.next()).collect();
        if let Err(error) = served {
            self.fail(error);
            // No rank can be accepted to receive the reason. A closed listener ends their waits.
            self.listener = None;
        }
        for peer in arrivals {
            match peer {
                Ok(peer) => {
                    self.registrants.push(Registrant {
                        rank: peer.rank,
                        stream: FramedStream::new(peer),
                        accepted,
                        last_silent: accepted,
                        entry: None,
                    });
                    self.receive(self.registrants.len() - 1);
                }
                Err(error) => self.fail(error),
            }
        }
    }

    fn receive(&mut self, at: usize) {
        let mut frames = Vec::new();
        let stream = &mut self.registrants[at].stream;
        stream.flush();
        let end = stream.receive(&mut frames);
        for frame in frames {
            if let Err(error) = self.register(at, &frame) {
                self.fail(error);
            }
        }
        if end.is_some() {
            let registrant = self.registrants.remove(at);
            // Once the tables are sent, ranks may close their connections.
            if let (Some(entry), Some(_)) = (registrant.entry, &self.listener) {
                let info = entry.info;
                let died = format!("{info} died before all ranks had registered at the rendezvous");
                self.fail(Error::new(ErrorKind::Remote, died));
            }
        }
    }

    fn register(&mut self, at: usize, frame: &Frame) -> Result<()> {
        let registrant = &mut self.registrants[at];
        let damaged =
            |rank: usize| Error::from(Damaged).context(format!("rank {rank} at the rendezvous"));
        if frame.kind == GIVES_UP {
            let Some((digest, reason)) = frame.body.split_first_chunk() else {
                return Err(damaged(registrant.rank));
            };
            // A rank that knew of fewer deaths may find this server instead of its own, which has ended.
            return match u32::from_le_bytes(*digest) == self.participants {
                true => Err(Error::from_bytes(reason)?),
                false => Ok(()),
            };
        }
        if frame.kind != REGISTER || registrant.entry.is_some() {
            return Err(damaged(registrant.rank));
        }
        let mut reader = Reader(&frame.body);
        let nranks = reader.u32()? as usize;
        let times = [reader.u64()?, reader.u64()?];
        let [timeout, init_timeout] = times.map(|time| Duration::from_millis(time.min(1 << 40)));
        let participants = reader.u32()?;
        let entry: RankEntry = reader.take()?;
        reader.end()?;
        if participants != self.participants {
            // Either side may not know yet that a further rank has ended. So only this rank is
            // refused, and may come again.
            let what = format!(
                "{} excludes other ranks than the lowest rank does",
                entry.place()
            );
            let body = Body::new(Error::new(ErrorKind::Mismatch, what).to_bytes());
            registrant.stream.queue(OTHER_PARTICIPANTS, &body);
            registrant.stream.flush();
            return Ok(());
        }
        registrant.entry = Some(entry.clone());
        if entry.info.rank != registrant.rank {
            return Err(damaged(registrant.rank));
        }
        if let Some(failure) = &self.failure {
            registrant
                .stream
                .queue(REFUSED, &Body::new(failure.to_bytes()));
            registrant.stream.flush();
            self.refused += 1;
            // The first rank may register after the failure.
            self.nranks = self.nranks.max(nranks);
            return Ok(());
        }
        // The rendezvous must end at the earliest deadline of a rank, less the time to send all
        // ranks the names of missing ranks. This thread may read a frame long after its arrival,
        // because it has waited for a core.
        let until = registrant.last_silent + timeout.saturating_sub(margin(timeout));
        if self.nranks == 0 || until < self.deadline {
            self.deadline = until;
            self.timeout = init_timeout;
        }
        self.check_entry(&entry, nranks)
    }

    /// Checks a new entry against the entries of other ranks.
    fn check_entry(&mut self, entry: &RankEntry, nranks: usize) -> Result<()> {
        let info = &entry.info;
        let first = self.entries().find(|other| other.info.rank != info.rank);
        if self.nranks == 0 {
            self.nranks = nranks;
            if let Some((listener, _)) = &mut self.listener {
                listener.expect_connections(nranks.min(MAX_RANKS));
            }
        } else if self.nranks != nranks
            && let Some(first) = first
        {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "{info} joins a communicator of {nranks} ranks, {} one of {}",
                    first.info, self.nranks
                ),
            ));
        }
        if info.rank >= self.nranks || self.nranks > MAX_RANKS {
            return Err(Error::invalid_argument(format!(
                "{info} joins a communicator of {} ranks: ranks go from 0 to one less",
                self.nranks
            )));
        }
        let same = self.entries().filter(|other| other.info.rank == info.rank);
        let same: Vec<String> = same.map(RankEntry::place).collect();
        if same.len() > 1 {
            return Err(Error::invalid_argument(format!(
                "rank {} joined more than once: {}",
                info.rank,
                same.join(" and ")
            )));
        }
        Ok(())
    }

    /// Returns the entries of the ranks that have registered.
    fn entries(&self) -> impl Iterator<Item = &RankEntry> {
        self.registrants.iter().filter_map(|one| one.entry.as_ref())
    }

    fn missing(&self) -> String {
        let waited = format!(
            "within {:.1} s (CINCH_INIT_TIMEOUT)",
            self.timeout.as_secs_f64()
        );
        if self.nranks == 0 {
            return format!(
                "no rank came to the rendezvous {waited} after its unique id was made; start the \
                 ranks sooner or raise the setting"
            );
        }
        let registered: Vec<usize> = self.entries().map(|entry| entry.info.rank).collect();
        let missing = (0..self.nranks).filter(|rank| !registered.contains(rank));
        format!(
            "{} of {} did not come to the rendezvous {waited}; were they started?",
            name_ranks(&missing.collect::<Vec<_>>()),
            self.nranks,
        )
    }

    /// Fails the rendezvous: every rank that has registered, or does later, receives `error`.
    fn fail(&mut self, error: Error) {
        if self.failure.is_some() {
            return;
        }
        let body = Body::new(error.to_bytes());
        let registrants = self.registrants.iter_mut();
        for registrant in registrants.filter(|one| one.entry.is_some()) {
            registrant.stream.queue(REFUSED, &body);
            registrant.stream.flush();
            self.refused += 1;
        }
        self.failure = Some(error);
        // Late ranks of a reconnect wait for the next rendezvous instead, which may begin at once.
        self.deadline = Instant::now()
            + match self.participants {
                0 => FAILED_TIMEOUT,
                _ => Duration::ZERO,
            };
    }

    fn send_tables(&mut self) {
        // An id serves once: from here on, its address refuses connections.
        self.listener = None;
        let salt = match keys::random::<32>() {
            Ok(salt) => salt,
            Err(error) => return self.fail(error),
        };
        let mut entries: Vec<&RankEntry> = self.entries().collect();
        entries.sort_by_key(|entry| entry.info.rank);
        let mut writer = Writer::default();
        writer.bytes(&salt).u32(entries.len() as u32);
        entries.iter().for_each(|entry| entry.write(&mut writer));
        let body = Body::new(writer.0);
        for registrant in &mut self.registrants {
            registrant.stream.queue(TABLE, &body);
            registrant.stream.flush();
        }
    }
}

/// Returns how long before the deadline of a rank with this timeout the rendezvous gives up.
pub(super) fn margin(timeout: Duration) -> Duration {
    (timeout / 10).clamp(Duration::from_millis(20), Duration::from_millis(500))
}

#[cfg(test)]
mod tests;
