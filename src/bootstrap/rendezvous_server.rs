//! The meeting: ranks come with what they are, and leave with what all are.
//!
//! One thread of the process that created the id serves it (or of rank 0, for an address from
//! the environment). It ends with the meeting: after it, nobody listens at the id's address. What the
//! ranks do there is in `guest`.

use super::auth::{HandshakeConfig, Listener, PeerIdentity, Role, poll_for};
use super::framed_stream::{Body, Frame, FramedStream};
use super::rank_entry::{RankEntry, name_ranks};
use super::wire::{Reader, Writer, damaged, read_error, write_error};
use super::{UniqueId, keys};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::fork::ProcessId;
use crate::sys::fork_safe::ForkSafe;
use nix::poll::{PollFd, PollFlags};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Most ranks of a communicator: the table of all must fit a frame.
pub(super) const MAX_RANKS: usize = 4096;

/// A guest is there: ranks, how long it can wait, and what it is.
pub(super) const REGISTER: u8 = 1;
/// All are: random bytes, and what they are.
pub(super) const TABLE: u8 = 2;
/// Why there will be no communicator, from the meeting, or from a guest that cannot register.
pub(super) const REFUSED: u8 = 3;

/// How long a failed meeting stays, to tell those who come late why it failed.
const AFTERWORD: Duration = Duration::from_secs(3);

/// Meetings that this process serves, and those that the process served which it is forked from.
static OPEN: ForkSafe<Vec<Open>> = ForkSafe::new(Vec::new());

struct Open {
    owner: ProcessId,
    nonce: [u8; 16],
    orders: Arc<Orders>,
}

/// What others in its process tell a meeting.
#[derive(Default)]
struct Orders {
    stop: AtomicBool,
    /// Why the meeting has failed.
    verdict: OnceLock<Error>,
}

/// Opens a meeting on a free port of `ip` for the id that `make` builds from the address.
pub(super) fn open(
    ip: IpAddr,
    make: impl FnOnce(SocketAddr) -> UniqueId,
    config: &Config,
) -> Result<UniqueId> {
    let (listener, address) = Listener::bind(ip)?;
    let id = make(address);
    serve(&id, listener, config.init_timeout)?;
    Ok(id)
}

/// Ends a meeting of this process. Returns whether there was one.
pub(super) fn cancel(id: &UniqueId) -> bool {
    let cancelled = OPEN.with(|open| {
        let at = open.iter().position(|one| one.is_of(id));
        at.map(|at| open.swap_remove(at).orders)
    });
    cancelled
        .inspect(|orders| orders.stop.store(true, Ordering::Relaxed))
        .is_some()
}

/// Fails a meeting of this process, if there is one.
pub(super) fn fail(id: &UniqueId, reason: &Error) {
    let found = OPEN.with(|open| {
        let found = open.iter().find(|one| one.is_of(id));
        found.map(|one| one.orders.clone())
    });
    if let Some(orders) = found {
        let _ = orders.verdict.set(reason.clone());
    }
}

impl Open {
    fn is_of(&self, id: &UniqueId) -> bool {
        self.nonce == id.nonce() && self.owner.is_this()
    }
}

fn forget(orders: &Arc<Orders>) {
    OPEN.with(|open| open.retain(|one| !Arc::ptr_eq(&one.orders, orders)));
}

/// Serves the meeting of `id` at the address where `listener` listens.
pub(super) fn serve(id: &UniqueId, listener: Listener, patience: Duration) -> Result<()> {
    let terms = HandshakeConfig::new(
        &id.key(b"", "meeting"),
        PeerIdentity {
            role: Role::Rendezvous,
            rank: 0,
            word: 0,
        },
    );
    let orders = Arc::<Orders>::default();
    let nonce: [u8; 16] = std::array::from_fn(|at| id.nonce()[at]);
    let root = RendezvousServer {
        listener: Some(listener),
        terms,
        guests: Vec::new(),
        nranks: 0,
        told: 0,
        verdict: None,
        deadline: Instant::now() + patience,
        patience,
        orders: orders.clone(),
    };
    let owner = ProcessId::this();
    let listed = Open {
        owner,
        nonce,
        orders: orders.clone(),
    };
    OPEN.with(|open| open.push(listed));
    let ours = orders.clone();
    let spawned = std::thread::Builder::new()
        .name("cinch-meeting".into())
        .stack_size(256 << 10)
        .spawn(move || {
            crate::sys::process::block_signals();
            root.run();
            forget(&ours);
        });
    spawned.map(drop).map_err(|cause| {
        forget(&orders);
        Error::system("cannot start the meeting's thread", cause)
    })
}

/// The thread that serves a meeting.
struct RendezvousServer {
    listener: Option<Listener>,
    terms: HandshakeConfig,
    guests: Vec<Registrant>,
    /// As the first rank says; 0 before it came.
    nranks: usize,
    /// Ranks that were told the verdict.
    told: usize,
    /// Why the meeting failed.
    verdict: Option<Error>,
    deadline: Instant,
    patience: Duration,
    orders: Arc<Orders>,
}

struct Registrant {
    channel: FramedStream,
    /// Before it was let in: no later than it reckons how long it can wait.
    since: Instant,
    rank: usize,
    member: Option<RankEntry>,
}

impl RendezvousServer {
    fn run(mut self) {
        while self.listener.is_some() {
            if self.orders.stop.load(Ordering::Relaxed) {
                return;
            }
            self.turn();
            // A guest that came between the end of this meeting and its last turn is not served:
            // the id is used up.
            if self.orders.stop.load(Ordering::Relaxed) {
                return;
            }
            if let Some(reason) = self.orders.verdict.get() {
                self.fail(reason.clone());
            }
            if self.verdict.is_none() && Instant::now() >= self.deadline {
                let missing = self.missing();
                self.fail(Error::new(ErrorKind::Timeout, missing));
            }
            let complete = self.nranks > 0 && self.registered().count() == self.nranks;
            if self.verdict.is_none() && complete {
                self.hand_out_tables();
            }
            let all_know = self.told > 0 && self.told >= self.nranks;
            if self.verdict.is_some() && (all_know || Instant::now() >= self.deadline) {
                self.listener = None;
            }
        }
        // Those who were told hang up. Closing first could cut off what they have not read.
        let until = Instant::now() + Duration::from_secs(2);
        while !self.guests.is_empty() && Instant::now() < until {
            self.turn();
        }
    }

    fn turn(&mut self) {
        let now = Instant::now();
        let mut limit = Duration::from_millis(50).min(self.deadline.saturating_duration_since(now));
        if let Some(listener) = &self.listener {
            limit = limit.min(listener.poll_limit(now));
        }
        let (guests, strangers) = {
            let guests = self
                .guests
                .iter()
                .map(|guest| PollFd::new(guest.channel.descriptor(), guest.channel.events()));
            let strangers = self.listener.iter().flat_map(Listener::descriptors);
            let mut fds: Vec<PollFd<'_>> = guests.chain(strangers).collect();
            poll_for(&mut fds, limit.max(Duration::from_millis(1)));
            let mut ready: Vec<bool> = fds
                .iter()
                .map(|fd| {
                    fd.revents()
                        .is_none_or(|events| events != PollFlags::empty())
                })
                .collect();
            let strangers = ready.split_off(self.guests.len());
            (ready, strangers)
        };
        // From the back, so that leaving guests do not move those still to be heard.
        for at in (0..guests.len()).rev().filter(|&at| guests[at]) {
            self.hear(at);
        }
        if let Some(listener) = &mut self.listener {
            let since = Instant::now();
            let served = listener.serve(&self.terms, &strangers);
            let mut arrivals = Vec::new();
            while let Some(peer) = listener.next() {
                arrivals.push(peer);
            }
            if let Err(error) = served {
                self.fail(error);
            }
            for peer in arrivals {
                match peer.map(|peer| (peer.rank, FramedStream::new(peer))) {
                    Ok((rank, channel)) => {
                        self.guests.push(Registrant {
                            channel,
                            since,
                            rank,
                            member: None,
                        });
                        self.hear(self.guests.len() - 1);
                    }
                    Err(error) => self.fail(error),
                }
            }
        }
    }

    fn hear(&mut self, at: usize) {
        let mut frames = Vec::new();
        self.guests[at].channel.flush();
        let end = self.guests[at].channel.receive(&mut frames);
        for frame in frames {
            if let Err(error) = self.register(at, &frame) {
                self.fail(error);
            }
        }
        if end.is_some() {
            let guest = self.guests.remove(at);
            // Once the tables are out, guests leave.
            if let (Some(member), Some(_)) = (guest.member, &self.listener) {
                self.fail(Error::new(
                    ErrorKind::Remote,
                    format!(
                        "{} died before all ranks had come to the meeting",
                        member.info
                    ),
                ));
            }
        }
    }

    fn register(&mut self, at: usize, frame: &Frame) -> Result<()> {
        if frame.kind == REFUSED && self.guests[at].member.is_none() {
            return Err(read_error(&frame.body)?);
        }
        if frame.kind != REGISTER || self.guests[at].member.is_some() {
            return Err(damaged().context(format!("rank {} at the meeting", self.guests[at].rank)));
        }
        let mut reader = Reader(&frame.body);
        let nranks = reader.u32()? as usize;
        let patience = Duration::from_millis(reader.u64()?.min(1 << 40));
        let member = RankEntry::read(&mut reader)?;
        reader.end()?;
        let rank = member.info.rank;
        let guest = &mut self.guests[at];
        guest.member = Some(member.clone());
        if rank != guest.rank {
            return Err(damaged().context(format!("rank {} at the meeting", guest.rank)));
        }
        if let Some(verdict) = &self.verdict {
            let body = Body::new(write_error(verdict));
            guest.channel.queue(REFUSED, &body);
            guest.channel.flush();
            self.told += 1;
            // The first to come after the verdict is perhaps not the last.
            self.nranks = self.nranks.max(nranks);
            return Ok(());
        }
        // The earliest deadline counts, less what it takes to tell everybody who is missing. When
        // this thread hears of it says nothing: it may have had to wait for a processor.
        let until = guest.since + patience.saturating_sub(margin(patience));
        if self.nranks == 0 || until < self.deadline {
            self.deadline = until;
            self.patience = patience;
        }
        let first = self.registered().find(|other| other.info.rank != rank);
        if self.nranks == 0 {
            self.nranks = nranks;
            if let Some(listener) = &mut self.listener {
                listener.expect_connections(nranks.min(MAX_RANKS));
            }
        } else if self.nranks != nranks
            && let Some(first) = first
        {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "{} joins a communicator of {nranks} ranks, {} one of {}",
                    member.info, first.info, self.nranks
                ),
            ));
        }
        if rank >= self.nranks || self.nranks > MAX_RANKS {
            return Err(Error::invalid_argument(format!(
                "{} joins a communicator of {} ranks: ranks go from 0 to one less",
                member.info, self.nranks
            )));
        }
        let same: Vec<String> = self
            .registered()
            .filter(|other| other.info.rank == rank)
            .map(RankEntry::place)
            .collect();
        if same.len() > 1 {
            return Err(Error::invalid_argument(format!(
                "rank {rank} joined more than once: {}",
                same.join(" and ")
            )));
        }
        Ok(())
    }

    fn registered(&self) -> impl Iterator<Item = &RankEntry> {
        self.guests.iter().filter_map(|guest| guest.member.as_ref())
    }

    fn missing(&self) -> String {
        let waited = format!(
            "within {:.1} s (CINCH_INIT_TIMEOUT)",
            self.patience.as_secs_f64()
        );
        if self.nranks == 0 {
            return format!(
                "no rank came to the meeting {waited} after its unique id was made; start the \
                 ranks sooner or raise the setting"
            );
        }
        let here: Vec<usize> = self.registered().map(|member| member.info.rank).collect();
        let missing: Vec<usize> = (0..self.nranks)
            .filter(|rank| !here.contains(rank))
            .collect();
        format!(
            "{} of {} did not come to the meeting {waited}; were they started?",
            name_ranks(&missing),
            self.nranks,
        )
    }

    /// Everybody who registered, now or later, gets this error.
    fn fail(&mut self, error: Error) {
        if self.verdict.is_some() {
            return;
        }
        let body = Body::new(write_error(&error));
        for guest in self
            .guests
            .iter_mut()
            .filter(|guest| guest.member.is_some())
        {
            guest.channel.queue(REFUSED, &body);
            guest.channel.flush();
            self.told += 1;
        }
        self.verdict = Some(error);
        self.deadline = Instant::now() + AFTERWORD;
    }

    fn hand_out_tables(&mut self) {
        // An id serves once: from here on, its address refuses connections.
        self.listener = None;
        let salt = match keys::random::<32>() {
            Ok(salt) => salt,
            Err(error) => return self.fail(error),
        };
        let mut members: Vec<&RankEntry> = self.registered().collect();
        members.sort_by_key(|member| member.info.rank);
        let mut writer = Writer::default();
        writer.bytes(&salt).u32(members.len() as u32);
        members.iter().for_each(|member| member.write(&mut writer));
        let body = Body::new(writer.0);
        for guest in &mut self.guests {
            guest.channel.queue(TABLE, &body);
            guest.channel.flush();
        }
    }
}

/// How long before the deadline of a rank with this `patience` the meeting gives up.
pub(super) fn margin(patience: Duration) -> Duration {
    (patience / 10).clamp(Duration::from_millis(20), Duration::from_millis(500))
}
