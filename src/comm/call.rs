//! One call and its report.

use crate::plan::Request;
use crate::types::{Algorithm, CodecChoice, CodecSpec, Collective, DType, ReduceOp};

pub use crate::engine::Report;

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
    /// Root; of a send/recv, the sender. Ignored where there is none.
    pub root: usize,
    /// Receiver of a send/recv; ignored otherwise.
    pub peer: usize,
    /// Codec; `None` = the communicator's default where that is admitted, else raw.
    pub codec: Option<CodecSpec>,
    /// Lets `codec` run only if the model of costs predicts that the call is faster with it. A
    /// communicator whose own codec is left to the model has measured those costs.
    pub auto: bool,
    /// Algorithm; `None` = the communicator's choice, else the cheapest.
    pub algorithm: Option<Algorithm>,
    /// Names the tensor whose scales live from call to call (`tensor=K` codecs).
    pub tensor: Option<u64>,
    /// Turns error feedback on, and names the tensor whose residuals live from call to call: what
    /// a lossy encode drops is added to the next call of the same id, count and cut. For
    /// collectives that reduce; without effect where nothing is lost. Ranks need not agree on ids.
    /// On a GPU it takes 8 bytes of device memory an element of the input, and a call that is captured
    /// must have been made once before.
    pub feedback: Option<u64>,
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
            auto: false,
            algorithm: None,
            tensor: None,
            feedback: None,
        }
    }

    /// The call with its codecs decided and what it ignores zeroed: what ranks must agree on.
    pub(super) fn request(&self, codec: CodecChoice) -> Request {
        let pair = self.collective == Collective::SendRecv;
        Request {
            collective: self.collective,
            dtype: self.dtype,
            op: if self.collective.reduces() {
                self.op
            } else {
                ReduceOp::Sum
            },
            count: self.count,
            root: if pair || self.collective.has_root() {
                self.root
            } else {
                0
            },
            peer: if pair { self.peer } else { 0 },
            codec: codec.spec,
            auto: codec.auto && codec.spec.is_lossy(),
            intra: codec.intra.unwrap_or(codec.spec),
            algorithm: self.algorithm,
            tensor: self.tensor,
            feedback: self.feedback,
        }
    }
}
