//! Graphs: work that is recorded once and launched many times.

use super::context::Relaxed;
use super::{Context, Event, Stream};
use crate::error::{Error, Result};
use crate::sys;
use crate::sys::cuda::{
    CuGraph, CuGraphExec, CuGraphNode, CuUserObject, capture_mode, capture_status, flags,
};
use std::any::Any;
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

/// What a capture forbids while it goes on: calls that would wait for, or be ordered with, work
/// that is only being recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// Forbidden to all threads of the process.
    Global,
    /// Forbidden to the capturing thread.
    ThreadLocal,
    /// Forbidden to none.
    Relaxed,
}

/// Recorded work that can be launched.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    exec: CuGraphExec,
}

impl Graph {
    /// Records what `work` queues on `stream`, instead of running it.
    ///
    /// # Errors
    /// Those of `work`, after which the stream can be used again; those of the driver.
    pub fn capture(
        stream: &Stream,
        mode: CaptureMode,
        work: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<Graph> {
        let context = stream.context();
        let driver = context.driver();
        let mode = match mode {
            CaptureMode::Global => capture_mode::GLOBAL,
            CaptureMode::ThreadLocal => capture_mode::THREAD_LOCAL,
            CaptureMode::Relaxed => capture_mode::RELAXED,
        };
        {
            let _bound = context.bind()?;
            // SAFETY: a live stream.
            driver.check("cuStreamBeginCapture", unsafe {
                driver.api().cuStreamBeginCapture(stream.handle(), mode)
            })?;
        }
        let worked = work(stream);
        let _bound = context.bind()?;
        let mut recorded = Recorded {
            context,
            graph: CuGraph::default(),
        };
        // SAFETY: the stream's capture was begun above; writes one handle.
        let ended = unsafe {
            driver
                .api()
                .cuStreamEndCapture(stream.handle(), &mut recorded.graph)
        };
        worked?;
        driver.check("cuStreamEndCapture", ended)?;
        let mut exec = CuGraphExec::default();
        // SAFETY: a whole graph; writes one handle.
        driver.check("cuGraphInstantiateWithFlags", unsafe {
            driver
                .api()
                .cuGraphInstantiate(&mut exec, recorded.graph, 0)
        })?;
        Ok(Graph {
            context: context.clone(),
            exec,
        })
    }

    /// Queues the recorded work behind that of `stream`.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        // SAFETY: live handles.
        driver.check("cuGraphLaunch", unsafe {
            driver.api().cuGraphLaunch(self.exec, stream.handle())
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let driver = self.context.driver();
        let _relaxed = Relaxed::to_drop(driver);
        // SAFETY: instantiated by `capture`, destroyed once; launches that are queued still run.
        driver.log("cuGraphExecDestroy", unsafe {
            driver.api().cuGraphExecDestroy(self.exec)
        });
    }
}

/// A graph as it was recorded; a launchable copy outlives it.
struct Recorded<'a> {
    context: &'a Context,
    graph: CuGraph,
}

impl Drop for Recorded<'_> {
    fn drop(&mut self) {
        // A capture that failed leaves no graph.
        if self.graph != CuGraph::default() {
            let driver = self.context.driver();
            let _relaxed = Relaxed::to_drop(driver);
            // SAFETY: ended by `capture`, destroyed once.
            driver.log("cuGraphDestroy", unsafe {
                driver.api().cuGraphDestroy(self.graph)
            });
        }
    }
}

/// Where a capture has come to.
struct Recording {
    id: u64,
    graph: CuGraph,
    /// What the next work of the stream comes behind.
    tips: Vec<CuGraphNode>,
}

/// A mark behind all that a communicator, say, has in a graph: every replay records an event there,
/// for which work outside of the graph can wait.
#[derive(Debug)]
pub struct EndMark {
    capture: u64,
    node: CuGraphNode,
    behind: Vec<CuGraphNode>,
}

impl Stream {
    /// The capture that the stream is in, if it is in one: a number that no other has.
    ///
    /// # Errors
    /// Invalid usage if the capture has failed; those of the driver.
    pub fn capture(&self) -> Result<Option<u64>> {
        Ok(self.recording(false)?.map(|recording| recording.id))
    }

    /// While the stream is being captured: lets every replay record `event` behind what the stream
    /// has now, instead of where `mark` of the same capture was. `event` outlives the graph.
    ///
    /// There is one node a graph, at its end: one behind each of many kernels would cost each of
    /// them half a microsecond.
    ///
    /// # Errors
    /// Invalid usage if the capture has failed, or there is none; those of the driver.
    pub fn mark_end(&self, event: &Event, mark: Option<EndMark>) -> Result<EndMark> {
        let recording = self.recording(true)?.ok_or_else(|| {
            Error::invalid_usage("the stream is in no capture, so there are no replays to mark")
        })?;
        let Recording { id, graph, tips } = recording;
        let _bound = self.context().bind()?;
        let driver = self.context().driver();
        let api = driver.api();
        let Some(mark) = mark.filter(|mark| mark.capture == id) else {
            let mut node = CuGraphNode::default();
            // SAFETY: the graph is being recorded and has these nodes; writes one handle. The event
            // is the caller's to keep.
            driver.check("cuGraphAddEventRecordNode", unsafe {
                api.cuGraphAddEventRecordNode(
                    &mut node,
                    graph,
                    tips.as_ptr(),
                    tips.len(),
                    event.handle(),
                )
            })?;
            return Ok(EndMark {
                capture: id,
                node,
                behind: tips,
            });
        };
        // Nodes cannot be taken out of a graph that is being recorded, edges can.
        let to = |count: usize| vec![mark.node; count];
        let (old, new) = (&mark.behind, &tips);
        // SAFETY: the graph is being recorded; nodes of it, and as many on each side.
        driver.check("cuGraphRemoveDependencies", unsafe {
            api.cuGraphRemoveDependencies(graph, old.as_ptr(), to(old.len()).as_ptr(), old.len())
        })?;
        // SAFETY: as above.
        driver.check("cuGraphAddDependencies", unsafe {
            api.cuGraphAddDependencies(graph, new.as_ptr(), to(new.len()).as_ptr(), new.len())
        })?;
        Ok(EndMark {
            behind: tips,
            ..mark
        })
    }

    /// The capture that the stream is in; its tips only if they are wanted, since the driver refuses
    /// to say those that come with more than order, as launches that begin early do.
    fn recording(&self, with_tips: bool) -> Result<Option<Recording>> {
        let context = self.context();
        let _bound = context.bind()?;
        let driver = context.driver();
        let (mut status, mut id): (c_uint, u64) = (capture_status::NONE, 0);
        let mut graph = CuGraph::default();
        let (mut nodes, mut count): (*const CuGraphNode, usize) = (std::ptr::null(), 0);
        let (to_nodes, to_count): (*mut _, *mut _) = match with_tips {
            true => (&mut nodes, &mut count),
            false => (std::ptr::null_mut(), std::ptr::null_mut()),
        };
        // SAFETY: a live stream; writes one value each, those that are not asked for nowhere.
        driver.check("cuStreamGetCaptureInfo", unsafe {
            driver.api().cuStreamGetCaptureInfo(
                self.handle(),
                &mut status,
                &mut id,
                &mut graph,
                to_nodes,
                to_count,
            )
        })?;
        match status {
            capture_status::NONE => return Ok(None),
            capture_status::ACTIVE => {}
            _ => {
                return Err(Error::invalid_usage(
                    "the stream's capture was invalidated by an earlier call; end it before the \
                     stream is used again",
                ));
            }
        }
        let tips = match count {
            0 => Vec::new(),
            // SAFETY: so many nodes, until the next call that changes what the capture depends on.
            _ => unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec(),
        };
        Ok(Some(Recording { id, graph, tips }))
    }

    /// While the stream is being captured: keeps `object` until the graph, and whatever is made
    /// of it, is gone, since a replay uses the memory and the code that its launches name.
    /// Outside of a capture it does nothing, and returns false.
    ///
    /// # Errors
    /// Invalid usage if the capture has failed; those of the driver.
    pub fn keep_for_replay(&self, object: Arc<dyn Any + Send + Sync>) -> Result<bool> {
        let Some(Recording { graph, .. }) = self.recording(false)? else {
            return Ok(false);
        };
        let context = self.context();
        let _bound = context.bind()?;
        let driver = context.driver();
        let api = driver.api();
        let data = Box::into_raw(Box::new(object)).cast::<c_void>();
        let mut user = CuUserObject::default();
        // SAFETY: `release` takes back exactly what `data` is, once; writes one handle.
        let created = unsafe {
            api.cuUserObjectCreate(
                &mut user,
                data,
                release,
                1,
                flags::USER_OBJECT_NO_DESTRUCTOR_SYNC,
            )
        };
        if let Err(error) = driver.check("cuUserObjectCreate", created) {
            // SAFETY: the driver did not take it.
            unsafe { release(data) };
            return Err(error);
        }
        // SAFETY: the graph is being recorded, and the one reference moves to it.
        let kept =
            unsafe { api.cuGraphRetainUserObject(graph, user, 1, flags::GRAPH_USER_OBJECT_MOVE) };
        if let Err(error) = driver.check("cuGraphRetainUserObject", kept) {
            // SAFETY: the reference is still ours.
            driver.log("cuUserObjectRelease", unsafe {
                api.cuUserObjectRelease(user, 1)
            });
            return Err(error);
        }
        Ok(true)
    }
}

/// Drops what [`Stream::keep_for_replay`] kept. The driver calls it on a thread of its own, where
/// its functions must not be called, so the object goes on one of ours.
unsafe extern "C" fn release(data: *mut c_void) {
    // SAFETY: made from this type by `keep_for_replay`; the driver calls this once.
    let object: Box<Arc<dyn Any + Send + Sync>> = unsafe { Box::from_raw(data.cast()) };
    sys::deferred_drop::drop_in_background(object);
}
