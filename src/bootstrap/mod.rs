//! How ranks find and trust each other, and how they hear that one of them is gone.

mod address;
pub(crate) mod auth;
mod call_log;
mod control;
mod discover;
mod framed_stream;
mod id;
mod join;
mod keys;
mod local;
mod process;
mod rank_entry;
mod reconnect;
mod rendezvous_server;
mod warning_hook;
mod wire;

pub use control::{ControlPlane, MAX_CONTRIBUTION};
pub use discover::{Launch, Meeting, discover, half_set};
pub use local::LocalOutOfBand;
pub use process::host_name;
pub use reconnect::ShrinkRendezvous;
pub use warning_hook::WarningHook;

use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::types::SIGNATURE_WORDS;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a job's ranks share before they are connected: where to meet, and a secret.
///
/// 128 opaque bytes: format, addresses of the rendezvous, a 32-byte secret, a checksum. Its
/// secrecy is that of the channel by which the program hands it around.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub(crate) [u8; 128]);

impl UniqueId {
    /// The bytes, to hand around.
    pub fn as_bytes(&self) -> &[u8; 128] {
        &self.0
    }
}

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

/// One rank, as the others know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Its rank.
    pub rank: usize,
    /// Its process.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Its host's name, for messages.
    pub host: String,
    /// Equal on two ranks exactly if they share a kernel, a network namespace and the user's
    /// `CINCH_HOST_ID`: they can pass file descriptors.
    pub host_id: [u8; 16],
    /// Equal on two ranks exactly if they are threads of one process.
    pub process_id: [u8; 16],
    /// Where its listeners are.
    pub address: IpAddr,
}

impl std::fmt::Display for PeerInfo {
    /// `rank 3 (host b, pid 412)`, as messages name a rank.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "rank {} (host {}, pid {})",
            self.rank, self.host, self.pid
        )
    }
}

/// The out-of-band side of a communicator: slow, reliable, always there.
///
/// Implementations: the control control over TCP, and threads of one process.
pub trait OutOfBand: Send + Sync + std::fmt::Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// All ranks, in order.
    fn peers(&self) -> &[PeerInfo];

    /// Gives `bytes` to everybody and returns everybody's, in rank order.
    ///
    /// # Errors
    /// Remote or timeout, naming the ranks that are missing; the reason of the communicator's
    /// fault if that is raised while waiting.
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Returns when every rank has called it.
    fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(|_| ())
    }

    /// Tells every rank that the communicator has failed, for `reason`; each raises its fault, or
    /// hears of it: see [`Fault`]. Does not wait.
    fn announce(&self, reason: &Error);

    /// CallLog that this rank starts the call with this signature. CallLog of ranks are compared in
    /// the background, so that calls which disagree without exchanging data are found too.
    fn log_call(&self, signature: [u64; SIGNATURE_WORDS]);

    /// Ranks that left in good order. Waiting for data of one of them is an error once its last
    /// bytes are read.
    fn has_left(&self, rank: usize) -> bool;

    /// A key for connections of this communicator that only its ranks know.
    fn key(&self, purpose: &str) -> [u8; 32];

    /// Says that this rank makes no more calls and takes part in no more exchanges, ahead of
    /// [`OutOfBand::leave`]: from here on its end is no failure to the others, nor theirs to it. Waits
    /// for no rank.
    fn close(&self) {}

    /// Behind [`OutOfBand::retire`]: returns when all other ranks have retired, too.
    ///
    /// # Errors
    /// As for [`OutOfBand::all_gather`], also if a rank is gone that had not retired.
    fn wait_closed(&self) -> Result<()> {
        self.barrier()
    }

    /// Leaves in good order. Later losses of connection are not failures.
    fn leave(&self);
}

/// Longest time for which waits go on after the news that another rank is gone.
const GRACE: Duration = Duration::from_millis(200);

/// Tells `fault` what the control side says. A rank that is gone spoils only the calls that lack
/// something of it, and news may overtake data: what is on its way has one heartbeat to arrive, and
/// no more than [`GRACE`]. All else is wrong with the calls themselves, and ends them.
fn pass_on(fault: &Fault, error: Error, heartbeat: Duration) {
    match error.kind() {
        ErrorKind::Aborted | ErrorKind::Remote => {
            fault.hear(error, Instant::now() + heartbeat.min(GRACE))
        }
        _ => fault.raise(error),
    };
}

/// An [`OutOfBand`] behind a pointer.
pub type OutOfBandRef = Arc<dyn OutOfBand>;
