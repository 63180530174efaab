//! Reconnect after a failure, by which the remaining ranks of a communicator make a new
//! communicator. Rank 0 may be gone, so ranks cannot agree on an address at that time.
//!
//! Every rank therefore opens a listening socket in advance, and all ranks exchange its address. The
//! lowest rank that takes part serves the rendezvous there. The key of the rendezvous is derived
//! from the communicator's key.
//!
//! A rank may die before it takes part. So each rank watches all others until they are connected
//! again, by /proc and by connection attempts: a socket refuses connections once its process has
//! ended. A death ends the rendezvous on all ranks with an error that names the dead rank.

use super::reconnect_listener::ReconnectListener;
use super::{ControlPlane, OutOfBandRef, UniqueId, id, keys, rendezvous_server};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::process::{block_signals, thread_error};
use crate::sys::socket::{self, Address, Interest, Socket, interest};
use std::io::ErrorKind as Io;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Shortest interval at which a rank checks the others.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);
/// Time between two connection attempts of one rank, so that many ranks do not flood each other.
const PROBE_INTERVAL: Duration = Duration::from_millis(2);
/// Longest wait for the results of simultaneous connection attempts.
const PROBE_TIMEOUT: Duration = Duration::from_millis(100);
/// Largest number of simultaneous connection attempts.
const PROBES: usize = 64;
/// Time in which the reason of a failure of the communicator becomes known.
const CAUSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Addresses at which ranks of one communicator can hold another rendezvous.
#[derive(Debug)]
pub struct ShrinkRendezvous {
    exchange: OutOfBandRef,
    /// `None` if there are no other ranks.
    listener: Option<Arc<ReconnectListener>>,
    addresses: Vec<SocketAddr>,
    key: keys::DerivedKey,
    /// Ranks whose sockets refuse connections.
    ended: Mutex<Vec<usize>>,
}

impl ShrinkRendezvous {
    /// Opens this rank's socket, and gathers the addresses of all. All ranks call it together.
    ///
    /// # Errors
    /// System if a rank cannot listen; the errors of [`crate::bootstrap::OutOfBand::all_gather`].
    pub fn open(exchange: &OutOfBandRef) -> Result<ShrinkRendezvous> {
        let (rank, peers) = (exchange.rank(), exchange.peers());
        let bound = match peers.len() {
            1 => Ok((None, 0)),
            _ => ReconnectListener::bind(peers[rank].address)
                .map(|(listener, address)| (Some(listener), address.port())),
        };
        let port = bound.as_ref().map(|(_, port)| *port).map_err(Error::clone);
        let ports = exchange.gather_results("listen for a later rendezvous", &port)?;
        let (listener, _) = bound?;
        let addresses = ports.into_iter().zip(peers);
        let addresses =
            addresses.map(|(port, peer)| port.map(|port| SocketAddr::new(peer.address, port)));
        let addresses = addresses.collect::<Result<_>>()?;
        if let Some(listener) = &listener {
            exchange.drop_connections(listener);
        }
        Ok(ShrinkRendezvous {
            exchange: exchange.clone(),
            listener,
            addresses,
            key: exchange.key("reconnect"),
            ended: Mutex::default(),
        })
    }

    /// Connects `members`, in order, by a new control plane. All of them call it.
    ///
    /// # Errors
    /// Remote, naming a member that has ended; else as for [`ControlPlane::join`].
    pub fn reconnect(
        &self,
        members: &[usize],
        config: &Config,
        fault: &Arc<Fault>,
    ) -> Result<Arc<ControlPlane>> {
        let (rank, nranks) = (self.exchange.rank(), members.len());
        let own = members.iter().position(|&member| member == rank);
        let own = own.ok_or_else(|| Error::internal("a rank reconnects without itself"))?;
        let id = id::assemble_reconnect(&self.key, self.addresses[members[0]], members);
        if nranks == 1 {
            return ControlPlane::join(&id, own, nranks, config, fault.clone());
        }
        if let (0, Some(listener)) = (own, &self.listener) {
            rendezvous_server::cancel(&id);
            let (listener, guard) = listener.start_serving()?;
            rendezvous_server::serve(&id, listener, config.init_timeout, Some(guard))?;
        }
        let (stop, stopped) = channel::<()>();
        std::thread::scope(|scope| {
            let watch = move || self.watch(members, &id, fault, &stopped);
            std::thread::Builder::new()
                .name("cinch-watch".into())
                .stack_size(256 << 10)
                .spawn_scoped(scope, watch)
                .map_err(|cause| {
                    thread_error("cannot start the thread that watches ranks", cause)
                })?;
            let joined = ControlPlane::join(&id, own, nranks, config, fault.clone());
            drop(stop);
            joined
        })
        .inspect_err(|error| {
            let who = format!("{} cannot be part of the new communicator", self.name(rank));
            id.cancel_because(&error.clone().context(who));
        })
    }

    /// Raises `fault` once one of `members` has ended, until the sender of `stopped` is dropped.
    fn watch(&self, members: &[usize], id: &UniqueId, fault: &Fault, stopped: &Receiver<()>) {
        block_signals();
        let interval = WATCH_INTERVAL.max(PROBE_INTERVAL * members.len() as u32);
        loop {
            let ended = self.find_ended(members);
            if !ended.is_empty() {
                let error = self.death(&ended);
                id.cancel_because(&error);
                fault.raise(error);
                return;
            }
            match stopped.recv_timeout(interval) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => return,
            }
        }
    }

    /// Returns the error for members that have ended.
    pub fn death(&self, ended: &[usize]) -> Error {
        let names: Vec<String> = ended.iter().map(|&rank| self.name(rank)).collect();
        Error::new(
            ErrorKind::Remote,
            format!(
                "{} ended before the remaining ranks were connected; exclude it and call again",
                names.join(" and ")
            ),
        )
    }

    /// Returns the ranks of the communicator that have left or ended. If none is known, waits for the
    /// report of one for at most a second.
    pub fn find_lost(&self) -> Vec<usize> {
        let all: Vec<usize> = (0..self.addresses.len()).collect();
        let until = Instant::now() + CAUSE_TIMEOUT;
        loop {
            let lost = self.find_ended(&all);
            if !lost.is_empty() || Instant::now() >= until {
                return lost;
            }
            std::thread::sleep(PROBE_TIMEOUT / 4);
        }
    }

    /// Returns those of `members` that have left or ended, in order.
    pub fn find_ended(&self, members: &[usize]) -> Vec<usize> {
        let own = self.exchange.rank();
        let is_known = |rank| self.exchange.is_lost(rank) || self.ended().contains(&rank);
        let unknown = members.iter().copied();
        let unknown: Vec<usize> = unknown
            .filter(|&rank| rank != own && !is_known(rank))
            .collect();
        for some in unknown.chunks(PROBES) {
            let found = self.probe(some);
            self.ended().extend(found);
        }
        let members = members.iter().copied();
        members
            .filter(|&rank| rank != own && is_known(rank))
            .collect()
    }

    /// Connects to the sockets of `ranks`. Returns the ranks whose hosts refuse the connection.
    fn probe(&self, ranks: &[usize]) -> Vec<usize> {
        let mut refused = Vec::new();
        let mut pending: Vec<(usize, Socket)> = Vec::new();
        for &rank in ranks {
            match socket::connect(&Address::Tcp(self.addresses[rank])) {
                Ok(socket) => pending.push((rank, socket)),
                Err(error) if error.kind() == Io::ConnectionRefused => refused.push(rank),
                // This process lacks descriptors, or has no route for the moment.
                Err(_) => {}
            }
        }
        let until = Instant::now() + PROBE_TIMEOUT;
        while !pending.is_empty() && Instant::now() < until {
            let sockets = pending.iter();
            let mut fds: Vec<Interest> = sockets
                .map(|(_, socket)| interest(socket, false, true))
                .collect();
            let left = until.saturating_duration_since(Instant::now());
            if socket::poll(&mut fds, left).is_err() {
                break;
            }
            let mut ready = fds.iter().map(|fd| fd.revents != 0);
            pending.retain(|(rank, socket)| {
                let is_ready = ready.next().unwrap_or(false);
                if is_ready
                    && let Err(error) = socket::connect_result(socket)
                    && error.kind() == Io::ConnectionRefused
                {
                    refused.push(*rank);
                }
                !is_ready
            });
        }
        refused
    }

    fn ended(&self) -> std::sync::MutexGuard<'_, Vec<usize>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self, rank: usize) -> String {
        self.exchange.peers()[rank].to_string()
    }
}
