//! The control plane between processes: every rank holds one authenticated connection to rank 0,
//! the root. A control thread per process and communicator serves it.
//!
//! **Failures.** A connection that ends before its rank has left is a death. The root announces it to
//! all ranks; every member sees the root's own end. The kernel frees memory before it closes
//! sockets, so a large process can be dead for seconds before its connection ends. The root, or a
//! rank of the same host, therefore looks up in /proc a peer that misses two heartbeats. A stopped
//! process causes one warning and no failure. A cut link to another host ends after three seconds
//! without an answer of its kernel.
//!
//! **Leaving.** A leaving rank sends a frame; a later end of its connection is no failure. A rank
//! that has closed makes no more calls, but keeps its connection to learn when the other ranks
//! have closed.
//!
//! A root that has left first serves on until every other rank has left or died, or the
//! communicator has failed. If the root's process ends meanwhile, that is no failure either: later
//! exchanges over the control plane fail. From then on a rank of the same host whose process ends
//! counts as having left. Without the root it is unknown whether that rank sent its frame.

mod accept_members;
mod control_thread;
mod frames;
#[cfg(feature = "internal")]
pub(super) mod fuzz;
mod links;
mod member;
mod root;
mod shared;

use super::auth::{ConnectionRole, HandshakeConfig, OnRefusal, Peer, PeerIdentity, connect_to_any};
use super::call_log;
use super::framed_stream::FramedStream;
use super::join::{self, PeerTable};
use super::rank_entry::{RankEntry, name_ranks};
use super::rendezvous_server::{self, MAX_RANKS};
use super::warning_hook::WarningHook;
use super::{OutOfBand, PeerInfo, ReconnectListener, UniqueId, address, keys};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::fork::{ForkOwned, ProcessId};
use crate::sys::process::thread_error;
use crate::sys::socket;
use crate::types::SIGNATURE_WORDS;
use accept_members::{FailureReport, accept_members};
use control_thread::ControlThread;
use frames::CLOSING;
use shared::{ControlCommand, ControlState, SharedControl};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Largest number of bytes that one rank contributes to an [`OutOfBand::all_gather`].
pub const MAX_CONTRIBUTION: usize = 16 << 20;

/// Longest time that closing and leaving take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of checks of the fault, which others may raise without waking the waiting thread.
const FAULT_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The [`OutOfBand`] between processes.
///
/// Dropping it without [`OutOfBand::leave`] counts as the death of this rank on all other ranks.
pub struct ControlPlane {
    shared: Arc<SharedControl>,
    base: keys::DerivedKey,
    timeout: Duration,
    init_timeout: Duration,
    /// Time at which all-gathers of an init end.
    init_deadline: Mutex<Option<Instant>>,
    sequence: Mutex<GatherSequence>,
    thread: ForkOwned<Mutex<Option<JoinHandle<()>>>>,
    owner: ProcessId,
}

/// State of this rank's all-gathers, which run one at a time.
#[derive(Default)]
struct GatherSequence {
    next_generation: u64,
    /// The error after which the ranks no longer agree on the generation.
    broken: Option<Error>,
    /// Generation of the closing all-gather, the last of this rank.
    closing: Option<u64>,
    left: bool,
}

impl ControlPlane {
    /// Joins the communicator of `id` as `rank` of `nranks`. Returns when all ranks have joined and
    /// this rank is connected to the root. From then on `fault` is raised when a rank is gone.
    ///
    /// # Errors
    /// Invalid argument for an impossible rank or a rank that another process has taken. Mismatch
    /// if ranks disagree about their number or run different versions. Remote if the id is used up
    /// or a rank dies meanwhile. Timeout, naming the missing ranks, after [`Config::init_timeout`].
    /// System if descriptors or threads run out. The fault's reason once the fault is raised.
    pub fn join(
        id: &UniqueId,
        rank: usize,
        nranks: usize,
        config: &Config,
        fault: Arc<Fault>,
    ) -> Result<Arc<ControlPlane>> {
        ControlPlane::join_with_warning_hook(id, rank, nranks, config, fault, WarningHook::log())
    }

    /// Joins as [`ControlPlane::join`] does, with a hook for warnings.
    ///
    /// # Errors
    /// As for [`ControlPlane::join`].
    pub fn join_with_warning_hook(
        id: &UniqueId,
        rank: usize,
        nranks: usize,
        config: &Config,
        fault: Arc<Fault>,
        warnings: WarningHook,
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
        let share = |members| SharedControl::new(rank, members, fault.clone(), config, warnings);
        // A single rank needs no rendezvous. If another process serves the rendezvous, the rank
        // joins it, because that ends the server.
        if nranks == 1 && (id.rank_zero_opens() || rendezvous_server::cancel(id)) {
            let member = RankEntry::this(0, address::for_one_host(), config)?;
            let base = id.key(&keys::random::<32>()?, "communicator");
            let shared = Arc::new(share(vec![member])?);
            return Ok(ControlPlane::with(shared, base, config, None));
        }
        let PeerTable {
            members,
            salt,
            listener,
        } = join::rendezvous(id, rank, nranks, config, deadline, &fault)?;
        let base = id.key(&salt, "communicator");
        if nranks == 1 {
            let shared = Arc::new(share(members)?);
            return Ok(ControlPlane::with(shared, base, config, None));
        }
        let identity = PeerIdentity {
            role: ConnectionRole::Control,
            rank,
            word: 0,
        };
        let handshake = HandshakeConfig::new(&keys::derive(&base, b"", "control"), identity)
            .with_encryption(config.encrypts.into());
        let peers = match listener {
            Some(listener) => accept_members(listener, &members, &handshake, deadline, &fault)?,
            None => vec![(
                0,
                connect_to_root(&members[0], &handshake, deadline, &fault)?,
            )],
        };
        for (other, peer) in &peers {
            if members[*other].info.host_id != members[rank].info.host_id {
                // Ends an idle connection. `ControlThread` ends a connection with unacknowledged data.
                let _ = socket::keep_alive(peer.stream.socket());
            }
        }
        let (shared, thread) = start(rank, members, peers, share)?;
        Ok(ControlPlane::with(shared, base, config, Some(thread)))
    }

    fn with(
        shared: Arc<SharedControl>,
        base: keys::DerivedKey,
        config: &Config,
        thread: Option<JoinHandle<()>>,
    ) -> Arc<ControlPlane> {
        Arc::new(ControlPlane {
            shared,
            base,
            timeout: config.timeout,
            init_timeout: config.init_timeout,
            init_deadline: Mutex::default(),
            sequence: Mutex::default(),
            thread: ForkOwned::new(Mutex::new(thread)),
            owner: ProcessId::this(),
        })
    }

    fn is_alone(&self) -> bool {
        self.shared.peers.len() == 1
    }

    /// Waits for the result of the all-gather that the control thread has just received.
    fn await_result(&self, generation: u64, deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let shared = &self.shared;
        let mut state = shared.state();
        loop {
            let gather = state.gather.as_mut();
            if let Some(outcome) = gather.and_then(|gather| gather.outcome.take()) {
                return outcome;
            }
            shared.fault.check()?;
            if state.ended {
                return Err(Error::new(
                    ErrorKind::Remote,
                    "the control connections of this rank are closed",
                ));
            }
            let now = Instant::now();
            if now >= deadline {
                // The last report of a silent root lacks ranks that have come since.
                let is_current = !shared.root_is_silent.load(Ordering::Relaxed);
                let gather = state.gather.as_ref().filter(|_| is_current);
                let missing = gather.and_then(|gather| gather.missing(shared.rank));
                return Err(self.late(generation, missing.as_deref()));
            }
            let limit = FAULT_POLL_INTERVAL.min(deadline - now);
            let waited = shared.changed.wait_timeout(state, limit);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until the kernel has taken a frame, at most [`CLOSE_TIMEOUT`].
    fn await_sent(&self, is_sent: impl Fn(&ControlState) -> bool) {
        let until = Instant::now() + CLOSE_TIMEOUT;
        let mut state = self.shared.state();
        while !is_sent(&state) && !state.ended {
            let now = Instant::now();
            if now >= until {
                return;
            }
            let waited = self.shared.changed.wait_timeout(state, until - now);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn late(&self, generation: u64, missing: Option<&[usize]>) -> Error {
        let peers = &self.shared.peers;
        let who = match missing {
            None => format!(
                "{} has not reported which ranks came; not all ranks",
                peers[0]
            ),
            Some([]) => format!(
                "{} has not received this rank's part; not all ranks",
                peers[0]
            ),
            Some([one]) => format!("{} did not come; not all ranks", peers[*one]),
            Some(several) => format!("{} did not come; not all ranks", name_ranks(several)),
        };
        let (timeout, setting) = match self.init_limit().is_some() {
            true if self.init_timeout <= self.timeout => (self.init_timeout, "CINCH_INIT_TIMEOUT"),
            _ => (self.timeout, "CINCH_TIMEOUT"),
        };
        Error::new(
            ErrorKind::Timeout,
            format!(
                "{who} took part in exchange {generation} within {:.3} s ({setting})",
                timeout.as_secs_f64()
            ),
        )
    }

    fn init_limit(&self) -> MutexGuard<'_, Option<Instant>> {
        self.init_deadline
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn sequence(&self) -> MutexGuard<'_, GatherSequence> {
        self.sequence.lock().unwrap_or_else(PoisonError::into_inner)
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
        let mut sequence = self.sequence();
        self.shared.fault.check()?;
        if let Some(error) = &sequence.broken {
            return Err(error
                .clone()
                .context("ranks no longer agree on the order of exchanges"));
        }
        if sequence.left || sequence.closing.is_some() {
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
        let generation = sequence.next_generation;
        sequence.next_generation += 1;
        let limit = *self.init_limit();
        let deadline = Instant::now() + self.timeout;
        let deadline = limit.map_or(deadline, |limit| limit.min(deadline));
        self.shared.start_gather(generation, bytes.to_vec());
        let result = self.await_result(generation, deadline);
        self.shared.state().gather = None;
        if let Err(error) = &result {
            sequence.broken = Some(error.clone());
        }
        result
    }

    fn limit_exchanges(&self, until: Option<Instant>) {
        *self.init_limit() = until;
    }

    fn announce(&self, reason: &Error) {
        if !self.owner.is_this() {
            return;
        }
        // A fault that another rank's failure raised keeps its deadline, because `reason` may only
        // forward that failure.
        if !self.shared.fault.is_raised() {
            self.shared.fault.raise(reason.clone());
        }
        self.shared.changed.notify_all();
        if !self.is_alone() {
            let report = self.shared.report(reason);
            self.shared.command(ControlCommand::Announce(report));
        }
    }

    fn log_call(&self, signature: [u64; SIGNATURE_WORDS]) {
        if call_log::is_comparable(&signature) {
            self.shared.calls().push(signature);
        }
    }

    fn has_left(&self, rank: usize) -> bool {
        self.shared.has_left(rank)
    }

    fn is_lost(&self, rank: usize) -> bool {
        self.shared.is_lost(rank)
    }

    fn drop_connections(&self, listener: &Arc<ReconnectListener>) {
        if !self.is_alone() {
            self.shared.set_reconnect(Some(listener.clone()));
            self.shared.command(ControlCommand::Wake);
        }
    }

    fn key(&self, purpose: &str) -> [u8; 32] {
        keys::derive(&self.base, b"for transports", purpose)
    }

    /// Returns when the kernel has taken the frame, so that the process may end, or after a second.
    fn close(&self) {
        if !self.owner.is_this() || self.is_alone() {
            return;
        }
        {
            let mut sequence = self.sequence();
            if sequence.left || sequence.closing.is_some() {
                return;
            }
            // The contribution to the closing all-gather is sent before the close, after which this rank
            // takes part in no other all-gather.
            let generation = sequence.next_generation;
            self.shared.start_gather(generation | CLOSING, Vec::new());
            sequence.closing = Some(generation);
            sequence.next_generation += 1;
        }
        self.shared.command(ControlCommand::Close);
        self.await_sent(|state| state.closed_sent);
    }

    fn wait_closed(&self) -> Result<()> {
        self.owner.check()?;
        let closing = self.sequence().closing;
        match closing {
            Some(generation) => {
                let deadline = Instant::now() + self.timeout;
                self.await_result(generation, deadline).map(drop)
            }
            None => self.barrier(),
        }
    }

    /// Returns when the kernel has taken the frame, so that the process may end, or after a second.
    fn leave(&self) {
        if !self.owner.is_this() {
            return;
        }
        {
            let mut sequence = self.sequence();
            if std::mem::replace(&mut sequence.left, true) || self.is_alone() {
                return;
            }
        }
        self.shared.command(ControlCommand::Leave);
        self.await_sent(|state| state.left_sent);
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        if !self.owner.is_this() {
            // In a forked child: thread and connections belong to the parent.
            return;
        }
        let left = self.sequence().left;
        let thread = self.thread.lock().map(|mut thread| thread.take());
        let Ok(Some(thread)) = thread else { return };
        if !left {
            self.shared.command(ControlCommand::End);
        }
        // After rank 0 has left, its control thread still serves the other ranks until they leave. This drop
        // does not wait for that thread. The control threads of other ranks end within CLOSE_TIMEOUT.
        if !left || self.shared.rank != 0 || thread.is_finished() {
            let _ = thread.join();
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

/// A control thread, and the state that it shares.
type Started = (Arc<SharedControl>, JoinHandle<()>);

/// Starts the thread that serves the connections to `peers`. The other ranks receive the error if
/// that fails: without it, they would report that this rank has died.
fn start(
    rank: usize,
    members: Vec<RankEntry>,
    peers: Vec<(usize, Peer)>,
    share: impl FnOnce(Vec<RankEntry>) -> Result<SharedControl>,
) -> Result<Started> {
    let who = format!("{} reports", members[rank].info);
    let streams = peers.into_iter();
    let streams = streams.map(|(rank, peer)| (rank, FramedStream::new(peer)));
    let streams: Vec<(usize, FramedStream)> = streams.collect();
    let (error, streams) = match share(members) {
        Ok(shared) => match spawn(Arc::new(shared), streams) {
            Ok(started) => return Ok(started),
            Err(failed) => failed,
        },
        Err(error) => {
            let streams = streams.into_iter().map(|(_, stream)| stream);
            (error, streams.collect())
        }
    };
    let mut report = FailureReport::new(&error.clone().context(who));
    streams.into_iter().for_each(|stream| report.send(stream));
    report.finish();
    Err(error)
}

/// Spawns the control thread. Returns the connections if the thread cannot start.
fn spawn(
    shared: Arc<SharedControl>,
    streams: Vec<(usize, FramedStream)>,
) -> std::result::Result<Started, (Error, Vec<FramedStream>)> {
    let control = ControlThread::new(shared.clone(), streams);
    // Keeps the thread's state outside of the closure, which a failed spawn drops.
    let control = Arc::new(Mutex::new(Some(control)));
    let take = |from: &Mutex<Option<ControlThread>>| {
        let mut control = from.lock().unwrap_or_else(PoisonError::into_inner);
        control.take()
    };
    let (given, own) = (control.clone(), shared.clone());
    let run = move || {
        let serve = AssertUnwindSafe(|| take(&given).map_or((), ControlThread::run));
        if catch_unwind(serve).is_err() {
            own.fault.raise(Error::internal(
                "the control thread panicked; this is a defect of cinch",
            ));
            own.state().ended = true;
            own.changed.notify_all();
        }
    };
    std::thread::Builder::new()
        .name("cinch-control".into())
        .stack_size(256 << 10)
        .spawn(run)
        .map(|thread| (shared, thread))
        .map_err(|cause| {
            let streams = take(&control).map_or(Vec::new(), ControlThread::into_streams);
            (
                thread_error("cannot start the control thread", cause),
                streams,
            )
        })
}

fn connect_to_root(
    root: &RankEntry,
    config: &HandshakeConfig,
    deadline: Instant,
    fault: &Fault,
) -> Result<Peer> {
    let address = SocketAddr::new(root.info.address, root.control_port);
    let name = || format!("the control connection to {}", root.info);
    let peer = connect_to_any(&[address], config, OnRefusal::Fail, deadline, fault)
        .map_err(|error| error.context(name()))?;
    if peer.rank != 0 {
        let error = Error::internal(format!("rank {} answered", peer.rank));
        return Err(error.context(name()));
    }
    Ok(peer)
}

#[cfg(test)]
mod tests;
