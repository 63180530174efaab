//! Streams, events and graphs.

use super::super::types::*;
use super::Process;
use super::calls::{Done, put};
use super::state::*;
use std::ffi::{c_float, c_int, c_uint, c_void};
use std::time::Instant;

#[allow(non_snake_case, clippy::too_many_arguments)]
impl Process {
    pub(super) fn cuStreamCreateWithPriority(&self, s: *mut CuStream, _: c_uint, _: c_int) -> Done {
        let entered = self.enter_context("cuStreamCreateWithPriority");
        entered.map(|(mut state, context)| {
            let id = state.number();
            let handle = state.spare_streams.pop().unwrap_or(id);
            let stream = Stream {
                context,
                id: id as u64,
                capture: None,
            };
            state.streams.insert(handle, stream);
            put(s, CuStream(handle));
        })
    }

    pub(super) fn cuStreamDestroy(&self, stream: CuStream) -> Done {
        self.enter("cuStreamDestroy").and_then(|mut state| {
            let gone = state.streams.remove(&stream.0);
            gone.ok_or(CuResult::INVALID_HANDLE)?;
            state.spare_streams.push(stream.0);
            Ok(())
        })
    }

    pub(super) fn cuStreamQuery(&self, stream: CuStream) -> Done {
        let (mut state, current) = self.enter_ordered("cuStreamQuery")?;
        self.stream_context(&state, current, stream)?;
        if let Some(Stream {
            capture: Some((_, _, whole)),
            ..
        }) = state.streams.get_mut(&stream.0)
        {
            *whole = false;
            return Err(CuResult::STREAM_CAPTURE_UNSUPPORTED);
        }
        self.hangs(&state)
    }

    pub(super) fn cuStreamSynchronize(&self, stream: CuStream) -> Done {
        let done = self.cuStreamQuery(stream);
        assert_ne!(
            done,
            Err(CuResult::NOT_READY),
            "a wait without a deadline for work that does not end"
        );
        done
    }

    pub(super) fn cuStreamWaitEvent(&self, stream: CuStream, event: CuEvent, how: c_uint) -> Done {
        let (mut state, current) = self.enter_context("cuStreamWaitEvent")?;
        self.stream_context(&state, current, stream)?;
        if !state.events.contains_key(&event.0) {
            return Err(CuResult::INVALID_HANDLE);
        }
        if how == flags::EVENT_WAIT_EXTERNAL {
            let capture = state.streams.get(&stream.0).and_then(|s| s.capture);
            let (graph, _, _) = capture.ok_or(CuResult::INVALID_VALUE)?;
            let graph = state.graphs.get_mut(&graph);
            graph
                .ok_or(CuResult::INVALID_HANDLE)?
                .push(Work::Wait(event));
        }
        Ok(())
    }

    pub(super) fn cuStreamGetCtx(&self, stream: CuStream, context: *mut CuContext) -> Done {
        let state = self.enter("cuStreamGetCtx")?;
        let found = state
            .streams
            .get(&stream.0)
            .ok_or(CuResult::INVALID_HANDLE)?;
        // A green context has a handle of its own as a context.
        let green = usize::from(state.green_streams.contains(&stream.0)) << 40;
        put(context, CuContext(found.context | green));
        Ok(())
    }

    pub(super) fn cuStreamGetBothCtx(
        &self,
        stream: CuStream,
        context: *mut CuContext,
        green: *mut CuGreenContext,
    ) -> Done {
        let state = self.enter("cuStreamGetBothCtx")?;
        let found = state.streams.get(&stream.0);
        put(
            context,
            CuContext(found.ok_or(CuResult::INVALID_HANDLE)?.context),
        );
        put(
            green,
            CuGreenContext(usize::from(state.green_streams.contains(&stream.0))),
        );
        Ok(())
    }

    pub(super) fn cuStreamGetId(&self, stream: CuStream, id: *mut u64) -> Done {
        let state = self.enter("cuStreamGetId")?;
        let found = state.streams.get(&stream.0);
        put(id, found.ok_or(CuResult::INVALID_HANDLE)?.id);
        Ok(())
    }

    pub(super) fn cuStreamGetCaptureInfo(
        &self,
        stream: CuStream,
        status: *mut c_uint,
        id: *mut u64,
        graph: *mut CuGraph,
        dependencies: *mut *const CuGraphNode,
        count: *mut usize,
    ) -> Done {
        let entered = self.enter_context("cuStreamGetCaptureInfo");
        entered.map(|(state, _)| {
            put(status, capture_status_of(&state, stream));
            let capture = state.streams.get(&stream.0).and_then(|s| s.capture);
            let Some((handle, _, _)) = capture else {
                return;
            };
            put(id, handle as u64);
            put(graph, CuGraph(handle));
            if !dependencies.is_null() {
                let tips = &state.graphs[&handle].tips;
                put(dependencies, tips.as_ptr());
                put(count, tips.len());
            }
        })
    }

    pub(super) fn cuStreamBeginCapture(&self, stream: CuStream, mode: c_uint) -> Done {
        let (mut state, context) = self.enter_context("cuStreamBeginCapture")?;
        self.stream_context(&state, context, stream)?;
        let handle = state.number();
        let process = self.id;
        match state.streams.get_mut(&stream.0) {
            Some(found) if found.capture.is_none() => {
                found.capture = Some((handle, mode, true));
            }
            _ => return Err(CuResult::STREAM_CAPTURE_UNSUPPORTED),
        }
        let graph = Graph {
            process,
            context,
            ..Graph::default()
        };
        state.graphs.insert(handle, graph);
        Ok(())
    }

    pub(super) fn cuStreamEndCapture(&self, stream: CuStream, graph: *mut CuGraph) -> Done {
        let (mut state, _) = self.enter_context("cuStreamEndCapture")?;
        let capture = state
            .streams
            .get_mut(&stream.0)
            .and_then(|s| s.capture.take());
        match capture {
            Some((handle, _, true)) => {
                put(graph, CuGraph(handle));
                Ok(())
            }
            Some((handle, _, false)) => {
                put(graph, CuGraph::default());
                let gone = state.graphs.remove(&handle).unwrap_or_default();
                self.release(state, &gone.users, 1);
                Err(CuResult::STREAM_CAPTURE_INVALIDATED)
            }
            None => Err(CuResult::INVALID_VALUE),
        }
    }

    pub(super) fn cuThreadExchangeStreamCaptureMode(&self, mode: *mut c_uint) -> Done {
        self.enter("cuThreadExchangeStreamCaptureMode").map(|_| {
            // SAFETY: valid for reading by contract.
            let new = unsafe { mode.read() };
            put(mode, self.thread(|t| std::mem::replace(&mut t.mode, new)));
        })
    }

    pub(super) fn cuEventCreate(&self, event: *mut CuEvent, given: c_uint) -> Done {
        self.enter_context("cuEventCreate").map(|(mut s, context)| {
            let handle = s.number();
            let made = Event {
                context,
                timed: given & flags::EVENT_DISABLE_TIMING == 0,
                recorded: None,
            };
            s.events.insert(handle, made);
            put(event, CuEvent(handle));
        })
    }

    pub(super) fn cuEventDestroy(&self, event: CuEvent) -> Done {
        self.enter("cuEventDestroy").and_then(|mut state| {
            let gone = state.events.remove(&event.0);
            gone.map(drop).ok_or(CuResult::INVALID_HANDLE)
        })
    }

    pub(super) fn cuEventRecord(&self, event: CuEvent, stream: CuStream) -> Done {
        let (mut state, current) = self.enter_context("cuEventRecord")?;
        let context = self.stream_context(&state, current, stream)?;
        match state.events.get_mut(&event.0) {
            Some(found) if found.context == context => {
                found.recorded = Some(Instant::now());
                Ok(())
            }
            _ => Err(CuResult::INVALID_HANDLE),
        }
    }

    pub(super) fn cuEventQuery(&self, event: CuEvent) -> Done {
        self.enter_ordered("cuEventQuery")
            .and_then(|(state, _)| match state.events.get(&event.0) {
                Some(found) if found.recorded.is_some() => self.hangs(&state),
                Some(_) => Ok(()),
                None => Err(CuResult::INVALID_HANDLE),
            })
    }

    pub(super) fn cuEventElapsedTime(&self, t: *mut c_float, begin: CuEvent, end: CuEvent) -> Done {
        self.enter("cuEventElapsedTime").and_then(|state| {
            let time = |event: CuEvent| {
                let found = state.events.get(&event.0).filter(|event| event.timed);
                found
                    .and_then(|event| event.recorded)
                    .ok_or(CuResult::INVALID_HANDLE)
            };
            put(
                t,
                time(end)?.duration_since(time(begin)?).as_secs_f32() * 1e3,
            );
            Ok(())
        })
    }

    pub(super) fn cuGraphInstantiate(&self, exec: *mut CuGraphExec, g: CuGraph, _: u64) -> Done {
        self.enter("cuGraphInstantiate").and_then(|mut state| {
            let graph = state
                .graphs
                .get(&g.0)
                .ok_or(CuResult::INVALID_HANDLE)?
                .clone();
            for user in &graph.users {
                if let Some(user) = state.users.get_mut(user) {
                    user.references += 1;
                }
            }
            let handle = state.number();
            state.execs.insert(handle, graph);
            put(exec, CuGraphExec(handle));
            Ok(())
        })
    }

    pub(super) fn cuGraphLaunch(&self, exec: CuGraphExec, stream: CuStream) -> Done {
        let (state, current) = self.enter_context("cuGraphLaunch")?;
        self.stream_context(&state, current, stream)?;
        let graph = state
            .execs
            .get(&exec.0)
            .ok_or(CuResult::INVALID_HANDLE)?
            .clone();
        drop(state);
        let works = graph.work.iter();
        works
            .clone()
            .try_for_each(|work| self.work(graph.context, work))?;
        let mut state = self.machine.lock();
        for (event, _) in graph.marks.values() {
            let event = state.events.get_mut(&event.0);
            event.ok_or(CuResult::INVALID_HANDLE)?.recorded = Some(Instant::now());
        }
        Ok(())
    }

    pub(super) fn cuGraphAddEventRecordNode(
        &self,
        node: *mut CuGraphNode,
        graph: CuGraph,
        dependencies: *const CuGraphNode,
        count: usize,
        event: CuEvent,
    ) -> Done {
        let mut state = self.enter("cuGraphAddEventRecordNode")?;
        let number = state.number();
        let graph = state.graphs.get_mut(&graph.0);
        let behind = nodes(dependencies, count);
        let graph = graph.ok_or(CuResult::INVALID_HANDLE)?;
        graph.marks.insert(number, (event, behind));
        put(node, CuGraphNode(number));
        Ok(())
    }

    pub(super) fn cuGraphAddDependencies(
        &self,
        graph: CuGraph,
        from: *const CuGraphNode,
        to: *const CuGraphNode,
        count: usize,
    ) -> Done {
        self.edges(
            "cuGraphAddDependencies",
            graph,
            (from, to, count),
            |behind, from| {
                behind.push(from);
                true
            },
        )
    }

    pub(super) fn cuGraphRemoveDependencies(
        &self,
        graph: CuGraph,
        from: *const CuGraphNode,
        to: *const CuGraphNode,
        count: usize,
    ) -> Done {
        self.edges(
            "cuGraphRemoveDependencies",
            graph,
            (from, to, count),
            |behind, from| {
                let place = behind.iter().position(|node| *node == from);
                place.map(|place| behind.remove(place)).is_some()
            },
        )
    }

    /// Changes the edges to marks of a graph.
    fn edges(
        &self,
        function: &'static str,
        graph: CuGraph,
        (from, to, count): (*const CuGraphNode, *const CuGraphNode, usize),
        change: impl Fn(&mut Vec<CuGraphNode>, CuGraphNode) -> bool,
    ) -> Done {
        let mut state = self.enter(function)?;
        let graph = state.graphs.get_mut(&graph.0);
        let graph = graph.ok_or(CuResult::INVALID_HANDLE)?;
        for (from, to) in nodes(from, count).into_iter().zip(nodes(to, count)) {
            let mark = graph.marks.get_mut(&to.0);
            let (_, behind) = mark.ok_or(CuResult::INVALID_VALUE)?;
            if from.0 > graph.work.len() || !change(behind, from) {
                return Err(CuResult::INVALID_VALUE);
            }
        }
        Ok(())
    }

    pub(super) fn cuGraphExecDestroy(&self, exec: CuGraphExec) -> Done {
        self.enter("cuGraphExecDestroy").and_then(|mut state| {
            let gone = state
                .execs
                .remove(&exec.0)
                .ok_or(CuResult::INVALID_HANDLE)?;
            self.release(state, &gone.users, 1);
            Ok(())
        })
    }

    pub(super) fn cuGraphDestroy(&self, graph: CuGraph) -> Done {
        self.enter("cuGraphDestroy").and_then(|mut state| {
            let gone = state
                .graphs
                .remove(&graph.0)
                .ok_or(CuResult::INVALID_HANDLE)?;
            self.release(state, &gone.users, 1);
            Ok(())
        })
    }

    pub(super) fn cuUserObjectCreate(
        &self,
        object: *mut CuUserObject,
        data: *mut c_void,
        destroy: unsafe extern "C" fn(*mut c_void),
        references: c_uint,
        _flags: c_uint,
    ) -> Done {
        self.enter("cuUserObjectCreate").map(|mut state| {
            let handle = state.number();
            let user = User {
                data: data.expose_provenance(),
                destroy,
                references,
            };
            state.users.insert(handle, user);
            put(object, CuUserObject(handle));
        })
    }

    pub(super) fn cuUserObjectRelease(&self, object: CuUserObject, count: c_uint) -> Done {
        self.enter("cuUserObjectRelease").map(|state| {
            self.release(state, &[object.0], count);
        })
    }

    pub(super) fn cuGraphRetainUserObject(
        &self,
        graph: CuGraph,
        object: CuUserObject,
        _count: c_uint,
        _flags: c_uint,
    ) -> Done {
        self.enter("cuGraphRetainUserObject").and_then(|mut state| {
            let graph = state
                .graphs
                .get_mut(&graph.0)
                .ok_or(CuResult::INVALID_HANDLE)?;
            graph.users.push(object.0);
            Ok(())
        })
    }
}

fn nodes(place: *const CuGraphNode, count: usize) -> Vec<CuGraphNode> {
    // SAFETY: so many handles by the contract of the driver functions.
    unsafe { std::slice::from_raw_parts(place, count) }.to_vec()
}

fn capture_status_of(state: &State, stream: CuStream) -> c_uint {
    match state.streams.get(&stream.0).and_then(|s| s.capture) {
        None => capture_status::NONE,
        Some((_, _, true)) => capture_status::ACTIVE,
        Some((_, _, false)) => capture_status::INVALIDATED,
    }
}
