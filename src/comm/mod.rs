//! Communicators: what a program holds.

mod call;
mod typed;

pub use call::{Call, Group, Report};

use crate::bootstrap::{PeerInfo, UniqueId};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::mem::UserBuffers;
use crate::types::TransportKind;

/// A group of ranks that call collectives together.
///
/// Calls block until their buffers may be used again. Two threads may hold one communicator, but
/// its calls run one after the other, and all ranks must make them in the same order.
#[derive(Debug)]
pub struct Communicator {}

/// What a communicator is made of, for `cinch info` and logs.
#[derive(Clone, Debug)]
pub struct CommInfo {
    /// Transport to each rank; `None` for this rank itself.
    pub transports: Vec<Option<TransportKind>>,
    /// Lanes.
    pub channels: usize,
    /// Payload bytes of a slot.
    pub slot_bytes: usize,
    /// Slots of a connection.
    pub slots: usize,
    /// Bytes of slot memory on this rank.
    pub buffer_bytes: usize,
}

fn later<T>() -> Result<T> {
    Err(Error::internal("not built yet"))
}

impl Communicator {
    /// Joins the communicator of `id` as `rank` of `nranks`. Returns when all ranks have joined.
    ///
    /// # Errors
    /// Invalid argument for impossible ranks or a damaged id; timeout naming the missing ranks;
    /// mismatch if ranks differ in version or in settings that all must share.
    pub fn init(id: &UniqueId, rank: usize, nranks: usize, config: Config) -> Result<Communicator> {
        let _ = (id, rank, nranks, config);
        later()
    }

    /// Joins the communicator that the launcher describes: `cinch run`, torchrun, mpirun, srun.
    ///
    /// # Errors
    /// Invalid usage if no launcher's variables are there; else as for [`Communicator::init`].
    pub fn from_env(config: Config) -> Result<Communicator> {
        let _ = config;
        later()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        0
    }

    /// Number of ranks.
    pub fn nranks(&self) -> usize {
        0
    }

    /// All ranks, in order.
    pub fn peers(&self) -> &[PeerInfo] {
        &[]
    }

    /// What the communicator is made of.
    pub fn info(&self) -> CommInfo {
        unreachable!()
    }

    /// Runs one call.
    ///
    /// # Errors
    /// Invalid argument, before anything moves, if the call or its buffers are impossible;
    /// mismatch, remote, timeout or aborted otherwise, after which the communicator is only good
    /// for [`Communicator::abort`] and drop, and the output is undefined.
    pub fn call(&self, call: &Call, buffers: UserBuffers<'_>) -> Result<Report> {
        let _ = (call, buffers);
        later()
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        later()
    }

    /// The candidates for a call, their predicted costs and the winner, as text.
    pub fn explain(&self, call: &Call) -> Result<String> {
        let _ = call;
        later()
    }

    /// Splits into communicators of equal `color`, ranked by `key`, then by rank. A rank without
    /// a colour gets none. All ranks must call it.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Communicator>> {
        let _ = (color, key);
        later()
    }

    /// The reason why the communicator has failed, if it has.
    pub fn async_error(&self) -> Option<Error> {
        None
    }

    /// Fails the communicator, on this rank at once and on the others by message. Calls that wait
    /// return [`crate::ErrorKind::Aborted`]. Reaches communicators split from this one.
    pub fn abort(&self) {}

    /// Waits until every rank has finalized: no rank's data is lost by the drop that follows.
    pub fn finalize(&self) -> Result<()> {
        later()
    }
}
