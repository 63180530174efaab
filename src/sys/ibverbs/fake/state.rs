//! What a fabric consists of.

use super::super::types::*;
use super::{Fabric, FakeDevice};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::{c_int, c_uint};
use std::os::fd::OwnedFd;
use std::sync::Weak;
use std::thread::ThreadId;

/// A device as it is listed; `index` leads back to it from the C struct.
#[repr(C)]
pub(super) struct Listed {
    pub base: IbvDevice,
    pub index: usize,
}

/// An open device, as C sees it, and what leads back from it.
#[repr(C)]
pub(super) struct Context {
    pub base: IbvContext,
    pub fabric: Weak<Fabric>,
    pub device: usize,
    /// Behind `async_fd`.
    pub event_fd: OwnedFd,
}

/// A completion channel, and the descriptor behind it.
#[repr(C)]
pub(super) struct Channel {
    pub base: IbvCompChannel,
    pub event_fd: OwnedFd,
    /// Addresses of the queues that have something to tell.
    pub waiting: VecDeque<usize>,
}

/// Registered memory.
pub(super) struct Memory {
    pub domain: usize,
    pub address: u64,
    pub bytes: usize,
    pub access: c_int,
}

/// A completion and the work that it frees: (queue pair, work posted until then).
pub(super) type Completion = (IbvWc, Option<(u32, u64)>);

/// A completion queue.
pub(super) struct Completions {
    pub context: usize,
    pub channel: usize,
    pub capacity: usize,
    pub entries: VecDeque<Completion>,
    pub armed: bool,
    pub overrun: bool,
    /// Events that were got and not acknowledged.
    pub unacknowledged: u32,
}

/// Work that is posted and not yet done. Inline data is in it, as in a device's queue.
pub(super) struct Posted {
    pub id: u64,
    pub opcode: c_uint,
    pub signaled: bool,
    pub immediate: u32,
    pub remote: u64,
    pub rkey: u32,
    pub data: Data,
}

/// What a piece of work sends.
pub(super) enum Data {
    /// Copied when it was posted.
    Inline(Vec<u8>),
    /// Read when it runs.
    Pieces(Vec<IbvSge>),
}

/// A queue pair.
pub(super) struct Pair {
    pub maker: ThreadId,
    pub domain: usize,
    pub device: usize,
    pub send_queue: usize,
    pub recv_queue: usize,
    pub cap: IbvQpCap,
    pub state: c_uint,
    pub peer: u32,
    pub access: c_uint,
    pub attributes: IbvQpAttr,
    /// Work that was ever posted.
    pub posted: u64,
    /// Work whose places are free again: what precedes a completion that was polled.
    pub freed: u64,
    pub pending: VecDeque<Posted>,
    /// Identifiers of the room for what comes.
    pub room: VecDeque<u64>,
}

/// Everything.
pub(super) struct State {
    pub devices: Vec<FakeDevice>,
    /// Addresses of boxed [`Context`]s.
    pub contexts: Vec<usize>,
    /// Events that a context has not got.
    pub events: HashMap<usize, VecDeque<(c_uint, usize)>>,
    /// By address; the context's.
    pub domains: HashMap<usize, usize>,
    pub channels: HashMap<usize, usize>,
    pub regions: HashMap<u32, Memory>,
    pub queues: HashMap<usize, Completions>,
    pub pairs: BTreeMap<u32, Pair>,
    pub holds: bool,
    pub failures: HashMap<&'static str, (usize, usize, c_int)>,
    pub work_failures: Vec<(usize, c_uint)>,
    pub calls: HashMap<&'static str, usize>,
    /// What a library says of forks that is new enough to know.
    pub fork: Option<c_uint>,
    /// Whether registered memory is kept from children.
    pub keeps_from_children: bool,
    next: u32,
}

impl State {
    pub fn new(devices: Vec<FakeDevice>) -> State {
        State {
            devices,
            contexts: Vec::new(),
            events: HashMap::new(),
            domains: HashMap::new(),
            channels: HashMap::new(),
            regions: HashMap::new(),
            queues: HashMap::new(),
            pairs: BTreeMap::new(),
            holds: false,
            failures: HashMap::new(),
            work_failures: Vec::new(),
            calls: HashMap::new(),
            fork: Some(IBV_FORK_UNNEEDED),
            keeps_from_children: false,
            next: 16,
        }
    }

    /// A number that nothing else has.
    pub fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// Counts a call; `Err` has the error number that it is to fail with.
    pub fn enter(&mut self, function: &'static str) -> Result<(), c_int> {
        *self.calls.entry(function).or_default() += 1;
        match self.failures.get_mut(function) {
            Some((0, times, error)) if *times > 0 => {
                *times -= 1;
                Err(*error)
            }
            Some((skip, ..)) => {
                *skip = skip.saturating_sub(1);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Tells every context of `device` of an event.
    pub fn tell(&mut self, device: usize, event: c_uint, element: usize) {
        let contexts = self.contexts.clone();
        for context in contexts {
            // SAFETY: contexts in the list are alive, and only read here.
            let there = unsafe { &*(context as *const Context) };
            if there.device == device {
                self.events
                    .entry(context)
                    .or_default()
                    .push_back((event, element));
                ring(&there.event_fd);
            }
        }
    }

    /// Adds a completion; an overrun queue is broken, as a device would leave it.
    pub fn complete(&mut self, queue: usize, completion: Completion) {
        let Some(there) = self.queues.get_mut(&queue) else {
            return;
        };
        if there.entries.len() == there.capacity {
            there.overrun = true;
            let context = there.context;
            // SAFETY: queues do not outlive their contexts.
            let device = unsafe { (*(context as *const Context)).device };
            return self.tell(device, IBV_EVENT_CQ_ERR, queue);
        }
        there.entries.push_back(completion);
        if std::mem::take(&mut there.armed) && there.channel != 0 {
            // SAFETY: channels are not destroyed before their queues, and only used under the lock.
            let channel = unsafe { &mut *(there.channel as *mut Channel) };
            channel.waiting.push_back(queue);
            ring(&channel.event_fd);
        }
    }

    pub fn leftovers(&self) -> Vec<String> {
        let counts = [
            ("contexts", self.contexts.len()),
            ("protection domains", self.domains.len()),
            ("completion channels", self.channels.len()),
            ("memory regions", self.regions.len()),
            ("completion queues", self.queues.len()),
            ("queue pairs", self.pairs.len()),
        ];
        let left = counts.into_iter().filter(|(_, count)| *count > 0);
        left.map(|(what, count)| format!("{count} {what}"))
            .collect()
    }
}

/// A counter that can be waited for.
pub(super) fn event_fd() -> Option<OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: a new descriptor, which nobody else has.
    unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE);
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
    }
}

fn ring(fd: &OwnedFd) {
    use std::os::fd::AsRawFd;
    let one = 1_u64;
    // SAFETY: eight readable bytes.
    unsafe { libc::write(fd.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// Takes one from the counter: `false`, with the error number set, if there is none and the
/// descriptor does not block.
pub(super) fn take(fd: c_int) -> bool {
    let mut one = 0_u64;
    // SAFETY: eight writable bytes.
    unsafe { libc::read(fd, (&raw mut one).cast(), 8) == 8 }
}
