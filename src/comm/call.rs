//! One call and its report.

use crate::error::{Error, Result};
use crate::plan::Request;
use crate::types::{Algorithm, CodecChoice, CodecSpec, Collective, DType, Extent, Fused, ReduceOp};

pub use crate::engine::Report;

/// No 64-bit processor has more address bits: a larger buffer cannot exist.
const MAX_BUFFER_BYTES: u64 = 1 << 56;

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

    /// Bytes of this rank's buffer of `extent`, which a C caller calls `name` and says is at
    /// `address`, 0 for NULL.
    ///
    /// # Errors
    /// Invalid argument if it is needed and NULL, or no buffer of that size can be there.
    pub fn buffer_bytes(
        &self,
        name: &str,
        address: usize,
        extent: Extent,
        nranks: usize,
    ) -> Result<usize> {
        let bytes = extent
            .elements(self.count, nranks)
            .and_then(|elements| elements.checked_mul(self.dtype.size()))
            .filter(|&bytes| bytes as u64 <= MAX_BUFFER_BYTES)
            .filter(|&bytes| address.checked_add(bytes).is_some());
        let what = || {
            format!(
                "{} of {} {} among {nranks} ranks",
                self.collective, self.count, self.dtype
            )
        };
        match bytes {
            None => Err(Error::invalid_argument(format!(
                "{} needs a {name} beyond the end of memory",
                what()
            ))),
            Some(0) => Ok(0),
            Some(bytes) if address == 0 => Err(Error::invalid_argument(format!(
                "{name} is NULL, but {} needs {bytes} bytes there on this rank",
                what()
            ))),
            Some(bytes) => Ok(bytes),
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
            fused: Fused::ALONE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_buffers_are_refused() {
        let (here, null) = (0x1000, 0);
        let ask = |address, extent, count, dtype| {
            let call = Call::new(Collective::AllGather, dtype, count);
            call.buffer_bytes("recvbuf", address, extent, 4)
        };
        assert_eq!(ask(here, Extent::CountPerRank, 2, DType::F32).unwrap(), 32);
        assert_eq!(ask(null, Extent::Count, 0, DType::F32).unwrap(), 0);
        assert_eq!(ask(null, Extent::Unused, 9, DType::F32).unwrap(), 0);
        for (address, extent, count, dtype, said) in [
            (null, Extent::Count, 1, DType::F64, "needs 8 bytes there"),
            (here, Extent::Count, usize::MAX, DType::I8, "beyond the end"),
            (
                here,
                Extent::Count,
                usize::MAX / 2,
                DType::I8,
                "beyond the end",
            ),
            (
                here,
                Extent::Count,
                usize::MAX / 4,
                DType::F32,
                "beyond the end",
            ),
            (
                here,
                Extent::CountPerRank,
                usize::MAX / 4 + 1,
                DType::I8,
                "beyond the end",
            ),
            (
                here,
                Extent::CountPerRank,
                usize::MAX / 16,
                DType::F64,
                "beyond the end",
            ),
            (
                usize::MAX - 7,
                Extent::Count,
                9,
                DType::I8,
                "beyond the end",
            ),
        ] {
            let error = ask(address, extent, count, dtype).unwrap_err();
            assert!(error.message().contains(said), "{error}");
            assert!(error.message().contains("recvbuf"), "{error}");
        }
    }
}
