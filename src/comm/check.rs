//! Checks of a call and its buffers before anything moves.

use super::{Call, Communicator};
use crate::error::{Error, Result};
use crate::mem::{DeviceBuffers, UserBuffers};
use crate::types::{Extent, InPlace, ReduceOp, Scalar};

/// Address and bytes of each buffer of a call.
pub(super) struct BufferRanges {
    input: (usize, usize),
    output: (usize, usize),
}

impl From<&UserBuffers<'_>> for BufferRanges {
    fn from(buffers: &UserBuffers<'_>) -> BufferRanges {
        BufferRanges {
            input: (buffers.input_address(), buffers.input_bytes()),
            output: (buffers.output_address(), buffers.output_bytes()),
        }
    }
}

impl From<&DeviceBuffers<'_>> for BufferRanges {
    fn from(buffers: &DeviceBuffers<'_>) -> BufferRanges {
        let place = |(address, bytes): (u64, usize)| (address as usize, bytes);
        BufferRanges {
            input: place(buffers.input()),
            output: place(buffers.output()),
        }
    }
}

/// Checks a call and its buffers.
pub(super) fn call(comm: &Communicator, call: &Call, buffers: &BufferRanges) -> Result<()> {
    shape(comm, call)?;
    sizes(comm, call, buffers)?;
    overlap(comm, call, buffers)
}

/// Checks ranks, counts and operators.
pub(super) fn shape(comm: &Communicator, call: &Call) -> Result<()> {
    let (rank, nranks) = (comm.rank(), comm.nranks());
    let name = call.collective.name();
    let in_range = |what: &str, value: usize| {
        if value < nranks {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{name}: {what} {value} is not a rank of a communicator of {nranks}"
        )))
    };
    if call.collective.has_root() {
        in_range("root", call.root)?;
    }
    if call.collective.is_message() {
        in_range("sender", call.root)?;
        in_range("receiver", call.peer)?;
        if call.root != rank && call.peer != rank {
            return Err(Error::invalid_argument(format!(
                "send from {} to {} was called on rank {rank}, which is neither",
                call.root, call.peer
            )));
        }
    }
    let bytes = call
        .count
        .checked_mul(nranks)
        .and_then(|all| all.checked_mul(call.dtype.size()));
    if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Error::invalid_argument(format!(
            "{name}: {} elements of {} on {nranks} ranks exceed the address space",
            call.count, call.dtype
        )));
    }
    if call.feedback.is_some() && !call.collective.reduces() {
        return Err(Error::invalid_argument(format!(
            "{name}: error feedback is for collectives that reduce; leave the call's feedback unset"
        )));
    }
    if call.collective.reduces()
        && call.op == ReduceOp::Avg
        && !call.dtype.is_float()
        && !call.wrapping_average
    {
        return Err(Error::invalid_argument(format!(
            "{name}: avg of {} would wrap in its sum before it divides; sum elements of a wider type and \
             divide, or take a float type",
            call.dtype
        )));
    }
    if call.collective.reduces()
        && let ReduceOp::PreMulSum(scalar) = call.op
        && match scalar {
            Scalar::Float(_) => !call.dtype.is_float(),
            Scalar::Int(_) => call.dtype.is_float(),
            // `check_on` checks the address, because it knows the GPU.
            Scalar::Device(_) => comm.gpu_context().is_none(),
        }
    {
        return Err(Error::invalid_argument(format!(
            "{name}: the factor {scalar:?} of the pre-multiplied sum does not fit {} elements",
            call.dtype
        )));
    }
    Ok(())
}

/// Checks that the buffers are as large as the call needs.
fn sizes(comm: &Communicator, call: &Call, buffers: &BufferRanges) -> Result<()> {
    let is_root = call.root == comm.rank();
    let (mut input, mut output) = (
        call.collective.input_extent(is_root),
        call.collective.output_extent(is_root),
    );
    if call.collective.is_message() && call.root == call.peer {
        // A rank that sends to itself makes two calls: a send with an input, and a receive with an
        // output.
        if buffers.input.1 == 0 {
            input = Extent::Unused;
            output = Extent::Count;
        }
    }
    let size = call.dtype.size();
    for (what, extent, bytes) in [
        ("input", input, buffers.input.1),
        ("output", output, buffers.output.1),
    ] {
        let need = extent
            .elements(call.count, comm.nranks())
            .unwrap_or(usize::MAX)
            * size;
        if bytes < need {
            return Err(Error::invalid_argument(format!(
                "{}: the {what} buffer of rank {} has {bytes} bytes, but {need} are needed for a \
                 count of {} {} on {} ranks",
                call.collective,
                comm.rank(),
                call.count,
                call.dtype,
                comm.nranks()
            )));
        }
    }
    Ok(())
}

/// Checks that input and output are disjoint, or in place as NCCL defines it.
fn overlap(comm: &Communicator, call: &Call, buffers: &BufferRanges) -> Result<()> {
    let (nranks, rank) = (comm.nranks(), comm.rank());
    let is_root = call.root == rank;
    let size = call.dtype.size();
    let extent = |extent: Extent| extent.elements(call.count, nranks).unwrap_or(usize::MAX) * size;
    let input = (
        buffers.input.0,
        extent(call.collective.input_extent(is_root)),
    );
    let output = (
        buffers.output.0,
        extent(call.collective.output_extent(is_root)),
    );
    if input.1 == 0
        || output.1 == 0
        || buffers.input.1 == 0
        || buffers.output.1 == 0
        || input.0 + input.1 <= output.0
        || output.0 + output.1 <= input.0
    {
        return Ok(());
    }
    let block = call.count * size * rank;
    let allowed = match call.collective.in_place() {
        InPlace::Same => input.0 == output.0,
        InPlace::InputInOutput => input.0 == output.0 + block,
        InPlace::OutputInInput => output.0 == input.0 + block,
        InPlace::Never => false,
    };
    if allowed {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "{}: input ({} bytes at {:#x}) and output ({} bytes at {:#x}) overlap, but not as an \
         in-place call on rank {rank} allows",
        call.collective, input.1, input.0, output.1, output.0
    )))
}

/// Checks the buffers of a message of a rank to itself. They must be disjoint or one buffer,
/// because their bytes are copied in no defined order.
pub(super) fn own_message_buffers(call: &Call, input: usize, output: usize) -> Result<()> {
    let bytes = call.count * call.dtype.size();
    if input == output || input.abs_diff(output) >= bytes {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "rank {} sends itself {bytes} bytes from {input:#x} to {output:#x}, which overlap: use disjoint \
         buffers or one buffer",
        call.root
    )))
}

/// Refuses a message of a rank to itself outside a group, because its receive would come too late.
pub(super) fn own_message_is_grouped(comm: &Communicator, call: &Call) -> Result<()> {
    if call.collective.is_message() && call.root == call.peer {
        return Err(Error::invalid_usage(format!(
            "rank {} sends to itself outside a group: put the send and its receive into one group",
            comm.rank()
        )));
    }
    Ok(())
}
