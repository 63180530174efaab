//! The places of calls in the caller's streams, and in graphs.

use super::launch::own_context;
use super::launch_order::ReplayPlace;
use super::work_buffer::Captured;
use super::{Connections, GpuCall, GpuEngine, Kernels};
use crate::error::{Error, Result};
use crate::gpu::{Context, DeviceMemory, Event, Stream};
use crate::mem::DeviceBuffers;
use crate::sys::cuda::CuStream;
use crate::types::Collective;
use std::sync::Arc;

/// What a captured launch uses besides the caller's buffers.
struct Replayed {
    _wiring: Arc<dyn Connections>,
    _kernels: Arc<Kernels>,
    _work_buffer: Option<Captured>,
    _residuals: Option<Arc<DeviceMemory>>,
    _place: ReplayPlace,
}

/// Returns whether calls with these buffers are recorded into a graph instead of executed.
///
/// # Errors
/// Invalid usage if a capture has failed and not been ended; the driver's errors.
pub fn is_capturing(context: &Arc<Context>, buffers: &DeviceBuffers<'_>) -> Result<bool> {
    // SAFETY: the contract of `DeviceBuffers` keeps the stream valid while the buffers exist, and the
    // borrowed value does not outlive them.
    let stream = unsafe { Stream::borrowed(context, CuStream(buffers.stream())) };
    stream.is_capturing()
}

impl GpuEngine {
    /// The capture that all streams of these calls belong to, if they do to one.
    pub(super) fn capture(&self, calls: &[GpuCall<'_>]) -> Result<Option<u64>> {
        let mut found: Option<Option<u64>> = None;
        for call in calls {
            let stream = self.stream(call.buffers.stream());
            own_context(&self.context, &stream)?;
            let capture = stream.capture()?;
            match found {
                None => found = Some(capture),
                Some(first) if first == capture => {}
                Some(_) => {
                    return Err(Error::invalid_usage(format!(
                        "rank {}: the streams of one group are not all in the same capture; \
                         capture all calls of a group together, or none",
                        self.rank
                    )));
                }
            }
        }
        Ok(found.flatten())
    }

    pub(super) fn stream(&self, handle: usize) -> Stream {
        // SAFETY: live until `run` returns, by the contract of `DeviceBuffers`; the value does not
        // outlive it.
        unsafe { Stream::borrowed(&self.context, CuStream(handle)) }
    }

    /// The streams of calls, each once, the first behind what is on the others: all run there, and
    /// the others go on behind them. A group has one place in each of its streams, as if all of it
    /// were on that one. None if no call does anything.
    pub(super) fn join(&self, calls: &[GpuCall<'_>]) -> Result<Vec<Stream>> {
        let mut handles: Vec<usize> = Vec::new();
        let is_empty = |call: &GpuCall<'_>| call.request.count == 0;
        // An empty receive may stand for a send of this group which has taken its place.
        let takes_part = |call: &&GpuCall<'_>| {
            !is_empty(call) || call.request.collective == Collective::SendRecv
        };
        if !calls.iter().all(is_empty) {
            for call in calls.iter().filter(takes_part) {
                let handle = call.buffers.stream();
                if !handles.contains(&handle) {
                    handles.push(handle);
                }
            }
        }
        let handles = handles.into_iter();
        let streams: Vec<Stream> = handles.map(|handle| self.stream(handle)).collect();
        if let Some((first, others)) = streams.split_first() {
            for other in others {
                // An event of its own: the driver keeps what is waited for.
                let reached = Event::new(&self.context)?;
                reached.record(other)?;
                first.wait_event(&reached)?;
            }
        }
        Ok(streams)
    }

    /// Keeps what a captured launch uses for as long as its graph may replay it.
    pub(super) fn keep(
        &self,
        stream: &Stream,
        capture: Option<u64>,
        work_buffer: Option<Captured>,
        residuals: Option<Arc<DeviceMemory>>,
    ) -> Result<()> {
        let Some(capture) = capture else {
            return Ok(());
        };
        let kept = Arc::new(Replayed {
            _wiring: self.wiring.clone(),
            _kernels: self.kernels.clone(),
            _work_buffer: work_buffer,
            _residuals: residuals,
            _place: self.order.kept_for_replays(capture),
        });
        stream.keep_for_replay(kept).map(drop)
    }

    /// Queues something behind this communicator's last launch.
    pub(super) fn queue(
        &mut self,
        stream: &Stream,
        capture: Option<u64>,
        what: impl FnOnce(&mut GpuEngine) -> Result<()>,
    ) -> Result<()> {
        self.order.enter(stream, capture)?;
        if capture.is_none() {
            self.wake_proxy();
        }
        let queued = what(self).and_then(|()| self.order.leave(stream, capture));
        if capture.is_none() {
            self.wake_proxy();
        }
        queued
    }
}
