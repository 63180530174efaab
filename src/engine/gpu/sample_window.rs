//! SampleWindows of coded sums beside exact sums of the same slices, on a GPU: queued behind the call,
//! brought to the host, looked at when the next one is due.

use super::launch::copy;
use super::pack::Addresses;
use super::{Admitted, GpuCall, GpuEngine};
use crate::error::Result;
use crate::gpu::{Context, DeviceMemory, Event, PinnedMemory, Stream};
use crate::mem::DeviceBuffers;
use crate::plan::{Request, SAMPLE_WINDOW_ELEMENTS, SampleWindow};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of one region: elements that codecs carry have four at most.
const REGION: usize = SAMPLE_WINDOW_ELEMENTS * 4;

/// Memory for one slice at a time.
#[derive(Debug)]
pub struct SampleWindows {
    /// Exact sums, coded ones of all blocks, and this rank's part of those.
    device: DeviceMemory,
    /// Exact sums, and coded ones.
    host: PinnedMemory,
    arrived: Event,
}

/// A coded call that was admitted with what its slice is compared with.
#[derive(Debug)]
pub struct Sampled<'a> {
    /// The coded call first.
    calls: Vec<GpuCall<'a>>,
    slice: SampleWindow,
    admitted: Admitted,
}

impl Sampled<'_> {
    /// The slice.
    pub fn slice(&self) -> &SampleWindow {
        &self.slice
    }
}

impl SampleWindows {
    /// Memory on the GPU of `context`. Before ranks launch anything: what allocates may wait for
    /// kernels.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(context: &Arc<Context>, deadline: Duration) -> Result<SampleWindows> {
        Ok(SampleWindows {
            device: DeviceMemory::zeroed(context, 3 * REGION, deadline)?,
            host: PinnedMemory::new(context, 2 * REGION)?,
            arrived: Event::new(context)?,
        })
    }

    /// Admits a coded call, and behind it what its slice is compared with: all of it, or nothing if
    /// some of it is refused.
    ///
    /// # Errors
    /// As [`GpuEngine::admit`].
    pub fn admit<'a>(
        &self,
        engine: &mut GpuEngine,
        call: &GpuCall<'a>,
        slice: &SampleWindow,
    ) -> Result<Sampled<'a>> {
        let stream = engine.stream(call.buffers.stream());
        let (exact, all, own) = (0, REGION, 2 * REGION);
        let between = |request, from, to| self.call(request, (from, to), slice, &stream);
        let mut calls = vec![*call, between(slice.exact_sum(), exact, exact)];
        calls.extend(slice.gather().map(|gather| between(gather, own, all)));
        let admitted = engine.admit(&calls)?;
        Ok(Sampled {
            calls,
            slice: *slice,
            admitted,
        })
    }

    /// Queues what was admitted.
    ///
    /// # Errors
    /// As [`GpuEngine::start`].
    pub fn start(&self, engine: &mut GpuEngine, sampled: &Sampled<'_>) -> Result<super::Report> {
        let Sampled {
            calls,
            slice,
            admitted: Admitted { prepared, capture },
        } = sampled;
        let (call, capture) = (&calls[0], *capture);
        let stream = engine.stream(call.buffers.stream());
        let base = self.device.address();
        let (exact, all, own) = (0, REGION, 2 * REGION);
        // The call may overwrite its input.
        for (block, place) in slice.input_places().enumerate() {
            let at = Addresses {
                input: call.buffers.input().0 + place as u64,
                output: base + (block * slice.part_bytes()) as u64,
            };
            copy(&stream, at, slice.part_bytes())?;
        }
        let reports = engine.start_some(&calls[..1], &prepared[..1], capture)?;
        let coded = match slice.gather() {
            Some(_) => own,
            None => all,
        };
        let at = Addresses {
            input: call.buffers.output().0 + slice.output_place() as u64,
            output: base + coded as u64,
        };
        copy(&stream, at, slice.part_bytes())?;
        engine.start_some(&calls[1..], &prepared[1..], capture)?;
        for region in [exact, all] {
            let at = Addresses {
                input: base + region as u64,
                output: self.host.host().as_ptr().addr() as u64 + region as u64,
            };
            copy(&stream, at, slice.bytes())?;
        }
        self.arrived.record(&stream)?;
        reports
            .into_iter()
            .next()
            .ok_or_else(|| crate::error::Error::internal("a call has no report"))
    }

    /// Whether the last slice is on the host.
    ///
    /// # Errors
    /// Those of the driver, among them failures of the calls.
    pub fn has_arrived(&self) -> Result<bool> {
        self.arrived.has_happened()
    }

    /// The exact and the coded sums of the last slice, which has arrived.
    pub fn read(&self, slice: &SampleWindow) -> [Vec<u8>; 2] {
        [0, REGION].map(|region| {
            let mut bytes = vec![0; slice.bytes()];
            // SAFETY: within the pinned memory, which the GPU has written (`has_arrived`) and
            // does not write before the next `run`, which is this caller's.
            unsafe {
                let source = self.host.host().as_ptr().add(region);
                source.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
            }
            bytes
        })
    }

    /// An exact call between two regions.
    fn call(
        &self,
        request: Request,
        (from, to): (usize, usize),
        slice: &SampleWindow,
        stream: &Stream,
    ) -> GpuCall<'static> {
        let place = |at: usize| (self.device.address() + at as u64, slice.bytes());
        // SAFETY: regions of our own memory, which lives as long as the engine that may use it
        // (the owner drops it behind the engine); the stream is the call's, which is live.
        let buffers = unsafe { DeviceBuffers::new(place(from), place(to), stream.handle().0) };
        GpuCall { request, buffers }
    }
}
