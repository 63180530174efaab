//! Calls on the caller's streams and in stream captures, and the resources that a graph keeps.

use super::launch::own_context;
use super::launch_order::ReplayOrder;
use super::work_buffer::CapturedWork;
use super::{Connections, GpuCall, GpuEngine, Kernels};
use crate::error::{Error, Result};
use crate::gpu::{Context, DeviceMemory, Event, Stream};
use crate::mem::DeviceBuffers;
use crate::types::Collective;
use std::ptr::without_provenance_mut;
use std::sync::Arc;

/// Resources that a captured launch uses besides the caller's buffers. The graph keeps them for its replays.
struct ReplayResources {
    _connections: Arc<dyn Connections>,
    _kernels: Arc<Kernels>,
    _work_buffer: Option<CapturedWork>,
    /// Residuals and kept scales.
    _memory: Vec<Arc<DeviceMemory>>,
    _order: ReplayOrder,
}

/// Returns whether calls with these buffers are recorded into a graph instead of executed.
///
/// # Errors
/// Invalid usage if a capture has failed and not been ended; the driver's errors.
pub fn is_capturing(context: &Arc<Context>, buffers: &DeviceBuffers<'_>) -> Result<bool> {
    // SAFETY: the contract of `DeviceBuffers` keeps the stream valid while the buffers exist, and the
    // borrowed value does not outlive them.
    let stream = unsafe { Stream::borrowed(context, without_provenance_mut(buffers.stream())) };
    stream.is_capturing()
}

impl GpuEngine {
    /// Returns the capture that all streams of these calls belong to; `None` outside captures.
    ///
    /// # Errors
    /// Invalid usage if only some streams are captured, or if they belong to different captures.
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
        // SAFETY: the contract of `DeviceBuffers` keeps the stream valid until `run` returns, and the borrowed
        // value does not outlive `run`.
        unsafe { Stream::borrowed(&self.context, without_provenance_mut(handle)) }
    }

    /// Returns the streams of the calls without duplicates, and makes the first stream wait for all others.
    /// All calls run on the first stream, and the other streams continue after them. Thus a group is ordered
    /// in each of its streams as if it ran there. Empty if no call has elements or statistics.
    pub(super) fn join(&self, calls: &[GpuCall<'_>]) -> Result<Vec<Stream>> {
        let mut handles: Vec<usize> = Vec::new();
        // Statistics are written for a call without elements, too.
        let is_empty =
            |call: &GpuCall<'_>| call.request.count == 0 && call.buffers.statistics().is_none();
        // An empty receive still takes part, because its stream must wait for a send in this group
        // from the rank to itself.
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
                // Each wait needs an event of its own; the driver keeps the event until then.
                let reached = Event::new(&self.context)?;
                reached.record(other)?;
                first.wait_event(&reached)?;
            }
        }
        Ok(streams)
    }

    /// Attaches a captured launch's resources to its graph.
    pub(super) fn keep(
        &self,
        stream: &Stream,
        capture: Option<u64>,
        work_buffer: Option<CapturedWork>,
        memory: Vec<Arc<DeviceMemory>>,
    ) -> Result<()> {
        let Some(capture) = capture else {
            return Ok(());
        };
        let kept = Arc::new(ReplayResources {
            _connections: self.connections.clone(),
            _kernels: self.kernels.clone(),
            _work_buffer: work_buffer,
            _memory: memory,
            _order: self.order.kept_for_replays(capture),
        });
        stream.keep_for_replay(kept).map(drop)
    }

    /// Runs `what`, which queues work, so that the work runs after this communicator's last launch;
    /// also wakes the proxy.
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
