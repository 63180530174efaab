//! Statistics of calls on GPUs: where a call writes them, and how a program reads them.

use super::{Call, Communicator};
use crate::engine::gpu;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, Space, select};
use crate::mem::DeviceBuffers;
use crate::types::{CallStatistics, Collective};

impl Communicator {
    /// Checks where a call on this GPU writes its statistics, if it takes any.
    pub(super) fn check_statistics(&self, call: &Call, buffers: &DeviceBuffers<'_>) -> Result<()> {
        let Some(address) = buffers.statistics() else {
            return Ok(());
        };
        let what = || format!("{}: the statistics", call.collective);
        if call.collective == Collective::SendRecv {
            return Err(Error::invalid_argument(
                "send and recv take no statistics: set statistics to NULL, and use a collective for them",
            ));
        }
        if !call.dtype.is_float() {
            return Err(Error::invalid_argument(format!(
                "{} of {} elements: only floats have statistics",
                what(),
                call.dtype
            )));
        }
        if !address.is_multiple_of(align_of::<CallStatistics>() as u64) {
            return Err(Error::invalid_argument(format!(
                "{} at {address:#x} are not aligned to {} bytes",
                what(),
                align_of::<CallStatistics>()
            )));
        }
        let bytes = size_of::<CallStatistics>();
        for (name, (begin, length)) in [("input", buffers.input()), ("output", buffers.output())] {
            let [end, of_call] = [(address, bytes), (begin, length)]
                .map(|(begin, length)| begin.saturating_add(length as u64));
            let overlaps = address < of_call && begin < end;
            if length > 0 && overlaps {
                return Err(Error::invalid_argument(format!(
                    "{} of {bytes} bytes at {address:#x} overlap the {name} of {length} bytes at {begin:#x}",
                    what()
                )));
            }
        }
        let context = self.gpu_state()?.context();
        check_place(context, &what, (address, bytes))
    }

    /// Returns the statistics that calls have written in one array, which is the input of `array`. Waits until all
    /// earlier work of the array's stream has ended.
    ///
    /// # Errors
    /// Invalid usage on a communicator of host memory, or while the stream is captured; invalid argument for memory
    /// that a call cannot write; the reason why the communicator has failed; timeout after an
    /// hour; the driver's errors.
    pub fn read_statistics(&self, array: DeviceBuffers<'_>) -> Result<Vec<CallStatistics>> {
        let gpu = self.gpu_state()?;
        self.check_fault()?;
        let (address, bytes) = array.input();
        if bytes > 0 {
            let what = || "the statistics to read".to_string();
            check_place(gpu.context(), &what, (address, bytes))?;
        }
        if gpu::is_capturing(gpu.context(), &array)? {
            return Err(Error::new(
                ErrorKind::InvalidUsage,
                "statistics cannot be read while their stream is captured: read them after a launch of the graph",
            ));
        }
        gpu::read_statistics(gpu.context(), &self.fault, &array)
    }
}

/// Rejects bytes, at least one, whose first or last kernels of `context`'s GPU may not write.
fn check_place(
    context: &Context,
    what: &impl Fn() -> String,
    (address, bytes): (u64, usize),
) -> Result<()> {
    for address in [address, address.saturating_add(bytes as u64 - 1)] {
        if context.driver().pointer(address)?.space != Space::Pinned {
            select::check_address(context, what, address)?;
        }
    }
    Ok(())
}
