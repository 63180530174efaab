//! Events of the calls of a thread: of a single call, or of the thread's group.
//!
//! NCCL sends events in this order, and so does cinch. The first call of a group begins a group API event. Each call
//! has an API event, which ends when the call is recorded. When the calls run, each communicator has a group event, and
//! each call an event of its own whose parent is the call's API event. On host memory these end when the calls have
//! ended; on a GPU when the calls are queued.

use super::CommPlugins;
use super::abi::{
    CollApiDetails, CollDetails, EventDescriptor, EventDetails, GROUP_END_API_START,
    GROUP_START_API_STOP, GroupApiDetails, P2pApiDetails, P2pDetails, event,
};
use super::names;
use super::profiler::{ProfilerEvent, WantedEvents};
use cinch::Communicator;
use cinch::capi::core::collective_request::CollectiveRequest;
use cinch::comm::Call;
use cinch::engine::gpu::is_capturing;
use cinch::mem::Buffers;
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

thread_local! {
    static GROUP: RefCell<GroupEvents> = RefCell::default();
}

/// Events of a group whose calls have not run.
#[derive(Default)]
pub(crate) struct GroupEvents {
    /// The group API event, if the first call has begun one.
    api: Option<ProfilerEvent>,
    calls: Vec<RecordedEvent>,
}

/// A call that has not run.
struct RecordedEvent {
    plugins: Arc<CommPlugins>,
    communicator: Arc<Communicator>,
    call: Call,
    arguments: EventArguments,
    /// Handle of the call's API event, which has stopped; NULL if there was none.
    api: *mut c_void,
}

/// Arguments of a call as events show them.
#[derive(Clone, Copy)]
struct EventArguments {
    sends: bool,
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    root: c_int,
    peer: c_int,
    stream: *mut c_void,
}

/// Events of running calls, which stop when it is dropped, inner events first.
#[derive(Default)]
pub(crate) struct RunningEvents {
    launches: Vec<ProfilerEvent>,
    calls: Vec<ProfilerEvent>,
    /// Communicators with their group events, if the profiler wants these.
    groups: Vec<(*const Communicator, Option<ProfilerEvent>)>,
    _api: Option<ProfilerEvent>,
}

/// Adds a call to the events of this thread's group. Single calls make a group of their own.
pub(crate) fn record(
    plugins: &Arc<CommPlugins>,
    communicator: &Arc<Communicator>,
    request: &CollectiveRequest,
    call: &Call,
    is_captured: bool,
) {
    // The plug-in's functions run while the group is not borrowed.
    let mut group = take();
    group.record(plugins, communicator, request, call, is_captured);
    let _ = GROUP.try_with(|own| *own.borrow_mut() = group);
}

/// Returns whether the stream of a call is captured into a graph. A stream that does not exist is not.
pub(crate) fn is_captured(communicator: &Communicator, buffers: &Buffers<'_>) -> bool {
    match (buffers, communicator.gpu()) {
        (Buffers::Gpu(buffers), Some(context)) => is_capturing(context, buffers).unwrap_or(false),
        _ => false,
    }
}

/// Takes the events of this thread's group.
pub(crate) fn take() -> GroupEvents {
    GROUP.try_with(RefCell::take).unwrap_or_default()
}

impl GroupEvents {
    fn record(
        &mut self,
        plugins: &Arc<CommPlugins>,
        communicator: &Arc<Communicator>,
        request: &CollectiveRequest,
        call: &Call,
        is_captured: bool,
    ) {
        let wanted = WantedEvents::read();
        if self.api.is_none() && wanted.has(event::GROUP_API) {
            let mut descriptor = EventDescriptor::new(event::GROUP_API, null_mut());
            descriptor.details.group_api = GroupApiDetails {
                captured: is_captured,
                depth: 1,
            };
            self.api = ProfilerEvent::start(plugins, descriptor);
            if let Some(api) = &self.api {
                api.record(GROUP_START_API_STOP);
            }
        }
        let arguments = EventArguments {
            sends: request.sends,
            sendbuff: request.sendbuf,
            recvbuff: request.recvbuf,
            root: request.root,
            peer: request.peer,
            stream: request.stream,
        };
        let parent = self.api.as_ref().map_or(null_mut(), ProfilerEvent::handle);
        let descriptor = arguments.api_event(call, is_captured, parent);
        let api = wanted
            .has(descriptor.kind)
            .then(|| ProfilerEvent::start(plugins, descriptor))
            .flatten();
        self.calls.push(RecordedEvent {
            plugins: plugins.clone(),
            communicator: communicator.clone(),
            call: *call,
            arguments,
            api: api.as_ref().map_or(null_mut(), ProfilerEvent::handle),
        });
    }

    /// Starts the events of the calls, which run next.
    pub(crate) fn start(self) -> RunningEvents {
        let wanted = WantedEvents::read();
        let GroupEvents { api, calls } = self;
        let parent = api.as_ref().map_or(null_mut(), ProfilerEvent::handle);
        if let Some(api) = &api {
            api.record(GROUP_END_API_START);
        }
        let mut running = RunningEvents {
            _api: api,
            ..RunningEvents::default()
        };
        for recorded in &calls {
            running.start(recorded, wanted, parent);
        }
        running
    }
}

impl RunningEvents {
    /// Starts the events of a call; the first call of a communicator starts the group and the launch.
    fn start(&mut self, recorded: &RecordedEvent, wanted: WantedEvents, parent: *mut c_void) {
        let RecordedEvent {
            plugins,
            communicator,
            ..
        } = recorded;
        let start = |descriptor| ProfilerEvent::start(plugins, descriptor);
        let own = Arc::as_ptr(communicator);
        let known = self.groups.iter().position(|(comm, _)| *comm == own);
        let at = known.unwrap_or_else(|| {
            let group = wanted
                .has(event::GROUP)
                .then(|| start(EventDescriptor::new(event::GROUP, null_mut())));
            self.groups.push((own, group.flatten()));
            self.groups.len() - 1
        });
        let group = self.groups[at].1.as_ref();
        let group = group.map_or(null_mut(), ProfilerEvent::handle);
        let kind = recorded.kind();
        if wanted.has(kind) {
            self.calls.extend(start(recorded.run_event(kind, group)));
        }
        // Calls of one communicator run on the stream of the first.
        let is_launch = known.is_none() && communicator.gpu().is_some();
        if is_launch && wanted.has(event::KERNEL_LAUNCH) {
            let mut descriptor = EventDescriptor::new(event::KERNEL_LAUNCH, parent);
            descriptor.details.kernel_launch = recorded.arguments.stream;
            self.launches.extend(start(descriptor));
        }
    }
}

impl RecordedEvent {
    /// Returns the kind of the call's event while it runs.
    fn kind(&self) -> u64 {
        match self.call.collective.is_message() {
            true => event::P2P,
            false => event::COLL,
        }
    }

    /// Returns the event of the call while it runs, which is of this kind.
    fn run_event(&self, kind: u64, group: *mut c_void) -> EventDescriptor {
        let RecordedEvent {
            call, arguments, ..
        } = self;
        let func = names::func(call.collective, arguments.sends).as_ptr();
        let datatype = names::datatype(call.dtype).as_ptr();
        let expected = self.plugins.costs.find(&self.communicator, call);
        let expected = expected.ok().flatten().map(|costs| costs.expected);
        let channels = expected.map_or(0, |run| u8::try_from(run.channels).unwrap_or(u8::MAX));
        let mut descriptor = EventDescriptor::new(kind, self.api);
        let profiler = self.plugins.profiler.as_ref();
        descriptor.rank = profiler.map_or(0, |profiler| profiler.rank);
        if kind == event::P2P {
            descriptor.details.p2p = P2pDetails {
                func,
                buffer: match arguments.sends {
                    true => arguments.sendbuff.cast_mut(),
                    false => arguments.recvbuff,
                },
                datatype,
                count: call.count,
                peer: arguments.peer,
                channels,
                group,
            };
            return descriptor;
        }
        let algorithm = expected.map_or(c"UNKNOWN", |run| names::algorithm(run.algorithm));
        let protocol = expected.map_or(c"UNKNOWN", |run| names::protocol(run.protocol));
        descriptor.details.coll = CollDetails {
            sequence: profiler.map_or(0, |profiler| profiler.next_call(call.collective)),
            func,
            sendbuff: arguments.sendbuff,
            recvbuff: arguments.recvbuff,
            count: call.count,
            root: arguments.root,
            datatype,
            channels,
            warps: 0,
            algorithm: algorithm.as_ptr(),
            protocol: protocol.as_ptr(),
            group,
        };
        descriptor
    }
}

impl EventArguments {
    /// Returns the event of the function that the program has called.
    fn api_event(&self, call: &Call, captured: bool, parent: *mut c_void) -> EventDescriptor {
        let func = names::func(call.collective, self.sends).as_ptr();
        let datatype = names::datatype(call.dtype).as_ptr();
        let (count, stream) = (call.count, self.stream);
        if call.collective.is_message() {
            let mut descriptor = EventDescriptor::new(event::P2P_API, parent);
            descriptor.details.p2p_api = P2pApiDetails {
                func,
                count,
                datatype,
                stream,
                captured,
            };
            return descriptor;
        }
        EventDescriptor {
            details: EventDetails {
                coll_api: CollApiDetails {
                    func,
                    count,
                    datatype,
                    root: self.root,
                    stream,
                    captured,
                },
            },
            ..EventDescriptor::new(event::COLL_API, parent)
        }
    }
}
