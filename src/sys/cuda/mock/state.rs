//! What the simulated machine has, and who may touch what.

use super::super::types::*;
use super::Launch;
use crate::sys::memory::{Mapping, sealed_memfd};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// Memory of one device.
pub(super) const DEVICE_BYTES: usize = 1 << 30;

#[derive(Clone)]
pub(super) struct Kernel {
    pub bytes: usize,
    pub run: Arc<dyn Fn(&Launch<'_>) -> CuResult + Send + Sync>,
}

pub(super) struct Context {
    pub process: usize,
    pub device: CuDevice,
    pub retained: usize,
    pub peers: HashSet<usize>,
    pub stack: usize,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Device,
    /// Of the device as well, from the allocator that goes by streams. The driver's other one does
    /// not free it, and no other process gets it.
    Pooled,
    Pinned,
    Registered,
    /// Another process's device memory.
    Imported,
}

impl Kind {
    /// Whether it is this process's memory of a device.
    pub fn is_device(self) -> bool {
        matches!(self, Kind::Device | Kind::Pooled)
    }
}

/// A piece of memory that a process's driver knows.
pub(super) struct Area {
    pub process: usize,
    pub context: usize,
    pub kind: Kind,
    pub bytes: usize,
    /// The allocation's number; importers have the owner's.
    pub id: u64,
    pub file: Option<Arc<OwnedFd>>,
    /// Keeps it mapped; none for memory that was only registered.
    pub _mapping: Option<Mapping>,
}

pub(super) struct Stream {
    pub context: usize,
    /// No other stream's, before or after.
    pub id: u64,
    /// The graph that is being recorded, in which mode, and whether that still can succeed.
    pub capture: Option<(usize, c_uint, bool)>,
}

pub(super) struct Event {
    pub context: usize,
    pub timed: bool,
    pub recorded: Option<Instant>,
}

#[derive(Clone)]
pub(super) enum Work {
    /// In a replay, for an event that is marked outside of the graph.
    Wait(CuEvent),
    Set(u64, u8, usize),
    Copy(u64, u64, usize),
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
    /// Node number n, from 1, is the n-th of them.
    pub work: Vec<Work>,
    /// The last of them, which what comes next is behind.
    pub tips: Vec<CuGraphNode>,
    /// Nodes that record events, and what they are behind.
    pub marks: BTreeMap<usize, (CuEvent, Vec<CuGraphNode>)>,
    pub users: Vec<usize>,
}

impl Graph {
    pub fn push(&mut self, work: Work) {
        self.work.push(work);
        self.tips = vec![CuGraphNode(self.work.len())];
    }
}

pub(super) struct User {
    pub data: usize,
    pub destroy: unsafe extern "C" fn(*mut c_void),
    pub references: u32,
}

pub(super) struct State {
    next: usize,
    pub devices: usize,
    pub driver_version: c_int,
    /// PTX version of all code.
    pub compiled_for: c_int,
    pub refused: HashSet<(CuDevice, CuDevice)>,
    pub kernels: BTreeMap<String, Kernel>,
    pub contexts: HashMap<usize, Context>,
    pub areas: BTreeMap<(usize, u64), Area>,
    pub streams: HashMap<usize, Stream>,
    /// Those of them that are of green contexts.
    pub green_streams: HashSet<usize>,
    /// Handles of streams that were destroyed, which the next ones get, as a driver may do.
    pub spare_streams: Vec<usize>,
    pub events: HashMap<usize, Event>,
    /// Their contexts.
    pub modules: HashMap<usize, usize>,
    pub functions: HashMap<usize, (usize, String)>,
    pub graphs: HashMap<usize, Graph>,
    pub execs: HashMap<usize, Graph>,
    pub users: HashMap<usize, User>,
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
            spare_streams: Vec::new(),
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

    /// A number that was not given out before: a handle, or an identity.
    pub fn number(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    /// The area of a process that holds all of `bytes` bytes at `address`.
    pub fn area(&self, process: usize, address: u64, bytes: usize) -> Option<(u64, &Area)> {
        let ((owner, start), area) = self.areas.range(..=(process, address)).next_back()?;
        let inside = *owner == process
            && (address - start) as usize <= area.bytes
            && bytes <= area.bytes - (address - start) as usize
            && address - start < area.bytes as u64;
        inside.then_some((*start, area))
    }

    /// Whether the GPU of `context` can read and write there.
    pub fn reaches(&self, process: usize, context: usize, address: u64, bytes: usize) -> bool {
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

    /// Whether a copy by `context` can: host memory that the driver does not know is fine, other
    /// processes' memory is not.
    pub fn copies(&self, process: usize, context: usize, address: u64, bytes: usize) -> bool {
        let known = self.areas.iter().any(|((_, start), area)| {
            *start < address + bytes as u64 && address < *start + area.bytes as u64
        });
        !known || self.reaches(process, context, address, bytes)
    }

    /// Allocates `bytes` that can be mapped again.
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
        let id = self.number() as u64;
        self.map(process, context, kind, bytes, id, file)
    }

    /// Maps memory into a process, each time at another address.
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
            // What new device memory holds is not to be relied on.
            // SAFETY: just mapped, and nobody has it yet.
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

    /// Whether some thread of the process records a graph and forbids other threads what is
    /// ordered with its stream.
    pub fn captured_globally(&self, process: usize) -> bool {
        self.streams.values().any(|stream| {
            self.contexts[&stream.context].process == process
                && matches!(stream.capture, Some((_, 0, _)))
        })
    }

    pub fn leftovers(&self, process: usize) -> Vec<String> {
        let ours = |context: &usize| {
            self.contexts
                .get(context)
                .is_some_and(|context| context.process == process)
        };
        let mut found = Vec::new();
        let mut say = |what: &str, count: usize| {
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
        say("device allocations", areas(Kind::Device));
        say("queued device allocations", areas(Kind::Pooled));
        say("pinned allocations", areas(Kind::Pinned));
        say("registrations", areas(Kind::Registered));
        say("imports", areas(Kind::Imported));
        let streams = self.streams.values().filter(|s| ours(&s.context));
        say("streams", streams.count());
        say(
            "events",
            self.events.values().filter(|e| ours(&e.context)).count(),
        );
        say("modules", self.modules.values().filter(|c| ours(c)).count());
        let graphs = self.graphs.values().chain(self.execs.values());
        say("graphs", graphs.filter(|g| g.process == process).count());
        let contexts = self.contexts.values();
        let retained = contexts
            .filter(|c| c.process == process)
            .map(|c| c.retained);
        say("retained contexts", retained.sum());
        found
    }
}
