//! Statistics of calls. A kernel of its own reads the input before the call if they are wanted. The call's kernel takes
//! the verdict of the output and writes the result, or else another kernel behind it.

use super::kernels::STATISTICS_PREFIX;
use super::launch::PreparedPlan;
use super::{GpuCall, GpuEngine, await_event};
use crate::error::{Error, Result};
use crate::gpu::abi::{
    CommView, FACTOR_AT, PREMULTIPLY, STATISTICS_THREADS, SUMS_OFFSET, StatisticsArgs,
    cursors_bytes,
};
use crate::gpu::{Context, DeviceMemory, Event, Stream};
use crate::mem::DeviceBuffers;
use crate::reduce::factor_word;
use crate::sync::Fault;
use crate::types::{CallStatistics, Extent, Protocol, ReduceOp, Scalar};
use std::ptr::without_provenance_mut;
use std::sync::Arc;
use std::time::Duration;

/// Number of elements that a block of a statistics kernel handles at a time.
const BLOCK_ELEMENTS: u64 = 512 * (STATISTICS_THREADS as u64 / 32);

/// How long other work of the caller's stream may delay the statistics that a program reads.
const READ_TIMEOUT: Duration = Duration::from_secs(3600);

/// Blocks of a statistics kernel for each multiprocessor.
const BLOCKS_PER_MULTIPROCESSOR: u64 = 4;

/// An array whose statistics a kernel takes.
#[derive(Clone, Copy, Debug)]
pub(super) enum StatisticsArray {
    /// A call's contribution at this address. Finite elements beyond `largest` saturate.
    Input { address: u64, largest: f32 },
    /// A call's output at this address. Its kernel writes the result.
    Output(u64),
}

impl GpuEngine {
    /// Queues `what`, the launches of a call, and before and behind it the other launches that its statistics need.
    pub(super) fn with_statistics(
        &mut self,
        call: &GpuCall<'_>,
        run: &PreparedPlan,
        (stream, capture): (&Stream, Option<u64>),
        what: impl FnOnce(&mut GpuEngine) -> Result<()>,
    ) -> Result<()> {
        if call.buffers.statistics().is_none() {
            return what(self);
        }
        if call.buffers.takes_input_statistics() {
            self.take_input_statistics(call, run, (stream, capture))?;
        }
        what(self)?;
        match run.writes_statistics(call.request.op) {
            true => Ok(()),
            false => self.take_output_statistics(call, (stream, capture)),
        }
    }

    /// Queues the statistics of a call's input, if it has one.
    fn take_input_statistics(
        &mut self,
        call: &GpuCall<'_>,
        run: &PreparedPlan,
        at: (&Stream, Option<u64>),
    ) -> Result<()> {
        let extent = call.request.collective.input_extent(self.is_root(call));
        match self.elements(call, extent)? {
            0 => Ok(()),
            count => {
                let array = StatisticsArray::Input {
                    address: call.buffers.input().0,
                    largest: run.largest(call.request.op)?,
                };
                self.take_statistics(call, array, count, at)
            }
        }
    }

    /// Queues the verdict of a call's output, of which there may be nothing, and the result behind it.
    pub(super) fn take_output_statistics(
        &mut self,
        call: &GpuCall<'_>,
        at: (&Stream, Option<u64>),
    ) -> Result<()> {
        let extent = call.request.collective.output_extent(self.is_root(call));
        let count = self.elements(call, extent)?;
        let array = StatisticsArray::Output(call.buffers.output().0);
        self.take_statistics(call, array, count, at)
    }

    fn is_root(&self, call: &GpuCall<'_>) -> bool {
        call.request.root == self.rank
    }

    /// Returns the number of elements of the call in a buffer, which may be longer.
    fn elements(&self, call: &GpuCall<'_>, extent: Extent) -> Result<usize> {
        let count = extent.elements(call.request.count, self.nranks);
        count.ok_or_else(|| Error::internal("a checked call has too many elements"))
    }

    fn take_statistics(
        &mut self,
        call: &GpuCall<'_>,
        array: StatisticsArray,
        count: usize,
        (stream, capture): (&Stream, Option<u64>),
    ) -> Result<()> {
        let dtype = call.request.dtype;
        let function = self
            .kernels
            .find(&format!("{STATISTICS_PREFIX}{dtype}"))?
            .clone();
        let view = self.connections.view(&[], Protocol::Simple, self.timeout);
        let (elements, result, largest, (factor, flags)) = match array {
            StatisticsArray::Input { address, largest } => (address, 0, largest, factor_of(call)?),
            StatisticsArray::Output(address) => {
                let result = call.buffers.statistics().unwrap_or(0);
                (address, result, f32::INFINITY, (0, 0))
            }
        };
        let args = StatisticsArgs {
            elements,
            count: count as u64,
            sums: sums_of(&view),
            result,
            factor,
            flags: flags.into(),
            largest: largest.to_bits(),
            has_input: call.buffers.takes_input_statistics().into(),
            unused: 0,
        };
        let most = u64::from(self.context.device().multiprocessors) * BLOCKS_PER_MULTIPROCESSOR;
        let blocks = args.count.div_ceil(BLOCK_ELEMENTS).clamp(1, most) as u32;
        self.queue(stream, capture, |engine| {
            // SAFETY: the kernel takes `cinch_statistics_args`, and waits for its predecessor before it touches
            // memory. `end` and `keep` hold the connections, which own the sums, until no kernel uses them; the
            // contract of `DeviceBuffers` covers the array and the result.
            unsafe {
                function.launch_with(
                    engine.launch_mode,
                    blocks,
                    STATISTICS_THREADS,
                    0,
                    stream,
                    &args,
                )?;
            }
            engine.keep(stream, capture, None, Vec::new())
        })
    }
}

/// Returns the statistics in an array, which is the input of `array`, once the work of its stream has ended.
///
/// # Errors
/// Invalid argument for a part of a struct; the fault's reason; timeout after an hour; the driver's errors.
pub fn read_statistics(
    context: &Arc<Context>,
    fault: &Fault,
    array: &DeviceBuffers<'_>,
) -> Result<Vec<CallStatistics>> {
    const BYTES: usize = size_of::<CallStatistics>();
    let (address, bytes) = array.input();
    if !bytes.is_multiple_of(BYTES) {
        return Err(Error::invalid_argument(format!(
            "an array of {bytes} bytes has no whole number of statistics of {BYTES} bytes"
        )));
    }
    // SAFETY: the contract of `DeviceBuffers` keeps the stream valid until the function returns.
    let stream = unsafe { Stream::borrowed(context, without_provenance_mut(array.stream())) };
    let reached = Event::new(context)?;
    reached.record(&stream)?;
    await_event(
        &reached,
        fault,
        READ_TIMEOUT,
        "the calls whose statistics are read",
    )?;
    let mut bytes = vec![0; bytes];
    if !bytes.is_empty() {
        // SAFETY: the contract of `DeviceBuffers` keeps the array readable.
        let memory = unsafe { DeviceMemory::lent(context, address, bytes.len()) };
        memory.read(0, &mut bytes, &stream, READ_TIMEOUT)?;
    }
    // After a failure the kernels end, and leave statistics of an incomplete output, or none.
    fault.check()?;
    let (all, _) = bytes.as_chunks::<BYTES>();
    Ok(all.iter().map(CallStatistics::from_bytes).collect())
}

/// Returns the address of the partial sums behind a rank's cursors.
fn sums_of(view: &CommView) -> u64 {
    view.cursors + (cursors_bytes(view.nranks as usize) + SUMS_OFFSET) as u64
}

/// Returns the factor of a pre-multiplied sum's contributions, with the flags for a kernel.
fn factor_of(call: &GpuCall<'_>) -> Result<(u64, u8)> {
    if !call.request.collective.reduces() {
        return Ok((0, 0));
    }
    Ok(match call.request.op {
        ReduceOp::PreMulSum(Scalar::Device(address)) => (address, PREMULTIPLY | FACTOR_AT),
        ReduceOp::PreMulSum(scalar) => (factor_word(call.request.dtype, scalar)?, PREMULTIPLY),
        _ => (0, 0),
    })
}
