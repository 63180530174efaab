//! State of a [`Fabric`]: devices, and the objects of their users.

use super::super::types::*;
use super::{Fabric, FakeDevice};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::{c_int, c_uint};
use std::os::fd::OwnedFd;
use std::sync::Weak;
use std::thread::ThreadId;

/// A device in the device list. The C struct is the first field, so a pointer to it is a pointer to
/// the whole struct.
#[repr(C)]
pub(super) struct ListedDevice {
    pub base: IbvDevice,
    pub index: usize,
}

/// An open device. The C struct is the first field, so a pointer to it is a pointer to the whole
/// struct.
#[repr(C)]
pub(super) struct Context {
    pub base: IbvContext,
    pub fabric: Weak<Fabric>,
    pub device: usize,
    /// Descriptor of asynchronous events; `base.async_fd` is its number.
    pub event_fd: OwnedFd,
}

/// A completion channel, with the descriptor of its events.
#[repr(C)]
pub(super) struct Channel {
    pub base: IbvCompChannel,
    pub event_fd: OwnedFd,
    /// Addresses of completion queues whose events have not been read.
    pub waiting: VecDeque<usize>,
}

/// A memory region that `ibv_reg_mr` registered in a domain.
pub(super) struct Memory {
    pub domain: usize,
    pub address: u64,
    pub bytes: usize,
    pub access: c_int,
}

/// A completion and the send work that it confirms. The work is given by the number of the queue
/// pair, and the number of requests posted up to it.
pub(super) type Completion = (IbvWc, Option<(u32, u64)>);

/// State of a simulated completion queue.
pub(super) struct Completions {
    pub context: usize,
    pub channel: usize,
    pub capacity: usize,
    pub entries: VecDeque<Completion>,
    pub armed: bool,
    pub overrun: bool,
    /// Number of events that were delivered and not acknowledged.
    pub unacknowledged: u32,
}

/// A send work request that was posted and has not been performed. It holds its inline data, as a
/// device's queue does.
pub(super) struct Posted {
    pub id: u64,
    pub opcode: c_uint,
    pub signaled: bool,
    pub immediate: u32,
    pub remote: u64,
    pub rkey: u32,
    pub data: Data,
}

/// Data of a send work request.
pub(super) enum Data {
    /// Inline data, copied when the request was posted.
    Inline(Vec<u8>),
    /// Pieces of registered memory, read when the request is performed.
    Pieces(Vec<IbvSge>),
}

/// State of a simulated queue pair.
pub(super) struct Pair {
    pub creator: ThreadId,
    pub domain: usize,
    pub device: usize,
    pub send_queue: usize,
    pub recv_queue: usize,
    pub cap: IbvQpCap,
    pub state: c_uint,
    pub peer: u32,
    pub access: c_uint,
    pub attributes: IbvQpAttr,
    /// Number of send requests posted since the pair was made.
    pub posted: u64,
    /// Number of send requests whose queue entries are free again. A polled completion frees its
    /// own entry and all earlier ones.
    pub freed: u64,
    pub pending: VecDeque<Posted>,
    /// Identifiers of posted receive requests.
    pub receives: VecDeque<u64>,
}

/// State of a fabric.
pub(super) struct State {
    pub devices: Vec<FakeDevice>,
    /// Addresses of boxed [`Context`]s.
    pub contexts: Vec<usize>,
    /// Events that a context has not yet read, by the context's address.
    pub events: HashMap<usize, VecDeque<(c_uint, usize)>>,
    /// Address of each protection domain's context, by the domain's address.
    pub domains: HashMap<usize, usize>,
    pub channels: HashMap<usize, usize>,
    pub regions: HashMap<u32, Memory>,
    pub queues: HashMap<usize, Completions>,
    pub pairs: BTreeMap<u32, Pair>,
    pub holds_work: bool,
    pub failures: HashMap<&'static str, (usize, usize, c_int)>,
    pub work_failures: Vec<(usize, c_uint)>,
    pub calls: HashMap<&'static str, usize>,
    /// Fork support that the library reports; `None` for a library too old to report it.
    pub fork: Option<c_uint>,
    /// Whether `fork_init` has protected registered memory from forks.
    pub is_fork_protected: bool,
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
            holds_work: false,
            failures: HashMap::new(),
            work_failures: Vec::new(),
            calls: HashMap::new(),
            fork: Some(IBV_FORK_UNNEEDED),
            is_fork_protected: false,
            next: 16,
        }
    }

    /// Returns a number that no other object has.
    pub fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// Counts a call of `function`. Returns the error number if a test has requested that the call
    /// fails.
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

    /// Raises an event on every context of `device`.
    pub fn raise_event(&mut self, device: usize, event: c_uint, element: usize) {
        let contexts = self.contexts.clone();
        for context in contexts {
            // SAFETY: `open_device` and `close_device` keep only open contexts in the list, under
            // the lock.
            let there = unsafe { &*(context as *const Context) };
            if there.device == device {
                self.events
                    .entry(context)
                    .or_default()
                    .push_back((event, element));
                signal(&there.event_fd);
            }
        }
    }

    /// Adds a completion to a queue. A full queue overruns and becomes unusable, as on a device.
    pub fn complete(&mut self, queue: usize, completion: Completion) {
        let Some(there) = self.queues.get_mut(&queue) else {
            return;
        };
        if there.entries.len() == there.capacity {
            there.overrun = true;
            let context = there.context;
            // SAFETY: `close_device` refuses to close a context that has queues.
            let device = unsafe { (*(context as *const Context)).device };
            return self.raise_event(device, IBV_EVENT_CQ_ERR, queue);
        }
        there.entries.push_back(completion);
        if std::mem::take(&mut there.armed) && there.channel != 0 {
            // SAFETY: `destroy_comp_channel` refuses to destroy a channel that has queues, and
            // channels are used only under the lock.
            let channel = unsafe { &mut *(there.channel as *mut Channel) };
            channel.waiting.push_back(queue);
            signal(&channel.event_fd);
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

/// Creates an eventfd semaphore, whose descriptor can be polled.
pub(super) fn event_fd() -> Option<OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: `fd` is a new descriptor that nothing else owns.
    unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE);
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
    }
}

fn signal(fd: &OwnedFd) {
    use std::os::fd::AsRawFd;
    let one = 1_u64;
    // SAFETY: the call reads the 8 bytes of `one`.
    unsafe { libc::write(fd.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// Decrements the semaphore. If it is zero and the descriptor is non-blocking, returns false and
/// sets `errno`.
pub(super) fn take(fd: c_int) -> bool {
    let mut one = 0_u64;
    // SAFETY: the call writes the 8 bytes of `one`.
    unsafe { libc::read(fd, (&raw mut one).cast(), 8) == 8 }
}
