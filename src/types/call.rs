//! A call as the caller requests it, and as it runs.

use super::signature::COUNT_BITS;
use super::{
    Algorithm, CallSignature, CodecSetting, CodecSpec, Collective, DType, Extent, Fused, Kernel,
    Protocol, ReduceOp,
};
use crate::error::{Error, Result};
use std::num::NonZeroU8;

/// Number of bytes that no buffer has; its elements fit their bits in a signature. No 64-bit processor has more address
/// bits.
const MAX_BUFFER_BYTES: u64 = 1 << COUNT_BITS;

/// Requests about how a call runs, beside its algorithm. Ranks must agree on them. Sends and receives ignore them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CallTuning {
    /// Protocol of the kernel, where the call has a kernel with it, whatever `CINCH_PROTO` is. `None` takes
    /// `CINCH_PROTO`, else the cheapest. Without effect on host memory.
    pub protocol: Option<Protocol>,
    /// Kernel, where the call has one with the protocol, whatever `CINCH_KERNEL` is. `None` takes `CINCH_KERNEL`, else the
    /// cheapest. Without effect on host memory.
    pub kernel: Option<Kernel>,
    /// Largest number of channels, which are the blocks of a kernel. It raises no other bound.
    pub max_channels: Option<NonZeroU8>,
}

impl CallTuning {
    /// Requests nothing.
    pub const AUTO: CallTuning = CallTuning {
        protocol: None,
        kernel: None,
        max_channels: None,
    };

    /// Returns the largest number of channels that the request admits.
    pub(crate) fn most_channels(self) -> usize {
        self.max_channels
            .map_or(usize::MAX, |most| most.get().into())
    }
}

/// A call without its buffers, as the caller requests it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Collective that all ranks run.
    pub collective: Collective,
    /// Type of the elements.
    pub dtype: DType,
    /// How contributions are combined; ignored by collectives that reduce nothing.
    pub op: ReduceOp,
    /// Number of elements. Counts the whole message for all_reduce, broadcast, reduce and
    /// send/recv, and one rank's block for the other collectives.
    pub count: usize,
    /// Root; the sender of a send/recv. Ignored by collectives without a root.
    pub root: usize,
    /// Receiver of a send/recv; ignored by collectives.
    pub peer: usize,
    /// Codec inside a host and between hosts. `None` takes the communicator's codec if that codec
    /// admits the call, else no codec. `auto` uses measured costs if the communicator's own codec
    /// is `auto` too, because only such a communicator measures. On GPUs such a call on another communicator has no codec.
    pub codec: Option<CodecSetting>,
    /// Algorithm; `None` takes the communicator's choice, else the cheapest.
    pub algorithm: Option<Algorithm>,
    /// Protocol and channels.
    pub tuning: CallTuning,
    /// Names the tensor whose scales are kept from call to call (`tensor=K` codecs).
    pub tensor: Option<u64>,
    /// Turns error feedback on, and names the tensor whose residuals are kept from call to call.
    /// The part that a lossy encoding drops is added to the next call of the same id, count and
    /// cut.
    ///
    /// For collectives that reduce; without effect if no codec is lossy. Ranks need not agree on
    /// ids. On a GPU it takes 8 bytes of device memory for each element of the input. A call that a
    /// graph captures must have run once before.
    pub feedback: Option<u64>,
    /// Admits an average of integers, whose sum wraps before it is divided, as `ncclAvg` does. Other calls
    /// with such an average are refused: i8 of 100 and 100 would give -28.
    pub wrapping_average: bool,
}

impl Call {
    /// Creates a sum with root 0, and with the communicator's codec and algorithm.
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
            tuning: CallTuning::AUTO,
            tensor: None,
            feedback: None,
            wrapping_average: false,
        }
    }

    /// Returns the size in bytes of this rank's buffer, whose extent is `extent`. Errors name the
    /// buffer `name`; `address` is the address that the C caller passed, 0 for NULL.
    ///
    /// # Errors
    /// Invalid argument if the buffer is needed and NULL, or would end beyond the address space.
    pub(crate) fn buffer_bytes(
        &self,
        name: &str,
        address: usize,
        extent: Extent,
        nranks: usize,
    ) -> Result<usize> {
        let bytes = extent
            .elements(self.count, nranks)
            .and_then(|elements| elements.checked_mul(self.dtype.size()))
            .filter(|&bytes| (bytes as u64) < MAX_BUFFER_BYTES)
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

    /// Returns the call with the codec that was decided for it. Arguments that the collective
    /// ignores become zero, because ranks must agree on the result.
    pub(crate) fn resolve(&self, codec: CodecSetting) -> ResolvedCall {
        let is_message = self.collective.is_message();
        let op = match self.collective.reduces() {
            true => self.op,
            false => ReduceOp::Sum,
        };
        let rank = |rank: usize, is_named: bool| if is_named { rank } else { 0 };
        ResolvedCall {
            collective: self.collective,
            dtype: self.dtype,
            op,
            count: self.count,
            root: rank(self.root, is_message || self.collective.has_root()),
            peer: rank(self.peer, is_message),
            codec: CodecSetting {
                auto: codec.auto && codec.is_lossy(),
                ..codec
            },
            algorithm: self.algorithm,
            // Messages of a group share a launch, whose channels follow from their sizes.
            tuning: match is_message {
                true => CallTuning::AUTO,
                false => self.tuning,
            },
            tensor: self.tensor,
            feedback: self.feedback,
            fused: Fused::ALONE,
        }
    }
}

/// A call with its codec chosen, in which arguments that the collective ignores are zero. Plans are
/// made from it, and ranks must agree on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResolvedCall {
    /// Collective that all ranks run.
    pub collective: Collective,
    /// Type of the elements.
    pub dtype: DType,
    /// How contributions are combined; set to a sum for collectives that do not reduce.
    pub op: ReduceOp,
    /// Elements of the message or of one rank's block.
    pub count: usize,
    /// Root of the collective, or sender of a send/recv; 0 for collectives without a root.
    pub root: usize,
    /// Receiver of a send/recv; 0 otherwise.
    pub peer: usize,
    /// Codec inside a host, and codec between hosts.
    pub codec: CodecSetting,
    /// Algorithm that the caller requested, if any.
    pub algorithm: Option<Algorithm>,
    /// Protocol and channels that the caller requested.
    pub tuning: CallTuning,
    /// Tensor whose scales are kept.
    pub tensor: Option<u64>,
    /// Tensor whose residuals of error feedback are kept.
    pub feedback: Option<u64>,
    /// The calls of a group that are fused into this call.
    pub fused: Fused,
}

impl ResolvedCall {
    /// Returns the properties of this call on which all ranks must agree. `sequence` is its number,
    /// `algorithm` the chosen algorithm, and `intra` the codec inside hosts.
    pub fn signature(
        &self,
        algorithm: Algorithm,
        intra: CodecSpec,
        sequence: u64,
    ) -> CallSignature {
        CallSignature {
            collective: self.collective,
            dtype: self.dtype,
            op: self.op.number(),
            algorithm,
            tuning: self.tuning,
            intra,
            root: self.root as u32,
            peer: self.peer as u32,
            fused: self.fused,
            count: self.count as u64,
            sequence,
            codec: self.codec.inter,
        }
    }

    /// Returns this call without a codec.
    pub fn without_codec(&self) -> ResolvedCall {
        ResolvedCall {
            codec: CodecSetting {
                auto: self.codec.auto,
                ..CodecSetting::RAW
            },
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_that_cannot_exist_is_refused() {
        let (here, null) = (0x1000, 0);
        let bytes = |address, extent, count, dtype| {
            let call = Call::new(Collective::AllGather, dtype, count);
            call.buffer_bytes("recvbuf", address, extent, 4)
        };
        assert_eq!(
            bytes(here, Extent::CountPerRank, 2, DType::F32).unwrap(),
            32
        );
        assert_eq!(bytes(null, Extent::Count, 0, DType::F32).unwrap(), 0);
        assert_eq!(bytes(null, Extent::Unused, 9, DType::F32).unwrap(), 0);
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
            let error = bytes(address, extent, count, dtype).unwrap_err();
            assert!(error.message().contains(said), "{error}");
            assert!(error.message().contains("recvbuf"), "{error}");
        }
    }
}
