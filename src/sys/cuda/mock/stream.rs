//! Simulated streams, events and graphs.

use super::super::types::*;
use super::Process;
use super::calls::{Done, write_out};
use super::opaque;
use super::state::*;
use std::ffi::{c_float, c_int, c_uint, c_void};
use std::time::Instant;

#[allow(non_snake_case, clippy::too_many_arguments)]
impl Process {
    pub(super) fn cuStreamCreateWithPriority(&self, s: *mut CUstream, _: c_uint, _: c_int) -> Done {
        let entered = self.enter_context("cuStreamCreateWithPriority");
        entered.map(|(mut state, context)| {
            let id = state.next_id();
            let handle = state.free_handles.pop().unwrap_or(id);
            let stream = Stream {
                context,
                id: id as u64,
                capture: None,
            };
            state.streams.insert(handle, stream);
            write_out(s, opaque(handle));
        })
    }

    pub(super) fn cuStreamDestroy(&self, stream: CUstream) -> Done {
        self.enter("cuStreamDestroy").and_then(|mut state| {
            let gone = state.streams.remove(&stream.addr());
            gone.ok_or(CuResult::INVALID_HANDLE)?;
            state.free_handles.push(stream.addr());
            Ok(())
        })
    }

    pub(super) fn cuLaunchHostFunc(
        &self,
        stream: CUstream,
        function: CUhostFn,
        data: *mut c_void,
    ) -> Done {
        let function = function.ok_or(CuResult::INVALID_VALUE)?;
        let work = Work::Call(function, data.expose_provenance());
        self.queue("cuLaunchHostFunc", stream, work)
    }

    pub(super) fn cuStreamQuery(&self, stream: CUstream) -> Done {
        let (mut state, current) = self.enter_uncaptured("cuStreamQuery")?;
        self.stream_context(&state, current, stream)?;
        if let Some(Stream {
            capture: Some(capture),
            ..
        }) = state.streams.get_mut(&stream.addr())
        {
            capture.is_valid = false;
            return Err(CuResult::STREAM_CAPTURE_UNSUPPORTED);
        }
        self.check_finished(&state)
    }

    pub(super) fn cuStreamSynchronize(&self, stream: CUstream) -> Done {
        let done = self.cuStreamQuery(stream);
        assert_ne!(
            done,
            Err(CuResult::NOT_READY),
            "a wait without a deadline for work that does not end"
        );
        done
    }

    pub(super) fn cuStreamWaitEvent(
        &self,
        stream: CUstream,
        event: CUevent,
        flags: c_uint,
    ) -> Done {
        let (mut state, current) = self.enter_context("cuStreamWaitEvent")?;
        self.stream_context(&state, current, stream)?;
        if !state.events.contains_key(&event.addr()) {
            return Err(CuResult::INVALID_HANDLE);
        }
        if flags == CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL as c_uint {
            let capture = state.streams.get(&stream.addr()).and_then(|s| s.capture);
            let capture = capture.ok_or(CuResult::INVALID_VALUE)?;
            let graph = state.graphs.get_mut(&capture.graph);
            graph
                .ok_or(CuResult::INVALID_HANDLE)?
                .push(Work::Wait(event.addr()));
        }
        Ok(())
    }

    pub(super) fn cuStreamGetCtx(&self, stream: CUstream, context: *mut CUcontext) -> Done {
        let state = self.enter("cuStreamGetCtx")?;
        let found = state
            .streams
            .get(&stream.addr())
            .ok_or(CuResult::INVALID_HANDLE)?;
        // As with a driver, a green context has its own context handle.
        let green = usize::from(state.green_streams.contains(&stream.addr())) << 40;
        write_out(context, opaque(found.context | green));
        Ok(())
    }

    pub(super) fn cuStreamGetBothCtx(
        &self,
        stream: CUstream,
        context: *mut CUcontext,
        green: *mut CUgreenCtx,
    ) -> Done {
        let state = self.enter("cuStreamGetBothCtx")?;
        let found = state.streams.get(&stream.addr());
        write_out(
            context,
            opaque(found.ok_or(CuResult::INVALID_HANDLE)?.context),
        );
        write_out(
            green,
            opaque(usize::from(state.green_streams.contains(&stream.addr()))),
        );
        Ok(())
    }

    pub(super) fn cuStreamGetId(&self, stream: CUstream, id: *mut u64) -> Done {
        let state = self.enter("cuStreamGetId")?;
        let found = state.streams.get(&stream.addr());
        write_out(id, found.ok_or(CuResult::INVALID_HANDLE)?.id);
        Ok(())
    }

    pub(super) fn cuStreamGetCaptureInfo(
        &self,
        stream: CUstream,
        status: *mut CUstreamCaptureStatus,
        id: *mut u64,
        graph: *mut CUgraph,
        dependencies: *mut *const CUgraphNode,
        count: *mut usize,
    ) -> Done {
        let entered = self.enter_context("cuStreamGetCaptureInfo");
        entered.map(|(state, _)| {
            write_out(status, capture_status_of(&state, stream));
            let capture = state.streams.get(&stream.addr()).and_then(|s| s.capture);
            let Some(Capture { graph: handle, .. }) = capture else {
                return;
            };
            write_out(id, handle as u64);
            write_out(graph, opaque(handle));
            if !dependencies.is_null() {
                let tips = &state.graphs[&handle].tips;
                write_out(dependencies, tips.as_ptr().cast());
                write_out(count, tips.len());
            }
        })
    }

    pub(super) fn cuStreamBeginCapture(&self, stream: CUstream, mode: CUstreamCaptureMode) -> Done {
        let (mut state, context) = self.enter_context("cuStreamBeginCapture")?;
        self.stream_context(&state, context, stream)?;
        let handle = state.next_id();
        let process = self.id;
        match state.streams.get_mut(&stream.addr()) {
            Some(found) if found.capture.is_none() => {
                found.capture = Some(Capture {
                    graph: handle,
                    mode,
                    is_valid: true,
                });
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

    pub(super) fn cuStreamEndCapture(&self, stream: CUstream, graph: *mut CUgraph) -> Done {
        let (mut state, _) = self.enter_context("cuStreamEndCapture")?;
        let capture = state
            .streams
            .get_mut(&stream.addr())
            .and_then(|s| s.capture.take());
        match capture {
            Some(Capture {
                graph: handle,
                is_valid: true,
                ..
            }) => {
                write_out(graph, opaque(handle));
                Ok(())
            }
            Some(Capture { graph: handle, .. }) => {
                write_out(graph, std::ptr::null_mut());
                let gone = state.graphs.remove(&handle).unwrap_or_default();
                self.release(state, &gone.users, 1);
                Err(CuResult::STREAM_CAPTURE_INVALIDATED)
            }
            None => Err(CuResult::INVALID_VALUE),
        }
    }

    pub(super) fn cuThreadExchangeStreamCaptureMode(&self, mode: *mut CUstreamCaptureMode) -> Done {
        self.enter("cuThreadExchangeStreamCaptureMode").map(|_| {
            // SAFETY: the contract makes the mode readable; tests pass only modes that exist.
            let new = unsafe { mode.read() };
            write_out(mode, self.thread(|t| std::mem::replace(&mut t.mode, new)));
        })
    }

    pub(super) fn cuEventCreate(&self, event: *mut CUevent, flags: c_uint) -> Done {
        self.enter_context("cuEventCreate").map(|(mut s, context)| {
            let handle = s.next_id();
            let made = Event {
                context,
                timed: flags & CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint == 0,
                recorded: None,
            };
            s.events.insert(handle, made);
            write_out(event, opaque(handle));
        })
    }

    pub(super) fn cuEventDestroy(&self, event: CUevent) -> Done {
        self.enter("cuEventDestroy").and_then(|mut state| {
            let gone = state.events.remove(&event.addr());
            gone.map(drop).ok_or(CuResult::INVALID_HANDLE)
        })
    }

    pub(super) fn cuEventRecord(&self, event: CUevent, stream: CUstream) -> Done {
        let (mut state, current) = self.enter_context("cuEventRecord")?;
        let context = self.stream_context(&state, current, stream)?;
        match state.events.get_mut(&event.addr()) {
            Some(found) if found.context == context => {
                found.recorded = Some(Instant::now());
                Ok(())
            }
            _ => Err(CuResult::INVALID_HANDLE),
        }
    }

    pub(super) fn cuEventQuery(&self, event: CUevent) -> Done {
        self.enter_uncaptured("cuEventQuery")
            .and_then(|(state, _)| match state.events.get(&event.addr()) {
                Some(found) if found.recorded.is_some() => self.check_finished(&state),
                Some(_) => Ok(()),
                None => Err(CuResult::INVALID_HANDLE),
            })
    }

    pub(super) fn cuEventElapsedTime(&self, t: *mut c_float, begin: CUevent, end: CUevent) -> Done {
        self.enter("cuEventElapsedTime").and_then(|state| {
            let time = |event: CUevent| {
                let found = state.events.get(&event.addr()).filter(|event| event.timed);
                found
                    .and_then(|event| event.recorded)
                    .ok_or(CuResult::INVALID_HANDLE)
            };
            write_out(
                t,
                time(end)?.duration_since(time(begin)?).as_secs_f32() * 1e3,
            );
            Ok(())
        })
    }

    pub(super) fn cuGraphInstantiate(&self, exec: *mut CUgraphExec, g: CUgraph, _: u64) -> Done {
        self.enter("cuGraphInstantiate").and_then(|mut state| {
            let graph = state
                .graphs
                .get(&g.addr())
                .ok_or(CuResult::INVALID_HANDLE)?
                .clone();
            for user in &graph.users {
                if let Some(user) = state.users.get_mut(user) {
                    user.references += 1;
                }
            }
            let handle = state.next_id();
            state.execs.insert(handle, graph);
            write_out(exec, opaque(handle));
            Ok(())
        })
    }

    pub(super) fn cuGraphLaunch(&self, exec: CUgraphExec, stream: CUstream) -> Done {
        let (state, current) = self.enter_context("cuGraphLaunch")?;
        self.stream_context(&state, current, stream)?;
        let graph = state
            .execs
            .get(&exec.addr())
            .ok_or(CuResult::INVALID_HANDLE)?
            .clone();
        drop(state);
        let works = graph.work.iter();
        works
            .clone()
            .try_for_each(|work| self.execute(graph.context, work))?;
        let mut state = self.machine.lock();
        for (event, _) in graph.marks.values() {
            let event = state.events.get_mut(event);
            event.ok_or(CuResult::INVALID_HANDLE)?.recorded = Some(Instant::now());
        }
        Ok(())
    }

    pub(super) fn cuGraphAddEventRecordNode(
        &self,
        node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        count: usize,
        event: CUevent,
    ) -> Done {
        let mut state = self.enter("cuGraphAddEventRecordNode")?;
        let number = state.next_id();
        let graph = state.graphs.get_mut(&graph.addr());
        let behind = nodes(dependencies, count);
        let graph = graph.ok_or(CuResult::INVALID_HANDLE)?;
        graph.marks.insert(number, (event.addr(), behind));
        write_out(node, opaque(number));
        Ok(())
    }

    pub(super) fn cuGraphAddDependencies(
        &self,
        graph: CUgraph,
        from: *const CUgraphNode,
        to: *const CUgraphNode,
        count: usize,
    ) -> Done {
        self.change_edges(
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
        graph: CUgraph,
        from: *const CUgraphNode,
        to: *const CUgraphNode,
        count: usize,
    ) -> Done {
        self.change_edges(
            "cuGraphRemoveDependencies",
            graph,
            (from, to, count),
            |behind, from| {
                let place = behind.iter().position(|node| *node == from);
                place.map(|place| behind.remove(place)).is_some()
            },
        )
    }

    /// Applies `change` to the dependencies of event-record nodes of a graph, for each of `count`
    /// edges.
    fn change_edges(
        &self,
        function: &'static str,
        graph: CUgraph,
        (from, to, count): (*const CUgraphNode, *const CUgraphNode, usize),
        change: impl Fn(&mut Vec<usize>, usize) -> bool,
    ) -> Done {
        let mut state = self.enter(function)?;
        let graph = state.graphs.get_mut(&graph.addr());
        let graph = graph.ok_or(CuResult::INVALID_HANDLE)?;
        for (from, to) in nodes(from, count).into_iter().zip(nodes(to, count)) {
            let mark = graph.marks.get_mut(&to);
            let (_, behind) = mark.ok_or(CuResult::INVALID_VALUE)?;
            if from > graph.work.len() || !change(behind, from) {
                return Err(CuResult::INVALID_VALUE);
            }
        }
        Ok(())
    }

    pub(super) fn cuGraphExecDestroy(&self, exec: CUgraphExec) -> Done {
        self.enter("cuGraphExecDestroy").and_then(|mut state| {
            let gone = state
                .execs
                .remove(&exec.addr())
                .ok_or(CuResult::INVALID_HANDLE)?;
            self.release(state, &gone.users, 1);
            Ok(())
        })
    }

    pub(super) fn cuGraphDestroy(&self, graph: CUgraph) -> Done {
        self.enter("cuGraphDestroy").and_then(|mut state| {
            let gone = state
                .graphs
                .remove(&graph.addr())
                .ok_or(CuResult::INVALID_HANDLE)?;
            self.release(state, &gone.users, 1);
            Ok(())
        })
    }

    pub(super) fn cuUserObjectCreate(
        &self,
        object: *mut CUuserObject,
        data: *mut c_void,
        destroy: CUhostFn,
        references: c_uint,
        _flags: c_uint,
    ) -> Done {
        let destroy = destroy.ok_or(CuResult::INVALID_VALUE)?;
        self.enter("cuUserObjectCreate").map(|mut state| {
            let handle = state.next_id();
            let user = User {
                data: data.expose_provenance(),
                destroy,
                references,
            };
            state.users.insert(handle, user);
            write_out(object, opaque(handle));
        })
    }

    pub(super) fn cuUserObjectRelease(&self, object: CUuserObject, count: c_uint) -> Done {
        self.enter("cuUserObjectRelease").map(|state| {
            self.release(state, &[object.addr()], count);
        })
    }

    pub(super) fn cuGraphRetainUserObject(
        &self,
        graph: CUgraph,
        object: CUuserObject,
        _count: c_uint,
        _flags: c_uint,
    ) -> Done {
        self.enter("cuGraphRetainUserObject").and_then(|mut state| {
            let graph = state
                .graphs
                .get_mut(&graph.addr())
                .ok_or(CuResult::INVALID_HANDLE)?;
            graph.users.push(object.addr());
            Ok(())
        })
    }
}

/// Returns the node numbers of `count` node handles.
fn nodes(handles: *const CUgraphNode, count: usize) -> Vec<usize> {
    // SAFETY: the contract of the driver functions gives `count` handles.
    let handles = unsafe { std::slice::from_raw_parts(handles, count) };
    handles.iter().map(|node| node.addr()).collect()
}

fn capture_status_of(state: &State, stream: CUstream) -> CUstreamCaptureStatus {
    match state.streams.get(&stream.addr()).and_then(|s| s.capture) {
        None => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
        Some(capture) if capture.is_valid => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
        Some(_) => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
    }
}
