//! Sample windows on a GPU: a part of a coded sum beside the exact sum of those elements. Both are queued
//! behind the call, copied to the host, and compared before the next sample.

use super::launch::copy;
use super::pack::Addresses;
use super::{Admitted, GpuCall, GpuEngine};
use crate::error::Result;
use crate::gpu::{Context, DeviceMemory, Event, PinnedMemory, Stream};
use crate::mem::DeviceBuffers;
use crate::plan::{Request, SAMPLE_WINDOW_ELEMENTS, SampleWindow};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of one region. Codecs only encode element types of at most four bytes.
const REGION_BYTES: usize = SAMPLE_WINDOW_ELEMENTS * 4;

/// Memory for one sample window, which later sample windows reuse.
#[derive(Debug)]
pub struct SampleWindows {
    /// Three regions: exact sums, coded sums of all blocks, and this rank's part of the coded sums.
    device: DeviceMemory,
    /// Two regions: exact sums, and coded sums.
    host: PinnedMemory,
    arrived: Event,
}

/// A coded call, admitted together with the exact calls of its sample window.
#[derive(Debug)]
pub struct Sampled<'a> {
    /// The coded call, followed by the exact sum and the all-gather of the coded sums.
    calls: Vec<GpuCall<'a>>,
    window: SampleWindow,
    admitted: Admitted,
}

impl Sampled<'_> {
    /// Returns the sample window.
    pub fn window(&self) -> &SampleWindow {
        &self.window
    }
}

impl SampleWindows {
    /// Allocates memory on the GPU of `context`. The caller does this before ranks launch kernels, because an
    /// allocation may wait for kernels.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn new(context: &Arc<Context>, deadline: Duration) -> Result<SampleWindows> {
        Ok(SampleWindows {
            device: DeviceMemory::zeroed(context, 3 * REGION_BYTES, deadline)?,
            host: PinnedMemory::new(context, 2 * REGION_BYTES)?,
            arrived: Event::new(context)?,
        })
    }

    /// Admits a coded call together with the exact calls of its sample window: all of them or none.
    ///
    /// # Errors
    /// See [`GpuEngine::admit`].
    pub fn admit<'a>(
        &self,
        engine: &mut GpuEngine,
        call: &GpuCall<'a>,
        window: &SampleWindow,
    ) -> Result<Sampled<'a>> {
        let stream = engine.stream(call.buffers.stream());
        let (exact, all, own) = (0, REGION_BYTES, 2 * REGION_BYTES);
        let between = |request, from, to| self.call(request, (from, to), window, &stream);
        let mut calls = vec![*call, between(window.exact_sum(), exact, exact)];
        calls.extend(window.gather().map(|gather| between(gather, own, all)));
        let admitted = engine.admit(&calls)?;
        Ok(Sampled {
            calls,
            window: *window,
            admitted,
        })
    }

    /// Queues the admitted calls, and the copies before, between and behind them.
    ///
    /// # Errors
    /// See [`GpuEngine::start`].
    pub fn start(&self, engine: &mut GpuEngine, sampled: &Sampled<'_>) -> Result<super::Report> {
        let Sampled {
            calls,
            window,
            admitted: Admitted { prepared, capture },
        } = sampled;
        let (call, capture) = (&calls[0], *capture);
        let stream = engine.stream(call.buffers.stream());
        let base = self.device.address();
        let (exact, all, own) = (0, REGION_BYTES, 2 * REGION_BYTES);
        // The call may overwrite its input, so the window's part of the input is copied first.
        for (block, place) in window.input_places().enumerate() {
            let at = Addresses {
                input: call.buffers.input().0 + place as u64,
                output: base + (block * window.part_bytes()) as u64,
            };
            copy(&stream, at, window.part_bytes())?;
        }
        let reports = engine.start_some(&calls[..1], &prepared[..1], capture)?;
        let coded = match window.gather() {
            Some(_) => own,
            None => all,
        };
        let at = Addresses {
            input: call.buffers.output().0 + window.output_place() as u64,
            output: base + coded as u64,
        };
        copy(&stream, at, window.part_bytes())?;
        engine.start_some(&calls[1..], &prepared[1..], capture)?;
        for region in [exact, all] {
            let at = Addresses {
                input: base + region as u64,
                output: self.host.host().as_ptr().addr() as u64 + region as u64,
            };
            copy(&stream, at, window.bytes())?;
        }
        self.arrived.record(&stream)?;
        reports
            .into_iter()
            .next()
            .ok_or_else(|| crate::error::Error::internal("a call has no report"))
    }

    /// Returns whether the last sample window has been copied to the host.
    ///
    /// # Errors
    /// The driver's errors, which include failures of the calls.
    pub fn has_arrived(&self) -> Result<bool> {
        self.arrived.has_happened()
    }

    /// Returns the exact and the coded sums of the last sample window, which has been copied to the
    /// host.
    pub fn read(&self, window: &SampleWindow) -> [Vec<u8>; 2] {
        [0, REGION_BYTES].map(|region| {
            let mut bytes = vec![0; window.bytes()];
            // SAFETY: the range lies within the pinned memory. The GPU has written it (`has_arrived`) and
            // writes it again only after the next `start` of this caller.
            unsafe {
                let source = self.host.host().as_ptr().add(region);
                source.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
            }
            bytes
        })
    }

    /// Returns an exact call whose input and output are regions of this value's memory.
    fn call(
        &self,
        request: Request,
        (from, to): (usize, usize),
        window: &SampleWindow,
        stream: &Stream,
    ) -> GpuCall<'static> {
        let place = |at: usize| (self.device.address() + at as u64, window.bytes());
        // SAFETY: the regions are this value's own memory, which its owner drops after the engine. The
        // contract of the coded call's `DeviceBuffers` keeps the stream valid.
        let buffers = unsafe { DeviceBuffers::new(place(from), place(to), stream.handle().addr()) };
        GpuCall { request, buffers }
    }
}
