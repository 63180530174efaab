//! State of the simulated machine, and the rules of access to its memory.

use super::super::types::*;
use super::Launch;
use crate::sys::memory::{Mapping, sealed_memfd};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{c_int, c_void};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of memory of each device.
pub(super) const DEVICE_BYTES: usize = 1 << 30;

/// A kernel that a test registered.
#[derive(Clone)]
pub(super) struct Kernel {
    /// Bytes of the kernel's parameter.
    pub bytes: usize,
    pub run: Arc<dyn Fn(&Launch<'_>) -> CuResult + Send + Sync>,
}

pub(super) struct Context {
    pub process: usize,
    pub device: CUdevice,
    pub retained: usize,
    pub peers: HashSet<usize>,
    pub stack: usize,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Device,
    /// Device memory of the stream-ordered allocator. `cuMemFree` does not free it, and no other process can
    /// map it.
    Pooled,
    Pinned,
    Registered,
    /// Device memory of another process, mapped by an IPC handle.
    Imported,
}

impl Kind {
    /// Returns whether the memory is device memory that the process itself allocated.
    pub fn is_device(self) -> bool {
        matches!(self, Kind::Device | Kind::Pooled)
    }
}

/// A range of memory that one process has allocated, imported or registered with its driver.
pub(super) struct Area {
    pub process: usize,
    pub context: usize,
    pub kind: Kind,
    pub bytes: usize,
    /// Number of the allocation; an imported area has its owner's number.
    pub id: u64,
    pub file: Option<Arc<OwnedFd>>,
    /// Keeps the area mapped; `None` for registered memory, which the test owns.
    pub _mapping: Option<Mapping>,
}

pub(super) struct Stream {
    pub context: usize,
    /// Unique number of the stream, which is never reused.
    pub id: u64,
    pub capture: Option<Capture>,
}

/// State of a stream that is being captured into a graph.
#[derive(Clone, Copy)]
pub(super) struct Capture {
    /// The graph that the capture records.
    pub graph: usize,
    pub mode: CUstreamCaptureMode,
    /// Whether the capture is still valid. A call that the capture forbids makes it invalid.
    pub is_valid: bool,
}

impl Capture {
    /// Returns whether the capture forbids unsafe calls on all threads of the process.
    pub fn is_global(&self) -> bool {
        self.mode == CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL
    }
}

pub(super) struct Event {
    pub context: usize,
    pub timed: bool,
    pub recorded: Option<Instant>,
}

#[derive(Clone)]
pub(super) enum Work {
    /// Waits, in a replay, for an event that is recorded outside the graph.
    Wait(usize),
    Set(u64, u8, usize),
    Copy(u64, u64, usize),
    /// Calls a function of the host with data at an address.
    Call(unsafe extern "C" fn(*mut c_void), usize),
    Launch {
        kernel: String,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        args: Vec<u8>,
    },
}

#[derive(Clone, Default)]
pub(super) struct Graph {
    pub process: usize,
    pub context: usize,
    /// Recorded work in order. The work at index i is the graph's node i + 1.
    pub work: Vec<Work>,
    /// Nodes on which the next captured work depends.
    pub tips: Vec<usize>,
    /// Event-record nodes by node number: the event, and the nodes on which the node depends.
    pub marks: BTreeMap<usize, (usize, Vec<usize>)>,
    /// User objects of which the graph holds a reference.
    pub users: Vec<usize>,
}

impl Graph {
    pub fn push(&mut self, work: Work) {
        self.work.push(work);
        self.tips = vec![self.work.len()];
    }
}

/// A user object. Its `destroy` function runs when its last reference is released.
pub(super) struct User {
    pub data: usize,
    pub destroy: unsafe extern "C" fn(*mut c_void),
    pub references: u32,
}

pub(super) struct State {
    next: usize,
    pub devices: usize,
    pub driver_version: c_int,
    /// PTX version for which all kernels count as compiled.
    pub compiled_for: c_int,
    pub refused: HashSet<(CUdevice, CUdevice)>,
    pub kernels: BTreeMap<String, Kernel>,
    pub contexts: HashMap<usize, Context>,
    pub areas: BTreeMap<(usize, u64), Area>,
    pub streams: HashMap<usize, Stream>,
    /// Handles of streams that belong to green contexts.
    pub green_streams: HashSet<usize>,
    /// Handles of destroyed streams. New streams reuse them, as with a driver.
    pub free_handles: Vec<usize>,
    pub events: HashMap<usize, Event>,
    /// Context in which each module is loaded.
    pub modules: HashMap<usize, usize>,
    pub functions: HashMap<usize, (usize, String)>,
    pub graphs: HashMap<usize, Graph>,
    pub execs: HashMap<usize, Graph>,
    pub users: HashMap<usize, User>,
    /// Requested failures, by process and function: the number of calls that first succeed, the
    /// number of calls that then fail, and their result code.
    pub failures: HashMap<(usize, &'static str), (usize, usize, CuResult)>,
    pub calls: HashMap<(usize, &'static str), usize>,
    pub hanging: HashSet<usize>,
}

impl State {
    pub fn new(devices: usize) -> State {
        State {
            next: 0x1000,
            devices,
            driver_version: 13_000,
            compiled_for: 90,
            refused: HashSet::new(),
            kernels: BTreeMap::new(),
            contexts: HashMap::new(),
            areas: BTreeMap::new(),
            streams: HashMap::new(),
            green_streams: HashSet::new(),
            free_handles: Vec::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            graphs: HashMap::new(),
            execs: HashMap::new(),
            users: HashMap::new(),
            failures: HashMap::new(),
            calls: HashMap::new(),
            hanging: HashSet::new(),
        }
    }

    /// Returns a new number, for a handle or an identity.
    pub fn next_id(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    /// Returns the area of a process that contains the `bytes` bytes at `address`, and the area's first
    /// address.
    pub fn area(&self, process: usize, address: u64, bytes: usize) -> Option<(u64, &Area)> {
        let ((owner, start), area) = self.areas.range(..=(process, address)).next_back()?;
        let inside = *owner == process
            && (address - start) as usize <= area.bytes
            && bytes <= area.bytes - (address - start) as usize
            && address - start < area.bytes as u64;
        inside.then_some((*start, area))
    }

    /// Returns whether the GPU of `context` can read and write the bytes.
    pub fn can_reach(&self, process: usize, context: usize, address: u64, bytes: usize) -> bool {
        let Some((_, area)) = self.area(process, address, bytes) else {
            return false;
        };
        match area.kind {
            Kind::Pinned | Kind::Registered => true,
            Kind::Device | Kind::Pooled | Kind::Imported => {
                let peers = self.contexts.get(&context).map(|context| &context.peers);
                area.context == context || peers.is_some_and(|peers| peers.contains(&area.context))
            }
        }
    }

    /// Returns whether a copy in `context` may access the bytes. Host memory that is not registered with the
    /// driver is allowed; memory of other processes is not.
    pub fn can_copy(&self, process: usize, context: usize, address: u64, bytes: usize) -> bool {
        let known = self.areas.iter().any(|((_, start), area)| {
            *start < address + bytes as u64 && address < *start + area.bytes as u64
        });
        !known || self.can_reach(process, context, address, bytes)
    }

    /// Allocates memory that other processes can map.
    pub fn allocate(
        &mut self,
        process: usize,
        context: usize,
        kind: Kind,
        bytes: usize,
    ) -> Result<u64, CuResult> {
        let device = |state: &State, context: &usize| state.contexts[context].device;
        let used: usize = self
            .areas
            .values()
            .filter(|area| area.kind.is_device())
            .filter(|area| device(self, &area.context) == device(self, &context))
            .map(|area| area.bytes)
            .sum();
        if bytes == 0 {
            return Err(CuResult::INVALID_VALUE);
        }
        if kind.is_device() && bytes > DEVICE_BYTES - used {
            return Err(CuResult::OUT_OF_MEMORY);
        }
        let file = Arc::new(sealed_memfd(bytes).map_err(|_| CuResult::OUT_OF_MEMORY)?);
        let id = self.next_id() as u64;
        self.map(process, context, kind, bytes, id, file)
    }

    /// Maps memory into a process, at a new address each time.
    pub fn map(
        &mut self,
        process: usize,
        context: usize,
        kind: Kind,
        bytes: usize,
        id: u64,
        file: Arc<OwnedFd>,
    ) -> Result<u64, CuResult> {
        let mapping = Mapping::shared(&file, bytes).map_err(|_| CuResult::OUT_OF_MEMORY)?;
        let start = mapping.base().as_ptr().addr() as u64;
        if kind.is_device() {
            // The contents of new device memory are undefined, so a nonzero pattern exposes code
            // that reads them.
            // SAFETY: the mapping is new, `bytes` long, and no other code has its address.
            unsafe { mapping.base().write_bytes(0xa5, bytes) };
        }
        let area = Area {
            process,
            context,
            kind,
            bytes,
            id,
            file: Some(file),
            _mapping: Some(mapping),
        };
        self.areas.insert((process, start), area);
        Ok(start)
    }

    /// Returns whether any stream of the process is in a capture of global mode, which restricts all threads.
    pub fn captured_globally(&self, process: usize) -> bool {
        self.streams.values().any(|stream| {
            self.contexts[&stream.context].process == process
                && stream.capture.is_some_and(|capture| capture.is_global())
        })
    }

    /// Describes the objects that a process has created and not destroyed.
    pub fn leftovers(&self, process: usize) -> Vec<String> {
        let is_own = |context: &usize| {
            self.contexts
                .get(context)
                .is_some_and(|context| context.process == process)
        };
        let mut found = Vec::new();
        let mut report = |what: &str, count: usize| {
            if count > 0 {
                found.push(format!("{count} {what}"));
            }
        };
        let areas = |kind| {
            self.areas
                .values()
                .filter(|area| area.process == process && area.kind == kind)
                .count()
        };
        report("device allocations", areas(Kind::Device));
        report("queued device allocations", areas(Kind::Pooled));
        report("pinned allocations", areas(Kind::Pinned));
        report("registrations", areas(Kind::Registered));
        report("imports", areas(Kind::Imported));
        let streams = self.streams.values().filter(|s| is_own(&s.context));
        report("streams", streams.count());
        report(
            "events",
            self.events.values().filter(|e| is_own(&e.context)).count(),
        );
        report(
            "modules",
            self.modules.values().filter(|c| is_own(c)).count(),
        );
        let graphs = self.graphs.values().chain(self.execs.values());
        report("graphs", graphs.filter(|g| g.process == process).count());
        let contexts = self.contexts.values();
        let retained = contexts
            .filter(|c| c.process == process)
            .map(|c| c.retained);
        report("retained contexts", retained.sum());
        found
    }
}
