//! The control control: every rank holds one proven connection to rank 0, the hub, served by one
//! thread a process and communicator.
//!
//! **Who is gone.** A connection that ends without goodbye is a death; the hub tells all, and the
//! hub's own end is seen by all. Because the kernel frees memory before it closes files, a large
//! process can be dead for seconds before its connection ends: a peer that misses two beats is
//! looked up in /proc, by the hub or by a rank on its host. A stopped process is named once and
//! is no failure. A link to another host that is cut ends after three seconds without an answer
//! of its kernel.
//!
//! **Goodbye.** A rank that leaves says so; what happens to its connection then is no failure. One
//! that has retired has said as much, and keeps the connection to hear when the others have, too.
//! When the hub leaves first, its thread goes on serving until every other rank has left too (or
//! died, or the communicator has failed), so that the others stay watched. If its process ends
//! meanwhile, the others are left without a hub: that is no failure either, collective calls over
//! the control fail, and a rank on the same host whose process ends counts as has_left from then
//! on, since nobody can tell any more whether it said goodbye.

mod control_thread;
mod gather;
mod member;
mod root;

use super::auth::{HandshakeConfig, Listener, OnRefusal, Peer, PeerIdentity, Role, connect_to_any};
use super::call_log::{self, CallLog};
use super::framed_stream::{Body, FramedStream};
use super::join::{self, PeerTable};
use super::process::{self, Fate};
use super::rank_entry::{RankEntry, name_ranks};
use super::rendezvous_server::{self, MAX_RANKS};
use super::warning_hook::WarningHook;
use super::wire::write_error;
use super::{OutOfBand, PeerInfo, UniqueId, address, keys, pass_on};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::fork::{ForkOwned, ProcessId};
use crate::sys::process::block_signals;
use crate::types::SIGNATURE_WORDS;
use control_thread::{Command, ControlThread, RETIRING, Shared, State};
use gather::{Told, gather_leaves};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most bytes that one rank gives to an [`OutOfBand::all_gather`].
pub const MAX_CONTRIBUTION: usize = 16 << 20;

/// How long leaving and closing may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The [`OutOfBand`] between processes.
///
/// Dropping it without [`OutOfBand::leave`] looks like a death to the others.
pub struct ControlPlane {
    shared: Arc<Shared>,
    base: keys::Key,
    timeout: Duration,
    turn: Mutex<Turn>,
    monitor: ForkOwned<Mutex<Option<JoinHandle<()>>>>,
    owner: ProcessId,
}

/// One all_gather at a time.
#[derive(Default)]
struct Turn {
    generation: u64,
    /// Why the ranks are out of step.
    broken: Option<Error>,
    /// The exchange in which ranks that have retired meet, the last of this rank.
    retired: Option<u64>,
    left: bool,
}

impl ControlPlane {
    /// Joins the communicator of `id` as `rank` of `nranks`. Returns when all ranks came to the
    /// meeting and the control connection stands. From then on the control raises `fault` when a
    /// rank is gone.
    ///
    /// # Errors
    /// Invalid argument for impossible or doubly taken ranks; mismatch if ranks disagree about
    /// their number or run different versions; remote if the id is used up or a rank dies
    /// meanwhile; timeout, naming the missing ranks, after [`Config::init_timeout`]; system if
    /// descriptors or threads run out; the fault's reason.
    pub fn join(
        id: &UniqueId,
        rank: usize,
        nranks: usize,
        config: &Config,
        fault: Arc<Fault>,
    ) -> Result<Arc<ControlPlane>> {
        ControlPlane::join_with_warning_hook(id, rank, nranks, config, fault, WarningHook::log())
    }

    /// As [`ControlPlane::join`], with a hook for what is no error.
    ///
    /// # Errors
    /// As for [`ControlPlane::join`].
    pub fn join_with_warning_hook(
        id: &UniqueId,
        rank: usize,
        nranks: usize,
        config: &Config,
        fault: Arc<Fault>,
        notice: WarningHook,
    ) -> Result<Arc<ControlPlane>> {
        if nranks == 0
            || nranks > MAX_RANKS
            || (nranks == 1 && rank != 0)
            || rank > u32::MAX as usize
        {
            return Err(Error::invalid_argument(format!(
                "rank {rank} of {nranks} is impossible: there are 1 to {MAX_RANKS} ranks, \
                 counted from 0"
            )));
        }
        let deadline = Instant::now() + config.init_timeout;
        // One rank needs nobody. Where the meeting is in another process, going there ends it.
        if nranks == 1 && (id.rank_zero_opens() || rendezvous_server::cancel(id)) {
            let member = RankEntry::this(0, address::for_one_host(), config)?;
            let base = id.key(&keys::random::<32>()?, "communicator");
            return ControlPlane::alone(member, base, config, fault, notice);
        }
        let PeerTable {
            members,
            salt,
            listener,
        } = join::meet(id, rank, nranks, config, deadline, &fault)?;
        let base = id.key(&salt, "communicator");
        if nranks == 1 {
            let member = members.into_iter().next();
            let member = member.ok_or_else(|| Error::internal("a table without ranks"))?;
            return ControlPlane::alone(member, base, config, fault, notice);
        }
        let me = PeerIdentity {
            role: Role::Control,
            rank,
            word: 0,
        };
        let terms = HandshakeConfig::new(&keys::derive(&base, b"", "control"), me);
        let links = match listener {
            Some(listener) => gather_leaves(listener, &members, &terms, deadline, &fault)?,
            None => vec![(0, reach_hub(&members[0], &terms, deadline, &fault)?)],
        };
        for (rank, peer) in &links {
            if members[*rank].info.host_id != members[me.rank].info.host_id {
                watch_link(peer);
            }
        }
        let shared = |members| Shared::new(rank, members, fault, config, notice);
        let (shared, thread) = begin(rank, members, links, shared)?;
        Ok(ControlPlane::with(shared, base, config, Some(thread)))
    }

    fn alone(
        member: RankEntry,
        base: keys::Key,
        config: &Config,
        fault: Arc<Fault>,
        notice: WarningHook,
    ) -> Result<Arc<ControlPlane>> {
        let shared = Shared::new(0, vec![member], fault, config, notice)?;
        Ok(ControlPlane::with(Arc::new(shared), base, config, None))
    }

    fn with(
        shared: Arc<Shared>,
        base: keys::Key,
        config: &Config,
        monitor: Option<JoinHandle<()>>,
    ) -> Arc<ControlPlane> {
        Arc::new(ControlPlane {
            shared,
            base,
            timeout: config.timeout,
            turn: Mutex::default(),
            monitor: ForkOwned::new(Mutex::new(monitor)),
            owner: ProcessId::this(),
        })
    }

    fn is_alone(&self) -> bool {
        self.shared.peers.len() == 1
    }

    /// Waits for the result of the exchange that was just handed to the monitor.
    fn await_result(&self, generation: u64, deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let shared = &self.shared;
        let mut state = shared.state();
        loop {
            if let Some(outcome) = state
                .gather
                .as_mut()
                .and_then(|gather| gather.outcome.take())
            {
                return outcome;
            }
            shared.fault.check()?;
            if state.ended {
                return Err(Error::new(
                    ErrorKind::Remote,
                    "the control connections are closed",
                ));
            }
            let now = Instant::now();
            if now >= deadline {
                let missing = state
                    .gather
                    .as_ref()
                    .and_then(|gather| gather.missing(shared.rank));
                return Err(self.late(generation, missing.as_deref()));
            }
            // The fault may be raised by others than the monitor, who do not know the condition.
            let slice = Duration::from_millis(10).min(deadline - now);
            state = match shared.changed.wait_timeout(state, slice) {
                Ok((state, _)) => state,
                Err(poison) => poison.into_inner().0,
            };
        }
    }

    /// Waits for what the monitor notes when the kernel has it, at most [`CLOSE_TIMEOUT`].
    fn await_flush(&self, is_flushed: impl Fn(&State) -> bool) {
        let until = Instant::now() + CLOSE_TIMEOUT;
        let mut state = self.shared.state();
        while !is_flushed(&state) && !state.ended {
            let now = Instant::now();
            if now >= until {
                return;
            }
            state = match self.shared.changed.wait_timeout(state, until - now) {
                Ok((state, _)) => state,
                Err(poison) => poison.into_inner().0,
            };
        }
    }

    fn late(&self, generation: u64, missing: Option<&[usize]>) -> Error {
        let peers = &self.shared.peers;
        let who = match missing {
            None => format!("{} has not said who came; not all ranks", peers[0]),
            Some([]) => "not all ranks".to_string(),
            Some([one]) => format!("{} did not come; not all ranks", peers[*one]),
            Some(several) => format!("{} did not come; not all ranks", name_ranks(several)),
        };
        Error::new(
            ErrorKind::Timeout,
            format!(
                "{who} took part in exchange {generation} within {:.3} s (CINCH_TIMEOUT)",
                self.timeout.as_secs_f64()
            ),
        )
    }

    fn lock_turn(&self) -> MutexGuard<'_, Turn> {
        self.turn
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }
}

impl OutOfBand for ControlPlane {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn peers(&self) -> &[PeerInfo] {
        &self.shared.peers
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.owner.check()?;
        let mut turn = self.lock_turn();
        self.shared.fault.check()?;
        if let Some(error) = &turn.broken {
            return Err(error.clone().context("the ranks are out of step"));
        }
        if turn.left || turn.retired.is_some() {
            return Err(Error::invalid_usage("this rank has left its communicator"));
        }
        if bytes.len() > MAX_CONTRIBUTION {
            return Err(Error::invalid_argument(format!(
                "a rank gives at most {MAX_CONTRIBUTION} bytes to an exchange, not {}",
                bytes.len()
            )));
        }
        if self.is_alone() {
            return Ok(vec![bytes.to_vec()]);
        }
        let generation = turn.generation;
        turn.generation += 1;
        let deadline = Instant::now() + self.timeout;
        self.shared.start_gather(generation, bytes.to_vec());
        let result = self.await_result(generation, deadline);
        self.shared.state().gather = None;
        if let Err(error) = &result {
            turn.broken = Some(error.clone());
        }
        result
    }

    fn announce(&self, reason: &Error) {
        if !self.owner.is_this() {
            return;
        }
        // What was heard of others keeps its grace: it may be what is passed on here.
        if !self.shared.fault.is_raised() {
            self.shared.fault.raise(reason.clone());
        }
        self.shared.changed.notify_all();
        if !self.is_alone() {
            let told = self.shared.report(reason);
            self.shared.command(Command::Announce(told));
        }
    }

    fn log_call(&self, signature: [u64; SIGNATURE_WORDS]) {
        if call_log::is_comparable(&signature) {
            self.shared.notes().push(signature);
        }
    }

    fn has_left(&self, rank: usize) -> bool {
        let has_left = self.shared.has_left.get(rank);
        // SYNC POINT has_left: pairs with the release in the monitor.
        has_left.is_some_and(|has_left| has_left.load(Ordering::Acquire))
    }

    fn key(&self, purpose: &str) -> [u8; 32] {
        keys::derive(&self.base, b"for transports", purpose)
    }

    /// Returns when the word is with the kernel, so that the process may end; at most a second later.
    fn close(&self) {
        if !self.owner.is_this() || self.is_alone() {
            return;
        }
        {
            let mut turn = self.lock_turn();
            if turn.left || turn.retired.is_some() {
                return;
            }
            // Its part of the last exchange goes ahead of the word that it takes part in no other.
            let numbered = turn.generation | RETIRING;
            self.shared.start_gather(numbered, Vec::new());
            turn.retired = Some(turn.generation);
            turn.generation += 1;
        }
        self.shared.command(Command::Retire);
        self.await_flush(|state| state.retired);
    }

    fn wait_closed(&self) -> Result<()> {
        self.owner.check()?;
        let retired = self.lock_turn().retired;
        match retired {
            Some(generation) => {
                let deadline = Instant::now() + self.timeout;
                self.await_result(generation, deadline).map(drop)
            }
            None => self.barrier(),
        }
    }

    /// Returns when the goodbye is with the kernel, so that the process may end; at most a
    /// second later.
    fn leave(&self) {
        if !self.owner.is_this() {
            return;
        }
        {
            let mut turn = self.lock_turn();
            if std::mem::replace(&mut turn.left, true) || self.is_alone() {
                return;
            }
        }
        self.shared.command(Command::Leave);
        self.await_flush(|state| state.farewell);
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        if !self.owner.is_this() {
            // A forked child: the thread and the connections are its parent's.
            return;
        }
        let left = self.lock_turn().left;
        let monitor = self.monitor.lock().map(|mut monitor| monitor.take());
        let Ok(Some(monitor)) = monitor else { return };
        if !left {
            self.shared.command(Command::Close);
        }
        // The hub's thread serves on until the others have left; all others end within CLOSE_TIMEOUT.
        if !left || self.shared.rank != 0 || monitor.is_finished() {
            let _ = monitor.join();
        }
    }
}

impl std::fmt::Debug for ControlPlane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlPlane")
            .field("rank", &self.shared.rank)
            .field("nranks", &self.shared.peers.len())
            .finish_non_exhaustive()
    }
}

/// Starts the thread that serves the control connections. The others hear why that fails: without a
/// word, they would take this rank for dead.
fn begin(
    rank: usize,
    members: Vec<RankEntry>,
    links: Vec<(usize, Peer)>,
    share: impl FnOnce(Vec<RankEntry>) -> Result<Shared>,
) -> Result<(Arc<Shared>, JoinHandle<()>)> {
    let who = format!("{} reports", members[rank].info);
    let mut channels = Vec::with_capacity(links.len());
    for (rank, peer) in links {
        channels.push((rank, FramedStream::new(peer)));
    }
    let (error, channels) = match share(members) {
        Ok(shared) => match start_monitor(Arc::new(shared), channels) {
            Ok(started) => return Ok(started),
            Err(failed) => failed,
        },
        Err(error) => (error, channels),
    };
    let mut told = Told::new(&error.clone().context(who));
    for (_, channel) in channels {
        told.tell_on(channel);
    }
    told.hang_up();
    Err(error)
}

/// Connections by rank.
type FramedStreams = Vec<(usize, FramedStream)>;

/// If there is no thread, the connections come back.
fn start_monitor(
    shared: Arc<Shared>,
    channels: FramedStreams,
) -> std::result::Result<(Arc<Shared>, JoinHandle<()>), (Error, FramedStreams)> {
    let mut monitor = ControlThread::new(shared.clone());
    for (rank, channel) in channels {
        monitor.add_link(rank, channel);
    }
    // What a thread that does not start was to run is lost.
    let monitor = Arc::new(Mutex::new(Some(monitor)));
    let take = |from: &Mutex<Option<ControlThread>>| {
        let mut monitor = from.lock().unwrap_or_else(PoisonError::into_inner);
        monitor.take()
    };
    let given = monitor.clone();
    std::thread::Builder::new()
        .name("cinch-monitor".into())
        .stack_size(256 << 10)
        .spawn(move || take(&given).map_or((), ControlThread::run))
        .map(|thread| (shared, thread))
        .map_err(|cause| {
            let links = take(&monitor).map_or(Vec::new(), |monitor| monitor.links);
            let links = links.into_iter();
            let channels = links.filter_map(|link| Some((link.rank, link.channel?)));
            let error = Error::system("cannot start the control thread", cause);
            (error, channels.collect())
        })
}

fn reach_hub(
    hub: &RankEntry,
    terms: &HandshakeConfig,
    deadline: Instant,
    fault: &Fault,
) -> Result<Peer> {
    let address = SocketAddr::new(hub.info.address, hub.control_port);
    let name = || format!("the control connection to {}", hub.info);
    let peer = connect_to_any(&[address], terms, OnRefusal::Fail, deadline, fault)
        .map_err(|error| error.context(name()))?;
    if peer.rank != 0 {
        let error = Error::internal(format!("rank {} answered", peer.rank));
        return Err(error.context(name()));
    }
    Ok(peer)
}

/// What can be said here about the process of `member`.
fn look(me: &RankEntry, member: &RankEntry) -> Fate {
    if is_this_process(me, member) || !is_visible(me, member) {
        return Fate::Alive;
    }
    process::fate(member.info.pid, member.start_time)
}

fn is_this_process(me: &RankEntry, member: &RankEntry) -> bool {
    member.info.process_id == me.info.process_id
}

/// Whether /proc shows the process of `member` here.
fn is_visible(me: &RankEntry, member: &RankEntry) -> bool {
    member.info.host_id == me.info.host_id
        && member.pid_namespace == me.pid_namespace
        && member.start_time != 0
}

/// Ends a connection whose link is cut after 3 s, blocked or idle. Only between hosts: the kernel
/// counts a full buffer as cut too, and on one host a stopped process would look like that.
fn watch_link(peer: &Peer) {
    use nix::sys::socket::{setsockopt, sockopt};
    let _ = setsockopt(&peer.socket, sockopt::KeepAlive, &true);
    let _ = setsockopt(&peer.socket, sockopt::TcpKeepIdle, &1);
    let _ = setsockopt(&peer.socket, sockopt::TcpKeepInterval, &1);
    let _ = setsockopt(&peer.socket, sockopt::TcpKeepCount, &3);
    let _ = setsockopt(&peer.socket, sockopt::TcpUserTimeout, &3000);
}

#[cfg(test)]
mod tests;
