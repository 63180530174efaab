//! Times calls on a GPU, for a communicator that decides by measured times whether a codec pays.

use super::{GpuCall, GpuEngine, await_event};
use crate::error::Result;
use crate::gpu::{CaptureMode, Context, DeviceMemory, Event, Graph, Stream};
use crate::mem::DeviceBuffers;
use crate::plan::{Request, TimedCall};
use std::sync::Arc;
use std::time::Duration;

/// Calls of a measurement, one behind the other, whose mean counts: ranks do not launch the first one at the same time.
const CALLS: u32 = 8;

/// Measurements, of which the shortest counts.
const ROUNDS: u32 = 3;

/// Byte that fills the input: numbers of fp32 and bf16 near 0.05.
const FILL: u8 = 0x3d;

/// Memory, a stream and events to time calls with.
#[derive(Debug)]
pub struct CallTimer {
    /// Input and output, of `bytes` each.
    memory: DeviceMemory,
    bytes: usize,
    stream: Arc<Stream>,
    begin: Event,
    end: Event,
}

impl CallTimer {
    /// Allocates for calls of up to `bytes` bytes. The caller does this before ranks launch kernels, because an allocation
    /// may wait for kernels.
    ///
    /// # Errors
    /// The driver's errors; timeout.
    pub fn new(context: &Arc<Context>, bytes: usize, deadline: Duration) -> Result<CallTimer> {
        let stream = Arc::new(Stream::new(context)?);
        let memory = DeviceMemory::queued(&stream, 2 * bytes)?;
        // The first kernel of a stream may wait for all kernels of the GPU.
        memory.fill(FILL, &stream)?;
        stream.wait(deadline)?;
        Ok(CallTimer {
            memory,
            bytes,
            stream,
            begin: Event::timed(context)?,
            end: Event::timed(context)?,
        })
    }

    /// Captures some calls of one kind, which the host may launch more slowly than they run. All ranks capture before any
    /// of them launches: a kernel that is loaded, and a graph that is made, may wait for other kernels of the GPU.
    ///
    /// # Errors
    /// See [`GpuEngine::run`].
    pub fn capture(&self, engine: &mut GpuEngine, call: &TimedCall) -> Result<Graph> {
        let calls = [self.call(call.request())];
        engine.admit(&calls)?;
        Graph::capture(&self.stream, CaptureMode::ThreadLocal, |_| {
            (0..CALLS).try_for_each(|_| engine.run(&calls).map(drop))
        })
    }

    /// Launches captured calls some times, as all ranks do, and returns the seconds of one of them.
    ///
    /// # Errors
    /// The communicator's fault; timeout after `deadline`; the driver's errors.
    pub fn time(&self, engine: &GpuEngine, graph: &Graph, deadline: Duration) -> Result<f64> {
        let mut shortest = f64::INFINITY;
        for round in 0..=ROUNDS {
            self.begin.record(&self.stream)?;
            graph.launch(&self.stream)?;
            self.end.record(&self.stream)?;
            await_event(&self.end, &engine.fault, deadline, "timed calls")?;
            // The first launch of a graph also copies it to the GPU.
            if round > 0 {
                shortest = shortest.min(self.end.since(&self.begin)? / f64::from(CALLS));
            }
        }
        Ok(shortest)
    }

    fn call(&self, request: Request) -> GpuCall<'static> {
        let bytes = request.count * request.dtype.size();
        debug_assert!(bytes <= self.bytes);
        let place = |at: usize| (self.memory.address() + at as u64, bytes);
        let stream = self.stream.handle().addr();
        // SAFETY: both places lie in this value's own memory, and the stream is its own. The calls run in `time` alone, which
        // returns when they have ended, or the communicator has failed and its kernels end.
        let buffers = unsafe { DeviceBuffers::new(place(0), place(self.bytes), stream) };
        GpuCall { request, buffers }
    }
}

impl GpuEngine {
    /// Makes later calls with an `auto:` codec decide by timed calls. All ranks must do so before the same call, with equal
    /// times.
    ///
    /// # Errors
    /// See [`crate::plan::Planner::plan`].
    pub fn set_call_times(&mut self, timed: &[TimedCall]) -> Result<()> {
        self.planner.set_call_times(timed)
    }
}
