//! CUDA graphs: work that is recorded once and launched many times.

use super::context::Relaxed;
use super::{Context, Event, Stream};
use crate::error::{Error, Result};
use crate::sys;
use crate::sys::cuda::{
    CUgraph, CUgraphExec, CUgraphExec_st, CUgraphNode, CUgraphNode_st, CUstreamCaptureMode,
    CUstreamCaptureStatus, CUuserObject, CUuserObject_flags, CUuserObjectRetain_flags, Handle,
};
use std::any::Any;
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

/// Threads on which a capture forbids unsafe driver calls, such as calls that wait for the recorded work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// Forbids unsafe driver calls on all threads of the process.
    Global,
    /// Forbids unsafe driver calls on the capturing thread.
    ThreadLocal,
    /// Forbids no driver calls.
    Relaxed,
}

/// An executable CUDA graph, which can be launched any number of times.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    exec: Handle<CUgraphExec_st>,
}

impl Graph {
    /// Records the work that `work` queues on `stream`, instead of executing it.
    ///
    /// # Errors
    /// The error of `work`, after which the stream can be used again; the driver's errors.
    pub fn capture(
        stream: &Stream,
        mode: CaptureMode,
        work: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<Graph> {
        let context = stream.context();
        let driver = context.driver();
        let mode = match mode {
            CaptureMode::Global => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
        };
        {
            let _bound = context.bind()?;
            // SAFETY: `stream` keeps the driver's stream.
            driver.check("cuStreamBeginCapture", unsafe {
                driver.api().cuStreamBeginCapture(stream.handle(), mode)
            })?;
        }
        let worked = work(stream);
        let _bound = context.bind()?;
        let mut recorded = Recorded {
            context,
            graph: std::ptr::null_mut(),
        };
        // SAFETY: the capture of the stream began above; the driver writes one handle to `recorded`.
        let ended = unsafe {
            driver
                .api()
                .cuStreamEndCapture(stream.handle(), &mut recorded.graph)
        };
        worked?;
        driver.check("cuStreamEndCapture", ended)?;
        let mut exec: CUgraphExec = std::ptr::null_mut();
        // SAFETY: the capture ended without an error, so the graph is complete; the driver writes one handle
        // to a local variable.
        driver.check("cuGraphInstantiateWithFlags", unsafe {
            driver
                .api()
                .cuGraphInstantiate(&mut exec, recorded.graph, 0)
        })?;
        Ok(Graph {
            context: context.clone(),
            exec: Handle(exec),
        })
    }

    /// Queues the recorded work behind the work of `stream`.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver();
        // SAFETY: both values keep their driver objects.
        driver.check("cuGraphLaunch", unsafe {
            driver.api().cuGraphLaunch(self.exec.0, stream.handle())
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let driver = self.context.driver();
        let _relaxed = Relaxed::to_drop(driver);
        // SAFETY: `capture` instantiated the graph, and this destructor runs once. Queued launches still run.
        driver.log("cuGraphExecDestroy", unsafe {
            driver.api().cuGraphExecDestroy(self.exec.0)
        });
    }
}

/// A recorded graph, which is destroyed after its executable copy is made.
struct Recorded<'a> {
    context: &'a Context,
    graph: CUgraph,
}

impl Drop for Recorded<'_> {
    fn drop(&mut self) {
        // A failed capture leaves no graph.
        if !self.graph.is_null() {
            let driver = self.context.driver();
            let _relaxed = Relaxed::to_drop(driver);
            // SAFETY: `capture` ended the recording, and this destructor runs once.
            driver.log("cuGraphDestroy", unsafe {
                driver.api().cuGraphDestroy(self.graph)
            });
        }
    }
}

/// State of a stream's capture.
struct Recording {
    id: u64,
    graph: CUgraph,
    /// Nodes on which the stream's next work depends.
    tips: Vec<Handle<CUgraphNode_st>>,
}

/// A node of a captured graph in which every replay records an event. It follows all work of its owner, such
/// as a communicator, so that work outside the graph can wait for the replay.
#[derive(Debug)]
pub struct EndMark {
    capture: u64,
    node: Handle<CUgraphNode_st>,
    behind: Vec<Handle<CUgraphNode_st>>,
}

impl Stream {
    /// Returns the unique id of the stream's capture; `None` outside captures.
    ///
    /// # Errors
    /// Invalid usage if the capture has failed; the driver's errors.
    pub fn capture(&self) -> Result<Option<u64>> {
        Ok(self.recording(false)?.map(|recording| recording.id))
    }

    /// Lets every replay of the stream's capture record `event` behind the work that the stream has now. The
    /// caller keeps `event` until the graph is destroyed.
    ///
    /// An earlier `mark` of this capture moves to the new place. A node behind each of many kernels would
    /// cost every kernel half a microsecond, so a graph has one node, at its end.
    ///
    /// # Errors
    /// Invalid usage if the capture has failed, or if the stream is in no capture; the driver's errors.
    pub fn mark_end(&self, event: &Event, mark: Option<EndMark>) -> Result<EndMark> {
        let recording = self.recording(true)?.ok_or_else(|| {
            Error::invalid_usage("the stream is in no capture, so there are no replays to mark")
        })?;
        let Recording { id, graph, tips } = recording;
        let _bound = self.context().bind()?;
        let driver = self.context().driver();
        let api = driver.api();
        let Some(mark) = mark.filter(|mark| mark.capture == id) else {
            let mut node: CUgraphNode = std::ptr::null_mut();
            // SAFETY: the capture has the graph and these nodes, and the caller keeps the event. The driver
            // writes one handle to a local variable.
            driver.check("cuGraphAddEventRecordNode", unsafe {
                api.cuGraphAddEventRecordNode(
                    &mut node,
                    graph,
                    tips.as_ptr().cast(),
                    tips.len(),
                    event.handle(),
                )
            })?;
            return Ok(EndMark {
                capture: id,
                node: Handle(node),
                behind: tips,
            });
        };
        // The driver cannot remove nodes from a graph during its capture, but it can remove edges.
        let to = |count: usize| vec![mark.node.0; count];
        let (old, new) = (&mark.behind, &tips);
        // SAFETY: the capture has the graph and its nodes, and both arrays have the passed length. A `Handle`
        // has the layout of the driver's handle.
        driver.check("cuGraphRemoveDependencies", unsafe {
            api.cuGraphRemoveDependencies(
                graph,
                old.as_ptr().cast(),
                to(old.len()).as_ptr(),
                old.len(),
            )
        })?;
        // SAFETY: the capture has the graph and its nodes, and both arrays have the passed length. A `Handle`
        // has the layout of the driver's handle.
        driver.check("cuGraphAddDependencies", unsafe {
            api.cuGraphAddDependencies(
                graph,
                new.as_ptr().cast(),
                to(new.len()).as_ptr(),
                new.len(),
            )
        })?;
        Ok(EndMark {
            behind: tips,
            ..mark
        })
    }

    /// Returns the stream's capture; `None` outside captures. Its dependencies are queried only if
    /// `with_tips` is true. The driver refuses that query when an edge carries data, as edges of programmatic
    /// launches do.
    fn recording(&self, with_tips: bool) -> Result<Option<Recording>> {
        const NONE: c_uint = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint;
        const ACTIVE: c_uint = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as c_uint;
        let context = self.context();
        let _bound = context.bind()?;
        let driver = context.driver();
        let (mut status, mut id): (c_uint, u64) = (NONE, 0);
        let mut graph: CUgraph = std::ptr::null_mut();
        let (mut nodes, mut count): (*const CUgraphNode, usize) = (std::ptr::null(), 0);
        let (to_nodes, to_count): (*mut _, *mut _) = match with_tips {
            true => (&mut nodes, &mut count),
            false => (std::ptr::null_mut(), std::ptr::null_mut()),
        };
        // SAFETY: `self` keeps the stream. The driver writes to local variables, the status as an integer of
        // the enum's size, and skips null pointers.
        driver.check("cuStreamGetCaptureInfo", unsafe {
            driver.api().cuStreamGetCaptureInfo(
                self.handle(),
                (&raw mut status).cast(),
                &mut id,
                &mut graph,
                to_nodes,
                to_count,
            )
        })?;
        match status {
            NONE => return Ok(None),
            ACTIVE => {}
            _ => {
                return Err(Error::invalid_usage(
                    "the stream's capture was invalidated by an earlier call; end it before the \
                     stream is used again",
                ));
            }
        }
        let tips = match count {
            0 => Vec::new(),
            // SAFETY: the driver returned `count` nodes, valid until the capture's dependencies change. A
            // `Handle` has the layout of the driver's handle.
            _ => unsafe { std::slice::from_raw_parts(nodes.cast(), count) }.to_vec(),
        };
        Ok(Some(Recording { id, graph, tips }))
    }

    /// Keeps `object` until the captured graph and all its copies are destroyed, because a replay uses the
    /// memory and the code of its launches. Returns false, and drops `object`, if the stream is in no
    /// capture.
    ///
    /// # Errors
    /// Invalid usage if the capture has failed; the driver's errors.
    pub fn keep_for_replay(&self, object: Arc<dyn Any + Send + Sync>) -> Result<bool> {
        let Some(Recording { graph, .. }) = self.recording(false)? else {
            return Ok(false);
        };
        let context = self.context();
        let _bound = context.bind()?;
        let driver = context.driver();
        let api = driver.api();
        let data = Box::into_raw(Box::new(object)).cast::<c_void>();
        let mut user: CUuserObject = std::ptr::null_mut();
        // SAFETY: `release` has the type of `data`, and the driver calls it once. The driver writes one
        // handle to a local variable.
        let created = unsafe {
            api.cuUserObjectCreate(
                &mut user,
                data,
                Some(release),
                1,
                CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint,
            )
        };
        if let Err(error) = driver.check("cuUserObjectCreate", created) {
            // SAFETY: the driver refused `data`, so this is the only call.
            unsafe { release(data) };
            return Err(error);
        }
        // SAFETY: the capture has the graph, and the only reference moves to it.
        let kept = unsafe {
            api.cuGraphRetainUserObject(
                graph,
                user,
                1,
                CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint,
            )
        };
        if let Err(error) = driver.check("cuGraphRetainUserObject", kept) {
            // SAFETY: the graph did not take the reference.
            driver.log("cuUserObjectRelease", unsafe {
                api.cuUserObjectRelease(user, 1)
            });
            return Err(error);
        }
        Ok(true)
    }
}

/// Drops an object of [`Stream::keep_for_replay`]. The driver calls this on its own thread, where driver
/// functions must not be called. So a thread of this library drops the object.
unsafe extern "C" fn release(data: *mut c_void) {
    // SAFETY: `keep_for_replay` made the pointer from a `Box` of this type, and the driver calls this
    // function once.
    let object: Box<Arc<dyn Any + Send + Sync>> = unsafe { Box::from_raw(data.cast()) };
    sys::deferred_drop::drop_in_background(object);
}
