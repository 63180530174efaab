//! Out-of-band side of a communicator. Ranks find and authenticate each other, exchange small
//! messages over the control plane, and learn when a rank is gone.

mod address;
pub(crate) mod auth;
mod call_log;
mod control;
mod derived_id;
mod discover;
mod framed_stream;
#[cfg(feature = "internal")]
pub mod fuzz;
mod id;
mod idle_rendezvous;
mod join;
#[cfg(not(test))]
mod keys;
#[cfg(test)]
pub(crate) mod keys;
mod local;
pub(crate) mod peer_stream;
mod process;
mod rank_entry;
mod reconnect;
mod reconnect_listener;
mod rendezvous_server;
mod warning_hook;

pub use address::{HostAddress, alternatives};
pub use control::{ControlPlane, MAX_CONTRIBUTION};
pub(crate) use derived_id::Growth;
pub use discover::{LaunchInfo, Rendezvous, discover, half_set};
pub use local::LocalOutOfBand;
pub use process::{host_name, shared_directory_id};
pub use reconnect::ShrinkRendezvous;
pub use reconnect_listener::ReconnectListener;
pub(crate) use rendezvous_server::MAX_RANKS;
pub use warning_hook::WarningHook;

use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::socket::Address;
use crate::types::SIGNATURE_WORDS;
use crate::wire::{Damaged, Reader, Wire, Writer};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Identifies a communicator before its ranks are connected: addresses of the rendezvous, and a
/// secret.
///
/// 128 opaque bytes: format, addresses, a 32-byte secret, a checksum. The program hands them to all
/// ranks. Any process that has the bytes can join.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub(crate) [u8; 128]);

impl UniqueId {
    /// Returns the bytes, for handing them to other ranks.
    pub fn as_bytes(&self) -> &[u8; 128] {
        &self.0
    }
}

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

/// Description of a rank, which all ranks receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Number of the rank in the communicator.
    pub rank: usize,
    /// Process id of the rank, in its own PID namespace.
    pub pid: u32,
    /// User id under which the rank's process runs.
    pub uid: u32,
    /// Host name, for messages.
    pub host: String,
    /// Equal on two ranks exactly if they share a kernel, the user's `CINCH_HOST_ID`, and a network namespace or a
    /// directory for socket files: they can pass file descriptors.
    pub host_id: [u8; 16],
    /// Equal on two ranks exactly if they are threads of one process.
    pub process_id: [u8; 16],
    /// Address of its listeners.
    pub address: IpAddr,
}

impl std::fmt::Display for PeerInfo {
    /// Names the rank for messages: `rank 3 (host b, pid 412)`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "rank {} (host {}, pid {})",
            self.rank, self.host, self.pid
        )
    }
}

/// Exchanges small messages between the ranks of a communicator, over connections that are separate
/// from the data connections.
///
/// Implementations: [`ControlPlane`] over TCP, and [`LocalOutOfBand`] for threads of one process.
pub trait OutOfBand: Send + Sync + std::fmt::Debug {
    /// Returns the number of this rank in the communicator.
    fn rank(&self) -> usize;

    /// Returns all ranks, in order.
    fn peers(&self) -> &[PeerInfo];

    /// Sends `bytes` to all ranks and returns the bytes of all, in rank order.
    ///
    /// # Errors
    /// Remote or timeout, naming the ranks that are missing; the reason of the communicator's
    /// fault if that is raised while waiting.
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Ends exchanges at `until` at the latest, instead of by the timeout of calls alone; `None` ends
    /// the limit. Init sets it, so that a rank that hangs fails the init in time.
    fn limit_exchanges(&self, _until: Option<Instant>) {}

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As for [`OutOfBand::all_gather`].
    fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(|_| ())
    }

    /// Reports to every rank that the communicator has failed, for `reason`. This rank's [`Fault`] is
    /// raised at once, and the faults of other ranks after a short timeout. Does not wait.
    fn announce(&self, reason: &Error);

    /// Logs that this rank starts the call with this signature. The logs of all ranks are compared
    /// in the background, which finds disagreeing calls that exchange no data.
    fn log_call(&self, signature: [u64; SIGNATURE_WORDS]);

    /// Returns whether a rank has announced its exit. Waiting for its data is an error once the
    /// last bytes have been read.
    fn has_left(&self, rank: usize) -> bool;

    /// Returns whether this rank knows that a rank has left or ended, also after the communicator has
    /// failed.
    fn is_lost(&self, rank: usize) -> bool {
        self.has_left(rank)
    }

    /// Drops the connections that arrive at `listener` from now on, except during a rendezvous.
    fn drop_connections(&self, _listener: &Arc<ReconnectListener>) {}

    /// Derives a key for connections of this communicator that only its ranks know.
    fn key(&self, purpose: &str) -> [u8; 32];

    /// Sends that this rank makes no more calls and exchanges, ahead of [`OutOfBand::leave`]. From
    /// then on this rank's exit is no failure to other ranks, and their exit no failure to this
    /// rank. Does not wait for other ranks.
    fn close(&self) {}

    /// Returns whether ranks of this rank's host are in several network namespaces, and reach each other's UNIX
    /// sockets by files in a directory that they share.
    fn shares_directory(&self) -> bool {
        false
    }

    /// Waits after [`OutOfBand::close`] until all other ranks have closed.
    ///
    /// # Errors
    /// As for [`OutOfBand::all_gather`], also if a rank is gone that had not closed.
    fn wait_closed(&self) -> Result<()> {
        self.barrier()
    }

    /// Announces the exit of this rank: a later end of its connection is no failure.
    fn leave(&self);
}

impl dyn OutOfBand + '_ {
    /// Returns the address of a UNIX socket by which ranks of this rank's host reach each other.
    pub(crate) fn local_address(&self, name: [u8; 16]) -> Address {
        match self.shares_directory() {
            true => Address::Shared(name),
            false => Address::Local(name),
        }
    }

    /// All-gathers the result of a local step, so that no rank waits for a failed rank. Returns the
    /// result of every rank; an error names its rank, and `what` this rank could not do.
    ///
    /// # Errors
    /// As for [`OutOfBand::all_gather`].
    pub(crate) fn gather_results<T: Wire>(
        &self,
        what: &str,
        mine: &Result<T>,
    ) -> Result<Vec<Result<T>>> {
        let mut writer = Writer::default();
        match mine {
            Ok(value) => writer.put(&true).put(value),
            Err(error) => writer.put(&false).put(error),
        };
        let read = |bytes: &[u8]| -> crate::wire::WireResult<Result<T>> {
            let mut reader = Reader(bytes);
            let outcome = match reader.take()? {
                true => Ok(reader.take()?),
                false => Err(reader.take::<Error>()?),
            };
            reader.end().map(|()| outcome)
        };
        let all = self.all_gather(&writer.0)?;
        let outcomes = all.iter().zip(self.peers());
        let outcomes = outcomes.map(|(bytes, peer)| match read(bytes) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(Error::new(
                ErrorKind::Remote,
                format!("{peer} cannot {what}: {}", error.message()),
            )),
            Err(Damaged) => Err(Error::new(
                ErrorKind::Mismatch,
                format!("{peer} sent an outcome in another format: use one version"),
            )),
        });
        Ok(outcomes.collect())
    }
}

/// Longest time from the report that another rank is gone to the end of waits.
const PEER_EXIT_TIMEOUT: Duration = Duration::from_millis(200);

/// Raises `fault` for an error that another rank reports. The exit of a rank fails only calls that
/// lack its data, and the report may overtake that data. So waits continue for one heartbeat, at
/// most [`PEER_EXIT_TIMEOUT`]. Any other error means that the calls themselves are wrong, and ends
/// waits at once.
fn raise_reported(fault: &Fault, error: Error, heartbeat: Duration) {
    match error.kind() {
        ErrorKind::Aborted | ErrorKind::Remote => {
            fault.raise_at(error, Instant::now() + heartbeat.min(PEER_EXIT_TIMEOUT))
        }
        _ => fault.raise(error),
    };
}

/// Shared reference to the out-of-band exchange of a communicator.
pub type OutOfBandRef = Arc<dyn OutOfBand>;
